"""Reads single keys from the terminal while the launcher's event loop runs.

It reads nothing, and does not change the terminal, unless standard input is a terminal and this
process is in its foreground.
"""

from __future__ import annotations

import asyncio
import atexit
import codecs
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from typing import Any

READ_BYTES = 1024
ESCAPE = "\x1b"
_KEY_NAMES = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down", "\x1b[5~": "page up",
    "\x1b[6~": "page down", "\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace",
    ESCAPE: "escape",
}  # fmt: skip


def in_foreground(descriptor: int) -> bool:
    """Whether a descriptor is a terminal with this process in its foreground."""
    try:
        return os.isatty(descriptor) and os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return False


def parse_keys(text: str) -> Iterator[str]:
    """Yields the keys in a terminal's input: characters, or names such as ``up``.

    Escape sequences of unknown keys are skipped.
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
        if key in _KEY_NAMES:
            yield _KEY_NAMES[key]
        elif key.isprintable():
            yield key


class Keys:
    """Calls a function for every key, until :meth:`close`.

    Ctrl-C, Ctrl-Z and Ctrl-\\ still send their signals.

    Args:
        on_key: Called with each key from the running loop.
        descriptor: Of the terminal; standard input by default.
    """

    def __init__(self, on_key: Callable[[str], None], descriptor: int | None = None) -> None:
        self._fd = sys.__stdin__.fileno() if descriptor is None and sys.__stdin__ else descriptor
        self._on_key = on_key
        self._saved_attributes: list[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def is_open(self) -> bool:
        """Whether keys are being read."""
        return self._saved_attributes is not None

    def start(self) -> bool:
        """Starts reading keys; returns False if this process cannot."""
        if self.is_open:
            return True
        if self._fd is None or not in_foreground(self._fd):
            return False
        try:
            saved = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd, termios.TCSADRAIN)
        except (OSError, termios.error):
            return False
        self._saved_attributes = saved
        atexit.register(self.close)
        try:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._fd, self._read)
        except (OSError, RuntimeError):
            self.close()
            return False
        return True

    def close(self) -> None:
        """Stops reading, and restores the terminal's settings."""
        saved, self._saved_attributes = self._saved_attributes, None
        loop, self._loop = self._loop, None
        if saved is None or self._fd is None:
            return
        atexit.unregister(self.close)
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._fd)
        if in_foreground(self._fd):  # else the foreground process has set it
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(self._fd, termios.TCSADRAIN, saved)

    def _read(self) -> None:
        assert self._fd is not None
        try:
            data = os.read(self._fd, READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:  # the terminal is closed
            self.close()
            return
        for key in parse_keys(self._decoder.decode(data)):
            self._on_key(key)
