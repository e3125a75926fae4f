"""``detached.json``: where a run goes on, and how its host is logged in to.

An ssh configuration that it names may start programs, and so may the interpreter. A run's folder
may come from anybody, with a project or from a colleague: so the file is sealed with a key that
only this user can read, and nobody is logged in to by one that is not.
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

from paceline.agent import inside
from paceline.remote import this_machine
from paceline.rundir import records
from paceline.spec.detached import DETACHED, Detached
from paceline.spec.errors import NodeError, SettingError

SEAL = "seal"  # in the file, beside what it says
_KEY_BYTES = 32


def write(path: Path, detached: Detached) -> None:
    """Writes the file into a run's folder.

    NodeError where it cannot be written, SettingError where there can be no key.
    """
    said = {**detached.to_json(), SEAL: _seal(detached.to_json(), made_key())}
    try:
        inside.write_file(str(path), DETACHED, json.dumps(said, indent=2).encode() + b"\n")
    except OSError as error:
        raise NodeError(f"{path / DETACHED} cannot be written", found=str(error)) from None


def demand(path: Path, detached: Detached) -> None:
    """SettingError when it was not this user who wrote that a run goes on there."""
    if not is_own(path):
        raise SettingError(
            f"{path / DETACHED} was not written by you: nobody is logged in to by what it says",
            found=f"it says that the run goes on on {detached.host}",
            remedy="If that is a host of yours, name it yourself:"
            f" paceline attach -H HOST {detached.run_id}",
        )


def is_own(path: Path) -> bool:
    """Whether this user wrote what a run's folder says, and nobody has changed it since."""
    said = records.read_object(path / DETACHED) or {}
    detached, seal, key = Detached.read(said), said.get(SEAL), _key()
    if detached is None or key is None or not isinstance(seal, str):
        return False
    return _fits(seal, detached.to_json(), key)


def seal_of(record: Mapping[str, Any], path: Path) -> str:
    """The seal of a record in a run's folder, which holds for that folder alone.

    SettingError where there can be no key.
    """
    return _seal({**record, "folder": str(path.resolve())}, made_key())


def has_seal(record: Mapping[str, Any], path: Path) -> bool:
    """Whether this user wrote a record of a run's folder: its field ``seal`` is :func:`seal_of`."""
    key, seal = _key(), record.get(SEAL)
    said = {name: value for name, value in record.items() if name != SEAL}
    sealed = {**said, "folder": str(path.resolve())}
    return key is not None and isinstance(seal, str) and _fits(seal, sealed, key)


def _fits(seal: str, said: Mapping[str, Any], key: bytes) -> bool:
    return hmac.compare_digest(seal.encode(errors="replace"), _seal(said, key).encode())


def _seal(said: Mapping[str, Any], key: bytes) -> str:
    text = json.dumps(said, sort_keys=True)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _key_file() -> Path:
    return this_machine.config_folder() / "seal"


def _key() -> bytes | None:
    """The key; ``None`` where there is none that only this user could have read and written."""
    with contextlib.suppress(OSError):
        fd = os.open(_key_file(), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            about = os.fstat(fd)
            alone = about.st_uid == os.getuid() and not stat.S_IMODE(about.st_mode) & 0o077
            key = file.read(_KEY_BYTES) if alone and stat.S_ISREG(about.st_mode) else b""
            return key if len(key) == _KEY_BYTES else None
    return None


def made_key() -> bytes:
    """The same, made where there is none; of two who make it at once both get the first one's."""
    if (key := _key()) is not None:
        return key
    file = _key_file()
    fresh = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as out:
            out.write(secrets.token_bytes(_KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(fresh, file)
    except OSError as error:
        raise SettingError(
            f"{file} cannot be written, without which a run cannot be left",
            found=str(error),
            remedy="XDG_CONFIG_HOME=FOLDER names another folder for what paceline remembers",
        ) from None
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()
    if (key := _key()) is None:
        raise SettingError(
            f"{file} is not yours alone, or is cut off", remedy=f"rm {file}, and type it again"
        )
    return key
