"""Labelled texts from csv, tsv and jsonl files, tar shards, and Hugging Face."""

from __future__ import annotations

import codecs
import csv
import difflib
import hashlib
import io
import json
import random
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from paceline.recipes.data import SPLIT_NAMES, TEXT_SETS, find_data, is_hub_id, tars
from paceline.recipes.data.download import DownloadOptions, find_or_download
from paceline.recipes.data.hub import is_saved, load_rows
from paceline.recipes.options import TextOptions
from paceline.spec.errors import DataError
from paceline.train import files
from paceline.train.data.order import permutation

T = TypeVar("T")
Row = tuple[str, str]
"""Label as written, and text."""
_SUFFIXES = (".csv", ".tsv", ".jsonl")
_LABEL_COLUMNS = (
    *("label", "labels", "class", "category", "target"),
    *("sentiment", "topic", "coarse_label", "cls"),
)
TEXT_COLUMNS = (
    *("text", "sentence", "content", "review", "message"),
    *("title", "comment", "description", "txt"),
)
_MAX_CLASSES = 1000
_MAX_DIGITS = 20  # of a numeric label


@dataclass(frozen=True)
class TextData:
    """Texts with class labels.

    Attributes:
        source: Name or path as given.
        classes: Name of each class.
        labels: Label of each class in the files.
        splits: (texts, class numbers) by part: ``train`` and at least one of ``val``, ``test``.
        fingerprint: Hash over content and split.
        split: Record of how the parts were made.
        skipped: Number of rows left out because label or text is empty.
    """

    source: str
    classes: tuple[str, ...]
    labels: tuple[str, ...]
    splits: dict[str, tuple[list[str], list[int]]]
    fingerprint: str
    split: dict[str, str | int | float]
    skipped: int = 0

    @property
    def held_out(self) -> str:
        """Name of the part for evaluation."""
        return "test" if "test" in self.splits else "val"


def load_texts(options: TextOptions, labels: tuple[str, ...] = ()) -> TextData:
    """Reads the data set; DataError names files and rows.

    ``labels`` are required ones, in this order; by default those of the files.
    """
    name = options.data
    parts, names = _read_splits(options, is_training=not labels)
    if options.test_data:
        parts["test"] = _read_file(find_data(options.test_data, options.data_dir), options)
    total = sum(map(len, parts.values()))
    parts = {split: [row for row in rows if row[0] and row[1].strip()]
             for split, rows in parts.items()}  # fmt: skip
    skipped = total - sum(map(len, parts.values()))
    if empty := [split for split, rows in parts.items() if not rows]:
        raise DataError(
            f"{name} has no {empty[0]} rows with both a label and a text",
            found=f"{skipped} rows in all parts lack one",
            remedy="each row: label, text; --label-column and --text-column name the columns",
        )
    split_info: dict[str, str | int | float] = {"method": "as in the files"}
    if set(parts) == {"train"}:
        fraction = options.test_fraction
        divided = split_seeded(parts["train"], fraction, options.seed)
        parts = {"train": divided["train"], "test": divided["val"]}
        split_info = {"method": "seeded", "seed": options.seed, "test_fraction": fraction}
    labels = labels or _find_labels(name, parts["train"])
    classes = _class_names(name, labels, options.class_names or names)
    number = {label: place for place, label in enumerate(labels)}
    splits = {split: _encode_labels(name, split, rows, number) for split, rows in parts.items()}
    return TextData(name, classes, labels, splits, fingerprint(parts), split_info, skipped)


def _read_splits(
    options: TextOptions, is_training: bool
) -> tuple[dict[str, list[Row]], tuple[str, ...]]:
    """Reads the rows of each part, and the names of the classes if the data set has them."""
    name = options.data
    path = find_data(name, options.data_dir)
    if name in GENERATORS:
        return {"train": GENERATORS[name](0)}, ()
    if name in TEXT_SETS:
        dataset, download = TEXT_SETS[name], DownloadOptions(options.offline, options.mirror)
        path = find_or_download(dataset, options.data_dir, _is_complete, download)
        return {
            split: _read_file(file, options, is_training and split == "train")
            for split, file in _find_files(path).items()
        }, dataset.classes
    if path.is_file():
        return {"train": _read_file(path, options, is_training)}, ()
    if path.is_dir() and not is_saved(path) and (files := _find_files(path)):
        return {split: _read_file(file, options, is_training and split == "train")
                for split, file in files.items()}, ()  # fmt: skip
    if tars.matches(path):
        return {split: [*rows] for split, rows in tars.texts(path).items()}, ()
    if path.is_dir() or (is_hub_id(name)):
        return _from_hub(options)
    raise DataError(
        f"--data {name}: no such file or folder",
        found=f"no {path.absolute()}",
        remedy="a csv file (label, text), or one of " + ", ".join((*GENERATORS, *TEXT_SETS)),
    )


