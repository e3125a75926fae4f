"""Models the time of a training step on any hosts, fitted to a few steps on one and on two. Pure.

A step waits for data (D), computes (C) and averages gradients over the link (N). C and D depend on
a host's share of the global batch, and are measured on single hosts with several batches. N depends
on the bytes that each host sends in an all-reduce, ``2 (n - 1) / n`` of the gradients', and on the
latency of a message; both are measured between two hosts. How much of N is hidden behind C depends
on the number of buckets (:mod:`paceline.spec.training.step_time`). A constant makes the model exact
for the steps on two hosts.

Other laws fit two hosts as well. Their spread and that of the steps make the error bar.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.spec.training.step_time import StepTime

MIN_SPREAD = 0.02  # relative; a step time is never known better
MIN_SPEED_RATIO = 1.25  # hosts whose computing times differ by more have different speeds
EXTRAPOLATION_ERROR = 0.06  # relative error of the laws beyond the probed hosts (bench/forecast)
ASSUMED_DELAY_S, ASSUMED_SPREAD = 0.001, 0.1  # if only the rate of the link is known
RING_STALL_S = 0.005  # gloo's loss in a ring of short messages
MAX_STALLED_BYTES, MIN_STALLED_RANKS = 1 << 18, 4  # when that occurs: per rank and bucket
SHARDED_BYTES_FACTOR = 1.5  # parameters are gathered twice and gradients scattered once

Balance = str | Mapping[str, float]
"""Shares of a batch: ``even``, ``auto`` (by speed), or a weight for each host."""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Measured steps of one global batch.

    Attributes:
        batch: Samples of a step over all hosts.
        seconds: Median time of a step.
        data: Median time of waiting for data within a step, in seconds.
        spread: Relative error of the median.
    """

    batch: int
    seconds: float
    data: float = 0.0
    spread: float = MIN_SPREAD


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """A measured all-reduce over all ranks.

    Attributes:
        bytes: Size of each rank's tensor.
        seconds: Its time.
        delay: Time of an all-reduce of a single number, in seconds.
    """

    bytes: int
    seconds: float
    delay: float


