"""Texts with labels, whatever the files look like."""

from __future__ import annotations

import csv
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from paceline.recipes.data import SPLIT_NAMES, TEXTS, HubSource, is_hub_id, located, tars
from paceline.recipes.data.download import Ways, folder_of
from paceline.recipes.data.hub import is_saved, load_rows
from paceline.spec.errors import DataError
from paceline.train.order import permutation

T = TypeVar("T")
Row = tuple[str, str]
"""Label as written, and text."""
_SUFFIXES = (".csv", ".tsv", ".jsonl")
_LABELS = (
    "label",
    "labels",
    "class",
    "category",
    "target",
    "sentiment",
    "topic",
    "coarse_label",
    "cls",
)
_TEXTS = (
    "text",
    "sentence",
    "content",
    "review",
    "message",
    "title",
    "comment",
    "description",
    "txt",
)
_MOST_CLASSES = 1000
_MOST_DIGITS = 20  # of a label that is a number


@dataclass(frozen=True)
class TextData:
    """Texts with class labels.

    Attributes:
        source: As given.
        classes: Name of each class.
        labels: As written in the files, of each class.
        splits: (texts, class numbers) by part: ``train`` and at least one of ``val``, ``test``.
        fingerprint: Hash over content and split.
        split: How the parts came about, for the record.
    """

    source: str
    classes: tuple[str, ...]
    labels: tuple[str, ...]
    splits: dict[str, tuple[list[str], list[int]]]
    fingerprint: str
    split: dict[str, str | int | float]

    @property
    def held_out(self) -> str:
        """The part whose figures are reported at the end."""
        return "test" if "test" in self.splits else "val"


@dataclass(frozen=True, slots=True)
class TextRequest:
    """What a reader needs to know besides the files.

    Attributes:
        hub: Name, file or folder as given.
        test: File with the held-out part; may be empty.
        columns: Names of the columns with labels and texts; may be empty.
        delimiter: Between columns of a csv; empty for the usual one.
        class_names: Names for numbered classes.
        labels: The labels that there must be, in this order; empty takes those of the files.
        fraction: Held-out part where the data have no split of their own.
        seed: Seed of that split.
        data_dir: Folder in which files of these names are looked for first; may be empty.
    """

    hub: HubSource
    test: str = ""
    columns: tuple[str, str] = ("", "")
    delimiter: str = ""
    class_names: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    fraction: float = 0.1
    seed: int = 0
    data_dir: str = ""


def load_texts(request: TextRequest) -> TextData:
    """Reads the data set.

    Raises:
        DataError: Not found, unreadable or unfit; files and rows are named.
    """
    name = request.hub.name
    parts, names = _read(request)
    if request.test:
        parts["test"] = _file(located(request.test, request.data_dir), request)
    how: dict[str, str | int | float] = {"method": "as in the files"}
    if set(parts) == {"train"}:
        both = divide(parts["train"], request.fraction, request.seed)
        parts = {"train": both["train"], "test": both["val"]}
        fraction = request.fraction
        how = {"method": "seeded", "seed": request.seed, "test_fraction": fraction}
    labels = request.labels or _labels(name, parts["train"])
    classes = _class_names(name, labels, request.class_names or names)
    number = {label: place for place, label in enumerate(labels)}
    splits = {split: _numbered(name, split, rows, number) for split, rows in parts.items()}
    return TextData(name, classes, labels, splits, _fingerprint(parts), how)


def _read(request: TextRequest) -> tuple[dict[str, list[Row]], tuple[str, ...]]:
    """Rows of each part, and names of the classes where the data know them."""
    name = request.hub.name
    path = located(name, request.data_dir)
    if name in MAKERS:
        return {"train": MAKERS[name](0)}, ()
    if name in TEXTS:
        named, hub = TEXTS[name], request.hub
        path = folder_of(named, request.data_dir, _is_whole, Ways(hub.offline, hub.mirror))
        return {split: _file(file, request) for split, file in _folder(path).items()}, named.classes
    if path.is_file():
        return {"train": _file(path, request)}, ()
    if path.is_dir() and not is_saved(path) and (found := _folder(path)):
        return {split: _file(file, request) for split, file in found.items()}, ()
    if tars.matches(path):
        return {split: [*rows] for split, rows in tars.texts(path).items()}, ()
    if path.is_dir() or (is_hub_id(name)):
        return _from_hub(request)
    raise DataError(
        f"--data {name}: no such file or folder",
        found=f"no {path.absolute()}",
        remedy="a csv file (label, text), or one of " + ", ".join((*MAKERS, *TEXTS)),
    )


