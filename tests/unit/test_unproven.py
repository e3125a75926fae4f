"""Tests which connections without a proof are dropped, by simulated floods of strangers."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable

import pytest

from paceline.rendezvous import unproven
from paceline.rendezvous.unproven import Peer, peer_of, victim

LIMIT = 512  # with 1024 descriptors
ARRIVALS = 120  # in a round trip of 40 ms, if strangers open 3000 connections a second
MAX_ATTEMPTS = 10  # in 2 s: a node waits 0.2 s between two
NODE = peer_of("198.51.100.7")


def count_attempts(
    stranger: Callable[[int], Peer], num_nodes: int, generator: random.Random
) -> int:
    """Returns how often the first node connects until it stays connected for a round trip.

    The other nodes, of the same network, connect at the same time.
    """
    nodes = [NODE, *(peer_of(f"198.51.100.{100 + index}") for index in range(num_nodes - 1))]
    for attempt in range(1, MAX_ATTEMPTS + 1):
        connections = [(stranger(index), False) for index in range(LIMIT)]
        arrivals = [*nodes, *map(stranger, range(ARRIVALS))]
        for index, peer in enumerate(arrivals):
            del connections[victim([peer for peer, _ in connections], generator)]
            connections.append((peer, index == 0))
        if any(is_first for _, is_first in connections):
            return attempt
    return MAX_ATTEMPTS + 1


def many_networks(index: int) -> Peer:
    return peer_of(f"10.{index // 250}.{index % 250}.1")


def many_addresses(index: int) -> Peer:
    return peer_of(f"10.0.0.{index % 250}")


def same_network(index: int) -> Peer:
    return peer_of(f"198.51.100.{8 + index % 90}")


@pytest.mark.parametrize(
    ("stranger", "num_nodes", "max_mean"),
    [
        (lambda index: peer_of("10.0.0.1"), 1, 1.1),  # one address
        (many_addresses, 16, 1.1),
        (lambda index: peer_of(f"2001:db8::{index:x}"), 1, 1.1),
        (same_network, 1, 1.1),
        (many_networks, 1, 2),
        (many_networks, 16, 3),
    ],
)
def test_node_outlives_flood_of_strangers(
    stranger: Callable[[int], Peer], num_nodes: int, max_mean: float
) -> None:
    generator = random.Random(1)
    attempts = [count_attempts(stranger, num_nodes, generator) for _ in range(100)]
    assert max(attempts) <= MAX_ATTEMPTS
    assert sum(attempts) / len(attempts) <= max_mean


@pytest.mark.parametrize(
    ("address", "equal", "other"),
    [
        ("10.0.0.1", "10.0.0.254", "10.0.1.1"),
        ("2001:db8::1", "2001:db8::ffff:0:0:1", "2001:db8:0:1::1"),
        ("fe80::1%eth0", "fe80::2%eth0", "fe80:0:0:1::1"),
    ],
)
def test_peer_has_network_of_its_address(address: str, equal: str, other: str) -> None:
    assert peer_of(address)[0] == peer_of(equal)[0] != peer_of(other)[0]


def test_single_connection_is_the_victim() -> None:
    assert victim([NODE], random.Random(1)) == 0


@pytest.mark.parametrize(
    ("limit", "expected"), [(1 << 20, 512), (1024, 512), (256, 128), (-1, 512)]
)
def test_max_unproven_keeps_descriptors_free(
    limit: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert unproven.max_unproven() == expected
