"""Labelled texts from csv, tsv, jsonl and parquet files, tar shards, and Hugging Face."""

from __future__ import annotations

import difflib
import hashlib
import json
import random
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from paceline.recipes.data import SPLIT_NAMES, TEXT_SETS, files_by_name, find_data, is_hub_id, tars
from paceline.recipes.data.classes import (
    MAX_DIGITS,
    describe_classes,
    label_number,
    similar_labels,
)
from paceline.recipes.data.download import DownloadOptions, find_or_download
from paceline.recipes.data.hub import is_saved, load_rows
from paceline.recipes.data.tables import (
    cell_delimiter,
    decompression,
    delimiter_remedy,
    first_row,
    has_different_delimiter,
    has_objects,
    read_rows,
)
from paceline.recipes.options import TextOptions
from paceline.spec.errors import DataError
from paceline.train.data.order import permutation

T = TypeVar("T")
Row = tuple[str, str]
"""Label as written, and text."""
Columns = tuple[str, str]
"""Names of the columns with labels and with texts; empty if a file does not name them."""
_SUFFIXES = (".csv", ".tsv", ".jsonl")
_LABEL_COLUMNS = (
    *("label", "labels", "class", "cls", "target"),
    *("sentiment", "category", "topic", "coarse_label"),
)
"""Usual names, by priority."""
_TEXT_COLUMNS = (
    *("text", "txt", "sentence", "content", "review"),
    *("message", "comment", "description", "title"),
)
_USUAL_COLUMNS = {"label": _LABEL_COLUMNS, "text": _TEXT_COLUMNS}
_MAX_CLASSES = 1000
_MAX_REMARKS = 3  # about labels


