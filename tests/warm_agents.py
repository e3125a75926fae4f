"""Agents that wait with torch imported, for tests with many commands that would each import it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

LIMIT_S = 200.0  # for a busy machine


@contextlib.contextmanager
def warm_agents(cache: Path, *words: str) -> Iterator[None]:
    """Runs ``paceline warm up WORDS``; commands in the ``with`` block use the agents.

    Use it in fixtures of modules: a test would seem to leave the agents behind. On this machine, an
    agent has a new guard after each command, so such a fixture runs all of them.
    """
    argv = [sys.executable, "-m", "paceline", "warm"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        subprocess.run([*argv, "up", *words], check=True, timeout=LIMIT_S)
        try:
            yield
        finally:
            subprocess.run([*argv, "down"], check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
