"""Data that is too large for memory, or for a file each: folders of tar or parquet shards.

An index says where each sample lies, so a stream of shards is a data set with numbered samples:
its order is a pure function of seed, epoch and position (``order.ShardOrder``), each rank reads
only its own samples, and the position to resume from is one integer.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import re
import secrets
import stat
import tarfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from paceline.spec.errors import DataError, PacelineError, SettingError
from paceline.train.data import parquet, tars
from paceline.train.data.disk_lock import exclusive_lock
from paceline.train.data.order import Ids, Order, ShardOrder
from paceline.train.files import check_regular, read_bytes_limited, write_bytes

Sample = dict[str, Any]
"""The parts of a sample: of a tar bytes by ending, and its key as ``__key__``; of parquet a row."""
Decode = Callable[[Sample], Any]

_FORMATS = {".tar": tars.scan, ".parquet": parquet.scan}
_INDEX = ".paceline-index"
_SPANS_NAME = re.compile(r"spans-[0-9a-f]{8}\.npy")
_CACHE_FOLDER = "~/.cache/paceline/shards"
_SCAN_THREADS = 16


class ShardedDataset:
    """Samples in a folder of shards: ``*.tar`` as webdataset writes them, or ``*.parquet``.

    The shards are indexed once for each disk; the index lies in the folder, or where that cannot
    be written to, in ``~/.cache/paceline/shards``. A shard whose size or time of change is another
    is indexed again.

    Args:
        decode: Makes what the script trains on of a :data:`Sample`. Without it, a dictionary in
            which numbers (``cls``), texts (``txt``), ``json`` and arrays (``npy``) are decoded.
            What it draws from Python's, numpy's or torch's generators belongs to the sample.
        pattern: Which files, as in ``train-*.tar`` (default: all shards of the folder).
        window: Samples that are shuffled together; memory holds none of them, the disk's cache may.
        together: Shards that are visited at a time.

    Attributes:
        fingerprint: Equal exactly where shards and order are; made for the ``identity`` of
            ``session.checkpoints``.

    Raises:
        DataError: No shards, or one that is damaged; names shard and member.
        SettingError: ``window`` or ``together`` is below 1; pyarrow is not installed.
    """

    def __init__(
        self,
        folder: str | Path,
        decode: Decode | None = None,
        *,
        pattern: str = "",
        window: int = 4096,
        together: int = 8,
    ) -> None:
        if window < 1 or together < 1:
            raise SettingError(f"window {window} and together {together} must be at least 1")
        self._files = _list_shards(Path(folder).expanduser(), pattern)
        self._index = _index_of(self._files)
        self._decode, self._window, self._together = decode or decoded, window, together
        self._starts = np.cumsum(self._index.shard_sizes) - self._index.shard_sizes
        self._reader: _Reader | None = None
        description = [(file.path.name, file.size) for file in self._files], [window, together]
        digest = hashlib.sha256(
            json.dumps(description).encode() + self._index.shard_sizes.tobytes()
        )
        digest.update(np.ascontiguousarray(self._index.spans).data)
        self.fingerprint = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._index.spans)

    def __getitem__(self, number: int) -> Any:
        return self.made(number, self.raw(np.array([number]))[0])

    @property
    def counts(self) -> Ids:
        """Samples of each shard, shape ``[shards]``."""
        return self._index.shard_sizes

    @property
    def numbers(self) -> Ids:
        """What each sample's ``.cls`` holds, shape ``[samples]``; -1 where there is none."""
        return np.ascontiguousarray(self._index.spans[:, 2])

    def visiting_order(self, seed: int, shuffle: bool, ids: Ids | None = None) -> Order:
        """The order in which disks like to read.

        Args:
            shuffle: False keeps the order of the shards.
            ids: Some samples only, ascending; the order then counts in them, from 0.
        """
        sizes = self.counts
        if ids is not None:
            sizes = np.bincount(self._shards(ids), minlength=len(sizes)).astype(np.int64)
        options = {"num_concurrent": self._together, "window": self._window}
        return ShardOrder(int(sizes.sum()), seed, shuffle, shard_sizes=sizes, **options)

    def raw(self, ids: Ids) -> list[Sample]:
        """These samples as they are stored, read in the order of the shards.

        Raises:
            DataError: A shard has changed or cannot be read; names it and the sample.
        """
        samples = self._process_reader().read(np.unique(ids), self._shards(np.unique(ids)))
        return [samples[number] for number in ids.tolist()]

    def made(self, number: int, sample: Sample) -> Any:
        """What ``decode`` makes of a sample.

        Raises:
            DataError: It failed; names shard and sample.
        """
        try:
            return self._decode(sample)
        except PacelineError:
            raise
        except Exception as error:
            raise DataError(
                f"{self.name(number, sample)} cannot be decoded",
                found=f"{type(error).__name__}: {error}",
                remedy="mend or remove it, or let decode accept it",
            ) from error

    def name(self, number: int, sample: Sample) -> str:
        """Returns how messages name a sample: by its shard, and its key or row."""
        shard = int(self._shards(np.array([number]))[0])
        place = sample.get(tars.KEY) or f"row {number - int(self._starts[shard])}"
        return f"{self._files[shard].path}: {place}"

    def will_need(self, ids: Ids) -> None:
        """Has the system read these samples ahead, in their order on the disk."""
        ids = np.unique(ids)
        self._process_reader().advise(ids, self._shards(ids))

    def _process_reader(self) -> _Reader:
        """Returns this process's reader: a fork must not share locks."""
        if self._reader is None or self._reader.process != os.getpid():
            self._reader = _Reader(self._index, self._together)
        return self._reader

    def _shards(self, ids: Ids) -> Ids:
        shard_ends = self._starts + self._index.shard_sizes
        return np.searchsorted(shard_ends, ids, side="right")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}


