"""Removes tracebacks of KeyboardInterrupt from a rank's error stream."""

from __future__ import annotations

import re
from collections.abc import Iterator

_PREFIX = rb"(?:\[rank\d+\]: ?)?"  # of torch
_START = re.compile(
    _PREFIX + rb"(?:Traceback \(most recent call last\):|Process \S+:|Exception ignored .*"
    rb"|During handling of the above exception, .*|The above exception was .*)$"
)
_AFTER_TEXT = re.compile(rb"(.+?)(" + _PREFIX + rb"Traceback \(most recent call last\):)$")
_INDENTED = re.compile(_PREFIX + rb"(?:\s.*)?$")
_INTERRUPT = re.compile(_PREFIX + rb"KeyboardInterrupt\b")
MAX_LINES = 5_000  # held back of a traceback


class InterruptFilter:
    """Holds back each traceback until it is known whether it ends with a KeyboardInterrupt.

    An exception may be followed by the traceback of another that was raised while it was handled.
    """

    def __init__(self) -> None:
        self._pending: list[bytes] = []
        self._names_exception = False  # the last traceback that is held back is complete

    def feed(self, lines: list[bytes]) -> list[bytes]:
        """Takes lines of the stream; returns those to show."""
        visible = []
        for line in self._split(lines):
            if _START.match(line):
                self._names_exception = False
            elif self._pending and not self._names_exception and _INTERRUPT.match(line):
                self.flush()
                continue
            elif not self._pending or (self._names_exception and not _INDENTED.match(line)):
                visible += [*self.flush(), line]
                continue
            elif not _INDENTED.match(line):
                self._names_exception = True
            self._pending.append(line)
            if len(self._pending) > MAX_LINES:
                visible += self.flush()
        return visible

    @staticmethod
    def _split(lines: list[bytes]) -> Iterator[bytes]:
        """Yields lines; a traceback that follows a progress bar begins a line of its own."""
        for line in lines:
            match = None if _START.match(line) else _AFTER_TEXT.match(line)
            yield from match.groups() if match else [line]

    def flush(self) -> list[bytes]:
        """Forgets the lines that are held back, and returns them."""
        pending, self._pending, self._names_exception = self._pending, [], False
        return pending