def split_seeded(items: Sequence[T], fraction: float, seed: int) -> dict[str, list[T]]:
    """Splits items into ``train`` and ``val`` by the seed, equally on every machine."""
    order = permutation(seed, 0, len(items)).tolist()
    count = min(max(1, round(len(items) * fraction)), max(len(items) - 1, 0))
    held_out = sorted(order[:count])
    training = sorted(order[count:])
    return {"train": [items[i] for i in training], "val": [items[i] for i in held_out]}


def _is_complete(folder: Path) -> bool:
    return {"train", "test"} <= set(_find_files(folder))


def _find_files(folder: Path) -> dict[str, Path]:
    candidates = {
        split: [folder / f"{name}{suffix}" for name in names for suffix in _SUFFIXES]
        for split, names in SPLIT_NAMES.items()
    }
    existing = {split: next((p for p in c if p.is_file()), None) for split, c in candidates.items()}
    return {split: path for split, path in existing.items() if path is not None}


def read_lines(path: Path) -> list[str]:
    """Reads lines that end with line feeds: texts may hold other characters that end lines."""
    try:
        content = files.read_bytes_limited(path, files.memory_bytes())
        text = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()
    except OSError as error:
        raise DataError(f"{path} cannot be read", found=str(error)) from None
    except UnicodeDecodeError:
        raise DataError(
            f"{path} is not in UTF-8",
            found=_find_undecodable(content),
            remedy=conversion_to_utf8(content),
        ) from None
    lines = text.split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def conversion_to_utf8(content: bytes) -> str:
    """Says how to convert a text file, by its first bytes."""
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    encoding = "UTF-16" if is_utf16 else "WINDOWS-1252"
    return f"convert it: iconv -f {encoding} -t UTF-8 OLD > NEW"


def _find_undecodable(content: bytes) -> str:
    """Describes the first line that is not in UTF-8."""
    for number, line in enumerate(content.split(b"\n"), 1):
        text = line.decode("utf-8", "replace")
        if "\ufffd" in text:
            return f"line {number}: {text.strip()[:80]!r}"
    return "bytes that are not text"


def _read_file(path: Path, options: TextOptions, is_training: bool = False) -> list[Row]:
    rows = read_jsonl(path) if path.suffix == ".jsonl" else _read_table(path, options)
    if not rows:
        raise DataError(f"{path} is empty", remedy="each row: label, text")
    if isinstance(rows[0], dict):
        return _select_columns(str(path), rows, options)
    first = next((i for i, row in enumerate(rows) if len(row) < 2), None)
    if first is not None:
        raise DataError(
            f"{path} row {first + 1} has one column only",
            found=repr(str(rows[first])[:80]),
            remedy="each row: label, text; --delimiter names what stands between",
        )
    labelled = [(row[0].strip(), " ".join(row[1:])) for row in rows]
    if is_training:
        _refuse_header(path, rows)
    return labelled


def _refuse_header(path: Path, rows: Sequence[Sequence[str]]) -> None:
    """Raises DataError if the first row is no example.

    In a column of classes, no other row has the cell of the first one, but others share theirs. The
    classes are in the first column, or, if every row has its own text there, in the last one.
    """
    for column, text_column in ((0, 1), (-1, 0)):
        first, *others = (row[column].strip() for row in rows)
        if len({*others}) == len(others):
            continue
        if _is_number(first) or first in others:
            return
        label, text = (shlex.quote(rows[0][place].strip()) for place in (column, text_column))
        raise DataError(
            f"{path} row 1 seems to name the columns, but not those of labels and texts",
            found=f"row 1: {', '.join(rows[0])[:80]}; no other row has the label {first[:40]!r}",
            remedy=f"--label-column {label} --text-column {text}, or the other way round; if row"
            " 1 is an example, add a second one of its class",
        )


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


