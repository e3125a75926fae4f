"""The timeline of a run: what each rank did when, and the moments that matter. Pure.

Events tell what a rank did. How its steps divided meanwhile comes from the ``pace`` records in
metrics.jsonl, each of which covers the time since the record before it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from paceline.report.record import Record
from paceline.rundir.records import as_float, as_int, as_text, objects_in
from paceline.spec.events import PARTS, Event
from paceline.spec.failure import Failure, format_location
from paceline.spec.formatting import format_duration

MAX_ROWS = 64  # ranks drawn
MAX_BOXES = 8000  # parts of steps drawn, over all rows
MAX_CELLS = 120  # intervals of a row for which its steps are divided, about
MAX_SPANS = 400  # of a row
MAX_MOMENTS = 40
MAX_MARKS = 200  # checkpoints, and other marks, of a row
MAX_SLOWDOWNS = 100  # of a row

Activity = Literal["starting", "running", "training", "evaluating", "regrouping", "frozen", "gone"]
ACTIVITY_LABELS: dict[Activity, str] = {
    "starting": "starting: connecting, importing, joining",
    "running": "running",
    "training": "training; it is not known how the steps divide",
    "evaluating": "evaluating",
    "regrouping": "waiting for a new group",
    "frozen": "frozen: stopped, or blocked by its disk",
    "gone": "not there: lost, ended, or not back yet",
}
_STEPPING = ("training", "running", "evaluating")
_SLOWDOWN_ENDS = ("straggler", "straggler over", "ended", "regroup")
Severity = Literal["bad", "good", "slow", "note"]


@dataclass(frozen=True, slots=True)
class Span:
    """A period in which a rank did one thing, in seconds since the run began."""

    start: float
    end: float
    activity: Activity


@dataclass(frozen=True, slots=True)
class Cell:
    """How the steps of a rank divided in a period: shares of the time, by :data:`PARTS`."""

    start: float
    end: float
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """An event of a rank at a moment: ``checkpoint``, ``lost``, ``back`` or ``failed``."""

    at: float
    kind: str


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A period in which a rank slowed the others down, with the event's text."""

    start: float
    end: float
    text: str


