"""Where a run stands, by rank and by host: what the live screen and ``status`` show. Pure.

The launcher's own board hears what is told while it runs, and is written to ``ranks.json`` about
once a second. Who looks on from elsewhere has a board, too, made of that file, of ``events.jsonl``
and of ``metrics.jsonl``: it shows the same.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from signal import SIGKILL, SIGTERM
from typing import Any

from paceline.spec.events import PARTS, Event
from paceline.spec.failure import format_location, signal_name
from paceline.spec.formatting import format_duration
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
STARTING = "starting"  # of one that is to join others
RUNNING = "running"  # the phase of a rank that tells nothing of itself
MOST_POINTS = 512  # of a curve
MOST_CURVES = 8
MOST_NEWS = 40
QUIET_S = 5.0  # without a word: others say where they are each second
BYTES_TO_BITS = 8

_SHARES = dict_of(number, SHORT_TEXT, 20)
_RANK = record(
    {"step": optional(integer()), "silent_s": optional(number), "samples_per_s": optional(number),
     "parts": optional(_SHARES), "state": SHORT_TEXT, "trouble": text(MAX_LONG_TEXT)},
    rank=RANK, host=text(255), phase=SHORT_TEXT,
)  # fmt: skip
_HOST = record(
    {"cpu": optional(number), "memory": optional(number), "gpus": optional(list_of(number, 1000)),
     "in_bps": optional(number), "out_bps": optional(number), "state": SHORT_TEXT,
     "trouble": text(MAX_LONG_TEXT)},
    name=text(255),
)  # fmt: skip
SHAPE = record(
    {"hosts": list_of(_HOST, 1 << 20), "progress": any_json,
     "slow": optional(record(rank=RANK, cause=SHORT_TEXT, part=number)),
     "waits": optional(record(text=text(MAX_LONG_TEXT), since=number, until=number))},
    time=number, ranks=list_of(_RANK, 1 << 20), hang=text(MAX_LONG_TEXT),
)  # fmt: skip
"""Of ``ranks.json``: what it lacks is not known."""


@dataclass(slots=True)
class RankState:
    """One rank.

    Attributes:
        rank: Its number in the plan.
        host: Where it is.
        phase: What it does: ``train``, ``evaluate``, …; ``running`` where it tells nothing.
        step: Global steps done; ``None`` where it tells none.
        heard: When it told that, in seconds of the board's clock; ``None``: never.
        samples_per_s: Samples of its own.
        parts: Of the time of its steps, by the names of ``events.PARTS``; they sum up to 1.
        state: ``ok``, ``ended``, or what is wrong: ``failed``, ``lost``, ``frozen``, ``late``.
        trouble: The same in a few words.
    """

    rank: int
    host: str
    phase: str = RUNNING
    step: int | None = None
    heard: float | None = None
    samples_per_s: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    state: str = "ok"
    trouble: str = ""

    def silent_s(self, now: float) -> float | None:
        """Seconds since its last word; ``None`` where it tells nothing."""
        return None if self.heard is None else max(0.0, now - self.heard)


@dataclass(slots=True)
class HostState:
    """One host.

    Attributes:
        name: In the description of the hosts.
        cpu, memory: Parts in use, from 0 to 1; ``None`` where not known.
        gpus: The same of each GPU's time.
        in_bps, out_bps: Bits a second over the job's interface.
        state: ``ok`` or ``lost``.
        trouble: Of a lost one: what is done about it, in a few words.
    """

    name: str
    cpu: float | None = None
    memory: float | None = None
    gpus: Sequence[float] = ()
    in_bps: float | None = None
    out_bps: float | None = None
    state: str = "ok"
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Slow:
    """The rank that holds the others up.

    Attributes:
        rank: Which.
        cause: Why: see ``train/measure/straggler.py``.
        part: Of the time of a step that the others lose.
    """

    rank: int
    cause: str
    part: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """Too few nodes are there, and the job waits for others.

    Attributes:
        text: How many are there, and whom it waits for.
        since: When that began, in seconds since 1970.
        until: How long it does so, in seconds since 1970.
    """

    text: str
    since: float
    until: float

    @classmethod
    def now(cls, text: str, patience_s: float, ago_s: float = 0.0) -> Waiting:
        """One that begins, or has begun some seconds ago."""
        since = time.time() - ago_s
        return cls(text, round(since, 3), round(since + patience_s, 3))

    @property
    def words(self) -> str:
        """A line for people."""
        since, until = (time.localtime(one) for one in (self.since, self.until))
        other_day = since[:3] != until[:3]  # a patience may be of days
        end = time.strftime("%Y-%m-%d %H:%M:%S" if other_day else "%H:%M:%S", until)
        return f"{self.text}, since {time_of(self.since)}, until {end}"


@dataclass(frozen=True, slots=True)
class News:
    """Something that a person wants to know of, in a line.

    Attributes:
        time: Seconds since 1970.
        text: For people.
        bad: It is no good news.
    """

    time: float
    text: str
    bad: bool = False


class Curve:
    """A figure over the steps, with fewer points the longer it is."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []
        self._every, self._skipped = 1, 0

    def add(self, step: int, value: float) -> None:
        """One more point; a step that comes again after a resume takes the old ones' place."""
        while self.points and self.points[-1][0] >= step:
            self.points.pop()
        self._skipped += 1
        if self._skipped >= self._every or not self.points:
            self.points.append((step, value))
            self._skipped = 0
        if len(self.points) > MOST_POINTS:
            self.points = self.points[::2]
            self._every *= 2

    @property
    def values(self) -> list[float]:
        return [value for _, value in self.points]


