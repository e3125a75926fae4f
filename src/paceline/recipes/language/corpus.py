"""Texts to train a language model on: found, read piece by piece, and divided into parts."""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from paceline.recipes.data import SPLIT_NAMES, find_data, is_hub_id, splits_in_name
from paceline.recipes.data.hub import is_saved, load_rows
from paceline.recipes.data.tables import conversion_to_utf8
from paceline.recipes.language.options import LanguageOptions
from paceline.recipes.language.records import read_file
from paceline.spec.errors import DataError
from paceline.spec.formatting import pluralize

TABLES = (".jsonl", ".parquet")
"""Suffixes of files with one text in each row; any other file is one text."""
PIECE_CHARACTERS = 16 << 10
"""Length of the pieces of which some are held out."""
_BLOCK_CHARACTERS = 1 << 20  # of a file that are in memory
_SAMPLE_BYTES = 1 << 13
_NO_TEXT = (b"%PDF-", b"\x1f\x8b", b"BZh", b"\x28\xb5\x2f\xfd")
"""Beginnings of formats that may have no NUL: PDF, gzip, bzip2 and zstd."""
_Source = Path | Iterable[Mapping[str, Any]]


class Corpus:
    """Texts in parts: ``train``, and ``val`` or ``test``. Nothing of them stays in memory.

    Attributes:
        source: Name of the data, as typed.
        fingerprint: Hash over texts and parts; empty until they are read.
        num_characters: Length of all texts; 0 until they are read.
        skipped: Files of a folder that are not text, as paths in it.
        split: How the parts were made.

    Args:
        divides: Holds out a part of data that have none; otherwise all of them are held out.
        reads: Reads all texts, for their hash.

    Raises:
        DataError: The data are not found, or cannot be read.
    """

    def __init__(
        self, options: LanguageOptions, *, divides: bool = True, reads: bool = True
    ) -> None:
        self.source, self._column = options.data, options.text_column
        self.fingerprint, self.num_characters, self.skipped = "", 0, list[str]()
        self._sources = self._find(options)
        self.split: dict[str, str | float] = {"method": "as in the files"}
        self._interval = 0  # one piece of so many is held out
        if set(self._sources) == {"train"} and not divides:
            self._sources = {"test": self._sources["train"]}
        elif set(self._sources) == {"train"}:
            self._interval = round(1 / options.val_fraction)
            self.split = {"method": "pieces", "val_fraction": options.val_fraction}
        if reads:
            self.read()

    def read(self) -> None:
        """Computes hash and length of all texts; DataError if they cannot be read."""
        digest = hashlib.sha256(repr((self._interval, *self._sources)).encode())
        for source in self._sources.values():
            for text in self._documents(source):
                digest.update(f"{len(text)} ".encode() + text.encode())
                self.num_characters += len(text)
        self.fingerprint = digest.hexdigest()[:16]
        if not self.num_characters:
            raise DataError(f"--data {self.source} holds no text")

    def describe_skipped(self) -> str:
        """Describes the files that are not text; empty if there are none."""
        if not self.skipped:
            return ""
        names = ", ".join(self.skipped[:3])
        suffix = f" and {len(self.skipped) - 3:,} more" if self.skipped[3:] else ""
        return f"{pluralize(len(self.skipped), 'file')} left out, not text: {names}{suffix}"

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the parts."""
        return ("train", "val") if self._interval else tuple(self._sources)

    @property
    def held_out(self) -> str:
        """Name of the part for evaluation."""
        return "val" if "val" in self.splits else "test"

    def texts(self, part: str) -> Iterator[str]:
        """Yields the texts of a part, in order; what is held out of a text divides it."""
        if not self._interval:
            yield from self._documents(self._sources[part])
            return
        size = max(1, min(PIECE_CHARACTERS, self.num_characters // (4 * self._interval)))
        number = 0
        for document in self._documents(self._sources["train"]):
            pieces = []
            for piece in cut(document, size):
                number += 1
                pieces.append((number % self._interval == 0, piece))
            for is_held_out, group in groupby(pieces, key=lambda pair: pair[0]):
                if is_held_out == (part != "train"):
                    yield "".join(piece for _, piece in group)

    def _find(self, options: LanguageOptions) -> dict[str, list[_Source]]:
        path = find_data(self.source, options.data_dir)
        found: dict[str, list[_Source]]
        if path.is_file():
            found = {"train": [path]}
        elif path.is_dir() and not is_saved(path):
            found = self._find_files(path)
        elif path.is_dir() or is_hub_id(self.source):
            rows = load_rows(self.source, options.data_config, options.offline)
            found = {part: [content] for part, content in rows.items()}
        else:
            raise DataError(
                f"--data {self.source}: no such file or folder",
                found=f"no {path.absolute()}",
                remedy="a text file, a jsonl or parquet file, a folder of such files, or an id of"
                " Hugging Face",
            )
        if options.test_data:
            found = {"train": found["train"]}
            found["test"] = [find_data(options.test_data, options.data_dir)]
        return found

    def _find_files(self, folder: Path) -> dict[str, list[_Source]]:
        """Returns the texts of each part; DataError if a part's folder has none."""
        files = []
        for path in sorted(folder.rglob("*")):
            is_hidden = any(name.startswith(".") for name in path.relative_to(folder).parts)
            if not is_hidden and path.is_file():
                files.append(path)
        texts = {path for path in files if _is_text(path)}
        self.skipped = [str(path.relative_to(folder)) for path in files if path not in texts]
        # Other files count only in the folder of a part, so that the part does not disappear.
        counted = [path for path in files if path in texts or _is_in_part(path, folder)]
        parts: dict[str, list[_Source]] = {}
        for part, paths in _divide(counted, folder).items():
            parts[part] = [path for path in paths if path in texts]
        if empty := [part for part, sources in parts.items() if not sources]:
            raise DataError(
                f"--data {self.source} holds no text for {empty[0]}",
                found=self.describe_skipped() or "no file",
                remedy="text files in UTF-8, or other names: by its files' names, a folder is"
                " divided into train, val and test",
            )
        return parts

    def _documents(self, sources: Iterable[_Source]) -> Iterator[str]:
        """Yields the texts that are not empty, a very long one in several."""
        for source in sources:
            if not isinstance(source, Path):
                rows = (self._cell(row, f"{self.source} row {n}") for n, row in enumerate(source))
                yield from filter(None, rows)
            elif source.suffix in TABLES:
                for location, record in read_file(source):
                    if isinstance(record, DataError):
                        raise record
                    if text := self._cell(record, location):
                        yield text
            else:
                yield from filter(None, _read_text(source))

    def _cell(self, row: Mapping[str, Any], location: str) -> str:
        column = self._column or "text"
        text = row.get(column)
        if not isinstance(text, str):
            raise DataError(
                f"{location} has no text in the column {column}",
                found=f"its columns are {', '.join(map(str, row))}",
                remedy="--text-column NAME",
            )
        return text


