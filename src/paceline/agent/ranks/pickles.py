"""Stores objects in files: functions for the ranks, and their results or exceptions.

A file holds the pickle, then the memory of arrays and tensors, then an index of both. Its hash is
checked before anything is loaded. Used by the launching machine and the ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import io
import json
import os
import pickle
import struct
import sys
from typing import Any, BinaryIO, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

PROTOCOL = 5  # buffers beside the pickle
BLOCK_BYTES = 1 << 20
MAX_PICKLES = 300  # pickles made while the part is looked for that cannot be pickled
MAX_DEPTH = 12
_LENGTH = struct.Struct(">I")
_MAX_INDEX_BYTES = 1 << 28


class NotPicklableError(Exception):
    """Some part of an object cannot be pickled; the text names it."""


class DamagedError(Exception):
    """A file differs from what was written."""


# --- writing --------------------------------------------------------------------------------------


class WrittenFile(NamedTuple):
    """A file that was written: how many bytes, their SHA-256, and where each object begins."""

    size: int
    sha256: str
    starts: List[int]


def write(path: str, objects: List[Tuple[str, Any]], cloudpickle: Any) -> WrittenFile:
    """Writes objects into a new file for this user alone; tensors as CPU copies.

    Args:
        path: The file.
        objects: Name for messages, and value.
        cloudpickle: The module, which pickles functions and classes of ``__main__`` by value.

    Raises:
        NotPicklableError: Names the part that cannot be pickled.
        OSError: The file cannot be written.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(file, "wb", buffering=0) as raw:
        target = _HashingWriter(raw)
        buffers: List[pickle.PickleBuffer] = []
        pickler, starts = _pickler(cloudpickle, target, buffers.append), []
        for name, value in objects:
            starts.append(target.size)
            try:
                pickler.dump(value)
            except Exception as error:
                if target.broken:
                    raise
                raise _not_picklable(value, name, cloudpickle, error) from error
        index: Dict[str, Any] = {"pickle": target.size, "buffers": [], "tensors": []}
        for buffer in buffers:
            with buffer.raw() as memory:
                index["buffers"].append(memory.nbytes)
                target.write(memory)
        for tensor in pickler.tensors:
            index["tensors"].append(_write_tensor(target, tensor))
        footer = json.dumps(index).encode()
        target.write(footer + _LENGTH.pack(len(footer)))
        return WrittenFile(target.size, target.digest.hexdigest(), starts)


class _HashingWriter:
    """Writes data fully, and hashes it."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.digest = hashlib.sha256()
        self.size = 0
        self.broken = False

    def write(self, data: Any) -> int:
        with memoryview(data) as view, view.cast("B") as remainder:
            for at in range(0, len(remainder), BLOCK_BYTES):
                block = remainder[at : at + BLOCK_BYTES]
                self.digest.update(block)
                written = 0
                while written < len(block):
                    try:
                        written += self._raw.write(block[written:])
                    except OSError:
                        self.broken = True
                        raise
            self.size += len(remainder)
            return len(remainder)


def _pickler(cloudpickle: Any, target: Any, on_buffer: Optional[Callable[[Any], Any]]) -> Any:
    """Makes a cloudpickle pickler; if torch is loaded, tensors are stored outside the pickle."""
    torch: Any = sys.modules.get("torch")

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def __init__(self) -> None:
            self.tensors: List[Any] = []
            self._indices: Dict[int, int] = {}
            super().__init__(target, PROTOCOL, buffer_callback=on_buffer)

        if torch is not None:

            def persistent_id(self, value: Any) -> Optional[Tuple[str, int, str, Any, bool]]:
                if type(value) is not torch.Tensor or not _is_dense(value, torch):
                    return None
                if id(value) not in self._indices:
                    self._indices[id(value)] = len(self.tensors)
                    self.tensors.append(value)  # and so it lives, and its id with it
                dtype = str(value.dtype).split(".")[-1]
                index = self._indices[id(value)]
                return "tensor", index, dtype, tuple(value.shape), value.requires_grad

    return Pickler()


def _is_dense(tensor: Any, torch: Any) -> bool:
    """Whether a tensor consists only of its numbers; torch pickles the others."""
    strided = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    return strided and not tensor.is_meta and not tensor.__dict__


def _write_tensor(target: _HashingWriter, tensor: Any) -> int:
    """Writes a tensor's numbers in order; returns their size in bytes."""
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    size = int(dense.numel() * dense.element_size())
    if size:
        target.write((ctypes.c_ubyte * size).from_address(dense.data_ptr()))
    return size


# --- reading --------------------------------------------------------------------------------------


