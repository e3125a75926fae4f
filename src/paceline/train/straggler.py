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

from paceline.spec.figures import lasting
from paceline.train.pace import PARTS, Look
from paceline.train.vitals import VITALS

GROUP, GROUPS = 5, 3  # steps, and how many groups of them have to agree
WORTH = 0.25  # part of a step that is worth a name
LEAST = 0.002  # seconds of a step below which nothing is
LITTLE = 0.4  # of both: a step in which a rank is that much slower counts against it
MOSTLY = 0.8  # of the steps have to
OFTEN = 2 / 3  # of the steps are slow on a slow link, whose bytes may be hidden behind computing
OVER = 0.5  # of both, below which a rank that was named keeps up again
EVIDENT = 0.3  # of the time that a rank needs more: what explains so much of it is the cause
SLOW_LINK = 0.6  # of the others' rate: a link below this is slow
BURST = 10  # usual steps: a step that takes longer counts as one of so many
SLOW_WAY = 0.85  # of the rate of the way back, between two hosts
STILL_SLOW = 0.90  # of it, without the look in which it was slowest
CLEARLY = 0.006  # seconds of a step: more than what comes of a kernel that counts in ticks of 4 ms
STEADY, SLOW_STEADILY = 9, 0.83  # looks, after which less is enough: it is below this in them all
HELD_UP, AS_HELD_UP = 1.25, 0.1  # times the usual step; part of a look that says nothing then
SLOW_AGAIN = 0.92  # of it: a way that was named before keeps its name
TELLING = 10_000  # bytes of a step that say something of a link
AS_LOST = 0.005  # of bytes were sent again: it may be this, and not the rate, that is slow
LOSSY = 0.01  # of a connection's bytes were sent again: something on its way loses them
AS_LOSSY = 0.25  # of the worst: a connection that loses so much belongs to the same trouble
SURELY = 5_000  # bytes sent again, below which it may be chance
ACQUITS = 200_000  # bytes that came through without such losses: both ends are sound
MENTIONED = 0.005  # of all steps, at the end of a training
FIRST = 2  # steps of the process that say nothing
_AT = {name: number for number, name in enumerate(PARTS)}

