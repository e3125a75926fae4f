"""Calls git about a folder that may come from anybody: no program that its settings name is run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_SETTINGS = {
    "core.fsmonitor": "",
    "core.hooksPath": os.devnull,
    "core.alternateRefsCommand": "",
    "core.pager": "cat",
    "diff.external": "",
    "protocol.allow": "never",  # a partial clone fetches what it lacks
    "safe.bareRepository": "explicit",  # what looks like a repository without .git is data
    "submodule.recurse": "false",
}
_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ALLOW_PROTOCOL": "none",  # goes before what the repository allows
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
}

# set in a git hook, for another repository (git rev-parse --local-env-vars)
_OF_A_REPOSITORY = {
    "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_COMMON_DIR", "GIT_CONFIG", "GIT_CONFIG_PARAMETERS",
    "GIT_DIR", "GIT_INDEX_FILE", "GIT_NAMESPACE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX",
    "GIT_WORK_TREE",
}  # fmt: skip


def run_git(folder: Path, *args: str) -> str | None:
    """Standard output of ``git ARGS`` in ``folder``; ``None`` if it fails or there is no git.

    File names in the output are bytes that need not be text: they are decoded by ``os.fsdecode``.
    """
    options = [word for name, value in _SETTINGS.items() for word in ("-c", f"{name}={value}")]
    command = ["git", "--no-optional-locks", *options, "-C", str(folder), *args]
    kept = {name: value for name, value in os.environ.items() if name not in _OF_A_REPOSITORY}
    try:
        done = subprocess.run(
            command, capture_output=True, check=False, stdin=subprocess.DEVNULL,
            env={**kept, **_ENVIRONMENT},
        )  # fmt: skip
    except OSError:
        return None
    return os.fsdecode(done.stdout) if done.returncode == 0 else None


def top_of(folder: Path) -> Path | None:
    """The top of the git work tree that holds ``folder``; ``None`` if there is none.

    A repository may name any folder as its work tree (``core.worktree``): only one that holds both
    the repository and ``folder`` counts.
    """
    shown = run_git(folder, "rev-parse", "--show-toplevel")
    if shown is None:
        return None
    top = Path(shown.removesuffix("\n"))
    real, real_top = os.path.realpath(folder), os.path.realpath(top)
    holds = real == real_top or real.startswith(real_top.rstrip("/") + "/")
    return top if holds and os.path.lexists(top / ".git") else None
