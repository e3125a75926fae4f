"""The state of a run by rank and host, for the live screen and ``status``. Pure.

The launcher builds it from events and writes it to ``ranks.json`` about once a second. Other
processes build the same state from that file, ``events.jsonl`` and ``metrics.jsonl``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from signal import SIGINT, SIGKILL, SIGTERM
from typing import Any

from paceline.spec.events import PARTS, Event
from paceline.spec.failure import format_location, signal_name
from paceline.spec.formatting import DATE_TIME, format_duration, format_time
from paceline.spec.schema import (
    MAX_LONG_TEXT,
    RANK,
    SHORT_TEXT,
    any_json,
    dict_of,
    integer,
    list_of,
    matches,
    number,
    optional,
    record,
    text,
)

TRAINING = "train"
STARTING = "starting"  # a newcomer
RUNNING = "running"  # the phase of a rank without reports
MAX_POINTS = 512  # of a curve
MAX_CURVES = 8
MAX_NEWS, MAX_NEWS_CHARS = 40, 4096
BYTES_TO_BITS = 8

_PARTS = dict_of(number, SHORT_TEXT, 20)
_RANK = record(
    {"step": optional(integer()), "silent_s": optional(number), "samples_per_s": optional(number),
     "parts": optional(_PARTS), "state": SHORT_TEXT, "trouble": text(MAX_LONG_TEXT)},
    rank=RANK, host=text(255), phase=SHORT_TEXT,
)  # fmt: skip
_HOST = record(
    {"cpu": optional(number), "memory": optional(number), "gpus": optional(list_of(number, 1000)),
     "in_bps": optional(number), "out_bps": optional(number), "state": SHORT_TEXT,
     "trouble": text(MAX_LONG_TEXT)},
    name=text(255),
)  # fmt: skip
RANKS_SCHEMA = record(
    {"hosts": list_of(_HOST, 1 << 20), "progress": any_json, "hang_time": number,
     "slow": optional(record(rank=RANK, cause=SHORT_TEXT, part=number)),
     "waits": optional(record(text=text(MAX_LONG_TEXT), since=number, until=number))},
    time=number, ranks=list_of(_RANK, 1 << 20), hang=text(MAX_LONG_TEXT),
)  # fmt: skip
"""The schema of ``ranks.json``; missing values are unknown."""


@dataclass(slots=True)
class RankState:
    """One rank.

    Attributes:
        rank: Its number in the plan.
        phase: ``train``, ``evaluate``, …; ``running`` if it sends no reports.
        step: Global steps done; ``None`` if unknown.
        reported_at: Time of its last report by the state's clock; ``None`` if there was none.
        parts: Shares of its step time, by the names of ``events.PARTS``; they sum up to 1.
        state: ``ok``, ``ended``, ``failed``, ``lost``, ``frozen`` or ``late``.
        problem: What is wrong, in a few words.
    """

    rank: int
    host: str
    phase: str = RUNNING
    step: int | None = None
    reported_at: float | None = None
    samples_per_s: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    state: str = "ok"
    problem: str = ""

    def report_age_s(self, now: float) -> float | None:
        """Seconds since its last report; ``None`` if there was none."""
        return None if self.reported_at is None else max(0.0, now - self.reported_at)


@dataclass(slots=True)
class HostState:
    """One host.

    Attributes:
        cpu, memory: Shares in use, from 0 to 1; ``None`` if unknown.
        gpus: Utilisation of each GPU, from 0 to 1.
        in_bps, out_bps: Bits per second over the job's interface.
        state: ``ok`` or ``lost``.
        problem: Of a lost host, the state of its reconnection.
    """

    name: str
    cpu: float | None = None
    memory: float | None = None
    gpus: Sequence[float] = ()
    in_bps: float | None = None
    out_bps: float | None = None
    state: str = "ok"
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank that slows the others down.

    Attributes:
        rank: Its number in the plan.
        cause: See ``train/measure/straggler.py``.
        part: Share of the step time that the others lose.
    """

    rank: int
    cause: str
    part: float


