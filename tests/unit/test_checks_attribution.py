"""Who is to blame when connections fail."""

from __future__ import annotations

import errno
import itertools
import random
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from paceline.checks.attribution import faults, likely_addresses
from paceline.checks.link import rounds
from paceline.checks.ports import choose_ports, merge_results, sporadic_losses
from paceline.remote.network import Candidate

PORTS = (29500, 40000)


def address(name: str) -> str:
    return f"10.0.0.{name[1:]}"


def results(names: Sequence[str], bad: dict[tuple[str, str], int]) -> dict[str, Any]:
    """Results of all pairs; ``bad`` gives the errno of a directed pair."""

    def one(source: str, target: str, port: int) -> dict[str, Any]:
        code = bad.get((source, target))
        about = {"host": target, "address": address(target), "port": port, "ok": code is None}
        return about if code is None else {**about, "errno": code, "error": "words"}

    return {
        source: [one(source, t, port) for t in names if t != source for port in PORTS]
        for source in names
    }


def blamed(names: Sequence[str], bad: dict[tuple[str, str], int],
           half_open: dict[str, list[list[Any]]] | None = None) -> list[Any]:  # fmt: skip
    found = faults(results(names, bad), {name: address(name) for name in names}, half_open or {})
    return [(fault.kind, fault.host, fault.peers) for fault in found]


THREE = ("n1", "n2", "n3")


def test_nothing_to_blame() -> None:
    assert blamed(THREE, {}) == []


def test_a_firewall_on_one_host() -> None:
    bad = {("n1", "n2"): errno.ETIMEDOUT, ("n3", "n2"): errno.ETIMEDOUT}
    assert blamed(THREE, bad) == [("dropped", "n2", ("n1", "n3"))]


def test_who_does_not_hear_is_read_from_half_open_connections() -> None:
    both = {("n1", "n2"): errno.ETIMEDOUT, ("n2", "n1"): errno.ETIMEDOUT}
    seen = {"n1": [[29500, address("n2")]]}  # n1 heard n2, so n2 is the deaf one
    assert blamed(THREE, both, seen) == [("dropped", "n2", ("n1",))]


def test_no_route_explains_the_silence_of_the_other_way() -> None:
    bad = {("n1", "n2"): errno.EHOSTUNREACH, ("n2", "n1"): errno.ETIMEDOUT}
    assert blamed(THREE, bad) == [("no route", "n1", ("n2",))]


def test_silence_both_ways_with_everybody_is_one_hosts_fault() -> None:
    bad = {
        pair: errno.ETIMEDOUT for other in ("n1", "n3") for pair in ((other, "n2"), ("n2", other))
    }
    assert blamed(THREE, bad) == [("silent", "n2", ("n1", "n3"))]


def test_refusals_and_drops_are_told_apart() -> None:
    bad = {("n1", "n2"): errno.ECONNREFUSED, ("n1", "n3"): errno.ETIMEDOUT}
    assert blamed(THREE, bad) == [("refused", "n2", ("n1",)), ("dropped", "n3", ("n1",))]


def candidate(host: str, at: str, kind: str = "hardware") -> Candidate:
    return Candidate(host, "eth0", at, 4, kind, 1000, 24)


def test_the_presumed_address_is_in_the_network_that_works_for_others() -> None:
    found = {
        name: [candidate(name, f"10.66.0.{name[1:]}"), candidate(name, f"10.0.0.{name[1:]}")]
        for name in THREE
    }
    tried = {
        "n1": [{"address": "10.0.0.3", "ok": True}, {"address": "10.0.0.2", "ok": False}],
        "n3": [{"address": "10.0.0.1", "ok": True}, {"address": "10.66.0.1", "ok": False}],
    }
    assert likely_addresses(found, tried) == {name: f"10.0.0.{name[1:]}" for name in THREE}


@given(st.integers(1024, 50000), st.integers(0, 1000))
def test_every_eighth_of_the_ephemeral_range_is_tried(low: int, seed: int) -> None:
    high = low + 8000
    ports = choose_ports((low, high), random.Random(seed))
    eighths = {(port - low) // 1000 for port in ports if low <= port < high}
    assert eighths == set(range(8))
    assert any(not low <= port <= high for port in ports)


@given(st.integers(2, 20))
def test_a_round_robin_meets_everybody_once(count: int) -> None:
    names = [f"n{number}" for number in range(count)]
    met = [frozenset(pair) for pairs in rounds(names) for pair in pairs]
    assert sorted(map(sorted, met)) == sorted(map(sorted, itertools.combinations(names, 2)))
    for pairs in rounds(names):
        busy = [name for pair in pairs for name in pair]
        assert len(busy) == len(set(busy))


def test_a_packet_lost_by_chance_is_no_firewall() -> None:
    first = results(THREE, {("n1", "n3"): errno.ETIMEDOUT})["n1"]
    first[0] = {**first[0], "ok": False, "errno": errno.ETIMEDOUT}
    assert sporadic_losses(first) == {("n2", PORTS[0])}  # n3 answered nowhere: no chance
    again = [{**first[0], "ok": True}]
    assert [one["ok"] for one in merge_results(first, again)] == [True, True, False, False]


def test_a_connection_that_opened_and_stayed_silent_is_no_firewall() -> None:
    found = results(THREE, {})
    found["n1"][0] |= {"ok": False, "errno": errno.EBUSY, "error": "busy"}
    assert sporadic_losses(found["n1"]) == {("n2", PORTS[0])}
    assert faults(found, {name: address(name) for name in THREE}, {}) == []
