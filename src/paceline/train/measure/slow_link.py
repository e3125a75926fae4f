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

from paceline.train.measure.pace import PARTS, StepTimings, active_ranks, num_steps
from paceline.train.measure.vitals import VITALS

MIN_AGREEING = 3  # looks that have to agree: one is a moment of its link like no other
MIN_DURATION_S = 0.75  # of these looks: something from outside may hold a link up for a third of it
MAX_SLOW_RATE = 0.6  # of the best way's rate: a way below this is slow
MAX_REPORTED_RATE = 0.75  # of it: a way below this that was slow before still is
SAME_CAUSE_RATE = 1.4  # times the slowest way's rate: below this a way belongs to the same trouble
MIN_COST_PART = 0.4  # of what is worth a name: by that it takes longer in each look
MAX_DIRECTION_RATE = 0.85  # of the rate of the way back, between two hosts
MAX_DIRECTION_RATE_TRIMMED = 0.90  # of it, without the look in which it was slowest
MIN_DIFFERENCE_S = 0.006  # of a step: kernels that count in ticks of 4 ms make smaller ones
STEADY_COUNT, MAX_STEADY_RATE = 9, 0.83  # after so many looks, a rate below this in all together
MAX_REPORTED_DIRECTION_RATE = 0.92  # of it: a way that was named before keeps its name
MIN_STALL_RATIO = 1.25  # times the usual step: what takes longer is no matter of a link
MAX_STALLED_PART = 0.1  # of a look in such steps: with more it says nothing
MIN_SLOW_STEPS_PART = 2 / 3  # of the steps on a slow link, whose bytes computing may hide
MIN_BYTES_PER_STEP = 10_000  # bytes of a step that say something of a link
MIN_RESENT_PART = 0.005  # of bytes were sent again: it may be this, and not the rate, that is slow
MIN_LOSS_PART = 0.01  # of a connection's bytes were sent again: something on its way loses them
MIN_PART_OF_WORST_LOSS = 0.25  # a connection that loses so much belongs to the same trouble
MIN_RESENT_BYTES = 5_000  # bytes sent again, below which it may be chance
MIN_CLEAN_BYTES = 200_000  # bytes that came through without such losses: both ends are sound
_WAITING, _MOVING = PARTS.index("waiting"), PARTS.index("moving")
_Link = tuple[float, float]  # the addresses of sender and receiver
_LossByLink = dict[_Link, tuple[float, float, float]]


@dataclass(frozen=True, slots=True)
class LinkFinding:
    """A rank whose link holds the others up.

    Attributes:
        seconds: Of a step that it costs.
        detail: What was seen, for people.
    """

    rank: int
    seconds: float
    detail: str


class _Traffic(NamedTuple):
    """What a rank sent on its busiest connection, altogether."""

    rank: int
    link: _Link
    bytes: float
    seconds: float  # in which these were on their way
    resent: float  # bytes that were sent again


def _traffic(timings: StepTimings) -> list[_Traffic]:
    """Returns the traffic of each rank's busiest connection, by rank."""
    names = ("here", "there", "sent", "sending", "resent")
    rows = timings.vitals[:, [VITALS.index(name) for name in names]].tolist()
    return [
        _Traffic(rank, (sender, receiver), *counters)
        for rank, (sender, receiver, *counters) in enumerate(rows)
    ]


def _remote_traffic(timings: StepTimings, active: Collection[int]) -> list[_Traffic]:
    """Returns traffic of active ranks to other hosts, if it is enough to judge a link by."""
    min_bytes = MIN_BYTES_PER_STEP * num_steps([timings])
    remote = [traffic for traffic in _traffic(timings) if traffic.link[0] != traffic.link[1]]
    return [entry for entry in remote if entry.rank in active and entry.bytes > min_bytes]


def find_slow_link(
    history: Sequence[StepTimings], min_cost_s: float, reported_rank: int | None
) -> LinkFinding | None:
    """Finds the rank whose bytes are in flight for much longer than those of others.

    Args:
        min_cost_s: Seconds of a step below which it costs nothing worth a name.
        reported_rank: The rank whose link was slow before; half the cost keeps it reported.
    """
    min_cost_s = min_cost_s if reported_rank is None else min_cost_s / 2
    if not (latest := recent_timings(history)):
        return None
    finding = _find_in(latest, min_cost_s, reported_rank, history[: -len(latest)])
    if finding is None and len(history) >= STEADY_COUNT:
        finding = _find_in(history, min_cost_s, reported_rank, steadily=True)
    return finding


