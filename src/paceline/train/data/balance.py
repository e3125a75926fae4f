"""Shares of the global batch by the speed of the ranks, so that all finish at the same time.

A rank that computes ``n`` samples is taken to need ``cost * (n + overhead)`` seconds: the overhead,
in samples' worth, is what a step costs it whatever its share is, and it stays the same when the
whole machine becomes slower. The cost is a median over recent steps, without waiting for others;
the overhead shows when a share changes. Every rank has the same measurements (a ``Look``) at the
same step and decides alike: plain arithmetic on Python's floats, and nothing is sent.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import Tensor

from paceline.train.data.order import part
from paceline.train.measure.pace import PARTS, Look

Shares = tuple[int, ...]
"""Samples of each rank in a whole global batch."""

WORTH = 0.03
"""Least part of a step that a change of shares must win."""
OFFERED = 0.15
"""Part of a step to win from which on a job with even shares is told so."""
OFFERED_S = 0.005
"""And the least seconds of a step: less is a busy machine's noise, and nobody waits long for it."""

_AT_ONCE = 0.1  # of a step to win: not looked at twice
_WINDOW = 24  # steps that a cost is the median of, at most
_FEWEST = 3  # steps that a decision needs
_WHOLE = 0.75  # part of a batch that a step must have to count
_GROWTH = 4  # times its former share that a rank gets at most
_STEADY, _BELIEVED = 0.95, 0.7  # most of a step that is taken for fixed; at first
_SMALL_CHANGES = 8  # below _AT_ONCE, until a speed changes again
_REST = 200  # steps that a dropped rank rests before it is tried again; doubled each time
_WORSE = 1.1  # times the former step: a change of shares was none for the better
_HELD, _LONGEST = 200, 3200  # steps for which it is not tried again; doubled each time, to so many
_QUICKER = 0.8  # times its former cost: what was seen of a rank before holds no longer
_DATA, _COMPUTING, _MOVING, _OTHER = map(PARTS.index, ("data", "computing", "moving", "other"))


@dataclass(frozen=True, slots=True)
class Advice:
    """What a look came to.

    Attributes:
        shares: That would be best.
        now, then: Seconds of a step until gradients are exchanged, with the present and the best
            shares.
        moving: Seconds of a step in which bytes move and nothing else happens.
        win: Part of the step that the best shares would save.
        act: They are to be taken.
        useless: A rank without which a step would be faster, though it had the least share.
        without: Seconds of a step without that rank.
        sure: Of all ranks whose share would change steps with two shares were seen: so it is known
            what a step costs them whatever their share is. Otherwise ``then`` is what it is at
            best: if all of a rank's time follows its samples.
    """

    shares: Shares
    now: float
    then: float
    moving: float
    win: float
    act: bool
    useless: int | None = None
    without: float = 0.0
    sure: bool = False

    @property
    def whole(self) -> tuple[float, float]:
        """Seconds of a whole step, with the present and the best shares."""
        return self.now + self.moving, self.then + self.moving


def even(samples: int, ranks: int) -> Shares:
    """Shares that differ by at most one sample."""
    parts = (part(0, samples, rank, ranks) for rank in range(ranks))
    return tuple(end - first for first, end in parts)


def bounds(samples: int, shares: Sequence[int], rank: int) -> tuple[int, int]:
    """Where the share of a rank begins and ends in so many samples, divided as ``shares`` are.

    Disjoint, and together all of them.
    """
    total, before = sum(shares), sum(shares[:rank])
    return samples * before // total, samples * (before + shares[rank]) // total