def open_objects(path: str, sha256: str) -> "_Unpickler":
    """Returns an unpickler; each ``load()`` gives the next object.

    Raises:
        DamagedError: The file does not have that ``sha256``. Nothing was loaded.
        OSError: It cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        parts = _Sections(file, path)
        pickled, buffers, tensors = parts.read_sections()
        if parts.digest.hexdigest() != sha256:
            raise DamagedError("%s does not have the hash that its writer told" % path)
    return _Unpickler(io.BytesIO(pickled), buffers, tensors)


class _Sections:
    """A file, read once from its beginning to its end."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file = file
        self._path = path
        self.digest = hashlib.sha256()

    def read_sections(self) -> Tuple[bytearray, List[bytearray], List[bytearray]]:
        index, length = self._index()
        self._file.seek(0)
        pickled = self._read(index["pickle"])
        buffers = [self._read(size) for size in index["buffers"]]
        tensors = [self._read(size) for size in index["tensors"]]
        self._read(length)
        return pickled, buffers, tensors

    def _index(self) -> Tuple[Dict[str, Any], int]:
        size = os.fstat(self._file.fileno()).st_size
        try:
            self._file.seek(-_LENGTH.size, os.SEEK_END)
            (length,) = _LENGTH.unpack(self._file.read())
            if length > min(size, _MAX_INDEX_BYTES):
                raise ValueError("too long")
            self._file.seek(-_LENGTH.size - length, os.SEEK_END)
            index = json.loads(self._file.read(length))
            sizes = [index["pickle"], *index["buffers"], *index["tensors"]]
            is_valid = all(isinstance(item, int) and item >= 0 for item in sizes)
            if not is_valid or sum(sizes) + length + _LENGTH.size != size:
                raise ValueError("of another size")
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            raise DamagedError("%s is damaged: it is not whole" % self._path) from None
        return index, length + _LENGTH.size

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        with memoryview(data) as view:
            filled = 0
            while filled < size:
                count = self._file.readinto(view[filled : filled + BLOCK_BYTES])  # type: ignore[attr-defined]
                if not count:
                    raise DamagedError("%s became shorter while it was read" % self._path)
                self.digest.update(view[filled : filled + count])
                filled += count
        return data


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, buffers: List[bytearray], tensors: List[bytearray]) -> None:
        super().__init__(file, buffers=buffers)
        self._memory = tensors
        self._tensors: Dict[int, Any] = {}

    def persistent_load(self, reference: Any) -> Any:
        _, index, dtype_name, shape, requires_grad = reference
        if index not in self._tensors:
            torch: Any = importlib.import_module("torch")
            memory, dtype = self._memory[index], getattr(torch, dtype_name)
            tensor = torch.empty(0, dtype=dtype)
            if memory:
                tensor = torch.frombuffer(memory, dtype=dtype)
            self._tensors[index] = tensor.reshape(shape).requires_grad_(requires_grad)
        return self._tensors[index]


# --- what cannot be pickled -----------------------------------------------------------------------


def _not_picklable(value: Any, name: str, cloudpickle: Any, error: Exception) -> NotPicklableError:
    """Makes the error that names the part as a path from the object: ``the value['lock']``."""
    budget = [MAX_PICKLES]

    def pickle_error(part: Any) -> Optional[Exception]:
        budget[0] -= 1
        try:
            _pickler(cloudpickle, io.BytesIO(), lambda buffer: None).dump(part)
        except Exception as part_error:
            return part_error
        return None

    visited = {id(value)}
    for _ in range(MAX_DEPTH):
        for path, part in _parts_of(value, name):
            if budget[0] <= 0 or id(part) in visited:
                continue
            if (part_error := pickle_error(part)) is not None:
                visited.add(id(part))
                value, name, error = part, path, part_error
                break
        else:
            break
    cls = type(value)
    module = "" if cls.__module__ in ("builtins", "__main__") else cls.__module__ + "."
    reason = "%s: %s" % (type(error).__name__, error)
    return NotPicklableError(
        "%s is a %s%s, which cannot be pickled (%s)" % (name, module, cls.__qualname__, reason)
    )


def _parts_of(value: Any, name: str) -> Iterator[Tuple[str, Any]]:
    """Yields the parts of an object that a pickle would follow, each with a name."""
    if isinstance(value, dict):
        for key, part in list(value.items()):
            yield "%s[%.60r]" % (name, key), part
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, part in enumerate(value):
            yield "%s[%d]" % (name, index), part
    elif hasattr(value, "__code__"):
        yield from _parts_of_function(value)
    elif hasattr(value, "__func__"):  # a method
        yield name + ".__self__", value.__self__
        yield name, value.__func__
    elif type(value).__module__ == "functools":
        for attribute in ("func", "args", "keywords"):
            if hasattr(value, attribute):
                yield "%s.%s" % (name, attribute), getattr(value, attribute)
    else:
        if isinstance(value, BaseException):
            yield name + ".args", value.args
        for attribute, part in list(getattr(value, "__dict__", {}).items()):
            yield "%s.%s" % (name, attribute), part


def _parts_of_function(function: Any) -> Iterator[Tuple[str, Any]]:
    """Yields the variables that a pickled function includes: of its closure and its module."""
    of_function = "of %s()" % getattr(function, "__qualname__", "function")
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # not set yet
            yield "the variable %s %s" % (variable, of_function), cell.cell_contents
    for variable in _names(function.__code__):
        if variable in function.__globals__:
            yield "the variable %s %s" % (variable, of_function), function.__globals__[variable]
    for index, part in enumerate(function.__defaults__ or ()):
        yield "default %d %s" % (index, of_function), part


def _names(code: Any) -> List[str]:
    inner = [name for part in code.co_consts if hasattr(part, "co_names") for name in _names(part)]
    return [*code.co_names, *inner]
