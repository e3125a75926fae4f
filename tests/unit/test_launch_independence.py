"""Tests the launcher's message about ranks that trained independently of each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.launch.health.independence import describe_independence, exchanged_in_children
from paceline.spec.events import Event


def report(rank: int, **fields: Any) -> Event:
    counters = {"optimizer_steps": 0, "calls": 0, "largest_call": 0, "group_rank": 0}
    group_fields = {"group_size": 0, "exchanges": False, "in_children": False}
    return Event("gradient exchange", "n1", rank, 0.0, {**counters, **group_fields, **fields})


@pytest.mark.parametrize(
    "events",
    [
        [report(0, optimizer_steps=3)],  # rank 1 exchanged gradients or called os._exit
        [report(0, optimizer_steps=3), report(1, optimizer_steps=3, exchanges=True)],
        [report(0, calls=1), report(1, calls=1)],  # evaluation only
        [report(0, in_children=True), report(1)],  # child processes
        [report(0, optimizer_steps=3, calls=2), report(1, calls=2)],  # rank 1 evaluates
    ],
)
def test_inconclusive_events_give_no_message(events: list[Event]) -> None:
    assert describe_independence(2, events) == ""


def test_detects_gradient_exchange_in_child_processes() -> None:
    """Then, no event shows whether ``--communication`` compressed the gradients."""
    assert exchanged_in_children([report(0), report(0, exchanges=True)])
    assert not exchanged_in_children([report(0), report(1)])


def test_single_rank_gives_no_message() -> None:
    assert describe_independence(1, [report(0, optimizer_steps=3)]) == ""


def test_notes_independent_ranks_and_warns_of_missing_gradients() -> None:
    training = [report(rank, optimizer_steps=3) for rank in (0, 1)]
    metrics = [report(rank, optimizer_steps=3, calls=9, largest_call=2) for rank in (0, 1)]
    assert describe_independence(2, [report(0), report(1)]).startswith("note: ")
    assert describe_independence(2, training).startswith("note: the ranks exchanged nothing: each")
    assert describe_independence(2, metrics).startswith("warning: the ranks exchanged no gradients")
    assert "at most 2 elements" in describe_independence(2, metrics)
    single = [report(rank, optimizer_steps=3, calls=9, largest_call=1) for rank in (0, 1)]
    assert "(at most 1 element at a time)" in describe_independence(2, single)


def test_advises_to_make_group_only_if_there_is_none() -> None:
    for fields, has_group in (({}, False), ({"group_size": 2}, True), ({"calls": 9}, True)):
        training = [report(rank, optimizer_steps=3, **fields) for rank in (0, 1)]
        text = describe_independence(2, training)
        assert "wrap the model in DistributedDataParallel" in text
        assert ("init_process_group" in text) is not has_group


def test_spawned_process_counts_for_its_rank() -> None:
    spawned = [report(rank, optimizer_steps=3, calls=9) for rank in (0, 1)]
    parents = [report(0, in_children=True), report(1, in_children=True)]
    assert describe_independence(2, spawned + parents).startswith("warning: ")


def test_warns_of_groups_within_single_rank() -> None:
    """Each rank's script starts processes for its host's GPUs, as if there were no other rank."""

    def spawned(size: int, group_ranks: Sequence[int] = (0, 1), ranks: int = 2) -> list[Event]:
        training_fields = {"optimizer_steps": 3, "exchanges": True, "group_size": size}
        return [report(rank, **training_fields, group_rank=number)
                for rank in range(ranks) for number in group_ranks]  # fmt: skip

    rank_reports = [report(rank) for rank in (0, 1)]
    assert "mp.spawn" in describe_independence(2, rank_reports + spawned(2))
    assert describe_independence(2, rank_reports + spawned(4)) == ""  # one group of all processes
    assert describe_independence(2, rank_reports + spawned(2, [0])) == ""
    assert (
        describe_independence(2, rank_reports + spawned(2, [1, 1])) == ""
    )  # two trainings in sequence
    assert describe_independence(2, rank_reports + spawned(2, ranks=1)) == ""
    assert describe_independence(2, rank_reports + spawned(0)) == ""  # group size unknown


def test_huge_group_size_of_hostile_rank_takes_no_memory() -> None:
    reports = [report(rank, optimizer_steps=3, exchanges=True, group_size=1 << 53)
               for rank in (0, 1)]  # fmt: skip
    silent = [report(rank) for rank in (0, 1)]
    assert describe_independence(2, silent + reports) == ""
