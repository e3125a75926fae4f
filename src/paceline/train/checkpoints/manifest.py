"""What makes a folder a checkpoint: a list of its files with sizes and hashes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from paceline.train import files

NAME = "manifest.json"
_FORMAT = 1


class Damaged(Exception):
    """A checkpoint is not what was written; the text says why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a checkpoint."""

    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete checkpoint.

    Attributes:
        step: Global steps done.
        files: Name of each file, and what it must be.
        about: When and by how many ranks it was made; for people.
    """

    step: int
    files: Mapping[str, Entry]
    about: Mapping[str, Any]

    def encode(self) -> bytes:
        """The one way to write it, which ends with a hash over itself."""
        content = {
            "format": _FORMAT,
            "step": self.step,
            "files": {name: asdict(entry) for name, entry in sorted(self.files.items())},
            "about": dict(self.about),
        }
        digest = hashlib.sha256(_text(content)).hexdigest()
        return _text({**content, "sha256": digest}) + b"\n"

    def verify(self, folder: Path, share: tuple[int, int] = (0, 1)) -> None:
        """Compares every file with its entry.

        Args:
            folder: Of the checkpoint.
            share: Where several look together: which of them this is, and how many they are.

        Raises:
            Damaged: Names the first file that differs.
        """
        for name, entry in sorted(self.files.items())[slice(share[0], None, share[1])]:
            try:
                size = (folder / name).stat().st_size
                if size != entry.bytes:
                    raise Damaged(f"{name} has {size} bytes instead of {entry.bytes}")
                if files.sha256(folder / name) != entry.sha256:
                    raise Damaged(f"{name} is not the file that was written (its hash differs)")
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or error
                raise Damaged(f"{name} cannot be read: {why}") from None


def _text(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1, sort_keys=True).encode()


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder.

    Raises:
        Damaged: There is none, or not a single bit of it may be trusted.
    """
    try:
        raw = (folder / NAME).read_bytes()
    except OSError as error:
        raise Damaged(f"no {NAME} ({error.strerror})") from None
    try:
        said = json.loads(raw)
        entries = {name: Entry(**entry) for name, entry in said["files"].items()}
        manifest = Manifest(said["step"], entries, said["about"])
        intact = manifest.encode() == raw
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{NAME} is damaged: {type(error).__name__}") from None
    if not intact:
        raise Damaged(f"{NAME} is damaged: its hash differs")
    if problem := _problem(manifest):
        raise Damaged(f"{NAME} is damaged: {problem}")
    return manifest


def _problem(one: Manifest) -> str:
    """What cannot be in a manifest although its hash is right; empty for nothing."""
    if type(one.step) is not int or not 0 <= one.step < 1 << 63:
        return "its step is no number of a step"
    if not isinstance(one.about, dict):
        return "it says nothing about the run"
    for name, entry in one.files.items():
        path = PurePosixPath(name)
        if "\0" in name or not path.parts or path.is_absolute() or ".." in path.parts:
            return f"{name!r:.100} is no file of a checkpoint"
        if type(entry.bytes) is not int or not isinstance(entry.sha256, str):
            return f"{name!r:.100} has no size and hash"
    return ""
