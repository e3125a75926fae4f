"""When each rank did what: rows of spans, with the moments that matter. Pure.

What a rank did is told by events; how its steps divided meanwhile, by the records of the pace,
each of which speaks of the time since the record before it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from paceline.rundir.records import number, whole, words
from paceline.spec.events import PARTS, Event
from paceline.spec.failure import place
from paceline.spec.figures import lasting

ROWS = 64  # ranks drawn; of more, those of whom there is most to tell
BOXES = 8000  # parts of steps drawn, over all rows
INTERVALS = 120  # in which a row's steps are divided, about
SPANS = 400  # of a row
MOMENTS = 40  # numbered in the picture

# what a rank does, in the words of the legend
Doing = Literal["starting", "running", "training", "evaluating", "regrouping", "frozen", "gone"]
SAID: dict[Doing, str] = {
    "starting": "starting: connecting, importing, joining",
    "running": "running",
    "training": "training; it is not known how the steps divide",
    "evaluating": "evaluating",
    "regrouping": "waiting for a new group",
    "frozen": "frozen: stopped, or held up by its disk",
    "gone": "not there: lost, ended, or not back yet",
}
_STEPPING = ("training", "running", "evaluating")
Kind = Literal["bad", "good", "slow", "note"]


@dataclass(frozen=True, slots=True)
class Span:
    """A time in which a rank did one thing; times are seconds since the run began."""

    begin: float
    end: float
    doing: Doing


@dataclass(frozen=True, slots=True)
class Cell:
    """How the steps of a rank divided in some time.

    Attributes:
        begin, end: Seconds since the run began.
        parts: Of the time, in the order of :data:`PARTS`.
    """

    begin: float
    end: float
    parts: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """What happened to a rank at a moment: ``checkpoint``, ``lost``, ``back``, ``failed``."""

    at: float
    what: str


@dataclass(frozen=True, slots=True)
class Slow:
    """A time in which a rank held the others up, and the words in which it was told."""

    begin: float
    end: float
    text: str


@dataclass(frozen=True, slots=True)
class Row:
    """A rank."""

    rank: int
    label: str
    spans: tuple[Span, ...] = ()
    cells: tuple[Cell, ...] = ()
    marks: tuple[Mark, ...] = ()
    slow: tuple[Slow, ...] = ()


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that is told in a sentence, and numbered in the picture."""

    at: float
    text: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Timeline:
    """All ranks over the time of a run.

    Attributes:
        seconds: Of the whole run.
        rows: Ranks in order, at most :data:`ROWS`.
        moments: In the order of time, at most :data:`MOMENTS`.
        left_out: Ranks that have no row, and moments that are not told.
        began: Seconds since 1970.
    """

    seconds: float = 0.0
    rows: tuple[Row, ...] = ()
    moments: tuple[Moment, ...] = ()
    left_out: tuple[int, int] = (0, 0)
    began: float = 0.0


def timeline(events: Sequence[Event], records: Sequence[Mapping[str, Any]], plan: Mapping[str, Any],
             took: float = 0.0, failed: tuple[str, int | None, str] | None = None,
             now: float = 0.0, asked: bool = False) -> Timeline:  # fmt: skip
    """Puts a run together.

    Args:
        events: Of the run, in the order of time.
        records: Of metrics.jsonl.
        plan: Of plan.json.
        took: Seconds from the call to the end, where that is known.
        failed: Host, rank and headline of the first failure.
        now: Seconds since 1970, of a run that has not ended; else 0.
        asked: It ended because somebody stopped it.
    """
    timed = [event for event in events if event.time > 0]
    if not timed:
        return Timeline()
    end = max(timed[-1].time, now)
    began = min(timed[0].time, end - took if 0 < took < 30 * 86400 else end)
    seconds = max(end - began, 1e-3)
    scene = _Scene(began, seconds, plan)
    after = _consequences(timed, failed, asked)
    for at, event in enumerate(timed):
        scene.take(event, at in after)
    scene.finish()
    rows = _divided(scene, records)
    moments = sorted(_moments(timed, began, failed), key=lambda one: one.at)
    chosen, told = _chosen(rows), _told(moments)
    left = (len(rows) - len(chosen), len(moments) - len(told))
    return Timeline(seconds, tuple(_bounded(chosen)), tuple(told), left, began)


