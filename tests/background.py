"""Runs a command in the background of a test, with its output in files."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

C = TypeVar("C", bound="BackgroundCommand")
TIMEOUT_S = 120.0  # takes seconds on an idle machine; only failing tests wait so long


class BackgroundCommand:
    """A running command, which is ended on leaving the ``with`` block.

    Args:
        base: Path of its output files, without the suffixes ``.out`` and ``.err``.
        popen: Starts it with the given ``stdin``, ``stdout`` and ``stderr``.
    """

    def __init__(self, base: Path, popen: Callable[..., subprocess.Popen[bytes]]) -> None:
        base.parent.mkdir(parents=True, exist_ok=True)
        self._out, self._err = Path(f"{base}.out"), Path(f"{base}.err")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = popen(stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    def wait_for(self: C, text: str, times: int = 1, patience: float = TIMEOUT_S) -> C:
        """Waits until ``text`` was written ``times`` times on standard output."""
        return self.until(lambda: self.out.count(text) >= times, repr(text), patience)

    def until(self: C, true: Callable[[], bool], what: str = "", patience: float = TIMEOUT_S) -> C:
        """Waits for a condition; fails and ends the command on a timeout or an earlier end."""
        try:
            ready = eventually(lambda: true() or self.process.poll() is not None, patience)
            assert ready, f"waited in vain: {what}\n{self.out}\n{self.err}"
            assert true(), f"ended without {what}:\n{self.out}\n{self.err}"
        except BaseException:
            self.__exit__()
            raise
        return self

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)


def eventually(condition: Callable[[], bool], patience: float = TIMEOUT_S) -> bool:
    """Returns whether the condition becomes true in time."""
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.03)
    return True
