"""Tests the choice of each node's address, based on connections that were tried, not on names."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

import pytest

from paceline.remote import network
from paceline.remote.network import Candidate
from paceline.spec.errors import NodeError, SettingError
from paceline.spec.hosts import Host

N1, N2 = Host("n1"), Host("n2")


def address(text: str, **overrides: Any) -> dict[str, Any]:
    family = 6 if ":" in text else 4
    return {"address": text, "prefix": 24, "family": family, "scope": "global", "usable": True,
            **overrides}  # fmt: skip


def link(name: str, *addresses: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    result = {"name": name, "kind": "hardware", "state": "up", "speed": 1000, "mtu": 1500}
    return {**result, "addresses": list(addresses), **overrides}


def facts(*links: dict[str, Any]) -> dict[str, Any]:
    lo = link("lo", address("127.0.0.1", scope="host"), kind="loopback", state="unknown")
    return {"interfaces": [lo, *links]}


def candidate(host: str, text: str, **overrides: Any) -> Candidate:
    defaults = {"interface": "eth0", "family": 6 if ":" in text else 4, "kind": "hardware",
             "speed": 1000, "prefix": 24}  # fmt: skip
    return Candidate(host=host, address=text, **{**defaults, **overrides})


def reached(host: str, text: str, rtt: float = 0.001, local: str = "") -> dict[str, Any]:
    return {"host": host, "address": text, "ok": True, "rtt": rtt, "local_address": local}


def failed(host: str, text: str, code: int) -> dict[str, Any]:
    error_text = {errno.EHOSTUNREACH: "No route to host"}.get(code, "failed")
    return {"host": host, "address": text, "ok": False, "errno": code, "error": error_text}


def test_candidates_exclude_unusable_addresses() -> None:
    result, _ = network.candidates(
        [N1],
        {
            "n1": facts(
                link("eth0", address("10.0.0.1"), address("fe80::1", scope="link"),
                     address("fd00::1", usable=False)),
                link("eth1", address("10.1.0.1"), state="down"),
            )
        },
        None,
    )  # fmt: skip
    assert [c.address for c in result["n1"]] == ["10.0.0.1"]


def test_candidates_exclude_shared_bridge_with_note() -> None:
    bridge = link("docker0", address("172.17.0.1"), kind="bridge")
    result, notes = network.candidates(
        [N1, N2],
        {
            "n1": facts(link("eth0", address("10.0.0.1")), bridge),
            "n2": facts(link("ens3", address("10.0.0.2")), bridge),
        },
        None,
    )
    assert [c.address for cs in result.values() for c in cs] == ["10.0.0.1", "10.0.0.2"]
    assert "172.17.0.1 exists on 2 hosts (n1, n2)" in notes[0]


def addresses_by_host(interface: str | None, host: Host = N1) -> Mapping[str, Any]:
    n1_facts = facts(link("eth0", address("10.0.0.1")), link("ib0", address("10.9.0.1")))
    n2_facts = facts(link("eth0", address("10.0.0.2")), link("ib0", address("10.9.0.2")))
    result, _ = network.candidates([host, N2], {"n1": n1_facts, "n2": n2_facts}, interface)
    return {name: [c.address for c in cs] for name, cs in result.items()}


def test_requested_interface_is_used() -> None:
    assert addresses_by_host("ib0") == {"n1": ["10.9.0.1"], "n2": ["10.9.0.2"]}


def test_host_interface_overrides_requested_interface() -> None:
    assert addresses_by_host("ib0", Host("n1", interface="eth0")) == {
        "n1": ["10.0.0.1"],
        "n2": ["10.9.0.2"],
    }
    assert addresses_by_host(None, Host("n1", job_address="10.9.0.1"))["n1"] == ["10.9.0.1"]


def test_rejects_unknown_interface() -> None:
    with pytest.raises(SettingError) as caught:
        addresses_by_host("ib7")
    assert "ib7" in caught.value.message
    assert "eth0 10.0.0.1" in caught.value.found
    with pytest.raises(SettingError, match=r"10\.5\.5\.5"):
        addresses_by_host(None, Host("n1", job_address="10.5.5.5"))


def test_rejects_interface_with_shared_address() -> None:
    bridge = facts(link("docker0", address("172.17.0.1"), kind="bridge"))
    with pytest.raises(SettingError, match="docker0"):
        network.candidates([N1, N2], {"n1": bridge, "n2": bridge}, "docker0")


def test_rejects_machine_with_two_names() -> None:
    machine = {
        **facts(link("eth0", address("10.0.0.1"))),
        "boot_id": "b",
        "name": {"hostname": "n1"},
    }
    hosts = [Host("n1"), Host("10.0.0.1")]
    with pytest.raises(NodeError, match=r"n1 and 10\.0\.0\.1 are one machine") as caught:
        network.candidates(hosts, {host.name: machine for host in hosts}, None)
    assert "n1 slots=2" in caught.value.remedy
    container = {**machine, "name": {"hostname": "c1"}}
    network.candidates(hosts, {"n1": machine, "10.0.0.1": container}, None)
    explicit_hosts = [Host("n1", job_address="10.0.0.1"), Host("m", job_address="10.0.0.1")]
    network.candidates(explicit_hosts, {host.name: machine for host in explicit_hosts}, None)


def decide(result: dict[str, list[Candidate]], probes: dict[str, list[dict[str, Any]]]) -> Any:
    return network.decide([N1, N2], result, probes)


def test_chooses_address_reached_by_all_hosts() -> None:
    result = {
        "n1": [candidate("n1", "10.66.0.1", interface="dead0"), candidate("n1", "10.0.0.1")],
        "n2": [candidate("n2", "10.66.0.2", interface="dead0"),
               candidate("n2", "10.0.0.2", interface="ens3")],
    }  # fmt: skip
    probes = {
        "n2": [failed("n1", "10.66.0.1", errno.ETIMEDOUT), reached("n1", "10.0.0.1")],
        "n1": [failed("n2", "10.66.0.2", errno.ETIMEDOUT), reached("n2", "10.0.0.2")],
    }
    chosen, notes = decide(result, probes)
    assert (chosen["n1"].address, chosen["n2"].interface) == ("10.0.0.1", "ens3")
    assert notes == []


def test_prefers_faster_hardware_link() -> None:
    result = {
        "n1": [candidate("n1", "10.0.0.1"), candidate("n1", "10.9.0.1", speed=100_000)],
        "n2": [candidate("n2", "10.8.0.2", kind="tun", speed=999_999), candidate("n2", "10.0.0.2")],
    }
    probes = {
        "n2": [reached("n1", "10.0.0.1"), reached("n1", "10.9.0.1")],
        "n1": [reached("n2", "10.8.0.2"), reached("n2", "10.0.0.2")],
    }
    chosen, _ = decide(result, probes)
    assert (chosen["n1"].address, chosen["n2"].address) == ("10.9.0.1", "10.0.0.2")


def test_chooses_common_address_family() -> None:
    result = {
        "n1": [candidate("n1", "10.0.0.1"), candidate("n1", "fd00::1")],
        "n2": [candidate("n2", "fd00::2")],
    }
    probes = {
        "n2": [reached("n1", "10.0.0.1"), reached("n1", "fd00::1")],
        "n1": [reached("n2", "fd00::2")],
    }
    chosen, _ = decide(result, probes)
    assert (chosen["n1"].address, chosen["n2"].address) == ("fd00::1", "fd00::2")


def test_rejects_hosts_without_common_address_family() -> None:
    result = {"n1": [candidate("n1", "10.0.0.1")], "n2": [candidate("n2", "fd00::2")]}
    probes = {"n2": [reached("n1", "10.0.0.1")], "n1": [reached("n2", "fd00::2")]}
    with pytest.raises(NodeError):
        decide(result, probes)


def test_notes_unexpected_source_address() -> None:
    result = {"n1": [candidate("n1", "10.0.0.1")], "n2": [candidate("n2", "10.0.0.2")]}
    probes = {
        "n2": [reached("n1", "10.0.0.1", local="10.5.0.2")],
        "n1": [reached("n2", "10.0.0.2", local="10.0.0.1")],
    }
    _, notes = decide(result, probes)
    assert notes == ["n2 reaches n1 (10.0.0.1) from 10.5.0.2, not from its chosen address 10.0.0.2"]


@pytest.mark.parametrize(
    ("outcome", "error_text", "advice"),
    [
        (failed("n2", "10.0.0.2", errno.EHOSTUNREACH), "No route to host (errno 113)", "ip route"),
        (failed("n2", "10.0.0.2", errno.ETIMEDOUT), "firewall", "ufw allow"),
        (failed("n2", "10.0.0.2", errno.ECONNREFUSED), "refused", "ufw allow"),
        ({"host": "n2", "address": "10.0.0.2", "ok": False, "reached": "aa"},
         "another machine answered", "address of its own"),
    ],
)  # fmt: skip
def test_explains_failed_connection(outcome: dict[str, Any], error_text: str, advice: str) -> None:
    result = {"n1": [candidate("n1", "10.0.0.1")], "n2": [candidate("n2", "10.0.0.2")]}
    with pytest.raises(NodeError) as caught:
        decide(result, {"n1": [outcome], "n2": [reached("n1", "10.0.0.1")]})
    assert error_text in caught.value.found
    assert "n1 → n2 at 10.0.0.2 (eth0)" in caught.value.found
    assert advice in caught.value.remedy
    assert "→ n1" not in caught.value.found


def test_names_host_without_addresses() -> None:
    with pytest.raises(NodeError) as caught:
        decide({"n1": [], "n2": [candidate("n2", "10.0.0.2")]}, {"n1": [], "n2": []})
    assert "n1 has no address" in caught.value.found


@pytest.mark.parametrize("count", [1, 2, 16, 17, 64])
def test_probe_targets(count: int) -> None:
    names = [f"n{number}" for number in range(count)]
    pairs = network.probe_targets(names)
    assert list(pairs) == names
    assert all(name not in targets for name, targets in pairs.items())
    assert all(names[0] in targets for name, targets in pairs.items() if name != names[0])
    assert set(pairs[names[0]]) == set(names[1:])
    assert sum(map(len, pairs.values())) <= max(240, count * 11)
    # each host is a target of some other host, so that an address can be chosen
    assert {other for targets in pairs.values() for other in targets} == set(
        names if count > 1 else ()
    )


def test_sources_of_host_with_very_many_addresses() -> None:
    """A host of Kubernetes has those of its services; a hostile one any number."""
    services = [f"10.9.{number // 256}.{number % 256}" for number in range(1000)]
    ipvs = link("ipvs", *map(address, services), kind="virtual")
    reported = facts(ipvs, link("eth0", address("10.0.0.5")))
    found = network.sources(reported, services[700])
    assert found is not None
    assert found[:2] == [services[700], "10.0.0.5"]
    assert len(found) == network.MAX_SOURCES
