"""Parquet files as shards: a row is a sample; a group of rows is read at once."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from paceline.spec.errors import DataError, SettingError
from paceline.train.data.order import Ids

CACHE_BYTES = 256 << 20
"""Limit of the row groups that a process keeps beyond those it needs at a time."""
MAX_ROWS_PER_BYTE = 1000
"""Rows for each byte of a file: a small one could announce any number."""
MAX_GROUP_BYTES = 1 << 30
"""Bytes of a row group in memory, unless its file is large (``MAX_GROUP_EXPANSION``)."""
MAX_GROUP_EXPANSION = 50
"""Bytes of a row group in memory for each byte of its file, if that allows more: a dictionary
stores a long text once, however many rows have it."""
_VALUE_BYTES = {"INT32": 1, "FLOAT": 4, "INT64": 8, "DOUBLE": 8}
"""Least memory of a value by physical type; a file may repeat one value in a few bytes."""
_GROUP_PARTS = 32  # of a group, that are unpacked one after the other


def scan(path: Path) -> Ids:
    """Returns group and place in the group of each row; the third column is -1.

    Reads only the end of the file.

    Raises:
        DataError: The file is damaged or cut off.
        SettingError: pyarrow is not installed.
    """
    library, file_bytes = _library(), path.stat().st_size
    try:
        with library.ParquetFile(path) as file:
            metadata = file.metadata
            sizes = [
                metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)
            ]
        if sum(sizes) > MAX_ROWS_PER_BYTE * file_bytes:
            raise ValueError(f"it announces {sum(sizes):,} rows")
    except Exception as error:  # whatever pyarrow raises
        raise DataError(
            f"the shard {path} cannot be used",
            found=f"{error} ({file_bytes:,} bytes)",
            remedy="copy it again; what it was made from is whole",
        ) from None
    rows = np.full((sum(sizes), 3), -1, dtype=np.int64)
    rows[:, 0] = np.repeat(np.arange(len(sizes)), sizes)
    rows[:, 1] = np.concatenate([np.arange(size) for size in sizes] or [np.zeros(0)])
    return rows


class GroupCache:
    """Caches the row groups that were read last, as tables; at least ``min_groups``."""

    def __init__(self, min_groups: int) -> None:
        self._min_groups = min_groups
        self._tables: OrderedDict[tuple[Path, int], Any] = OrderedDict()
        self._bytes = 0

    def rows(self, path: Path, group: int, places: list[int]) -> list[dict[str, Any]]:
        """Returns rows of a group as dictionaries of Python values."""
        rows: list[dict[str, Any]] = self._group(path, group).take(places).to_pylist()
        return rows

    def _group(self, path: Path, group: int) -> Any:
        if (path, group) in self._tables:
            self._tables.move_to_end((path, group))
        else:
            table = _read(path, group)
            self._tables[path, group] = table
            self._bytes += table.nbytes
        while self._bytes > CACHE_BYTES and len(self._tables) > self._min_groups:
            self._bytes -= self._tables.popitem(last=False)[1].nbytes
        return self._tables[path, group]


def _read(path: Path, group: int) -> Any:
    """Reads a row group as a table, one column after another; DataError if it is too large."""
    import pyarrow

    max_bytes = max(MAX_GROUP_BYTES, MAX_GROUP_EXPANSION * path.stat().st_size)
    with _library().ParquetFile(path) as file:
        metadata = file.metadata.row_group(group)
        chunks = [metadata.column(number) for number in range(metadata.num_columns)]
        if sum(_announced_bytes(chunk) for chunk in chunks) > max_bytes:
            raise _too_large(path, group, max_bytes)
        # The metadata may be wrong, and tells no length of texts that a dictionary holds once.
        batch_rows = max(1, metadata.num_rows // _GROUP_PARTS)
        columns, size = {}, 0
        for field in file.schema_arrow:
            parts = []
            for batch in file.iter_batches(batch_rows, [group], columns=[field.name]):
                # More columns come if names have dots, or if two columns have the same name.
                parts.append(batch.column(batch.schema.get_all_field_indices(field.name)[-1]))
                size += parts[-1].nbytes
                if size > max_bytes:
                    raise _too_large(path, group, max_bytes)
            columns[field.name] = pyarrow.chunked_array(parts, None if parts else field.type)
        return pyarrow.table(columns)


def _announced_bytes(chunk: Any) -> int:
    """Returns the least memory that a column of a group takes, by its metadata; never negative."""
    values_bytes = chunk.num_values * _VALUE_BYTES.get(chunk.physical_type, 0)
    return max(0, int(chunk.total_uncompressed_size), int(values_bytes))


def _too_large(path: Path, group: int, max_bytes: int) -> DataError:
    return DataError(
        f"rows of the shard {path} need more memory than they may",
        found=f"group {group} stands for more than {max_bytes >> 20} MiB",
        remedy="write it again with fewer rows in a group (row_group_size)",
    )


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
