"""CIFAR-10 and CIFAR-100: pickled batches, read without running code, or binary ones."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.recipes.data.images import ImageData, InMemory, check_labels, in_memory
from paceline.recipes.data.pickle_limits import check_pickle
from paceline.recipes.options import ImageOptions
from paceline.spec.errors import DataError
from paceline.train import files

_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_IMAGE_BYTES = 3 * 32 * 32
_RECORD_BYTES = 1 + _IMAGE_BYTES
_MAX_BYTES = 256 << 20  # of a file and of its content; a batch has 31 MB
_CIFAR100_LABELS, _CIFAR100_NAMES = b"fine_labels", b"fine_label_names"
_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))


def matches(folder: Path) -> bool:
    """True if the folder holds the first training batch in one of the formats."""
    first = any((folder / f"{_BATCHES[0]}{suffix}").is_file() for suffix in ("", ".bin"))
    return first or _is_cifar100(folder)


def _is_cifar100(folder: Path) -> bool:
    return (folder / "meta").is_file() and (folder / "train").is_file()


def read(folder: Path, options: ImageOptions) -> ImageData:
    """Reads the training batches and the test batch.

    Raises:
        DataError: A file is missing, truncated or of another format, or a label out of range.
    """
    if _is_cifar100(folder):
        classes = _names(folder / "meta")
        train, test = (_batch(folder / name, classes) for name in ("train", "test"))
        return in_memory(options, classes, train, test)
    suffix = ".bin" if (folder / f"{_BATCHES[0]}.bin").is_file() else ""
    parts = [_batch(folder / f"{name}{suffix}", _CLASSES) for name in _BATCHES]
    images = np.concatenate([part.images for part in parts])
    labels = np.concatenate([part.labels for part in parts])
    test = _batch(folder / f"test_batch{suffix}", _CLASSES)
    return in_memory(options, _CLASSES, InMemory(images, labels), test)


def _names(meta: Path) -> tuple[str, ...]:
    """Reads the names of the hundred classes."""
    try:
        names = _unpickle(files.read_bytes_limited(meta))[_CIFAR100_NAMES]
        return tuple(name.decode() for name in names)
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(
            f"{meta} is damaged or no list of CIFAR-100's classes",
            found=str(error)[:200] or type(error).__name__,
            remedy="get the file again",
        ) from None


def _batch(path: Path, classes: tuple[str, ...]) -> InMemory:
    try:
        content = files.read_bytes_limited(path, files.max_content_bytes())
    except OSError as error:
        raise DataError(
            f"{path} cannot be read",
            found=str(error),
            remedy="put all files of the data set into that folder",
        ) from None
    rows, labels = (_binary if path.suffix == ".bin" else _pickled)(path, content)
    check_labels(path, labels, len(rows), len(classes))
    return InMemory(rows.reshape(-1, 3, 32, 32), labels)


def _binary(path: Path, content: bytes) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    if not content or len(content) % _RECORD_BYTES:
        expected_bytes = -(-max(len(content), 1) // _RECORD_BYTES) * _RECORD_BYTES
        raise DataError(
            f"{path} is truncated or damaged",
            found=f"expected {expected_bytes} bytes (a multiple of {_RECORD_BYTES}),"
            f" found {len(content)}",
            remedy="get the file again",
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, _RECORD_BYTES)
    return records[:, 1:], records[:, 0].astype(np.int64)


def _pickled(path: Path, content: bytes) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    try:
        batch = _unpickle(content)
        rows = batch[b"data"]
        labels = batch[_CIFAR100_LABELS if _CIFAR100_LABELS in batch else b"labels"]
        if type(labels) is not list or not all(type(label) is int for label in labels):
            raise ValueError("the labels are not a list of numbers")
        return _rows(rows), np.array(labels, dtype=np.int64)
    except Exception as error:  # a damaged pickle may raise anything
        reason = "it ends too early" if isinstance(error, EOFError) else str(error)[:200]
        raise DataError(
            f"{path} is truncated, damaged or no CIFAR-10 batch",
            found=f"expected a pickled batch, found {len(content)} bytes:"
            f" {reason or type(error).__name__}",
            remedy="get the file again",
        ) from None


def _rows(described: Any) -> NDArray[np.uint8]:
    """Returns the pixels of a pickled array, after checks of its type and size."""
    if type(described) is not _Stub or type(described.state) is not tuple:
        raise ValueError("the data are not an array")
    _, shape, kind, by_columns, content = described.state
    images, pixels = shape
    if type(kind) is not _Stub or kind.arguments[:1] not in (("u1",), (b"u1",)) or by_columns:
        raise ValueError("the data are not bytes, row by row")
    if type(images) is not int or pixels != _IMAGE_BYTES or type(content) is not bytes:
        raise ValueError(f"data of another shape than [n, {_IMAGE_BYTES}] bytes")
    if len(content) != images * _IMAGE_BYTES:
        raise ValueError(f"{len(content)} bytes for {images} images")
    return np.frombuffer(content, np.uint8).reshape(images, _IMAGE_BYTES)


class _Stub:
    """Replaces NumPy's constructors in a pickle, and records their arguments."""

    __slots__ = ("arguments", "state")

    def __init__(self, *arguments: Any) -> None:
        if len(arguments) > _MAX_ARGUMENTS:
            raise ValueError(f"{len(arguments)} arguments for one of numpy's constructors")
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


