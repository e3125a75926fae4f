"""Shares of the global batch by the speed of the ranks, so that all finish at the same time.

A rank that computes ``n`` samples is taken to need ``cost * (n + overhead)`` seconds: the overhead,
in samples' worth, is what a step costs it whatever its share is, and it stays the same when the
whole machine becomes slower. The cost is a median over recent steps, without waiting for others;
the overhead shows when a share changes. Every rank has the same measurements (``StepTimings``) at
the same step and decides alike: plain arithmetic on Python's floats, and nothing is sent.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from torch import Tensor

from paceline.train.data.order import rank_range
from paceline.train.measure.pace import PARTS, StepTimings

Shares = tuple[int, ...]
"""Samples of each rank in a whole global batch."""

MIN_GAIN = 0.03
"""Least part of a step that a change of shares must win."""
MIN_SUGGESTED_GAIN = 0.15
"""Part of a step to win from which on a job with even shares is told so."""
MIN_SUGGESTED_GAIN_S = 0.005
"""And the least seconds of a step: less is a busy machine's noise, and nobody waits long for it."""

_IMMEDIATE_GAIN = 0.1  # of a step to win: not looked at twice
_COST_STEPS = 24  # steps that a cost is the median of, at most
_MIN_STEPS = 3  # steps that a decision needs
_MIN_BATCH_PART = 0.75  # part of a batch that a step must have to count
_MAX_GROWTH = 4  # times its former share that a rank gets at most
_MAX_FIXED_PART = 0.95  # of a step that is taken for fixed
_MAX_FIRST_FIXED_PART = 0.7  # the same when a share changes for the first time
_MAX_SMALL_CHANGES = 8  # below _IMMEDIATE_GAIN, until a speed changes again
_DROP_STEPS = 200  # steps that a dropped rank rests before it is tried again; doubled each time
_MAX_SLOWDOWN = 1.1  # times the former step: a change of shares was none for the better
_CAP_STEPS = 200  # for which it is not tried again; doubled each time
_MAX_CAP_STEPS = 3200
_MIN_SPEEDUP = 0.8  # times its former cost: what was seen of a rank before holds no longer
_DATA, _COMPUTING, _MOVING, _SESSION_WORK = map(
    PARTS.index, ("data", "computing", "moving", "other")
)


@dataclass(frozen=True, slots=True)
class Advice:
    """Result of an observation.

    Attributes:
        shares: That would be best.
        current_s, proposed_s: Seconds of a step until gradients are exchanged, with the present
            and with the best shares.
        moving_s: Seconds of a step in which bytes move and nothing else happens.
        gain: Part of the step that the best shares would save.
        apply: They are to be taken.
        surplus_rank: A rank without which a step would be faster, though it had the least share.
        reduced_s: Seconds of a step without that rank.
        is_certain: Steps with two different shares were seen of every rank whose share changes, so
            its fixed cost is known. Otherwise ``proposed_s`` assumes that there is none.
    """

    shares: Shares
    current_s: float
    proposed_s: float
    moving_s: float
    gain: float
    apply: bool
    surplus_rank: int | None = None
    reduced_s: float = 0.0
    is_certain: bool = False

    @property
    def step_seconds(self) -> tuple[float, float]:
        """Seconds of a whole step, with the present and the best shares."""
        return self.current_s + self.moving_s, self.proposed_s + self.moving_s


def even_shares(samples: int, ranks: int) -> Shares:
    """Shares that differ by at most one sample."""
    parts = (rank_range(0, samples, rank, ranks) for rank in range(ranks))
    return tuple(end - first for first, end in parts)


def share_bounds(samples: int, shares: Sequence[int], rank: int) -> tuple[int, int]:
    """Returns start and end of a rank's share of so many samples, divided as ``shares`` are.

    Disjoint, and together all of them.
    """
    total, start = sum(shares), sum(shares[:rank])
    return samples * start // total, samples * (start + shares[rank]) // total