def _consequences(events: Sequence[Event], failed: tuple[str, int | None, str] | None,
                  asked: bool) -> set[int]:  # fmt: skip
    """Which ends of ranks were no losses: the last of an attempt that was stopped or failed."""
    starts = [at for at, event in enumerate(events) if event.kind == "started"]
    found = set[int]()
    for begin, end in itertools.pairwise([-1, *starts, len(events)]):
        is_last = end == len(events)
        cause = _failure_in(events, failed) if is_last else _cause_of_end(events, begin, end)
        if cause is not None or (is_last and asked):
            found |= _told_to_end(events, begin, end, cause)
    return found


def _settled(events: Sequence[Event], begin: int, end: int) -> int:
    """The place in an attempt after which no loss was outlived."""
    return max((at for at in range(begin + 1, end) if events[at].kind == "regroup"), default=begin)


def _cause_of_end(events: Sequence[Event], begin: int, end: int) -> int | None:
    """What ended an attempt that was followed by another: a lost host, else the first failure."""
    tail = range(_settled(events, begin, end) + 1, end)
    lost = [at for at in tail if events[at].kind == "lost"]
    return min(lost or [at for at in tail if _ended_badly(events[at])], default=None)


def _told_to_end(events: Sequence[Event], begin: int, end: int, cause: int | None) -> set[int]:
    """The bad ends of an attempt that followed from its cause, or from a signal (``None``)."""
    found, going, since = set[int](), set[int | None](), -math.inf
    if cause is not None:
        after_loss = events[cause].kind == "lost"  # which others may have felt before it was known
        begin = _settled(events, begin, cause) if after_loss else begin
        since = -math.inf if after_loss else events[cause].time - 0.5
    for at in range(end - 1, begin, -1):
        event = events[at]
        if event.kind == "rank started":
            going.add(event.rank)
        by_itself = cause is not None and event.where in (events[cause].where, events[cause].host)
        if _ended_badly(event) and not by_itself and event.rank not in going:
            found |= {at} if event.time >= since else set()
    return found


def _ended_badly(event: Event) -> bool:
    return event.kind == "exception" or (event.kind == "rank ended" and event["code"] != 0)


def _failure_in(events: Sequence[Event],
                failed: tuple[str, int | None, str] | None) -> int | None:  # fmt: skip
    """The event that tells of the first failure: the first in the last life of its rank."""
    found = None
    for at in range(len(events) - 1, -1, -1) if failed else ():
        event = events[at]
        if failed and _is_failure(event, failed):
            found = at
        begins = event.kind == "started" or (event.kind == "rank started" and failed
                                             and event.rank == failed[1])  # fmt: skip
        if found is not None and begins:
            break
    return found


@dataclass(slots=True)
class _Track:
    """What becomes known of one rank, in the order of time."""

    label: str
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    slow: list[Slow] = field(default_factory=list)
    doing: Doing | None = None
    since: float = 0.0
    held: str = ""  # it holds the others up, in these words
    held_since: float = 0.0
    ended: bool = False  # in order

    def now(self, at: float, doing: Doing | None) -> None:
        if doing == self.doing:
            return
        if self.doing is not None and at > self.since:
            self.spans.append(Span(self.since, at, self.doing))
        self.doing, self.since = doing, at

    def release(self, at: float) -> None:
        if self.held:
            self.slow.append(Slow(self.held_since, at, self.held))
            self.held = ""


