"""Chooses the RDMA ports through which NCCL connects the hosts.

NCCL itself takes every active port of a host, whatever the other hosts have. If a host has none,
the first collective hangs (NVIDIA/nccl#234); if two ports of a host are on different networks, it
fails or is slow.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

Facts = Mapping[str, Any]
Port = Mapping[str, Any]

CHOSEN = ("NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_NET")
"""Variables that are chosen here."""
EXPLICIT = (
    *CHOSEN, "NCCL_IB_DISABLE", "NCCL_NET_PLUGIN", "NCCL_IB_ADDR_RANGE", "NCCL_IB_ADDR_FAMILY",
    "NCCL_IB_ROCE_VERSION_NUM", "NCCL_CONF_FILE",
)  # fmt: skip
"""Variables of NCCL that choose its network; if one is set, nothing is chosen."""


@dataclass(frozen=True, slots=True)
class RdmaChoice:
    """What NCCL uses on each host.

    Attributes:
        variables: For the ranks of each host; empty leaves the choice to NCCL.
        reason: One sentence.
        unknown: All hosts have ports on networks that are known, but on different ones.
    """

    reason: str
    variables: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    unknown: bool = False

    def on(self, host: str) -> Mapping[str, str]:
        return self.variables.get(host, {})


def choose(facts: Mapping[str, Facts]) -> RdmaChoice:
    """Chooses the ports that are on a network of all hosts; ``facts`` by host.

    Networks on which the slowest host has less than half the speed of the fastest network are left
    out. If a port that may reach other hosts in a way that is not known here is as fast as the
    chosen ones, NCCL decides.
    """
    ports = {host: active_ports(known) for host, known in facts.items()}
    if not any(ports.values()):
        return RdmaChoice("no host has an active RDMA port")
    if len(facts) < 2 or not all((known.get("devices") or {}).get("gpus")
                                 for known in facts.values()):  # fmt: skip
        return RdmaChoice("not needed without GPUs on several hosts")
    if explicit := _explicit(facts):
        return RdmaChoice(f"{explicit}: left to NCCL")
    if lacking := [host for host, found in ports.items() if not found]:
        verb = "has" if len(lacking) == 1 else "have"
        return RdmaChoice(f"{', '.join(lacking)} {verb} no active RDMA port, so all hosts use TCP",
                          {host: {"NCCL_NET": "Socket"} for host in facts})  # fmt: skip
    speeds = {host: _speeds(ports[host], facts[host]) for host in facts}
    common = set.intersection(*(set(by_network) for by_network in speeds.values()))
    if not common:
        reason = "no network is known that all hosts have an RDMA port on: left to NCCL"
        return RdmaChoice(reason, unknown=all(speeds.values()))
    slowest = {name: min(by_network[name] for by_network in speeds.values()) for name in common}
    used = {name for name, speed in slowest.items() if 2 * speed >= max(slowest.values())}
    chosen = {host: [port for port in ports[host] if used & networks_of(port, facts[host])]
              for host in facts}  # fmt: skip
    for host, selected in chosen.items():
        fastest = max(port["speed"] for port in selected)
        left_out = [port for port in ports[host] if port not in selected and not port["fabric"]]
        if any(port["speed"] >= fastest for port in left_out):
            return RdmaChoice(f"{host} has other fast RDMA ports, maybe routed: left to NCCL")
    variables = {host: _variables(chosen[host], used, facts[host]) for host in facts}
    return RdmaChoice(f"on a network of all hosts: {', '.join(sorted(used))}", variables)


def active_ports(facts: Facts) -> list[Port]:
    return [port for port in facts.get("rdma") or () if port["active"]]


def networks_of(port: Port, facts: Facts) -> set[str]:
    """Names the networks that a port is on; empty if they are not known.

    Those of InfiniBand are named by their subnet prefix and subnet manager, those of RoCE by the
    IP networks of the port's addresses.
    """
    if port["fabric"]:
        return {port["fabric"]}
    return {network for _, network in _addresses(port, facts)}


def _addresses(port: Port, facts: Facts) -> list[tuple[int, str]]:
    """The index and the network of each address of a RoCE port; link-local ones are on none."""
    prefixes = {address["address"]: address["prefix"]
                for link in facts.get("interfaces") or () for address in link["addresses"]
                if address["family"] == 4}  # fmt: skip
    known = [(gid["index"], f"{gid['address']}/{prefixes[gid['address']]}")
             for gid in port["gids"] if gid["address"] in prefixes]  # fmt: skip
    networks = [(index, ipaddress.ip_network(text, strict=False)) for index, text in known]
    return [(index, str(network)) for index, network in networks if not network.is_link_local]


def _speeds(ports: Sequence[Port], facts: Facts) -> dict[str, int]:
    """The speed of all ports on each network, in Mbit/s."""
    speeds: Counter[str] = Counter()
    for port in ports:
        for name in networks_of(port, facts):
            speeds[name] += max(port["speed"], 0)
    return speeds


def _variables(ports: Sequence[Port], used: Set[str], facts: Facts) -> dict[str, str]:
    # "=" asks for exactly these names; alone, mlx5_1 would be mlx5_10, too
    variables = {"NCCL_IB_HCA": "=" + ",".join(f"{port['name']}:{port['port']}" for port in ports)}
    indices = {next((index for index, network in _addresses(port, facts) if network in used), -1)
               for port in ports if not port["fabric"]}  # fmt: skip
    # there is one variable for all ports; NCCL before 2.21 needs it, later ones find the index
    if len(indices) == 1 and not any(port["fabric"] for port in ports):
        variables["NCCL_IB_GID_INDEX"] = str(indices.pop())
    return variables


def _explicit(facts: Mapping[str, Facts]) -> str:
    """Says which host already chooses NCCL's network, in its login or in nccl.conf."""
    for host, known in facts.items():
        for source in ("environment", "nccl_conf"):
            for name in EXPLICIT:
                if value := (known.get(source) or {}).get(name):
                    place = " in nccl.conf" if source == "nccl_conf" else ""
                    return f"{host} sets {name}={value}{place}"
    return ""
