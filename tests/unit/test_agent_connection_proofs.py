"""Tests that ranks know which connections between hosts ranks of the job have made."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from paceline.agent.ranks.connection_proofs import Connection, ConnectionProofs

MADE = [Connection(f"10.0.0.{host}", 40000 + host, "10.0.0.1", 50000) for host in (2, 3)]
INTRUDER = Connection("10.0.0.2", 41000, "10.0.0.1", 50000)


@pytest.mark.parametrize("num_groups", [1, 3])
def test_unproven_connections_are_found_once_all_have_published(num_groups: int) -> None:
    store = dist.HashStore()
    for number in range(num_groups):  # a script that makes its group again has the same keys
        made = [each._replace(port=each.port + number) for each in MADE]
        intruder = INTRUDER._replace(port=INTRUDER.port + number)
        acceptor, *callers = [ConnectionProofs(store) for _ in range(3)]
        acceptor.publish([], [])
        unproven: list[Any] = []
        waiting = threading.Thread(
            target=lambda: unproven.append(acceptor.find_unproven([*made, intruder])),  # noqa: B023
            daemon=True,
        )
        callers[0].publish(made[:1], ["10.0.0.2"])
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        callers[1].publish(made[1:], ["10.0.0.3"])
        waiting.join(30)
        assert unproven == [{intruder}]


def test_rank_without_accepted_connections_does_not_wait() -> None:
    store = dist.HashStore()
    ConnectionProofs(store)
    assert ConnectionProofs(store).find_unproven([]) == set()


def test_connections_that_a_kernel_hides_are_not_expected() -> None:
    store = dist.HashStore()
    acceptor, caller = ConnectionProofs(store), ConnectionProofs(store)
    caller.publish([], ["10.0.0.2"], are_visible=False)
    acceptor.publish([], [])
    assert acceptor.find_unproven(MADE) == set()


def test_connections_through_nat_are_not_compared() -> None:
    acceptor = ConnectionProofs(dist.HashStore())
    acceptor.publish([], ["10.0.0.1"])
    assert acceptor.find_unproven(MADE) == set()


def test_store_of_script_without_counters_is_accepted() -> None:
    class OwnStore(dist.Store):
        """Has no more than gloo needs."""

    proofs = ConnectionProofs(dist.PrefixStore("group", OwnStore()))
    proofs.publish(MADE, [])
    assert proofs.find_unproven(MADE) == set()
