"""Parquet files as shards: a row is a sample; a group of rows is read at once."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from paceline.spec.errors import DataError, SettingError
from paceline.train.data.order import Ids

MOST_BYTES = 256 << 20
"""Of the groups of rows that a process keeps beyond those that it needs at a time."""
MOST_ROWS = 1000
"""For each byte of a file: a small one may announce any number."""
MOST_OF_GROUP = 1 << 30
"""Bytes of a group of rows in memory, or as many times the size of its file as ``MOST_TIMES``: in
a dictionary a long text counts for little, however many rows have it."""
MOST_TIMES = 50
_PARTS = 32  # of a group, that are unpacked one after the other


def scan(path: Path) -> Ids:
    """Group and place in the group of each row; the third column is -1. Only the end is read.

    Raises:
        DataError: The file is damaged or cut off.
        SettingError: pyarrow is not installed.
    """
    library = _library()
    try:
        with library.ParquetFile(path) as file:
            about = file.metadata
            sizes = [about.row_group(number).num_rows for number in range(about.num_row_groups)]
    except Exception as error:  # whatever pyarrow raises
        raise DataError(
            f"the shard {path} cannot be used",
            found=f"{error} ({path.stat().st_size:,} bytes)",
            remedy="copy it again; what it was made from is whole",
        ) from None
    size = path.stat().st_size
    if sum(sizes) > MOST_ROWS * size:
        raise DataError(
            f"the shard {path} cannot be used",
            found=f"it announces {sum(sizes):,} rows in {size:,} bytes",
            remedy="copy it again; what it was made from is whole",
        )
    rows = np.full((sum(sizes), 3), -1, dtype=np.int64)
    rows[:, 0] = np.repeat(np.arange(len(sizes)), sizes)
    rows[:, 1] = np.concatenate([np.arange(size) for size in sizes] or [np.zeros(0)])
    return rows


class Groups:
    """The groups of rows that were read last, as a table each.

    Args:
        least: As many are kept in any case: those of shards that are visited together.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._kept: OrderedDict[tuple[Path, int], Any] = OrderedDict()
        self._bytes = 0

    def rows(self, path: Path, group: int, places: list[int]) -> list[dict[str, Any]]:
        """Rows of a group, as dictionaries of Python values."""
        found: list[dict[str, Any]] = self._group(path, group).take(places).to_pylist()
        return found

    def _group(self, path: Path, group: int) -> Any:
        if (path, group) in self._kept:
            self._kept.move_to_end((path, group))
        else:
            table = _read(path, group)
            self._kept[path, group] = table
            self._bytes += table.nbytes
        while self._bytes > MOST_BYTES and len(self._kept) > self._least:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return self._kept[path, group]


def _read(path: Path, group: int) -> Any:
    import pyarrow

    most = max(MOST_OF_GROUP, MOST_TIMES * path.stat().st_size)
    parts, size = [], 0
    with _library().ParquetFile(path) as file:
        count = max(1, file.metadata.row_group(group).num_rows // _PARTS)
        for part in file.iter_batches(batch_size=count, row_groups=[group]):
            parts.append(part)
            size += part.nbytes
            if size > most:
                raise DataError(
                    f"rows of the shard {path} need more memory than they may",
                    found=f"group {group} stands for more than {most >> 20} MiB",
                    remedy="write it again with fewer rows in a group (row_group_size)",
                )
        return pyarrow.Table.from_batches(parts, file.schema_arrow)


def _library() -> Any:
    try:
        import pyarrow.parquet as library
    except ImportError as error:
        raise SettingError(
            "shards of parquet files are read with pyarrow",
            found=str(error),
            remedy="pip install pyarrow, or write tar files",
        ) from None
    return library
