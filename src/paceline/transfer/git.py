"""Runs git in an untrusted folder, without running programs that its settings name."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from paceline.spec.errors import SettingError

_TIMEOUT_S = 120  # listing a large work tree on a slow network disk may take a minute

_SETTINGS = {
    "core.fsmonitor": "",
    "core.hooksPath": os.devnull,
    "core.alternateRefsCommand": "",
    "core.pager": "cat",
    "diff.external": "",
    "protocol.allow": "never",  # a partial clone would fetch missing objects
    "safe.bareRepository": "explicit",  # a bare repository is data
    "submodule.recurse": "false",
}
_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ALLOW_PROTOCOL": "none",  # overrides the repository's settings
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",  # messages in English
}

# set in a git hook, for another repository (git rev-parse --local-env-vars)
_REPOSITORY_VARIABLES = {
    "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_COMMON_DIR", "GIT_CONFIG", "GIT_CONFIG_PARAMETERS",
    "GIT_DIR", "GIT_INDEX_FILE", "GIT_NAMESPACE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX",
    "GIT_WORK_TREE",
}  # fmt: skip


def run_git(folder: Path, *args: str) -> str | None:
    """Output of ``git ARGS`` in ``folder``, decoded by ``os.fsdecode``; ``None`` if it fails.

    Raises:
        SettingError: It does not end, for example because .gitignore is a named pipe.
    """
    try:
        process = _run(folder, *args)
    except OSError:
        return None
    return os.fsdecode(process.stdout) if process.returncode == 0 else None


def repository_problem(folder: Path) -> str:
    """Why git does not read the repository that contains ``folder``; empty if it does.

    Also empty if no repository contains it.
    """
    try:
        root = next(path for path in (folder, *folder.parents) if os.path.lexists(path / ".git"))
        process = _run(folder, "rev-parse")
    except StopIteration:
        return ""
    except OSError:
        return f"the git repository in {root} cannot be read, because git is not installed"
    if process.returncode == 0:
        return ""
    message = os.fsdecode(process.stderr).strip().partition("\n")[0]
    if "dubious ownership" in message:
        trust = shlex.join(["git", "config", "--global", "--add", "safe.directory", str(root)])
        return (
            f"git refuses the repository in {root}, because another user owns it. If you trust that"
            f" user: {trust}"
        )
    return f"git cannot read the repository in {root}: {message}"


def _run(folder: Path, *args: str) -> subprocess.CompletedProcess[bytes]:
    """Runs git; OSError if it is not installed, SettingError if it does not end."""
    options = [arg for name, value in _SETTINGS.items() for arg in ("-c", f"{name}={value}")]
    command = ["git", "--no-optional-locks", *options, "-C", str(folder), *args]
    environment = {
        name: value for name, value in os.environ.items() if name not in _REPOSITORY_VARIABLES
    }
    try:
        return subprocess.run(
            command, capture_output=True, check=False, stdin=subprocess.DEVNULL,
            env={**environment, **_ENVIRONMENT}, timeout=_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise SettingError(
            f"git did not answer within {_TIMEOUT_S} seconds in {folder}",
            found="a .gitignore or another file of git's that is a named pipe, or a very slow disk",
            remedy=f"try it: git -C {shlex.quote(str(folder))} {args[0]}",
        ) from None


def work_tree_root(folder: Path) -> Path | None:
    """The root of the git work tree that contains ``folder``; ``None`` if there is none.

    A repository may name any folder as its work tree (``core.worktree``); it must contain both the
    repository and ``folder``.
    """
    output = run_git(folder, "rev-parse", "--show-toplevel")
    if output is None:
        return None
    root = Path(output.removesuffix("\n"))
    real, real_root = os.path.realpath(folder), os.path.realpath(root)
    contains = real == real_root or real.startswith(real_root.rstrip("/") + "/")
    return root if contains and os.path.lexists(root / ".git") else None