def divide(items: Sequence[T], fraction: float, seed: int) -> dict[str, list[T]]:
    """``train`` and ``val``, drawn from the seed alone; equal on every machine."""
    order = permutation(seed, 0, len(items)).tolist()
    count = min(max(1, round(len(items) * fraction)), max(len(items) - 1, 0))
    held_out = sorted(order[:count])
    kept = sorted(order[count:])
    return {"train": [items[i] for i in kept], "val": [items[i] for i in held_out]}


def _is_whole(folder: Path) -> bool:
    return {"train", "test"} <= set(_folder(folder))


def _folder(folder: Path) -> dict[str, Path]:
    candidates = {
        split: [folder / f"{name}{suffix}" for name in names for suffix in _SUFFIXES]
        for split, names in SPLIT_NAMES.items()
    }
    there = {split: next((p for p in c if p.is_file()), None) for split, c in candidates.items()}
    return {split: path for split, path in there.items() if path is not None}


def _file(path: Path, request: TextRequest) -> list[Row]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read", found=str(error)) from None
    rows = _json_lines(path, text) if path.suffix == ".jsonl" else _table(path, text, request)
    if not rows:
        raise DataError(f"{path} is empty", remedy="each row: label, text")
    if isinstance(rows[0], dict):
        return _picked(str(path), rows, request.columns)
    first = next((i for i, row in enumerate(rows) if len(row) < 2), None)
    if first is not None:
        raise DataError(
            f"{path} row {first + 1} has one column only",
            found=repr(str(rows[first])[:80]),
            remedy="each row: label, text; --delimiter names what stands between",
        )
    return [(row[0].strip(), " ".join(row[1:])) for row in rows]


def _json_lines(path: Path, text: str) -> list[Any]:
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = json.loads(line)
            if "\\ud" in line.lower():  # half of a surrogate pair is no text
                json.dumps(row, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} line {number} is no JSON", found=str(error)) from None
        if not isinstance(row, dict):
            raise DataError(f"{path} line {number} is no JSON object", found=line[:80])
        rows.append(row)
    return rows


def _table(path: Path, text: str, request: TextRequest) -> list[Any]:
    """Lists of cells, or dictionaries where the file has a header that is of use."""
    usual = "\t" if path.suffix == ".tsv" else ","
    delimiter = {"": usual, "\\t": "\t"}.get(request.delimiter, request.delimiter)
    rows = rows_of(path, text.splitlines(True), delimiter)
    if not rows:
        return []
    header = [cell.strip() for cell in rows[0]]
    lower = {cell.lower() for cell in header}
    if any(request.columns) or (lower & {*_LABELS} and lower & {*_TEXTS}):
        return [dict(zip(header, row, strict=False)) for row in rows[1:]]
    return rows


def rows_of(path: Path, lines: Iterable[str], delimiter: str) -> list[list[str]]:
    """The rows of a table that are not empty. DataError where it cannot be read."""
    table = csv.reader(lines, delimiter=delimiter)
    try:
        return [row for row in table if any(row)]
    except csv.Error as error:
        raise DataError(
            f"{path} line {table.line_num} cannot be read as a table",
            found=f"{error}",
            remedy="look for a quotation mark that is not closed; longer texts: a .jsonl file",
        ) from None


def _picked(name: str, rows: Iterable[Mapping[str, Any]], asked: tuple[str, str]) -> list[Row]:
    """Label and text out of rows with named columns."""
    columns: tuple[str, str] | None = None
    picked = []
    for number, row in enumerate(rows, 1):
        columns = columns or _columns(name, row, asked)
        label, text = (row.get(column) for column in columns)
        if label is None or text is None:
            raise DataError(f"{name} row {number} lacks {' or '.join(columns)}")
        picked.append((str(label).strip(), str(text)))
    return picked


