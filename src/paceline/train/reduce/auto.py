"""``auto``: measures step and network, and takes the way that leaves out least and hides the rest.

Line and coding are measured before the first step, and computing in it: so there is a choice after
one step, and a better one after each of the next two. First steps compute longer than others, which
only errs towards leaving out less. Then where the time of some steps went decides. It looks again
when communication takes longer or shorter than it did, and now and then, for a network that became
quicker shows in nothing. All ranks measure together and decide by the slowest, so alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.train.comms import Comms
from paceline.train.data.fetch import allowed
from paceline.train.measure.pace import PARTS, Look
from paceline.train.reduce import selection
from paceline.train.reduce.codecs import BLOCK
from paceline.train.reduce.coded_reducer import Coded
from paceline.train.reduce.collectives import Wire
from paceline.train.reduce.exchange import Exchange
from paceline.train.reduce.registry import METHODS
from paceline.train.reduce.selection import CANDIDATES, NEARLY, Choice, Measured, chosen

_FIRST = 2  # steps that do not count: memory, caches and buckets are new
_STEPS = 5  # that do
_EARLY = 3  # steps after each of which there is a choice for the time being
_DEAR, _MEANWHILE = 1.0, "int8"  # seconds of all bytes: not even the first step is exact then
_LONG, _LARGE = 0.1, 1 << 24  # seconds or bytes of a probe that says how quick the line is
_SAMPLE = 1 << 20  # elements that are coded for a measurement
_CHANGED = 0.15  # part of a step by which communication differs from before: worth a look
_COST = 0.002  # part of the time that looking again may take
_MOVING, _WAITING = PARTS.index("moving"), PARTS.index("waiting")


_EACH = 0.5e-3  # seconds that a bucket takes on busy processors, before it is known
_TRIALS = 4  # ways and numbers of buckets, before one of them is to stay


class Auto:
    """Chooses for one model's exchange. Every rank has one and calls it alike.

    Args:
        exchange: Whose method it sets.
        comms: Of all ranks.
        take: Sets a method by its name, with what the last one has not said.
        first: Says how many steps of the training send more than later ones by the way in use.

    Attributes:
        choice: The last; ``None`` before the first step.
        since: Number of the first step by the way that was settled.
        settled: By where the time of steps went; before that, for the time being.
    """

    def __init__(
        self,
        exchange: Exchange,
        comms: Comms,
        take: Callable[[str], None],
        first: Callable[[], int] = lambda: 0,
    ) -> None:
        self._exchange, self._comms, self._take = exchange, comms, take
        self._first_steps = first
        self._wire, self._worked = Wire(exchange.line()), 0.0  # CPU seconds of the last sum
        self.choice: Choice | None = None
        self.settled, self.since = False, 0
        self._seen: list[Tensor] = []  # seconds of each rank and part, by step
        self._usual: float | None = None  # part of a step that communication took at first
        self._changed, self._since, self._again = 0, 0, 0
        self._begun: int | None = None
        self._line, self._fresh = self._measured(), True  # no look has used it yet
        self._tried: dict[tuple[str, int], float] = {}  # seconds of a step, by way and buckets
        self._off: dict[str, float] = {}  # by way: times the forecast that its steps took
        self._each = _EACH if comms.device.type == "cpu" else 0.0  # see Measured
        self._early: list[float] = []  # seconds that the slowest rank computed, by step
        if self._line.sent["exact"] / self._line.rate > _DEAR:
            dear = replace(self._line, computing=_DEAR, each=self._each)
            self._use(Choice(_MEANWHILE, dear.best(_MEANWHILE)[0], {}))

    def stepped(self, computing: Callable[[], float]) -> None:
        """After each of the first few steps: chooses by how long this rank computed in it."""
        if self.settled or len(self._early) >= _EARLY:
            return
        slowest = self._comms.most(torch.tensor([computing()], dtype=torch.float64))[0]
        self._early.append(slowest)
        if slowest > 0:
            least = min(one for one in self._early if one > 0)
            choice = chosen(replace(self._line, computing=least, each=self._each))
            if choice.way != self.way:
                self._use(choice)
                self._since = len(self._early)

    @property
    def way(self) -> str:
        """In use."""
        return "exact" if self.choice is None else self.choice.way

    def looked(self, look: Look) -> str:
        """Takes where the time of the last steps went, between two steps.

        Returns:
            What has been decided, and why; empty where nothing changes.
        """
        own = torch.arange(look.seconds.shape[1]) * look.every + look.first_step
        if not self.settled and self._begun is None:
            self._begun = int(own[0])  # steps are counted from there
            self._since += self._begun
        fresh = look.seconds[:, own >= max(self._since, self._first_steps()) + _FIRST]
        last = int(own[-1]) + 1
        self._seen += list(fresh.unbind(1))
        if len(self._seen) < _STEPS:
            return ""
        steps, self._seen = torch.stack(self._seen, dim=1), []
        if self.settled and not self._due(steps, last):
            return ""
        first, now = not self.settled, self._now_used
        still = steps[:, :, _MOVING] + steps[:, :, _WAITING]
        computing = float((steps.sum(2) - still).median(1).values.max())
        if not (first or self._fresh):
            least = self._line.handling  # other threads of a rank may be at work by now
            self._line = self._measured()
            self._line = replace(self._line, handling=min(least, self._line.handling))
        self._fresh = False
        # while a CPU has to do with messages, it computes less
        pure = max(computing - self._line.own(self.way), 1e-6)
        measured = replace(self._line, computing=pure, each=self._each)
        if first:
            # Bytes move on all ranks at once; who waits for whom may change from step to step.
            a_step = computing + float(steps[0, :, _MOVING].median())
            measured, choice, self.settled = self._tried_out(measured, a_step)
            if not self.settled:
                self._use(choice)
                self._since = last
                return ""
        else:
            choice = chosen(measured, self.way, self._off)
        a_step = max(float(steps.sum(2).mean()), 1e-6)
        self._again = last + max(100, int(self._spent / _COST / a_step))
        self._usual, self._since, self.since = None, last, self._since
        if choice.way == now[0] and not first:
            return ""
        if (choice.way, choice.buckets) != now and {choice.way, now[0]} != {"exact"}:
            self._use(choice)
            self.since = last
        self.choice = choice
        return choice.said(measured)

    @property
    def _now_used(self) -> tuple[str, int]:
        """The way, and in how many buckets: 0 where they are DDP's."""
        return _used(self.choice) if self.choice else ("exact", 0)

    def _tried_out(self, measured: Measured, seconds: float) -> tuple[Measured, Choice, bool]:
        """What is to be used, after the way in use took so many seconds a step.

        Nothing that was measured before tells how long codes wait for a processor while ranks
        compute. So what is expected is compared with what comes, and where it is far off, another
        number of buckets or another way is tried; in the end the best of what was tried is taken.

        Returns:
            What is known now, the choice, and whether it is to stay.
        """
        now = self._now_used
        if now[0] != "exact":
            corrected = measured.corrected(*now, seconds)
            # the most that was seen: it is not the same in all numbers
            each = max(corrected.each, measured.each if self._tried else 0.0)
            measured, self._each = replace(measured, each=each), each
            self._tried[now] = seconds
        elif seconds < measured.best("exact")[1]:  # otherwise other buckets may yet be better
            self._off["exact"] = seconds / measured.best("exact")[1]
        choice = chosen(measured, off=self._off)
        if choice.way == "exact":
            return measured, choice, True
        if _used(choice) not in self._tried and len(self._tried) < _TRIALS:
            return measured, choice, False
        least = NEARLY * min(self._tried.values())
        enough = [one for one, took in self._tried.items() if took <= least]
        way, buckets = min(enough, key=lambda one: (CANDIDATES.index(one[0]), self._tried[one]))
        took = {one[0]: s for one, s in sorted(self._tried.items(), key=lambda one: -one[1])}
        self._off |= {one: s / measured.best(one)[1] for one, s in took.items()}
        return measured, Choice(way, buckets, {**choice.seconds, **took}), True

    def _due(self, steps: Tensor, last: int) -> bool:
        """Whether the network is to be measured again."""
        moving = float(steps[:, :, _MOVING].mean() / steps.sum(2).mean().clamp(min=1e-9))
        if self._usual is None:
            self._usual = moving
        self._changed = self._changed + 1 if abs(moving - self._usual) > _CHANGED else 0
        return self._changed >= 2 or last >= self._again

    def _measured(self) -> Measured:
        """Line and coding, by the slowest; computing is not known here. A collective."""
        ways, line, began = selection.CANDIDATES, self._exchange.line(), time.perf_counter()
        latency, rate, handling = self._probe()
        coding = [self._code(way) for way in ways]
        found = [latency, 1 / rate, *coding, handling, time.perf_counter() - began]
        slowest = self._comms.most(torch.tensor(found, dtype=torch.float64))
        self._spent = slowest.pop()  # what it costs to look again
        handling = slowest.pop()
        sent = {
            way: METHODS[way](line, self._wire).sent(self._exchange.elements, line.ranks)
            for way in ways
        }
        by_way = dict(zip(ways, slowest[2:], strict=True))
        return Measured(
            0.0,
            self._exchange.nbytes,
            slowest[0],
            1 / slowest[1],
            sent,
            by_way,
            handling=handling,
        )

    def _code(self, way: str) -> float:
        """Seconds for making and reading all messages of a step."""
        method = METHODS[way]
        if not (isinstance(method, type) and issubclass(method, Coded)):
            return 0.0
        count = max(1, min(_SAMPLE, self._exchange.elements) // BLOCK) * BLOCK
        values = torch.randn(count, device=self._comms.device)
        message = torch.zeros(method.up.size(count), dtype=torch.uint8, device=values.device)
        seconds = []
        for _ in range(3):
            began = self._now()
            method.up.encode(values, message, keep=method.feedback)
            method.up.decode(message, values)
            method.up.decode(message, values, add=True)
            seconds.append(self._now() - began)
        return min(seconds) * self._exchange.elements / count

    def _probe(self) -> tuple[float, float, float]:
        """Of the line.

        Returns:
            Seconds of a collective of a few bytes, bytes a second that this rank sends, and
            seconds for which that takes the processor that computes, a byte.
        """
        latency = min(self._sum(256) for _ in range(4))
        size, ranks = 1 << 14, self._wire.ranks
        while True:
            self._sum(256)  # all begin together
            seconds = self._sum(size // 4)
            longest = self._comms.most(torch.tensor([seconds], dtype=torch.float64))[0]
            if longest >= _LONG or size >= _LARGE:
                sent = 2 * (ranks - 1) / ranks * size
                handling = 0.0 if self._to_spare else self._worked / sent
                return latency, sent / max(seconds - latency, 1e-9), handling
            size *= 4

    @property
    def _to_spare(self) -> bool:
        """Whether bytes are moved by a processor that does not compute."""
        if self._comms.device.type != "cpu":
            return True
        computing = torch.get_num_threads() * self._comms.world.local_size
        return allowed() > computing

    def _sum(self, elements: int) -> float:
        tensor = torch.zeros(elements, device=self._comms.device)
        began, worked = self._now(), time.process_time()
        self._comms.event(
            lambda: self._comms.come() if self._comms.stale else self._wire.around(tensor)
        )
        self._worked = time.process_time() - worked
        return self._now() - began

    def _now(self) -> float:
        if self._comms.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def _use(self, choice: Choice) -> None:
        self.choice = choice
        if choice.way == "exact":  # DDP's own way costs least, and is what Overlap begins with
            self._exchange.as_made()
            return
        size = max(1, self._exchange.nbytes // choice.buckets)
        self._exchange.buckets(size, max(1, size // 2) if choice.buckets > 1 else size)
        self._take(choice.way)

    # -- in checkpoints ------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What was chosen; nothing before that."""
        if self.choice is None or not self.settled:
            return {}
        one = self.choice
        return {
            "way": one.way,
            "buckets": one.buckets,
            "seconds": dict(one.seconds),
            "known": {"ranks": self._wire.ranks, "each": self._each, "off": dict(self._off)},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on with what was chosen, and looks at it again after some steps."""
        if state.get("way") in selection.CANDIDATES:
            self._use(Choice(state["way"], int(state["buckets"]), dict(state["seconds"])))
            known = state.get("known", {})
            if known.get("ranks") == self._wire.ranks:
                self._each, self._off = float(known["each"]), dict(known["off"])
            self.settled, self._again = True, 0


def _used(choice: Choice) -> tuple[str, int]:
    return choice.way, 0 if choice.way == "exact" else choice.buckets
