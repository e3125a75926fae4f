"""Rows of csv, tsv, jsonl and parquet files, which must be in UTF-8."""

from __future__ import annotations

import codecs
import csv
import errno
import io
import json
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from paceline.program import library
from paceline.spec.errors import DataError
from paceline.spec.formatting import pluralize
from paceline.train import files

IsHeader = Callable[[Sequence[str]], bool]
"""Whether the cells of the first row are names of columns."""
_DELIMITERS = (",", ";", "\t", "|")


def read_lines(path: Path) -> list[str]:
    """Reads lines that end with line feeds: texts may hold other characters that end lines."""
    try:
        content = files.read_bytes_limited(path, files.max_content_bytes())
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise DataError(
                f"{path} is too large to be read into memory",
                found=f"{path.stat().st_size >> 20:,} MiB; the limit is a quarter of this machine's"
                f" memory, {files.max_content_bytes() >> 20:,} MiB",
                remedy="use a part of it; in a script, train.ShardedDataset reads shards of any"
                " total size",
            ) from None
        raise DataError(f"{path} cannot be read", found=str(error)) from None
    return split_lines(path, content)


def split_lines(path: Path, content: bytes) -> list[str]:
    """Splits the content of a file into lines as :func:`read_lines` does."""
    try:
        text = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()
    except UnicodeDecodeError:
        if command := decompression(path, content):
            raise DataError(
                f"{path} is compressed", found="its first bytes", remedy=f"decompress it: {command}"
            ) from None
        raise DataError(
            f"{path} is not in UTF-8",
            found=_locate_undecodable(content),
            remedy=conversion_to_utf8(content),
        ) from None
    lines = text.split("\n")
    return lines[:-1] if lines[-1] == "" else lines


_COMPRESSED = {
    ".gz": (b"\x1f\x8b", "gunzip"),
    ".bz2": (b"BZh", "bunzip2"),
    ".xz": (b"\xfd7zXZ", "unxz"),
    ".zst": (b"\x28\xb5\x2f\xfd", "unzstd"),
}
"""First bytes of compressed files, and what decompresses them, by suffix."""


def decompression(path: Path, content: bytes = b"") -> str:
    """Returns the command that decompresses a file; empty if it is not compressed.

    Args:
        content: Its first bytes; without them, its name decides.
    """
    suffix = path.suffix.lower()
    for standard_suffix, (magic, program) in _COMPRESSED.items():
        if content.startswith(magic) if content else suffix == standard_suffix:
            target = shlex.quote(str(path.with_suffix(""))) if suffix == standard_suffix else "NEW"
            return f"{program} < {shlex.quote(str(path))} > {target}"
    return ""


def conversion_to_utf8(content: bytes) -> str:
    """Says how to convert a text file, by its first bytes."""
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    encoding = "UTF-16" if is_utf16 else "WINDOWS-1252"
    return f"convert it: iconv -f {encoding} -t UTF-8 OLD > NEW"


def _locate_undecodable(content: bytes) -> str:
    """Describes the first line that is not in UTF-8."""
    for number, line in enumerate(content.split(b"\n"), 1):
        try:
            line.decode()
        except UnicodeDecodeError:
            return f"line {number}: {line.decode('utf-8', 'replace').strip()[:80]!r}"
    return "bytes that are not text"


def parse_json(text: str) -> Any:
    """Parses JSON; ValueError also for an object with the same key twice: one would be lost."""
    return json.loads(text, object_pairs_hook=_unique_keys)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {repeated!r} is there twice: {[*pairs]}"[:200])
    return values


def read_jsonl(path: Path) -> list[Any]:
    """Reads one JSON object a line; DataError names the line that is none.

    Empty lines at the end are left out.
    """
    rows, lines = [], read_lines(path)
    while lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
            if "\\ud" in line.lower():  # reject half of a surrogate pair
                json.dumps(row, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} line {number} is not valid JSON", found=str(error)) from None
        if not isinstance(row, dict):
            raise DataError(f"{path} line {number} is not a JSON object", found=line[:80])
        rows.append(row)
    return rows


def read_parquet(path: Path, name: str = "") -> list[Any]:
    """Reads the rows of a parquet file as dictionaries; ``name`` is the user's path of it."""
    parquet = library("pyarrow.parquet", f"{name or path} is read")
    try:
        rows: list[Any] = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's errors are of both kinds
        raise DataError(f"{name or path} cannot be read", found=str(error)[:200]) from None
    return rows


_OBJECT_READERS: dict[str, Callable[[Path], list[Any]]] = {
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
}
TABLE_FILES = (".csv", ".tsv", *_OBJECT_READERS)
"""Suffixes of files whose texts are in a column."""


def has_objects(path: Path) -> bool:
    """Tells whether the rows of a file are objects, not lines with a delimiter."""
    return path.suffix.lower() in _OBJECT_READERS


def first_row(path: Path) -> int:
    """Returns the number of the first row of values."""
    return 1 if has_objects(path) else 2


