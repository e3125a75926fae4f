"""Writes down and shows what the agents report."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping
from typing import Any

from paceline.launch.fleet import Node
from paceline.launch.screen import Screen
from paceline.rundir.directory import RunDirectory, short
from paceline.spec import rundir as names
from paceline.spec.errors import NodeError
from paceline.spec.events import Event, read_events
from paceline.spec.records import Steps

MOST_EVENTS = 20_000  # kept in memory of the beginning, and of the end


class Recorder:
    """From events to the run directory and the screen."""

    def __init__(self, directory: RunDirectory, screen: Screen) -> None:
        self.metrics: dict[str, Any] = {}  # the last value of every one that was reported
        self._steps = Steps()
        self._directory = directory
        self._screen = screen
        self._begin: list[Mapping[str, Any]] = []
        self._end: deque[Mapping[str, Any]] = deque(maxlen=MOST_EVENTS)
        self.resumable = False  # the training was stopped, and its state is saved

    @property
    def shown_path(self) -> str:
        """The run directory as the user names it."""
        return short(self._directory.path)

    def event(self, kind: str, host: str | None = None, rank: int | None = None,
              **details: Any) -> None:  # fmt: skip
        """One line in events.jsonl."""
        line = self._directory.event(kind, host, rank, **details)
        (self._begin if len(self._begin) < MOST_EVENTS else self._end).append(line)

    @property
    def events(self) -> tuple[Event, ...]:
        """What was written to events.jsonl so far; of very many, both ends."""
        return read_events([*self._begin, *self._end])

    def next_attempt(self) -> None:
        """The ranks are about to start once more, and to repeat some steps."""
        self._steps.next_attempt()

    def take(self, event: Event) -> None:
        """Writes what an agent said. NodeError when the run directory takes no more."""
        if event.kind == "output":
            self._screen.output(event.host, _rank(event), event["stream"], event.blob)
            self._directory.append_bytes(_log(event), event.blob, event["stream"])
        elif event.kind == "rank started":
            self._directory.append_bytes(_log(event), b"")
        elif event.kind == "rank ended":
            self._directory.finish(_log(event))
        elif event.kind == "begin":
            self._begin_metrics(resumed=bool(event["resumed"]))
        elif event.kind == "metrics":
            self.metrics |= event.fields
            if self._steps.new(event.fields):
                self._directory.append_line(names.METRICS, dict(event.fields))
        elif event.kind == "progress":
            self._screen.progress(event.fields)
        elif event.kind == "say":
            self._screen.say(event["text"])
            line = event["text"].encode(errors="replace") + b"\n"
            self._directory.append_bytes(_log(event), line)
        elif event.kind == "stopped":
            self.resumable = True
        if (written := event.written) is not None:
            self.event(event.kind, event.host, event.rank, **written)

    def _begin_metrics(self, *, resumed: bool) -> None:
        """A training begins; one that does not resume leaves the earlier run's file aside."""
        if resumed:
            self._steps.resume(self._directory.path / names.METRICS)
        elif self._steps.none:
            self._directory.set_aside(names.METRICS)

    def agent_log(self, node: Node) -> None:
        """What ssh and the agent had to say, beside the ranks' logs."""
        words = node.channel.stderr
        if words.strip():
            with contextlib.suppress(NodeError):
                self._directory.append_bytes(names.log_file(node.name, "agent"), words.encode())


def _rank(event: Event) -> int:
    return -1 if event.rank is None else event.rank


def _log(event: Event) -> str:
    return names.log_file(event.host, _rank(event))
