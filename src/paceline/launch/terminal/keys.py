"""Single keys from the terminal, while the launcher's loop runs.

Nothing is read, and nothing of the terminal changed, unless standard input is the terminal and
this process is in its foreground: what a shell has in the background must not take its keys.
"""

from __future__ import annotations

import asyncio
import atexit
import codecs
import contextlib
import os
import sys
import termios
from collections.abc import Callable, Iterator
from typing import Any

MOST = 1024  # bytes of one reading
ESCAPE = "\x1b"
_NAMED = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down", "\x1b[5~": "page up",
    "\x1b[6~": "page down", "\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace",
    ESCAPE: "escape",
}  # fmt: skip


def in_foreground(descriptor: int) -> bool:
    """Whether a descriptor is a terminal whose keys are meant for this process."""
    try:
        return os.isatty(descriptor) and os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return False


def named(text: str) -> Iterator[str]:
    """The keys in what a terminal sent: characters, or names such as ``up``.

    What a key sends that has no name here is left out as a whole.
    """
    at = 0
    while at < len(text):
        size = 1
        if text[at] == ESCAPE and text[at + 1 : at + 2] in ("[", "O"):
            size = 3 if text[at + 1] == "O" else 2
            while text[at + 1] == "[" and at + size < len(text):
                size += 1
                if "@" <= text[at + size - 1] <= "~":
                    break
        key = text[at : at + size]
        at += size
        if key in _NAMED:
            yield _NAMED[key]
        elif key.isprintable():
            yield key


class Keys:
    """Has a function called for every key, until :meth:`close`.

    Signals stay what they are: Ctrl-C, Ctrl-Z and Ctrl-\\ reach the process as ever.

    Args:
        on_key: Called with each key from the running loop.
        descriptor: Of the terminal; standard input by default.
    """

    def __init__(self, on_key: Callable[[str], None], descriptor: int | None = None) -> None:
        self._fd = sys.__stdin__.fileno() if descriptor is None and sys.__stdin__ else descriptor
        self._on_key = on_key
        self._before: list[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def open(self) -> bool:
        """Whether keys are read at present."""
        return self._before is not None

    def begin(self) -> bool:
        """Reads keys from now on; False where there are none to be read."""
        if self.open:
            return True
        if self._fd is None or not in_foreground(self._fd):
            return False
        try:
            before = termios.tcgetattr(self._fd)
            after = termios.tcgetattr(self._fd)
            after[3] &= ~(termios.ICANON | termios.ECHO)
            after[6][termios.VMIN], after[6][termios.VTIME] = 1, 0
            termios.tcsetattr(self._fd, termios.TCSADRAIN, after)
        except (OSError, termios.error):
            return False
        self._before = before
        atexit.register(self.close)  # whatever happens
        try:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._fd, self._read)
        except (OSError, RuntimeError):
            self.close()
            return False
        return True

    def close(self) -> None:
        """Reads no more, and gives the terminal back as it was."""
        before, self._before = self._before, None
        loop, self._loop = self._loop, None
        if before is None or self._fd is None:
            return
        atexit.unregister(self.close)
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._fd)
        if in_foreground(self._fd):  # else whoever has the terminal now has set it
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(self._fd, termios.TCSADRAIN, before)

    def _read(self) -> None:
        assert self._fd is not None
        try:
            data = os.read(self._fd, MOST)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:  # the terminal has gone
            self.close()
            return
        for key in named(self._decoder.decode(data)):
            self._on_key(key)