def read_rows(
    path: Path, delimiter: str, is_header: IsHeader, is_certain: IsHeader | None = None,
    has_option: bool = False,
) -> list[Any]:  # fmt: skip
    """Reads the rows as dictionaries, or as lists of cells if a table has no header.

    Args:
        is_certain: Whether names prove a header, which a text with a delimiter in it may look like;
            by default, all that ``is_header`` accepts do.
        has_option: Whether the command has ``--delimiter``, which errors may then suggest.
    """
    if reader := _OBJECT_READERS.get(path.suffix.lower()):
        return reader(path)
    lines = [f"{line}\n" for line in read_lines(path)]
    default = cell_delimiter(path, delimiter)
    is_certain = is_certain or is_header
    delimiter = _detect_delimiter(lines, default, is_header, is_certain)
    rows = parse_rows(path, lines, delimiter, has_option)
    header = [cell.strip() for cell in rows[0]] if rows else []
    if not rows or not is_header(header):
        return rows
    check_header(path, header)
    if len(rows) == 1:
        raise DataError(f"{path} has a header and no rows", found=f"line 1: {lines[0][:80]!r}")
    min_columns = 1 if is_certain(header) else len(header)
    for number, row in enumerate(rows[1:], 2):
        if any(row[len(header) :]) or len(row) < min_columns:
            raise DataError(
                f"{path} row {number} has {'more' if row[len(header) :] else 'fewer'} columns than"
                " the header",
                found=f"{pluralize(len(row), 'column')}, {len(header)} in the header",
                remedy=(delimiter_remedy(header) if has_option else "")
                or "a cell with a delimiter in it needs quotes",
            )
    return [dict(zip(header, row, strict=False)) for row in rows[1:]]


def _detect_delimiter(
    lines: Sequence[str], default: str, is_header: IsHeader, is_certain: IsHeader
) -> str:
    """Returns the first delimiter with which the first line is a header, else the default.

    If the header is not certain, a delimiter other than the default has to divide all rows alike.
    """
    for delimiter in (default, *_DELIMITERS):
        names = [cell.strip() for row in _split(lines[:1], delimiter) for cell in row]
        if is_certain(names) or (
            is_header(names) and (delimiter == default or _divides_alike(lines, delimiter))
        ):
            return delimiter
    return default


def _divides_alike(lines: Sequence[str], delimiter: str) -> bool:
    """Tells whether there are several rows, of the same number of cells."""
    sizes = [len(row) for row in _split(lines, delimiter) if any(row)]
    return len(sizes) > 1 and len({*sizes}) == 1


def _split(lines: Iterable[str], delimiter: str) -> list[list[str]]:
    """Returns the cells of each row; none if they cannot be read."""
    try:
        return [*csv.reader(lines, delimiter=delimiter)]
    except csv.Error:
        return []


def has_different_delimiter(rows: Sequence[Sequence[str]], delimiter: str) -> bool:
    """Tells whether the only column of several rows has another delimiter equally often in each.

    As a punctuation mark of a text, it would have a blank at one side.
    """
    patterns = [rf'(?<=\S){re.escape(mark)}(?=[\w"])' for mark in ";\t|" if mark != delimiter]
    frequencies = [{len(re.findall(pattern, row[0])) for row in rows} for pattern in patterns]
    return len(rows) > 1 and any(len(numbers) == 1 and 0 not in numbers for numbers in frequencies)


def cell_delimiter(path: Path, explicit: str) -> str:
    """Returns what stands between the cells of a table."""
    default = "\t" if path.suffix.lower() == ".tsv" else ","
    return {"": default, "\\t": "\t"}.get(explicit, explicit)


def parse_rows(
    path: Path, lines: Sequence[str], delimiter: str, has_option: bool = False
) -> list[list[str]]:
    """Returns the non-empty rows of a table.

    ``has_option``: Whether an error may suggest ``--delimiter``.

    Raises:
        DataError: It is malformed; a quotation mark that is not closed would swallow later rows.
    """
    table, rows, first = csv.reader(lines, delimiter=delimiter, strict=True), [], 1
    try:
        for row in table:
            first = table.line_num + 1
            if any(row):
                rows.append(row)
    except csv.Error as error:
        other = delimiter_remedy(lines[:1]) if has_option and delimiter not in lines[0] else ""
        raise DataError(
            f"{path} line {first} cannot be read as a table",
            found=f"{error}, at line {table.line_num}",
            remedy=other
            or "look for a quotation mark that is not closed; one inside of a cell is"
            " written twice; longer texts: a .jsonl file",
        ) from None
    return rows


def check_header(path: Path, header: Sequence[str]) -> None:
    """Raises DataError if two columns have the same name, of which one would be ignored."""
    names = [name for name in header if name]
    if len({*names}) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise DataError(
            f"{path} line 1 names two columns {repeated}",
            found=", ".join(header)[:80],
            remedy="rename or remove one of them",
        )


def delimiter_remedy(header: Sequence[str]) -> str:
    """Names the delimiter in the only cell of a header; empty if there is none."""
    marks = [mark for mark in ";\t|" if mark in header[0]] if len(header) == 1 else []
    if not marks:
        return ""
    return f"--delimiter {shlex.quote(marks[0])}: that is what stands between the columns"