@dataclass(frozen=True, slots=True)
class NodeWait:
    """The job waits for more nodes.

    Attributes:
        text: How many nodes are connected, and which are missing.
        since: Start of the wait, in seconds since 1970.
        until: Its deadline, in seconds since 1970.
    """

    text: str
    since: float
    until: float

    @classmethod
    def start(cls, text: str, timeout_s: float, ago_s: float = 0.0) -> NodeWait:
        """Returns a wait that began ``ago_s`` seconds ago."""
        since = time.time() - ago_s
        return cls(text, round(since, 3), round(since + timeout_s, 3))

    @property
    def description(self) -> str:
        """The wait in one line."""
        days = {format_time(moment, "%F") for moment in (self.since, self.until)}
        end = format_time(self.until, DATE_TIME) if len(days) > 1 else format_time(self.until)
        return f"{self.text}, since {format_time(self.since)}, until {end}"


@dataclass(frozen=True, slots=True)
class News:
    """A noteworthy event in one line.

    Attributes:
        time: Seconds since 1970.
    """

    time: float
    text: str
    is_bad: bool = False


class Curve:
    """A metric over the steps, thinned out as it grows."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []
        self._stride, self._skipped = 1, 0

    def add(self, step: int, value: float) -> None:
        """Adds a point; steps repeated after a resume replace the old ones."""
        while self.points and self.points[-1][0] >= step:
            self.points.pop()
        self._skipped += 1
        if self._skipped >= self._stride or not self.points:
            self.points.append((step, value))
            self._skipped = 0
        if len(self.points) > MAX_POINTS:
            self.points = self.points[::2]
            self._stride *= 2

    @property
    def values(self) -> list[float]:
        return [value for _, value in self.points]


STOPPED = "Stopped"  # the exception of paceline.train in a rank that was asked to stop
_STOP_SIGNALS = (SIGINT, SIGTERM, SIGKILL)  # of Paceline, to ranks


class RunState:
    """The present state of a run.

    Attributes:
        ranks: By their numbers in the plan.
        hosts: By name.
        progress: The last event ``progress``: step, steps, epoch, epochs, loss, samples_per_s.
        straggler: The rank that slows the others down, if any.
        hang: Which rank hangs, in one line; empty if none does.
        hang_time: When that was reported, in seconds since 1970.
        waiting: What the job waits for, if it does.
        curves: By metric: ``train loss``, ``test accuracy``, …
        news: The latest news, oldest first.
        attempt: Number of the attempt, from 0.
    """

    def __init__(self) -> None:
        self.ranks: dict[int, RankState] = {}
        self.hosts: dict[str, HostState] = {}
        self.progress: dict[str, Any] = {}
        self.straggler: Straggler | None = None
        self.hang, self.hang_time = "", 0.0
        self.waiting: NodeWait | None = None
        self.curves: dict[str, Curve] = {}
        self.latest_values: dict[str, float] = {}
        self.news: deque[News] = deque(maxlen=MAX_NEWS)
        self.saved_step: int | None = None
        self.saves_checkpoints = False
        self.attempt = 0
        self._lost: set[str] = set()  # hosts that the ranks have not recovered from
        self._stopped: set[int | None] = set()  # ranks that ended because they were asked to
        self._is_ended = False  # the attempt: ranks that start now belong to the next
        self._members: Sequence[int] = []  # of the present group, in rank order
        self._vitals: dict[str, Mapping[str, Any]] = {}  # the last ones of each host

    # --- updates -----------------------------------------------------------------------------

    def apply(self, event: Event, now: float) -> None:
        """Applies an event of an agent or of ``events.jsonl`` at ``now`` of a monotonic clock."""
        if event.rank is not None:
            self._apply_to_rank(event, event.rank, now)
        self._apply_to_job(event)
        if (news := self._news_item(event)) is not None:
            previous = self.news[-1] if self.news else None
            if previous is not None and _repeats(news, previous):
                self.news.pop()
            if event.kind == "straggler over":
                news = self._merge_straggler_news(event, news)
            self.news.append(news)

    def _news_item(self, event: Event) -> News | None:
        """Returns the news of an event; ranks that were stopped make none."""
        text, is_bad = _describe_event(event)
        if event.kind == "exception" and event["type"] == STOPPED:
            self._stopped.add(event.rank)
        if event.rank in self._stopped and event.kind in ("exception", "rank ended"):
            return None
        stopped = event.kind == "rank ended" and event["signal"] in _STOP_SIGNALS
        if not text or (stopped and self._lost):
            return None
        if event.kind == "started":
            self._stopped.clear()
            if self._lost:
                remaining = [name for name in self.hosts if name not in self._lost]
                names = f"{remaining[0]} alone" if len(remaining) == 1 else ", ".join(remaining[:4])
                text += f"; stopped all ranks to go on with {names}"
            self._lost.clear()
        elif event.kind == "lost":
            self._lost.add(event.host)
        elif event.kind == "recovery":  # the other ranks continue without the host
            self._lost.clear()
        return News(event.time, text.split("\n", 1)[0][:MAX_NEWS_CHARS], is_bad)

    def _merge_straggler_news(self, event: Event, news: News) -> News:
        """Merges the two news of a rank that was slow for a while."""
        location = format_location(str(event["its_host"] or ""), event["straggler"])
        for item in reversed(self.news):
            if item.text.startswith(f"{location} slows the others down"):
                self.news.remove(item)
                held_up = f"held the others up for {format_duration(event.time - item.time)}"
                return News(event.time, f"{location} {held_up}; it keeps up again")
        return news

    def _apply_to_rank(self, event: Event, rank_id: int, now: float) -> None:
        if event.kind == "rank started":
            if self._is_ended:
                self._is_ended, self.ranks, self.straggler, self.hang = False, {}, None, ""
            is_newcomer = rank_id in self.ranks
            phase = STARTING if is_newcomer else RUNNING
            self.ranks[rank_id] = RankState(rank_id, event.host, phase)
            self._host(event.host).state = "ok"
            return
        rank = self.ranks.get(rank_id)
        if rank is None or (event.host and rank.host != event.host):
            return
        if event.kind == "heartbeat":
            rank.step, rank.reported_at = event["step"] or 0, now
            rank.phase = event["phase"] or TRAINING
            if rank.state == "frozen":
                rank.state, rank.problem = "ok", ""
        elif event.kind == "rank ended":
            rank.state, rank.problem = _describe_rank_end(event, rank)
        elif event.kind == "exception":
            rank.state, rank.problem = "failed", str(event["type"] or "exception")
        elif event.kind == "rank frozen":
            rank.state, rank.problem = "frozen", str(event["how"] or "")
        elif event.kind == "rank thawed":
            rank.state, rank.problem = "ok", ""
        elif event.kind == "interrupted":
            rank.phase, rank.reported_at = "regrouping", now
        elif event.kind == "newcomer late":
            rank.state, rank.problem = "late", str(event["why"] or "")
        elif event.kind == "newcomer ready":
            rank.phase, rank.reported_at = "joining", now
            rank.state, rank.problem = "ok", ""
        elif event.kind == "regrouped":
            rank.phase, rank.reported_at = TRAINING, now
            rank.step = rank.step if event["step"] is None else event["step"]

    def _apply_to_job(self, event: Event) -> None:
        if event.kind == "progress":
            self.progress = {
                name: value for name, value in event.fields.items() if matches(any_json, value)
            }
        elif event.kind == "pace":
            self._apply_pace(event)
        elif event.kind == "started":
            self.attempt = int(event["attempt"] or 0)
            self._members = range(int(event["world_size"] or 0))
        elif event.kind == "ended":
            self._is_ended = True
        elif event.kind == "regroup":
            self._members, self.straggler = [*(event["members"] or ())], None
            for rank in self.ranks.values():
                rank.parts, rank.samples_per_s = {}, None
        elif event.kind == "lost":
            self._lose_host(event.host, event.time)
        elif event.kind == "straggler" and event["straggler"] is not None:
            rank_id, cause = self._plan_rank(event["straggler"]), str(event["cause"] or "")
            self.straggler = Straggler(rank_id, cause, float(event["part"] or 0.0))
        elif event.kind == "straggler over":
            self.straggler = None
        elif event.kind == "hang":
            self.hang, self.hang_time = str(event["text"] or ""), event.time
        elif event.kind == "hang over":
            self.hang = ""
        elif event.kind == "keeps checkpoints":
            self.saves_checkpoints = True
        elif event.kind == "checkpoint" and event["step"] is not None:
            self.saved_step = event["step"]

    def _plan_rank(self, rank: int) -> int:
        """Returns the number in the plan of a rank of the present group."""
        return self._members[rank] if rank < len(self._members) else rank

    def _host(self, name: str) -> HostState:
        return self.hosts.setdefault(name, HostState(name))

    def _lose_host(self, host: str, when: float) -> None:
        if host not in self.hosts and not any(rank.host == host for rank in self.ranks.values()):
            return  # a spare, which is not shown
        self.hosts[host] = HostState(host, state="lost")
        self._vitals.pop(host, None)
        for rank in self.ranks.values():
            if rank.host == host and rank.state != "ended":
                rank.state = "lost"
                rank.problem = f"its host was lost at {format_time(when)}"

    def set_reconnects(self, hosts: Mapping[str, str]) -> None:
        """Sets the reconnection status of lost hosts, by name."""
        for host in self.hosts.values():
            host.problem = hosts.get(host.name, "") if host.state == "lost" else ""

    def _apply_pace(self, event: Event) -> None:
        """Applies the division of each rank's step time, given in the group's rank order."""
        seconds, rates = event["ranks_s"] or [], event["rates"] or []
        if self._members and len(seconds) != len(self._members):
            return  # of a former group
        for place_in_group, row in enumerate(seconds):
            rank, total_s = self.ranks.get(self._plan_rank(place_in_group)), sum(row)
            if rank is None or len(row) != len(PARTS) or not total_s > 0:
                continue
            rank.parts = {name: part_s / total_s for name, part_s in zip(PARTS, row, strict=True)}
            rank.samples_per_s = rates[place_in_group] if place_in_group < len(rates) else None

    def add_metrics(self, fields: Mapping[str, Any]) -> None:
        """Adds a line of ``metrics.jsonl`` to the curves."""
        split, step = fields.get("split"), fields.get("step")
        if not isinstance(split, str) or not isinstance(step, int) or split in _NOT_CURVES:
            return
        for name in _curve_metrics(split, fields):
            title, value = f"{split} {name}", float(fields[name])
            if title not in self.curves and len(self.curves) >= MAX_CURVES:
                continue
            self.curves.setdefault(title, Curve()).add(step, value)
            self.latest_values[title] = value

    def add_vitals(self, host: str, report: Mapping[str, Any], interface: str = "") -> None:
        """Applies a host's counters (see ``host_load.py``). Rates need two of them."""
        state, previous = self._host(host), self._vitals.get(host)
        self._vitals[host] = report
        if state.state == "lost":
            return
        total, free_bytes = report["memory"]
        state.memory = 1 - free_bytes / total if total else None
        state.gpus = [*report.get("gpus", ())]
        if previous is None or report["time"] <= previous["time"]:
            return
        passed = report["time"] - previous["time"]
        busy, ticks = (
            end - start for end, start in zip(report["cpu"], previous["cpu"], strict=True)
        )
        state.cpu = min(1.0, max(0.0, busy / ticks)) if ticks > 0 else None
        state.in_bps = state.out_bps = None
        if interface in report["links"] and interface in previous["links"]:
            counters = zip(report["links"][interface], previous["links"][interface], strict=True)
            state.in_bps, state.out_bps = (
                max(0.0, end - start) * BYTES_TO_BITS / passed for end, start in counters
            )

    # --- ranks.json --------------------------------------------------------------------------

    def to_json(self, now: float, clock: float) -> dict[str, Any]:
        """Returns the content of ``ranks.json``, given two clocks: monotonic, and since 1970."""
        first = {state.host: rank for rank, state in sorted(self.ranks.items(), reverse=True)}
        hosts = sorted(self.hosts.values(), key=lambda host: first.get(host.name, len(first)))
        return {
            "time": round(clock, 3),
            "progress": self.progress,
            "ranks": [_rank_json(self.ranks[rank], now) for rank in sorted(self.ranks)],
            "hosts": [_host_json(host) for host in hosts],
            "hang": self.hang,
            "hang_time": self.hang_time,
            "waits": None if self.waiting is None else asdict(self.waiting),
            "slow": None if self.straggler is None else asdict(self.straggler),
        }  # fmt: skip

    def load(self, message: Any, now: float, clock: float) -> bool:
        """Loads the content of ``ranks.json``; returns False if it is malformed."""
        if not matches(RANKS_SCHEMA, message):
            return False
        written_at = now - max(0.0, clock - message["time"])
        self.ranks = {item["rank"]: _parse_rank(item, written_at) for item in message["ranks"]}
        self.hosts = {item["name"]: _parse_host(item) for item in message.get("hosts", ())}
        self.progress = dict(message.get("progress") or {})
        self.hang = message["hang"]
        waiting = message.get("waits")
        self.waiting = None if waiting is None else parse_waiting(waiting)
        slow = message.get("slow")
        self.straggler = slow and Straggler(slow["rank"], slow["cause"], slow["part"])
        return True