def decoded(sample: Sample) -> Sample:
    """Decodes the usual parts of a sample: ``cls``, ``txt``, ``json``, ``npy``."""
    return {
        name: _DECODERS[name](part) if name in _DECODERS else part for name, part in sample.items()
    }


def _array(part: bytes) -> Any:
    stream = io.BytesIO(part)
    version = np.lib.format.read_magic(stream)
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else (
        np.lib.format.read_array_header_2_0
    )  # fmt: skip
    shape, _, dtype = header(stream)
    if math.prod(shape) * dtype.itemsize > len(part) - stream.tell():
        raise ValueError(f"an array of shape {shape} in {len(part)} bytes")
    return np.load(io.BytesIO(part), allow_pickle=False)


def _text(part: Any) -> str:
    return part.decode() if isinstance(part, bytes) else str(part)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "cls": int,
    "txt": _text,
    "json": json.loads,
    "npy": _array,
}


def write_shards(
    folder: str | Path, samples: Iterable[Mapping[str, Any]], *, size: int = 256 << 20
) -> list[Path]:
    """Writes samples as tar shards ``00000.tar``, …: the same samples give the same files.

    Args:
        folder: Must hold no shards yet.
        samples: Parts by ending: bytes as they are, texts, numbers, arrays and tensors (``npy``),
            and all else as JSON. ``__key__`` names a sample, otherwise its number does.
        size: A shard is full after so many bytes.

    Raises:
        SettingError: There are shards already.
        DataError: There are no samples.
    """
    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.tar")):
        raise SettingError(f"{folder} holds shards already", remedy="name another folder")
    paths: list[Path] = []
    for content in tars.pack(_encoded(samples), size):
        path = folder / f"{len(paths):05}.tar"
        write_bytes(path, content)
        paths.append(path)
    if not paths:
        raise DataError(f"no samples to write to {folder}")
    return paths


def _encoded(samples: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, bytes]]]:
    for number, sample in enumerate(samples):
        key = str(sample.get(tars.KEY, f"{number:09}"))
        parts = {name: part for name, part in sample.items() if name != tars.KEY}
        yield key, {name.lower(): _encode_part(part) for name, part in parts.items()}


def _encode_part(part: Any) -> bytes:
    """Returns a part of a sample as a shard holds it: bytes, text, an array as .npy, else JSON."""
    if isinstance(part, (bytes, bytearray, memoryview)):
        return bytes(part)
    if isinstance(part, str):
        return part.encode()
    if isinstance(part, (np.ndarray, Tensor)):
        content = io.BytesIO()
        np.save(content, np.asarray(part), allow_pickle=False)
        return content.getvalue()
    return json.dumps(part.item() if isinstance(part, np.generic) else part).encode()


# -- the index -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _File:
    """A shard file: its size in bytes, and when it was changed, in nanoseconds."""

    path: Path
    size: int
    changed: int

    @property
    def mark(self) -> tuple[str, int, int]:
        return self.path.name, self.size, self.changed


