"""Between the training and a tracker: a queue and a thread, so that neither waits for the other."""

from __future__ import annotations

import contextlib
import json
import math
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.train import files
from paceline.train.trackers import Tracker

QUEUED = 1000
FAILURES = 3
CLOSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Record:
    """Values of one step of one split."""

    split: str
    step: int
    values: Mapping[str, float]


class Guard:
    """Feeds one tracker from a thread of its own.

    What it raises is told once; after three failures in a row it is left alone. A record that
    was sent before an interruption is not sent again.

    Args:
        name: Of the tracker.
        open_it: Makes the tracker, given the id of its run (empty at first); may fail or block.
        notes: File that remembers the run's id and what was sent.
        warn: Told what went wrong; called from the thread.
        resumed: The run goes on: its notes count.
    """

    def __init__(
        self,
        name: str,
        open_it: Callable[[str], Tracker],
        notes: Path,
        warn: Callable[[str], None],
        *,
        resumed: bool,
    ) -> None:
        self._name, self._open, self._notes, self._warn = name, open_it, notes, warn
        known = _noted(notes) if resumed else {}
        self._run_id = str(known.get("run_id", ""))
        self._sent: dict[str, int] = dict(known.get("sent", {}))
        self._failures, self._lost = 0, False
        self._records: queue.Queue[Record | None] = queue.Queue(QUEUED)
        self._thread = threading.Thread(target=self._work, name=f"paceline-{name}", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Takes a record; never waits. With a full queue the record is lost."""
        try:
            self._records.put_nowait(record)
        except queue.Full:
            if not self._lost:
                self._warn(f"{self._name} is too slow: some records are lost")
            self._lost = True

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Gives the tracker some time for what is still queued, and leaves it then."""
        with contextlib.suppress(queue.Full):
            self._records.put(None, timeout=seconds)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._warn(f"{self._name} did not finish within {seconds:g} s: left behind")

    def _work(self) -> None:
        tracker = self._try(lambda: self._open(self._run_id))
        if tracker is not None:
            self._run_id = tracker.run_id
        while (record := self._records.get()) is not None:
            if tracker is not None and self._failures < FAILURES:
                self._send(tracker, record)
        if tracker is not None:
            self._try(tracker.close)

    def _send(self, tracker: Tracker, record: Record) -> None:
        if record.step <= self._sent.get(record.split, -1):
            return
        values = {f"{record.split}/{name}": value for name, value in record.values.items()}

        def send() -> bool:
            tracker.log(record.step, values)
            return True

        if self._try(send):
            self._sent[record.split] = record.step
            self._note()

    def _note(self) -> None:
        content = json.dumps({"run_id": self._run_id, "sent": self._sent}).encode()
        with contextlib.suppress(OSError):
            files.write_bytes(self._notes, content, durable=False)

    def _try(self, act: Callable[[], Any]) -> Any:
        try:
            result = act()
        except Exception as error:
            self._failures += 1
            if self._failures in (1, FAILURES):
                rest = ": no more records for it" if self._failures == FAILURES else ""
                self._warn(f"{self._name}: {type(error).__name__}: {error}{rest}")
            return None
        self._failures = 0
        return result


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among some values: what every tracker takes."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


def _noted(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        said = json.loads(path.read_text(encoding="utf-8"))
        return said if isinstance(said, dict) else {}
    return {}