class Board:
    """What is known of a run at present.

    Attributes:
        ranks: By their numbers in the plan.
        hosts: By name.
        progress: The last event ``progress``: step, steps, epoch, epochs, loss, samples_per_s.
        slow: The rank that holds the others up, while it does.
        hang: Who keeps the others waiting, one line, while it does.
        curves: By the name of what they show: ``train loss``, ``test accuracy``, …
        last: The last values of the same.
        news: What happened, the latest last.
        saved: The step of the last checkpoint.
        keeps_checkpoints: The script makes some, and one more when it is asked to.
        attempt: Number of the start, from 0.
    """

    def __init__(self) -> None:
        self.ranks: dict[int, RankState] = {}
        self.hosts: dict[str, HostState] = {}
        self.progress: dict[str, Any] = {}
        self.slow: Slow | None = None
        self.hang = ""
        self.waits: Waiting | None = None
        self.curves: dict[str, Curve] = {}
        self.last: dict[str, float] = {}
        self.news: deque[News] = deque(maxlen=MOST_NEWS)
        self.saved: int | None = None
        self.keeps_checkpoints = False
        self.attempt = 0
        self._lost: set[str] = set()  # hosts without which the ranks do not go on yet
        self._over = False  # the attempt: ranks that start now are those of the next
        self._members: list[int] = []  # of the present group, in the order of their ranks in it
        self._shares: list[int] = []  # of the global batch
        self._counted: dict[str, Mapping[str, Any]] = {}  # what a host told last

    # --- what is told ------------------------------------------------------------------------

    def take(self, event: Event, now: float) -> None:
        """Hears what happened.

        Args:
            event: As it was told, or as ``events.jsonl`` holds it.
            now: Seconds of a clock that always goes forward.
        """
        if event.rank is not None:
            self._of_rank(event, event.rank, now)
        self._of_job(event)
        if (news := self._news(event)) is not None:
            last = self.news[-1] if self.news else None
            if last is not None and _says_again(news, last):
                self.news.pop()
            if event.kind == "straggler over":
                news = self._held_up(event, news)
            self.news.append(news)

    def _news(self, event: Event) -> News | None:
        """What is to be said of an event: not that ranks ended which were stopped for its cause."""
        text, is_bad = _told(event)
        stopped = event.kind == "rank ended" and event["signal"] in (SIGTERM, SIGKILL)
        if not text or (stopped and self._lost):
            return None
        if event.kind == "started":
            if self._lost:
                left = [name for name in self.hosts if name not in self._lost]
                with_ = f"{left[0]} alone" if len(left) == 1 else ", ".join(left[:4])
                text += f"; stopped all ranks to go on with {with_}"
            self._lost.clear()
        elif event.kind == "lost":
            self._lost.add(event.host)
        elif event.kind == "recovery":  # the others go on without it
            self._lost.clear()
        return News(event.time, text.split("\n", 1)[0], is_bad)

    def _held_up(self, event: Event, news: News) -> News:
        """One line in place of two, of a rank that was slow for a while."""
        who = format_location(str(event["its_host"] or ""), event["straggler"])
        for item in reversed(self.news):
            if item.text.startswith(f"{who} slows the others down"):
                self.news.remove(item)
                long = format_duration(event.time - item.time)
                return News(event.time, f"{who} held the others up for {long}; it keeps up again")
        return news

    def _of_rank(self, event: Event, which: int, now: float) -> None:
        if event.kind == "rank started":
            if self._over:
                self._over, self.ranks, self.slow, self.hang = False, {}, None, ""
            again = which in self.ranks  # and the others train meanwhile
            self.ranks[which] = RankState(which, event.host, STARTING if again else RUNNING)
            self._host(event.host).state = "ok"
            return
        rank = self.ranks.get(which)
        if rank is None or (event.host and rank.host != event.host):
            return
        if event.kind == "heartbeat":
            rank.step, rank.heard = event["step"] or 0, now
            rank.phase = event["phase"] or TRAINING
            if rank.state == "frozen":
                rank.state, rank.trouble = "ok", ""
        elif event.kind == "rank ended":
            rank.state, rank.trouble = _end(event, rank)
        elif event.kind == "exception":
            rank.state, rank.trouble = "failed", str(event["type"] or "exception")
        elif event.kind == "rank frozen":
            rank.state, rank.trouble = "frozen", str(event["how"] or "")
        elif event.kind == "rank thawed":
            rank.state, rank.trouble = "ok", ""
        elif event.kind == "interrupted":
            rank.phase, rank.heard = "regrouping", now
        elif event.kind == "newcomer late":
            rank.state, rank.trouble = "late", str(event["why"] or "")
        elif event.kind == "newcomer ready":
            rank.phase, rank.heard = "joining", now
            rank.state, rank.trouble = "ok", ""
        elif event.kind == "regrouped":
            rank.phase, rank.heard = TRAINING, now
            rank.step = rank.step if event["step"] is None else event["step"]

    def _of_job(self, event: Event) -> None:
        if event.kind == "progress":
            self.progress = {
                name: value for name, value in event.fields.items() if matches(any_json, value)
            }
        elif event.kind == "pace":
            self._pace(event)
        elif event.kind == "started":
            self.attempt = int(event["attempt"] or 0)
            self._members, self._shares = [*range(int(event["world_size"] or 0))], []
        elif event.kind == "ended":
            self._over = True
        elif event.kind == "regroup":
            self._members, self._shares = [*(event["members"] or ())], []
            self.slow = None
            for rank in self.ranks.values():
                rank.parts, rank.samples_per_s = {}, None
        elif event.kind == "shares":
            self._shares = [*(event["shares"] or ())]
        elif event.kind == "lost":
            self._lose(event.host, event.time)
        elif event.kind == "straggler" and event["straggler"] is not None:
            slowest = self._slot(event["straggler"])
            self.slow = Slow(slowest, str(event["cause"] or ""), float(event["part"] or 0.0))
        elif event.kind == "straggler over":
            self.slow = None
        elif event.kind == "hang":
            self.hang = str(event["text"] or "")
        elif event.kind == "hang over":
            self.hang = ""
        elif event.kind == "keeps checkpoints":
            self.keeps_checkpoints = True
        elif event.kind == "checkpoint" and event["step"] is not None:
            self.saved = event["step"]

    def _slot(self, rank: int) -> int:
        """The number in the plan of a rank of the present group."""
        return self._members[rank] if rank < len(self._members) else rank

    def _host(self, name: str) -> HostState:
        return self.hosts.setdefault(name, HostState(name))

    def _lose(self, host: str, when: float) -> None:
        if host not in self.hosts and not any(rank.host == host for rank in self.ranks.values()):
            return  # a spare, of which nothing is shown
        self.hosts[host] = HostState(host, state="lost")
        self._counted.pop(host, None)
        for rank in self.ranks.values():
            if rank.host == host and rank.state != "ended":
                rank.state = "lost"
                rank.trouble = f"its host was lost at {time_of(when)}"

    def called(self, hosts: Mapping[str, str]) -> None:
        """What stands in the way of hosts that are called again, by name."""
        for host in self.hosts.values():
            host.trouble = hosts.get(host.name, "") if host.state == "lost" else ""

    def _pace(self, event: Event) -> None:
        """Where the time of each rank's steps went: in the order of their ranks in the group."""
        seconds, rates = event["ranks_s"] or [], event["rates"] or []
        if self._members and len(seconds) != len(self._members):
            return  # of a former group
        for place_in_group, row in enumerate(seconds):
            rank, whole_s = self.ranks.get(self._slot(place_in_group)), sum(row)
            if rank is None or len(row) != len(PARTS) or not whole_s > 0:
                continue
            rank.parts = {name: one / whole_s for name, one in zip(PARTS, row, strict=True)}
            rank.samples_per_s = rates[place_in_group] if place_in_group < len(rates) else None

    def record(self, fields: Mapping[str, Any]) -> None:
        """A line of ``metrics.jsonl``: points of the curves."""
        split, step = fields.get("split"), fields.get("step")
        if not isinstance(split, str) or not isinstance(step, int) or split in _NO_CURVES:
            return
        for name in _figures(split, fields):
            title, value = f"{split} {name}", float(fields[name])
            if title not in self.curves and len(self.curves) >= MOST_CURVES:
                continue
            self.curves.setdefault(title, Curve()).add(step, value)
            self.last[title] = value

    def vitals(self, host: str, report: Mapping[str, Any], interface: str = "") -> None:
        """Takes what an agent counted: see ``host_load.py``. The first time shows no rates.

        Args:
            host: Whose agent.
            told: Its answer.
            interface: That the job's traffic goes over.
        """
        state, before = self._host(host), self._counted.get(host)
        self._counted[host] = report
        if state.state == "lost":
            return
        total, free_bytes = report["memory"]
        state.memory = 1 - free_bytes / total if total else None
        state.gpus = [*report.get("gpus", ())]
        if before is None or report["time"] <= before["time"]:
            return
        passed = report["time"] - before["time"]
        busy, ticks = (now - then for now, then in zip(report["cpu"], before["cpu"], strict=True))
        state.cpu = min(1.0, max(0.0, busy / ticks)) if ticks > 0 else None
        state.in_bps = state.out_bps = None
        if interface in report["links"] and interface in before["links"]:
            both = zip(report["links"][interface], before["links"][interface], strict=True)
            rates = [max(0.0, now - then) * BYTES_TO_BITS / passed for now, then in both]
            state.in_bps, state.out_bps = rates

    # --- as a file ---------------------------------------------------------------------------

    def to_json(self, now: float, clock: float) -> dict[str, Any]:
        """As ``ranks.json`` holds it.

        Args:
            now: Of the clock that :meth:`take` was given.
            clock: Seconds since 1970.
        """
        first = {one.host: rank for rank, one in sorted(self.ranks.items(), reverse=True)}
        hosts = sorted(self.hosts.values(), key=lambda one: first.get(one.name, len(first)))
        return {
            "time": round(clock, 3),
            "progress": self.progress,
            "ranks": [_rank_json(self.ranks[rank], now) for rank in sorted(self.ranks)],
            "hosts": [_host_json(host) for host in hosts],
            "hang": self.hang,
            "waits": None if self.waits is None else asdict(self.waits),
            "slow": None if self.slow is None else {
                "rank": self.slow.rank, "cause": self.slow.cause, "part": self.slow.part
            },
        }  # fmt: skip

    def read(self, message: Any, now: float, clock: float) -> bool:
        """Takes what ``ranks.json`` holds; False where that is nothing of the kind.

        Args:
            said: The file's content.
            now, clock: As for :meth:`to_json`.
        """
        if not matches(SHAPE, message):
            return False
        since = now - max(0.0, clock - message["time"])
        self.ranks = {one["rank"]: _rank_of(one, since) for one in message["ranks"]}
        self.hosts = {one["name"]: _host_of(one) for one in message.get("hosts", ())}
        self.progress = dict(message.get("progress") or {})
        self.hang = message["hang"]
        waits = message.get("waits")
        self.waits = None if waits is None else waiting_of(waits)
        slow = message.get("slow")
        self.slow = None if slow is None else Slow(slow["rank"], slow["cause"], slow["part"])
        return True