def _read_table(path: Path, options: TextOptions) -> list[Any]:
    """Reads a table as lists of cells, or as dictionaries if it has a usable header."""
    lines = [f"{line}\n" for line in read_lines(path)]
    rows = parse_rows(path, lines, cell_delimiter(path, options.delimiter))
    if not rows:
        return []
    header = [cell.strip() for cell in rows[0]]
    lower = {cell.lower() for cell in header}
    are_named = options.label_column or options.text_column
    if are_named or (lower & {*_LABEL_COLUMNS} and lower & {*TEXT_COLUMNS}):
        check_header(path, header)
        for number, row in enumerate(rows[1:], 2):
            if len(header) > 1 and any(row[len(header) :]):
                raise DataError(
                    f"{path} row {number} has more columns than the header",
                    found=f"{len(row)} columns, {len(header)} in the header",
                    remedy="a cell with a delimiter in it needs quotes",
                )
        return [dict(zip(header, row, strict=False)) for row in rows[1:]]
    return rows


def cell_delimiter(path: Path, given: str) -> str:
    """Returns what stands between the cells of a table."""
    default = "\t" if path.suffix.lower() == ".tsv" else ","
    return {"": default, "\\t": "\t"}.get(given, given)


def parse_rows(path: Path, lines: Iterable[str], delimiter: str) -> list[list[str]]:
    """Returns the non-empty rows of a table.

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
        raise DataError(
            f"{path} line {first} cannot be read as a table",
            found=f"{error}, at line {table.line_num}",
            remedy="look for a quotation mark that is not closed; one inside of a cell is written"
            " twice; longer texts: a .jsonl file",
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


def _select_columns(
    name: str, rows: Iterable[Mapping[str, Any]], options: TextOptions
) -> list[Row]:
    """Selects label and text from rows with named columns."""
    columns: tuple[str, str] | None = None
    selected = []
    for number, row in enumerate(rows, 1):
        columns = columns or _find_columns(name, row, options)
        label, text = (row.get(column) for column in columns)
        if label is None or text is None:
            raise DataError(
                f"{name} row {number} lacks {' or '.join(columns)}",
                found=f"{[*row.values()]}"[:80],
                remedy="complete or remove the row; a cell with a delimiter in it needs quotes",
            )
        selected.append((str(label).strip(), str(text)))
    return selected


def _find_columns(name: str, row: Mapping[str, Any], options: TextOptions) -> tuple[str, str]:
    columns: list[str] = []
    for given, candidates, flag in (
        (options.label_column, _LABEL_COLUMNS, "label"),
        (options.text_column, TEXT_COLUMNS, "text"),
    ):
        column = given or next((c for c in row if c and c.lower() in candidates), "")
        if column not in row:
            raise DataError(
                f"{name} has no column {given or f'that is known to hold a {flag}'}",
                found=f"columns: {', '.join(map(str, row))}",
                remedy=_column_remedy(flag, given, [*row]),
            )
        columns.append(column)
    return columns[0], columns[1]


def _column_remedy(flag: str, given: str, columns: Sequence[str]) -> str:
    if len(columns) == 1 and (marks := [mark for mark in ";\t|" if mark in columns[0]]):
        return f"--delimiter {shlex.quote(marks[0])}: that is what stands between the columns"
    near = difflib.get_close_matches(given.lower(), [column.lower() for column in columns], 1)
    meant = next((column for column in columns if [column.lower()] == near), "NAME")
    return f"--{flag}-column {shlex.quote(meant)}"


def _from_hub(options: TextOptions) -> tuple[dict[str, list[Row]], tuple[str, ...]]:
    parts = load_rows(options.data, options.data_config, options.offline)
    rows = {split: _select_columns(options.data, part, options) for split, part in parts.items()}
    # Public benchmarks hide the labels of their test part as -1.
    labelled = {
        split: part for split, part in rows.items() if any(label != "-1" for label, _ in part)
    }
    features = getattr(parts["train"], "features", None) or {}
    class_names = [getattr(feature, "names", None) for feature in features.values()]
    return labelled, tuple(next((names for names in class_names if names), ()))


def _find_labels(name: str, rows: Sequence[Row]) -> tuple[str, ...]:
    """Returns the labels in order: numbers by value, words by alphabet."""
    labels = {label for label, _ in rows}
    if not 2 <= len(labels) <= _MAX_CLASSES:
        examples = ", ".join(repr(label[:20]) for label in sorted(labels)[:5])
        raise DataError(
            f"{name} has {len(labels)} classes",
            found=f"labels: {examples}{', …' if len(labels) > 5 else ''}",
            remedy="2 to 1000 classes; --label-column NAME says where the labels are",
        )
    if all(_is_number(label) for label in labels):
        return tuple(sorted(labels, key=int))
    return tuple(sorted(labels))


def _list_labels(labels: Sequence[str]) -> str:
    """Returns the first labels, shortened."""
    shown = ", ".join(label[:40] for label in labels[:20])
    return f"{shown} and {len(labels) - 20} more" if labels[20:] else shown


def _is_number(label: str) -> bool:
    return label.removeprefix("-").isdecimal() and len(label) < _MAX_DIGITS


def _class_names(name: str, labels: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names of the classes; labels are numbered from 0 or from 1."""
    if not names or set(labels) == set(names):
        return labels
    if not all(_is_number(label) for label in labels):
        raise DataError(
            f"--class-names do not fit {name}",
            found=f"its labels are {_list_labels(labels)}",
            remedy="leave --class-names out",
        )
    numbers = [int(label) for label in labels]
    start = 1 if numbers[0] == 1 and numbers[-1] == len(names) else 0
    wrong = next((n for n in numbers if not start <= n < start + len(names)), None)
    if wrong is not None:
        raise DataError(
            f"{name} holds label {wrong}, outside the range",
            found=f"{len(names)} class names: labels {start} to {start + len(names) - 1}",
        )
    return tuple(names[n - start] for n in numbers)


