"""The lab's network as commands for ``ip`` and ``tc``. Pure.

Every list is one ``ip -batch`` or one run of a program; nothing here runs anything.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.lab.plan import BRIDGE_ADDRESS, HostPlan, LabPlan, delay_seconds, rate_bits

BRIDGE = "br0"


def switch_batch(plan: LabPlan) -> list[str]:
    """``ip`` lines that make the switch itself."""
    return [
        "link set lo up",
        f"link add name {BRIDGE} type bridge forward_delay 0",
        f"link set {BRIDGE} up",
        f"addr add {plan.gateway}/{plan.prefix_length} dev {BRIDGE}{_no_dad(plan.gateway)}",
    ]


def ports_batch(hosts: Mapping[int, HostPlan], cables: bool = True) -> list[str]:
    """``ip`` lines, run on the switch, that plug hosts in.

    Args:
        hosts: Process id of a host's first process → its plan.
        cables: Whether the cables are to be made, too (the dead ones always are).
    """
    lines = []
    for pid, host in hosts.items():
        if host.dead_address:  # made first: it has the lowest index
            dead = dead_port(host)
            lines.append(f"link add name {dead} type veth peer name dead0 netns {pid}")
            lines.append(f"link set {dead} up")
        if cables:
            peer = f"peer name {host.interface} netns {pid}"
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
        f"link set {host.interface} address {host.mac} up",
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
    return lines + known_neighbours(plan, host)


MANY_HOSTS = 16


def known_neighbours(plan: LabPlan, host: HostPlan) -> list[str]:
    """``ip`` lines that save a host of a large lab from asking who has which address.

    The kernel has one table of learnt neighbours (1024 by default) for all network namespaces
    together; 64 hosts that all meet overflow it, and then connections hang. Entries made by hand
    do not count.
    """
    if len(plan.hosts) <= MANY_HOSTS:
        return []
    return [
        f"neigh replace {other.address} lladdr {other.mac} dev {host.interface} nud permanent"
        for other in plan.hosts
        if other is not host
    ]


Placed = tuple[str, tuple[str, ...]]  # "host" or "switch", and a command to run there


def shape(plan: LabPlan, host: HostPlan, netem: bool, rate: str = "") -> tuple[Placed, ...]:
    """Commands that set the speed of a host's link in both directions.

    Args:
        netem: The host's end has a netem queue already, under which this one goes.
        rate: Speed instead of the plan's.
    """
    rate = rate or plan.options.rate
    if not rate:
        return ()
    return (
        ("switch", (*_replace(host.name, "root"), *_bucket(rate))),
        ("host", (*_replace(host.interface, *_place(netem)), *_bucket(rate))),
    )


def unshape(host: HostPlan, netem: bool) -> tuple[Placed, ...]:
    """Commands that make a link as fast as memory again."""
    return (
        ("switch", ("tc", "qdisc", "del", "dev", host.name, "root")),
        ("host", ("tc", "qdisc", "del", "dev", host.interface, *_place(netem))),
    )


def delay_by_netem(host: HostPlan, seconds: float) -> tuple[Placed, ...]:
    """Commands that delay what a host sends."""
    delay = ("netem", "delay", f"{seconds * 1000:g}ms", "limit", "100000")
    return (("host", (*_replace(host.interface, "root", "handle", "1:"), *delay)),)


NETEM_PROBE = ("tc", "qdisc", "replace", "dev", "lo", "root", "netem", "delay", "0ms")
NETEM_PROBE_UNDO = ("tc", "qdisc", "del", "dev", "lo", "root")


def _place(netem: bool) -> tuple[str, ...]:
    return ("parent", "1:1") if netem else ("root",)


def _replace(interface: str, *place: str) -> tuple[str, ...]:
    return ("tc", "qdisc", "replace", "dev", interface, *place)


def _bucket(rate: str) -> tuple[str, ...]:
    return ("tbf", "rate", rate, "burst", str(burst_bytes(rate)), "latency", "50ms")


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