def waiting_of(said: Mapping[str, Any]) -> Waiting:
    """What ``ranks.json`` says of a job that waits for nodes."""
    return Waiting(said["text"], said["since"], said["until"])


def _rank_json(rank: RankState, now: float) -> dict[str, Any]:
    silent_s = rank.silent_s(now)
    rate = {} if rank.samples_per_s is None else {"samples_per_s": round(rank.samples_per_s, 1)}
    parts = {name: round(part, 4) for name, part in rank.parts.items()}
    return {
        "rank": rank.rank,
        "host": rank.host,
        "step": rank.step,
        "phase": rank.phase,
        "silent_s": None if silent_s is None else round(silent_s, 1),
        "state": rank.state,
        **({"trouble": rank.trouble} if rank.trouble else {}),
        **rate,
        **({"parts": parts} if parts else {}),
    }


def _rank_of(said: Mapping[str, Any], now: float) -> RankState:
    silent_s = said.get("silent_s")
    heard = None if silent_s is None else now - silent_s
    return RankState(
        said["rank"], said["host"], said["phase"], said.get("step"), heard,
        said.get("samples_per_s"), said.get("parts") or {}, said.get("state", "ok"),
        said.get("trouble", ""),
    )  # fmt: skip


def _host_json(host: HostState) -> dict[str, Any]:
    shares = {"cpu": host.cpu, "memory": host.memory}
    rates = {"in_bps": host.in_bps, "out_bps": host.out_bps}
    return {
        "name": host.name,
        "state": host.state,
        **({"trouble": host.trouble} if host.trouble else {}),
        **{name: round(one, 3) for name, one in shares.items() if one is not None},
        **{name: round(one) for name, one in rates.items() if one is not None},
        **({"gpus": [round(one, 3) for one in host.gpus]} if host.gpus else {}),
    }