@dataclass(frozen=True)
class _Index:
    """Where samples lie.

    Attributes:
        shard_sizes: Samples of each, shape ``[shards]``.
        spans: Of each sample, shape ``[samples, 3]``: see ``scan`` of the format.
    """

    files: tuple[_File, ...]
    shard_sizes: Ids
    spans: Ids

    @classmethod
    def of(cls, files: Sequence[_File], by_mark: Mapping[tuple[str, int, int], Ids]) -> _Index:
        parts = [by_mark[file.mark] for file in files]
        sizes = np.array([len(part) for part in parts], dtype=np.int64)
        return cls(tuple(files), sizes, np.concatenate(parts))

    def part(self, files: Sequence[_File]) -> _Index:
        """The index of these files; where they follow each other without a copy."""
        place = {file.mark: number for number, file in enumerate(self.files)}
        numbers = [place[file.mark] for file in files]
        if numbers != [*range(numbers[0], numbers[0] + len(numbers))]:
            return _Index.of(files, self.by_mark())
        sizes = self.shard_sizes[numbers]
        start = int(self.shard_sizes[: numbers[0]].sum())
        return _Index(tuple(files), sizes, self.spans[start : start + int(sizes.sum())])

    def by_mark(self) -> dict[tuple[str, int, int], Ids]:
        span_ends = np.cumsum(self.shard_sizes).tolist()
        return {
            file.mark: self.spans[end - count : end]
            for file, count, end in zip(
                self.files, self.shard_sizes.tolist(), span_ends, strict=True
            )
        }


def _list_shards(folder: Path, pattern: str) -> tuple[_File, ...]:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder", remedy="a folder of *.tar or *.parquet shards")
    paths = sorted(
        path for path in folder.glob(pattern or "*")
        if path.suffix.lower() in _FORMATS and path.name[0] != "." and path.is_file()
    )  # fmt: skip
    kinds = {path.suffix.lower() for path in paths}
    if len(kinds) != 1:
        names = sorted(path.name for path in folder.glob(pattern or "*"))
        raise DataError(
            f"{folder} holds no shards" if not kinds else f"{folder} holds two kinds of shards",
            found=", ".join(names[:5]) + (", …" if len(names) > 5 else "") or "nothing",
            remedy="a folder of uncompressed *.tar files, or of *.parquet files; pattern= chooses",
        )
    stats = ((path, path.stat()) for path in paths)
    return tuple(_File(path, info.st_size, info.st_mtime_ns) for path, info in stats)


def _index_of(files: tuple[_File, ...]) -> _Index:
    """Returns the index of these shards: a stored one, or a new one made by one process."""
    for place in _index_folders(files[0].path.parent):
        try:
            place.mkdir(parents=True, exist_ok=True)
            with exclusive_lock(place / "lock"):
                return _load_or_extend(place, files)
        except OSError:  # read-only, forbidden or full
            continue
    return _scan_shards(files)


def _index_folders(folder: Path) -> Iterator[Path]:
    if _is_trusted_index(folder / _INDEX):
        yield folder / _INDEX
    with contextlib.suppress(RuntimeError):  # nobody's home
        name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        yield Path(_CACHE_FOLDER).expanduser() / name


def _is_trusted_index(place: Path) -> bool:
    """Whether an index folder is missing, or a folder of this user, root or the data's owner.

    Where everybody may make files, anybody could make it, hold its lock and change its content.
    """
    try:
        status = place.lstat()
    except OSError:
        return True
    owners = (os.getuid(), 0, place.parent.stat().st_uid)
    return stat.S_ISDIR(status.st_mode) and status.st_uid in owners


def _load_or_extend(place: Path, files: tuple[_File, ...]) -> _Index:
    """Returns the stored index, extended by missing shards and without removed ones."""
    index = _read_index(place)
    spans = index.by_mark()
    missing = [file for file in files if file.mark not in spans]
    if missing:
        folder = files[0].path.parent
        unchanged = [file for file in index.files if _is_unchanged(folder, file)]
        new_index = _scan_shards(missing)
        spans = {**{file.mark: spans[file.mark] for file in unchanged}, **new_index.by_mark()}
        all_files = sorted([*unchanged, *missing], key=lambda file: file.path.name)
        new_index = _Index.of(all_files, spans)
        _write_index(place, new_index)
        index = _read_index(place)  # from the disk, where all ranks of a node have one copy of it
        index = index if len(index.files) == len(all_files) else new_index
    return index.part(files)


def _is_unchanged(folder: Path, file: _File) -> bool:
    try:
        info = (folder / file.path.name).stat()
    except OSError:
        return False
    return (info.st_size, info.st_mtime_ns) == (file.size, file.changed)


def _scan_shards(files: Sequence[_File]) -> _Index:
    """Scans shards in threads, as a network disk mostly waits."""
    with ThreadPoolExecutor(min(_SCAN_THREADS, len(files))) as pool:
        all_spans = pool.map(lambda file: _FORMATS[file.path.suffix.lower()](file.path), files)
        return _Index.of(
            files,
            {file.mark: file_spans for file, file_spans in zip(files, all_spans, strict=True)},
        )