CAUSES = {
    "quota": "its CPU quota throttles it",
    "cpu": "other programs take its CPU",
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
            f"{who} holds the others up by {lasting(self.seconds)} a step"
            f" ({self.part:.0%} of it): {why}"
        )

    def summed(self, who: str) -> str:
        """For people, at the end of a training."""
        return (
            f"{who}, for which the others waited {lasting(self.seconds)} a step"
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
        while len(self._looks) > max(STEADY, len(_latest(self._looks))):
            del self._looks[0]
        before = self.named
        if _steps(self._looks) < GROUP * GROUPS - FIRST:
            return False
        found = judged(self._looks, before)
        if found is not None:
            cost = self._cost.setdefault((found.rank, found.cause), [0.0, 0.0])
            since = (_several if found.cause == "link" else _latest)(self._looks)
            steps = _steps(since) if before is None else look.samples.shape[1]
            cost[0], cost[1] = cost[0] + found.seconds * steps, cost[1] + found.part * steps
        self.named = found
        if found is None or before is None:
            gone = before is not None and before.rank not in _at_work(self._looks)
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


def _several(looks: Sequence[Look]) -> Sequence[Look]:
    """The same, and a few at least: of short steps one has many, but is one moment of a link."""
    return looks[-max(GROUPS, len(_latest(looks))) :]


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
    at_work = _at_work(looks)
    slow = _slow_rank(seconds[at_work], a_step, least, _among(before, at_work))
    if slow is None:
        link = _slow_link(_several(looks), least, before)
        if link is None and len(looks) >= STEADY:
            link = _slow_link(looks, least, before, steadily=True)
        if link is None:
            return None
        rank, excess, detail = link
        return Straggler(rank, "link", excess, excess / whole, detail)
    rank, facts = at_work[slow.rank], facts_of(latest)
    theirs = None if facts is None else facts[at_work]
    steps = sum(look.samples.shape[1] * look.every for look in latest)
    cause, detail = _cause(slow, [_of(look, at_work) for look in latest], theirs, steps)
    # What stops a process stops it for many steps at once, and data come so, too. Without such
    # a cause a rank is only slow when it is so nearly always.
    if not (slow.lasting if cause in IN_BURSTS else slow.steady):
        return None
    return Straggler(rank, cause, slow.excess, slow.excess / whole, detail)


def _at_work(looks: Sequence[Look]) -> list[int]:
    """The ranks that have samples: beside one that was dropped all others would be slow."""
    return [rank for rank, some in enumerate(looks[-1].samples.sum(dim=1).tolist()) if some]


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
        or_so = ", or for a quota, which is not seen there" if unseen else ""
        return "cpu", f"it waits {1e3 * queued:.0f} ms a step for one{or_so}"
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


@dataclass(frozen=True, slots=True)
class _Sending:
    """What ranks sent to other hosts in each step, ``[ranks]``, and the ranks that did.

    Attributes:
        bytes: On the busiest connection.
        seconds: In which these were on their way.
        here: Stand for the addresses of its two ends.
        there: Likewise.
        ranks: Those with anything to tell, the slowest first.
    """

    bytes: Tensor
    seconds: Tensor
    here: Tensor
    there: Tensor
    ranks: list[int]

    @property
    def rates(self) -> Tensor:
        """Bytes a second."""
        return self.bytes / self.seconds.clamp(min=1e-6)


def _sending(looks: Sequence[Look], facts: Tensor, steps: int) -> _Sending:
    """In so many steps, in which these facts were seen altogether."""
    names = ("sent", "sending", "here", "there")
    sent, seconds, here, there = (facts[:, VITALS.index(name)] for name in names)
    found = _Sending(sent / steps, seconds / steps, here, there, [])
    # Who has no share sends its zeros while the others, which are to take them, compute.
    # A host's own ranks are near, and a connection that was busy once says nothing of later.
    least = torch.stack([look.facts[:, VITALS.index("sent")] / (look.samples.shape[1] * look.every)
                         for look in looks if look.facts is not None]).amin(dim=0)  # fmt: skip
    far = (here != there) & (least > TELLING)
    asked = [rank for rank in _at_work(looks) if far[rank]]
    return replace(found, ranks=sorted(asked, key=lambda rank: float(found.rates[rank])))


def _slow_link(
    looks: Sequence[Look], least: float, before: Straggler | None, *, steadily: bool = False
) -> tuple[int, float, str] | None:
    """The rank whose bytes are on their way for much longer than others', and what that costs.

    Args:
        looks: In which it is so.
        least: Seconds of a step below which it costs nothing worth a name.
        before: Who held the others up before.
        steadily: They are many, and between two hosts a little is enough.
    """
    if before is not None and before.cause == "link":
        least *= OVER
    moves = torch.cat([look.seconds[0, :, _AT["moving"]] for look in looks])  # the same of all
    moving = float(moves.mean())
    if moving < OVER * least:  # what nearly always is the case ends here
        return None
    facts, steps = facts_of(looks), sum(look.samples.shape[1] * look.every for look in looks)
    if facts is None:
        return None
    ways = _sending(looks, facts, steps)
    if len(ways.ranks) < 2:
        return None
    known = [look for look in looks if look.facts is not None]
    if len(ways.ranks) == 2:
        again = before is not None and (before.rank, before.cause) == (ways.ranks[0], "link")
        excess = _slower_than_back(ways, known, moving, least, again=again, steadily=steadily)
    elif steadily:
        return None
    else:
        excess = _slower_than_others(ways, known, moving, least)
    if excess is None:
        return None
    rank, other, best = ways.ranks[0], ways.ranks[1], ways.ranks[-1]
    resent = float(facts[rank, VITALS.index("resent")]) / steps / float(ways.bytes[rank])
    losses = _losses(looks)
    if max([resent, *(part for _, part, _ in losses.values())]) >= AS_LOST:
        # Both ends of a way see the same losses: only several ways say which end it is.
        host = _common_end(losses)
        found = [number for number, one in enumerate(ways.here.tolist()) if one == host]
        if host is None or not found:
            return None
        worst = max(part for way, (_, part, _) in losses.items() if host in way)
        return found[0], excess, f"{worst:.1%} of the bytes on it are sent again"
    # A rate is the same in every step; what is lost is sent again in some.
    if float((moves >= OVER * excess).double().mean()) < OFTEN:
        return None
    rates, here, there = ways.rates, ways.here, ways.there
    nearly = float(rates[other]) < float(rates[rank]) / SLOW_LINK
    if nearly and there[rank] == here[other] and there[other] != here[rank]:
        rank = other  # both to it and from it the way is slow: it is the one between
    lost = f", {resent:.1%} sent again" if resent > 0.001 else ""
    detail = f"{float(rates[rank]) / 1e6:.1f} MB/s, others {float(rates[best]) / 1e6:.1f}{lost}"
    return rank, excess, detail


def _slower_than_others(
    ways: _Sending, looks: Sequence[Look], moving: float, least: float
) -> float | None:
    """Seconds of a step that the slowest of several ways costs: beside one like the best."""
    rank, best = ways.ranks[0], ways.ranks[-1]
    usual = float(ways.rates[best])
    if float(ways.rates[rank]) > SLOW_LINK * usual:
        return None
    excess = min(moving, float(ways.seconds[rank])) - float(ways.bytes[rank]) / usual
    more = [_longer(look, rank, best) for look in looks]
    return excess if excess >= least and min(more) >= LITTLE * least else None


def _slower_than_back(
    ways: _Sending,
    looks: Sequence[Look],
    moving: float,
    least: float,
    *,
    again: bool,
    steadily: bool,
) -> float | None:
    """Seconds of a step that the slower way between two hosts costs.

    Each of the two waits for the other's bytes and for its answers, so the way back is slower,
    too, and a healthy network of two has one that is a little slower at any time. So it must be
    slower without the look in which it was slowest, too, and clearly so or for long, and looks
    with steps that something has held up do not count.
    """
    rank, other = ways.ranks
    excess = min(moving, float(ways.seconds[rank])) - moving / 2
    if excess < least:
        return None
    if again or steadily:
        beside = float(ways.rates[rank] / ways.rates[other])
        return excess if beside <= (SLOW_AGAIN if again else SLOW_STEADILY) else None
    sound = [look for look in looks if _held_up(look) <= AS_HELD_UP]
    if len(sound) < max(GROUPS - 1, OFTEN * len(looks)):
        return None
    each = torch.stack([_of_pair(look, rank, other) for look in sound])
    every, steps = each.sum(dim=0), sum(look.samples.shape[1] * look.every for look in sound)
    more = float(every[1, 0] - every[1, 1]) / steps
    slowest = min(range(len(each)), key=lambda one: _beside(each[one]))
    clearly = _beside(every) <= SLOW_WAY and more >= CLEARLY
    return excess if clearly and _beside(every - each[slowest]) <= STILL_SLOW else None


def _held_up(look: Look) -> float:
    """By how much single steps of a look stood still for longer than the others: a part of it.

    A slow link is slow in every step. What comes now and then is something else, and lengthens the
    time in which bytes were on their way as well.
    """
    still = look.seconds[:, :, [_AT["waiting"], _AT["moving"]]].sum(dim=2).amax(dim=0)
    usual = still.median()
    return float((still - usual)[still > HELD_UP * usual].sum() / still.sum().clamp(min=1e-9))


def _of_pair(look: Look, rank: int, other: int) -> Tensor:
    """Bytes of these two, and seconds in which they were on their way: ``[2, the two]``."""
    assert look.facts is not None
    names = [VITALS.index("sent"), VITALS.index("sending")]
    return look.facts[[rank, other]][:, names].T.clamp(min=1e-6)


def _beside(pair: Tensor) -> float:
    """The first one's rate as a part of the other's, of bytes and seconds ``[2, the two]``."""
    return float(pair[0, 0] / pair[1, 0] * pair[1, 1] / pair[0, 1])


def _longer(look: Look, rank: int, other: int) -> float:
    """Seconds of a step by which a rank's bytes are longer on their way than another's."""
    assert look.facts is not None
    each = look.facts[:, VITALS.index("sending")] / (look.samples.shape[1] * look.every)
    return float(each[rank] - each[other])


_Ways = dict[tuple[float, float], tuple[float, float, float]]


def _losses(looks: Sequence[Look]) -> _Ways:
    """Of each way between two hosts, in one direction: bytes, and how many of them again.

    A rank's busiest connection may be another one in each look, so they are taken one by one.

    Returns:
        By addresses of sender and receiver: bytes sent, part of them and bytes sent again.
    """
    sums: dict[tuple[float, float], list[float]] = {}
    columns = [VITALS.index(name) for name in ("here", "there", "sent", "resent")]
    for look in looks:
        if look.facts is not None:
            for here, there, sent, resent in look.facts[:, columns].tolist():
                if here != there and sent > 0 and resent >= 0:  # all of them are known
                    way = sums.setdefault((here, there), [0.0, 0.0])
                    way[0], way[1] = way[0] + sent, way[1] + resent
    return {way: (sent, resent / sent, resent) for way, (sent, resent) in sums.items()}


def _common_end(losses: _Ways) -> float | None:
    """The one host that all ways with losses have in common, where all others are sound.

    ``None`` where it is not certain: between two hosts only, when a single way loses bytes, and
    when several hosts may.
    """
    worst = max((part for _, part, _ in losses.values()), default=0.0)
    least = max(LOSSY, AS_LOSSY * worst)
    bad = [way for way, (_, part, resent) in losses.items() if part >= least and resent >= SURELY]
    good = [way for way, (sent, part, _) in losses.items() if part < least and sent >= ACQUITS]
    suspects = {end for way in bad for end in way} - {end for way in good for end in way}
    if len(bad) < 2 or len(suspects) != 1:
        return None
    (host,) = suspects
    return host if all(host in way for way in bad) else None