def cut(text: str, size: int) -> Iterator[str]:
    """Yields a text in pieces of at least ``size`` characters, cut at a line's or word's end."""
    start = 0
    while len(text) - start > 2 * size:
        earliest, latest = start + size, start + 2 * size
        positions = (text.find(mark, earliest, latest) + 1 for mark in "\n ")
        stop = next(filter(None, positions), earliest)
        yield text[start:stop]
        start = stop
    yield text[start:]


def _divide(files: Sequence[Path], folder: Path) -> dict[str, list[Path]]:
    """Returns the files of each part by their names.

    If none is named for training, all but shards of other parts are: a folder of code may have
    tests.
    """
    parts: dict[str, list[Path]] = {}
    for path in files:
        parts.setdefault(_part(path.relative_to(folder)), []).append(path)
    if "train" not in parts:
        parts = {}
        for path in files:
            parts.setdefault(_shard_part(path) or "train", []).append(path)
        if "train" not in parts:
            return {"train": [*files]}
    return {part: parts[part] for part in SPLIT_NAMES if part in parts}


def _part(path: Path) -> str:
    """Returns the part that the first folder, or the beginning of the file's name, names."""
    for name in (path.parts[0], path.stem.split("-")[0]):
        for part, spellings in SPLIT_NAMES.items():
            if name in spellings:
                return part
    return _shard_part(path)


def _is_in_part(path: Path, folder: Path) -> bool:
    """Whether a file is in a folder that names a part."""
    outermost = path.relative_to(folder).parent.parts[:1]
    return any(name in spellings for name in outermost for spellings in SPLIT_NAMES.values())


def _shard_part(path: Path) -> str:
    """Returns the part that a table's name names, or that of a text like ``test_1.txt``."""
    is_shard = path.suffix in TABLES or re.fullmatch(r"[a-z]+([-_.]?\d.*)?\.txt", path.name)
    names = splits_in_name(path.stem) if is_shard else []
    return names[0] if len(names) == 1 else ""


def _is_text(path: Path) -> bool:
    """Whether a file is a table or text in any encoding; reading refuses all but UTF-8."""
    if path.suffix in TABLES:
        return True
    with path.open("rb") as file:
        sample = file.read(_SAMPLE_BYTES)
    is_utf16 = sample.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return is_utf16 or not (b"\0" in sample or sample.startswith(_NO_TEXT))


def _read_text(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while block := file.read(_BLOCK_CHARACTERS):
                yield block
    except UnicodeDecodeError as error:
        with path.open("rb") as raw:
            remedy = conversion_to_utf8(raw.read(2))
        raise DataError(f"{path} is not in UTF-8", found=str(error), remedy=remedy) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as text", found=str(error)) from None