def _read_index(place: Path) -> _Index:
    """Returns the stored index; an empty one if it is missing or damaged."""
    try:
        content = json.loads(read_bytes_limited(place / "index.json"))
        files = tuple(_File(Path(name), size, changed) for name, size, changed in content["files"])
        sizes = np.array(content["counts"], dtype=np.int64)
        if not _SPANS_NAME.fullmatch(content["spans"]):
            raise ValueError(content["spans"])
        check_regular(place / content["spans"])
        spans = np.load(place / content["spans"], mmap_mode="r", allow_pickle=False)
        is_plausible = all(
            0 <= count <= file.size * parquet.MAX_ROWS_PER_BYTE
            for file, count in zip(files, content["counts"], strict=True)
        )
        if is_plausible and spans.shape == (sizes.sum(), 3) and spans.dtype == np.int64:
            return _Index(files, sizes, spans)
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        pass
    return _Index((), np.zeros(0, dtype=np.int64), np.zeros((0, 3), dtype=np.int64))


def _write_index(place: Path, index: _Index) -> None:
    name = f"spans-{secrets.token_hex(4)}.npy"
    content = io.BytesIO()
    np.save(content, index.spans)
    write_bytes(place / name, content.getvalue())
    description = {
        "files": [file.mark for file in index.files],
        "counts": index.shard_sizes.tolist(),
        "spans": name,
    }
    write_bytes(place / "index.json", json.dumps(description).encode())
    for previous in place.glob("spans-*.npy"):
        if previous.name != name:
            previous.unlink(missing_ok=True)


# -- reading ---------------------------------------------------------------------------------


class _Reader:
    """Reads shards. Caches belong to one process."""

    def __init__(self, index: _Index, together: int) -> None:
        self.process = os.getpid()
        # A window reaches from one group of rows into the next.
        self._index, self._groups = index, parquet.GroupCache(2 * together)
        self._lock = threading.Lock()  # a thread may read ahead while another evaluates

    def read(self, ids: Ids, shards: Ids) -> dict[int, Sample]:
        """Returns samples by number; ids ascend, as they lie on the disk."""
        samples: dict[int, Sample] = {}
        for shard in np.unique(shards).tolist():
            shard_ids = ids[shards == shard]
            path = self._index.files[shard].path
            unpacked = self._members if path.suffix.lower() == ".tar" else self._rows
            try:
                with self._opened(shard) as file, self._lock:
                    decoded = unpacked(path, file, self._index.spans[shard_ids])
            except (OSError, ValueError, tarfile.TarError) as error:
                raise DataError(
                    f"the shard {path} cannot be read at samples {shard_ids[0]} to {shard_ids[-1]}",
                    found=str(error),
                    remedy="look at its disk; if the shard was changed, start again",
                ) from None
            samples |= dict(zip(shard_ids.tolist(), decoded, strict=True))
        return samples

    def _members(self, _: Path, file: int, spans: Ids) -> list[Sample]:
        samples = []
        size = os.fstat(file).st_size
        for start, stop in spans[:, :2].tolist():
            if not 0 <= start <= stop <= size:
                raise ValueError(f"the index names bytes {start:,} to {stop:,} of {size:,}")
            block = os.pread(file, stop - start, start)
            if len(block) < stop - start:
                raise ValueError(f"it ends within the sample at byte {start:,}")
            try:
                samples.append(tars.unpack(block))
            except (ValueError, tarfile.TarError) as error:
                raise ValueError(f"the sample at byte {start:,} is damaged: {error}") from None
        return samples

    def _rows(self, path: Path, _: int, spans: Ids) -> list[Sample]:
        rows: list[Sample] = []
        for group in np.unique(spans[:, 0]).tolist():
            places = spans[spans[:, 0] == group, 1].tolist()
            rows += self._groups.rows(path, group, places)
        return rows

    def advise(self, ids: Ids, shards: Ids) -> None:
        """Asks the system to read these samples ahead, neighbours with one request."""
        if not hasattr(os, "posix_fadvise"):  # macOS
            return
        for shard in np.unique(shards).tolist():
            if self._index.files[shard].path.suffix.lower() != ".tar":
                continue
            spans = self._index.spans[ids[shards == shard]]
            breaks = np.flatnonzero(spans[1:, 0] != spans[:-1, 1]) + 1
            # what is wrong is said where the samples are read
            with contextlib.suppress(OSError, ValueError), self._opened(shard) as file:
                for part in np.split(spans, breaks):
                    start, length = int(part[0, 0]), int(part[-1, 1] - part[0, 0])
                    os.posix_fadvise(file, start, length, os.POSIX_FADV_WILLNEED)

    @contextlib.contextmanager
    def _opened(self, shard: int) -> Iterator[int]:
        """Opens the shard and checks that it is unchanged since it was indexed."""
        shard_file = self._index.files[shard]
        file = os.open(shard_file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            info = os.fstat(file)
            if (info.st_size, info.st_mtime_ns) != (shard_file.size, shard_file.changed):
                raise ValueError("it was changed after it had been indexed")
            yield file
        finally:
            os.close(file)