@dataclass(frozen=True)
class Table:
    """Labelled texts of one file or part.

    Attributes:
        unused: Names of the other columns.
    """

    rows: list[Row]
    columns: Columns = ("", "")
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recorded:
    """How a training read its data, as far as the run records it.

    Attributes:
        columns: Preferred to usual names.
        source: Name or path of the data set; empty if the same is read again.
    """

    columns: Columns
    delimiter: str = ""
    source: str = ""

    def delimiter_of(self, path: Path) -> str:
        """Returns the delimiter, if the training did not read the other kind of table."""
        suffixes = {Path(self.source).suffix.lower(), path.suffix.lower()}
        return "" if suffixes == {".csv", ".tsv"} else self.delimiter


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
        columns: Names of the columns that were read.
        unused: Names of the other columns.
    """

    source: str
    classes: tuple[str, ...]
    labels: tuple[str, ...]
    splits: dict[str, tuple[list[str], list[int]]]
    fingerprint: str
    split: dict[str, str | int | float]
    skipped: int = 0
    columns: Columns = ("", "")
    unused: tuple[str, ...] = ()

    @property
    def held_out(self) -> str:
        """Name of the part for evaluation."""
        return "test" if "test" in self.splits else "val"

    def describe_skipped(self) -> str:
        """Says how many rows were left out; empty if there are none."""
        if not self.skipped:
            return ""
        return f"{self.skipped} rows of {self.source} left out: no label, or no text"

    def remarks(self) -> Iterator[str]:
        """Yields lines about what was read: classes, columns, and rows that are left out."""
        numbers = (number for _, labels in self.splits.values() for number in labels)
        yield f"{self.source}: {describe_classes('row', self.classes, numbers)}"
        for names in similar_labels(self.labels)[:_MAX_REMARKS]:
            yield f"warning: classes that differ only in spelling: {', '.join(map(repr, names))}"
        if skipped := self.describe_skipped():
            yield skipped
        if self.unused:
            label, column = self.columns
            yield (
                f"{self.source}: labels from column {label}, texts from column {column};"
                f" unused: {', '.join(self.unused)[:80]}"
            )


def load_texts(
    options: TextOptions, labels: tuple[str, ...] = (), recorded: Recorded | None = None
) -> TextData:
    """Reads the data set; DataError names files and rows.

    Args:
        labels: Required labels, in this order; by default those of the files.
        recorded: How the data that a model was trained on were read; ``None`` for a training.
    """
    name = options.data
    tables, names = _read_splits(options, recorded)
    # Only for an evaluation, the data set may lack a part to train on.
    first = tables.get("train") or next(iter(tables.values()))
    if options.test_data:
        path = find_data(options.test_data, options.data_dir)
        tables["test"] = _read_file(path, options, recorded or _record(first, options))
    parts = {split: table.rows for split, table in tables.items()}
    if not labels and "train" not in parts:
        raise DataError(f"{name} has no part to train on", found=f"it has {', '.join(parts)}")
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
        parts = _hold_out(parts["train"], fraction, options.seed)
        split_info = {"method": "seeded", "seed": options.seed, "test_fraction": fraction}
    labels = labels or _find_labels(name, parts["train"])
    classes = _class_names(name, labels, options.class_names or names)
    number = {label: place for place, label in enumerate(labels)}
    remedy = "correct or remove such rows (each row: label, text)"
    if recorded is None:
        remedy += ", or add rows with this label to the training part"
    is_drawn = recorded is not None and split_info["method"] == "seeded"
    splits = {}
    for split, rows in parts.items():
        file = options.test_data if split == "test" else ""
        part = "" if file or is_drawn else f" of {split}"
        splits[split] = _encode_labels(file or name, part, rows, number, remedy)
    return TextData(
        name,
        classes,
        labels,
        splits,
        fingerprint(parts),
        split_info,
        skipped,
        first.columns,
        first.unused,
    )


def _read_splits(
    options: TextOptions, recorded: Recorded | None
) -> tuple[dict[str, Table], tuple[str, ...]]:
    """Reads the rows of each part, and the names of the classes if the data set has them."""
    name = options.data
    path = find_data(name, options.data_dir)
    if name in GENERATORS:
        return {"train": Table(GENERATORS[name](0))}, ()
    if name in TEXT_SETS:
        dataset, download = TEXT_SETS[name], DownloadOptions(options.offline, options.mirror)
        path = find_or_download(dataset, options.data_dir, _is_complete, download)
        return _read_files(_find_files(path), options, recorded), dataset.classes
    if path.is_file():
        return {"train": _read_file(path, options, recorded)}, ()
    if path.is_dir() and not is_saved(path) and (files := _find_files(path)):
        return _read_files(files, options, recorded), ()
    if tars.matches(path):
        return {split: Table(rows) for split, rows in tars.texts(path).items()}, ()
    if path.is_dir() or (is_hub_id(name)):
        return _from_hub(options, recorded)
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


def _hold_out(rows: Sequence[Row], fraction: float, seed: int) -> dict[str, list[Row]]:
    """Draws the test part by the seed; of each class, at least one row is for training.

    If no row were left to test on, nothing is moved. An evaluation draws in the same way: a copy
    of the training's data has the same parts.
    """
    divided = split_seeded(range(len(rows)), fraction, seed)
    learned = {rows[i][0] for i in divided["train"]}
    moved = {rows[i][0]: i for i in reversed(divided["val"]) if rows[i][0] not in learned}
    if len(moved) == len(divided["val"]):
        moved = {}
    training = {*divided["train"], *moved.values()}
    return {
        "train": [rows[i] for i in sorted(training)],
        "test": [rows[i] for i in divided["val"] if i not in training],
    }


def _is_complete(folder: Path) -> bool:
    return {"train", "test"} <= set(_find_files(folder))


def _find_files(folder: Path) -> dict[str, Path]:
    """Returns the file of each part.

    Raises:
        DataError: The file of only some parts is compressed. (Other folders are read as those of
            Hugging Face, which may be.)
    """
    files, found, compressed = files_by_name(folder), dict[str, Path](), list[Path]()
    for split, names in SPLIT_NAMES.items():
        candidates = [f"{name}{suffix}" for name in names for suffix in _SUFFIXES]
        if file := next((files[name] for name in candidates if name in files), None):
            found[split] = file
        else:
            compressed += (path for path in files.values() if path.stem.lower() in candidates)
    for path in compressed if found else ():
        if command := decompression(path):
            raise DataError(f"{path} is compressed", remedy=f"decompress it: {command}")
    return found


def _read_files(
    paths: Mapping[str, Path], options: TextOptions, recorded: Recorded | None
) -> dict[str, Table]:
    """Reads the file of each part, preferably the same columns of all."""
    tables: dict[str, Table] = {}
    for split, path in paths.items():
        tables[split] = _read_file(path, options, recorded)
        recorded = recorded or _record(tables[split], options)
    return tables


def _record(table: Table, options: TextOptions) -> Recorded:
    return Recorded(table.columns, options.delimiter)


def _read_file(path: Path, options: TextOptions, recorded: Recorded | None) -> Table:
    """Reads a file; ``recorded`` is ``None`` for a file to train on."""
    are_named = bool(options.label_column or options.text_column)
    preferred = recorded.columns if recorded else None
    delimiter = recorded.delimiter_of(path) if recorded else options.delimiter

    def is_header(names: Sequence[str]) -> bool:
        return are_named or all(select_columns(names, preferred))

    rows = read_rows(path, delimiter, is_header, has_option=recorded is None)
    if not rows:
        raise DataError(f"{path} is empty", remedy="each row: label, text")
    if isinstance(rows[0], dict):
        return _select_columns(str(path), rows, options, preferred, first_row(path))
    if recorded is None and all(len(row) > 1 for row in rows):
        _refuse_header(path, rows)
    remedy = "each row: label, text"
    if recorded is None:
        remedy = delimiter_remedy(rows[0]) or f"{remedy}; --delimiter names what stands between"
    return Table(_parse_rows(path, rows, remedy))


def _parse_rows(path: Path, rows: Sequence[Sequence[str]], remedy: str) -> list[Row]:
    """Returns the label in the first column, and the text in the others."""
    first = next((i for i, row in enumerate(rows) if len(row) < 2), None)
    if first is not None:
        example = repr(str(rows[first])[:80])
        raise DataError(f"{path} row {first + 1} has one column only", found=example, remedy=remedy)
    return [(row[0].strip(), " ".join(row[1:])) for row in rows]


def read_texts(path: Path, recorded: Recorded, labels: Collection[str]) -> list[str]:
    """Reads texts to classify, one a row, from where :func:`load_texts` expects them.

    A table without a header may also have a single column, of texts.

    Args:
        recorded: How the data that the model was trained on were read.
        labels: Its labels: a row that starts with one is an example, even if it is a usual name.

    Raises:
        DataError: The texts are not found, or a row has none.
    """
    columns, delimiter = recorded.columns, recorded.delimiter_of(path)

    def is_certain(names: Sequence[str]) -> bool:
        return all(select_columns(names, columns))

    def is_header(names: Sequence[str]) -> bool:
        is_example = not columns[1] and len(names) > 1 and names[0] in labels
        return is_certain(names) or (bool(select_columns(names, columns)[1]) and not is_example)

    rows = read_rows(path, delimiter, is_header, is_certain)
    if not rows:
        raise DataError(f"{path} is empty")
    name = columns[1] or "text"
    remedy = f"write {name} over the column of texts, in the first line"
    if isinstance(rows[0], dict):
        if not (column := select_columns(rows[0], columns)[1]):
            raise DataError(
                f"{path} has no column that is known to hold a text",
                found=f"columns: {', '.join(map(str, rows[0]))}",
                remedy=f"rename it to {name}",
            )
        _refuse_choice(str(path), [*rows[0]], "text", columns[1])
        return [text for (text,) in _select_cells(str(path), rows, [column], first_row(path))]
    is_single = all(len(row) == 1 for row in rows)
    has_columns = not is_single or has_different_delimiter(rows, cell_delimiter(path, delimiter))
    if has_columns and (columns[1] or is_single):
        raise DataError(
            f"{path} has several columns, and none that is known to hold a text",
            found=f"line 1: {' '.join(rows[0])[:80]}",
            remedy=remedy,
        )
    if is_single:
        return [row[0] for row in rows]
    remedy = f"a cell with a delimiter in it needs quotes; or {remedy}"
    return [text for _, text in _parse_rows(path, rows, remedy)]


def _refuse_header(path: Path, rows: Sequence[Sequence[str]]) -> None:
    """Raises DataError if the first row is no example.

    In a column of classes, no other row has the cell of the first one, but others share theirs. The
    classes are in the first column, or, if every row has its own text there, in the last one.
    """
    for column in (0, -1):
        first, *remaining = (row[column].strip() for row in rows)
        if len({*remaining}) == len(remaining):
            continue
        if label_number(first) is not None or first in remaining:
            return
        sizes = {place: sum(len(row[place]) for row in rows if place < len(row))
                 for place in range(len(rows[0])) if place != column % len(rows[0])}  # fmt: skip
        places = (column, max(sizes, key=sizes.__getitem__))  # texts are longest
        label, text = (shlex.quote(rows[0][place].strip()) for place in places)
        raise DataError(
            f"{path} row 1 seems to name the columns, but not those of labels and texts",
            found=f"row 1: {', '.join(rows[0])[:80]}; no other row has the label {first[:40]!r}",
            remedy=f"--label-column {label} --text-column {text}, or the other way round; if row"
            " 1 is an example, add a second one of its class",
        )


def select_columns(names: Iterable[str], preferred: Columns | None = None) -> Columns:
    """Returns the preferred columns with labels and texts, else the first with usual names."""
    existing = [name for name in names if name]
    spellings = {name.lower(): name for name in reversed(existing)}

    def select(candidates: Sequence[str], first: str) -> str:
        matching = (spellings[name] for name in candidates if name in spellings)
        return first if first in existing else next(matching, "")

    label, text = preferred or ("", "")
    return select(_LABEL_COLUMNS, label), select(_TEXT_COLUMNS, text)


def _select_columns(
    name: str,
    rows: Iterable[Mapping[str, Any]],
    options: TextOptions,
    preferred: Columns | None,
    first: int = 1,
) -> Table:
    """Selects label and text from rows with named columns, of which ``first`` is the number."""
    names = [*next(iter(rows), {})]
    if not names:
        return Table([])
    columns = _require_columns(name, names, options, preferred)
    cells = _select_cells(name, rows, columns, first)
    unused = tuple(str(column) for column in names if column not in columns)
    return Table([(label.strip(), text) for label, text in cells], columns, unused)


def _select_cells(
    name: str, rows: Iterable[Mapping[str, Any]], columns: Sequence[str], first: int
) -> list[tuple[str, ...]]:
    """Returns the cells of these columns, empty for null; DataError names a row that lacks one."""
    remedy = "complete or remove the row"
    if not has_objects(Path(name)):
        remedy += "; a cell with a delimiter in it needs quotes"
    selected = []
    for number, row in enumerate(rows, first):
        if missing := [column for column in columns if column not in row]:
            raise DataError(
                f"{name} row {number} lacks {' or '.join(missing)}",
                found=f"{[*row.values()]}"[:80],
                remedy=remedy,
            )
        cells = (row[column] for column in columns)
        selected.append(tuple("" if cell is None else str(cell) for cell in cells))
    return selected


def _require_columns(
    name: str, names: Sequence[str], options: TextOptions, preferred: Columns | None
) -> Columns:
    """Returns the columns that the options name, else those that are found."""
    label, text = select_columns(names, preferred)
    columns = options.label_column or label, options.text_column or text
    explicit = options.label_column, options.text_column
    known = preferred or columns
    for flag, required, recorded, column in zip(
        _USUAL_COLUMNS, explicit, known, columns, strict=True
    ):
        _refuse_choice(name, names, flag, required or recorded)
        if column not in names:
            raise DataError(
                f"{name} has no column {required or f'that is known to hold a {flag}'}",
                found=f"columns: {', '.join(map(str, names))}",
                remedy=_column_remedy(flag, required, names)
                if preferred is None
                else f"rename it to {flag}",
            )
    return columns


def _refuse_choice(name: str, names: Sequence[str], flag: str, recorded: str) -> None:
    """Raises DataError for several columns with usual names if none is recorded.

    None is recorded if the training data had no header, and in runs of older versions, which
    were trained on the leftmost one.
    """
    usual = [column for column in names if column and column.lower() in _USUAL_COLUMNS[flag]]
    if not recorded and len(usual) > 1:
        raise DataError(
            f"{name} has {len(usual)} columns that may hold a {flag}",
            found=f"{', '.join(usual)}; the training recorded no name",
            remedy="rename all but one of them; an older version that trained on such a header read"
            f" the leftmost one: keep that, or train again with --{flag}-column",
        )


def _column_remedy(flag: str, explicit: str, columns: Sequence[str]) -> str:
    if remedy := delimiter_remedy(columns):
        return remedy
    near = difflib.get_close_matches(explicit.lower(), [column.lower() for column in columns], 1)
    meant = next((column for column in columns if [column.lower()] == near), "NAME")
    return f"--{flag}-column {shlex.quote(meant)}"


def _from_hub(
    options: TextOptions, recorded: Recorded | None
) -> tuple[dict[str, Table], tuple[str, ...]]:
    parts = load_rows(options.data, options.data_config, options.offline)
    tables = {}
    preferred = recorded.columns if recorded else None
    for split, part in parts.items():
        tables[split] = _select_columns(options.data, part, options, preferred)
        preferred = preferred or tables[split].columns
    features = getattr(parts["train"], "features", None) or {}
    names = getattr(features.get(tables["train"].columns[0]), "names", None) or ()
    # Public benchmarks hide the labels of their test part as -1, or as null.
    return {
        split: table
        for split, table in tables.items()
        if any(label not in ("-1", "") for label, _ in table.rows)
    }, tuple(names)


def _find_labels(name: str, rows: Sequence[Row]) -> tuple[str, ...]:
    """Returns the labels in order: numbers by value, words by alphabet."""
    labels = {label for label, _ in rows}
    if not 2 <= len(labels) <= _MAX_CLASSES:
        examples = ", ".join(repr(label[:20]) for label in sorted(labels)[:5])
        raise DataError(
            f"{name} has {len(labels)} class{'es' * (len(labels) != 1)}",
            found=f"labels: {examples}{', …' if len(labels) > 5 else ''}",
            remedy="2 to 1000 classes; --label-column NAME says where the labels are",
        )
    if all(_is_number(label) for label in labels):
        return tuple(sorted(labels, key=int))
    return tuple(sorted(labels))


def _list_labels(labels: Sequence[str]) -> str:
    """Returns the first labels, shortened."""
    listed = ", ".join(label[:40] for label in labels[:20])
    return f"{listed} and {len(labels) - 20} more" if labels[20:] else listed


def _is_number(label: str) -> bool:
    return label.removeprefix("-").isdecimal() and len(label) < MAX_DIGITS


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
    name: str, part: str, rows: Sequence[Row], number: Mapping[str, int], remedy: str
) -> tuple[list[str], list[int]]:
    if not rows:
        raise DataError(f"{name} has too few texts{part}", remedy="add some")
    wrong = next((label for label, _ in rows if label not in number), None)
    if wrong is not None:
        raise DataError(
            f"{name}: label {wrong!r}{part} is not among the training labels",
            found=f"these are {_list_labels([*number])}",
            remedy=remedy,
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