def recent_timings(history: Sequence[StepTimings]) -> Sequence[StepTimings]:
    """Returns the latest timings that must agree; none if they do not last long enough yet."""
    seconds = 0.0
    for number, timings in enumerate(reversed(history), 1):
        seconds += float(timings.seconds.sum(dim=2).mean()) * num_steps([timings])
        if number >= MIN_AGREEING and seconds >= MIN_DURATION_S:
            return history[-number:]
    return ()


def _find_in(
    history: Sequence[StepTimings],
    min_cost_s: float,
    reported_rank: int | None,
    earlier: Sequence[StepTimings] = (),
    *,
    steadily: bool = False,
) -> LinkFinding | None:
    """Finds a link that is slow in all of these timings; ``steadily``: a little is enough."""
    moves = torch.cat([timings.seconds[0, :, _MOVING] for timings in history])  # the same of all
    moving = float(moves.mean())
    if moving < min_cost_s / 2:  # what nearly always is the case ends here
        return None
    active = active_ranks(history)
    remote = [_remote_traffic(timings, active) for timings in history]
    hosts = {end for entries in remote for traffic in entries for end in traffic.link}
    finding: LinkFinding | None = None
    options = moving, min_cost_s, reported_rank
    if len(hosts) == 2:
        finding = _find_between_two(history, remote, *options, steadily=steadily)
    elif len(hosts) > 2 and not steadily:
        earlier_remote = [_remote_traffic(timings, active) for timings in earlier]
        finding = _find_among_many(history, remote, earlier_remote, *options)
    if finding is None:
        return None
    sent = [traffic for entries in remote for traffic in entries if traffic.rank == finding.rank]
    lost = sum(entry.resent for entry in sent) / max(1.0, sum(entry.bytes for entry in sent))
    losses = _loss_by_link(history)
    if max([lost, *(part for _, part, _ in losses.values())]) >= MIN_RESENT_PART:
        return _find_lossy(remote, losses, finding.seconds, reported_rank)
    # A rate is the same in every step; what is lost is sent again in some.
    if float((moves >= finding.seconds / 2).double().mean()) < MIN_SLOW_STEPS_PART:
        return None
    losing = f", {lost:.1%} sent again" if lost > 0.001 else ""
    return replace(finding, detail=finding.detail + losing)


def _format_rates(slow_rate: float, fast_rate: float) -> str:
    return f"{slow_rate / 1e6:.1f} MB/s, others {fast_rate / 1e6:.1f}"


def _rank_at(
    host: float, remote: Sequence[Sequence[_Traffic]], reported_rank: int | None
) -> int | None:
    """Returns the rank of a host to report: one that sends to other hosts, stable over time."""
    ranks = {traffic.rank for entries in remote for traffic in entries if traffic.link[0] == host}
    return reported_rank if reported_rank in ranks else min(ranks, default=None)


def _find_lossy(
    remote: Sequence[Sequence[_Traffic]],
    losses: _LossByLink,
    seconds: float,
    reported_rank: int | None,
) -> LinkFinding | None:
    """Finds the host that loses bytes; both ends of a link see a loss, so several are needed."""
    host = _lossy_host(losses)
    rank = None if host is None else _rank_at(host, remote, reported_rank)
    if host is None or rank is None:
        return None
    max_loss = max(part for link, (_, part, _) in losses.items() if host in link)
    return LinkFinding(rank, seconds, f"{max_loss:.1%} of the bytes on it are sent again")


