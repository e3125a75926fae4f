"""Parallel corpora: sentences and their translations, whatever the files look like."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.recipes.data import PAIRS, SPLIT_NAMES, HubSource, Named, is_hub_id, located
from paceline.recipes.data.download import Ways, folder_of
from paceline.recipes.data.hub import is_saved, load_rows
from paceline.recipes.data.texts import divide
from paceline.spec.errors import DataError

Pair = tuple[str, str]


@dataclass(frozen=True)
class PairData:
    """Sentence pairs.

    Attributes:
        source: As given.
        splits: Always ``train``; the held-out parts are ``val`` and ``test``, at least one.
        fingerprint: Hash over content and split.
        split: How the parts came about, for the record.
        skipped: Pairs left out because a side is empty.
    """

    source: str
    splits: dict[str, list[Pair]]
    fingerprint: str
    split: dict[str, str | int | float]
    skipped: int = 0

    @property
    def held_out(self) -> str:
        """The part that is scored."""
        return "val" if "val" in self.splits else "test"


@dataclass(frozen=True, slots=True)
class PairRequest:
    """What a reader needs to know besides the files.

    Attributes:
        hub: Name, file or folder as given.
        target: The file with the translations, for a corpus of two files.
        languages: (source, target) names, where the data name languages; may be empty.
        val_fraction: Held-out part where the data have no split of their own.
        seed: Seed of that split.
        data_dir: Folder in which files of these names are looked for first; may be empty.
    """

    hub: HubSource
    target: str = ""
    languages: Pair = ("", "")
    val_fraction: float = 0.1
    seed: int = 0
    data_dir: str = ""


def load_pairs(request: PairRequest) -> PairData:
    """Reads the corpus.

    Raises:
        DataError: Not found, unreadable or unfit; files and lines are named.
    """
    found, skipped = _without_empty(_read(request))
    how: dict[str, str | int | float] = {"method": "as in the files"}
    if set(found) == {"train"}:
        found = dict(divide(found["train"], request.val_fraction, request.seed))
        fraction = request.val_fraction
        how = {"method": "seeded", "seed": request.seed, "val_fraction": fraction}
    for name, pairs in found.items():
        if not pairs:
            raise DataError(
                f"{request.hub.name} has no pairs for {name}",
                found=f"{sum(map(len, found.values()))} pairs in all",
                remedy="add pairs, or raise --val-fraction",
            )
    marks = _fingerprint(found)
    return PairData(request.hub.name, found, marks, how, skipped)


def _read(request: PairRequest) -> dict[str, list[Pair]]:
    name = request.hub.name
    path = located(name, request.data_dir)
    if name in MAKERS:
        return {"train": MAKERS[name](0)}
    if name in PAIRS:
        return _named(PAIRS[name], request)
    if request.target:
        return {"train": _two_files(path, located(request.target, request.data_dir))}
    if path.is_file():
        return {"train": _one_file(path, request)}
    if path.is_dir() and not is_saved(path):
        found = _folder(path, request)
        if found:
            return found
    if path.is_dir() or (is_hub_id(name)):
        rows = load_rows(request.hub)
        return {split: _from_rows(part, request) for split, part in rows.items()}
    raise DataError(
        f"--data {name}: no such file or folder",
        found=f"no {path.absolute()}",
        remedy="a TSV file (source, tab, target), or --data FILE --target FILE",
    )


def _named(named: Named, request: PairRequest) -> dict[str, list[Pair]]:
    """A corpus of a name; without languages in the order in which its files are told."""
    languages = request.languages if all(request.languages) else _LANGUAGES[named.name]
    wanted = replace(request, languages=languages)

    def is_whole(folder: Path) -> bool:
        return all((folder / f"{part}.{one}").is_file() for part in _PARTS for one in languages)

    ways = Ways(request.hub.offline, request.hub.mirror)
    return _folder(folder_of(named, request.data_dir, is_whole, ways), wanted)


_PARTS = ("train", "val", "test")
_LANGUAGES = {"multi30k": ("de", "en")}


def _folder(folder: Path, request: PairRequest) -> dict[str, list[Pair]]:
    """``train.tsv``, or ``train.en`` beside ``train.it``; the same for val and test."""
    found = {}
    for split, names in SPLIT_NAMES.items():
        for name in names:
            one = next((p for s in _READERS if (p := folder / f"{name}{s}").is_file()), None)
            if one is not None:
                found[split] = _one_file(one, request)
            elif all(request.languages):
                both = [folder / f"{name}.{language}" for language in request.languages]
                if both[0].is_file():
                    found[split] = _two_files(*both)
    return found


def _one_file(path: Path, request: PairRequest) -> list[Pair]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{path} cannot be read as pairs",
            found=f"a {path.suffix or 'nameless'} file; known are {', '.join(_READERS)}",
            remedy=f"--data {path} --target FILE, when that holds the translations line by line",
        )
    return reader(path, request)


def _tabbed(path: Path, request: PairRequest) -> list[Pair]:
    """Source, tab, target; further columns are left alone."""
    pairs = []
    for number, line in enumerate(_lines(path), 1):
        parts = line.split("\t")
        if len(parts) < 2 and line.strip():
            raise DataError(
                f"{path} line {number} has no tab",
                found=repr(line[:60]),
                remedy="each line: source, tab, target",
            )
        pairs.append((parts[0], parts[1]) if len(parts) > 1 else ("", ""))
    return _some(path, pairs)


def _json_lines(path: Path, request: PairRequest) -> list[Pair]:
    rows = []
    for number, line in enumerate(_lines(path), 1):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} line {number} is no JSON", found=str(error)) from None
    return _from_rows(_some(path, rows), request)


_READERS: dict[str, Callable[[Path, PairRequest], list[Pair]]] = {
    ".tsv": _tabbed,
    ".txt": _tabbed,
    ".jsonl": _json_lines,
}


def _two_files(source: Path, target: Path) -> list[Pair]:
    sides = _lines(source), _lines(target)
    if len(sides[0]) != len(sides[1]):
        raise DataError(
            f"{source} and {target} are not parallel",
            found=f"lines: {len(sides[0])} and {len(sides[1])}",
            remedy="line n of one file must be the translation of line n of the other",
        )
    return list(zip(*sides, strict=True))


def _lines(path: Path) -> list[str]:
    """Lines at line feeds only: text may hold other characters that some call line ends."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read", found=str(error)) from None
    lines = [line.rstrip("\r") for line in text.split("\n")]
    return _some(path, lines[:-1] if lines[-1] == "" else lines)