def _encode_labels(
    name: str, split: str, rows: Sequence[Row], number: Mapping[str, int]
) -> tuple[list[str], list[int]]:
    if not rows:
        raise DataError(f"{name} has no texts for {split}", remedy="add some")
    wrong = next((label for label, _ in rows if label not in number), None)
    if wrong is not None:
        raise DataError(
            f"{name}: label {wrong!r} of {split} is not among the training labels",
            found=f"these are {_list_labels([*number])}",
            remedy="correct or remove such rows; each row: label, text",
        )
    return [text for _, text in rows], [number[label] for label, _ in rows]


def fingerprint(parts: Mapping[str, Sequence[Row]]) -> str:
    """Returns a short hash over the rows of all parts."""
    text = json.dumps(sorted(parts.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_POSITIVE = ["good", "great", "tasty", "excellent", "delicious", "wonderful"]
_NEGATIVE = ["bad", "awful", "bland", "terrible", "cold", "disappointing"]
_ASPECTS = ["service", "music", "view", "staff", "price", "table"]


def meals(seed: int, count: int = 4000) -> list[Row]:
    """Generates reviews of food and of something else; the label tells if the food is praised.

    Both classes use the same words, so that a model must consider their order.
    """
    generator = random.Random(seed)  # noqa: S311
    rows = []
    for _ in range(count):
        likes = generator.random() < 0.5
        food = generator.choice(_POSITIVE if likes else _NEGATIVE)
        second = generator.choice(_NEGATIVE if likes else _POSITIVE)
        clauses = [f"the food was {food}", f"the {generator.choice(_ASPECTS)} was {second}"]
        generator.shuffle(clauses)
        rows.append(("praised" if likes else "blamed", " and ".join(clauses)))
    return rows


def dummy(seed: int, count: int = 4000, length: int = 64) -> list[Row]:
    """Generates random words, for measuring speed."""
    generator = random.Random(seed)  # noqa: S311
    vocabulary = ["".join(generator.choices("abcdefghij", k=5)) for _ in range(4000)]
    return [
        (str(generator.randrange(2)), " ".join(generator.choices(vocabulary, k=length)))
        for _ in range(count)
    ]


GENERATORS: dict[str, Callable[[int], list[Row]]] = {"meals": meals, "dummy": dummy}