class _Scene:
    """All ranks, as events tell of them."""

    def __init__(self, began: float, seconds: float, plan: Mapping[str, Any]) -> None:
        self.began, self.seconds = began, seconds
        self.tracks: dict[int, _Track] = {}
        self.hosts: dict[int, str] = {}
        self._planned: set[int] = set()  # known from the plan alone, which is the last start's
        # who was in the group from when on: the order of a record's ranks
        self.members: list[tuple[float, tuple[int, ...]]] = []
        nodes = plan.get("nodes")
        for node in nodes if isinstance(nodes, list) else []:
            ranks = node.get("ranks") if isinstance(node, dict) else None
            for one in ranks if isinstance(ranks, list) else []:
                rank = whole(one.get("rank")) if isinstance(one, dict) else None
                if rank is not None:
                    self._track(rank, words(node.get("host"), 255)).now(0.0, "starting")
        self.world = tuple(sorted(self.tracks))
        self._planned = set(self.tracks)

    def _track(self, rank: int, host: str) -> _Track:
        track = self.tracks.setdefault(rank, _Track(place(host, rank)))
        if host and self.hosts.get(rank, host) != host:
            planned = rank in self._planned
            track.label = place(host, rank) if planned else f"{track.label}, then {host}"
        if host:
            self.hosts[rank] = host
            self._planned.discard(rank)
        return track

    def _on(self, host: str) -> list[_Track]:
        return [track for rank, track in self.tracks.items() if self.hosts.get(rank) == host]

    def take(self, event: Event, ordered: bool) -> None:
        """An event; ``ordered`` for the end of a rank that was told to end."""
        at, kind = event.time - self.began, event.kind
        if kind == "started":
            self.members.append((at, ()))
            size = event["world_size"] or len(self.tracks)
            for rank, track in self.tracks.items():
                track.release(at)
                if rank < size:
                    track.ended = False
                    track.now(at, "starting")
                elif track.doing != "gone":  # an attempt with fewer ranks
                    track.now(at, None)
        elif kind == "regroup":
            members = event["members"] or ()
            self.members.append((at, tuple(members)))
        elif kind == "lost":
            for track in self._on(event.host):
                self._down(track, at, "lost")
        elif kind in ("straggler", "straggler over"):
            self._straggler(event, at)
        elif kind == "ended":
            for track in self.tracks.values():
                track.release(at)
        elif ordered and event.rank is not None:
            track = self._track(event.rank, event.host)
            track.ended = True
            track.release(at)
            track.now(at, None)
        elif event.rank is not None:
            self._of_rank(self._track(event.rank, event.host), event, at)

    def _of_rank(self, track: _Track, event: Event, at: float) -> None:
        kind = event.kind
        if kind == "rank started":
            if track.doing == "gone" or any(one.what in ("lost", "failed") for one in track.marks):
                track.marks.append(Mark(at, "back"))
            track.ended = False
            track.now(at, "starting")
        elif kind == "rank ended":
            if event["code"] == 0:
                track.ended = True
                track.now(at, None)
            else:
                self._down(track, at, "failed")
        elif kind in ("prepared", "regrouped", "resumed", "rank thawed"):
            if kind == "rank thawed" and track.doing != "frozen":
                return
            track.now(at, "training")
        elif kind in ("world joined", "joined") and track.doing == "starting":
            track.now(at, "running")
        elif kind == "interrupted" and track.doing in ("training", "running"):
            track.now(at, "regrouping")
        elif kind == "rank frozen":
            track.now(at, "frozen")
        elif kind == "checkpoint":
            track.marks.append(Mark(at, "checkpoint"))
        elif kind == "exception" and not any(one.what == "failed" for one in track.marks[-1:]):
            track.marks.append(Mark(at, "failed"))

    def _down(self, track: _Track, at: float, what: str) -> None:
        if track.ended or track.doing == "gone":
            return
        if not any(mark.what == "failed" for mark in track.marks[-1:]):
            track.marks.append(Mark(at, what))
        track.release(at)
        track.now(at, "gone")

    def _straggler(self, event: Event, at: float) -> None:
        who, group = event["straggler"], self.group_at(at)
        if who is not None and who < len(group):
            who = group[who]  # told by its number in the group, which has changed after a loss
        for rank, track in self.tracks.items():
            if event.kind == "straggler over" or rank != who:
                track.release(at)
        if event.kind == "straggler" and who is not None:
            track = self._track(who, event["its_host"] or "")
            track.release(at)
            track.held, track.held_since = event["text"] or "it slows the others down", at

    def finish(self) -> None:
        for track in self.tracks.values():
            track.release(self.seconds)
            track.now(self.seconds, None)

    def group_since(self, at: float) -> float:
        """When the group of that time was formed, in seconds since the run began."""
        return max((since for since, _ in self.members if since <= at), default=0.0)

    def group_at(self, at: float) -> tuple[int, ...]:
        """The members of the group at that time, in the order of their ranks in it."""
        known = [members for since, members in self.members if since <= at]
        return (known[-1] if known else ()) or self.world or tuple(sorted(self.tracks))


