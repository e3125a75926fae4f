"""Chooses the RDMA ports through which NCCL connects the hosts.

NCCL itself takes every active port of a host, whatever the other hosts have. If a host has none,
the first collective hangs (NVIDIA/nccl#234); if two ports of a host are on different networks, it
fails or is slow. It does not connect a port of InfiniBand with one of Ethernet.
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

CHOSEN = ("NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_ADDR_FAMILY", "NCCL_NET")
"""Variables that are chosen here."""
EXPLICIT = (
    *CHOSEN, "NCCL_IB_DISABLE", "NCCL_NET_PLUGIN", "NCCL_IB_ADDR_RANGE",
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
    out, and so are InfiniBand or Ethernet if the fastest network is of the other kind. If a port
    that may reach other hosts in a way that is not known here is as fast as the chosen ones, NCCL
    decides.
    """
    ports = usable_ports(facts)
    if not any(map(active_ports, facts.values())):
        return RdmaChoice("no host has a usable RDMA port")
    if len(facts) < 2 or not all((host_facts.get("devices") or {}).get("gpus")
                                 for host_facts in facts.values()):  # fmt: skip
        return RdmaChoice("not needed without GPUs on several hosts")
    if explicit := _explicit(facts):
        return RdmaChoice(f"{explicit}: left to NCCL")
    if lacking := [host for host, found in ports.items() if not found]:
        verb = "has" if len(lacking) == 1 else "have"
        return RdmaChoice(f"{', '.join(lacking)} {verb} no usable RDMA port, so all hosts use TCP",
                          {host: {"NCCL_NET": "Socket"} for host in facts})  # fmt: skip
    speeds = {host: _speeds(ports[host], facts[host]) for host in facts}
    common = set.intersection(*(set(by_network) for by_network in speeds.values()))
    if not common:
        reason = "no network is known that all hosts have an RDMA port on: left to NCCL"
        return RdmaChoice(reason, unknown=all(speeds.values()))
    slowest = {name: min(by_network[name] for by_network in speeds.values()) for name in common}
    fabrics = {port["fabric"] for found in ports.values() for port in found}
    fastest_network = max(slowest, key=lambda name: (slowest[name], name in fabrics, name))
    used = {name for name, speed in slowest.items() if 2 * speed >= slowest[fastest_network]
            and (name in fabrics) == (fastest_network in fabrics)}  # fmt: skip
    chosen = {host: [port for port in ports[host] if used & networks_of(port, facts[host])]
              for host in facts}  # fmt: skip
    for host, selected in chosen.items():
        fastest = max(port["speed"] for port in selected)
        unknown = [port for port in ports[host] if not (networks_of(port, facts[host]) & common)]
        left_out = [port for port in unknown if not port["fabric"]]
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
    if not all((host_facts.get("devices") or {}).get("gpus") for host_facts in facts.values()):
        return RdmaChoice("not needed without GPUs on several hosts")
    if explicit := _explicit(facts):
        return RdmaChoice(f"{explicit}: left to NCCL")
    used = {name: _ports_in_use(facts[name], running[name]) for name in running}
    if not any(used.values()):
        return RdmaChoice("the running hosts use TCP", {host: {"NCCL_NET": "Socket"}})
    ports = usable_ports(facts)[host]
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


def usable_ports(facts: Mapping[str, Facts]) -> dict[str, list[Port]]:
    """Returns the active ports of each host, without the addresses that several hosts have.

    A port without another address does not connect these hosts: it may be one to a storage.
    """
    active = {host: active_ports(known) for host, known in facts.items()}
    num_hosts = Counter(address for ports in active.values() for address in
                        {gid["address"] for port in ports for gid in port["gids"]})  # fmt: skip
    distinct = {host: [{**port, "gids": [gid for gid in port["gids"]
                                         if num_hosts[gid["address"]] == 1]} for port in ports]
                for host, ports in active.items()}  # fmt: skip
    return {host: [port for port, all_of_it in zip(ports, active[host], strict=True)
                   if port["gids"] or not all_of_it["gids"]]
            for host, ports in distinct.items()}  # fmt: skip


def networks_of(port: Port, facts: Facts) -> set[str]:
    """Names the networks that a port is on; empty if they are not known.

    Those of InfiniBand are named by their subnet prefix and subnet manager, those of RoCE by the
    IP networks of the port's addresses.
    """
    if port["fabric"]:
        return {port["fabric"]}
    return {network for _, network in _addresses(port, facts)}


def _addresses(port: Port, facts: Facts) -> list[tuple[int, str]]:
    """The index and the network of each address of a RoCE port; link-local ones are on none.

    Those of IPv6 only if there are none of IPv4, which NCCL prefers.
    """
    prefixes = {
        address["address"]: address["prefix"]
        for link in facts.get("interfaces") or ()
        for address in link["addresses"]
    }
    known = [(gid["index"], f"{gid['address']}/{prefixes[gid['address']]}")
             for gid in port["gids"] if gid["address"] in prefixes]  # fmt: skip
    networks = [(index, ipaddress.ip_network(text, strict=False)) for index, text in known]
    routable = [entry for entry in networks if not entry[1].is_link_local]
    preferred = [entry for entry in routable if entry[1].version == 4] or routable
    return [(index, str(network)) for index, network in preferred]


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
    if any(":" in network for port in ports for _, network in _addresses(port, facts)):
        variables["NCCL_IB_ADDR_FAMILY"] = "AF_INET6"
    return variables


def _explicit(facts: Mapping[str, Facts]) -> str:
    """Says which host already chooses NCCL's network, in its login or in nccl.conf."""
    for host, host_facts in facts.items():
        for source in ("environment", "nccl_conf"):
            for name in EXPLICIT:
                if value := (host_facts.get(source) or {}).get(name):
                    place = " in nccl.conf" if source == "nccl_conf" else ""
                    return f"{host} sets {name}={value}{place}"
    return ""