def _some(path: Path, items: list[Any]) -> list[Any]:
    if not items:
        raise DataError(f"{path} is empty", remedy="it must hold at least two pairs")
    return items


def _from_rows(rows: Iterable[Mapping[str, Any]], request: PairRequest) -> list[Pair]:
    """Rows like ``{"translation": {"en": …, "it": …}}``, or with the two as columns."""
    names: Pair | None = None
    pairs = []
    for row in rows:
        columns = row.get("translation", row) if isinstance(row, Mapping) else {}
        names = names or _languages(columns, request.languages)
        pairs.append((str(columns[names[0]] or ""), str(columns[names[1]] or "")))
    return pairs


def _languages(columns: Mapping[str, Any], asked: Pair) -> Pair:
    texts = [name for name, value in columns.items() if isinstance(value, str)]
    names = asked if all(asked) else ("source", "target") if "source" in columns else tuple(texts)
    if len(names) != 2 or any(name not in columns for name in names):
        raise DataError(
            "which columns are source and target cannot be told",
            found=f"asked for {', '.join(filter(None, asked)) or 'none'};"
            f" there are {', '.join(columns) or 'none'}",
            remedy="--source-lang NAME --target-lang NAME",
        )
    return names[0], names[1]


def _without_empty(found: dict[str, list[Pair]]) -> tuple[dict[str, list[Pair]], int]:
    kept = {name: [pair for pair in p if all(map(str.strip, pair))] for name, p in found.items()}
    return kept, sum(map(len, found.values())) - sum(map(len, kept.values()))


def _fingerprint(splits: Mapping[str, Sequence[Pair]]) -> str:
    text = json.dumps([(name, pairs) for name, pairs in sorted(splits.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]

Pairs = list[tuple[str, str]]


def in_words(number: int) -> str:
    """``in_words(342) == "three hundred forty-two"``; up to 999,999."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")
    base, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    above, below = divmod(number, base)
    return f"{in_words(above)} {name}" + (f" {in_words(below)}" if below else "")


def numbers(seed: int, count: int = 8000) -> Pairs:
    """Different numbers below a million, as many of each length as there are, and their words."""
    draw = random.Random(seed)  # noqa: S311
    chosen: set[int] = set()
    while len(chosen) < count:
        chosen.add(draw.randrange(10 ** draw.randint(1, 6)))
    return [(str(number), in_words(number)) for number in sorted(chosen)]


def reverse(seed: int, count: int = 8000) -> Pairs:
    """Different sequences of 2 to 10 letters, and the same backwards."""
    draw = random.Random(seed)  # noqa: S311
    chosen: set[tuple[str, ...]] = set()
    while len(chosen) < count:
        chosen.add(tuple(draw.choices("abcdefghijklmnop", k=draw.randint(2, 10))))
    return [(" ".join(one), " ".join(reversed(one))) for one in sorted(chosen)]


def dummy(seed: int, count: int = 2000, words: int = 24) -> Pairs:
    """Random words, all sentences of one length: nothing can be learned from them."""
    draw = random.Random(seed)  # noqa: S311
    vocabulary = [f"w{number:x}".translate(_LETTERS) for number in range(4000)]
    sides = [[" ".join(draw.choices(vocabulary, k=words)) for _ in range(count)] for _ in range(2)]
    return list(zip(*sides, strict=True))


_LETTERS = str.maketrans("0123456789", "ghijklmnop")  # digits would become tokens of their own
MAKERS: dict[str, Callable[[int], Pairs]] = {
    "numbers": numbers,
    "reverse": reverse,
    "dummy": dummy,
}
