"""The manifest of a checkpoint: its files with their sizes and hashes, and a hash over itself.

The training side writes and reads manifests; the launcher checks them in checkpoints from nodes.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.spec.rundir import MANIFEST, parse_version

_MANIFEST_FORMAT = 1
_TENSOR_FILES = "*.safetensors"
# No others: a host may be hostile, and programs run some files that they find, such as tests.
_FILE = re.compile(r"state\.json|(?:\w{1,99}/)?\w[\w.-]{0,99}\.safetensors", re.ASCII)


class DamagedCheckpoint(Exception):
    """A checkpoint differs from what was written; the message says how."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Describes a complete checkpoint.

    Attributes:
        step: Number of global steps done.
        files: Expected size and hash by file name.
        info: When and by how many ranks it was written; only for display.
    """

    step: int
    files: Mapping[str, FileEntry]
    info: Mapping[str, Any]

    @property
    def weights(self) -> dict[str, str]:
        """SHA-256 of the files that hold weights, by name."""
        return {name: entry.sha256 for name, entry in self.files.items()
                if not name.startswith(("optimizer", "random.", "state."))}  # fmt: skip

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

        Tensor files without an entry count as damage: readers of shards take all in a folder.

        Args:
            folder: Folder of the checkpoint.
            part: Index of the caller and number of callers, if several share the files.

        Raises:
            DamagedCheckpoint: Names the first file that differs.
        """
        for path in (*folder.glob(_TENSOR_FILES), *folder.glob(f"*/{_TENSOR_FILES}")):
            name = path.relative_to(folder).as_posix()
            if name not in self.files:
                raise DamagedCheckpoint(f"{name!r:.100} is not in its manifest")
        for name, entry in sorted(self.files.items())[slice(part[0], None, part[1])]:
            try:
                stats = (folder / name).stat()
                if not stat.S_ISREG(stats.st_mode):  # reading a pipe would block
                    raise DamagedCheckpoint(f"{name} is not a plain file")
                if stats.st_size != entry.bytes:
                    raise DamagedCheckpoint(
                        f"{name} has {stats.st_size} bytes instead of {entry.bytes}"
                    )
                if sha256(folder / name) != entry.sha256:
                    raise DamagedCheckpoint(
                        f"{name} is not the file that was written (its hash differs)"
                    )
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                raise DamagedCheckpoint(f"{name} cannot be read: {reason}") from None


def _text(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1, sort_keys=True).encode()


def parse_manifest(raw: bytes, name: str = "") -> Manifest:
    """Parses and checks the content of a manifest.

    Args:
        name: Of the checkpoint's folder in a run. If it contains a step, that is the manifest's.

    Raises:
        DamagedCheckpoint: It is not in canonical form, its hash differs, or a field is invalid.
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
    version = parse_version(name)
    if version is not None and manifest.step != version[1]:
        raise DamagedCheckpoint(f"{MANIFEST} is damaged: it belongs to step {manifest.step}")
    return manifest


def _invalid_field(manifest: Manifest) -> str:
    """Describes what is invalid in a manifest whose hash is right; empty if none is."""
    if type(manifest.step) is not int or not 0 <= manifest.step < 1 << 63:
        return "its step is not a valid number"
    if not isinstance(manifest.info, dict):
        return "its field 'about' is not an object"
    for name, entry in manifest.files.items():
        if not _FILE.fullmatch(name):
            return f"{name!r:.100} is not a file of a checkpoint"
        if type(entry.bytes) is not int or entry.bytes < 0 or not isinstance(entry.sha256, str):
            return f"{name!r:.100} has no size and hash"
    return ""


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:  # hashlib.file_digest needs Python 3.11
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