def parse_waiting(message: Mapping[str, Any]) -> NodeWait:
    """Parses the wait of a job in ``ranks.json``."""
    return NodeWait(message["text"], message["since"], message["until"])


def _rank_json(rank: RankState, now: float) -> dict[str, Any]:
    report_age_s = rank.report_age_s(now)
    rate = {} if rank.samples_per_s is None else {"samples_per_s": round(rank.samples_per_s, 1)}
    parts = {name: round(part, 4) for name, part in rank.parts.items()}
    return {
        "rank": rank.rank,
        "host": rank.host,
        "step": rank.step,
        "phase": rank.phase,
        "silent_s": None if report_age_s is None else round(report_age_s, 1),
        "state": rank.state,
        **({"trouble": rank.problem} if rank.problem else {}),
        **rate,
        **({"parts": parts} if parts else {}),
    }


def _parse_rank(message: Mapping[str, Any], now: float) -> RankState:
    report_age_s = message.get("silent_s")
    reported_at = None if report_age_s is None else now - report_age_s
    return RankState(
        message["rank"], message["host"], message["phase"], message.get("step"), reported_at,
        message.get("samples_per_s"), message.get("parts") or {}, message.get("state", "ok"),
        message.get("trouble", ""),
    )  # fmt: skip


def _host_json(host: HostState) -> dict[str, Any]:
    shares = {"cpu": host.cpu, "memory": host.memory}
    rates = {"in_bps": host.in_bps, "out_bps": host.out_bps}
    return {
        "name": host.name,
        "state": host.state,
        **({"trouble": host.problem} if host.problem else {}),
        **{name: round(value, 3) for name, value in shares.items() if value is not None},
        **{name: round(value) for name, value in rates.items() if value is not None},
        **({"gpus": [round(value, 3) for value in host.gpus]} if host.gpus else {}),
    }


