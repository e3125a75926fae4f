"""Whose link is slow: decided from what the kernel counts of each rank's busiest connection. Pure.

A connection knows for how long bytes of it were on their way, so ranks with slower links than the
others show, and between two hosts the slower direction. What hosts lose is told apart from what
they are slow at.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.train.measure.pace import PARTS, Look, at_work, steps_of
from paceline.train.measure.vitals import VITALS

SEVERAL = 3  # looks that have to agree: one is a moment of its link like no other
LASTING = 0.75  # seconds for which: what comes from outside may hold a link up for a third of one
SLOW, STILL = 0.6, 0.75  # of the best way's rate: one below this is slow; it was before
ALIKE = 1.4  # times the slowest way's rate: below this a way belongs to the same trouble
LONGER = 0.4  # of what is worth a name: by that it takes longer in each look
SLOW_WAY = 0.85  # of the rate of the way back, between two hosts
STILL_SLOW = 0.90  # of it, without the look in which it was slowest
CLEARLY = 0.006  # seconds of a step: more than what comes of a kernel that counts in ticks of 4 ms
STEADY, SLOW_STEADILY = (
    9,
    0.83,
)  # looks, after which less is enough: below this in all of them together
SLOW_AGAIN = 0.92  # of it: a way that was named before keeps its name
HELD_UP, AS_HELD_UP = 1.25, 0.1  # times the usual step; part of a look that says nothing then
MOSTLY = 2 / 3  # of the steps are slow on a slow link, whose bytes may be hidden behind computing
TELLING = 10_000  # bytes of a step that say something of a link
AS_LOST = 0.005  # of bytes were sent again: it may be this, and not the rate, that is slow
LOSSY = 0.01  # of a connection's bytes were sent again: something on its way loses them
AS_LOSSY = 0.25  # of the worst: a connection that loses so much belongs to the same trouble
SURELY = 5_000  # bytes sent again, below which it may be chance
ACQUITS = 200_000  # bytes that came through without such losses: both ends are sound
_WAITING, _MOVING = PARTS.index("waiting"), PARTS.index("moving")
_Way = tuple[float, float]  # the addresses of sender and receiver
_Ways = dict[_Way, tuple[float, float, float]]


@dataclass(frozen=True, slots=True)
class SlowLink:
    """A rank whose link holds the others up.

    Attributes:
        rank: Which.
        seconds: Of a step that it costs.
        detail: What was seen, for people.
    """

    rank: int
    seconds: float
    detail: str


class _Sent(NamedTuple):
    """What a rank sent on its busiest connection, altogether."""

    rank: int
    way: _Way
    bytes: float
    seconds: float  # in which these were on their way
    again: float  # bytes that were sent again


def _sent_in(look: Look) -> list[_Sent]:
    """By rank."""
    assert look.facts is not None
    names = ("here", "there", "sent", "sending", "resent")
    rows = look.facts[:, [VITALS.index(name) for name in names]].tolist()
    return [_Sent(rank, (here, there), *rest) for rank, (here, there, *rest) in enumerate(rows)]


def _far(look: Look, working: Collection[int]) -> list[_Sent]:
    """What went to other hosts, and is enough to say something of a link.

    A host's own ranks are near; and who has no share sends its zeros while the others, which are
    to take them, compute.
    """
    least = TELLING * steps_of([look])
    sent = _sent_in(look)
    return [one for one in sent
            if one.rank in working and one.way[0] != one.way[1] and one.bytes > least]  # fmt: skip


def slow_link(looks: Sequence[Look], least: float, named: int | None) -> SlowLink | None:
    """The rank whose bytes are on their way for much longer than others', if there is one.

    Args:
        looks: One after the other, the latest last.
        least: Seconds of a step below which it costs nothing worth a name.
        named: The rank whose link was the slow one before: it is not taken back for a little.
    """
    least = least if named is None else least / 2
    if not (latest := recent(looks)):
        return None
    found = _slow_in(latest, least, named, looks[: -len(latest)])
    if found is None and len(looks) >= STEADY:
        found = _slow_in(looks, least, named, steadily=True)
    return found


def recent(looks: Sequence[Look]) -> Sequence[Look]:
    """The latest looks that have to agree: several, and of short steps so many that they last.

    None where they do not last yet.
    """
    seconds = 0.0
    for number, look in enumerate(reversed(looks), 1):
        seconds += float(look.seconds.sum(dim=2).mean()) * steps_of([look])
        if number >= SEVERAL and seconds >= LASTING:
            return looks[-number:]
    return ()


def _slow_in(
    looks: Sequence[Look],
    least: float,
    named: int | None,
    former: Sequence[Look] = (),
    *,
    steadily: bool = False,
) -> SlowLink | None:
    """The same in all of these looks.

    Args:
        looks, least, named: As above.
        former: Looks before them: what ways manage that are not seen in these.
        steadily: Between two hosts a little is enough.
    """
    moves = torch.cat([look.seconds[0, :, _MOVING] for look in looks])  # the same of all
    moving = float(moves.mean())
    if moving < least / 2:  # what nearly always is the case ends here
        return None
    known, working = [look for look in looks if look.facts is not None], at_work(looks)
    far = [_far(look, working) for look in known]
    hosts = {end for ways in far for one in ways for end in one.way}
    if len(hosts) == 2:
        found = _slower_than_back(known, far, moving, least, named, steadily=steadily)
    elif len(hosts) > 2 and not steadily:
        earlier = [_far(look, working) for look in former if look.facts is not None]
        found = _slower_than_others(known, far, earlier, moving, least, named)
    else:
        return None
    if found is None:
        return None
    own = [one for ways in far for one in ways if one.rank == found.rank]
    lost = sum(one.again for one in own) / max(1.0, sum(one.bytes for one in own))
    losses = _losses(known)
    if max([lost, *(part for _, part, _ in losses.values())]) >= AS_LOST:
        return _lossy(far, losses, found.seconds, named)
    # A rate is the same in every step; what is lost is sent again in some.
    if float((moves >= found.seconds / 2).double().mean()) < MOSTLY:
        return None
    losing = f", {lost:.1%} sent again" if lost > 0.001 else ""
    return replace(found, detail=found.detail + losing)


def _told(slow: float, best: float) -> str:
    """Bytes a second that were seen, for people."""
    return f"{slow / 1e6:.1f} MB/s, others {best / 1e6:.1f}"


def _rank_at(host: float, far: Sequence[Sequence[_Sent]], named: int | None) -> int | None:
    """The rank of a host that is to be named: one that sends to others, and the same for long."""
    ranks = {one.rank for ways in far for one in ways if one.way[0] == host}
    return named if named in ranks else min(ranks, default=None)


def _lossy(
    far: Sequence[Sequence[_Sent]], losses: _Ways, seconds: float, named: int | None
) -> SlowLink | None:
    """Bytes are lost: both ends of a way see that, so only several ways say which end it is."""
    host = _common_end(losses)
    rank = None if host is None else _rank_at(host, far, named)
    if host is None or rank is None:
        return None
    worst = max(part for way, (_, part, _) in losses.items() if host in way)
    return SlowLink(rank, seconds, f"{worst:.1%} of the bytes on it are sent again")


def _slower_than_others(
    looks: Sequence[Look],
    far: Sequence[Sequence[_Sent]],
    former: Sequence[Sequence[_Sent]],
    moving: float,
    least: float,
    named: int | None,
) -> SlowLink | None:
    """The end that the slow ones of several ways have in common, and what that costs.

    A rank's busiest connection may be another one in each look, so all that were seen count.
    """
    rates = _rates(former) | _rates(far)
    slowest, best = min(rates.values()), max(rates.values())
    if slowest > (SLOW if named is None else STILL) * best:
        return None
    bad = [way for way, rate in rates.items() if rate <= ALIKE * slowest]
    # What lies between says nothing of its ends: it may be slow for the same reason, or not.
    good = [way for way, rate in rates.items() if way not in bad and rate > SLOW * best]
    host = _slow_end(bad, good)
    rank = None if host is None else _rank_at(host, far, named)
    if rank is None:
        return None
    costs = [_most(look, ways, bad, best, moving) for look, ways in zip(looks, far, strict=True)]
    known = [cost for cost in costs if cost is not None]
    if len(known) < max(1, len(looks) - 1) or (named != rank and min(known) < LONGER * least):
        return None
    seconds = sum(known) / len(known)
    return SlowLink(rank, seconds, _told(slowest, best)) if seconds >= least else None


def _rates(far: Sequence[Sequence[_Sent]]) -> dict[_Way, float]:
    """Bytes a second of each way between two hosts."""
    sums: dict[_Way, list[float]] = {}
    for ways in far:
        for sent in ways:
            one = sums.setdefault(sent.way, [0.0, 0.0])
            one[0], one[1] = one[0] + sent.bytes, one[1] + sent.seconds
    return {way: sent / max(seconds, 1e-6) for way, (sent, seconds) in sums.items()}


def _most(
    look: Look, ways: Sequence[_Sent], bad: Sequence[_Way], best: float, moving: float
) -> float | None:
    """Seconds of a step that its slowest way costs beside the best; ``None``: none was seen.

    Args:
        look: Of some steps.
        ways: That were seen in it.
        bad: The slow ones.
        best: Bytes a second of the best one.
        moving: Seconds of a step in which bytes move and nothing else happens.
    """
    steps = steps_of([look])
    return max(
        (
            min(moving, one.seconds / steps) - one.bytes / steps / best
            for one in ways
            if one.way in bad
        ),
        default=None,
    )


def _slow_end(bad: Sequence[_Way], good: Sequence[_Way]) -> float | None:
    """The host that all slow ways have in common; ``None`` where several may be meant.

    One that no quick way touches is slow both ways. Otherwise it is slow in what it sends, or in
    what it receives.
    """
    sound = {end for way in good for end in way}
    both = {end for way in bad for end in way if all(end in one for one in bad)} - sound
    if len(both) == 1:
        return both.pop()
    senders, receivers = {here for here, _ in bad}, {there for _, there in bad}
    if len(senders) == 1:
        return senders.pop()
    return receivers.pop() if len(receivers) == 1 else None


def _slower_than_back(
    looks: Sequence[Look],
    far: Sequence[Sequence[_Sent]],
    moving: float,
    least: float,
    named: int | None,
    *,
    steadily: bool,
) -> SlowLink | None:
    """The slower way between two hosts, and what that costs.

    Each of the two waits for the other's bytes and for its answers, so the way back is slower,
    too, and a healthy network of two has one that is a little slower at any time. So it must be
    slower without the look in which it was slowest, too, and clearly so or for long; of a few looks
    those with steps that something has held up do not count, nor those that do not know one
    connection in each direction. What a link like any other would spare is not seen of two: it is
    taken to be half of the time, or what the way back, which waits for this one, needs less, where
    that is more.
    """
    known = [number for number, ways in enumerate(far) if _there_and_back(ways)]
    enough = max(SEVERAL - 1, MOSTLY * len(looks))
    if len(known) < enough:
        return None
    seen = [far[number] for number in known]
    rates = _rates(seen)
    way, back = sorted(rates, key=lambda one: rates[one])
    again = named in {one.rank for ways in seen for one in ways if one.way == way}
    pairs = {number: _of_pair(far[number], way) for number in known}
    steps = steps_of([looks[number] for number in known])
    sent, slow = (torch.stack([*pairs.values()]).sum(dim=0)[:, 0] / steps).tolist()
    seconds = max(min(moving, slow) - moving / 2, min(moving, slow - sent / rates[back]))
    counted = [one for one in known if steadily or again or _held_up(looks[one]) <= AS_HELD_UP]
    if seconds < least or len(counted) < enough:
        return None
    rank = _rank_at(way[0], seen, named)
    found = None if rank is None else SlowLink(rank, seconds, _told(rates[way], rates[back]))
    each = torch.stack([pairs[number] for number in counted])
    every = each.sum(dim=0)
    if again:
        return found if _beside(every) <= SLOW_AGAIN else None
    slowest = min(range(len(each)), key=lambda one: _beside(each[one]))
    if _beside(every - each[slowest]) > STILL_SLOW:
        return None
    more = float(every[1, 0] - every[1, 1]) / steps_of([looks[number] for number in counted])
    clearly = _beside(every) <= SLOW_WAY and more >= CLEARLY
    return found if clearly or (steadily and _beside(every) <= SLOW_STEADILY) else None


def _there_and_back(ways: Sequence[_Sent]) -> bool:
    """Whether these are one connection in each direction between two hosts."""
    return len(ways) == 2 and ways[0].way == ways[1].way[::-1]


def _held_up(look: Look) -> float:
    """By how much single steps of a look stood still for longer than the others: a part of it.

    A slow link is slow in every step. What comes now and then is something else, and lengthens the
    time in which bytes were on their way as well.
    """
    still = look.seconds[:, :, [_WAITING, _MOVING]].sum(dim=2).amax(dim=0)
    usual = still.median()
    return float((still - usual)[still > HELD_UP * usual].sum() / still.sum().clamp(min=1e-9))


def _of_pair(ways: Sequence[_Sent], way: _Way) -> Tensor:
    """Bytes there and back, and seconds in which they were on their way: ``[2, 2]``."""
    there, back = sorted(ways, key=lambda one: one.way != way)
    both = [[there.bytes, back.bytes], [there.seconds, back.seconds]]
    return torch.tensor(both, dtype=torch.float64).clamp(min=1e-6)


def _beside(pair: Tensor) -> float:
    """The first one's rate as a part of the other's, of bytes and seconds ``[2, the two]``."""
    return float(pair[0, 0] / pair[1, 0] * pair[1, 1] / pair[0, 1])


def _losses(looks: Sequence[Look]) -> _Ways:
    """Of each way between two hosts, in one direction: bytes, and how many of them again.

    A rank's busiest connection may be another one in each look, so they are taken one by one.

    Returns:
        By addresses of sender and receiver: bytes sent, part of them and bytes sent again.
    """
    sums: dict[_Way, list[float]] = {}
    for look in looks:
        for _, way, sent, _, again in _sent_in(look):
            if way[0] != way[1] and sent > 0 and again >= 0:  # all of them are known
                one = sums.setdefault(way, [0.0, 0.0])
                one[0], one[1] = one[0] + sent, one[1] + again
    return {way: (sent, again / sent, again) for way, (sent, again) in sums.items()}


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
