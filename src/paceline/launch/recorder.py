"""Writes down and shows what the agents report."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from paceline.launch.metrics import MetricsLog
from paceline.launch.node import Node
from paceline.launch.screen import Screen
from paceline.remote.channel import Event
from paceline.rundir.directory import RunDirectory, safe, short
from paceline.spec import rundir as names
from paceline.spec.errors import NodeError

Said = dict[str, Any]
MOST_EVENTS = 20_000  # kept in memory of the beginning, and of the end


class History:
    """What was written to events.jsonl, for whoever explains the run; of a long one both ends."""

    def __init__(self) -> None:
        self._begin: list[Said] = []
        self._end: deque[Said] = deque(maxlen=MOST_EVENTS)

    def append(self, record: Said) -> None:
        (self._begin if len(self._begin) < MOST_EVENTS else self._end).append(record)

    def __iter__(self) -> Iterator[Said]:
        yield from (*self._begin, *self._end)


class Recorder:
    """From events to the run directory and the screen."""

    def __init__(self, directory: RunDirectory, screen: Screen) -> None:
        self._metrics = MetricsLog(directory)
        self._directory = directory
        self._screen = screen
        self.events = History()
        self.resumable = False  # the training was stopped, and its state is saved

    @property
    def shown_path(self) -> str:
        """The run directory as the user names it."""
        return short(self._directory.path)

    def event(self, kind: str, host: str | None = None, rank: int | None = None,
              **details: Any) -> None:  # fmt: skip
        """One line in events.jsonl."""
        self.events.append(self._directory.event(kind, host, rank, **details))

    @property
    def metrics(self) -> Said:
        """The last value of every metric that was reported."""
        return self._metrics.last

    def next_attempt(self) -> None:
        """The ranks are about to start once more, and to repeat some steps."""
        self._metrics.next_attempt()

    def take(self, node: Node, event: Event) -> None:
        """Writes what an agent said. NodeError when the run directory takes no more."""
        write = _WRITERS.get(event.message.get("event", ""))
        if write is not None:
            write(self, node, event)

    def agent_log(self, node: Node) -> None:
        """What ssh and the agent had to say, beside the ranks' logs."""
        words = node.channel.stderr
        if words.strip():
            with contextlib.suppress(NodeError):
                log = f"{names.LOGS}/{safe(node.name)}/agent.log"
                self._directory.append_bytes(log, words.encode())

    def _output(self, node: Node, event: Event) -> None:
        rank, stream = event.message["rank"], event.message["stream"]
        self._screen.output(node.name, rank, stream, event.blob)
        log = self._directory.log_name(node.name, rank)
        self._directory.append_bytes(log, event.blob, stream)

    def _rank_started(self, node: Node, event: Event) -> None:
        rank = event.message["rank"]
        self._directory.append_bytes(self._directory.log_name(node.name, rank), b"")
        self.event("rank started", node.name, rank, pid=event.message["pid"])

    def _rank_ended(self, node: Node, event: Event) -> None:
        said = event.message
        self._directory.finish(self._directory.log_name(node.name, said["rank"]))
        kept = ("code", "signal", "peak_bytes", "memory", "seen")
        details = {name: said[name] for name in kept if name in said}
        self.event("rank ended", node.name, said["rank"], **details)

    def _node_ended(self, node: Node, event: Event) -> None:
        if count := event.message["leftover"]:
            self.event("leftovers killed", node.name, count=count)

    def _fork_server(self, node: Node, event: Event) -> None:
        said = event.message
        if "ready" in said:
            seconds = round(said["import_s"], 3)
            self.event("imported", node.name, seconds=seconds, **said["loaded"])

    def _said(self, node: Node, event: Event) -> None:
        data, rank = event.message["data"], event.message["rank"]
        write = _SAYINGS.get(str(data.get("kind")))
        if write is not None:
            write(self, node, rank, data)

    def _said_event(self, node: Node, rank: int, data: Said) -> None:
        own = {"kind", "event", "rank", "host", "time"}
        details = {key: value for key, value in data.items() if key not in own}
        self.resumable = self.resumable or data.get("event") == "stopped"
        self.event(str(data.get("event", "event")), node.name, rank, **details)

    def _said_exception(self, node: Node, rank: int, data: Said) -> None:
        self.event("exception", node.name, rank, type=data["type"], message=data["message"])

    def _said_metrics(self, node: Node, rank: int, data: Said) -> None:
        self._metrics.append({key: value for key, value in data.items() if key != "kind"})

    def _said_begin(self, node: Node, rank: int, data: Said) -> None:
        self._metrics.begin(resumed=bool(data.get("resumed")))

    def _said_progress(self, node: Node, rank: int, data: Said) -> None:
        self._screen.progress(data)

    def _said_line(self, node: Node, rank: int, data: Said) -> None:
        text = str(data.get("text", ""))
        self._screen.say(text)
        self._directory.append_bytes(
            self._directory.log_name(node.name, rank), text.encode(errors="replace") + b"\n"
        )


_WRITERS: dict[str, Callable[[Recorder, Node, Event], None]] = {
    "output": Recorder._output,
    "said": Recorder._said,
    "started": Recorder._rank_started,
    "exit": Recorder._rank_ended,
    "ended": Recorder._node_ended,
    "forkserver": Recorder._fork_server,
}

_SAYINGS: dict[str, Callable[[Recorder, Node, int, Said], None]] = {
    "event": Recorder._said_event,
    "exception": Recorder._said_exception,
    "begin": Recorder._said_begin,
    "metrics": Recorder._said_metrics,
    "progress": Recorder._said_progress,
    "say": Recorder._said_line,
}
