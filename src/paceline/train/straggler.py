"""Which rank holds the others up, why, and what that costs: decided from looks alone.

Every rank has the same looks, so every rank decides the same. A rank is named when it needs
clearly more time than the others for its own part of a step, in three groups of steps one after
the other, so that no single event (a first step, a compilation, an evaluation, a checkpoint, a
garbage collection, a hiccup of a disk) names anybody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.train.pace import PARTS, Look
from paceline.train.vitals import VITALS

GROUP, GROUPS = 5, 3  # steps, and how many groups of them have to agree
WORTH = 0.12  # part of a step that is worth a name
LEAST = 0.001  # seconds of a step below which nothing is
OVER = 0.5  # of both, below which a rank that was named keeps up again
EVIDENT = 0.3  # of the time that a rank needs more: what explains so much of it is the cause
SLOW_LINK = 0.6  # of the others' rate: a link below this is slow
TELLING = 10_000  # bytes of a step that say something of a link
FIRST = 2  # steps of the process that say nothing
_AT = {name: number for number, name in enumerate(PARTS)}

CAUSES = {
    "quota": "its CPU quota throttles it",
    "cpu": "other programs take its CPU",
    "stolen": "the hypervisor takes its host's CPUs",
    "swap": "its memory is swapped out",
    "hot": "its CPU is slowed down because of its heat",
    "batch": "its samples are larger",
    "data": "it waits for its data",
    "link": "its link is slow",
    "computing": "it computes more slowly",
}
"""Why a rank may be slow, by name; ``computing`` where nothing else is seen."""


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

    def said(self, host: str) -> str:
        """For people, with the name of its host."""
        why = CAUSES[self.cause] + (f" ({self.detail})" if self.detail else "")
        return (
            f"rank {self.rank} on {host} holds the others up by {self.seconds:.3f} s a step,"
            f" {self.part:.0%} of the time: {why}"
        )

    def summed(self, host: str) -> str:
        """For people, at the end of a training."""
        return (
            f"rank {self.rank} on {host}, for which the others waited {self.seconds:.3f} s a step,"
            f" {self.part:.0%} of the time: {CAUSES[self.cause]}"
        )


class Judge:
    """Takes looks and says who is slow.

    Attributes:
        named: The straggler at present; ``None`` when all keep up.
        worst: The one that has cost most so far, over all steps in which it was named.
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
        while self._steps() - self._looks[0].samples.shape[1] >= GROUP * GROUPS:
            del self._looks[0]
        before = self.named
        if self._steps() < GROUP * GROUPS - FIRST:
            return False
        found = judged(self._looks, before)
        if found is not None:
            cost = self._cost.setdefault((found.rank, found.cause), [0.0, 0.0])
            cost[0] += found.seconds * look.samples.shape[1]
            cost[1] += found.part * look.samples.shape[1]
        self.named = found
        if found is None or before is None:
            return found is not before
        return (found.rank, found.cause) != (before.rank, before.cause)

    def _steps(self) -> int:
        return sum(one.samples.shape[1] for one in self._looks)

    def worst(self, steps: int) -> Straggler | None:
        """The one that has cost most, over so many steps of the whole training."""
        if not self._cost:
            return None
        (rank, cause), (seconds, part) = max(self._cost.items(), key=lambda one: one[1][0])
        return Straggler(rank, cause, seconds / max(steps, 1), part / max(steps, 1))


def without(look: Look, steps: int) -> Look:
    """A look without its first steps."""
    more = None if look.elements is None else look.elements[:, steps:]
    return Look(
        look.first_step + steps,
        look.seconds[:, steps:],
        look.samples[:, steps:],
        more,
        look.facts,
        look.every,
    )


def judged(looks: Sequence[Look], before: Straggler | None = None) -> Straggler | None:
    """Who holds the others up in these looks, one after the other.

    Args:
        looks: At least as many steps as are needed, the latest last.
        before: Who did so before: it is not taken back for a little.
    """
    seconds = torch.cat([look.seconds for look in looks], dim=1)
    facts = facts_of(looks)
    steps = sum(look.samples.shape[1] * look.every for look in looks)
    slow = _slow_rank(seconds, before)
    if slow is not None:
        rank, excess, parts = slow
        cause, detail = _cause(rank, excess, parts, looks, facts, steps)
    else:
        link = _slow_link(seconds, facts, before, steps)
        if link is None:
            return None
        rank, excess, detail = link
        cause = "link"
    return Straggler(rank, cause, excess, excess / max(_a_step(seconds), 1e-9), detail)


def facts_of(looks: Sequence[Look]) -> Tensor | None:
    """What was seen in all of them together, ``[ranks, facts]``."""
    known = [look.facts for look in looks if look.facts is not None]
    if not known:
        return None
    every = torch.stack(known)
    total = every.nansum(dim=0).where(~every.isnan().all(dim=0), math.nan)
    for name in ("here", "there", "swapped"):  # no differences
        total[:, VITALS.index(name)] = every[-1, :, VITALS.index(name)]
    return total


