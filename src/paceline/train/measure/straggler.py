"""Which rank holds the others up, why, and what that costs: decided from looks alone.

Every rank has the same looks, so every rank decides the same. A rank is named when it needs
clearly more time than the others for its own part of a step, in three groups of steps one after
the other, so that no single event (a first step, a compilation, an evaluation, a checkpoint, a
garbage collection, a hiccup of a disk) names anybody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.spec.formatting import format_duration
from paceline.train.measure.pace import PARTS, Look, at_work, facts_of, steps_of
from paceline.train.measure.slow_link import STEADY, recent, slow_link
from paceline.train.measure.vitals import VITALS

GROUP, GROUPS = 5, 3  # steps, and how many groups of them have to agree
WORTH = 0.25  # part of a step that is worth a name
LEAST = 0.002  # seconds of a step below which nothing is
LITTLE = 0.4  # of both: a step in which a rank is that much slower counts against it
MOSTLY = 0.8  # of the steps have to
OVER = 0.5  # of both, below which a rank that was named keeps up again
EVIDENT = 0.3  # of the time that a rank needs more: what explains so much of it is the cause
BURST = 10  # usual steps: a step that takes longer counts as one of so many
MENTIONED = 0.005  # of all steps, at the end of a training
FIRST = 2  # steps of the process that say nothing
_AT = {name: number for number, name in enumerate(PARTS)}

CAUSES = {
    "quota": "its CPU quota throttles it",
    "cpu": "other programs use its CPUs",
    "stolen": "the hypervisor takes its host's CPUs",
    "swap": "its memory is swapped out",
    "hot": "its CPU is slowed down because of its heat",
    "share": "its share of each batch is larger",
    "batch": "its samples are larger",
    "data": "it waits for its data",
    "link": "its link is slow",
    "computing": "it computes more slowly",
}
"""Why a rank may be slow, by name; ``computing`` where nothing else is seen."""
IN_BURSTS = ("quota", "swap", "data")


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that holds the others up.

    Attributes:
        rank: Which.
        cause: One of :data:`CAUSES`.
        seconds: By which every step is longer because of it.
        part: Of the time of a step.
        detail: What was seen of the cause, for people.
    """

    rank: int
    cause: str
    seconds: float
    part: float
    detail: str = ""

    def said(self, who: str) -> str:
        """For people, who know it by this name."""
        why = CAUSES[self.cause] + (f" ({self.detail})" if self.detail else "")
        return (
            f"{who} slows the others down by {format_duration(self.seconds)} a step"
            f" ({self.part:.0%}): {why}"
        )

    def summed(self, who: str) -> str:
        """For people, at the end of a training."""
        return (
            f"{who}, for which the others waited {format_duration(self.seconds)} a step"
            f" ({self.part:.0%} of it): {CAUSES[self.cause]}"
        )


class Judge:
    """Takes looks and says who is slow.

    Attributes:
        named: The straggler at present; ``None`` when all keep up.
    """

    def __init__(self) -> None:
        self._looks: list[Look] = []
        self._first = True
        self._cost: dict[tuple[int, str], list[float]] = {}
        self.named: Straggler | None = None

    def take(self, look: Look) -> bool:
        """True when something has changed that is worth telling."""
        if self._first:
            self._first, look = False, without(look, FIRST)
        if len(look.seconds) < 2 or not look.samples.shape[1]:
            return False
        self._looks.append(look)
        of_links = len(recent(self._looks)) or len(self._looks)
        del self._looks[: -max(STEADY, len(_latest(self._looks)), of_links)]
        before = self.named
        if _steps(self._looks) < GROUP * GROUPS - FIRST:
            return False
        found = judged(self._looks, before)
        if found is not None:
            cost = self._cost.setdefault((found.rank, found.cause), [0.0, 0.0])
            since = recent if found.cause == "link" else _latest
            steps = _steps(since(self._looks)) if before is None else look.samples.shape[1]
            cost[0], cost[1] = cost[0] + found.seconds * steps, cost[1] + found.part * steps
        self.named = found
        if found is None or before is None:
            gone = before is not None and before.rank not in at_work(self._looks)
            return found is not before and not gone  # who was dropped does not keep up again
        return (found.rank, found.cause) != (before.rank, before.cause)

    def worst(self, steps: int) -> Straggler | None:
        """The one that has cost most, over so many steps of the whole training.

        ``None`` where that is less than half a percent of them: it would be named for nothing.
        """
        if not self._cost:
            return None
        (rank, cause), (seconds, part) = max(self._cost.items(), key=lambda one: one[1][0])
        found = Straggler(rank, cause, seconds / max(steps, 1), part / max(steps, 1))
        return found if found.part >= MENTIONED else None


