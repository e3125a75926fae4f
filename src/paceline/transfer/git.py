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
    options = [arg for name, value in _SETTINGS.items() for arg in ("-c", f"{name}={value}")]
    command = ["git", "--no-optional-locks", *options, "-C", str(folder), *args]
    environment = {
        name: value for name, value in os.environ.items() if name not in _REPOSITORY_VARIABLES
    }
    try:
        process = subprocess.run(
            command, capture_output=True, check=False, stdin=subprocess.DEVNULL,
            env={**environment, **_ENVIRONMENT}, timeout=_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise SettingError(
            f"git did not answer within {_TIMEOUT_S} seconds in {folder}",
            found="a .gitignore or another file of git's that is a named pipe, or a very slow disk",
            remedy=f"try it: git -C {shlex.quote(str(folder))} {args[0]}",
        ) from None
    except OSError:
        return None
    return os.fsdecode(process.stdout) if process.returncode == 0 else None


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
