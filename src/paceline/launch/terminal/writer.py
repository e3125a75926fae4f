"""A text stream that never holds the launcher up.

A terminal that was stopped (Ctrl-S), a pager that nobody scrolls or a pipe that was closed must
not end a job: the launcher renews the nodes' leases between two lines of output.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from typing import TextIO

from paceline.spec.formatting import pluralize

LIMIT = 16 * 1024 * 1024  # characters kept for a reader who is late


class Writer:
    """Writes to ``target`` from a thread of its own; what finds no room is counted, not kept.

    It can be handed to whoever wants a text file.

    Args:
        target: The stream. Once it takes no more (its reader went away), text is thrown away.
        limit: Characters that may wait.
    """

    def __init__(self, target: TextIO, limit: int = LIMIT) -> None:
        self._target = target
        self._limit = limit
        self._texts: deque[str] = deque()
        self._waiting = 0
        self._left_out = 0
        self._broken = False
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def encoding(self) -> str:
        return self._target.encoding or "utf-8"

    def isatty(self) -> bool:
        return self._target.isatty()

    def fileno(self) -> int:
        return self._target.fileno()

    def flush(self) -> None:
        """Every write is flushed by the thread."""

    def write(self, text: str) -> int:
        """Queues whole lines; returns at once."""
        with self._changed:
            if self._broken:
                return len(text)
            if self._thread is None:
                self._start()
            if self._waiting > self._limit:
                self._left_out += text.count("\n")
            else:
                self._make_up_for_gap()
                self._queue(text)
        return len(text)

    @property
    def behind(self) -> bool:
        """Whether the reader has not taken all yet."""
        return self._waiting > 0 and not self._broken

    def settle(self, seconds: float) -> None:
        """Waits at most so long until the reader has taken everything."""
        with self._changed:
            self._changed.wait_for(lambda: not self.behind, seconds)

    def close(self) -> None:
        """Waits until the reader has taken everything. Later writes start anew."""
        with self._changed:
            self._make_up_for_gap()
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()
        self._thread, self._closed = None, False

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def _queue(self, text: str) -> None:
        self._texts.append(text)
        self._waiting += len(text)
        self._changed.notify()

    def _make_up_for_gap(self) -> None:
        if self._left_out:
            self._queue(
                f"paceline: {pluralize(self._left_out, 'line')} left out here, for nobody read"
                " them; the logs are complete\n"
            )
            self._left_out = 0

    def _run(self) -> None:
        while text := self._next():
            try:
                self._target.write(self._encodable(text))
                self._target.flush()
            except (OSError, ValueError):
                self._give_up()
            with self._changed:
                self._waiting = max(0, self._waiting - len(text))
                self._changed.notify_all()

    def _next(self) -> str:
        """All that waits, once something does; empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._texts or self._closed)
            text = "".join(self._texts)
            self._texts.clear()
            return text  # which waits until it is written

    def _encodable(self, text: str) -> str:
        return text.encode(self.encoding, "replace").decode(self.encoding)

    def _give_up(self) -> None:
        """Nobody reads any more. The interpreter's own flush at its end must not fail either."""
        with self._changed:
            self._broken, self._waiting = True, 0
            self._texts.clear()
        with contextlib.suppress(OSError, ValueError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self._target.fileno())
            os.close(nothing)