def _host_of(said: Mapping[str, Any]) -> HostState:
    return HostState(
        said["name"], said.get("cpu"), said.get("memory"), said.get("gpus") or (),
        said.get("in_bps"), said.get("out_bps"), said.get("state", "ok"), said.get("trouble", ""),
    )  # fmt: skip


# --- what is worth a curve, and a line --------------------------------------------------------

_NO_CURVES = {"pace", "norms", "usage"}
_NO_FIGURES = {"step", "epoch", "samples", "samples_per_s", "time"}


def _figures(split: str, fields: Mapping[str, Any]) -> list[str]:
    """Of a record: of the training its losses, of others all that was measured."""
    names = [
        name for name, value in fields.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
        and math.isfinite(value) and name not in _NO_FIGURES
    ]  # fmt: skip
    return [name for name in names if split != "train" or "loss" in name]


def _end(event: Event, rank: RankState) -> tuple[str, str]:
    """State of a rank that has ended, and how."""
    if event["signal"]:
        return "failed", signal_name(event["signal"])
    if event["code"]:
        known = rank.trouble if rank.state == "failed" else ""
        return "failed", known or f"exit status {event['code']}"
    return "ended", ""


def _says_again(news: News, last: News) -> bool:
    """Whether a line tells all of the one before: what was lost, and that the others go on."""
    what = last.text.split(":", 1)[0]
    return last.bad and not news.bad and what.startswith("lost ") and news.text.startswith(what)


