"""Tests that ranks know which connections between hosts ranks of the job have made."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from paceline.agent.ranks.connection_proofs import Connection, ConnectionProofs

MADE = [Connection(f"10.0.0.{host}", 40000 + host, "10.0.0.1", 50000) for host in (2, 3)]
INTRUDER = Connection("10.0.0.2", 41000, "10.0.0.1", 50000)


def unproven_later(proofs: ConnectionProofs, accepted: Any) -> tuple[threading.Thread, list[Any]]:
    """Looks for unproven connections in a thread, which must wait; returns it and its result."""
    found: list[Any] = []
    waiting = threading.Thread(
        target=lambda: found.append(proofs.find_unproven(accepted)), daemon=True
    )
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    return waiting, found


@pytest.mark.parametrize("num_groups", [1, 3])
def test_unproven_connections_are_found_once_all_have_published(num_groups: int) -> None:
    store = dist.HashStore()
    for number in range(num_groups):  # a script that makes its group again has the same keys
        made = [each._replace(port=each.port + number) for each in MADE]
        intruder = INTRUDER._replace(port=INTRUDER.port + number)
        acceptor, *callers = [ConnectionProofs(store, 3) for _ in range(3)]
        acceptor.publish([])
        callers[0].publish(made[:1])
        waiting, found = unproven_later(acceptor, [*made, intruder])
        callers[1].publish(made[1:])
        waiting.join(30)
        assert found == [{intruder}]


def test_group_that_could_not_be_made_is_not_waited_for() -> None:
    store = dist.HashStore()
    ConnectionProofs(store, 2).withdraw()
    acceptor, caller = ConnectionProofs(store, 2), ConnectionProofs(store, 2)
    acceptor.publish([])
    waiting, found = unproven_later(acceptor, MADE)
    caller.publish(MADE[:1])
    waiting.join(30)
    assert found == [{MADE[1]}]


def test_rank_without_accepted_connections_does_not_wait() -> None:
    store = dist.HashStore()
    ConnectionProofs(store, 2)
    assert ConnectionProofs(store, 2).find_unproven([]) == set()


def test_group_with_processes_of_the_script_is_not_compared() -> None:
    store = dist.HashStore()
    acceptor, caller = ConnectionProofs(store, 3), ConnectionProofs(store, 3)
    caller.publish(MADE[:1])
    acceptor.publish([])
    assert acceptor.find_unproven(MADE) == set()


def test_connections_that_a_kernel_hides_are_not_expected() -> None:
    store = dist.HashStore()
    acceptor, caller = ConnectionProofs(store, 2), ConnectionProofs(store, 2)
    caller.publish([], are_visible=False)
    acceptor.publish([])
    assert acceptor.find_unproven(MADE) == set()


def test_store_of_script_without_counters_is_accepted() -> None:
    class OwnStore(dist.Store):
        """Has no more than gloo needs."""

    proofs = ConnectionProofs(dist.PrefixStore("group", OwnStore()), 2)
    proofs.publish(MADE)
    assert proofs.find_unproven(MADE) == set()
    proofs.withdraw()