def _steps(looks: Sequence[Look]) -> int:
    return sum(one.samples.shape[1] for one in looks)


def _latest(looks: Sequence[Look]) -> Sequence[Look]:
    """Those of the last steps: as many as have to agree."""
    first = len(looks) - 1
    while first > 0 and _steps(looks[first:]) < GROUP * GROUPS:
        first -= 1
    return looks[first:]


def without(look: Look, steps: int) -> Look:
    """A look without its first steps."""
    return replace(
        look,
        first_step=look.first_step + steps,
        seconds=look.seconds[:, steps:],
        samples=look.samples[:, steps:],
        elements=None if look.elements is None else look.elements[:, steps:],
    )


@dataclass(frozen=True, slots=True)
class _Slow:
    """A rank that needs more time for its own part than others do.

    Attributes:
        rank: Which.
        excess: Seconds of a step.
        data: Seconds of these in which it waits for its data.
        steady: It does in most of the steps.
        lasting: It does in every group of them.
    """

    rank: int
    excess: float
    data: float
    steady: bool
    lasting: bool


def judged(looks: Sequence[Look], before: Straggler | None = None) -> Straggler | None:
    """Who holds the others up in these looks, one after the other.

    Args:
        looks: At least as many steps as are needed, the latest last.
        before: Who did so before: it is not taken back for a little.
    """
    latest = _latest(looks)
    seconds = torch.cat([look.seconds for look in latest], dim=1)
    a_step = float(seconds.sum(dim=2).mean(dim=0).median())
    whole = max(a_step, float(seconds.sum(dim=2).mean()), 1e-9)  # with what comes in bursts
    least = max(WORTH * whole, LEAST)
    working = at_work(looks)
    slow = _slow_rank(seconds[working], a_step, least, _among(before, working))
    if slow is None:
        named = before.rank if before is not None and before.cause == "link" else None
        link = slow_link(looks, least, named)
        if link is None:
            return None
        return Straggler(link.rank, "link", link.seconds, link.seconds / whole, link.detail)
    rank, facts = working[slow.rank], facts_of(latest)
    theirs = None if facts is None else facts[working]
    steps = steps_of(latest)
    cause, detail = _cause(slow, [_of(look, working) for look in latest], theirs, steps)
    # What stops a process stops it for many steps at once, and data come so, too. Without such
    # a cause a rank is only slow when it is so nearly always.
    if not (slow.lasting if cause in IN_BURSTS else slow.steady):
        return None
    return Straggler(rank, cause, slow.excess, slow.excess / whole, detail)


def _among(before: Straggler | None, ranks: Sequence[int]) -> Straggler | None:
    """Who held the others up, as one of these ranks."""
    if before is None or before.rank not in ranks:
        return None
    return replace(before, rank=ranks.index(before.rank))


def _of(look: Look, ranks: list[int]) -> Look:
    """What a look says of these ranks."""
    return replace(
        look,
        seconds=look.seconds[ranks],
        samples=look.samples[ranks],
        elements=None if look.elements is None else look.elements[ranks],
    )


def _base(values: Tensor) -> Tensor:
    """Of ``[ranks, …]`` what the better half of ranks manages."""
    return values.median(dim=0).values  # the lower of two


