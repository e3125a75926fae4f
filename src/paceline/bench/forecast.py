"""How long a step will take on another number of hosts, from a few steps on one and on two. Pure.

A step waits for its data (D), computes (C) and averages gradients over the link (N). C and D follow
the share of the global batch that a host has, as they were measured alone at several batches. N
follows the bytes that each host sends for an all-reduce among n, ``2 (n - 1) / n`` of the
gradients', and the delay of a message, both measured between two hosts. How much of N hides behind
C follows from the number of buckets (:mod:`paceline.spec.step_time`). What else two hosts cost is a
constant: what makes that true of the steps on two hosts.

Other laws fit two hosts just as well. Where they and the spread of the steps lead is the error bar.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.bench.speedup import Point, speedups
from paceline.spec.formatting import format_duration
from paceline.spec.step_time import BYTES_SENT, StepTime
from paceline.spec.terminal import wrap

LEAST_SPREAD = 0.02  # a step is never known better
UNLIKE = 1.25  # times the other's time for computing: hosts of a kind are not alike
UNKNOWN = 0.5  # an error bar of more than this part of the step says nothing
GOOD = 0.8  # an efficiency that is worth having
BEYOND = 0.06  # of a step that was not seen, besides: what the laws leave out (bench/forecast)
ROUNDS_S = 0.005  # that gloo loses on pieces of fewer bytes for each rank, among so many ranks
SHORT, MANY = 1 << 18, 4
MOST_BATCH = 64  # times the asked global batch that is looked at
MOST_HOSTS = 1024  # further than that nobody can see from two
EACH = 32  # up to so many every number is forecast
MOST_CHOICES = 5000  # subsets of uneven hosts that are tried one by one
SHARDED_BYTES = 1.5  # parameters are gathered twice and gradients scattered once


Balance = str | Mapping[str, float]
"""Shares of a batch: ``even``, ``auto`` (by speed), or a weight for each host."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Steps of one global batch on some hosts.

    Attributes:
        batch: Samples of a step over all hosts.
        seconds: Median of a step.
        data: Seconds of these in which it waited for its data.
        spread: What that median may be wrong by, as a part of it.
    """

    batch: int
    seconds: float
    data: float = 0.0
    spread: float = LEAST_SPREAD


@dataclass(frozen=True, slots=True)
class Wire:
    """An all-reduce over all ranks of a probe.

    Attributes:
        bytes: Of each rank's tensor.
        seconds: That it took.
        delay: Seconds of one of a single number.
    """

    bytes: int
    seconds: float
    delay: float


@dataclass(frozen=True, slots=True)
class Probe:
    """A few steps on some hosts, as the training left them (``steps.json``).

    Attributes:
        hosts: Of each rank.
        samples: Of an epoch.
        global_batch: That the training asks for.
        steps: Of the whole training, at that batch.
        bytes: Of the gradients.
        buckets: Pieces in which they are sent.
        timed: At each batch that was tried.
        wire: ``None`` of a single rank.
        sharded: Parameters are spread over the ranks.
        device: cpu, cuda, …
        sent: Bytes that are sent as a part of the gradients', between two ranks and of more.
        balance: How the training shares its batches: "even", "auto" or weights of hosts. The
            probe's own are even.
        communication: The way to average gradients that was asked for.
        computing: Seconds of computing in a step of the largest batch, by host; empty where they
            are not known.
    """

    hosts: tuple[str, ...]
    samples: int
    global_batch: int
    steps: int
    bytes: int
    buckets: int
    timed: tuple[Timed, ...]
    wire: Wire | None = None
    sharded: bool = False
    device: str = "cpu"
    sent: tuple[float, float] = (1.0, 1.0)
    balance: Balance = "even"
    communication: str = "exact"
    computing: Mapping[str, float] = field(default_factory=dict)

    @property
    def unlike(self) -> tuple[str, str, float] | None:
        """Its quickest and its slowest host, and by how much, where they differ."""
        if len(self.computing) < 2:
            return None
        quick = min(self.computing, key=lambda host: self.computing[host])
        slow = max(self.computing, key=lambda host: self.computing[host])
        times = self.computing[slow] / self.computing[quick]
        return (quick, slow, times) if times >= UNLIKE else None

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> Probe:
        """From the file's object. ValueError where it is none."""
        try:
            return cls._of(said)
        except (LookupError, TypeError, OverflowError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None

    @classmethod
    def _of(cls, said: Mapping[str, Any]) -> Probe:
        by_batch: dict[int, list[Mapping[str, Any]]] = {}
        for one in said["steps_done"]:
            by_batch.setdefault(int(one["batch"]), []).append(one)
        if not by_batch:
            raise ValueError("no step is told")
        wire = said["exchange"]
        return cls(
            tuple(map(str, said["hosts"])),
            int(said["samples"]),
            int(said["global_batch"]),
            int(said["steps"]),
            int(said["bytes"]),
            int(said["buckets"]),
            tuple(_timed(batch, steps) for batch, steps in by_batch.items()),
            wire and Wire(int(wire["bytes"]), float(wire["seconds"]), float(wire["delay"])),
            bool(said["sharded"]),
            str(said["device"]),
            (float(said["sent"][0]), float(said["sent"][1])),
            _balance(said.get("balance", "even")),
            str(said.get("communication", "exact")),
            _computing(said["hosts"], by_batch[max(by_batch)]),
        )


def _balance(said: Any) -> Balance:
    if isinstance(said, Mapping):
        return {str(host): float(weight) for host, weight in said.items()}
    return "auto" if said == "auto" else "even"


def _computing(hosts: Sequence[Any], steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """That of each host's slowest rank; empty where it is not known of all."""
    found: dict[str, float] = {}
    for number, host in enumerate(map(str, hosts)):
        each = [float(one["computing"][number]) for one in steps if "computing" in one]
        each = [one for one in each if one > 0]  # of quick steps not all are noted
        found[host] = max(found.get(host, 0.0), statistics.median(each) if each else 0.0)
    return found if all(found.values()) else {}


def _timed(batch: int, steps: Sequence[Mapping[str, Any]]) -> Timed:
    """A step is over when its last rank is done; its data are late when the last one's are."""
    seconds = [max(map(float, one["seconds"])) for one in steps]
    data = [max(map(float, one["data"])) for one in steps]
    middle = statistics.median(seconds)
    off = statistics.median(abs(one - middle) for one in seconds)
    spread = 2 * off / max(middle, 1e-9) / math.sqrt(len(seconds))
    return Timed(batch, middle, min(statistics.median(data), middle), max(spread, LEAST_SPREAD))


@dataclass(frozen=True, slots=True)
class Alone:
    """What a host needs for its share, without the others.

    Attributes:
        points: (samples, seconds of computing), by samples.
        data: Seconds of waiting for each sample.
        spread: What the seconds may be wrong by, as a part of them.
    """

    points: tuple[tuple[float, float], ...]
    data: float = 0.0
    spread: float = LEAST_SPREAD

    @classmethod
    def of(cls, timed: Sequence[Timed]) -> Alone:
        """From steps of one host at one batch or several."""
        every = sorted(timed, key=lambda one: one.batch)
        data = sum(one.data for one in every) / sum(one.batch for one in every)
        points: list[tuple[float, float]] = []
        for one in every:  # more samples are not less work
            seconds = max([one.seconds - one.data, *(known for _, known in points)])
            points.append((one.batch, seconds))
        return cls(tuple(points), data, max(one.spread for one in every))

    @property
    def fixed(self) -> float:
        """Seconds that do not depend on the share."""
        if len(self.points) < 2:
            return 0.0
        (few, least), (more, most) = self.points[0], self.points[1]
        return max(0.0, least - few * (most - least) / (more - few))

    def seconds(self, share: float) -> float:
        """Of computing so many samples: between what was measured straight, and on from there."""
        if len(self.points) < 2:
            ((samples, seconds),) = self.points
            return seconds * share / samples
        if share < self.points[0][0]:
            (samples, seconds), fixed = self.points[0], self.fixed
            return fixed + (seconds - fixed) * share / samples
        pairs = list(itertools.pairwise(self.points))
        (few, least), (more, most) = next((p for p in pairs if share <= p[1][0]), pairs[-1])
        return least + (share - few) * (most - least) / (more - few)

    def share(self, seconds: float) -> float:
        """Samples that can be computed in so long."""
        low, high = 0.0, 1.0
        while self.seconds(high) < seconds and high < 1e12:
            high *= 2
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.seconds(middle) < seconds else (low, middle)
        return low


def ring(ranks: int) -> float:
    """Bytes that each of so many sends in an all-reduce, over those of the tensor."""
    return 2 * (ranks - 1) / ranks


@dataclass(frozen=True, slots=True)
class Model:
    """All that two probes tell.

    Attributes:
        alone: By host, what it needs for its share; those that were not probed are like the first.
        ranks: On each host.
        batch, steps, samples: Asked global batch, steps of the training, samples of an epoch.
        moving: Seconds of an all-reduce of the gradients between two hosts, without the delay.
        delay: Of a message between two hosts: seconds of an all-reduce of one number.
        bytes: Of the gradients.
        buckets: Pieces in which they are sent.
        residual_s: Seconds that two hosts take beyond the model; negative if they are quicker.
        rates: Bits a second from host to host, where they are known.
        probed: The two hosts that were; empty where only one was.
        sent: Bytes that are sent as a part of the gradients', between two ranks and of more.
        spread: What the steps of two hosts may be wrong by, as a part of them.
        device: That computes: cpu, cuda, …
        balance: How the training shares its batches.
        communication: The way to average gradients that was asked for.
        sharded: Parameters are spread over the ranks.
    """

    alone: Mapping[str, Alone]
    ranks: int
    batch: int
    steps: int
    samples: int
    moving: float = 0.0
    delay: float = 0.0
    bytes: int = 0
    buckets: int = 1
    residual_s: float = 0.0
    rates: Mapping[tuple[str, str], float] = field(default_factory=dict)
    probed: tuple[str, ...] = ()
    sent: tuple[float, float] = (1.0, 1.0)
    spread: float = LEAST_SPREAD
    device: str = "cpu"
    balance: Balance = "even"
    communication: str = "exact"
    sharded: bool = False

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self.alone)

    def slowest_link(self, hosts: Sequence[str]) -> float:
        """Seconds of a byte on the slowest way among these, over that between the probed two."""
        known = [self.rates[pair] for pair in itertools.permutations(hosts, 2)
                 if pair in self.rates]  # fmt: skip
        base = [self.rates[pair] for pair in itertools.permutations(self.probed, 2)
                if pair in self.rates]  # fmt: skip
        if not known or not base:
            return 1.0
        slower = min(base) / max(min(known), 1e-9)
        return slower if abs(slower - 1) > 0.15 else 1.0  # a short transfer is known to that

    def exchange(self, hosts: int, bytes_part: float = 1.0, slower: float = 1.0) -> float:
        """Seconds of averaging gradients among so many hosts."""
        if hosts < 2:
            return 0.0
        ranks = hosts * self.ranks
        whole = ring(ranks) / ring(2 * self.ranks) * self.sent[ranks > 2]
        delay = self.delay * (hosts - 1) + self.rounds(hosts)
        return self.moving * whole * bytes_part * slower + delay

    def rounds(self, hosts: int) -> float:
        """Seconds that gloo loses between the rounds of a ring of short messages.

        Two ranks do not show it; it was seen on every machine that was tried.
        """
        ranks = hosts * self.ranks
        short = self.bytes / self.buckets / ranks < SHORT
        return ROUNDS_S if short and ranks >= MANY > 2 * self.ranks and self._by_gloo else 0.0

    def beside(self, computing: float, moving: float) -> float:
        """Seconds of computing with an exchange beside it."""
        return StepTime(computing, moving, self.buckets).seconds

    @property
    def _by_gloo(self) -> bool:
        return self.device == "cpu" and self.moving > 0


def model(alone: Mapping[str, Probe], pair: Probe | None,
          rates: Mapping[tuple[str, str], float] | None = None,
          like: Mapping[str, str] | None = None) -> Model:  # fmt: skip
    """What the probes tell.

    Args:
        alone: By host, its steps without others.
        pair: The same on two hosts; ``None`` where there is only one.
        rates: Bits a second between hosts.
        like: Hosts that were not probed alone, and the one that they are like.
    """
    own = {name: Alone.of(probe.timed) for name, probe in alone.items()}
    for name, other in (like or {}).items():
        own.setdefault(name, own[other])
    first = next(iter(alone.values()))
    base = Model(own, len(first.hosts), first.global_batch, first.steps, first.samples,
                 balance=first.balance)  # fmt: skip
    if pair is None or pair.wire is None:
        return base
    wire, names = pair.wire, tuple(dict.fromkeys(pair.hosts))
    passes = SHARDED_BYTES if pair.sharded else 1.0
    found = replace(
        base,
        moving=max(wire.seconds - wire.delay, 0.0) * pair.bytes * passes / max(wire.bytes, 1),
        delay=wire.delay,
        bytes=pair.bytes,
        buckets=pair.buckets,
        rates=rates or {},
        probed=names,
        sent=pair.sent,
        sharded=pair.sharded,
        communication=pair.communication,
        device=pair.device,
        spread=max(one.spread for one in pair.timed),
    )
    both = [own.get(name, next(iter(own.values()))) for name in names]
    costs = []  # have nothing to do with the share
    for one in pair.timed:
        share = one.batch / len(names)
        computing = max(host.seconds(share) for host in both)
        data = max(host.data for host in both) * share
        costs.append(one.seconds - data - found.beside(computing, found.exchange(2)))
    return replace(found, residual_s=statistics.fmean(costs))


@dataclass(frozen=True, slots=True)
class Step:
    """A step of some hosts: its seconds, and what they consist of.

    Attributes:
        seconds: Of the step.
        low, high: Between which it will be.
        data: Of waiting for data.
        computing: What follows the share.
        small: What of computing does not follow it.
        link: What the exchange adds.
    """

    seconds: float
    low: float
    high: float
    data: float
    computing: float
    small: float
    link: float

    @property
    def limit(self) -> str:
        """What takes the largest part."""
        parts = {
            "computing": self.computing,
            "link": self.link,
            "small batch": self.small,
            "data": self.data,
        }
        return max(parts, key=parts.__getitem__)


def step(known: Model, hosts: Sequence[str], batch: float, *, by_speed: bool = False,
         bytes_part: float = 1.0) -> Step:  # fmt: skip
    """A step of these hosts.

    Args:
        known: What the probes told.
        hosts: Those that take part.
        batch: Samples of it, over all hosts.
        by_speed: Shares follow the hosts' speed; else they are as the training asks for.
        bytes_part: Bytes that are sent, as a part of the gradients'.
    """
    every = [known.alone[name] for name in hosts]
    shares = [batch / len(every)] * len(every)
    if not isinstance(known.balance, str):
        shares = shares_by_weight(known.balance, hosts, batch)
    if by_speed or known.balance == "auto":
        shares = shares_by_speed(every, batch)
    computing = max(host.seconds(share) for host, share in zip(every, shares, strict=True))
    data = max(host.data * share for host, share in zip(every, shares, strict=True))
    small = min(max(host.fixed for host in every), computing)
    off = (computing + data) * max(host.spread for host in every)
    if len(every) < 2:
        middle = computing + data
        return Step(middle, middle - off, middle + off, data, computing - small, small, 0.0)
    slower = known.slowest_link(hosts)
    moving = known.exchange(len(every), bytes_part, slower)
    laws = [law(known, batch / len(every), computing, moving, len(every)) for law in LAWS]
    guesses = [max(computing, one) + data for one in laws]
    middle, noise = guesses[0], max(guesses[0] * known.spread, off)
    if len(every) > len(known.probed):
        noise += BEYOND * middle
    low, high = min(guesses) - noise, max(guesses) + noise
    return Step(middle, low, high, data, computing - small, small, middle - computing - data)


def shares_by_weight(weights: Mapping[str, float], hosts: Sequence[str],
                     batch: float) -> list[float]:  # fmt: skip
    """Samples of each; a host without a weight has the mean of all weights."""
    usual = statistics.fmean(weights.values()) if weights else 1.0
    every = [weights.get(name, usual) for name in hosts]
    return [batch * one / sum(every) for one in every]


def shares_by_speed(every: Sequence[Alone], batch: float) -> list[float]:
    """Samples of each, so that all are done at once."""
    low, high = 0.0, max(host.seconds(batch) for host in every)
    for _ in range(60):
        middle = (low + high) / 2
        enough = sum(host.share(middle) for host in every) >= batch
        low, high = (low, middle) if enough else (middle, high)
    found = [host.share(high) for host in every]
    return [one * batch / max(sum(found), 1e-12) for one in found]


# -- what two hosts tell of more -----------------------------------------------------------


def _by_buckets(known: Model, share: float, computing: float, moving: float,
                hosts: int) -> float:  # fmt: skip
    """Buckets pass while the next gradients are computed; the same constant on more hosts."""
    return known.beside(computing, moving) + known.residual_s


def _by_hidden_seconds(known: Model, share: float, computing: float, moving: float,
                       hosts: int) -> float:  # fmt: skip
    """As many seconds of the exchange hide as on two hosts: what more there is to send shows."""
    two = known.exchange(2)
    alone = known.alone[known.probed[0]].seconds(share) if known.probed else computing
    hidden = alone + two - known.beside(alone, two)
    return computing + moving - hidden + known.residual_s


def _with_growth(known: Model, share: float, computing: float, moving: float,
                 hosts: int) -> float:  # fmt: skip
    """What two hosts cost besides grows as the exchange does."""
    grown = max(known.residual_s, 0.0) * (known.exchange(hosts) / max(known.exchange(2), 1e-12) - 1)
    return _by_buckets(known, share, computing, moving, hosts) + grown


def _without_rounds(known: Model, share: float, computing: float, moving: float,
                    hosts: int) -> float:  # fmt: skip
    """Nothing is lost on short messages."""
    lost = known.rounds(hosts)
    return _by_buckets(known, share, computing, max(moving - lost, 0.0), hosts)


LAWS: tuple[Callable[[Model, float, float, float, int], float], ...] = (
    _by_buckets,
    _by_hidden_seconds,
    _with_growth,
    _without_rounds,
)
"""Of a step without waiting for data; the first is the forecast, the others make its error bar."""


# -- for every number of hosts -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of some hosts. Times in seconds.

    Attributes:
        hosts: Their number.
        names: Which.
        batch: Samples of a step over all.
        step: The step with its parts.
        speedup, efficiency: Against the fastest host alone.
        by_speed: Seconds of a step with shares by speed; ``None`` where that changes nothing.
        communication: The least lossy way to send less that lifts the limit, or the best; empty.
        with_it: Seconds of a step with that.
        better_batch: A global batch at which the efficiency is good; 0 where there is none.
        steps: Of the whole training at this batch.
        price: Of the whole training; ``None`` where none was given.
        declined: Why nothing is forecast; empty where something is.
    """

    hosts: int
    names: tuple[str, ...]
    batch: int
    step: Step
    speedup: float
    efficiency: float
    by_speed: float | None = None
    communication: str = ""
    with_it: float | None = None
    better_batch: int = 0
    steps: int = 0
    price: float | None = None
    declined: str = ""

    @property
    def total(self) -> float:
        """Seconds of training to the end, without start and evaluations."""
        return self.steps * self.step.seconds


def sizes(most: int) -> list[int]:
    """The numbers of hosts that are forecast, up to so many: all of the small ones.

    Beyond these each power of two, what lies half-way to the next, and the last.
    """
    found = list(range(1, min(most, EACH) + 1))
    size = EACH
    while size < most:
        found += [one for one in (size + size // 2, 2 * size) if one < most]
        size *= 2
    return [*found, most] if most > EACH else found


def forecast(known: Model, counts: Sequence[int], *, weak: bool = False,
             price: float | None = None) -> list[Forecast]:  # fmt: skip
    """For each number of hosts, the fastest of those that there are.

    Args:
        known: What the probes told.
        counts: Numbers of hosts; beyond those that there are, further ones like the last.
        weak: The batch of each host is fixed, not the global batch.
        price: Of a host and hour.
    """
    one = min((step(known, [name], known.batch) for name in known.hosts),
              key=lambda found: found.seconds)  # fmt: skip
    return [_of(_more(known, count), count, one, weak, price) for count in counts]


def _more(known: Model, hosts: int) -> Model:
    """With further hosts like the last, if there are not enough."""
    extra = hosts - len(known.alone)
    if extra <= 0:
        return known
    last = known.hosts[-1]
    further = {f"{last}+{number}": known.alone[last] for number in range(1, extra + 1)}
    return replace(known, alone={**known.alone, **further})


def _of(known: Model, hosts: int, one: Step, weak: bool, price: float | None) -> Forecast:
    batch = known.batch * hosts if weak else known.batch
    names = fastest(known, hosts, batch)
    found = step(known, names, batch)
    speedup = (hosts if weak else 1) * one.seconds / found.seconds
    steps = math.ceil(known.steps * known.batch / batch)
    made = Forecast(hosts, names, batch, found, speedup, speedup / hosts, steps=steps)
    if price is not None:
        made = replace(made, price=made.total / 3600 * hosts * price)
    if why := _unknown(known, made):
        return replace(made, declined=why)
    shared = step(known, names, batch, by_speed=hosts > 1).seconds
    if shared < 0.95 * found.seconds and not known.sharded:
        made = replace(made, by_speed=shared)
    return _lifted(known, made)


def _unknown(known: Model, made: Forecast) -> str:
    """Why nothing can be said."""
    if made.batch < made.hosts * known.ranks:
        return (
            f"a global batch of {made.batch} has no sample for each of"
            f" {made.hosts * known.ranks} processes"
        )
    if made.hosts == 1:
        return ""
    if not known.probed:
        return "it needs steps on two hosts, and only one is named: -H with two"
    wide = (made.step.high - made.step.low) / 2 / made.step.seconds
    if wide > UNKNOWN:
        return (
            f"between {format_duration(max(made.step.low, 0))} and"
            f" {format_duration(made.step.high)} a step: the probe's steps differ too much"
            " (a busy host?), or a few messages take all the time"
        )
    return ""


def fastest(known: Model, hosts: int, batch: int) -> tuple[str, ...]:
    """The hosts with the shortest step, with the shares that the training asks for."""
    names = known.hosts
    if math.comb(len(names), hosts) <= MOST_CHOICES:
        choices = itertools.combinations(names, hosts)
        return min(choices, key=lambda chosen: step(known, chosen, batch).seconds)
    quick = sorted(names, key=lambda name: known.alone[name].seconds(batch / hosts))
    return tuple(name for name in names if name in quick[:hosts])


def _lifted(known: Model, made: Forecast) -> Forecast:
    """With what would lift the limit."""
    if made.hosts == 1:
        return made
    plain = known.sent == (1.0, 1.0) and known.communication == "exact" and not known.sharded
    if made.step.limit == "link" and plain:
        goal = 1.1 * (made.step.seconds - made.step.link)
        many = made.hosts * known.ranks > 2
        seconds = {name: step(known, made.names, made.batch, bytes_part=parts[many]).seconds
                   for name, parts in BYTES_SENT.items()}  # fmt: skip
        best = next((name for name in BYTES_SENT if seconds[name] <= goal),
                    min(BYTES_SENT, key=seconds.__getitem__))  # fmt: skip
        if seconds[best] < 0.9 * made.step.seconds:
            made = replace(made, communication=best, with_it=seconds[best])
    if made.step.limit in ("link", "small batch") and made.efficiency < GOOD:
        made = replace(made, better_batch=_good_batch(known, made))
    return made


def _good_batch(known: Model, made: Forecast) -> int:
    times = 2
    while times <= MOST_BATCH and made.batch * times <= known.samples:
        batch = made.batch * times
        alone = min(step(known, [name], batch).seconds for name in known.hosts)
        if alone / step(known, made.names, batch).seconds / made.hosts >= GOOD:
            return batch
        times *= 2
    return 0


# -- for people and programs ---------------------------------------------------------------


def advice(one: Forecast, known: Model) -> str:
    """One line on what limits it and what would lift that."""
    if one.declined:
        return f"not forecast: {one.declined}"
    limit = one.step.limit
    words = {
        "computing": "computing",
        "data": "data: more of the time goes to waiting for it than to anything else",
        "link": f"the link: {one.step.link / one.step.seconds:.0%} of a step waits for it",
        "small batch": f"a small batch: {one.step.small / one.step.seconds:.0%} of a step does not"
        " get shorter with fewer samples for each host",
    }[limit]
    parts = [f"limited by {words}"]
    if one.communication and one.with_it is not None:
        parts.append(
            f"--communication {one.communication}: about {format_duration(one.with_it)} a step"
        )
    if one.better_batch:
        parts.append(f"a global batch of {one.better_batch:,} would be {GOOD:.0%} efficient")
    if one.by_speed is not None:
        parts.append(f"shares by speed (--balance auto): {format_duration(one.by_speed)} a step")
    if len(known.hosts) > one.hosts:
        parts.append(f"on {', '.join(one.names)}")
    return "; ".join(parts)


def table(found: Sequence[Forecast], known: Model) -> str:
    """For people; 80 wide at most, a line in words below each number of hosts."""
    money = any(one.price is not None for one in found)
    head = (
        f"{'hosts':<6}{'batch':>8}{'step':>20}{'speed-up':>10}{'efficiency':>12}{'to the end':>14}"
    )
    lines = [head + (f"{'price':>10}" if money else "")]
    for one in found:
        if not one.declined:
            off = (one.step.high - one.step.low) / 2 / one.step.seconds
            row = f"{format_duration(one.step.seconds)} ±{off:.0%}"
            price = f"{_money(one.price):>10}" if one.price is not None else ""
            lines.append(
                f"{one.hosts:<6}{one.batch:>8,}{row:>20}{one.speedup:>10.2f}{one.efficiency:>12.0%}"
                f"{format_duration(one.total):>14}{price}"
            )
        else:
            lines.append(f"{one.hosts:<6}{one.batch:>8,}{'?':>20}")
        lines.append(wrap(f"{'':<6}{advice(one, known)}", 80))
    return "\n".join(lines)


def _money(price: float) -> str:
    """In whole hundredths, but for what is less than a few of them."""
    if 0 < price < 0.001:
        return "<0.001"
    return f"{price:.2g}" if 0 < price < 0.095 else f"{price:,.2f}"


def conclusion(found: Sequence[Forecast]) -> str:
    """Which number of hosts is the fastest, and which is still worth its hosts."""
    said = [one for one in found if not one.declined]
    if not said:
        return "nothing can be forecast"
    quick = min(said, key=lambda one: one.total)
    words = f"fastest: {_hosts(quick.hosts)}, {format_duration(quick.total)} of training"
    worth = max((one for one in said if one.efficiency >= GOOD), key=lambda one: one.hosts,
                default=said[0])  # fmt: skip
    if worth.hosts != quick.hosts:
        words += (
            f"; up to {_hosts(worth.hosts)} at {worth.efficiency:.0%} efficiency,"
            f" {format_duration(worth.total)}"
        )
    return words


def _hosts(count: int) -> str:
    return f"{count} host{'s' * (count != 1)}"


def to_json(found: Sequence[Forecast], known: Model) -> dict[str, Any]:
    """Every number."""
    return {
        "forecasts": [
            {
                **{name: value for name, value in asdict(one).items() if name != "step"},
                **asdict(one.step),
                "limit": "" if one.declined else one.step.limit,
                "total": one.total,
            }
            for one in found
        ],
        "model": {
            "moving": known.moving,
            "delay": known.delay,
            "buckets": known.buckets,
            "balance": known.balance,
            "residual_s": known.residual_s,
            "alone": {name: asdict(one) for name, one in known.alone.items()},
        },
    }


def picture(found: Sequence[Forecast]) -> str:
    """Speed-up over hosts as SVG, with error bars."""
    points = []
    for one in found:
        if not one.declined:
            label = f"{one.hosts}: {one.speedup:.2f}, {one.step.limit}"
            work = one.speedup * one.step.seconds
            low, high = work / one.step.high, work / max(one.step.low, 1e-9)
            points.append(Point(one.hosts, one.speedup, label, low, high))
    most = max(one.hosts for one in found)
    return speedups(points, most, "hosts", "forecast of the speed-up")
