"""Parallel corpora from tsv, jsonl and pairs of text files, and from Hugging Face."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.recipes.data import (
    PAIR_SETS,
    SPLIT_NAMES,
    NamedDataset,
    files_by_name,
    find_data,
    is_hub_id,
)
from paceline.recipes.data.download import DownloadOptions, find_or_download
from paceline.recipes.data.hub import is_saved, load_rows
from paceline.recipes.data.tables import read_jsonl, read_lines
from paceline.recipes.data.texts import fingerprint, split_seeded
from paceline.recipes.options import TranslationOptions
from paceline.spec.errors import DataError

Pair = tuple[str, str]


@dataclass(frozen=True)
class PairData:
    """Sentence pairs.

    Attributes:
        source: Name or path as given.
        splits: Always ``train``; the held-out parts are ``val`` and ``test``, at least one.
        fingerprint: Hash over content and split.
        split: Record of how the parts were made.
        skipped: Number of pairs left out because a side is empty.
    """

    source: str
    splits: dict[str, list[Pair]]
    fingerprint: str
    split: dict[str, str | int | float]
    skipped: int = 0

    @property
    def held_out(self) -> str:
        """Name of the part for evaluation."""
        return "val" if "val" in self.splits else "test"


def load_pairs(options: TranslationOptions) -> PairData:
    """Reads the corpus; DataError names files and lines."""
    splits, skipped = _drop_empty(_read_splits(options))
    split_info: dict[str, str | int | float] = {"method": "as in the files"}
    if set(splits) == {"train"}:
        splits = dict(split_seeded(splits["train"], options.val_fraction, options.seed))
        fraction = options.val_fraction
        split_info = {"method": "seeded", "seed": options.seed, "val_fraction": fraction}
    for name, pairs in splits.items():
        if not pairs:
            raise DataError(
                f"{options.data} has no pairs for {name}",
                found=f"{sum(map(len, splits.values()))} pairs in all",
                remedy="add pairs, or raise --val-fraction",
            )
    digest = fingerprint(splits)
    return PairData(options.data, splits, digest, split_info, skipped)


def _read_splits(options: TranslationOptions) -> dict[str, list[Pair]]:
    name = options.data
    path = find_data(name, options.data_dir)
    if name in GENERATORS:
        return {"train": GENERATORS[name](0)}
    if name in PAIR_SETS:
        return _named_corpus(PAIR_SETS[name], options)
    if options.target:
        return {"train": _read_two_files(path, find_data(options.target, options.data_dir))}
    if path.is_file():
        return {"train": _read_file(path, options)}
    if path.is_dir() and not is_saved(path):
        splits = _read_folder(path, options)
        if splits:
            return splits
    if path.is_dir() or (is_hub_id(name)):
        rows = load_rows(name, options.data_config, options.offline)
        return {split: _from_rows(part, options) for split, part in rows.items()}
    raise DataError(
        f"--data {name}: no such file or folder",
        found=f"no {path.absolute()}",
        remedy="a TSV file (source, tab, target), or --data FILE --target FILE",
    )


def _named_corpus(dataset: NamedDataset, options: TranslationOptions) -> dict[str, list[Pair]]:
    """Reads a named corpus, in its usual direction unless the options name languages."""
    languages = options.languages if all(options.languages) else _LANGUAGES[dataset.name]
    with_languages = replace(options, source_lang=languages[0], target_lang=languages[1])

    def is_complete(folder: Path) -> bool:
        return all(
            (folder / f"{part}.{language}").is_file() for part in _PARTS for language in languages
        )

    download = DownloadOptions(options.offline, options.mirror)
    return _read_folder(
        find_or_download(dataset, options.data_dir, is_complete, download), with_languages
    )


_PARTS = ("train", "val", "test")
_LANGUAGES = {"multi30k": ("de", "en")}


def _read_folder(folder: Path, options: TranslationOptions) -> dict[str, list[Pair]]:
    """Reads ``train.tsv``, or ``train.en`` and ``train.it``; the same for val and test."""
    splits, files = {}, files_by_name(folder)
    for split, names in SPLIT_NAMES.items():
        for name in reversed(names):
            file = next((files[n] for s in _READERS if (n := f"{name}{s}") in files), None)
            if file is not None:
                splits[split] = _read_file(file, options)
            elif all(options.languages):
                sides = [f"{name}.{language}" for language in options.languages]
                if sides[0].lower() in files:
                    source, target = (files.get(n.lower(), folder / n) for n in sides)
                    splits[split] = _read_two_files(source, target)
    return splits


def _read_file(path: Path, options: TranslationOptions) -> list[Pair]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{path} cannot be read as pairs",
            found=f"a {path.suffix or 'nameless'} file; known are {', '.join(_READERS)}",
            remedy=f"--data {path} --target FILE, when that holds the translations line by line",
        )
    return reader(path, options)


def _read_tsv(path: Path, options: TranslationOptions) -> list[Pair]:
    """Reads source, tab, target; ignores further columns."""
    pairs = []
    for number, line in enumerate(_read_lines(path), 1):
        parts = line.split("\t")
        if len(parts) < 2 and line.strip():
            raise DataError(
                f"{path} line {number} has no tab",
                found=repr(line[:60]),
                remedy="each line: source, tab, target",
            )
        pairs.append((parts[0], parts[1]) if len(parts) > 1 else ("", ""))
    return _require_items(path, pairs)


def _read_jsonl(path: Path, options: TranslationOptions) -> list[Pair]:
    return _from_rows(_require_items(path, read_jsonl(path)), options)


_READERS: dict[str, Callable[[Path, TranslationOptions], list[Pair]]] = {
    ".tsv": _read_tsv,
    ".txt": _read_tsv,
    ".jsonl": _read_jsonl,
}


def _read_two_files(source: Path, target: Path) -> list[Pair]:
    sides = _read_lines(source), _read_lines(target)
    if len(sides[0]) != len(sides[1]):
        raise DataError(
            f"{source} and {target} are not parallel",
            found=f"lines: {len(sides[0])} and {len(sides[1])}",
            remedy="line n of one file must be the translation of line n of the other",
        )
    return list(zip(*sides, strict=True))


def _read_lines(path: Path) -> list[str]:
    return _require_items(path, read_lines(path))


def _require_items(path: Path, items: list[Any]) -> list[Any]:
    if not items:
        raise DataError(f"{path} is empty", remedy="it must hold at least two pairs")
    return items


def _from_rows(rows: Iterable[Mapping[str, Any]], options: TranslationOptions) -> list[Pair]:
    """Parses rows like ``{"translation": {"en": …, "it": …}}``, or with both as columns."""
    names: Pair | None = None
    pairs = []
    for row in rows:
        translation = row.get("translation")
        columns = translation if isinstance(translation, Mapping) else row
        names = names or _language_columns(columns, options.languages)
        pairs.append((str(columns.get(names[0]) or ""), str(columns.get(names[1]) or "")))
    return pairs


def _language_columns(columns: Mapping[str, Any], requested: Pair) -> Pair:
    texts = [name for name, value in columns.items() if isinstance(value, str)]
    names = (
        requested
        if all(requested)
        else ("source", "target")
        if "source" in columns
        else tuple(texts)
    )
    if len(names) != 2 or any(name not in columns for name in names):
        raise DataError(
            "which columns are source and target cannot be told",
            found=f"asked for {', '.join(filter(None, requested)) or 'none'};"
            f" there are {', '.join(columns) or 'none'}",
            remedy="--source-lang NAME --target-lang NAME",
        )
    return names[0], names[1]


def _drop_empty(splits: dict[str, list[Pair]]) -> tuple[dict[str, list[Pair]], int]:
    filtered = {
        name: [pair for pair in p if all(map(str.strip, pair))] for name, p in splits.items()
    }
    return filtered, sum(map(len, splits.values())) - sum(map(len, filtered.values()))


_SMALL_NUMBERS = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen"),
    *("eighteen", "nineteen"),
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def spell_number(number: int) -> str:
    """Spells a number up to 999,999: ``three hundred forty-two``."""
    if number < 20:
        return _SMALL_NUMBERS[number]
    if number < 100:
        tens, units = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_SMALL_NUMBERS[units]}" if units else "")
    base, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    quotient, remainder = divmod(number, base)
    return f"{spell_number(quotient)} {name}" + (f" {spell_number(remainder)}" if remainder else "")


def numbers(seed: int, count: int = 8000) -> list[Pair]:
    """Generates different numbers below a million, of all lengths, and their words."""
    generator = random.Random(seed)  # noqa: S311
    values: set[int] = set()
    while len(values) < count:
        values.add(generator.randrange(10 ** generator.randint(1, 6)))
    return [(str(number), spell_number(number)) for number in sorted(values)]


def reverse(seed: int, count: int = 8000) -> list[Pair]:
    """Generates different sequences of 2 to 10 letters, and their reverse."""
    generator = random.Random(seed)  # noqa: S311
    sequences: set[tuple[str, ...]] = set()
    while len(sequences) < count:
        sequences.add(tuple(generator.choices("abcdefghijklmnop", k=generator.randint(2, 10))))
    return [(" ".join(letters), " ".join(reversed(letters))) for letters in sorted(sequences)]


def dummy(seed: int, count: int = 2000, length: int = 24) -> list[Pair]:
    """Generates random words in sentences of equal length, for measuring speed."""
    generator = random.Random(seed)  # noqa: S311
    vocabulary = [f"w{number:x}".translate(_LETTERS) for number in range(4000)]
    sides = [
        [" ".join(generator.choices(vocabulary, k=length)) for _ in range(count)] for _ in range(2)
    ]
    return list(zip(*sides, strict=True))


_LETTERS = str.maketrans("0123456789", "ghijklmnop")  # digits would become tokens of their own
GENERATORS: dict[str, Callable[[int], list[Pair]]] = {
    "numbers": numbers,
    "reverse": reverse,
    "dummy": dummy,
}
