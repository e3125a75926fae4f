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

from paceline.spec.errors import NodeError

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


def choose_for_newcomer(host: str, facts: Mapping[str, Facts],
                        running: Mapping[str, Mapping[str, str]]) -> RdmaChoice:  # fmt: skip
    """Chooses what a host uses that joins running ones, whose choice cannot change any more.

    Args:
        host: The host that joins.
        facts: By host, of this one and the running ones.
        running: Variables of the ranks of each running host; without any, NCCL has chosen.

    Raises:
        NodeError: The running hosts use RDMA ports, and none of this host reaches them.
    """
    if not all((known.get("devices") or {}).get("gpus") for known in facts.values()):
        return RdmaChoice("not needed without GPUs on several hosts")
    if explicit := _explicit(facts):
        return RdmaChoice(f"{explicit}: left to NCCL")
    used = {name: _ports_in_use(facts[name], running[name]) for name in running}
    if not any(used.values()):
        return RdmaChoice("the running hosts use TCP", {host: {"NCCL_NET": "Socket"}})
    ports = active_ports(facts[host])
    networks = set.intersection(*({name for port in used[peer] for name in
                                   networks_of(port, facts[peer])} for peer in used))  # fmt: skip
    fitting = [port for port in ports if networks & networks_of(port, facts[host])]
    if fitting:
        reason = f"on a network of the running hosts: {', '.join(sorted(networks))}"
        return RdmaChoice(reason, {host: _variables(fitting, networks, facts[host])})
    if ports and not (networks and all(networks_of(port, facts[host]) for port in ports)):
        return RdmaChoice("networks of RDMA ports are not known: left to NCCL")
    names = ", ".join(f"{name} {port['name']}" for name in used for port in used[name])
    raise NodeError(
        f"{host} has no RDMA port on the network of the running hosts",
        found=f"NCCL uses these there: {names}",
        remedy="Start the job with --env NCCL_NET=Socket if hosts without such a port are to join",
    )


def _ports_in_use(facts: Facts, variables: Mapping[str, str]) -> list[Port]:
    """Returns the ports that NCCL uses with these variables."""
    if "NCCL_NET" in variables:
        return []
    chosen = variables.get("NCCL_IB_HCA", "").lstrip("=").split(",")
    return [port for port in active_ports(facts)
            if chosen == [""] or f"{port['name']}:{port['port']}" in chosen]  # fmt: skip


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