def _parse_host(message: Mapping[str, Any]) -> HostState:
    return HostState(
        message["name"], message.get("cpu"), message.get("memory"), message.get("gpus") or (),
        message.get("in_bps"), message.get("out_bps"), message.get("state", "ok"),
        message.get("trouble", ""),
    )  # fmt: skip


# --- curves and news --------------------------------------------------------------------------

_NOT_CURVES = {"pace", "norms", "usage"}
_NOT_METRICS = {"step", "epoch", "samples", "samples_per_s", "time"}
_WARNINGS = {"straggler", "hang", "newcomer late", "warning", "slow rank", "checkpoint failed"}


def _curve_metrics(split: str, fields: Mapping[str, Any]) -> list[str]:
    """Returns the metrics to plot: losses of the training, all metrics of other splits."""
    return [
        name for name, value in fields.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
        and abs(value) < 1e300 and name not in _NOT_METRICS
        and (split != "train" or "loss" in name)
    ]  # fmt: skip


def _describe_rank_end(event: Event, rank: RankState) -> tuple[str, str]:
    """Returns the state of an ended rank, and how it ended."""
    if event["signal"]:
        return "failed", signal_name(event["signal"])
    if event["code"]:
        problem = rank.problem if rank.state == "failed" else ""
        return "failed", problem or f"exit status {event['code']}"
    return "ended", ""


