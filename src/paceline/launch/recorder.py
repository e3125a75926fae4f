"""Writes down and shows what the agents report."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from paceline.launch.terminal.run_state import Board, Waiting
from paceline.launch.terminal.screen import MAX_PARTIAL, Screen
from paceline.rundir.directory import RunDirectory, short
from paceline.spec import libraries
from paceline.spec import rundir as names
from paceline.spec.errors import NodeError
from paceline.spec.events import Event, read_events
from paceline.spec.plan import Plan
from paceline.spec.training.metrics import StepFilter

STATE_PERIOD_S = 1.0  # between two writings of where the ranks are while nodes are waited for
MOST_EVENTS = 20_000  # kept in memory of the beginning, and of the end


class Sieve:
    """Parts one stream of a rank into what its libraries tell of themselves, and all else.

    A warning of theirs is both. An unfinished line waits, unless it is redrawn or very long.
    """

    def __init__(self) -> None:
        self._partial = b""
        self._in_list = False

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """What is to be shown and logged as ever, and what the libraries told."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        shown, library_lines = bytearray(), bytearray()
        for line in lines:
            level = self._level(line[: libraries.MAX_PREFIX].decode(errors="replace"))
            if level != "told":
                shown += line + b"\n"
            if level is not None:
                library_lines += line + b"\n"
        if b"\r" in self._partial or len(self._partial) > MAX_PARTIAL:
            shown += self.rest()
        return bytes(shown), bytes(library_lines)

    def _level(self, line: str) -> str | None:
        level = libraries.classify_line(line)
        listed = self._in_list and level is None and libraries.is_list_item(line)
        self._in_list = libraries.starts_list(line) or (listed and bool(line))
        return "told" if listed else level

    def rest(self) -> bytes:
        """What was written without an end of line."""
        rest, self._partial = self._partial, b""
        return rest