def apportioned(samples: int, weights: Sequence[float], least: int = 1) -> Shares:
    """Whole shares nearest to weights; each at least ``least`` where there are enough samples."""
    floor = min(least, samples // len(weights))
    total = sum(weights)
    exact = [samples * one / total for one in weights]
    shares = [max(floor, math.floor(one)) for one in exact]
    while (missing := samples - sum(shares)) != 0:
        sign = 1 if missing > 0 else -1
        ranks = [r for r in range(len(shares)) if sign > 0 or shares[r] > floor]
        shares[max(ranks, key=lambda r: (sign * (exact[r] - shares[r]), -r))] += sign
    return tuple(shares)


def gathered(samples: int, ranks: int, by: Shares | None, least: int) -> Shares | None:
    """The shares of a small batch in which no rank has a few samples, but fewer than it needs.

    Args:
        samples: Of the batch, the last of an epoch.
        ranks: How many there are.
        by: Shares of a whole global batch; ``None``: all alike.
        least: Samples that a rank needs, if it has any.

    Returns:
        ``by`` where nobody has too few; else shares of this batch, for as many ranks as have
        enough of it. A single rank gets all, however few they are.
    """
    weights = by or (1,) * ranks
    cuts = [bounds(samples, weights, rank) for rank in range(ranks)]
    if all(first == end or end - first >= least for first, end in cuts):
        return by
    fast = sorted((rank for rank in range(ranks) if weights[rank]), key=lambda r: -weights[r])
    some = sorted(fast[: max(1, samples // least)])
    counts = apportioned(samples, [weights[rank] for rank in some], least)
    given = dict(zip(some, counts, strict=True))
    return tuple(given.get(rank, 0) for rank in range(ranks))


def fastest(
    samples: int, costs: Sequence[float], overheads: Sequence[float], most: Sequence[float],
    least: int = 1, out: frozenset[int] = frozenset(),
) -> Shares:  # fmt: skip
    """The shares with which the last rank finishes first.

    Args:
        samples: Of a global batch.
        costs: Seconds of a sample on each rank.
        overheads: Samples' worth that a step costs each rank besides.
        most: Largest share of each rank.
        least: Smallest share.
        out: Ranks that get nothing.
    """
    inside = [r for r in range(len(costs)) if r not in out]
    floor = min(least, samples // len(inside))
    shares = [0] * len(costs)

    def fit(moment: float) -> int:
        """All finish by this moment; how many samples that are."""
        for r in inside:
            whole = math.floor(moment / costs[r] - overheads[r])
            shares[r] = int(max(floor, min(most[r], whole)))
        return sum(shares)

    low, high = 0.0, max(costs[r] * (samples + overheads[r]) for r in inside)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if fit(middle) >= samples else (middle, high)
    missing = samples - fit(low)
    late = [(costs[r] * (shares[r] + 1 + overheads[r]), r) for r in inside if shares[r] < most[r]]
    late = late or [(costs[r] * (shares[r] + 1 + overheads[r]), r) for r in inside]
    heapq.heapify(late)
    while missing > 0:
        _, r = late[0]
        shares[r], missing = shares[r] + 1, missing - 1
        if shares[r] >= most[r] and len(late) > 1:
            heapq.heappop(late)
        else:
            heapq.heapreplace(late, (costs[r] * (shares[r] + 1 + overheads[r]), r))
    while missing < 0:  # the least shares are more than all
        r = max((r for r in inside if shares[r] > floor), key=lambda r: costs[r] * shares[r])
        shares[r], missing = shares[r] - 1, missing + 1
    return tuple(shares)


@dataclass(frozen=True, slots=True)
class _Hold:
    """A rank that would not do with more.

    Attributes:
        most: Samples that it does in time.
        cost: Seconds of each of them, when it did well.
        until, rest: Until which step it gets no more, and how many steps that are.
    """

    most: int
    cost: float
    until: int
    rest: int


class _Speed:
    """What is known of one rank's speed.

    Attributes:
        overhead: Samples' worth that a step costs besides its samples.
        learned: That was seen, and is no longer taken for nothing.
    """

    def __init__(self) -> None:
        self.overhead, self.learned = 0.0, False
        self._costs: deque[float] = deque(maxlen=_WINDOW)
        self._before: tuple[float, float] | None = None  # share and seconds before a change

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
        return 1.4826 * median(abs(one - cost) for one in self._costs) / cost

    def seconds(self, share: float) -> float:
        """Of a step with such a share."""
        return self.cost * (share + self.overhead)

    def saw(self, shares: Sequence[float], seconds: Sequence[float]) -> bool:
        """Takes steps with these shares; True when they show another speed than before.

        Nothing is learned from steps in which the rank had no samples, as of a small last batch.
        """
        some = [(n, s) for n, s in zip(shares, seconds, strict=True) if n]
        if not some:
            return False
        if self._before is not None:
            self._learn(median(n for n, _ in some), median(s for _, s in some))
        new = [s / (n + self.overhead) for n, s in some]
        changed = False
        if len(self._costs) >= _FEWEST and len(new) >= _FEWEST:
            off = abs(median(new) - self.cost) / self.cost
            changed = off > max(_AT_ONCE, 4 * self.spread / math.sqrt(len(new)))
        if changed:
            self._costs.clear()
        self._costs.extend(new)
        return changed

    def share_changes(self, share: float, *, early: bool = False) -> None:
        """What was seen was seen with this share, which is another one from now on.

        Args:
            early: In the first steps of the process, most of which take longer than later ones.
                The difference would be taken for a cost that does not depend on the share.
        """
        self._before = None
        if self._costs:
            cost = min(self._costs) if early else self.cost
            self._before = (share, cost * (share + self.overhead))
        self._costs.clear()

    def _learn(self, share: float, took: float) -> None:
        """The overhead, from steps with two shares."""
        (former, before), self._before = self._before or (share, took), None
        if former < 1 or share < 1 or not min(share, former) / max(share, former) < 0.8:
            return
        few, many = min((former, before), (share, took)), max((former, before), (share, took))
        ratio = many[1] / max(few[1], 1e-9)
        if not 0.9 < ratio < 1.15 * many[0] / few[0]:
            return  # its speed has changed meanwhile
        # What the larger step takes longer is the cost of its samples; the rest of it is fixed.
        rise = (many[1] - few[1]) / (many[0] - few[0]) * many[0]
        fixed = min(max(1 - rise / many[1], 0.0), _STEADY)
        # A speed that changed at the same time looks like a fixed cost: believed the second time.
        known = self.overhead / (self.overhead + many[0])
        fixed = (known + fixed) / 2 if self.learned else min(fixed, _BELIEVED)
        self.overhead, self.learned = many[0] * fixed / (1 - fixed), True

    def state(self) -> list[float]:
        if self._costs:
            return [self.cost, self.overhead]
        if self._before is not None:  # what it was before its share changed
            share, took = self._before
            return [took / max(share + self.overhead, 1e-9), self.overhead]
        return [0.0, self.overhead]


class Controller:
    """From what ranks measured to the shares that suit them; pure, and the same on every rank.

    Args:
        shares: To begin with.
        least: Smallest share.
        drops: A rank without which a step would be faster gets nothing to do; never rank 0.
        resting: Of ranks that were dropped: until which step they rest, and how many steps that
            are.

    Attributes:
        shares: The present ones.
        resting: As above; for checkpoints.
    """

    def __init__(
        self,
        shares: Shares,
        *,
        least: int = 1,
        drops: bool = False,
        resting: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        self.shares, self.least, self.drops = shares, least, drops
        self._speeds = [_Speed() for _ in shares]
        self._since = -1  # the first step with these shares; unknown before the first look
        self._looks = 0
        self._size = 0.0  # elements of a sample
        self._small = 0
        self._before = False  # the look before saw something to win
        self._useless: int | None = None  # by the look before
        self.resting = dict(resting or {})
        self._former: tuple[Shares, list[float]] | None = None  # with each rank's seconds
        self._held: dict[int, _Hold] = {}
        self._free: frozenset[int] = frozenset()  # of those that were held

    def look(self, look: Look) -> Advice | None:
        """What these measurements say; ``None`` while they say too little."""
        self._looks += 1
        if self._since < 0:
            self._since = look.first_step
        # The first step after a change starts things up, and a look may reach behind it.
        begin = max(0, -(-(self._since + 1 - look.first_step) // look.every))
        seconds, samples = look.seconds[:, begin:], look.samples[:, begin:]
        # The last batch of an epoch is small, and its samples cost more.
        whole = samples.sum(dim=0) >= _WHOLE * sum(self.shares)
        seconds, samples = seconds[:, whole], samples[:, whole]
        if not samples.shape[1]:
            return None
        busy = seconds[:, :, _DATA] + seconds[:, :, _COMPUTING] + seconds[:, :, _OTHER]
        if look.elements is not None:
            busy = busy / self._sizes(look.elements[:, begin:][:, whole], samples)
        changed = False
        for rank, speed in enumerate(self._speeds):
            if self.shares[rank]:
                changed |= speed.saw(samples[rank].tolist(), busy[rank].tolist())
        if changed:
            self._small = 0
        if any(s.steps < _FEWEST for r, s in enumerate(self._speeds) if self.shares[r]):
            return None
        moving = median(seconds[:, :, _MOVING].min(dim=0).values.tolist())
        return self._advice(moving, look.first_step + look.every * look.samples.shape[1])

    def _sizes(self, elements: Tensor, samples: Tensor) -> Tensor:
        """How large the samples of each step are, beside those of the first look.

        Sentences of different lengths are no change of speed.
        """
        sizes = elements.sum(dim=0) / samples.sum(dim=0).clamp(min=1)
        self._size = self._size or float(sizes.median())
        return sizes.clamp(min=1) / max(self._size, 1.0)

    def take(self, shares: Shares, step: int) -> None:
        """These are the shares from a step on, by its number."""
        known = all(
            one.steps for one, share in zip(self._speeds, self.shares, strict=True) if share
        )
        took = (
            [one.seconds(n) if n else 0.0 for one, n in zip(self._speeds, self.shares, strict=True)]
            if known
            else []
        )
        self._former = (self.shares, took) if known else None
        for rank, speed in enumerate(self._speeds):
            if shares[rank] != self.shares[rank]:
                speed.share_changes(self.shares[rank], early=self._looks == 1)
        self.shares, self._since, self._before = shares, step, False

    def speeds(self) -> list[list[float]]:
        """Seconds of a sample (0: unknown) and overhead in samples, of each rank."""
        return [one.state() for one in self._speeds]

    def _advice(self, moving: float, step: int) -> Advice:
        speeds = self._speeds
        out = frozenset(r for r, share in enumerate(self.shares) if not share)
        inside = [r for r in range(len(speeds)) if r not in out]
        now = max(speeds[r].seconds(self.shares[r]) for r in inside)
        if (former := self._worse(step)) is not None:
            shares, took = former
            return Advice(shares, now, took, moving, (now - took) / (now + moving), True)
        self._release(step)
        best = self._best(out) if self._may_win(inside, now, moving) else self.shares
        then = max(speeds[r].seconds(best[r]) for r in inside)
        win = max(0.0, (now - then) / (now + moving))
        slowest = max(inside, key=lambda r: speeds[r].seconds(self.shares[r]))
        # What may be chance: the slowest of many has been unlucky, too.
        spread = sum(speeds[r].spread for r in inside) / len(inside)
        chance = 1.25 * spread / math.sqrt(speeds[slowest].steps)
        chance *= 2 + math.sqrt(2 * math.log(len(inside)))
        useless, without = self._look_for_useless(out, then, moving)
        confirmed, self._useless = useless is not None and useless == self._useless, useless
        if confirmed and useless and self.drops:  # never rank 0, which all need
            rest = 2 * self.resting[useless][1] if useless in self.resting else _REST
            self.resting[useless] = step + rest, rest
            shares = self._best(out | {useless})
            return Advice(shares, now, then, moving, win, True, useless, without)
        back = [r for r in out if self.resting.get(r, (0, 0))[0] <= step]
        if back:  # how fast it is now shows only when it computes
            weights = [max(self.least, one) if r in back else one for r, one in enumerate(best)]
            shares = apportioned(sum(best), weights, 0)
            return Advice(shares, now, now, moving, 0.0, True)
        large, small = win >= _AT_ONCE + chance, win >= max(WORTH, chance)
        small = small or win >= OFFERED + chance / 2  # seen twice that is no chance, either
        again = self._before and small and self._small < _SMALL_CHANGES
        act = best != self.shares and (large or again)
        self._before = small
        self._small += act and not large
        sure = all(speeds[r].learned for r in inside if best[r] != self.shares[r])
        named = useless if confirmed else None
        return Advice(best, now, then, moving, win, act, named, without, sure)

    def _may_win(self, inside: Sequence[int], now: float, moving: float) -> bool:
        """Whether any shares can be worth a change; costs less than looking for the best."""
        rate = sum(1 / self._speeds[r].cost for r in inside)
        samples = sum(self.shares) + sum(self._speeds[r].overhead for r in inside)
        return now - samples / rate >= WORTH * (now + moving)

    def _worse(self, step: int) -> tuple[Shares, float] | None:
        """The shares before the last change, and their seconds, where steps are longer since.

        What a rank is allowed of a CPU by the 0.1 s is such a case: a share that fits into that is
        computed at full speed, and one a little larger waits for the next.
        """
        former, self._former = self._former, None
        if former is None:
            return None
        shares, took = former
        longest = max(took)
        late = [
            rank
            for rank, share in enumerate(self.shares)
            if share > shares[rank] > 0 and self._speeds[rank].seconds(share) > _WORSE * longest
        ]
        for rank in late:
            held = self._held.get(rank)
            rest = min(_LONGEST, 2 * held.rest) if held else _HELD
            now = self._speeds[rank].seconds(self.shares[rank]) / self.shares[rank]
            most = max(shares[rank], int(longest / now))  # that it does in time at its worst
            self._held[rank] = _Hold(most, took[rank] / shares[rank], step + rest, rest)
        return (shares, longest) if late else None

    def _release(self, step: int) -> None:
        """Of the ranks that are held those that may have more again."""
        for rank, held in self._held.items():
            share, speed = self.shares[rank], self._speeds[rank]
            if share and speed.seconds(share) / share < _QUICKER * held.cost:
                self._held[rank] = _Hold(held.most, held.cost, step, held.rest)
        self._free = frozenset(rank for rank, held in self._held.items() if held.until <= step)

    def _best(self, out: frozenset[int]) -> Shares:
        speeds, samples = self._speeds, sum(self.shares)
        even_share = samples / len(speeds)
        most = [max(_GROWTH * one, even_share) if one else math.inf for one in self.shares]
        for rank, held in self._held.items():
            if rank not in self._free:
                most[rank] = min(most[rank], held.most)
        inside = [r for r in range(len(speeds)) if r not in out]
        if sum(most[r] for r in inside) < samples:
            most = [math.inf] * len(speeds)
        costs = [1.0 if r in out else one.cost for r, one in enumerate(speeds)]
        overheads = [one.overhead for one in speeds]
        return fastest(samples, costs, overheads, most, self.least, out)

    def _look_for_useless(
        self, out: frozenset[int], then: float, moving: float
    ) -> tuple[int | None, float]:
        """A rank without which a step would be faster, and how fast."""
        inside = [r for r in range(len(self.shares)) if r not in out]
        slow = max(inside, key=lambda r: self._speeds[r].seconds(self.least))
        if len(inside) < 2 or self._speeds[slow].seconds(self.least) < 0.999 * then:
            return None, 0.0  # another rank is the last to finish
        shares = self._best(out | {slow})
        without = max(self._speeds[r].seconds(shares[r]) for r in inside if r != slow)
        return (slow, without) if (then - without) / (then + moving) >= WORTH else (None, without)


def by_host(
    weights: Mapping[str, float], hosts: Sequence[str], samples: int, least: int = 1
) -> Shares:
    """Shares as weights of hosts say; the ranks of a host share its part.

    Args:
        weights: By the name of the host. Some may not be there now; one that has none, as it came
            later, gets their mean: only of what was stated, for it knows nothing else and has to
            find the same.
        hosts: Of each rank.
        samples: Of a global batch.
        least: Smallest share.
    """
    mean = sum(weights.values()) / len(weights)
    each = [weights.get(host, mean) / hosts.count(host) for host in hosts]
    return apportioned(samples, each, least)


def resumed(
    state: Mapping[str, Any], hosts: Sequence[str], samples: int, least: int = 1
) -> Shares | None:
    """The shares that a checkpoint has, for these ranks; ``None`` where it says nothing of them.

    On the same hosts in the same order those that it was made with; otherwise by the speeds that
    the hosts had, if all of them were there.
    """
    shares, former = state.get("shares"), list(state.get("hosts", ()))
    if not shares:
        return None
    if former == list(hosts):
        return tuple(shares) if sum(shares) == samples else apportioned(samples, shares, 0)
    known: dict[str, list[list[float]]] = {}
    for host, speed in zip(former, state.get("speeds", ()), strict=False):
        if speed[0] > 0:
            known.setdefault(host, []).append(speed)
    if not all(host in known for host in hosts):
        return None
    costs = [median(one[0] for one in known[host]) for host in hosts]
    overheads = [median(one[1] for one in known[host]) for host in hosts]
    return fastest(samples, costs, overheads, [math.inf] * len(hosts), least)