def _columns(name: str, row: Mapping[str, Any], asked: tuple[str, str]) -> tuple[str, str]:
    found: list[str] = []
    for given, usual, flag in zip(asked, (_LABELS, _TEXTS), ("label", "text"), strict=True):
        column = given or next((c for c in row if c and c.lower() in usual), "")
        if column not in row:
            raise DataError(
                f"{name} has no column {given or f'that is known to hold a {flag}'}",
                found=f"columns: {', '.join(map(str, row))}",
                remedy=f"--{flag}-column NAME",
            )
        found.append(column)
    return found[0], found[1]


def _from_hub(request: TextRequest) -> tuple[dict[str, list[Row]], tuple[str, ...]]:
    parts = load_rows(request.hub)
    rows = {
        split: _picked(request.hub.name, part, request.columns) for split, part in parts.items()
    }
    # Public benchmarks hide the labels of their test part as -1.
    kept = {split: part for split, part in rows.items() if any(label != "-1" for label, _ in part)}
    features = getattr(parts["train"], "features", None) or {}
    known = [getattr(one, "names", None) for one in features.values()]
    return kept, tuple(next((names for names in known if names), ()))


def _labels(name: str, rows: Sequence[Row]) -> tuple[str, ...]:
    """The labels in order: numbers by value, words by alphabet."""
    found = {label for label, _ in rows}
    if not 2 <= len(found) <= _MOST_CLASSES:
        some = ", ".join(repr(label[:20]) for label in sorted(found)[:5])
        raise DataError(
            f"{name} has {len(found)} classes",
            found=f"labels: {some}{', …' if len(found) > 5 else ''}",
            remedy="2 to 1000 classes; --label-column NAME says where the labels are",
        )
    if all(_is_number(label) for label in found):
        return tuple(sorted(found, key=int))
    return tuple(sorted(found))


def _is_number(label: str) -> bool:
    return label.removeprefix("-").isdecimal() and len(label) < _MOST_DIGITS


def _class_names(name: str, labels: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    """The classes' names. Numbered labels take them by number, from 0 or from 1."""
    if not names or set(labels) == set(names):
        return labels
    if not all(_is_number(label) for label in labels):
        raise DataError(
            f"--class-names do not fit {name}",
            found=f"its labels are {', '.join(labels)}",
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


def _numbered(
    name: str, split: str, rows: Sequence[Row], number: Mapping[str, int]
) -> tuple[list[str], list[int]]:
    if not rows:
        raise DataError(f"{name} has no texts for {split}", remedy="add some")
    wrong = next((label for label, _ in rows if label not in number), None)
    if wrong is not None:
        raise DataError(
            f"{name}: label {wrong!r} of {split} is not among the training labels",
            found=f"these are {', '.join(number)}",
        )
    return [text for _, text in rows], [number[label] for label, _ in rows]


def _fingerprint(parts: Mapping[str, Sequence[Row]]) -> str:
    text = json.dumps([(name, rows) for name, rows in sorted(parts.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_GOOD = ["good", "great", "tasty", "excellent", "delicious", "wonderful"]
_BAD = ["bad", "awful", "bland", "terrible", "cold", "disappointing"]
_OTHERS = ["service", "music", "view", "staff", "price", "table"]


def meals(seed: int, count: int = 4000) -> list[Row]:
    """Reviews of food and of something else; the label says whether the food is praised.

    The same words occur in both classes, so that only their order tells.
    """
    draw = random.Random(seed)  # noqa: S311
    rows = []
    for _ in range(count):
        likes = draw.random() < 0.5
        food, other = draw.choice(_GOOD if likes else _BAD), draw.choice(_BAD if likes else _GOOD)
        clauses = [f"the food was {food}", f"the {draw.choice(_OTHERS)} was {other}"]
        draw.shuffle(clauses)
        rows.append(("praised" if likes else "blamed", " and ".join(clauses)))
    return rows


def dummy(seed: int, count: int = 4000, words: int = 64) -> list[Row]:
    """Random words: nothing can be learned from them."""
    draw = random.Random(seed)  # noqa: S311
    vocabulary = ["".join(draw.choices("abcdefghij", k=5)) for _ in range(4000)]
    return [
        (str(draw.randrange(2)), " ".join(draw.choices(vocabulary, k=words))) for _ in range(count)
    ]


MAKERS: dict[str, Callable[[int], list[Row]]] = {"meals": meals, "dummy": dummy}