def _told(event: Event) -> tuple[str, bool]:
    said = str(event["text"] or event["warning"] or event["problem"] or "")
    who = format_location(event.host, event.rank)
    if event.kind in ("recovery", "straggler over"):
        return said, False
    if event.kind in (
        "straggler",
        "hang",
        "newcomer late",
        "warning",
        "slow rank",
        "checkpoint failed",
    ):
        return said, True
    if event.kind == "lost":
        return f"lost {event.host}: {event['why'] or ''}".rstrip(": "), True
    if event.kind == "exception":
        return f"{who}: {event['type']}: {event['message']}", True
    if event.kind == "rank ended" and event["signal"]:
        return f"{who} was ended by {signal_name(event['signal'])}", True
    if event.kind == "rank ended" and event["code"]:
        return f"{who} ended with exit status {event['code']}", True
    if event.kind == "rank frozen":
        return f"{who} is held up ({event['how']})", True
    if event.kind == "started" and event["attempt"]:
        number = event["attempt"] + 1
        return {2: "second start", 3: "third start"}.get(number, f"start {number}"), False
    if event.kind == "connection restored":
        return f"the connection to {event.host} is back", False
    if event.kind == "hang over":
        return "the job continues", False
    return "", False


def time_of(seconds: float) -> str:
    """The time of day of a moment since 1970."""
    return time.strftime("%H:%M:%S", time.localtime(seconds))
