"""Writes and checks ``detached.json``: where a run continues, and how to log in there.

The ssh configuration and the interpreter that it names can start programs, and a run directory may
come from anybody. Therefore the file is sealed with a key that only this user can read. Paceline
does not log in because of a file without a valid seal.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.agent.files import safe_paths
from paceline.remote import this_machine
from paceline.rundir import records
from paceline.spec.detached import DETACHED, SupervisorLocation
from paceline.spec.errors import NodeError, SettingError

SEAL = "seal"  # a field of the file
_KEY_BYTES = 32


def write(path: Path, detached: SupervisorLocation) -> None:
    """Writes the file into a run's folder. Raises NodeError, or SettingError without a key."""
    record = {**detached.to_json(), SEAL: _seal(detached.to_json(), ensure_key())}
    try:
        safe_paths.write_file(str(path), DETACHED, json.dumps(record, indent=2).encode() + b"\n")
    except OSError as error:
        raise NodeError(f"{path / DETACHED} cannot be written", found=str(error)) from None


def require_authentic(path: Path, detached: SupervisorLocation) -> None:
    """Raises SettingError unless this user wrote where the run continues."""
    if not is_authentic(path):
        raise SettingError(
            f"{path / DETACHED} was not written by you, so Paceline does not log in to its host",
            found=f"it says that the run continues on {detached.host}",
            remedy="If that is a host of yours, name it yourself:"
            f" paceline attach -H HOST {detached.run_id}",
        )


def is_authentic(path: Path) -> bool:
    """Whether this user wrote the file in a run's folder, and nobody has changed it since."""
    record = records.read_object(path / DETACHED) or {}
    detached = SupervisorLocation.read(record)
    return detached is not None and _is_valid(record.get(SEAL), detached.to_json())


def make_seal(record: Mapping[str, Any], path: Path) -> str:
    """The seal of a record, valid in that run's folder only. SettingError without a key."""
    return _seal({**record, "folder": str(path.resolve())}, ensure_key())


def has_valid_seal(record: Mapping[str, Any], path: Path) -> bool:
    """Whether the field ``seal`` of a record in a run's folder is its :func:`make_seal`."""
    content = {name: value for name, value in record.items() if name != SEAL}
    return _is_valid(record.get(SEAL), {**content, "folder": str(path.resolve())})


class LineSeals:
    """Seals the lines of a file that a run's folder holds, valid in that folder only.

    The key is read once, and made when the first line is sealed.
    """

    def __init__(self, path: Path) -> None:
        self._folder, self._key = str(path.resolve()), _read_key()

    def sealed(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """The line with its seal; without one if there is no key."""
        if self._key is None:
            with contextlib.suppress(SettingError):
                self._key = ensure_key()
        seal = {} if self._key is None else {SEAL: _seal(self._content(line), self._key)}
        return {**line, **seal}

    def is_valid(self, line: Mapping[str, Any]) -> bool:
        """Whether this user sealed the line in this folder."""
        seal = line.get(SEAL)
        if self._key is None or not isinstance(seal, str):
            return False
        content = self._content({name: value for name, value in line.items() if name != SEAL})
        return hmac.compare_digest(
            seal.encode(errors="replace"), _seal(content, self._key).encode()
        )

    def _content(self, line: Mapping[str, Any]) -> dict[str, Any]:
        return {"folder": self._folder, "line": line}


def _is_valid(seal: Any, content: Mapping[str, Any]) -> bool:
    key = _read_key()
    if key is None or not isinstance(seal, str):
        return False
    return hmac.compare_digest(seal.encode(errors="replace"), _seal(content, key).encode())


def _seal(content: Mapping[str, Any], key: bytes) -> str:
    text = json.dumps(content, sort_keys=True)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _key_file() -> Path:
    return this_machine.config_folder() / "seal"


def _read_key() -> bytes | None:
    """The key; ``None`` if there is none that only this user can read and write."""
    with contextlib.suppress(OSError):
        fd = os.open(_key_file(), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            is_private = status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
            key = file.read(_KEY_BYTES) if is_private and stat.S_ISREG(status.st_mode) else b""
            return key if len(key) == _KEY_BYTES else None
    return None


def ensure_key() -> bytes:
    """The key, which is made if there is none; processes that do so at once get the same.

    Raises SettingError if it cannot be written, or if other users could read it.
    """
    if (key := _read_key()) is not None:
        return key
    file = _key_file()
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        safe_paths.make_folder(str(file.parent))
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as out:
            out.write(secrets.token_bytes(_KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(temporary, file)
    except OSError as error:
        raise SettingError(
            f"{file} cannot be written, but a detached run needs it",
            found=str(error),
            remedy="Set XDG_CONFIG_HOME=FOLDER to use another folder for Paceline's files",
        ) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    if (key := _read_key()) is None:
        raise SettingError(
            f"{file} is readable by others, or too short", remedy=f"rm {file}, and run it again"
        )
    return key
