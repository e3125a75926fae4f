"""Rows of data files, each with its file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.recipes.data import find_data, is_hub_id, splits_in_name
from paceline.recipes.data.hub import is_saved, load_rows
from paceline.recipes.data.tables import (
    check_header,
    parse_json,
    parse_rows,
    read_lines,
    read_parquet,
)
from paceline.spec.errors import DataError

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")
_SURROGATE = "\\ud"  # begins the escape of half a character, in lower case
Record = tuple[str, "Mapping[str, Any] | DataError"]
"""File and line, and the row there, or why it cannot be read."""


def read_splits(name: str, data_dir: str, config: str, offline: bool) -> dict[str, list[Record]]:
    """Reads the rows of each part: ``train``, and ``val`` and ``test`` if there are any.

    Raises:
        DataError: The data are not found, or a whole file cannot be read.
    """
    path = find_data(name, data_dir)
    if path.is_file():
        return {"train": [*read_file(path, name)]}
    if path.is_dir() and not is_saved(path) and (files := _split_files(path)):
        return {
            split: [
                record
                for file in paths
                for record in read_file(file, f"{Path(name) / file.relative_to(path)}")
            ]
            for split, paths in files.items()
        }
    if path.is_dir() or is_hub_id(name):
        parts = load_rows(name, config, offline)
        return {
            split: [(f"{name} {split} row {n}", row) for n, row in enumerate(rows, 1)]
            for split, rows in parts.items()
        }
    raise DataError(
        f"--data {name}: no such file or folder",
        found=f"no {path.absolute()}",
        remedy=f"a file ({', '.join(SUFFIXES)}), a folder of them, or an id of Hugging Face",
    )


def _split_files(folder: Path) -> dict[str, list[Path]]:
    """Returns the files of each part by their names; without ``train``, all others are for it.

    Raises:
        DataError: A name has several parts, or no file is for training.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())
    splits: dict[str, list[Path]] = {}
    for path in files:
        names = splits_in_name(path.stem)
        if len(names) > 1:
            raise DataError(
                f"--data {folder}: {path.name} may be of {' or '.join(names)}",
                remedy="rename it, or name the files: --data FILE --test-data FILE",
            )
        splits.setdefault(names[0] if names else "", []).append(path)
    others = splits.pop("", [])
    if splits and not splits.setdefault("train", others):
        held_out = [path.name for paths in splits.values() for path in paths]
        raise DataError(
            f"--data {folder} has no file to train on",
            found=f"by their names, these are held out: {', '.join(held_out[:5])}",
            remedy=f"--data {folder / held_out[0]} trains on that file",
        )
    return splits or ({"train": others} if others else {})


def read_file(path: Path, name: str = "") -> Iterator[Record]:
    """Yields the rows of a file.

    Args:
        name: The user's path of the file, if this is a copy on another host.

    Raises:
        DataError: The file cannot be read, or its kind is not known.
    """
    readers = {
        ".jsonl": _read_jsonl,
        ".json": _read_json,
        ".csv": _read_table,
        ".tsv": _read_table,
        ".parquet": _read_parquet,
        ".txt": _read_text,
    }
    name = name or str(path)
    if path.suffix not in readers:
        raise DataError(f"{name}: unknown kind of file", remedy=f"one of {', '.join(readers)}")
    return readers[path.suffix](path, name)


def _read_jsonl(path: Path, name: str) -> Iterator[Record]:
    for number, line in enumerate(read_lines(path), 1):
        if line.strip():
            yield _parse(line, f"{name} line {number}")


def _parse(line: str, location: str) -> Record:
    try:
        row = parse_json(line)
    except (ValueError, RecursionError) as error:
        return location, DataError(f"{location} is not valid JSON", found=str(error))
    return _checked(row, location, has_escapes=_SURROGATE in line.lower())


def _checked(row: Any, location: str, *, has_escapes: bool = False) -> Record:
    """Returns a row, or the error that it is not an object or has half of a surrogate pair."""
    if isinstance(row, Mapping):
        try:
            if has_escapes:
                json.dumps(row, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            return location, DataError(
                f"{location} has half of a character",
                found=str(error),
                remedy="write the character itself in UTF-8, or both of its escapes",
            )
        return location, row
    return location, DataError(f"{location} is not a JSON object", found=repr(row)[:80])


def _read_json(path: Path, name: str) -> Iterator[Record]:
    """Yields the rows of a file with one list of objects, which may be in one under any name."""
    text = "\n".join(read_lines(path))
    try:
        content = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is not valid JSON", found=str(error)) from None
    if isinstance(content, Mapping):
        lists = {key: value for key, value in content.items() if isinstance(value, list)}
        tables = {
            key: rows
            for key, rows in lists.items()
            if any(isinstance(row, Mapping) for row in rows)
        } or lists
        if len(tables) > 1:
            raise DataError(
                f"{name} holds several lists",
                found=", ".join(f"{key} with {len(rows):,} items" for key, rows in tables.items()),
                remedy="a file for each list; --test-data FILE names one to hold out",
            )
        content = next(iter(tables.values()), None)
    if not isinstance(content, list):
        raise DataError(f"{name} holds no list of examples", remedy="one object a line: .jsonl")
    has_escapes = _SURROGATE in text.lower()
    return (
        _checked(row, f"{name} item {number}", has_escapes=has_escapes)
        for number, row in enumerate(content, 1)
    )


def _read_table(path: Path, name: str) -> Iterator[Record]:
    """Yields rows; one with other columns than the header as an error, for the caller to raise."""
    delimiter = "\t" if path.suffix == ".tsv" else ","
    rows = parse_rows(path, [f"{line}\n" for line in read_lines(path)], delimiter)
    if not rows:
        return
    header = [cell.strip().lower() for cell in rows[0]]
    check_header(path, header)
    for number, row in enumerate(rows[1:], 2):
        location = f"{name} row {number}"
        if len(row) == len(header):
            yield location, dict(zip(header, row, strict=True))
        else:
            reason = f"{len(row)} columns, {len(header)} in the header"
            yield location, DataError(f"{location} has other columns than the header", found=reason)


def _read_text(path: Path, name: str) -> Iterator[Record]:
    """Yields one text for each line that is not empty."""
    for number, line in enumerate(read_lines(path), 1):
        if line.strip():
            yield f"{name} line {number}", {"text": line}


def _read_parquet(path: Path, name: str) -> Iterator[Record]:
    rows = enumerate(read_parquet(path, name), 1)
    return (_checked(row, f"{name} row {number}") for number, row in rows)