def _find_among_many(
    history: Sequence[StepTimings],
    remote: Sequence[Sequence[_Traffic]],
    earlier: Sequence[Sequence[_Traffic]],
    moving: float,
    min_cost_s: float,
    reported_rank: int | None,
) -> LinkFinding | None:
    """Finds the host that the slow links of three or more hosts have in common, and its cost.

    A rank's busiest connection may be another one in each look, so all that were seen count.
    """
    rates = _rates(earlier) | _rates(remote)
    slowest, fastest = min(rates.values()), max(rates.values())
    if slowest > (MAX_SLOW_RATE if reported_rank is None else MAX_REPORTED_RATE) * fastest:
        return None
    slow_links = [link for link, rate in rates.items() if rate <= SAME_CAUSE_RATE * slowest]
    # What lies between says nothing of its ends: it may be slow for the same reason, or not.
    min_fast_rate = max(MAX_SLOW_RATE * fastest, SAME_CAUSE_RATE * slowest)
    fast_links = [link for link, rate in rates.items() if rate > min_fast_rate]
    host = _common_host(slow_links, fast_links)
    rank = None if host is None else _rank_at(host, remote, reported_rank)
    if rank is None:
        return None
    costs = [
        _max_cost(timings, entries, slow_links, fastest, moving)
        for timings, entries in zip(history, remote, strict=True)
    ]
    measured = [cost for cost in costs if cost is not None]
    if len(measured) < max(1, len(history) - 1):
        return None
    if reported_rank != rank and min(measured) < MIN_COST_PART * min_cost_s:
        return None
    seconds = sum(measured) / len(measured)
    if seconds < min_cost_s:
        return None
    return LinkFinding(rank, seconds, _format_rates(slowest, fastest))


def _rates(remote: Sequence[Sequence[_Traffic]]) -> dict[_Link, float]:
    sums: dict[_Link, list[float]] = {}
    for entries in remote:
        for sent in entries:
            totals = sums.setdefault(sent.link, [0.0, 0.0])
            totals[0], totals[1] = totals[0] + sent.bytes, totals[1] + sent.seconds
    return {link: sent / max(seconds, 1e-6) for link, (sent, seconds) in sums.items()}


def _max_cost(
    timings: StepTimings,
    entries: Sequence[_Traffic],
    slow_links: Sequence[_Link],
    fastest: float,
    moving: float,
) -> float | None:
    """Returns the seconds of a step that the slowest link costs; ``None`` if none was seen."""
    steps = num_steps([timings])
    slow = [traffic for traffic in entries if traffic.link in slow_links]
    return max(
        (min(moving, entry.seconds / steps) - entry.bytes / steps / fastest for entry in slow),
        default=None,
    )


def _common_host(slow_links: Sequence[_Link], fast_links: Sequence[_Link]) -> float | None:
    """Returns the host that all slow links have in common; ``None`` if it is ambiguous.

    One that no fast link touches is slow both ways, another one in what it sends or receives.
    """
    healthy = {end for link in fast_links for end in link}
    candidates = set.intersection(*map(set, slow_links)) - healthy
    senders, receivers = ({*ends} for ends in zip(*slow_links, strict=True))
    for hosts in (candidates, senders, receivers):
        if len(hosts) == 1:
            return hosts.pop()
    return None


def _find_between_two(
    history: Sequence[StepTimings],
    remote: Sequence[Sequence[_Traffic]],
    moving: float,
    min_cost_s: float,
    reported_rank: int | None,
    *,
    steadily: bool,
) -> LinkFinding | None:
    """Finds the slower direction between two hosts, and its cost.

    A healthy network of two also has one direction that is a little slower at any time. So it must
    be slower without the look in which it was slowest, too, and clearly so or for long. Looks with
    steps that something has held up do not count, nor those without one connection in each
    direction. What a healthy link would spare is taken to be half of the time, or what the way back
    needs less, where that is more.
    """
    pair_indexes = [number for number, entries in enumerate(remote) if _is_pair(entries)]
    min_count = max(MIN_AGREEING - 1, MIN_SLOW_STEPS_PART * len(history))
    if len(pair_indexes) < min_count:
        return None
    pair_entries = [remote[number] for number in pair_indexes]
    rates = _rates(pair_entries)
    slow_link, fast_link = sorted(rates, key=lambda link: rates[link])
    was_reported = reported_rank in {
        traffic.rank for entries in pair_entries for traffic in entries if traffic.link == slow_link
    }
    pairs = {number: _pair_totals(remote[number], slow_link) for number in pair_indexes}
    steps = num_steps([history[number] for number in pair_indexes])
    sent_bytes, slow_s = (torch.stack([*pairs.values()]).sum(dim=0)[:, 0] / steps).tolist()
    seconds = max(
        min(moving, slow_s) - moving / 2, min(moving, slow_s - sent_bytes / rates[fast_link])
    )
    counted_indexes = pair_indexes
    if not (steadily or was_reported):
        counted_indexes = [
            index for index in pair_indexes if _stalled_part(history[index]) <= MAX_STALLED_PART
        ]
    if seconds < min_cost_s or len(counted_indexes) < min_count:
        return None
    rank = _rank_at(slow_link[0], pair_entries, reported_rank)
    if rank is None:
        return None
    finding = LinkFinding(rank, seconds, _format_rates(rates[slow_link], rates[fast_link]))
    each_pair = torch.stack([pairs[number] for number in counted_indexes])
    total = each_pair.sum(dim=0)
    if was_reported:
        return finding if _rate_ratio(total) <= MAX_REPORTED_DIRECTION_RATE else None
    slowest = min(range(len(each_pair)), key=lambda index: _rate_ratio(each_pair[index]))
    if _rate_ratio(total - each_pair[slowest]) > MAX_DIRECTION_RATE_TRIMMED:
        return None
    num_counted = num_steps([history[number] for number in counted_indexes])
    difference_s = float(total[1, 0] - total[1, 1]) / num_counted
    is_clear = _rate_ratio(total) <= MAX_DIRECTION_RATE and difference_s >= MIN_DIFFERENCE_S
    return finding if is_clear or (steadily and _rate_ratio(total) <= MAX_STEADY_RATE) else None


