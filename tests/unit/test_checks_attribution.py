"""Tests which host, firewall or address is blamed for failed connections."""

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


def results(names: Sequence[str], errnos: dict[tuple[str, str], int]) -> dict[str, Any]:
    """Returns connection results of all pairs of hosts, with the given errors."""

    def result(source: str, target: str, port: int) -> dict[str, Any]:
        code = errnos.get((source, target))
        record = {"host": target, "address": address(target), "port": port, "ok": code is None}
        return record if code is None else {**record, "errno": code, "error": "words"}

    return {
        source: [result(source, t, port) for t in names if t != source for port in PORTS]
        for source in names
    }


def blame(names: Sequence[str], errnos: dict[tuple[str, str], int],
           half_open: dict[str, list[list[Any]]] | None = None) -> list[Any]:  # fmt: skip
    found = faults(results(names, errnos), {name: address(name) for name in names}, half_open or {})
    return [(fault.kind, fault.host, fault.peers) for fault in found]


THREE = ("n1", "n2", "n3")


def test_reports_no_fault_without_failures() -> None:
    assert blame(THREE, {}) == []


def test_blames_host_with_firewall() -> None:
    errnos = {("n1", "n2"): errno.ETIMEDOUT, ("n3", "n2"): errno.ETIMEDOUT}
    assert blame(THREE, errnos) == [("dropped", "n2", ("n1", "n3"))]


def test_half_open_connections_identify_deaf_host() -> None:
    both = {("n1", "n2"): errno.ETIMEDOUT, ("n2", "n1"): errno.ETIMEDOUT}
    seen = {"n1": [[29500, address("n2")]]}  # n1 received packets of n2, so n2 is deaf
    assert blame(THREE, both, seen) == [("dropped", "n2", ("n1",))]


def test_no_route_explains_reverse_timeout() -> None:
    errnos = {("n1", "n2"): errno.EHOSTUNREACH, ("n2", "n1"): errno.ETIMEDOUT}
    assert blame(THREE, errnos) == [("no route", "n1", ("n2",))]


def test_mutual_timeouts_blame_common_host() -> None:
    errnos = {
        pair: errno.ETIMEDOUT for peer in ("n1", "n3") for pair in ((peer, "n2"), ("n2", peer))
    }
    assert blame(THREE, errnos) == [("silent", "n2", ("n1", "n3"))]


def test_distinguishes_refused_from_dropped() -> None:
    errnos = {("n1", "n2"): errno.ECONNREFUSED, ("n1", "n3"): errno.ETIMEDOUT}
    assert blame(THREE, errnos) == [("refused", "n2", ("n1",)), ("dropped", "n3", ("n1",))]


def candidate(host: str, at: str, kind: str = "hardware") -> Candidate:
    return Candidate(host, "eth0", at, 4, kind, 1000, 24)


def test_likely_address_is_in_working_network() -> None:
    found = {
        name: [candidate(name, f"10.66.0.{name[1:]}"), candidate(name, f"10.0.0.{name[1:]}")]
        for name in THREE
    }
    attempts = {
        "n1": [{"address": "10.0.0.3", "ok": True}, {"address": "10.0.0.2", "ok": False}],
        "n3": [{"address": "10.0.0.1", "ok": True}, {"address": "10.66.0.1", "ok": False}],
    }
    assert likely_addresses(found, attempts) == {name: f"10.0.0.{name[1:]}" for name in THREE}


@given(st.integers(1024, 50000), st.integers(0, 1000))
def test_choose_ports_covers_ephemeral_range(low: int, seed: int) -> None:
    high = low + 8000
    ports = choose_ports((low, high), random.Random(seed))
    eighths = {(port - low) // 1000 for port in ports if low <= port < high}
    assert eighths == set(range(8))
    assert any(not low <= port <= high for port in ports)


@given(st.integers(2, 20))
def test_rounds_pair_hosts_exactly_once(count: int) -> None:
    names = [f"n{number}" for number in range(count)]
    scheduled = [frozenset(pair) for pairs in rounds(names) for pair in pairs]
    assert sorted(map(sorted, scheduled)) == sorted(map(sorted, itertools.combinations(names, 2)))
    for pairs in rounds(names):
        busy = [name for pair in pairs for name in pair]
        assert len(busy) == len(set(busy))


def test_detects_sporadic_packet_loss() -> None:
    first = results(THREE, {("n1", "n3"): errno.ETIMEDOUT})["n1"]
    first[0] = {**first[0], "ok": False, "errno": errno.ETIMEDOUT}
    assert sporadic_losses(first) == {("n2", PORTS[0])}  # n3 never answered: not sporadic
    retry = [{**first[0], "ok": True}]
    assert [result["ok"] for result in merge_results(first, retry)] == [True, True, False, False]


def test_busy_port_is_sporadic_loss_and_no_fault() -> None:
    found = results(THREE, {})
    found["n1"][0] |= {"ok": False, "errno": errno.EBUSY, "error": "busy"}
    assert sporadic_losses(found["n1"]) == {("n2", PORTS[0])}
    assert faults(found, {name: address(name) for name in THREE}, {}) == []
