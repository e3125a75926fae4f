"""Ranks called different collectives."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from paceline.explain import stacks
from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match
from paceline.explain.stacks import RankStack
from paceline.spec.failure import PEER_LOST

# a rank with this error received a larger part of a tensor than its own buffer holds
_SIZE_ERROR = re.compile(r"op\.preamble\.length <= op\.nbytes(?:\. \d+ vs (?P<buffer>\d+))?")
_MAX_PARTS = 4  # in which a rank sends its share of a tensor, at most


def match(evidence: Evidence) -> Match | None:
    """Finds ranks that waited for each other in different calls, or with different shapes."""
    rank_stacks = [
        *stacks.stacks_at_error(evidence, PEER_LOST),
        *stacks.stacks_at_failure(evidence),
    ]
    waiting = {
        stack.rank: stack
        for stack in reversed(rank_stacks)
        if stack.script_frame and stacks.is_waiting(stack)
    }
    positions = {rank: stacks.describe_position(stack) for rank, stack in waiting.items()}
    calls = stacks.last_calls(evidence)
    difference = stacks.first_difference(calls)
    # ranks that fail one after another may be one collective apart without any difference
    same_calls = difference is None and all(rank in calls for rank in waiting)
    if len(set(positions.values())) > 1 and not same_calls:
        return _outlier_match("ranks called different collectives", waiting, positions, positions)
    if not evidence.contains(_SIZE_ERROR):
        return None
    for end in evidence.exits:  # ranks without a traceback whose last call is recorded
        if end.rank in calls and end.rank not in waiting:
            waiting[end.rank] = RankStack(end.host, end.rank, "", ())
    sizes = _last_shapes(evidence, calls, difference)
    waiting = {rank: stack for rank, stack in waiting.items() if rank in sizes}
    values = {rank: str(stacks.comparable_call(sizes[rank])) for rank in waiting}
    if len(set(values.values())) < 2:
        return None
    descriptions = {
        rank: " with ".join(filter(None, (positions.get(rank), sizes[rank]))) for rank in waiting
    }
    title = "ranks came to one collective with different tensors"
    return _outlier_match(title, waiting, values, descriptions)


def _last_shapes(evidence: Evidence, calls: Mapping[int, tuple[str, ...]],
           difference: stacks.Difference | None) -> dict[int, str]:  # fmt: skip
    """By rank, the call in which ranks differ.

    A rank without records is named only if no other can be the outlier, or if its buffer was
    smaller than a part of the others' tensors.
    """
    if difference is not None:
        return dict(difference.calls)
    shapes = {rank: lines[-1].split(" ", 2)[-1] for rank, lines in calls.items()}
    ranks = {end.rank for end in evidence.exits if end.rank is not None}
    unknown = ranks - set(calls)
    if len(unknown) > 1:
        buffer_bytes = {unit.rank: match["buffer"] for unit, match in evidence.search(_SIZE_ERROR)}
        unknown = {
            rank for rank in unknown
            if rank in buffer_bytes and shapes
            and _is_too_small(int(buffer_bytes[rank] or 0), shapes.values(), len(ranks))
        }  # fmt: skip
    return {**shapes, unknown.pop(): "another shape"} if len(unknown) == 1 else {}


def _is_too_small(buffer_bytes: int, calls: Iterable[str], num_ranks: int) -> bool:
    """Whether a buffer belongs to a smaller tensor than those of all calls."""
    sizes = [stacks.comparable_call(call)[1] for call in calls]
    return buffer_bytes > 0 and all(
        isinstance(size, int) and size > _MAX_PARTS * num_ranks * buffer_bytes for size in sizes
    )


def _outlier_match(title: str, waiting: Mapping[int, RankStack], values: Mapping[int, str],
             descriptions: Mapping[int, str]) -> Match:  # fmt: skip
    """Names a rank that differs from the most common value, then one that has it."""
    common = Counter(values[rank] for rank in sorted(waiting)).most_common(1)[0][0]
    outlier = next(rank for rank in sorted(waiting) if values[rank] != common)
    reference = next(rank for rank in sorted(waiting) if values[rank] == common)
    pair = (outlier, reference)
    texts = ", ".join(f"{waiting[rank].label} {descriptions[rank]}" for rank in pair)
    return Match(f"{title}: {texts}", tuple(waiting[rank].host for rank in pair), None, 0.98)