def _is_pair(entries: Sequence[_Traffic]) -> bool:
    return len(entries) == 2 and entries[0].link == entries[1].link[::-1]


def _stalled_part(timings: StepTimings) -> float:
    """Returns the part of the waiting time that exceptionally long steps account for.

    A slow link is slow in every step; what comes now and then is something else.
    """
    stall_s = timings.seconds[:, :, [_WAITING, _MOVING]].sum(dim=2).amax(dim=0)
    median_s = stall_s.median()
    excess_s = (stall_s - median_s)[stall_s > MIN_STALL_RATIO * median_s].sum()
    return float(excess_s / stall_s.sum().clamp(min=1e-9))


def _pair_totals(entries: Sequence[_Traffic], link: _Link) -> Tensor:
    """Returns bytes and seconds in flight, forward and backward, shape ``[2, 2]``."""
    forward, backward = sorted(entries, key=lambda traffic: traffic.link != link)
    both = [[forward.bytes, backward.bytes], [forward.seconds, backward.seconds]]
    return torch.tensor(both, dtype=torch.float64).clamp(min=1e-6)


def _rate_ratio(pair: Tensor) -> float:
    """Returns the forward rate as a part of the backward rate, from :func:`_pair_totals`."""
    return float(pair[0, 0] / pair[1, 0] * pair[1, 1] / pair[0, 1])


def _loss_by_link(history: Sequence[StepTimings]) -> _LossByLink:
    """Returns bytes sent, part of them and bytes sent again of each link between two hosts.

    A rank's busiest connection may be another one in each look, so they are taken one by one.
    """
    sums: dict[_Link, list[float]] = {}
    for timings in history:
        for _, link, sent, _, resent in _traffic(timings):
            if link[0] != link[1] and sent > 0 and resent >= 0:  # all of them are known
                totals = sums.setdefault(link, [0.0, 0.0])
                totals[0], totals[1] = totals[0] + sent, totals[1] + resent
    return {link: (sent, resent / sent, resent) for link, (sent, resent) in sums.items()}


def _lossy_host(losses: _LossByLink) -> float | None:
    """Returns the one host that all lossy links have in common, if all other hosts are clean.

    ``None`` where it is not certain: between two hosts only, when a single way loses bytes, and
    when several hosts may.
    """
    max_loss = max((loss for _, loss, _ in losses.values()), default=0.0)
    min_loss = max(MIN_LOSS_PART, MIN_PART_OF_WORST_LOSS * max_loss)
    lossy_links, clean_ends = [], set[float]()
    for link, (sent, loss, resent) in losses.items():
        if loss >= min_loss and resent >= MIN_RESENT_BYTES:
            lossy_links.append(link)
        elif loss < min_loss and sent >= MIN_CLEAN_BYTES:
            clean_ends.update(link)
    suspects = {end for link in lossy_links for end in link} - clean_ends
    if len(lossy_links) < 2 or len(suspects) != 1:
        return None
    (host,) = suspects
    return host if all(host in link for link in lossy_links) else None
