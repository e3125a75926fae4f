"""Writing safetensors files piece by piece, hashed on the way.

The library's own writer first makes the whole file in memory, holding the interpreter's lock;
this one lets the training go on. Reading is the library's.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_CHUNK = 1 << 22


def size(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the tensors' content."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def write(
    path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None
) -> tuple[str, int]:
    """Writes tensors that are on the CPU and flushes them to the disk.

    Args:
        path: The file; its folder exists.
        tensors: By name.
        about: Texts for the file's header.

    Returns:
        SHA-256 of the file, and its size in bytes.

    Raises:
        OSError: The disk is full or fails.
    """
    return write_chunks(path, _chunks(tensors, about or {}))


def write_chunks(path: Path, chunks: Iterator[memoryview | bytes]) -> tuple[str, int]:
    """Writes and hashes a file piece by piece and flushes it to the disk."""
    digest, written = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for chunk in chunks:
            rest = memoryview(chunk)
            while rest:  # an unbuffered write may take less than it is given
                rest = rest[file.write(rest) :]
            digest.update(chunk)
            written += len(chunk)
        os.fsync(file.fileno())
    return digest.hexdigest(), written


def _chunks(
    tensors: Mapping[str, Tensor], about: Mapping[str, str]
) -> Iterator[memoryview | bytes]:
    yield _header(tensors, about)
    for tensor in tensors.values():
        content = _bytes(tensor)
        for start in range(0, len(content), _CHUNK):
            yield content[start : start + _CHUNK]


def _header(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(about)} if about else {}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]
