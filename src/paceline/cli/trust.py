"""Which settings files may name programs: those that the user trusts and nobody else can change.

A ``paceline.toml`` comes with a cloned project, or lies in a folder that others can write. Most of
its settings only say where and how many; a few start programs here or on the hosts, hand out
values of this machine, choose among the user's own hosts, or weaken how hosts are recognised.
These count only once the user has looked at them, and are refused in files that somebody else can
change.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from paceline.agent import bootstrap
from paceline.remote import this_machine
from paceline.spec.errors import SettingError
from paceline.spec.formatting import shell_text
from paceline.spec.settings import TOML_NAME

_MAX_VALUE_CHARS = 2000
# key of [run] → what it can do
GUARDED = {
    "ssh-config": "can start programs (ProxyCommand)",
    "mpiexec": "is started",
    "python": "is started",
    "image": "is started",
    "mount": "opens folders of the hosts to a container",
    "via-arg": "can start programs",
    "sbatch-arg": "can start programs",
    "setup-command": "is run",
    "activate": "is run",
    "env": "can make programs load other code, and hand out variables of yours",
    "data": "sends a folder of this machine to the hosts",
    "follow-links": "sends files from outside of the project to the hosts",
    "notify": "is started, or told of your runs",
    "rdzv": "lets another machine start programs here",
    "rdzv-key-file": "lets who knows that key start programs here",
    "accept-new-host-keys": "trusts hosts never met before",
}
HOST_GUARDED = {  # the same for [hosts.NAME]
    "python": "is started",
    "env": "can make programs load other code",
}
LOGIN_KEYS = ("address", "user", "port", "key")
"""Keys of ``[hosts.NAME]`` that need trust if the file does not name the hosts itself."""
START_GUARDED = {  # the same where a run is started; other commands only read there
    "run-dir": "can replace the results of an earlier run",
}
# the same for [train.RECIPE], if the value is a file or folder of this machine, or a tracker
RECIPE_GUARDED = {
    "data": "sends it to the hosts",
    "test-data": "sends it to the hosts",
    "target": "sends it to the hosts",
    "data-dir": "reads data from it",
    "weights": "sends it to the hosts",
    "model": "sends it to the hosts",
    "chat-template": "sends it to the hosts",
    "resume": "reads a checkpoint from it",
    "run-dir": "can replace the results of an earlier run",
    "track": "sends your key to the server that a tracker's own settings file names",
}


def guarded_settings(toml: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a file's settings that need trust: ``[run] KEY`` or ``[hosts.NAME] KEY`` → value."""
    run = toml.get("run", {})
    keys = {
        *GUARDED,
        *START_GUARDED,
        "hosts",
    }  # a description of hosts may name programs, or files of the user
    settings = {f"[run] {key}": v for key, v in run.items() if key.replace("_", "-") in keys}
    settings |= _host_settings(toml, {*HOST_GUARDED, *LOGIN_KEYS})
    for name, table in toml.get("train", {}).items():
        guarded = {k: v for k, v in table.items() if k.replace("_", "-") in RECIPE_GUARDED}
        settings |= {f"[train.{name}] {key}": value for key, value in guarded.items()}
    return settings


def require_trust(path: Path, toml: Mapping[str, Any], key: str) -> None:
    """Raises SettingError if a key of ``[run]`` (with dashes) needs trust and the file has none."""
    if effect := {**GUARDED, **START_GUARDED}.get(key):
        value = toml["run"].get(key, toml["run"].get(key.replace("-", "_")))
        _check_trust(path, toml, {f"[run] {key}": value}, key, effect)


def require_trust_of_recipe(
    path: Path, toml: Mapping[str, Any], name: str, used: Mapping[str, Any]
) -> None:
    """Raises SettingError if settings of ``[train.NAME]`` need trust and the file has none.

    Args:
        used: The settings that were not typed. Names of data sets need no trust, and neither does
            TensorBoard, which only writes files.
    """
    for key, value in used.items():
        effect = RECIPE_GUARDED.get(key.replace("_", "-"))
        if effect is None:
            continue
        if key == "track":
            trackers = [value] if isinstance(value, str) else value
            is_guarded = any(tracker != "tensorboard" for tracker in trackers)
        elif isinstance(value, str):
            is_guarded = Path(value).expanduser().exists()
        else:
            raise SettingError(
                f"{TOML_NAME} [train.{name}] {key}: a text is expected", found=repr(value)
            )
        if is_guarded:
            _check_trust(path, toml, {f"[train.{name}] {key}": value}, key, effect)