@dataclass(frozen=True, slots=True)
class Probe:
    """A few steps on some hosts, as the training recorded them (``steps.json``).

    Attributes:
        hosts: The host of each rank.
        samples: Samples of an epoch.
        steps: Steps of the whole training with that batch.
        bytes: Size of the gradients.
        timings: A timing for each tested batch.
        link: The all-reduce; ``None`` for a single rank.
        sharded: Parameters are sharded over the ranks.
        sent: Bytes sent as a fraction of the gradients', with two ranks and with more.
        balance: The training's shares. The probe's own are even.
        computing: Computing time of a step of the largest batch by host, in seconds; empty if
            unknown.
    """

    hosts: tuple[str, ...]
    samples: int
    global_batch: int
    steps: int
    bytes: int
    buckets: int
    timings: tuple[StepTiming, ...]
    link: LinkTiming | None = None
    sharded: bool = False
    device: str = "cpu"
    sent: tuple[float, float] = (1.0, 1.0)
    balance: Balance = "even"
    communication: str = "exact"
    computing: Mapping[str, float] = field(default_factory=dict)

    @property
    def speed_difference(self) -> tuple[str, str, float] | None:
        """The fastest and the slowest host with the ratio of their times, if they differ."""
        if len(self.computing) < 2:
            return None
        fastest, *_, slowest = sorted(self.computing, key=self.computing.__getitem__)
        ratio = self.computing[slowest] / self.computing[fastest]
        return (fastest, slowest, ratio) if ratio >= MIN_SPEED_RATIO else None

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Probe:
        """Parses the content of ``steps.json``; raises ValueError if it is invalid."""
        try:
            by_batch: dict[int, list[Mapping[str, Any]]] = {}
            for step in record["steps_done"]:
                by_batch.setdefault(int(step["batch"]), []).append(step)
            link = record["exchange"]
            return cls(
                tuple(map(str, record["hosts"])),
                int(record["samples"]),
                int(record["global_batch"]),
                int(record["steps"]),
                int(record["bytes"]),
                int(record["buckets"]),
                tuple(_step_timing(batch, steps) for batch, steps in by_batch.items()),
                link
                and LinkTiming(int(link["bytes"]), float(link["seconds"]), float(link["delay"])),
                bool(record["sharded"]),
                str(record["device"]),
                (float(record["sent"][0]), float(record["sent"][1])),
                _balance(record.get("balance", "even")),
                str(record.get("communication", "exact")),
                _computing(record["hosts"], by_batch[max(by_batch)]),  # ValueError without steps
            )
        except (LookupError, TypeError, OverflowError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None


def _balance(value: Any) -> Balance:
    if isinstance(value, Mapping):
        return {str(host): float(weight) for host, weight in value.items()}
    return "auto" if value == "auto" else "even"


def _computing(hosts: Sequence[Any], steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The time of each host's slowest rank; empty if it is unknown for any host."""
    by_host: dict[str, float] = {}
    for rank, host in enumerate(map(str, hosts)):
        times = [float(step["computing"][rank]) for step in steps if "computing" in step]
        times = [time for time in times if time > 0]  # short steps are not all recorded
        by_host[host] = max(by_host.get(host, 0.0), statistics.median(times) if times else 0.0)
    return by_host if all(by_host.values()) else {}


def _step_timing(batch: int, steps: Sequence[Mapping[str, Any]]) -> StepTiming:
    """The timing of equal steps; the slowest rank determines the time of each."""
    seconds = [max(map(float, step["seconds"])) for step in steps]
    data = [max(map(float, step["data"])) for step in steps]
    median = statistics.median(seconds)
    deviation = statistics.median(abs(time - median) for time in seconds)
    spread = 2 * deviation / max(median, 1e-9) / math.sqrt(len(seconds))
    return StepTiming(batch, median, min(statistics.median(data), median), max(spread, MIN_SPREAD))


@dataclass(frozen=True, slots=True)
class HostTiming:
    """The time that a single host needs for its share of a batch.

    Attributes:
        points: Pairs of samples and seconds of computing, by samples.
        data: Seconds of waiting for data per sample.
        spread: Relative error of the seconds.
    """

    points: tuple[tuple[float, float], ...]
    data: float = 0.0
    spread: float = MIN_SPREAD

    @classmethod
    def fit(cls, timings: Sequence[StepTiming]) -> HostTiming:
        """Fits the timings of a single host with one batch or several."""
        ordered = sorted(timings, key=lambda timing: timing.batch)
        data = sum(t.data for t in ordered) / sum(t.batch for t in ordered)
        # more samples never take less time
        seconds = itertools.accumulate((t.seconds - t.data for t in ordered), max)
        points = tuple(zip((t.batch for t in ordered), seconds, strict=True))
        return cls(points, data, max(t.spread for t in ordered))

    @property
    def fixed_s(self) -> float:
        """Seconds of computing that do not depend on the share."""
        if len(self.points) < 2:
            return 0.0
        (x0, y0), (x1, y1) = self.points[:2]
        return max(0.0, y0 - x0 * (y1 - y0) / (x1 - x0))

    def seconds(self, share: float) -> float:
        """Seconds of computing so many samples, by linear interpolation and extrapolation."""
        if len(self.points) < 2:
            ((samples, seconds),) = self.points
            return seconds * share / samples
        if share < self.points[0][0]:
            (samples, seconds), fixed = self.points[0], self.fixed_s
            return fixed + (seconds - fixed) * share / samples
        pairs = list(itertools.pairwise(self.points))
        (x0, y0), (x1, y1) = next((pair for pair in pairs if share <= pair[1][0]), pairs[-1])
        return y0 + (share - x0) * (y1 - y0) / (x1 - x0)

    def samples_in(self, seconds: float) -> float:
        """Samples that can be computed in so many seconds."""
        low, high = 0.0, 1.0
        while self.seconds(high) < seconds and high < 1e12:
            high *= 2
        for _ in range(60):
            centre = (low + high) / 2
            low, high = (centre, high) if self.seconds(centre) < seconds else (low, centre)
        return low


def ring_volume(ranks: int) -> float:
    """Bytes that each rank sends in a ring all-reduce, as a fraction of the tensor's."""
    return 2 * (ranks - 1) / ranks


@dataclass(frozen=True, slots=True)
class StepModel:
    """Everything that the probes have shown.

    Attributes:
        host_timings: The timing of each host, alone.
        batch, steps, samples: Global batch, steps of the training, samples of an epoch.
        moving: Seconds of an all-reduce of the gradients between two hosts, without latency.
        delay: Seconds of an all-reduce of one number between two hosts.
        bytes: Size of the gradients.
        residual_s: Seconds of a step on two hosts besides the model's; may be negative.
        rates: Bits a second between hosts, if known.
        probed: The two probed hosts; empty if only one was.
        sent: Bytes sent as a fraction of the gradients', with two ranks and with more.
        spread: Relative error of the steps on two hosts.
    """

    host_timings: Mapping[str, HostTiming]
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
    spread: float = MIN_SPREAD
    device: str = "cpu"
    balance: Balance = "even"
    communication: str = "exact"
    sharded: bool = False

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self.host_timings)

    def link_slowdown(self, hosts: Sequence[str]) -> float:
        """How many times slower the slowest link of these hosts is than that of the probed ones."""
        slowest, probed_rate = self._slowest_rate(hosts), self._slowest_rate(self.probed)
        if slowest is None or probed_rate is None:
            return 1.0
        slowdown = probed_rate / max(slowest, 1e-9)
        return slowdown if abs(slowdown - 1) > 0.15 else 1.0  # short transfers are no more exact

    def _slowest_rate(self, hosts: Sequence[str]) -> float | None:
        pairs = itertools.permutations(hosts, 2)
        return min((self.rates[pair] for pair in pairs if pair in self.rates), default=None)

    def exchange_s(self, hosts: int, bytes_fraction: float = 1.0, slowdown: float = 1.0) -> float:
        """Seconds of averaging gradients among so many hosts."""
        if hosts < 2:
            return 0.0
        ranks = hosts * self.ranks
        volume = ring_volume(ranks) / ring_volume(2 * self.ranks) * self.sent[ranks > 2]
        latency = self.delay * (hosts - 1) + self.stall_s(hosts)
        return self.moving * volume * bytes_fraction * slowdown + latency

    def stall_s(self, hosts: int) -> float:
        """Seconds that gloo loses between the rounds of a ring of short messages.

        It does not occur between two ranks; with more it was seen on every tested machine.
        """
        ranks = hosts * self.ranks
        uses_gloo = self.device == "cpu" and self.moving > 0
        is_short = self.bytes / self.buckets / ranks < MAX_STALLED_BYTES
        is_unseen = ranks >= MIN_STALLED_RANKS > 2 * self.ranks  # not part of the probe on two
        return RING_STALL_S if uses_gloo and is_short and is_unseen else 0.0

    def overlapped_s(self, computing_s: float, exchange_s: float) -> float:
        """Seconds of computing and averaging gradients at the same time."""
        return StepTime(computing_s, exchange_s, self.buckets).seconds


def fit_model(single_probes: Mapping[str, Probe], pair_probe: Probe | None,
              rates: Mapping[tuple[str, str], float] | None = None,
              twins: Mapping[str, str] | None = None,
              link_rate: float | None = None) -> StepModel:  # fmt: skip
    """Fits a model to the probes.

    Args:
        single_probes: Steps on single hosts.
        pair_probe: Steps on two hosts; ``None`` if there is only one.
        rates: Bits a second between hosts.
        twins: For hosts that were not probed alone, an equal host that was.
        link_rate: Bits a second of a link that is assumed, without steps on two hosts.
    """
    timings = {name: HostTiming.fit(probe.timings) for name, probe in single_probes.items()}
    for name, twin in (twins or {}).items():
        timings.setdefault(name, timings[twin])
    first = next(iter(single_probes.values()))
    model = StepModel(timings, len(first.hosts), first.global_batch, first.steps, first.samples,
                      balance=first.balance)  # fmt: skip
    if link_rate is not None:
        moving = ring_volume(2 * model.ranks) * first.bytes * 8 / link_rate
        return replace(model, moving=moving, delay=ASSUMED_DELAY_S, bytes=first.bytes,
                       device=first.device, spread=ASSUMED_SPREAD)  # fmt: skip
    if pair_probe is None or pair_probe.link is None:
        return model
    link, names = pair_probe.link, tuple(dict.fromkeys(pair_probe.hosts))
    num_bytes = pair_probe.bytes * (SHARDED_BYTES_FACTOR if pair_probe.sharded else 1.0)
    model = replace(
        model,
        moving=max(link.seconds - link.delay, 0.0) * num_bytes / max(link.bytes, 1),
        delay=link.delay,
        bytes=pair_probe.bytes,
        buckets=pair_probe.buckets,
        rates=rates or {},
        probed=names,
        sent=pair_probe.sent,
        sharded=pair_probe.sharded,
        communication=pair_probe.communication,
        device=pair_probe.device,
        spread=max(timing.spread for timing in pair_probe.timings),
    )
    pair = [timings.get(name, next(iter(timings.values()))) for name in names]
    residuals = []  # independent of the share
    for timing in pair_probe.timings:
        share = timing.batch / len(names)
        computing = max(host.seconds(share) for host in pair)
        data = max(host.data for host in pair) * share
        expected = model.overlapped_s(computing, model.exchange_s(2))
        residuals.append(timing.seconds - data - expected)
    return replace(model, residual_s=statistics.fmean(residuals))


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """The estimated time of a step and its parts, in seconds.

    Attributes:
        seconds: The whole step.
        low, high: Its error bar.
        data: Waiting for data.
        computing: Computing that depends on the share.
        small: Computing that does not depend on the share.
        link: Time that averaging gradients adds.
    """

    seconds: float
    low: float
    high: float
    data: float
    computing: float
    small: float
    link: float

    @property
    def relative_error(self) -> float:
        return (self.high - self.low) / 2 / self.seconds

    @property
    def limit(self) -> str:
        """The name of the largest part."""
        parts = {"computing": self.computing, "link": self.link, "small batch": self.small,
                 "data": self.data}  # fmt: skip
        return max(parts, key=parts.__getitem__)


def estimate_step(model: StepModel, hosts: Sequence[str], batch: float, *, by_speed: bool = False,
                  bytes_fraction: float = 1.0) -> StepEstimate:  # fmt: skip
    """Estimates a step on these hosts.

    Args:
        batch: Samples of the step, over all hosts.
        by_speed: Shares follow the hosts' speed instead of the training's setting.
        bytes_fraction: Bytes sent, as a fraction of those in the probe.
    """
    timings = [model.host_timings[name] for name in hosts]
    num_hosts = len(timings)
    shares = [batch / num_hosts] * num_hosts
    if not isinstance(model.balance, str):
        shares = shares_by_weight(model.balance, hosts, batch)
    if by_speed or model.balance == "auto":
        shares = shares_by_speed(timings, batch)
    computing = max(host.seconds(share) for host, share in zip(timings, shares, strict=True))
    data = max(host.data * share for host, share in zip(timings, shares, strict=True))
    fixed = min(max(host.fixed_s for host in timings), computing)
    error = (computing + data) * max(host.spread for host in timings)
    if num_hosts < 2:
        seconds = computing + data
        return StepEstimate(seconds, seconds - error, seconds + error, data, computing - fixed,
                            fixed, 0.0)  # fmt: skip
    exchange = model.exchange_s(num_hosts, bytes_fraction, model.link_slowdown(hosts))
    share = batch / num_hosts
    estimates = [max(computing, seconds) + data for seconds in
                 _overlapped_times(model, share, computing, exchange, num_hosts)]  # fmt: skip
    seconds = estimates[0]
    error = max(seconds * model.spread, error)
    if num_hosts > len(model.probed):
        error += EXTRAPOLATION_ERROR * seconds
    return StepEstimate(seconds, min(estimates) - error, max(estimates) + error, data,
                        computing - fixed, fixed, seconds - computing - data)  # fmt: skip


def shares_by_weight(weights: Mapping[str, float], hosts: Sequence[str],
                     batch: float) -> list[float]:  # fmt: skip
    """Samples for each host; a host without a weight has the mean of all weights."""
    default = statistics.fmean(weights.values()) if weights else 1.0
    values = [weights.get(name, default) for name in hosts]
    return [batch * value / sum(values) for value in values]


def shares_by_speed(timings: Sequence[HostTiming], batch: float) -> list[float]:
    """Samples for each host, so that all take the same time."""
    low, high = 0.0, max(host.seconds(batch) for host in timings)
    for _ in range(60):
        centre = (low + high) / 2
        suffices = sum(host.samples_in(centre) for host in timings) >= batch
        low, high = (low, centre) if suffices else (centre, high)
    shares = [host.samples_in(high) for host in timings]
    return [share * batch / max(sum(shares), 1e-12) for share in shares]


def _overlapped_times(model: StepModel, share: float, computing: float, exchange: float,
                      hosts: int) -> tuple[float, ...]:  # fmt: skip
    """Seconds of a step, without waiting for data, by laws that all fit the steps on two hosts.

    The first gives the estimate, the others the error bar.
    """
    pair_exchange = model.exchange_s(2)
    # Buckets are sent while the next gradients are computed; the residual is constant.
    by_buckets = model.overlapped_s(computing, exchange) + model.residual_s
    # As many seconds of the exchange are hidden as on two hosts.
    single = model.host_timings[model.probed[0]].seconds(share) if model.probed else computing
    hidden = single + pair_exchange - model.overlapped_s(single, pair_exchange)
    fixed_overlap = computing + exchange - hidden + model.residual_s
    # The residual grows in proportion to the exchange.
    growth = model.exchange_s(hosts) / max(pair_exchange, 1e-12) - 1
    growing = by_buckets + max(model.residual_s, 0.0) * growth
    # No time is lost on short messages.
    unstalled = max(exchange - model.stall_s(hosts), 0.0)
    without_stall = model.overlapped_s(computing, unstalled) + model.residual_s
    return by_buckets, fixed_overlap, growing, without_stall
