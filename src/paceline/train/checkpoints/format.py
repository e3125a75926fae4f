"""The files of a checkpoint: their names, what is in them, and the manifest that vouches for them.

State that is no tensor is JSON, everything else safetensors, so that nothing in a checkpoint is
executed when it is read. The safetensors library reads these files. Ours writes them: it hashes
each piece on its way to the disk, so that nothing has to be read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.spec.rundir import is_frozen_file
from paceline.train import files

MANIFEST = "manifest.json"
STATE = "state.json"
WEIGHTS = "weights.safetensors"
FROZEN = "frozen.safetensors"  # while it is made; then it has a name by its content
OPTIMIZER = "optimizer.safetensors"
RANDOM = "random.safetensors"
# Folders with one file for each rank, where the ranks write what they hold:
WEIGHT_SHARDS, OPTIMIZER_SHARDS = "weights", "optimizer"

Files = dict[str, dict[str, Tensor]]
"""Tensors by file name and by their name in the file."""

_MANIFEST_FORMAT = 1
# no HEAD: git takes a folder with one for a repository
_FILE = re.compile(r"(\w[\w.-]{0,99}/){0,3}(?!(?i:head)\Z)\w[\w.-]{0,99}", re.ASCII)
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


class DamagedCheckpoint(Exception):
    """A checkpoint is not what was written; the text says why."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete checkpoint.

    Attributes:
        step: Global steps done.
        files: Name of each file, and what it must be.
        info: When and by how many ranks it was made; for people.
    """

    step: int
    files: Mapping[str, FileEntry]
    info: Mapping[str, Any]

    def encode(self) -> bytes:
        """Returns the canonical bytes, which end with a hash over themselves."""
        content = {
            "format": _MANIFEST_FORMAT,
            "step": self.step,
            "files": {name: asdict(entry) for name, entry in sorted(self.files.items())},
            "about": dict(self.info),
        }
        digest = hashlib.sha256(_text(content)).hexdigest()
        return _text({**content, "sha256": digest}) + b"\n"

    def verify(self, folder: Path, part: tuple[int, int] = (0, 1)) -> None:
        """Compares every file with its entry.

        Args:
            folder: Of the checkpoint.
            part: Where several look together: which of them this is, and how many they are.

        Raises:
            Damaged: Names the first file that differs.
        """
        for name, entry in sorted(self.files.items())[slice(part[0], None, part[1])]:
            try:
                stats = (folder / name).stat()
                if not stat.S_ISREG(stats.st_mode):  # a pipe would keep us waiting
                    raise DamagedCheckpoint(f"{name} is no plain file")
                if stats.st_size != entry.bytes:
                    raise DamagedCheckpoint(
                        f"{name} has {stats.st_size} bytes instead of {entry.bytes}"
                    )
                if files.sha256(folder / name) != entry.sha256:
                    raise DamagedCheckpoint(
                        f"{name} is not the file that was written (its hash differs)"
                    )
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                raise DamagedCheckpoint(f"{name} cannot be read: {reason}") from None


def _text(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1, sort_keys=True).encode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder.

    Raises:
        Damaged: There is none, or :func:`parse_manifest` cannot trust it.
    """
    try:
        raw = files.read_bytes_limited(folder / MANIFEST)
    except OSError as error:
        raise DamagedCheckpoint(f"no {MANIFEST} ({error.strerror})") from None
    return parse_manifest(raw)


def parse_manifest(raw: bytes) -> Manifest:
    """Parses and checks the content of a manifest.

    Raises:
        Damaged: Not a single bit of it may be trusted.
    """
    try:
        content = json.loads(raw)
        entries = {name: FileEntry(**entry) for name, entry in content["files"].items()}
        manifest = Manifest(content["step"], entries, content["about"])
        intact = manifest.encode() == raw
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{MANIFEST} is damaged: {type(error).__name__}") from None
    if not intact:
        raise DamagedCheckpoint(f"{MANIFEST} is damaged: its hash differs")
    if problem := _invalid_field(manifest):
        raise DamagedCheckpoint(f"{MANIFEST} is damaged: {problem}")
    return manifest


def _invalid_field(manifest: Manifest) -> str:
    """Describes what is invalid in a manifest whose hash is right; empty for nothing."""
    if type(manifest.step) is not int or not 0 <= manifest.step < 1 << 63:
        return "its step is no number of a step"
    if not isinstance(manifest.info, dict):
        return "it says nothing about the run"
    for name, entry in manifest.files.items():
        if not _FILE.fullmatch(name):
            return f"{name!r:.100} is no file of a checkpoint"
        if type(entry.bytes) is not int or entry.bytes < 0 or not isinstance(entry.sha256, str):
            return f"{name!r:.100} has no size and hash"
    return ""


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
        tensors: By name.
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
