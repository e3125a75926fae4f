"""The files of a checkpoint: their names, what is in them, and the manifest that vouches for them.

State that is no tensor is JSON, everything else safetensors, so that nothing in a checkpoint is
executed when it is read. The safetensors library reads these files. Ours writes them: it hashes
each piece on its way to the disk, so that nothing has to be read again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.spec.rundir import MANIFEST, is_frozen_file
from paceline.spec.training.checkpoint_manifest import DamagedCheckpoint, Manifest, parse_manifest
from paceline.train import files

STATE = "state.json"
WEIGHTS = "weights.safetensors"
FROZEN = "frozen.safetensors"  # while it is made; then it has a name by its content
OPTIMIZER = "optimizer.safetensors"
RANDOM = "random.safetensors"
# Folders with one file for each rank, where the ranks write what they hold:
WEIGHT_SHARDS, OPTIMIZER_SHARDS = "weights", "optimizer"

Files = dict[str, dict[str, Tensor]]
"""Tensors by file name and by their name in the file."""

_DTYPES = {
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
_TENSOR, _TUPLE, _PAIRS = "$tensor", "$tuple", "$pairs"


def shard_file(folder: str, rank: int) -> str:
    """Returns the file name of a rank's shards."""
    return f"{folder}/{rank:05}.safetensors"


# -- the manifest ----------------------------------------------------------------------


def read_manifest(folder: Path, name: str = "") -> Manifest:
    """The manifest of a checkpoint folder; ``name``: as for :func:`parse_manifest`.

    Raises:
        DamagedCheckpoint: There is none, or :func:`parse_manifest` cannot trust it.
    """
    try:
        raw = files.read_bytes_limited(folder / MANIFEST)
    except OSError as error:
        raise DamagedCheckpoint(f"no {MANIFEST} ({error.strerror})") from None
    return parse_manifest(raw, name)


# -- tensors ---------------------------------------------------------------------------


def tensor_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the tensors' content."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def hash_and_size(tensors: Mapping[str, Tensor]) -> tuple[str, int]:
    """SHA-256 and size of the file that :func:`write_tensors` would make."""
    digest, size = hashlib.sha256(), 0
    for chunk in _chunks(tensors, {}):
        digest.update(chunk)
        size += len(chunk)
    return digest.hexdigest(), size


def find_tied_weights(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns names of tied weights, with the first name of the same tensor as value."""
    first: dict[tuple[object, ...], str] = {}
    tied = {}
    for name, tensor in state.items():
        if tensor.numel():
            location = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
            if (first_name := first.setdefault(location, name)) != name:
                tied[name] = first_name
    return tied


def all_weights(tensors: Files, tied: Mapping[str, str]) -> dict[str, Tensor]:
    """Returns a model's state from a checkpoint's files, frozen and tied weights included."""
    parts = [tensors[WEIGHTS], *(tensors[name] for name in tensors if is_frozen_file(name))]
    weights = {name: tensor for part in parts for name, tensor in part.items()}
    return weights | {name: weights[source] for name, source in tied.items()}


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[str, int]:
    """Writes tensors that are on the CPU and flushes them to the disk.

    Args:
        path: The file; its folder exists.
        metadata: Texts for the file's header.

    Returns:
        SHA-256 of the file, and its size in bytes.

    Raises:
        OSError: The disk is full or fails.
    """
    return write_chunks(path, _chunks(tensors, metadata or {}))


def write_chunks(path: Path, chunks: Iterator[memoryview | bytes]) -> tuple[str, int]:
    """Writes and hashes a file piece by piece and flushes it to the disk."""
    digest, written = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for chunk in chunks:
            remaining = memoryview(chunk)
            while remaining:  # an unbuffered write may take less than it is given
                remaining = remaining[file.write(remaining) :]
            digest.update(chunk)
            written += len(chunk)
        os.fsync(file.fileno())
    return digest.hexdigest(), written


def _chunks(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Iterator[memoryview | bytes]:
    yield _header(tensors, metadata)
    for tensor in tensors.values():
        content = _bytes(tensor)
        for start in range(0, len(content), _CHUNK):
            yield content[start : start + _CHUNK]


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
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


# -- everything else -------------------------------------------------------------------


def pack(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Returns ``value`` as JSON; its tensors go to ``tensors`` under their paths.

    Dictionaries with any keys, lists, tuples, numbers, texts, ``None`` and tensors can be packed.

    Raises:
        TypeError: Something else is in it.
    """
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {_TENSOR: path}
    if isinstance(value, dict):
        return _pack_dict(value, tensors, path)
    if isinstance(value, (list, tuple)):
        items = [pack(item, tensors, f"{path}.{n}") for n, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a checkpoint cannot hold {type(value).__name__} (at {path or 'the top'})")


def _pack_dict(value: dict[Any, Any], tensors: dict[str, Tensor], path: str) -> Any:
    packed = {key: pack(item, tensors, f"{path}.{key}") for key, item in value.items()}
    if all(isinstance(key, str) and not key.startswith("$") for key in packed):
        return packed
    return {_PAIRS: [[pack(key, tensors, f"{path}.key"), item] for key, item in packed.items()]}


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Returns the value that :func:`pack` was given."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(unpack(item, tensors) for item in value[_TUPLE])
    if _PAIRS in value:
        pairs = ((unpack(key, tensors), item) for key, item in value[_PAIRS])
        return {key: unpack(item, tensors) for key, item in pairs}
    return {key: unpack(item, tensors) for key, item in value.items()}
