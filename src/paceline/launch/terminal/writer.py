"""A text stream that never blocks the launcher.

A stopped terminal (Ctrl-S), a pager that is not scrolled or a closed pipe must not end a job: the
launcher renews the nodes' leases between two lines of output.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from typing import TextIO

from paceline.spec.formatting import pluralize

MAX_PENDING_CHARS = 16 * 1024 * 1024


class BackgroundWriter:
    """Writes to ``target`` from a thread of its own; counts and drops lines beyond the limit.

    Args:
        target: The stream. Once writing to it fails, text is dropped.
        limit: Maximum number of pending characters.
    """

    def __init__(self, target: TextIO, limit: int = MAX_PENDING_CHARS) -> None:
        self._target = target
        self._limit = limit
        self._pending: deque[str] = deque()
        self._num_pending = 0
        self._num_dropped = 0
        self._is_broken = False
        self._is_closed = False
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
        """Does nothing: the thread flushes every write."""

    def write(self, text: str) -> int:
        """Queues whole lines; returns at once."""
        with self._changed:
            if self._is_broken:
                return len(text)
            if self._thread is None:
                self._start()
            if self._num_pending > self._limit:
                self._num_dropped += text.count("\n")
            else:
                self._report_dropped()
                self._queue(text)
        return len(text)

    @property
    def is_behind(self) -> bool:
        """Whether text is still pending."""
        return self._num_pending > 0 and not self._is_broken

    def drain(self, seconds: float) -> None:
        """Waits at most ``seconds`` until everything is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_behind, seconds)

    def close(self) -> None:
        """Waits until everything is written. Later writes start a new thread."""
        with self._changed:
            self._report_dropped()
            self._is_closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()
        self._thread, self._is_closed = None, False

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def _queue(self, text: str) -> None:
        self._pending.append(text)
        self._num_pending += len(text)
        self._changed.notify()

    def _report_dropped(self) -> None:
        if self._num_dropped:
            self._queue(
                f"paceline: {pluralize(self._num_dropped, 'line')} left out here because nobody"
                " read them; the logs are complete\n"
            )
            self._num_dropped = 0

    def _run(self) -> None:
        while text := self._next():
            try:
                self._target.write(text.encode(self.encoding, "replace").decode(self.encoding))
                self._target.flush()
            except (OSError, ValueError):
                self._abandon()
            with self._changed:
                self._num_pending = max(0, self._num_pending - len(text))
                self._changed.notify_all()

    def _next(self) -> str:
        """Waits for text and returns all of it; empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._is_closed)
            text = "".join(self._pending)
            self._pending.clear()
            return text  # it counts as pending until it is written

    def _abandon(self) -> None:
        """Drops all text. The interpreter's flush at exit must not fail either."""
        with self._changed:
            self._is_broken, self._num_pending = True, 0
            self._pending.clear()
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._target.fileno())
            os.close(null)
