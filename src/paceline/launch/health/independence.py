"""Detects that the ranks of an attempt did not work together, from their reports at its end."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.spec.events import Event
from paceline.spec.formatting import pluralize

REPORT = "gradient exchange"
NOTHING_EXCHANGED = "note: the ranks exchanged nothing: each worked independently"


def describe_independence(world_size: int, reports: Sequence[Event]) -> str:
    """Returns a sentence if the ranks trained separate models or exchanged nothing; else empty.

    It is empty, too, if one rank did not report: it exchanged gradients, runs a program that is not
    Python, or left without Python's end.
    """
    if world_size < 2 or len({event.rank for event in reports}) < world_size:
        return ""
    if exchanged_in_children(reports):
        return _describe_separate_groups(world_size, reports)
    training = {event.rank for event in reports if event["optimizer_steps"]}
    largest = max(event["largest_call"] or 0 for event in reports)
    has_group = any(event["calls"] or (event["group_size"] or 0) > 1 for event in reports)
    advice = "To train one model, wrap the model in DistributedDataParallel"
    if not has_group:
        advice += ", after a call of init_process_group (if the script makes this call only when"
        advice += " it gets --local_rank, add --pass-local-rank)"
    if len(training) > 1 and any(event["calls"] for event in reports):
        size = f" (at most {pluralize(largest, 'element')} at a time)" if largest else ""
        return (
            f"warning: the ranks exchanged no gradients{size}: "
            f"each trained a model of its own. {advice}"
        )
    if any(event["calls"] for event in reports):
        return ""
    if len(training) > 1:
        return f"note: the ranks exchanged nothing: each trained a model of its own. {advice}"
    if any(event["in_children"] for event in reports):
        return ""
    return NOTHING_EXCHANGED


def _describe_separate_groups(world_size: int, reports: Sequence[Event]) -> str:
    """Returns a sentence if each rank's processes were whole groups; empty if that is not known."""
    for rank in range(world_size):
        trained = [event for event in reports if event.rank == rank and event["exchanges"]]
        group_ranks = {event["group_rank"] or 0 for event in trained}
        largest = max((event["group_size"] or 0 for event in trained), default=0)
        # otherwise others were in groups of other ranks; a hostile rank reports a huge size
        if not largest or len(group_ranks) != largest or group_ranks != {*range(largest)}:
            return ""
    return (
        "warning: each rank started processes that exchanged gradients only with each other: each "
        "rank trained a model of its own. Have the script train in the rank itself, by RANK and "
        "WORLD_SIZE, instead of starting processes (mp.spawn); -p N starts N ranks on each host"
    )


def exchanged_in_children(reports: Sequence[Event]) -> bool:
    """Whether processes that ranks started exchanged gradients: a rank that does reports nothing.

    What such a process does with its gradients otherwise, it does not report.
    """
    return any(event["exchanges"] for event in reports)
