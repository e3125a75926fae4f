"""The lab's network as commands for ``ip`` and ``tc``. Pure.

Every list is one ``ip -batch`` or one run of a program; nothing here runs anything.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.cluster.lab.options import BRIDGE_ADDRESS, HostPlan, LabPlan, delay_seconds, rate_bits

BRIDGE = "br0"


def switch_batch(plan: LabPlan) -> list[str]:
    """``ip`` lines that make the switch itself."""
    return [
        "link set lo up",
        f"link add name {BRIDGE} type bridge forward_delay 0",
        f"link set {BRIDGE} up",
        f"addr add {plan.gateway}/{plan.prefix_length} dev {BRIDGE}{_no_dad(plan.gateway)}",
    ]


def ports_batch(hosts: Mapping[int, HostPlan]) -> list[str]:
    """``ip`` lines, run on the switch, that plug hosts in. Keys: process ids of the hosts' init."""
    lines = []
    for pid, host in hosts.items():
        if host.dead_address:  # made first: it has the lowest index
            dead = dead_port(host)
            lines.append(f"link add name {dead} type veth peer name dead0 netns {pid}")
            lines.append(f"link set {dead} up")
        peer = f"peer name {host.interface} address {host.mac} netns {pid}"
        lines.append(f"link add name {host.name} type veth {peer}")
        lines.append(f"link set {host.name} master {BRIDGE} up")
    return lines


def dead_port(host: HostPlan) -> str:
    """The end of the dead interface's cable: plugged in, leading nowhere."""
    return f"{host.name}-dead"


def host_batch(plan: LabPlan, host: HostPlan) -> list[str]:
    """``ip`` lines, run on the host, that bring its interfaces up."""
    lines = ["link set lo up"]
    if host.dead_address:
        lines += ["link set dead0 up", f"addr add {host.dead_address}/24 dev dead0"]
    lines += [
        f"link set {host.interface} up",
        f"addr add {host.address}/{plan.prefix_length} dev {host.interface}"
        + _no_dad(host.address),
    ]
    if plan.options.bridge_address:
        lines += [
            "link add name docker0 type bridge",
            "link set docker0 up",
            f"addr add {BRIDGE_ADDRESS} dev docker0",
        ]
    # Like every real host; what lies beyond the switch answers "network unreachable" at once.
    lines.append(f"route add default via {plan.gateway} dev {host.interface}")
    return lines


def shape(plan: LabPlan, host: HostPlan, rate: str = "") -> list[tuple[str, list[str]]]:
    """Commands that set the speed and delay of a host's link, each with where it runs.

    Args:
        rate: Speed instead of the plan's.

    Returns:
        Pairs of ``"host"`` or ``"switch"`` and an argv. The old shape is replaced.
    """
    rate = rate or plan.options.rate
    commands = [("switch", _queue(host.name, rate, "")), ("host", _queue(host.interface, rate, ""))]
    return [(where, argv) for where, argv in commands if argv]


def unshape(host: HostPlan) -> list[tuple[str, list[str]]]:
    """Commands that make a link as fast as memory again."""
    return [
        ("switch", ["tc", "qdisc", "del", "dev", host.name, "root"]),
        ("host", ["tc", "qdisc", "del", "dev", host.interface, "root"]),
    ]


def _queue(interface: str, rate: str, latency: str) -> list[str]:
    if not rate:
        return []
    argv = ["tc", "qdisc", "replace", "dev", interface, "root", "tbf", "rate", rate]
    return [*argv, "burst", str(burst_bytes(rate)), "latency", "50ms"]


def burst_bytes(rate: str) -> int:
    """Bucket for ``tbf``: 4 ms worth of traffic, but some full frames at least.

    A smaller one cannot reach the rate on a kernel with 250 timer ticks a second.
    """
    return max(16_000, int(rate_bits(rate) / 8 * 0.004))


def _no_dad(address: str) -> str:
    """IPv6 addresses are usable at once only without duplicate detection."""
    return " nodad" if ":" in address else ""


def delay(plan: LabPlan) -> float:
    """One-way delay in seconds, 0.0 for none."""
    return delay_seconds(plan.options.latency) if plan.options.latency else 0.0
