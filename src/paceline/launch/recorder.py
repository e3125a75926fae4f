"""Records what the agents report in the run directory, and shows it on the screen."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from paceline.launch.terminal.run_state import NodeWait, RunState
from paceline.launch.terminal.screen import MAX_PARTIAL, Screen
from paceline.rundir.directory import RunDirectory, event_line, short
from paceline.spec import libraries
from paceline.spec import rundir as names
from paceline.spec.errors import NodeError
from paceline.spec.events import KINDS, Event, read_events
from paceline.spec.failure import format_location
from paceline.spec.formatting import format_size
from paceline.spec.plan import Plan
from paceline.spec.schema import memory_bytes
from paceline.spec.training.metrics import StepFilter

STATE_PERIOD_S = 1.0  # between two versions of ranks.json while the job waits for nodes
MAX_HISTORY_BYTES = 8 << 20  # of events kept in memory, of the beginning and of the end each
MAX_RANK_BYTES = 1 << 30  # of one rank's reports in events.jsonl and metrics.jsonl
MAX_SHORT_REPORT_BYTES = 256 << 10  # of them, are written even if the disk is nearly full
MAX_AGENT_BYTES = 64 << 20  # of one agent's events in events.jsonl
MAX_METRICS, MAX_METRIC_BYTES = 10_000, 1 << 16  # names, and in memory of a name and its value


class LibraryFilter:
    """Separates library diagnostics from the other output of one stream of a rank.

    A library's warning goes to both. An incomplete line waits, unless it is redrawn or very long.
    """

    def __init__(self) -> None:
        self._partial = b""
        self._in_list = False

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Returns the regular output, and the libraries' lines."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        output, library_lines = bytearray(), bytearray()
        for line in lines:
            level = self._level(line[: libraries.MAX_PREFIX].decode(errors="replace"))
            if level != "told":
                output += line + b"\n"
            if level is not None:
                library_lines += line + b"\n"
        if b"\r" in self._partial or len(self._partial) > MAX_PARTIAL:
            output += self.flush()
        return bytes(output), bytes(library_lines)

    def _level(self, line: str) -> str | None:
        level = libraries.classify_line(line)
        listed = self._in_list and level is None and libraries.is_list_item(line)
        self._in_list = libraries.starts_list(line) or (listed and bool(line))
        return "told" if listed else level

    def flush(self) -> bytes:
        """Returns the incomplete last line."""
        partial, self._partial = self._partial, b""
        return partial


Source = tuple[str, int | None] | None  # of events: a rank, an agent, or the launcher


class EventHistory:
    """The first and the last events, as text: parsed, they may take twenty times as much.

    If there are too many, the source with the most bytes loses its oldest ones: a rank that reports
    very much hides no events of the launcher and of other ranks.
    """

    def __init__(self) -> None:
        self._num_events = 0
        self._first: list[tuple[int, str]] = []  # with their number
        self._last: dict[Source, deque[tuple[int, str]]] = {}
        self._first_bytes = 0
        self._last_bytes = Counter[Source]()

    def add(self, line: Mapping[str, Any], source: Source = None) -> None:
        """Adds an event."""
        text = json.dumps(line)
        self._num_events += 1
        if not self._last and self._first_bytes + len(text) <= MAX_HISTORY_BYTES:
            self._first.append((self._num_events, text))
            self._first_bytes += len(text)
            return
        self._last.setdefault(source, deque()).append((self._num_events, text))
        self._last_bytes[source] += len(text)
        while self._last_bytes.total() > MAX_HISTORY_BYTES:
            largest = max(self._last_bytes, key=self._last_bytes.__getitem__)
            self._last_bytes[largest] -= len(self._last[largest].popleft()[1])

    def read(self) -> tuple[Event, ...]:
        """Returns the events."""
        events = sorted([*self._first, *itertools.chain(*self._last.values())])
        return read_events(json.loads(text) for _, text in events)


class Recorder:
    """Writes events to the run directory and the screen.

    Args:
        debug: Whether library diagnostics go into files of their own.

    Attributes:
        run_state: The present state of all ranks and hosts.
        metrics: The last reported value of every metric.
        has_begun: Whether a training has begun, or resumed.
        get_reconnects: Returns the status of the hosts that are being reconnected, by name.
        get_node_wait: Returns what running ranks wait for; ``None`` if they do not.
    """

    def __init__(self, directory: RunDirectory, screen: Screen, debug: bool = False) -> None:
        self.run_state = RunState()
        self._debug = debug
        self._filters: dict[tuple[str, int, str], LibraryFilter] = {}
        self.metrics: dict[str, Any] = {}
        self.has_begun = False
        self._step_filter = StepFilter()
        self._directory = directory
        self._screen = screen
        self._history = EventHistory()
        self._agent_logs = set[str]()  # that have begun
        self._has_dropped = False  # output, for which the disk has no room
        self._written_bytes = Counter[str]()  # in logs and records, by rank and host
        self._report_bytes = Counter[Source]()
        self.get_reconnects: Callable[[], Mapping[str, str]] = dict
        self.get_node_wait: Callable[[], NodeWait | None] = lambda: None
        self._waiting: NodeWait | None = None  # while no ranks run
        self._ticker: asyncio.Task[None] | None = None

    @property
    def display_path(self) -> str:
        """The run directory as the user types it."""
        return short(self._directory.path)

    def event(self, kind: str, host: str | None = None, rank: int | None = None, /,
              **details: Any) -> None:  # fmt: skip
        """Appends the launcher's own event to events.jsonl."""
        self._apply(self._directory.event(kind, host, rank, **details), None)

    def _apply(self, line: Mapping[str, Any], source: Source) -> None:
        if (event := Event.read(line)) is not None:
            self.run_state.apply(event, time.monotonic())
        self._history.add(line, source)

    @property
    def events(self) -> tuple[Event, ...]:
        """The events so far; of very many, the first and the last."""
        return self._history.read()

    @property
    def path(self) -> str:
        """The run directory's absolute path."""
        return str(self._directory.path)

    def write(self, name: str, text: str) -> None:
        """Writes a file of the run. Raises NodeError when the disk is full."""
        self._directory.append_bytes(name, text.encode(errors="replace"))
        self._directory.finish(name)

    def write_state(self) -> None:
        """Writes ``ranks.json``, the state of the run for other processes."""
        self.run_state.set_reconnects(self.get_reconnects())
        self.run_state.waiting = self._waiting or self.get_node_wait()
        with contextlib.suppress(NodeError):  # a full disk is reported by required files
            state = self.run_state.to_json(time.monotonic(), time.time())
            record = {"run_id": self._directory.run_id, **state}
            self._directory.write_json(names.RANKS, record, durable=False)

    def set_waiting(self, waiting: NodeWait | None) -> None:
        """Sets what the job waits for while no ranks run, and writes ``ranks.json`` meanwhile."""
        if waiting is self._waiting:
            return
        self._waiting = waiting
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        if waiting is None:
            self.write_state()
        else:
            self._ticker = asyncio.ensure_future(self._tick())

    async def _tick(self) -> None:
        while True:
            self.write_state()
            await asyncio.sleep(STATE_PERIOD_S)

    def write_plan(self, plan: Plan) -> None:
        """Writes the plan."""
        self._directory.write_json(names.PLAN, plan.to_json())

    def next_attempt(self) -> None:
        """Prepares for another start of the ranks, which may repeat steps."""
        self._step_filter.next_attempt()

    def record(self, event: Event) -> None:
        """Records an agent's event. Raises NodeError when the run directory cannot be written."""
        if event.kind == "output":
            blob = self._filter_output(event) if self._debug else event.blob
            self._output(event, event["stream"], blob)
        elif event.kind == "rank started":
            self._finish_logs(event)  # a lost host has not reported the end of its ranks
            self._screen.restart_rank(event.host, _rank(event))
            self._directory.append_bytes(_log(event), b"")
            self._note_begin(_log(event), event.host, event.rank)
            if self._debug:
                debug_log = names.debug_file(event.host, _rank(event))
                self._note_begin(debug_log, event.host, event.rank, is_debug=True)
        elif event.kind == "rank ended":
            self._finish_logs(event)
        elif event.kind == "begin":
            self.has_begun = True
            self._start_metrics(resumed=bool(event["resumed"]))
        elif event.kind == "metrics":
            if event["split"] != "pace":  # timing, not a result
                self._keep_metrics(event.fields)
            if self._step_filter.accept(event.fields, (event.host, event.rank)):
                self.run_state.add_metrics(event.fields)
                timestamp = {} if "time" in event.fields else {"time": round(time.time(), 3)}
                record = {**event.fields, **timestamp}
                self._directory.append_line(names.METRICS, record, self._accepts(event))
        elif event.kind == "progress":
            self._screen.progress(event.fields)
        elif event.kind == "say":
            self._screen.print(event["text"], event.rank)
            self._append_log(event, event["text"].encode(errors="replace") + b"\n")
        if (written := event.recorded_fields) is not None:
            line = event_line(event.kind, event.host, event.rank, written)
            line = self._directory.append_line(names.EVENTS, line, self._accepts(event))
            self._apply(line, _source(event))
        elif event.kind in ("heartbeat", "pace", "progress"):
            self.run_state.apply(event, time.monotonic())

    def _accepts(self, event: Event) -> Callable[[int], bool]:
        """Returns whether a node's event of that many bytes is written; a line says if it is not.

        Each rank and each agent has a quota. If a rank reports much, the disk needs room, too.
        """
        source = _source(event)
        is_rank = source[1] is not None

        def accepts(num_bytes: int) -> bool:
            is_optional = is_rank and self._report_bytes[source] > MAX_SHORT_REPORT_BYTES
            if is_optional and not self._directory.has_room(num_bytes):
                self._note_full_disk()
                return False
            self._written_bytes[event.where] += num_bytes
            limit, former = (
                MAX_RANK_BYTES if is_rank else MAX_AGENT_BYTES,
                self._report_bytes[source],
            )
            self._report_bytes[source] += num_bytes
            if former <= limit < former + num_bytes:
                self._screen.note(
                    f"paceline: what {format_location(*source)} reports is no longer written to"
                    f" {names.EVENTS} and {names.METRICS}: it was {format_size(limit)}"
                )
            return former + num_bytes <= limit

        return accepts

    def _keep_metrics(self, values: Mapping[str, Any]) -> None:
        """Keeps the last value of each name, unless they are too many or too large."""
        for name, value in values.items():
            is_known = name in self.metrics or len(self.metrics) < MAX_METRICS
            is_small = memory_bytes({name: value}, MAX_METRIC_BYTES) <= MAX_METRIC_BYTES
            self.metrics.pop(name, None)  # an earlier value is not the last
            if is_known and is_small:
                self.metrics[name] = value

    def _output(self, event: Event, stream: str, blob: bytes) -> None:
        if blob:
            self._screen.output(event.host, _rank(event), stream, blob)
            self._append_log(event, blob, stream)

    def _finish_logs(self, event: Event) -> None:
        """Writes output of a rank's process that was held back."""
        for stream in ("out", "err"):
            sieve = self._filters.pop((event.host, _rank(event), stream), LibraryFilter())
            self._output(event, stream, sieve.flush())
        self._directory.finish(_log(event))
        self._directory.finish(names.debug_file(event.host, _rank(event)))

    def _note_begin(self, name: str, host: str, rank: int | None, is_debug: bool = False) -> None:
        """Records where a start begins in a log, if earlier starts wrote to it."""
        offset = self._directory.size(name)
        if offset and is_debug:
            self.event("debug log begins", host, rank, bytes=offset)
        elif offset:
            self.event("log begins", host, rank, bytes=offset)

    def _append_log(self, event: Event, data: bytes, stream: str = "") -> None:
        self._written_bytes[event.where] += len(data)
        self._append(_log(event), data, stream)

    def _append(self, name: str, data: bytes, stream: str = "") -> None:
        """Appends output to a log; a line says once that the disk has no room for more."""
        if not self._directory.append_output(name, data, stream):
            self._note_full_disk()

    def _note_full_disk(self) -> None:
        if not self._has_dropped:
            self._has_dropped = True
            largest = "".join(
                f". The most output is that of {where}: {format_size(size)}"
                for where, size in self._written_bytes.most_common(1)
            )
            self._screen.note(
                "paceline: logs and metrics are not continued for now: the disk of"
                f" {short(self._directory.path)} is nearly full{largest}. Make room, and they"
                " continue"
            )

    def _filter_output(self, event: Event) -> bytes:
        """Returns a rank's output without library lines, which go to a file of their own."""
        key = (event.host, _rank(event), event["stream"])
        output, library_lines = self._filters.setdefault(key, LibraryFilter()).feed(event.blob)
        if library_lines:
            name = names.debug_file(event.host, _rank(event))
            self._append(name, library_lines, event["stream"])
        return output

    def _start_metrics(self, *, resumed: bool) -> None:
        """Starts the metrics of a training; unless it resumes, the earlier file is set aside."""
        if resumed:
            self._step_filter.resume(self._directory.path / names.METRICS)
        elif self._step_filter.is_empty:
            self._directory.set_aside(names.METRICS)

    def agent_log(self, host: str, text: str, is_attempt_over: bool = False) -> None:
        """Writes the output of a host's ssh and agent beside the ranks' logs.

        Args:
            is_attempt_over: Whether what follows belongs to the next attempt.
        """
        name = names.log_file(host, "agent")
        with contextlib.suppress(NodeError):
            if text.strip():
                if name not in self._agent_logs:
                    self._note_begin(name, host, None)
                self._agent_logs.add(name)
                self._append(name, text.encode())
            if is_attempt_over and name in self._agent_logs:
                self._directory.finish(name)
                self._note_begin(name, host, None)


def _source(event: Event) -> tuple[str, int | None]:
    """The rank, or the agent of its host, that sent an event."""
    kind = KINDS.get(event.kind)
    is_report = kind is None or kind.sender == "rank"
    return event.host, event.rank if is_report else None


def _rank(event: Event) -> int:
    return -1 if event.rank is None else event.rank


def _log(event: Event) -> str:
    return names.log_file(event.host, _rank(event))