_MAX_ARGUMENTS = 4
_STUBS = frozenset(
    (
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
    )
)


class _SafeUnpickler(pickle._Unpickler):
    """Unpickles numbers, texts, lists and dictionaries; arrays become :class:`_Stub`.

    Based on the unpickler in Python, whose memo is a dictionary: the one in C allocates memory for
    any index. Allows only the opcodes of NumPy's pickles, as others allocate announced sizes.
    """

    stack: list[Any]

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, encoding="bytes")
        self._remaining_bytes = _MAX_BYTES

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _STUBS:
            return lambda *arguments: _Stub(*arguments)
        if (module, name) == ("_codecs", "encode"):
            return self._encode
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no image batch needs")

    def _encode(self, text: str, encoding: str) -> bytes:
        self._remaining_bytes -= len(text)
        if encoding not in ("latin1", "latin-1") or self._remaining_bytes < 0:
            raise ValueError("texts that are not bytes of an image batch")
        return text.encode("latin-1")

    def _build(self) -> None:
        if type(self.stack[-2]) is not _Stub:
            raise ValueError("a state of what has none")
        _DISPATCH[pickle.BUILD[0]](self)


_DISPATCH: Any = pickle._Unpickler.dispatch
_OPCODES = (
    "PROTO FRAME STOP MARK POP POP_MARK EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1"
    " TUPLE2 TUPLE3 NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 STRING BINSTRING"
    " SHORT_BINSTRING BINBYTES SHORT_BINBYTES UNICODE BINUNICODE SHORT_BINUNICODE GLOBAL"
    " STACK_GLOBAL REDUCE PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET EMPTY_DICT"
    " DICT SETITEM SETITEMS"
)
_ALLOWED_DISPATCH: Any = {
    **{code: _DISPATCH[code] for code in (getattr(pickle, name)[0] for name in _OPCODES.split())},
    pickle.BUILD[0]: _SafeUnpickler._build,
}
_SafeUnpickler.dispatch = _ALLOWED_DISPATCH


def _unpickle(content: bytes) -> Any:
    """Unpickles a batch; ValueError for content that no batch has."""
    if len(content) > _MAX_BYTES:
        raise ValueError(f"more than the {_MAX_BYTES >> 20} MiB that a batch may have")
    check_pickle(io.BytesIO(content))
    try:
        return _SafeUnpickler(io.BytesIO(content)).load()
    except KeyError as unknown:
        raise ValueError(f"a word that no image batch has: {unknown}") from None