@dataclass(frozen=True, slots=True)
class Row:
    rank: int
    label: str
    spans: tuple[Span, ...] = ()
    cells: tuple[Cell, ...] = ()
    marks: tuple[Mark, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()

    @property
    def was_lost(self) -> bool:
        return any(mark.kind in ("lost", "failed") for mark in self.marks)

    @property
    def has_returned(self) -> bool:
        return any(mark.kind == "back" for mark in self.marks)


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that is described in a sentence, and numbered in the figure."""

    at: float
    text: str
    severity: Severity


@dataclass(frozen=True, slots=True)
class Timeline:
    """All ranks over the duration of a run.

    Attributes:
        rows: In rank order, at most :data:`MAX_ROWS`.
        moments: In the order of time, at most :data:`MAX_MOMENTS`.
        hidden_ranks, hidden_moments: How many are beyond these limits.
        started_at: Seconds since 1970.
    """

    duration_s: float = 0.0
    rows: tuple[Row, ...] = ()
    moments: tuple[Moment, ...] = ()
    hidden_ranks: int = 0
    hidden_moments: int = 0
    started_at: float = 0.0


def build_timeline(record: Record, metrics: Sequence[Mapping[str, Any]],
                   now: float = 0.0) -> Timeline:  # fmt: skip
    """Builds the timeline of a run.

    Args:
        metrics: The records of metrics.jsonl, with times.
        now: Seconds since 1970 if the run has not ended, else 0.
    """
    events = [event for event in record.events if event.time > 0]
    if not events:
        return Timeline()
    end = max(events[-1].time, now)
    reported_s = record.duration_s
    started_at = min(events[0].time, end - reported_s if 0 < reported_s < 30 * 86400 else end)
    duration_s = max(end - started_at, 1e-3)
    builder = _Builder(started_at, duration_s, record.plan)
    failure, interrupted = record.result.failure, record.result.interrupted is not None
    consequences = _consequences(events, failure, interrupted)
    for index, event in enumerate(events):
        builder.add(event, index in consequences)
    builder.finish()
    rows = _make_rows(builder, metrics)
    moments = sorted(_moments(events, started_at, failure), key=lambda moment: moment.at)
    visible_rows, visible_moments = _select_rows(rows), _select_moments(moments)
    return Timeline(duration_s, tuple(_limit_rows(visible_rows)), tuple(visible_moments),
                    len(rows) - len(visible_rows), len(moments) - len(visible_moments),
                    started_at)  # fmt: skip


# -- which ends of ranks were losses -------------------------------------------------------


def _consequences(events: Sequence[Event], failure: Failure | None, interrupted: bool) -> set[int]:
    """Indices of exits that were no losses, because their attempt was stopped or had failed."""
    starts = [index for index, event in enumerate(events) if event.kind == "started"]
    indices = set[int]()
    for start, end in itertools.pairwise([-1, *starts, len(events)]):
        is_final = end == len(events)
        cause = (_failure_index(events, failure) if is_final
                 else _cause_of_restart(events, start, end))  # fmt: skip
        if cause is not None or (is_final and interrupted):
            indices |= _consequent_exits(events, start, end, cause)
    return indices


def _final_regroup(events: Sequence[Event], start: int, end: int) -> int:
    """Index in an attempt after which the job survived no loss."""
    indices = (index for index in range(start + 1, end) if events[index].kind == "regroup")
    return max(indices, default=start)


def _cause_of_restart(events: Sequence[Event], start: int, end: int) -> int | None:
    """Index of what ended an attempt before the last: a lost host, else the first failure."""
    tail = range(_final_regroup(events, start, end) + 1, end)
    lost = [index for index in tail if events[index].kind == "lost"]
    return min(lost or [index for index in tail if _is_abnormal_end(events[index])], default=None)


def _consequent_exits(events: Sequence[Event], start: int, end: int, cause: int | None) -> set[int]:
    """Indices of the bad ends in an attempt that followed from its cause or from a signal."""
    indices, restarted, earliest = set[int](), set[int | None](), -math.inf
    if cause is not None:
        if events[cause].kind == "lost":  # other ranks may have noticed before the launcher did
            start = _final_regroup(events, start, cause)
        else:
            earliest = events[cause].time - 0.5
    for index in range(end - 1, start, -1):
        event = events[index]
        if event.kind == "rank started":
            restarted.add(event.rank)
        is_cause = cause is not None and event.where in (events[cause].where, events[cause].host)
        if (_is_abnormal_end(event) and not is_cause and event.rank not in restarted
                and event.time >= earliest):  # fmt: skip
            indices.add(index)
    return indices


def _is_abnormal_end(event: Event) -> bool:
    return event.kind == "exception" or (event.kind == "rank ended" and event["code"] != 0)


def _is_failure(event: Event, failure: Failure) -> bool:
    if event.host != failure.host:
        return False
    if failure.rank is None:
        return event.kind == "lost"
    return event.rank == failure.rank and _is_abnormal_end(event)


def _failure_index(events: Sequence[Event], failure: Failure | None) -> int | None:
    """Index of the event of the first failure: the first after its rank's last start."""
    if failure is None:
        return None
    failure_index = None
    for index in range(len(events) - 1, -1, -1):
        event = events[index]
        if _is_failure(event, failure):
            failure_index = index
        is_rank_start = event.kind == "rank started" and event.rank == failure.rank
        if failure_index is not None and (is_rank_start or event.kind == "started"):
            break
    return failure_index


# -- rows ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Track:
    """The timeline of one rank while events are added in the order of time."""

    label: str
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    slowdowns: list[Slowdown] = field(default_factory=list)
    activity: Activity | None = None
    activity_start: float = 0.0
    slowdown_text: str = ""  # not empty while it slows the others down
    slowdown_start: float = 0.0
    has_ended: bool = False  # normally

    def switch(self, at: float, activity: Activity | None) -> None:
        if activity == self.activity:
            return
        if self.activity is not None and at > self.activity_start:
            self.spans.append(Span(self.activity_start, at, self.activity))
        self.activity, self.activity_start = activity, at

    def end_slowdown(self, at: float) -> None:
        if self.slowdown_text:
            self.slowdowns.append(Slowdown(self.slowdown_start, at, self.slowdown_text))
            self.slowdown_text = ""

    def end(self, at: float) -> None:
        self.has_ended = True
        self.switch(at, None)

    def fail(self, at: float, kind: str) -> None:
        if self.has_ended or self.activity == "gone":
            return
        self.mark_failure(at, kind)
        self.end_slowdown(at)
        self.switch(at, "gone")

    def mark_failure(self, at: float, kind: str) -> None:
        if not any(mark.kind == "failed" for mark in self.marks[-1:]):
            self.marks.append(Mark(at, kind))


class _Builder:
    def __init__(self, started_at: float, duration_s: float, plan: Mapping[str, Any]) -> None:
        self.started_at, self.duration_s = started_at, duration_s
        self.tracks: dict[int, _Track] = {}
        self._hosts: dict[int, str] = {}
        self._planned: set[int] = set()  # known from the plan alone, which is the last start's
        self._groups: list[tuple[float, tuple[int, ...]]] = []  # start, and members by group rank
        for node in objects_in(plan.get("nodes")):
            for planned in objects_in(node.get("ranks")):
                if (rank := as_int(planned.get("rank"))) is not None:
                    self._track(rank, as_text(node.get("host"), 255)).switch(0.0, "starting")
        self._world = tuple(sorted(self.tracks))
        self._planned = set(self.tracks)

    def _track(self, rank: int, host: str) -> _Track:
        label = format_location(host, rank)
        track = self.tracks.setdefault(rank, _Track(label))
        if host and self._hosts.get(rank, host) != host:
            track.label = label if rank in self._planned else f"{track.label}, then {host}"
        if host:
            self._hosts[rank] = host
            self._planned.discard(rank)
        return track

    def add(self, event: Event, is_consequence: bool) -> None:
        """Adds an event; ``is_consequence`` if it is an exit that was no loss."""
        at, kind = event.time - self.started_at, event.kind
        if kind == "started":
            self._restart(at, event["world_size"] or len(self.tracks))
        elif kind == "regroup":
            self._groups.append((at, tuple(event["members"] or ())))
        elif kind == "lost":
            for rank, track in self.tracks.items():
                if self._hosts.get(rank) == event.host:
                    track.fail(at, "lost")
        elif kind in ("straggler", "straggler over"):
            self._add_straggler(event, at)
        elif kind == "ended":
            for track in self.tracks.values():
                track.end_slowdown(at)
        elif event.rank is not None:
            track = self._track(event.rank, event.host)
            if is_consequence:
                track.end_slowdown(at)
                track.end(at)
            else:
                _add_rank_event(track, event, at)

    def _restart(self, at: float, world_size: int) -> None:
        self._groups.append((at, ()))
        for rank, track in self.tracks.items():
            track.end_slowdown(at)
            if rank < world_size:
                track.has_ended = False
                track.switch(at, "starting")
            elif track.activity != "gone":  # an attempt with fewer ranks
                track.switch(at, None)

    def _add_straggler(self, event: Event, at: float) -> None:
        rank, group = event["straggler"], self.group_at(at)
        if rank is not None and rank < len(group):
            rank = group[rank]  # the event has its rank in the group
        for key, track in self.tracks.items():
            if event.kind == "straggler over" or key != rank:
                track.end_slowdown(at)
        if event.kind == "straggler" and rank is not None:
            track = self._track(rank, event["its_host"] or "")
            track.end_slowdown(at)
            track.slowdown_text = event["text"] or "it slows the others down"
            track.slowdown_start = at

    def finish(self) -> None:
        for track in self.tracks.values():
            track.end_slowdown(self.duration_s)
            track.switch(self.duration_s, None)

    def group_start(self, at: float) -> float:
        """When the group of that time was formed, in seconds since the run began."""
        return max((start for start, _ in self._groups if start <= at), default=0.0)

    def group_at(self, at: float) -> tuple[int, ...]:
        groups = [members for start, members in self._groups if start <= at]
        return (groups[-1] if groups else ()) or self._world or tuple(sorted(self.tracks))


def _add_rank_event(track: _Track, event: Event, at: float) -> None:
    match event.kind:
        case "rank started":
            was_lost = any(mark.kind in ("lost", "failed") for mark in track.marks)
            if was_lost or track.activity == "gone":
                track.marks.append(Mark(at, "back"))
            track.has_ended = False
            track.switch(at, "starting")
        case "rank ended" if event["code"] == 0:
            track.end(at)
        case "rank ended":
            track.fail(at, "failed")
        case "prepared" | "regrouped" | "resumed":
            track.switch(at, "training")
        case "rank thawed" if track.activity == "frozen":
            track.switch(at, "training")
        case "world joined" | "joined" if track.activity == "starting":
            track.switch(at, "running")
        case "interrupted" if track.activity in ("training", "running"):
            track.switch(at, "regrouping")
        case "rank frozen":
            track.switch(at, "frozen")
        case "checkpoint":
            track.marks.append(Mark(at, "checkpoint"))
        case "exception":
            track.mark_failure(at, "failed")


def _make_rows(builder: _Builder, metrics: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Makes the rows, with evaluations and the division of steps.

    A pace record covers the steps since the one before, which may be several epochs back. An
    evaluation starts when the steps before it were recorded.
    """
    cells: dict[int, list[Cell]] = {rank: [] for rank in builder.tracks}
    evaluations, previous, last_pace, has_trained = list[tuple[float, float]](), 0.0, 0.0, False
    for record in metrics:
        at = as_float(record.get("time")) - builder.started_at
        if not 0 < at <= builder.duration_s + 1:
            continue
        split = record.get("split")
        if split == "pace":
            start = max(last_pace, builder.group_start(at))
            if at > start:
                for rank, shares in _step_shares(record, builder.group_at(at)):
                    if rank in cells:
                        cells[rank].append(Cell(start, at, shares))
            last_pace = at
        elif split == "train":
            has_trained = True
        elif has_trained:
            evaluations.append((previous, at))
        previous = at
    rows = []
    for rank, track in sorted(builder.tracks.items()):
        spans = _insert_evaluations(track.spans, evaluations)
        clipped = [part for cell in cells[rank] for part in _clip_to_training(cell, spans)]
        rows.append(Row(rank, track.label, tuple(spans), tuple(clipped), tuple(track.marks),
                        tuple(track.slowdowns)))  # fmt: skip
    return rows


def _step_shares(record: Mapping[str, Any],
                 group: Sequence[int]) -> Iterator[tuple[int, tuple[float, ...]]]:  # fmt: skip
    """Yields each rank with the shares of its steps, from a pace record."""
    rows = record.get("ranks_s")
    if not isinstance(rows, list) or not rows:
        rows = [[record.get(f"{name}_s") for name in PARTS]]
    for rank, row in zip(group, rows, strict=False):
        if isinstance(row, list):
            seconds = [max(0.0, as_float(part)) for part in row[: len(PARTS)]]
            total = sum(seconds)
            if total > 0 and len(seconds) == len(PARTS):
                yield rank, tuple(round(part / total, 4) for part in seconds)


def _insert_evaluations(spans: Sequence[Span],
                        evaluations: Sequence[tuple[float, float]]) -> list[Span]:  # fmt: skip
    starts = [start for start, _ in evaluations]
    split = list[Span]()
    for span in spans:
        if span.activity != "training":
            split.append(span)
            continue
        at = span.start
        for start, end in evaluations[max(0, bisect.bisect_left(starts, span.start) - 1) :]:
            if start >= span.end:
                break
            start, end = max(start, at), min(end, span.end)
            if end > start:
                split += [Span(at, start, "training")] * (start > at)
                split.append(Span(start, end, "evaluating"))
                at = end
        split += [Span(at, span.end, "training")] * (span.end > at)
    return split


def _clip_to_training(cell: Cell, spans: Sequence[Span]) -> Iterator[Cell]:
    """Yields the parts of a cell in which its rank trained."""
    first = bisect.bisect_right(spans, cell.start, key=lambda span: span.start) - 1
    for span in spans[max(0, first) :]:
        if span.start >= cell.end:
            break
        start, end = max(cell.start, span.start), min(cell.end, span.end)
        if span.activity in ("training", "running") and end > start:
            yield replace(cell, start=start, end=end)


# -- moments -------------------------------------------------------------------------------


def _moments(events: Sequence[Event], started_at: float,
             failure: Failure | None) -> Iterator[Moment]:  # fmt: skip
    failure_index, lost_at = _failure_index(events, failure), -math.inf
    recoveries = [event for event in events if event.kind == "recovery"]
    ends = [event.time for event in events if event.kind in _SLOWDOWN_ENDS]
    for index, event in enumerate(events):
        at = event.time - started_at
        if event.kind == "lost":
            lost_at = at
        if failure is not None and index == failure_index:
            yield Moment(at, failure.describe(), "bad")
        elif event.kind == "lost":
            if not _was_survived(event, recoveries):
                yield Moment(at, f"lost {event.host}: {event['why']}", "bad")
        elif event.kind == "recovery":
            yield _recovery_moment(event, at, lost_at)
        elif event.kind == "straggler":
            end = next((end for end in ends if end > event.time), None)
            duration = "" if end is None else f", for {format_duration(end - event.time)}"
            text = str(event["text"] or "a rank slows the others down")
            yield Moment(at, text + duration, "slow")
        elif (described := _describe(event)) is not None:
            yield Moment(at, *described)
    if failure is not None and failure_index is None:
        at = events[-1].time - started_at
        yield Moment(at, failure.describe(), "bad")


def _was_survived(lost: Event, recoveries: Sequence[Event]) -> bool:
    """Whether a recovery event describes the loss, too."""
    return any(0 <= recovery.time - lost.time < 60 and lost.host in str(recovery["text"])
               for recovery in recoveries)  # fmt: skip


def _recovery_moment(event: Event, at: float, lost_at: float) -> Moment:
    """A rank that is back, at that time; else the loss, at the time of its row's mark."""
    text = str(event["text"] or "")
    if " is back" in text or "joined" in text:
        return Moment(at, text, "good")
    estimated = max(0.0, at - as_float(event["seconds"]))
    return Moment(lost_at if estimated - 60 < lost_at <= at else estimated, text, "bad")


def _describe(event: Event) -> tuple[str, Severity] | None:
    """Text and severity of an event that needs no other event to be described."""
    match event.kind:
        case "started" if event["attempt"]:
            return f"all ranks were started again (attempt {event['attempt'] + 1})", "good"
        case "replicas differ":
            return str(event["text"] or event.kind), "bad"
        case "newcomer late" | "hang":
            return str(event["text"] or event.kind), "slow"
        case "newcomer lost":
            return f"{event.where} was lost before it had joined: {event['why']}", "bad"
        case "hang over":
            duration = format_duration(as_float(event["seconds"]))
            return str(event["text"] or f"it continues after {duration}"), "good"
        case "rank frozen":
            return f"{event.where} does not move: {event['how']} {event['on'] or ''}", "bad"
        case "rank thawed":
            return f"{event.where} moves again", "good"
        case "connection restored":
            return f"the connection to {event.host} was restored", "good"
        case "warning" | "slow rank" | "checkpoint skipped":
            return f"{event.where}: {event['warning']}", "note"
        case "checkpoint failed" | "checkpoint copy failed":
            reason = event["problem"] or event["warning"] or ""
            return f"{event.where}: {event.kind}: {reason}", "bad"
        case "shares" if event["step"]:
            return f"the global batch is divided again: {event['why'] or ''}", "note"
        case "scheduler":
            return str(event["words"]), "note"
        case "stopped early":
            return f"stopped early at step {event['step']}: {event['why']}", "note"
        case "resumed" | "stopped" if event.rank == 0:
            reason = event["source"] if event.kind == "resumed" else event["why"]
            return f"{event.kind} at step {event['step']}" + f": {reason}" * bool(reason), "note"
    return None


def _select_moments(moments: Sequence[Moment]) -> list[Moment]:
    """Drops moments repeated within a second, and all but the gravest if there are too many."""
    unique = list[Moment]()
    for moment in moments:
        if not any(moment.text == previous.text and moment.at - previous.at < 1.0
                   for previous in unique[-4:]):  # fmt: skip
            unique.append(moment)
    order = ("bad", "slow", "good", "note")
    gravest = sorted(unique, key=lambda moment: order.index(moment.severity))[:MAX_MOMENTS]
    return sorted(gravest, key=lambda moment: moment.at)


# -- limits of what is drawn ---------------------------------------------------------------


def _select_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows to draw: of many ranks those with losses, slowdowns and least waiting."""
    if len(rows) <= MAX_ROWS:
        return list(rows)

    def order(row: Row) -> tuple[bool, bool, float]:
        waiting = sum(cell.shares[PARTS.index("waiting")] for cell in row.cells)
        has_loss = row.was_lost or row.has_returned
        return (not has_loss, not row.slowdowns, waiting / max(1, len(row.cells)))

    return sorted(sorted(rows, key=order)[:MAX_ROWS], key=lambda row: row.rank)


def _limit_rows(rows: Sequence[Row]) -> Iterator[Row]:
    max_cells = max(12, min(MAX_CELLS, MAX_BOXES // (max(1, len(rows)) * len(PARTS))))
    for row in rows:
        yield replace(row, cells=tuple(merge_cells(row.cells, max_cells, row.spans)),
                      spans=_merge_spans(row.spans), marks=_thin_marks(row.marks),
                      slowdowns=row.slowdowns[:MAX_SLOWDOWNS])  # fmt: skip


def _merge_spans(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Merges spans of training and evaluating that are too short to be seen."""
    if len(spans) <= MAX_SPANS:
        return tuple(spans)
    min_length, merged = (spans[-1].end - spans[0].start) / MAX_SPANS, list[Span]()
    for span in spans:
        previous = merged[-1] if merged else span
        can_merge = merged and span.activity in _STEPPING and previous.activity in _STEPPING
        if can_merge and min(span.end - span.start, previous.end - previous.start) < min_length:
            dominant = max(previous, span, key=lambda span: span.end - span.start)
            merged[-1] = Span(previous.start, span.end, dominant.activity)
        else:
            merged.append(span)
    return tuple(merged[: 2 * MAX_SPANS])


def merge_cells(cells: Sequence[Cell], max_cells: int, spans: Sequence[Span] = ()) -> list[Cell]:
    """Merges neighbouring cells to about ``max_cells``, weighted by their length.

    Evaluations between them are then too short to be seen. Losses, and whatever else the rank did,
    are not covered.
    """
    if len(cells) <= max_cells:
        return list(cells)
    max_group = math.ceil(len(cells) / max_cells)
    max_gap = (cells[-1].end - cells[0].start) / max_cells
    gaps = [span for span in spans if span.activity not in _STEPPING]
    gap_ends = [span.end for span in gaps]
    groups = list[list[Cell]]()
    for cell in cells:
        previous = groups[-1][-1].end if groups else -math.inf
        index = bisect.bisect_right(gap_ends, previous)
        has_gap = index < len(gaps) and gaps[index].start < cell.start
        if not has_gap and cell.start - previous <= max_gap and len(groups[-1]) < max_group:
            groups[-1].append(cell)
        else:
            groups.append([cell])
    return [_mean_cell(group) for group in groups]


def _mean_cell(cells: Sequence[Cell]) -> Cell:
    total = sum(cell.end - cell.start for cell in cells)
    shares = (
        round(sum(cell.shares[part] * (cell.end - cell.start) for cell in cells) / total, 4)
        for part in range(len(PARTS))
    )
    return Cell(cells[0].start, cells[-1].end, tuple(shares))


def _thin_marks(marks: Sequence[Mark]) -> tuple[Mark, ...]:
    """Drops evenly spaced checkpoints if there are too many; other marks stay."""
    checkpoints = [mark for mark in marks if mark.kind == "checkpoint"]
    other_marks = [mark for mark in marks if mark.kind != "checkpoint"][:MAX_MARKS]
    stride = max(1, math.ceil(len(checkpoints) / MAX_MARKS))
    return tuple(sorted([*other_marks, *checkpoints[::stride]], key=lambda mark: mark.at))