def _a_step(seconds: Tensor) -> float:
    """Seconds of a usual step."""
    return float(seconds.sum(dim=2).mean(dim=0).median())


def _base(values: Tensor) -> Tensor:
    """Of ``[ranks, …]`` what the better half of ranks manages."""
    return values.median(dim=0).values  # the lower of two


def _slow_rank(
    seconds: Tensor, before: Straggler | None
) -> tuple[int, float, dict[str, float]] | None:
    """The rank that needs more time for its own part, by how much, and in which part."""
    steps = seconds.shape[1]
    more = []  # of each group: ranks x (data, computing)
    for group in torch.split(seconds, -(-steps // GROUPS), dim=1):
        data, computing = group[:, :, _AT["data"]], group[:, :, _AT["computing"]]
        # Computing that is slow is so in most steps; data come in bursts.
        each = torch.stack([data.mean(dim=1), computing.median(dim=1).values], dim=1)
        more.append(each - _base(each))
    every = torch.stack(more)  # groups, ranks, 2
    excess = every.sum(dim=2)
    mean = excess.mean(dim=0)
    rank = int(mean.argmax())
    again = before is not None and before.rank == rank and before.cause != "link"
    least = max(WORTH * _a_step(seconds), LEAST) * (OVER if again else 1)
    # The others wait for it, or its slowness costs nothing.
    waiting = float(seconds[:, :, _AT["waiting"]].mean(dim=1).max())
    if float(mean[rank]) < least or waiting < 0.3 * float(mean[rank]):
        return None
    if not again and float(excess[:, rank].min()) < 0.6 * least:
        return None
    data, computing = every[:, rank].mean(dim=0).tolist()
    return rank, float(mean[rank]), {"data": data, "computing": computing}


def _cause(
    rank: int,
    excess: float,
    parts: dict[str, float],
    looks: Sequence[Look],
    facts: Tensor | None,
    steps: int,
) -> tuple[str, str]:
    """What explains that a rank needs so many seconds more in each step."""

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
        return "cpu", f"it waits {1e3 * queued:.0f} ms a step for one"
    if (stolen := more("stolen")) >= need:
        return "stolen", f"{1e3 * stolen:.0f} ms a step"
    if more("faults") >= 1 and more("swapped") > 0:
        return "swap", f"{more('faults'):.0f} pages a step"
    if more("hot") >= need:
        return "hot", ""
    if parts["data"] >= 0.5 * excess:
        slow = more("disk") >= need
        return "data", "its disk is slow" if slow else ""
    work = torch.cat([_size(look) for look in looks], dim=1).mean(dim=1)
    usual = float(_base(work))
    computing = torch.cat([look.seconds[:, :, _AT["computing"]] for look in looks], dim=1)
    took = computing.mean(dim=1)
    if usual > 0:
        larger = float(work[rank]) / usual - 1
        slower = float(took[rank]) / max(float(_base(took)), 1e-9) - 1
        if larger >= 0.05 and larger >= 0.5 * slower:
            return "batch", f"{1 + larger:.1f} times those of others"
    ratio = float(took[rank]) / max(float(_base(took)), 1e-9)
    return "computing", f"{ratio:.1f} times the others' time"


def _size(look: Look) -> Tensor:
    return look.samples if look.elements is None else look.elements


def _slow_link(
    seconds: Tensor, facts: Tensor | None, before: Straggler | None, steps: int
) -> tuple[int, float, str] | None:
    """The rank whose bytes are on their way for much longer than others', and what that costs."""
    if facts is None:
        return None
    moving = float(seconds[:, :, _AT["moving"]].mean(dim=1).median())
    column = {name: facts[:, VITALS.index(name)] for name in ("sent", "sending", "here", "there")}
    sent = column["sent"] / steps
    far = (column["here"] != column["there"]) & (sent > TELLING)  # a host's own ranks are near
    if int(far.sum()) < 2:
        return None
    rates = sent / (column["sending"] / steps).clamp(min=1e-6)
    slowest = float(rates[far].min())
    rank = int((rates == slowest).nonzero()[0])
    others = rates[far].sort().values[1:]
    usual = float(others[len(others) // 2])
    if slowest > SLOW_LINK * usual:
        return None
    # What it would take on a link like those of the others.
    excess = min(moving, float(column["sending"][rank]) / steps) - float(sent[rank]) / usual
    again = before is not None and before.cause == "link"
    if excess < max(WORTH * _a_step(seconds), LEAST) * (OVER if again else 1):
        return None
    resent = float(facts[rank, VITALS.index("resent")]) / steps / float(sent[rank])
    lost = f", {resent:.1%} sent again" if resent > 0.001 else ""
    for other in (far & (rates < SLOW_LINK * usual)).nonzero()[:, 0].tolist():
        # Both to it and from it the way is slow: it is the one between.
        to_it = column["there"][rank] == column["here"][other]
        if other != rank and to_it and column["there"][other] != column["here"][rank]:
            rank = other
            break
    detail = f"{float(rates[rank]) / 1e6:.1f} MB/s, others {usual / 1e6:.1f}{lost}"
    return rank, excess, detail