class Recorder:
    """From events to the run directory and the screen.

    Args:
        directory, screen: Where things are written down and shown.
        debug: What libraries tell of themselves goes into files of its own.

    Attributes:
        board: Where everybody is.
    """

    def __init__(self, directory: RunDirectory, screen: Screen, debug: bool = False) -> None:
        self.board = Board()
        self._debug = debug
        self._sieves: dict[tuple[str, int, str], Sieve] = {}
        self.metrics: dict[str, Any] = {}  # the last value of every one that was reported
        self._steps = StepFilter()
        self._directory = directory
        self._screen = screen
        self._begin: list[Mapping[str, Any]] = []
        self._end: deque[Mapping[str, Any]] = deque(maxlen=MOST_EVENTS)
        self.called: Callable[[], Mapping[str, str]] = dict  # hosts on their way back, and how
        self.waits: Callable[[], Waiting | None] = lambda: None  # whether running ranks wait
        self._waiting: Waiting | None = None  # while no ranks run
        self._ticker: asyncio.Task[None] | None = None

    @property
    def shown_path(self) -> str:
        """The run directory as the user names it."""
        return short(self._directory.path)

    def event(self, kind: str, host: str | None = None, rank: int | None = None,
              **details: Any) -> None:  # fmt: skip
        """One line in events.jsonl."""
        line = self._directory.event(kind, host, rank, **details)
        if (event := Event.read(line)) is not None:
            self.board.take(event, time.monotonic())
        (self._begin if len(self._begin) < MOST_EVENTS else self._end).append(line)

    @property
    def events(self) -> tuple[Event, ...]:
        """What was written to events.jsonl so far; of very many, both ends."""
        return read_events([*self._begin, *self._end])

    @property
    def path(self) -> str:
        """The run directory's whole path."""
        return str(self._directory.path)

    def write(self, name: str, text: str) -> None:
        """Writes a file of the run. NodeError when it takes no more."""
        self._directory.append_bytes(name, text.encode(errors="replace"))
        self._directory.finish(name)

    def where(self) -> None:
        """Writes down who is where, for whoever asks for the state of the run."""
        self.board.called(self.called())
        self.board.waits = self._waiting or self.waits()
        with contextlib.suppress(NodeError):  # a full disk is told of by what must be written
            state = self.board.to_json(time.monotonic(), time.time())
            self._directory.write_json(names.RANKS, state, durable=False)

    def wait(self, waiting: Waiting | None) -> None:
        """Nodes are waited for while no ranks run: writes down where everybody is meanwhile."""
        if waiting is self._waiting:
            return
        self._waiting = waiting
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        if waiting is None:
            self.where()
        else:
            self._ticker = asyncio.ensure_future(self._tick())

    async def _tick(self) -> None:
        while True:
            self.where()
            await asyncio.sleep(STATE_PERIOD_S)

    def write_plan(self, plan: Plan) -> None:
        """Writes the plan that is executed."""
        self._directory.write_json(names.PLAN, plan.to_json())

    def next_attempt(self) -> None:
        """The ranks are about to start once more, and to repeat some steps."""
        self._steps.next_attempt()

    def take(self, event: Event) -> None:
        """Writes what an agent said. NodeError when the run directory takes no more."""
        if event.kind == "output":
            blob = self._sifted(event) if self._debug else event.blob
            self._output(event, event["stream"], blob)
        elif event.kind == "rank started":
            self._directory.append_bytes(_log(event), b"")
        elif event.kind == "rank ended":
            for stream in ("out", "err"):
                sieve = self._sieves.pop((event.host, _rank(event), stream), Sieve())
                self._output(event, stream, sieve.rest())
            self._directory.finish(_log(event))
        elif event.kind == "begin":
            self._begin_metrics(resumed=bool(event["resumed"]))
        elif event.kind == "metrics":
            if event["split"] != "pace":  # how it went, not what came out
                self.metrics |= event.fields
            if self._steps.accept(event.fields, (event.host, event.rank)):
                self.board.record(event.fields)
                now = {} if "time" in event.fields else {"time": round(time.time(), 3)}
                self._directory.append_line(names.METRICS, {**event.fields, **now})
        elif event.kind == "progress":
            self._screen.progress(event.fields)
        elif event.kind == "say":
            self._screen.say(event["text"], event.rank)
            line = event["text"].encode(errors="replace") + b"\n"
            self._directory.append_bytes(_log(event), line)
        if (written := event.recorded_fields) is not None:
            self.event(event.kind, event.host, event.rank, **written)
        elif event.kind in ("heartbeat", "pace", "progress"):
            self.board.take(event, time.monotonic())

    def _output(self, event: Event, stream: str, blob: bytes) -> None:
        if blob:
            self._screen.output(event.host, _rank(event), stream, blob)
            self._directory.append_bytes(_log(event), blob, stream)

    def _sifted(self, event: Event) -> bytes:
        """What a rank wrote, without what its libraries told: that is written down beside it."""
        who = (event.host, _rank(event), event["stream"])
        shown, library_lines = self._sieves.setdefault(who, Sieve()).feed(event.blob)
        if library_lines:
            name = names.debug_file(event.host, _rank(event))
            self._directory.append_bytes(name, library_lines, event["stream"])
        return shown

    def _begin_metrics(self, *, resumed: bool) -> None:
        """A training begins; one that does not resume leaves the earlier run's file aside."""
        if resumed:
            self._steps.resume(self._directory.path / names.METRICS)
        elif self._steps.is_empty:
            self._directory.set_aside(names.METRICS)

    def agent_log(self, host: str, text: str) -> None:
        """Writes what ssh and the agent of a host printed beside the ranks' logs."""
        if text.strip():
            with contextlib.suppress(NodeError):
                self._directory.append_bytes(names.log_file(host, "agent"), text.encode())


def _rank(event: Event) -> int:
    return -1 if event.rank is None else event.rank


def _log(event: Event) -> str:
    return names.log_file(event.host, _rank(event))