def _divided(scene: _Scene, records: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The rows, with how the steps of each divided, and evaluations.

    A record of the pace speaks of the steps since the one before it, which may be several epochs
    back; an evaluation begins where the steps before it were recorded.
    """
    cells: dict[int, list[Cell]] = {rank: [] for rank in scene.tracks}
    evaluations, before, paced, trained = list[tuple[float, float]](), 0.0, 0.0, False
    for record in records:
        at = number(record.get("time")) - scene.began
        if not 0 < at <= scene.seconds + 1:
            continue
        split = record.get("split")
        if split == "pace":
            since = max(paced, scene.group_since(at))
            if at > since:
                for rank, parts in _parts_of(record, scene.group_at(at)):
                    if rank in cells:
                        cells[rank].append(Cell(since, at, parts))
            paced = at
        elif split == "train":
            trained = True
        elif trained:
            evaluations.append((before, at))
        before = at
    rows = []
    for rank, track in sorted(scene.tracks.items()):
        spans = _with(track.spans, evaluations)
        inside = [part for cell in cells[rank] for part in _within(cell, spans)]
        rows.append(Row(rank, track.label, tuple(spans), tuple(inside), tuple(track.marks),
                        tuple(track.slow)))  # fmt: skip
    return rows


def _parts_of(record: Mapping[str, Any],
              group: Sequence[int]) -> Iterable[tuple[int, tuple[float, ...]]]:  # fmt: skip
    """Rank and parts of its steps, of a record of the pace."""
    every = record.get("ranks_s")
    if not isinstance(every, list) or not every:
        every = [[record.get(f"{name}_s") for name in PARTS]]
    for rank, row in zip(group, every, strict=False):
        if isinstance(row, list):
            seconds = [max(0.0, number(one)) for one in row[: len(PARTS)]]
            total = sum(seconds)
            if total > 0 and len(seconds) == len(PARTS):
                yield rank, tuple(round(one / total, 4) for one in seconds)


def _with(spans: Sequence[Span], evaluations: Sequence[tuple[float, float]]) -> list[Span]:
    """The spans, with evaluations inside those of training."""
    begins = [begin for begin, _ in evaluations]
    found = list[Span]()
    for span in spans:
        if span.doing != "training":
            found.append(span)
            continue
        at = span.begin
        for begin, end in evaluations[max(0, bisect.bisect_left(begins, span.begin) - 1) :]:
            if begin >= span.end:
                break
            begin, end = max(begin, at), min(end, span.end)
            if end > begin:
                found += [Span(at, begin, "training")] * (begin > at)
                found.append(Span(begin, end, "evaluating"))
                at = end
        found += [Span(at, span.end, "training")] * (span.end > at)
    return found


def _within(cell: Cell, spans: Sequence[Span]) -> Iterator[Cell]:
    """The parts of a cell in which its rank trained."""
    for span in spans[max(0, bisect.bisect_right(spans, cell.begin, key=_begin) - 1) :]:
        if span.begin >= cell.end:
            break
        begin, end = max(cell.begin, span.begin), min(cell.end, span.end)
        if span.doing in ("training", "running") and end > begin:
            yield replace(cell, begin=begin, end=end)


def _begin(span: Span) -> float:
    return span.begin


# -- what is told in words -----------------------------------------------------------------


def _moments(events: Sequence[Event], began: float,
             failed: tuple[str, int | None, str] | None) -> Iterable[Moment]:  # fmt: skip
    lost_at, failure = -math.inf, _failure_in(events, failed)
    told = [(event.time, str(event["text"])) for event in events if event.kind == "recovery"]
    over = [event for event in events if event.kind in _SLOW_ENDS]
    for index, event in enumerate(events):
        at = event.time - began
        if failed and index == failure:
            yield Moment(at, f"{place(failed[0], failed[1])}: {failed[2]}", "bad")
        if event.kind == "lost":
            lost_at = at
            outlived = any(0 <= when - event.time < 60 and event.host in text
                           for when, text in told)  # fmt: skip
            if not outlived and index != failure:
                yield Moment(at, f"lost {event.host}: {event['why']}", "bad")
        elif event.kind == "started" and event["attempt"]:
            yield Moment(
                at, f"all ranks were started again (attempt {event['attempt'] + 1})", "good"
            )
        elif event.kind == "recovery":
            text = str(event["text"] or "")
            back = " is back" in text or "joined" in text
            at_loss = max(0.0, at - number(event["seconds"]))
            at_loss = lost_at if at_loss - 60 < lost_at <= at else at_loss  # as in its row
            yield Moment(at if back else at_loss, text, "good" if back else "bad")
        elif event.kind == "newcomer late":
            yield Moment(at, str(event["text"] or event.kind), "slow")
        elif event.kind == "newcomer lost":
            yield Moment(at, f"{event.where} was lost before it had joined: {event['why']}", "bad")
        elif event.kind == "straggler":
            ends = next((one.time for one in over if one.time > event.time), None)
            long = "" if ends is None else f", for {lasting(ends - event.time)}"
            yield Moment(at, str(event["text"] or "a rank slows the others down") + long, "slow")
        elif event.kind == "hang":
            yield Moment(at, str(event["text"] or event.kind), "slow")
        elif event.kind == "hang over":
            text = event["text"] or f"it goes on after {lasting(number(event['seconds']))}"
            yield Moment(at, str(text), "good")
        elif event.kind == "rank frozen":
            yield Moment(
                at, f"{event.where} does not move: {event['how']} {event['on'] or ''}", "bad"
            )
        elif event.kind == "rank thawed":
            yield Moment(at, f"{event.where} moves again", "good")
        elif event.kind == "connection restored":
            yield Moment(at, f"the connection to {event.host} was dialled again", "good")
        elif event.kind in ("warning", "slow rank", "checkpoint skipped"):
            yield Moment(at, f"{event.where}: {event['warning']}", "note")
        elif event.kind in ("checkpoint failed", "checkpoint copy failed"):
            why = event["problem"] or event["warning"] or ""
            yield Moment(at, f"{event.where}: {event.kind}: {why}", "bad")
        elif event.kind == "shares" and event["step"]:
            yield Moment(at, f"the global batch is divided anew: {event['why'] or ''}", "note")
        elif event.kind == "scheduler":
            yield Moment(at, str(event["words"]), "note")
        elif event.kind == "stopped early":
            yield Moment(at, f"stopped early at step {event['step']}: {event['why']}", "note")
        elif event.kind in ("resumed", "stopped") and event.rank == 0:
            more = event["source"] if event.kind == "resumed" else event["why"]
            yield Moment(
                at, f"{event.kind} at step {event['step']}" + f": {more}" * bool(more), "note"
            )
    if failed and failure is None:
        yield Moment(events[-1].time - began, f"{place(failed[0], failed[1])}: {failed[2]}", "bad")


_SLOW_ENDS = ("straggler", "straggler over", "ended", "regroup")


def _is_failure(event: Event, failed: tuple[str, int | None, str]) -> bool:
    host, rank, _ = failed
    if event.host != host:
        return False
    if rank is None:
        return event.kind == "lost"
    return event.rank == rank and (
        event.kind == "exception" or (event.kind == "rank ended" and event["code"] != 0)
    )


def _told(moments: Sequence[Moment]) -> list[Moment]:
    """Those that are told: no two of the same words at once, and of many the gravest."""
    once = list[Moment]()
    for one in moments:
        if not any(one.text == other.text and one.at - other.at < 1.0 for other in once[-4:]):
            once.append(one)
    if len(once) <= MOMENTS:
        return once
    weight = {"bad": 0, "slow": 1, "good": 2, "note": 3}
    gravest = sorted(once, key=lambda one: weight[one.kind])[:MOMENTS]
    return sorted(gravest, key=lambda one: one.at)


# -- bounded -------------------------------------------------------------------------------


def _chosen(rows: Sequence[Row]) -> list[Row]:
    """The rows that are drawn: of many ranks those with most to tell, and then the first."""
    if len(rows) <= ROWS:
        return list(rows)

    def tells(row: Row) -> tuple[bool, bool, float]:
        bad = any(mark.what in ("lost", "failed", "back") for mark in row.marks)
        waits = sum(cell.parts[PARTS.index("waiting")] for cell in row.cells)
        return (not bad, not row.slow, waits / max(1, len(row.cells)))

    return sorted(sorted(rows, key=tells)[:ROWS], key=lambda row: row.rank)


def _bounded(rows: Sequence[Row]) -> list[Row]:
    """The rows with no more cells than can be drawn, and spans and marks likewise."""
    each = max(12, min(INTERVALS, BOXES // (max(1, len(rows)) * len(PARTS))))
    return [replace(row, cells=tuple(merged(row.cells, each, row.spans)), spans=_joined(row.spans),
                    marks=_fewer(row.marks, 200), slow=row.slow[:100])
            for row in rows]  # fmt: skip


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Of very many spans, those of training and evaluating that are too short to be seen join."""
    if len(spans) <= SPANS:
        return tuple(spans)
    least, found = (spans[-1].end - spans[0].begin) / SPANS, list[Span]()
    for span in spans:
        both = span.doing in _STEPPING and found and found[-1].doing in _STEPPING
        if both and min(span.end - span.begin, found[-1].end - found[-1].begin) < least:
            longer = max(found[-1], span, key=lambda one: one.end - one.begin)
            found[-1] = Span(found[-1].begin, span.end, longer.doing)
        else:
            found.append(span)
    return tuple(found[: 2 * SPANS])


def merged(cells: Sequence[Cell], most: int, spans: Sequence[Span] = ()) -> list[Cell]:
    """About so many cells: neighbours become one, by the time that each took.

    Evaluations between them are too short to be seen then; losses, and whatever else the rank did,
    are not covered.
    """
    if len(cells) <= most:
        return list(cells)
    size = math.ceil(len(cells) / most)
    near = (cells[-1].end - cells[0].begin) / most
    others = [span for span in spans if span.doing not in _STEPPING]
    ends = [span.end for span in others]
    groups = list[list[Cell]]()
    for cell in cells:
        last = groups[-1][-1].end if groups else -math.inf
        at = bisect.bisect_right(ends, last)
        between = at < len(others) and others[at].begin < cell.begin
        if not between and cell.begin - last <= near and len(groups[-1]) < size:
            groups[-1].append(cell)
        else:
            groups.append([cell])
    found = []
    for some in groups:
        total = sum(one.end - one.begin for one in some)
        parts = tuple(
            round(sum(one.parts[part] * (one.end - one.begin) for one in some) / total, 4)
            for part in range(len(PARTS))
        )
        found.append(Cell(some[0].begin, some[-1].end, parts))
    return found


def _fewer(marks: Sequence[Mark], most: int) -> tuple[Mark, ...]:
    """Of many checkpoints each so-manieth; what matters stays."""
    saved = [mark for mark in marks if mark.what == "checkpoint"]
    others = [mark for mark in marks if mark.what != "checkpoint"][:most]
    each = max(1, math.ceil(len(saved) / most))
    kept = itertools.islice(saved, 0, None, each)
    return tuple(sorted([*others, *kept], key=lambda mark: mark.at))
