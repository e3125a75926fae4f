"""What a launcher says of ranks that did not work together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.launch.health.independence import describe_independence, exchanged_in_children
from paceline.spec.events import Event


def report(rank: int, **fields: Any) -> Event:
    alone = {"optimizer_steps": 0, "calls": 0, "largest_call": 0, "group_rank": 0}
    none = {"group_size": 0, "exchanges": False, "in_children": False}
    return Event("gradient exchange", "n1", rank, 0.0, {**alone, **none, **fields})


@pytest.mark.parametrize(
    "events",
    [
        [report(0, optimizer_steps=3)],  # rank 1 exchanged gradients, or left by os._exit
        [report(0, optimizer_steps=3), report(1, optimizer_steps=3, exchanges=True)],
        [report(0, calls=1), report(1, calls=1)],  # an evaluation
        [report(0, in_children=True), report(1)],  # programs of its own
        [report(0, optimizer_steps=3, calls=2), report(1, calls=2)],  # the other one evaluates
    ],
)
def test_it_says_nothing_where_it_cannot_know(events: list[Event]) -> None:
    assert describe_independence(2, events) == ""


def test_processes_of_ranks_may_exchange_gradients() -> None:
    """Then no event says whether ``--communication`` compressed them."""
    assert exchanged_in_children([report(0), report(0, exchanges=True)])
    assert not exchanged_in_children([report(0), report(1)])


def test_one_rank_is_no_subject() -> None:
    assert describe_independence(1, [report(0, optimizer_steps=3)]) == ""


def test_independent_ranks_get_a_note_and_groups_without_gradients_a_warning() -> None:
    training = [report(rank, optimizer_steps=3) for rank in (0, 1)]
    metrics = [report(rank, optimizer_steps=3, calls=9, largest_call=2) for rank in (0, 1)]
    assert describe_independence(2, [report(0), report(1)]).startswith("note: ")
    assert describe_independence(2, training).startswith("note: the ranks exchanged nothing: each")
    assert describe_independence(2, metrics).startswith("warning: the ranks exchanged no gradients")
    assert "at most 2 elements" in describe_independence(2, metrics)


def test_a_process_that_the_rank_spawned_counts_for_it() -> None:
    spawned = [report(rank, optimizer_steps=3, calls=9) for rank in (0, 1)]
    parents = [report(0, in_children=True), report(1, in_children=True)]
    assert describe_independence(2, spawned + parents).startswith("warning: ")


def test_groups_that_do_not_reach_beyond_a_rank_get_a_warning() -> None:
    """Each rank's script starts processes for the GPUs of its host, as if there were no other."""

    def spawned(size: int, group_ranks: Sequence[int] = (0, 1), ranks: int = 2) -> list[Event]:
        each = {"optimizer_steps": 3, "exchanges": True, "group_size": size}
        return [report(rank, **each, group_rank=number)
                for rank in range(ranks) for number in group_ranks]  # fmt: skip

    own = [report(rank) for rank in (0, 1)]
    assert "mp.spawn" in describe_independence(2, own + spawned(2))
    assert describe_independence(2, own + spawned(4)) == ""  # one group of all
    assert describe_independence(2, own + spawned(2, [0])) == ""
    assert describe_independence(2, own + spawned(2, [1, 1])) == ""  # one training after another
    assert describe_independence(2, own + spawned(2, ranks=1)) == ""
    assert describe_independence(2, own + spawned(0)) == ""  # not known
