"""Looks into received files of torch.save and JSON without loading them: they may be hostile."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

from paceline.agent.files.outputs import is_whole_json
from paceline.rundir.output_rules import is_index

MAX_ZIP_INDEX_BYTES = 4 << 20  # of a file of torch.save: about 40,000 tensors
MAX_PICKLE_BYTES = 4 << 20  # of a checkpoint, without its tensors
MAX_INDEX_BYTES, MAX_SHARDS = 64 << 20, 10_000  # of a distributed checkpoint
_SHARD_NAME = re.compile(rb"__[0-9]{1,6}_[0-9]{1,6}\.distcp")
# Names in pickled states of modules and optimizers, and in what scripts save with them
_STATE = re.compile(
    rb"_metadata|param_groups|_parameters|optimi[sz]er|state_dict|weight|epoch|step", re.IGNORECASE
)


def is_intact(path: Path) -> bool:
    """Whether a file is as it was written, though the script may replace it at any time.

    Only files of torch.save and small JSON files show that.
    """
    if path.suffix == ".json":
        return is_whole_json(str(path))
    import zipfile  # here, since the launcher needs it only once files arrive

    try:
        with _BoundedReads(path) as file, zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            is_stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
            # entries that overlap would be read again and again
            is_plausible = sum(entry.file_size for entry in entries) <= path.stat().st_size
            return is_stored and is_plausible and archive.testzip() is None
    except Exception:  # of a hostile file: encrypted, of another version, cut off
        return False


def has_state(path: Path) -> bool:
    """Whether a file may hold the state of a training, and not only data.

    By its content if it is one of torch.save, by its name if not.
    """
    if path.suffix.lower() not in ("", ".pt", ".pth", ".bin", ".ckpt", ".npz"):
        return True
    import zipfile  # as above

    try:
        with _BoundedReads(path) as file:
            is_zip = file.read(4) == b"PK\3\4"
            file.seek(0)
            if not is_zip:  # written by torch before 1.6, or by another program
                head = file.read(min(MAX_PICKLE_BYTES, os.fstat(file.fileno()).st_size))
                return head.startswith(b"\x80") and _STATE.search(head) is not None
            with zipfile.ZipFile(file) as archive:
                pickles = [entry for entry in archive.infolist()
                           if entry.filename.endswith("/data.pkl")
                           and entry.compress_type == zipfile.ZIP_STORED]  # fmt: skip
                if not pickles:
                    return False
                with archive.open(pickles[0]) as stream:
                    return _STATE.search(stream.read(MAX_PICKLE_BYTES)) is not None
    except Exception:  # of a hostile file
        return False


def shards_in(path: Path) -> str:
    """Names of the shards in the index of a distributed checkpoint, in one line.

    Empty for any other file, and for more names than any job has ranks.
    """
    if not is_index(str(path)):
        return ""
    names = set[str]()
    try:
        with path.open("rb") as file:
            for match in _SHARD_NAME.finditer(file.read(MAX_INDEX_BYTES)):
                names.add(match[0].decode())
                if len(names) > MAX_SHARDS:
                    return ""
    except OSError:
        return ""
    return " ".join(sorted(names))


class _BoundedReads(io.FileIO):
    """A file of which no more is held in memory than the index of a checkpoint takes."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Reads as usual. ValueError if that could be too much."""
        rest = os.fstat(self.fileno()).st_size - self.tell()
        wanted = rest if size is None or size < 0 else min(size, rest)
        if wanted > MAX_ZIP_INDEX_BYTES:
            raise ValueError(f"{wanted} bytes at once")
        return super().read(wanted) or b""