def _slow_rank(
    seconds: Tensor, a_step: float, least: float, before: Straggler | None
) -> _Slow | None:
    """The rank that needs more time for its own part."""
    if len(seconds) < 2:
        return None
    # Data and quotas come in bursts: means, but no single step outweighs all others.
    own = seconds[:, :, : _AT["computing"] + 1].clamp(max=BURST * a_step)
    mean = own.mean(dim=1)
    more = mean - _base(mean)
    every = more.sum(dim=1).tolist()
    excess = max(every)
    rank = every.index(excess)
    again = before is not None and before.rank == rank and before.cause != "link"
    if excess < least * (OVER if again else 1):
        return None
    # The others wait for it, or its slowness costs nothing.
    if float(seconds[:, :, _AT["waiting"]].mean(dim=1).max()) < 0.3 * excess:
        return None
    data = float(more[rank, 0])
    what = own[:, :, 0] if data >= excess / 2 else own.sum(dim=2)
    each = (what - _base(what))[rank]
    little, size = LITTLE * least, -(-len(each) // GROUPS)
    often = float((each >= little).double().mean()) >= MOSTLY
    usual = float(each.sort().values[(len(each) - 1) // 2])
    return _Slow(
        rank,
        excess,
        data,
        steady=again or (often and usual >= least),
        lasting=again or all(float(one.mean()) >= little for one in torch.split(each, size)),
    )


def _cause(slow: _Slow, looks: Sequence[Look], facts: Tensor | None, steps: int) -> tuple[str, str]:
    """What explains that a rank needs so many seconds more in each step."""
    rank, excess = slow.rank, slow.excess

    def more(name: str) -> float:
        """Of a fact for each step, beyond what others have."""
        if facts is None:
            return 0.0
        column = facts[:, VITALS.index(name)] / steps
        known = column[~column.isnan()]
        if math.isnan(float(column[rank])) or len(known) < 1:
            return 0.0
        others = torch.cat([column[:rank], column[rank + 1 :]])
        others = others[~others.isnan()]
        return float(column[rank]) - (float(others.median()) if len(others) else 0.0)

    need = EVIDENT * excess
    if (off := more("throttled")) >= need:
        return "quota", f"{1e3 * off:.0f} ms a step"
    if (queued := more("queued")) >= need:
        unseen = facts is not None and facts[rank, VITALS.index("throttled")].isnan()
        or_so = "; a CPU quota could do the same, and cannot be seen there" if unseen else ""
        return "cpu", f"it waits {1e3 * queued:.0f} ms a step for a free one{or_so}"
    if (stolen := more("stolen")) >= need:
        return "stolen", f"{1e3 * stolen:.0f} ms a step"
    if more("faults") >= 1 and more("swapped") > 0:
        return "swap", f"{more('faults'):.0f} pages a step"
    if more("hot") >= need:
        return "hot", ""
    if slow.data >= 0.5 * excess:
        return "data", "its disk is slow" if more("disk") >= need else ""
    computing = torch.cat([look.seconds[:, :, _AT["computing"]] for look in looks], dim=1)
    took = computing.mean(dim=1)
    ratio = float(took[rank]) / max(float(_base(took)), 1e-9)
    samples = torch.cat([look.samples for look in looks], dim=1).mean(dim=1)
    numbers = torch.cat([_numbers(look) for look in looks], dim=1).mean(dim=1)
    larger = _beside_others(numbers, rank)
    if larger >= 1.05 and larger - 1 >= 0.5 * (ratio - 1):
        if (share := _beside_others(samples, rank)) >= larger**0.5:  # most of it
            return "share", f"{share:.1f} times those of others"
        return "batch", f"{larger:.1f} times those of others"
    return "computing", f"{ratio:.1f} times the others' time"


def _numbers(look: Look) -> Tensor:
    return look.samples if look.elements is None else look.elements


def _beside_others(work: Tensor, rank: int) -> float:
    """How much of it this rank has, as a multiple of what is usual; 0 where that is nothing."""
    usual = float(_base(work))
    return float(work[rank]) / usual if usual > 0 else 0.0
