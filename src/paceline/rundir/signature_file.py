"""Reads and writes the file with the signatures of a run's checkpoints and its model.

Each line covers the line before it, so that lines that were removed, moved or added later are
noticed. To notice those that are missing at the end, this machine records the last line of each
run beside the user's key. Whoever can write only the run directory cannot change the record.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.agent.files import safe_paths
from paceline.remote import this_machine
from paceline.rundir import records
from paceline.rundir.detached_file import SEAL, LineSeals
from paceline.spec.errors import SettingError
from paceline.spec.formatting import format_size, shell_text
from paceline.spec.rundir import SIGNATURES
from paceline.spec.training.checkpoint_manifest import FileEntry

MAX_BYTES = 16 << 20  # of the signatures of a run
MAX_RECORDS = 1000  # runs whose last line is recorded


@dataclass(frozen=True, slots=True)
class Signatures:
    """The signatures of a run that this user made in this folder.

    Attributes:
        manifests: SHA-256 of the manifest that was signed last for each checkpoint, by name.
        model: The files of the final model that were signed last, by path; ``None`` if none ever
            were. It is empty after a start that ended without a model.
        seal: Of the line that the next one covers.
        problem: How the lines differ from those that were written; empty if they do not.
        is_recorded: Whether this machine knows the last line. Otherwise others may be missing.
    """

    manifests: Mapping[str, str]
    model: Mapping[str, FileEntry] | None
    seal: str
    problem: str
    is_recorded: bool


class SignatureFile:
    """The file with the signatures of a run, and this machine's record of its last line."""

    def __init__(self, run: Path) -> None:
        self._run, self._seals = run, LineSeals(run)
        self.path = run / SIGNATURES
        # machines that share a home may have different runs at one path
        place = f"{socket.gethostname()}\0".encode() + os.fsencode(run.resolve())
        name = hashlib.sha256(place).hexdigest()
        self._record = this_machine.config_folder() / "signed" / name

    @property
    def remedy(self) -> str:
        """What to type if the file is unreadable or was changed."""
        files = filter(os.path.lexists, (self.path, self._record))
        return (
            "If you trust the model and the checkpoints, remove their signatures; they then count"
            " as unsigned: " + shell_text(["rm", *map(str, files)])
        )

    def read(self) -> Signatures:
        """Returns the signatures of all lines that follow the line that they cover.

        Lines of versions without a chain count only before the first line of a chain. The recorded
        line counts even if it is missing.
        Raises SettingError for a file that cannot be read: not that nothing was signed.
        """
        record = self._read_record()  # first: a running launcher appends
        lines: list[dict[str, Any]] = []
        problem, seal = "", ""
        for line in self._lines():
            previous = line.get("previous")
            if previous is None and lines and "previous" in lines[-1]:
                continue
            if previous in (None, seal):
                lines.append(line)
                seal = line[SEAL]
            else:
                problem = problem or (
                    f"the line of {_subject(line)} does not follow the one that it followed when it"
                    " was written: lines were removed, moved or added"
                )
        if record and record not in lines:
            lines.append(record)
            seal = record[SEAL]
            problem = problem or (
                f"the last line, of {_subject(record)}, is missing: it was removed, or the file or"
                " its folder was replaced by an earlier one"
            )
        for line in lines:
            problem = line.get("problem", problem)
        manifests = {str(line["checkpoint"]): str(line.get("manifest")) for line in lines
                     if "checkpoint" in line}  # fmt: skip
        models = [line["model"] for line in lines if "model" in line]
        model = {path: FileEntry(**entry) for path, entry in models[-1].items()} if models else None
        return Signatures(manifests, model, seal, problem, bool(record))

    def append_manifest(self, name: str, digest: str, previous: str) -> None:
        """Signs a checkpoint's manifest, given its SHA-256; without a key it does nothing."""
        self._append({"checkpoint": name, "manifest": digest}, previous)

    def append_model(self, files: Mapping[str, FileEntry], previous: str) -> None:
        """Signs the files of the final model; without a key it does nothing."""
        self._append(_model_line(files), previous)

    def _append(self, content: Mapping[str, Any], previous: str) -> None:
        line = self._seals.sealed({**content, "previous": previous})
        if SEAL not in line:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with os.fdopen(safe_paths.open_file(str(self._run), SIGNATURES, flags), "wb") as file:
            file.write(b"\n" + _encode(line))  # the last line may be cut off
            file.flush()
            os.fsync(file.fileno())  # the record must not outlive it
        self._write_record(line)

    def rewrite(self, manifests: Mapping[str, str], model: Mapping[str, FileEntry] | None,
                problem: str) -> None:  # fmt: skip
        """Replaces all lines. A problem is written, too: a start must not hide it."""
        lines: list[dict[str, Any]] = [{"problem": problem}] if problem else []
        lines += [{"checkpoint": name, "manifest": sha256} for name, sha256 in manifests.items()]
        lines += [] if model is None else [_model_line(model)]
        for index, line in enumerate(lines):
            previous = lines[index - 1].get(SEAL) if index else ""
            lines[index] = self._seals.sealed({**line, "previous": previous})
        self.remove_record()  # of a line that goes now: the new one may not be writable
        safe_paths.write_file(str(self._run), SIGNATURES, b"".join(map(_encode, lines)))
        if lines:
            self._write_record(lines[-1])

    def record_last_line(self) -> None:
        """Records the last line of a whole chain that another machine has written."""
        for line in list(self._lines())[-1:]:
            self._write_record(line)

    def remove_record(self) -> None:
        """Forgets the last line, for another run in this folder."""
        with contextlib.suppress(OSError):
            self._record.unlink()

    def _lines(self) -> Iterator[dict[str, Any]]:
        """The lines that this user sealed in this folder."""
        try:
            with records.open_regular(self.path) as stream:
                content = stream.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._unreadable(str(error.strerror)) from None
        if len(content) > MAX_BYTES:
            raise self._unreadable(f"it has more than {format_size(MAX_BYTES)}")
        for text in content.split(b"\n"):
            line: Any = None
            with contextlib.suppress(ValueError, RecursionError):
                line = json.loads(text)
            if isinstance(line, dict) and self._seals.is_valid(line):
                yield line

    def _unreadable(self, reason: str) -> SettingError:
        return SettingError(
            f"the signatures in {self.path} cannot be read",
            found=reason,
            remedy=self.remedy,
        )

    def _read_record(self) -> dict[str, Any]:
        """The last line that was written; empty if it is unknown, or sealed with another key."""
        record = records.read_object(self._record) or {}
        return record if self._seals.is_valid(record) else {}

    def _write_record(self, line: Mapping[str, Any]) -> None:
        folder = self._record.parent
        with contextlib.suppress(OSError):
            safe_paths.make_folder(str(folder))
            if not self._record.exists():
                files = sorted(filter(Path.is_file, folder.iterdir()), key=_modified_at)
                for file in files[: 1 - MAX_RECORDS]:
                    file.unlink()
            safe_paths.write_file(str(folder), self._record.name, _encode(line))


def _model_line(files: Mapping[str, FileEntry]) -> dict[str, Any]:
    return {"model": {path: asdict(entry) for path, entry in files.items()}}


def _subject(line: Mapping[str, Any]) -> str:
    """What a line is about, for messages."""
    return "the final model" if "model" in line else f"checkpoint {line.get('checkpoint')}"


def _encode(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"


def _modified_at(file: Path) -> float:
    return file.stat().st_mtime
