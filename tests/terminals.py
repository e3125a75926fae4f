"""Runs programs on pseudo-terminals."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"  # the alternate screen


@dataclass
class Terminal:
    """A pseudo-terminal with a program in its foreground."""

    descriptor: int
    line: int
    program: subprocess.Popen[bytes]
    said: bytes = b""
    before: list[object] = field(default_factory=list)

    def reads(self, wanted: bytes, seconds: float = 60.0) -> bool:
        """Returns whether the program prints a text in time."""
        until = time.monotonic() + seconds
        while wanted not in self.said and time.monotonic() < until:
            if select.select([self.descriptor], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    self.said += os.read(self.descriptor, 1 << 16)
            elif self.program.poll() is not None:
                break
        return wanted in self.said

    def types(self, keys: bytes) -> None:
        os.write(self.descriptor, keys)

    def ends(self) -> int:
        while self.program.poll() is None:
            self.reads(b"nothing that is ever said", 0.2)
        self.reads(b"nothing that is ever said", 0.3)
        return self.program.returncode

    @property
    def restored(self) -> bool:
        """Whether the terminal has its original settings."""
        return termios.tcgetattr(self.line) == self.before


@contextlib.contextmanager
def on_terminal(argv: Sequence[str], cwd: Path | None = None, columns: int = 80, lines: int = 24,
                term: str = "xterm", **env: str) -> Iterator[Terminal]:  # fmt: skip
    """Runs a program in the foreground of a pseudo-terminal, and ends it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    settings = termios.tcgetattr(theirs)

    def take() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    environ = {**os.environ, "TERM": term, **env}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "PACELINE_OPT_SCREEN"):
        if name not in env:
            environ.pop(name, None)
    program = subprocess.Popen(
        [*argv], cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, preexec_fn=take, env=environ,
    )  # fmt: skip
    try:
        yield Terminal(ours, theirs, program, before=settings)
    finally:
        program.kill()
        program.wait()
        os.close(ours)
        os.close(theirs)