def _repeats(news: News, previous: News) -> bool:
    """Whether a line repeats the one before: a loss, and the recovery from it."""
    subject = previous.text.split(":", 1)[0]
    is_loss = previous.is_bad and subject.startswith("lost ")
    return is_loss and not news.is_bad and news.text.startswith(subject)


def _describe_event(event: Event) -> tuple[str, bool]:
    text = str(event["text"] or event["warning"] or event["problem"] or "")
    location = format_location(event.host, event.rank)
    if event.kind in ("recovery", "straggler over"):
        return text, False
    if event.kind in _WARNINGS:
        return text, True
    if event.kind == "lost":
        return f"lost {event.host}: {event['why'] or ''}".rstrip(": "), True
    if event.kind == "exception":
        return f"{location}: {event['type']}: {event['message']}", True
    if event.kind == "rank ended" and event["signal"]:
        return f"{location} was ended by {signal_name(event['signal'])}", True
    if event.kind == "rank ended" and event["code"]:
        return f"{location} ended with exit status {event['code']}", True
    if event.kind == "rank frozen":
        return f"{location} is held up ({event['how']})", True
    if event.kind == "started" and event["attempt"]:
        number = event["attempt"] + 1
        return {2: "second start", 3: "third start"}.get(number, f"start {number}"), False
    if event.kind == "connection restored":
        return f"the connection to {event.host} is back", False
    if event.kind == "hang over":
        return "the job continues", False
    return "", False