def require_trust_of_hosts(path: Path, toml: Mapping[str, Any], described: bool) -> None:
    """Raises SettingError if programs in tables of hosts need trust and the file has none.

    Args:
        described: Its ``[run] hosts`` is what describes the hosts, their tables included.
    """
    needed = _host_settings(toml, HOST_GUARDED)
    is_environment = bool(needed) and all(name.endswith("] env") for name in needed)
    if described and "hosts" in toml.get("run", {}):
        needed["[run] hosts"] = toml["run"]["hosts"]
    if needed:
        subject, guarded_key = ("environment", "env") if is_environment else ("Python", "python")
        _check_trust(path, toml, needed, f"the {subject} of a host", HOST_GUARDED[guarded_key])


def require_trust_of_logins(path: Path, toml: Mapping[str, Any]) -> None:
    """Raises SettingError if logins in tables of hosts need trust and the file has none."""
    subject, effect = "the login of a host that you named", "can lead to another machine"
    _check_trust(path, toml, _host_settings(toml, LOGIN_KEYS), subject, effect)


def require_trust_of_source(path: Path, toml: Mapping[str, Any], effect: str) -> None:
    """Raises SettingError if ``[run] hosts``, which has this effect, has no trust."""
    _check_trust(path, toml, {"[run] hosts": toml["run"]["hosts"]}, "hosts", effect)


def _host_settings(toml: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {
        f"[hosts.{name}] {key}": value
        for name, table in toml.get("hosts", {}).items()
        for key, value in table.items()
        if key in keys
    }


def _check_trust(path: Path, toml: Mapping[str, Any], needed: Mapping[str, Any], key: str,
            effect: str) -> None:  # fmt: skip
    is_own = path.resolve() == (Path.cwd() / TOML_NAME).resolve()
    words = ["paceline", "trust", *([] if is_own else [os.path.relpath(path)])]
    listed = "\n".join(format_setting(name, value) for name, value in needed.items())
    if reason := foreign_reason(path):
        raise SettingError(
            f"{path.name} may not set {key}: it {effect}, and the file {reason}",
            found=listed,
            remedy=f"Type it yourself, or copy {path.name} to a folder of yours",
        )
    if _record(path, toml) not in _trusted():
        raise SettingError(
            f"{path.name} sets {key}, which {effect}, and you have not trusted it yet",
            found=listed,
            remedy=f"Look at it, then type: {shell_text(words)}",
        )


def foreign_reason(path: Path) -> str:
    """Returns why others could change a file; empty if they cannot."""
    for info in (path.lstat(), path.stat()):  # a link can be planted, too
        if info.st_uid not in (os.geteuid(), 0):
            return "belongs to another user"
    if info.st_mode & stat.S_IWOTH or (
        info.st_mode & stat.S_IWGRP and not bootstrap.is_private_group(info.st_gid)  # type: ignore[no-untyped-call]
    ):
        return "can be written by others"
    return ""


def trust_file() -> Path:
    return this_machine.config_folder() / "trusted"


def _record(path: Path, toml: Mapping[str, Any]) -> str:
    text = json.dumps(guarded_settings(toml), sort_keys=True, default=str)
    return f"{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()} {path.resolve()}"


def _trusted() -> list[str]:
    try:
        if foreign_reason(trust_file()):
            return []
        return trust_file().read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def remember(path: Path, toml: Mapping[str, Any], trusted: bool = True) -> None:
    """Writes down, or takes back, that the user trusts a file as it is now."""
    from paceline.agent.files import safe_paths  # imports more than `--help` may wait for

    file, place = trust_file(), f" {path.resolve()}"
    remaining_lines = [line for line in _trusted() if not line.endswith(place)]
    lines = [*remaining_lines, _record(path, toml)] if trusted else remaining_lines
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        safe_paths.make_folder(str(file.parent))
        text = "".join(f"{line}\n" for line in lines)
        temporary.write_text(text, encoding="utf-8", errors="surrogateescape")
        temporary.chmod(0o600)
        temporary.replace(file)
    except OSError as error:
        raise SettingError(f"{file} cannot be written", found=str(error)) from None


def format_setting(name: str, value: Any) -> str:
    """Returns a setting on one line, whole: what is not seen cannot be judged.

    Raises:
        SettingError: It is too long to be read.
    """
    from paceline.hosts.dialect import printable

    text = json.dumps(value, ensure_ascii=False, default=str)
    items = value if isinstance(value, list) else [value]
    if max((len(str(item)) for item in items), default=0) > _MAX_VALUE_CHARS:
        raise SettingError(
            f"{name} is too long to be looked at, so it cannot be trusted",
            found=f"{len(text):,} characters: {printable(text)}",
            remedy="Type it, or put it into a script and name that",
        )
    return printable(f"{name} = {text}", len(name) + 12 * len(text))  # as escaped
