"""Ranks called different collectives."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from paceline.explain import stacks
from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match
from paceline.explain.stacks import Stand
from paceline.spec.failure import PEER_GONE

# who says this has got a part of a tensor into room for a part of its own
_SIZES = re.compile(r"op\.preamble\.length <= op\.nbytes(?:\. \d+ vs (?P<room>\d+))?")
_PARTS = 4  # in so many parts a rank sends its share of a tensor, at most


def match(evidence: Evidence) -> Match | None:
    """Ranks that waited for each other in different calls, or in the same with other shapes."""
    stands = [*stacks.failed(evidence, PEER_GONE), *stacks.seen(evidence)]
    inside = {stand.rank: stand for stand in reversed(stands) if stand.own and stacks.waits(stand)}
    places = {rank: stacks.where(stand) for rank, stand in inside.items()}
    told = stacks.calls(evidence)
    called = stacks.first_difference(told)
    # ranks that fail one after the other may be a collective apart, and yet have called the same
    same = called is None and all(rank in told for rank in inside)
    if len(set(places.values())) > 1 and not same:
        return _odd_one("ranks called different collectives", inside, places, places)
    if not evidence.says(_SIZES):
        return None
    for end in evidence.ends:  # who had no time for a traceback has told its last call
        if end.rank in told and end.rank not in inside:
            inside[end.rank] = Stand(end.host, end.rank, "", ())
    sizes = _sizes(evidence, told, called)
    inside = {rank: stand for rank, stand in inside.items() if rank in sizes}
    values = {rank: str(stacks.agreed(sizes[rank])) for rank in inside}
    if len(set(values.values())) < 2:
        return None
    words = {rank: " with ".join(filter(None, (places.get(rank), sizes[rank]))) for rank in inside}
    what = "ranks came to one collective with different tensors"
    return _odd_one(what, inside, values, words)


def _sizes(evidence: Evidence, told: Mapping[int, tuple[str, ...]],
           called: stacks.Difference | None) -> dict[int, str]:  # fmt: skip
    """By rank, what it called where they differ.

    Who tells nothing is named only where nobody else can be the odd one, or where its room was
    smaller than a part of what another has.
    """
    if called is not None:
        return dict(called.what)
    last = {rank: lines[-1].split(" ", 2)[-1] for rank, lines in told.items()}
    ranks = {end.rank for end in evidence.ends if end.rank is not None}
    silent = ranks - set(told)
    if len(silent) > 1:
        rooms = {log.rank: found["room"] for log, _, found in evidence.search(_SIZES)}
        silent = {rank for rank in silent if rank in rooms and last
                  and _smaller(int(rooms[rank] or 0), last.values(), len(ranks))}  # fmt: skip
    return {**last, silent.pop(): "another shape"} if len(silent) == 1 else {}


def _smaller(room: int, calls: Iterable[str], ranks: int) -> bool:
    """Whether room of so many bytes is for a smaller tensor than those of all these calls."""
    numbers = [stacks.agreed(call)[1] for call in calls]
    return room > 0 and all(
        isinstance(number, int) and number > _PARTS * ranks * room for number in numbers
    )


def _odd_one(what: str, inside: Mapping[int, Stand], values: Mapping[int, str],
             words: Mapping[int, str]) -> Match:  # fmt: skip
    """Names the one that is not like the most first, or two that differ where nobody has most."""
    common = Counter(values[rank] for rank in sorted(inside)).most_common(1)[0][0]
    odd = next(rank for rank in sorted(inside) if values[rank] != common)
    other = next(rank for rank in sorted(inside) if values[rank] == common)
    one, two = inside[odd], inside[other]
    cause = f"{what}: {one.who} {words[odd]}, {two.who} {words[other]}"
    return Match(cause, (one.host, two.host), None, 0.98)
