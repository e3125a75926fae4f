"""Records what setup changes, so that it can be undone byte for byte."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from paceline.agent.files import safe_paths


@dataclass(frozen=True, slots=True)
class Change:
    """One file or folder that was made or changed.

    Attributes:
        path: Absolute path on its machine.
        before: Previous content in base64; ``None`` if it did not exist; empty for a folder.
        mode: Previous mode; ``None`` if it did not exist.
        after: SHA-256 of the new content; empty for a folder.
        host: The host; empty for this machine.
        lines: Lines that were added; only these are removed if the file has changed since.
    """

    path: str
    before: str | None
    mode: int | None
    after: str = ""
    host: str = ""
    lines: tuple[str, ...] = ()
    folder: bool = False


@dataclass(slots=True)
class Journal:
    """All changes, oldest first, in a file of the user's own."""

    file: Path
    changes: list[Change] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)  # made for the file; go with its last change

    @classmethod
    def read(cls, file: Path | None = None) -> Journal:
        if file is None:
            state = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
            file = Path(state) / "paceline" / "setup.json"
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return cls(file)
        changes = [Change(**{**record, "lines": tuple(record.get("lines", ()))})
                   for record in data.get("changes", [])]  # fmt: skip
        return cls(file, changes, list(data.get("folders", [])))

    def add(self, change: Change) -> None:
        """Records a change at once, because the next step may fail."""
        self.changes.append(change)
        self.write()

    def forget(self, change: Change) -> None:
        self.changes.remove(change)
        self.write()

    def write(self) -> None:
        if not self.changes:
            self._remove()
            return
        parent = self.file.parent
        missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
        self.folders += [str(folder) for folder in missing]
        safe_paths.make_folder(str(parent))
        changes = [asdict(change) for change in self.changes]
        text = json.dumps({"changes": changes, "folders": self.folders}, indent=1)
        _write_private(self.file, f"{text}\n".encode(), 0o600)

    def _remove(self) -> None:
        self.file.unlink(missing_ok=True)
        for folder in self.folders:
            with contextlib.suppress(OSError):  # it holds somebody else's files by now
                Path(folder).rmdir()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_file(journal: Journal, path: Path, content: bytes, mode: int,
               lines: tuple[str, ...] = ()) -> bool:  # fmt: skip
    """Writes a file of this machine; returns False if it had that content already.

    A new parent folder is private to the user, and recorded, too.
    """
    previous = path.read_bytes() if path.exists() else None
    if previous == content:
        return False
    if not path.parent.is_dir():
        journal.add(Change(str(path.parent), None, None, folder=True))
        safe_paths.make_folder(str(path.parent))
    previous_mode = path.stat().st_mode & 0o777 if previous is not None else None
    text = None if previous is None else base64.b64encode(previous).decode()
    journal.add(Change(str(path), text, previous_mode, digest(content), lines=lines))
    _write_private(path, content, mode if previous_mode is None else previous_mode)
    return True


def _write_private(path: Path, content: bytes, mode: int) -> None:
    """Replaces a file; never writes through a link."""
    temporary = path.with_name(path.name + ".paceline-new")
    temporary.unlink(missing_ok=True)  # of a write that was interrupted, or a link of somebody
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
    temporary.chmod(mode)
    temporary.replace(path)


def undo(change: Change) -> str:
    """Undoes one change on this machine; returns what was done."""
    path = Path(change.path)
    if change.folder:
        try:
            path.rmdir()
        except OSError:
            return f"{path} is kept: it holds other files"
        return f"removed {path}"
    if not path.exists():
        return f"{path} is gone already"
    current = path.read_bytes()
    if digest(current) == change.after:
        return _restore(path, change)
    remaining = remove_lines(current, change.lines)
    if remaining == current:
        return f"{path} was changed since and holds nothing of ours: left as it is"
    _write_private(path, remaining, path.stat().st_mode & 0o777)
    return f"{path} was changed since: took our lines out"


def _restore(path: Path, change: Change) -> str:
    if change.before is None:
        path.unlink()
        return f"removed {path}"
    _write_private(path, base64.b64decode(change.before), change.mode or 0o600)
    return f"restored {path}"


def remove_lines(content: bytes, lines: tuple[str, ...]) -> bytes:
    added = {line.encode() for line in lines}
    return b"".join(line for line in content.splitlines(True) if line.rstrip(b"\r\n") not in added)