def apportion(samples: int, weights: Sequence[float], min_share: int = 1) -> Shares:
    """Whole shares nearest to weights, each at least ``min_share`` if there are enough samples."""
    floor = min(min_share, samples // len(weights))
    total = sum(weights)
    exact = [samples * weight / total for weight in weights]
    shares = [max(floor, math.floor(share)) for share in exact]
    while (missing := samples - sum(shares)) != 0:
        sign = 1 if missing > 0 else -1
        ranks = [r for r in range(len(shares)) if sign > 0 or shares[r] > floor]
        shares[max(ranks, key=lambda r: (sign * (exact[r] - shares[r]), -r))] += sign
    return tuple(shares)


def consolidate(samples: int, ranks: int, weights: Shares | None, min_share: int) -> Shares | None:
    """Returns shares of an epoch's small last batch in which each rank has none or ``min_share``.

    These are ``weights``, the shares of a whole batch, where nobody has too few; else shares of
    this batch, for as many ranks as have enough of it. A single rank gets all, however few.
    """
    rank_weights = weights or (1,) * ranks
    ranges = [share_bounds(samples, rank_weights, rank) for rank in range(ranks)]
    if all(first == end or end - first >= min_share for first, end in ranges):
        return weights
    fast = sorted(
        (rank for rank in range(ranks) if rank_weights[rank]), key=lambda r: -rank_weights[r]
    )
    chosen = sorted(fast[: max(1, samples // min_share)])
    chosen_shares = apportion(samples, [rank_weights[rank] for rank in chosen], min_share)
    share_by_rank = dict(zip(chosen, chosen_shares, strict=True))
    return tuple(share_by_rank.get(rank, 0) for rank in range(ranks))


def fastest_shares(
    samples: int, costs: Sequence[float], overheads: Sequence[float], max_shares: Sequence[float],
    min_share: int = 1, excluded: frozenset[int] = frozenset(),
) -> Shares:  # fmt: skip
    """Returns the shares with which the last rank finishes first.

    Args:
        samples: Of a global batch.
        costs: Seconds of a sample on each rank.
        overheads: Samples' worth that a step costs each rank besides.
        max_shares, min_share: Largest share of each rank, and smallest of all.
        excluded: Ranks that get nothing.
    """
    included = [r for r in range(len(costs)) if r not in excluded]
    floor = min(min_share, samples // len(included))
    shares = [0] * len(costs)

    def fit_until(finish_s: float) -> int:
        """Sets the shares that finish by this time; returns their number of samples."""
        for r in included:
            share = math.floor(finish_s / costs[r] - overheads[r])
            shares[r] = int(max(floor, min(max_shares[r], share)))
        return sum(shares)

    def next_finish(r: int) -> tuple[float, int]:
        """Returns when the rank would finish with one more sample, and the rank."""
        return costs[r] * (shares[r] + 1 + overheads[r]), r

    low, high = 0.0, max(costs[r] * (samples + overheads[r]) for r in included)
    for _ in range(40):
        midpoint = (low + high) / 2
        low, high = (low, midpoint) if fit_until(midpoint) >= samples else (midpoint, high)
    missing = samples - fit_until(low)
    growing = [r for r in included if shares[r] < max_shares[r]] or included
    finish_times = [next_finish(r) for r in growing]
    heapq.heapify(finish_times)
    while missing > 0:
        _, r = finish_times[0]
        shares[r], missing = shares[r] + 1, missing - 1
        if shares[r] >= max_shares[r] and len(finish_times) > 1:
            heapq.heappop(finish_times)
        else:
            heapq.heapreplace(finish_times, next_finish(r))
    while missing < 0:  # the least shares are more than all
        r = max((r for r in included if shares[r] > floor), key=lambda r: costs[r] * shares[r])
        shares[r], missing = shares[r] - 1, missing + 1
    return tuple(shares)


@dataclass(frozen=True, slots=True)
class _ShareCap:
    """A rank that became too slow with a larger share.

    Attributes:
        max_share: Samples that it does in time.
        cost: Seconds of each of them, when it did well.
        end_step, num_steps: Until which step it gets no more, and how many steps that are.
    """

    max_share: int
    cost: float
    end_step: int
    num_steps: int


class _RankSpeed:
    """Measured speed of one rank.

    Attributes:
        overhead: Samples' worth that a step costs besides its samples.
        is_learned: That was seen, and is no longer taken for nothing.
    """

    def __init__(self) -> None:
        self.overhead, self.is_learned = 0.0, False
        self._costs: deque[float] = deque(maxlen=_COST_STEPS)
        self._previous: tuple[float, float] | None = None  # share and seconds before a change

    @property
    def steps(self) -> int:
        return len(self._costs)

    @property
    def cost(self) -> float:
        """Seconds of a sample."""
        return max(median(self._costs), 1e-9)

    @property
    def spread(self) -> float:
        """Standard deviation of a step's cost, as a part of it; odd steps do not count."""
        cost = self.cost
        return 1.4826 * median(abs(sample_cost - cost) for sample_cost in self._costs) / cost

    def seconds(self, share: float) -> float:
        """Returns the seconds of a step with this share."""
        return self.cost * (share + self.overhead)

    def observe(self, shares: Sequence[float], seconds: Sequence[float]) -> bool:
        """Adds steps with these shares; returns whether the speed changed.

        Nothing is learned from steps in which the rank had no samples, as of a small last batch.
        """
        observed = [(n, s) for n, s in zip(shares, seconds, strict=True) if n]
        if not observed:
            return False
        if self._previous is not None:
            self._learn_overhead(median(n for n, _ in observed), median(s for _, s in observed))
        costs = [s / (n + self.overhead) for n, s in observed]
        changed = False
        if len(self._costs) >= _MIN_STEPS and len(costs) >= _MIN_STEPS:
            off = abs(median(costs) - self.cost) / self.cost
            changed = off > max(_IMMEDIATE_GAIN, 4 * self.spread / math.sqrt(len(costs)))
        if changed:
            self._costs.clear()
        self._costs.extend(costs)
        return changed

    def change_share(self, share: float, *, early: bool = False) -> None:
        """Keeps what was measured with this share, before another one is used."""
        self._previous = None
        if self._costs:
            # Most of the first steps of a process take longer than later ones. The difference
            # would be taken for a cost that does not depend on the share.
            cost = min(self._costs) if early else self.cost
            self._previous = (share, cost * (share + self.overhead))
        self._costs.clear()

    def _learn_overhead(self, share: float, seconds: float) -> None:
        """Computes the overhead from steps with two different shares."""
        (former, former_seconds), self._previous = self._previous or (share, seconds), None
        if former < 1 or share < 1 or not min(share, former) / max(share, former) < 0.8:
            return
        smaller, larger = sorted([(former, former_seconds), (share, seconds)])
        ratio = larger[1] / max(smaller[1], 1e-9)
        if not 0.9 < ratio < 1.15 * larger[0] / smaller[0]:
            return  # its speed has changed meanwhile
        # What the larger step takes longer is the cost of its samples; the rest of it is fixed.
        rise = (larger[1] - smaller[1]) / (larger[0] - smaller[0]) * larger[0]
        fixed = min(max(1 - rise / larger[1], 0.0), _MAX_FIXED_PART)
        # A speed that changed at the same time looks like a fixed cost: believed the second time.
        known_part = self.overhead / (self.overhead + larger[0])
        fixed = (known_part + fixed) / 2 if self.is_learned else min(fixed, _MAX_FIRST_FIXED_PART)
        self.overhead, self.is_learned = larger[0] * fixed / (1 - fixed), True

    def state(self) -> list[float]:
        if self._costs:
            return [self.cost, self.overhead]
        if self._previous is not None:  # what it was before its share changed
            share, seconds = self._previous
            return [seconds / max(share + self.overhead, 1e-9), self.overhead]
        return [0.0, self.overhead]


class Controller:
    """Turns measurements into shares. Pure, and the same on every rank.

    Args:
        drop_slow: A rank without which a step would be faster gets nothing to do; never rank 0.
        rest_periods: By dropped rank: the step at which it is tried again, and its steps of rest.

    Attributes:
        rest_periods: As above; for checkpoints.
    """

    def __init__(
        self,
        shares: Shares,
        *,
        min_share: int = 1,
        drop_slow: bool = False,
        rest_periods: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        self.shares, self.min_share, self.drop_slow = shares, min_share, drop_slow
        self._speeds = [_RankSpeed() for _ in shares]
        self._first_step = -1  # the first step with these shares; unknown before the first look
        self._num_observations = 0
        self._sample_size = 0.0  # elements of a sample
        self._num_small_changes = 0
        self._had_gain = False  # the look before saw something to win
        self._surplus_rank: int | None = None  # by the look before
        self.rest_periods = dict(rest_periods or {})
        self._previous: tuple[Shares, list[float]] | None = None  # with each rank's seconds
        self._caps: dict[int, _ShareCap] = {}
        self._released_caps: frozenset[int] = frozenset()  # ranks whose cap has ended

    def observe(self, timings: StepTimings) -> Advice | None:
        """Evaluates timings; ``None`` while there are too few."""
        self._num_observations += 1
        if self._first_step < 0:
            self._first_step = timings.first_step
        # The first step after a change starts things up, and a look may reach behind it.
        start = max(0, -(-(self._first_step + 1 - timings.first_step) // timings.stride))
        seconds, samples = timings.seconds[:, start:], timings.samples[:, start:]
        # The last batch of an epoch is small, and its samples cost more.
        is_full = samples.sum(dim=0) >= _MIN_BATCH_PART * sum(self.shares)
        seconds, samples = seconds[:, is_full], samples[:, is_full]
        if not samples.shape[1]:
            return None
        busy = seconds[:, :, _DATA] + seconds[:, :, _COMPUTING] + seconds[:, :, _SESSION_WORK]
        if timings.elements is not None:
            busy = busy / self._sizes(timings.elements[:, start:][:, is_full], samples)
        changed = False
        for rank, speed in enumerate(self._speeds):
            if self.shares[rank]:
                changed |= speed.observe(samples[rank].tolist(), busy[rank].tolist())
        if changed:
            self._num_small_changes = 0
        if any(s.steps < _MIN_STEPS for r, s in enumerate(self._speeds) if self.shares[r]):
            return None
        moving = median(seconds[:, :, _MOVING].min(dim=0).values.tolist())
        return self._advice(moving, timings.first_step + timings.stride * timings.samples.shape[1])

    def _sizes(self, elements: Tensor, samples: Tensor) -> Tensor:
        """Returns sample sizes of each step, relative to the first observation.

        Sentences of different lengths are no change of speed.
        """
        sizes = elements.sum(dim=0) / samples.sum(dim=0).clamp(min=1)
        self._sample_size = self._sample_size or float(sizes.median())
        return sizes.clamp(min=1) / max(self._sample_size, 1.0)

    def apply(self, shares: Shares, step: int) -> None:
        """Uses these shares from a step on."""
        measured = list(zip(self._speeds, self.shares, strict=True))
        self._previous = None
        if all(speed.steps for speed, share in measured if share):
            seconds = [speed.seconds(share) if share else 0.0 for speed, share in measured]
            self._previous = self.shares, seconds
        for rank, speed in enumerate(self._speeds):
            if shares[rank] != self.shares[rank]:
                speed.change_share(self.shares[rank], early=self._num_observations == 1)
        self.shares, self._first_step, self._had_gain = shares, step, False

    def speeds(self) -> list[list[float]]:
        """Returns seconds of a sample (0: unknown) and overhead in samples, of each rank."""
        return [speed.state() for speed in self._speeds]

    def _advice(self, moving_s: float, step: int) -> Advice:
        speeds = self._speeds
        excluded = frozenset(r for r, share in enumerate(self.shares) if not share)
        included = [r for r in range(len(speeds)) if r not in excluded]
        current_s = max(speeds[r].seconds(self.shares[r]) for r in included)
        if (regression := self._regression(step)) is not None:
            shares, seconds = regression
            gain = (current_s - seconds) / (current_s + moving_s)
            return Advice(shares, current_s, seconds, moving_s, gain, True)
        self._release_caps(step)
        proposed = self.shares
        if self._may_gain(included, current_s, moving_s):
            proposed = self._optimal_shares(excluded)
        proposed_s = max(speeds[r].seconds(proposed[r]) for r in included)
        gain = max(0.0, (current_s - proposed_s) / (current_s + moving_s))
        slowest = max(included, key=lambda r: speeds[r].seconds(self.shares[r]))
        # What may be chance: the slowest of many has been unlucky, too.
        spread = sum(speeds[r].spread for r in included) / len(included)
        chance = 1.25 * spread / math.sqrt(speeds[slowest].steps)
        chance *= 2 + math.sqrt(2 * math.log(len(included)))
        surplus_rank, reduced_s = self._find_surplus_rank(excluded, proposed_s, moving_s)
        reported_rank = surplus_rank if surplus_rank == self._surplus_rank else None
        self._surplus_rank = surplus_rank
        advice = Advice(
            proposed, current_s, proposed_s, moving_s, gain, False, reported_rank, reduced_s
        )
        if reported_rank and self.drop_slow:  # never rank 0, which all need
            former = self.rest_periods.get(reported_rank)
            drop_steps = 2 * former[1] if former else _DROP_STEPS
            self.rest_periods[reported_rank] = step + drop_steps, drop_steps
            shares = self._optimal_shares(excluded | {reported_rank})
            return replace(advice, shares=shares, apply=True)
        returning = [r for r in excluded if self.rest_periods.get(r, (0, 0))[0] <= step]
        if returning:  # how fast it is now shows only when it computes
            weights = [
                max(self.min_share, share) if r in returning else share
                for r, share in enumerate(proposed)
            ]
            shares = apportion(sum(proposed), weights, 0)
            return Advice(shares, current_s, current_s, moving_s, 0.0, True)
        large, small = gain >= _IMMEDIATE_GAIN + chance, gain >= max(MIN_GAIN, chance)
        small = small or gain >= MIN_SUGGESTED_GAIN + chance / 2  # no chance if seen twice, either
        is_confirmed_gain = (
            self._had_gain and small and self._num_small_changes < _MAX_SMALL_CHANGES
        )
        apply = proposed != self.shares and (large or is_confirmed_gain)
        self._had_gain = small
        self._num_small_changes += apply and not large
        is_certain = all(speeds[r].is_learned for r in included if proposed[r] != self.shares[r])
        return replace(advice, apply=apply, is_certain=is_certain)

    def _may_gain(self, included: Sequence[int], current_s: float, moving_s: float) -> bool:
        """Returns whether any change of shares can be worth it; cheaper than finding the best."""
        rate = sum(1 / self._speeds[r].cost for r in included)
        samples = sum(self.shares) + sum(self._speeds[r].overhead for r in included)
        return current_s - samples / rate >= MIN_GAIN * (current_s + moving_s)

    def _regression(self, step: int) -> tuple[Shares, float] | None:
        """Returns the former shares and their seconds if steps became longer since.

        What a rank is allowed of a CPU by the 0.1 s is such a case: a share that fits into that is
        computed at full speed, and one a little larger waits for the next.
        """
        former, self._previous = self._previous, None
        if former is None:
            return None
        shares, seconds = former
        longest_s = max(seconds)
        late_ranks = [
            rank
            for rank, share in enumerate(self.shares)
            if share > shares[rank] > 0
            and self._speeds[rank].seconds(share) > _MAX_SLOWDOWN * longest_s
        ]
        for rank in late_ranks:
            cap = self._caps.get(rank)
            num_steps = min(_MAX_CAP_STEPS, 2 * cap.num_steps) if cap else _CAP_STEPS
            sample_s = self._speeds[rank].seconds(self.shares[rank]) / self.shares[rank]
            # that it does in time at its worst
            max_share = max(shares[rank], int(longest_s / sample_s))
            self._caps[rank] = _ShareCap(
                max_share, seconds[rank] / shares[rank], step + num_steps, num_steps
            )
        return (shares, longest_s) if late_ranks else None

    def _release_caps(self, step: int) -> None:
        """Updates which capped ranks may have larger shares again."""
        for rank, cap in self._caps.items():
            share, speed = self.shares[rank], self._speeds[rank]
            if share and speed.seconds(share) / share < _MIN_SPEEDUP * cap.cost:
                self._caps[rank] = replace(cap, end_step=step)
        self._released_caps = frozenset(
            rank for rank, cap in self._caps.items() if cap.end_step <= step
        )

    def _optimal_shares(self, excluded: frozenset[int]) -> Shares:
        speeds, samples = self._speeds, sum(self.shares)
        even_share = samples / len(speeds)
        max_shares = [
            max(_MAX_GROWTH * share, even_share) if share else math.inf for share in self.shares
        ]
        for rank, cap in self._caps.items():
            if rank not in self._released_caps:
                max_shares[rank] = min(max_shares[rank], cap.max_share)
        included = [r for r in range(len(speeds)) if r not in excluded]
        if sum(max_shares[r] for r in included) < samples:
            max_shares = [math.inf] * len(speeds)
        costs = [1.0 if r in excluded else speed.cost for r, speed in enumerate(speeds)]
        overheads = [speed.overhead for speed in speeds]
        return fastest_shares(samples, costs, overheads, max_shares, self.min_share, excluded)

    def _find_surplus_rank(
        self, excluded: frozenset[int], proposed_s: float, moving_s: float
    ) -> tuple[int | None, float]:
        """Returns a rank without which steps would be faster, and their seconds."""
        included = [r for r in range(len(self.shares)) if r not in excluded]
        slowest = max(included, key=lambda r: self._speeds[r].seconds(self.min_share))
        if len(included) < 2 or self._speeds[slowest].seconds(self.min_share) < 0.999 * proposed_s:
            return None, 0.0  # another rank is the last to finish
        shares = self._optimal_shares(excluded | {slowest})
        reduced_s = max(self._speeds[r].seconds(shares[r]) for r in included if r != slowest)
        is_worthwhile = (proposed_s - reduced_s) / (proposed_s + moving_s) >= MIN_GAIN
        return (slowest if is_worthwhile else None), reduced_s


def shares_by_host(
    weights: Mapping[str, float], hosts: Sequence[str], samples: int, min_share: int = 1
) -> Shares:
    """Returns shares in proportion to weights of hosts; ranks of a host share its part.

    Args:
        weights: By the name of the host. Some may not be there now; one that has none, as it came
            later, gets their mean: only of what was stated, for it knows nothing else and has to
            find the same.
        hosts: Of each rank.
        samples, min_share: Of a global batch, and of a rank at least.
    """
    mean_weight = sum(weights.values()) / len(weights)
    rank_weights = [weights.get(host, mean_weight) / hosts.count(host) for host in hosts]
    return apportion(samples, rank_weights, min_share)


def resumed_shares(
    state: Mapping[str, Any], hosts: Sequence[str], samples: int, min_share: int = 1
) -> Shares | None:
    """Returns a checkpoint's shares for these ranks; ``None`` if it has none for them.

    On the same hosts in the same order those that it was made with; otherwise by the speeds that
    the hosts had, if all of them were there.
    """
    shares, saved_hosts = state.get("shares"), list(state.get("hosts", ()))
    if not shares:
        return None
    if saved_hosts == list(hosts):
        return tuple(shares) if sum(shares) == samples else apportion(samples, shares, 0)
    speeds_by_host: dict[str, list[list[float]]] = {}
    for host, speed in zip(saved_hosts, state.get("speeds", ()), strict=False):
        if speed[0] > 0:
            speeds_by_host.setdefault(host, []).append(speed)
    if not all(host in speeds_by_host for host in hosts):
        return None
    costs = [median(speed[0] for speed in speeds_by_host[host]) for host in hosts]
    overheads = [median(speed[1] for speed in speeds_by_host[host]) for host in hosts]
    return fastest_shares(samples, costs, overheads, [math.inf] * len(hosts), min_share)
