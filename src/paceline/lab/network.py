"""The lab's network as commands for ``ip`` and ``tc``. Pure.

Every list is one ``ip -batch`` or one run of a program; nothing here runs anything.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.lab.plan import BRIDGE_ADDRESS, HostPlan, LabPlan, delay_seconds, rate_bits

BRIDGE = "br0"


def switch_batch(plan: LabPlan) -> list[str]:
    return [
        "link set lo up",
        f"link add name {BRIDGE} type bridge forward_delay 0",
        f"link set {BRIDGE} up",
        f"addr add {plan.gateway}/{plan.prefix_length} dev {BRIDGE}{_no_dad(plan.gateway)}",
    ]


def ports_batch(hosts: Mapping[int, HostPlan], cables: bool = True) -> list[str]:
    """``ip`` lines, run on the switch, that connect hosts.

    Args:
        hosts: Plans by process id of the host's first process.
        cables: Whether to make the veth pairs; those of dead interfaces are always made.
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
    # as on every real host; the gateway answers "network unreachable"
    lines.append(f"route add default via {plan.gateway} dev {host.interface}")
    return lines + static_neighbours(plan, host)


MAX_LEARNT_HOSTS = 16


def static_neighbours(plan: LabPlan, host: HostPlan) -> list[str]:
    """``ip`` lines with permanent neighbour entries for the hosts of a large lab.

    The kernel's table of learnt neighbours (1024 by default) is shared by all network namespaces.
    64 hosts that all communicate overflow it, and connections hang. Permanent entries do not count.
    """
    if len(plan.hosts) <= MAX_LEARNT_HOSTS:
        return []
    return [
        f"neigh replace {peer.address} lladdr {peer.mac} dev {host.interface} nud permanent"
        for peer in plan.hosts
        if peer is not host
    ]


PlacedCommand = tuple[str, tuple[str, ...]]  # "host" or "switch", and a command to run there


def shape(plan: LabPlan, host: HostPlan, netem: bool, rate: str = "") -> tuple[PlacedCommand, ...]:
    """Commands that set the rate of a host's link in both directions.

    Args:
        netem: Whether the host's end has a netem queue, of which this one becomes the child.
        rate: Overrides the plan's rate.
    """
    rate = rate or plan.options.rate
    if not rate:
        return ()
    return (
        ("switch", (*_replace(host.name, "root"), *_bucket(rate))),
        ("host", (*_replace(host.interface, *_queue_parent(netem)), *_bucket(rate))),
    )


def unshape(host: HostPlan, netem: bool) -> tuple[PlacedCommand, ...]:
    return (
        ("switch", ("tc", "qdisc", "del", "dev", host.name, "root")),
        ("host", ("tc", "qdisc", "del", "dev", host.interface, *_queue_parent(netem))),
    )


def delay_by_netem(host: HostPlan, seconds: float) -> tuple[PlacedCommand, ...]:
    delay = ("netem", "delay", f"{seconds * 1000:g}ms", "limit", "100000")
    return (("host", (*_replace(host.interface, "root", "handle", "1:"), *delay)),)


NETEM_PROBE = ("tc", "qdisc", "replace", "dev", "lo", "root", "netem", "delay", "0ms")
NETEM_PROBE_UNDO = ("tc", "qdisc", "del", "dev", "lo", "root")


def _queue_parent(netem: bool) -> tuple[str, ...]:
    return ("parent", "1:1") if netem else ("root",)


def _replace(interface: str, *place: str) -> tuple[str, ...]:
    return ("tc", "qdisc", "replace", "dev", interface, *place)


def _bucket(rate: str) -> tuple[str, ...]:
    return ("tbf", "rate", rate, "burst", str(burst_bytes(rate)), "latency", "50ms")


def burst_bytes(rate: str) -> int:
    """Bucket size for ``tbf``: 4 ms of traffic, but at least some full frames.

    A smaller one cannot reach the rate on a kernel with 250 timer ticks a second.
    """
    return max(16_000, int(rate_bits(rate) / 8 * 0.004))


def _no_dad(address: str) -> str:
    """Disables duplicate address detection, which would delay the use of IPv6 addresses."""
    return " nodad" if ":" in address else ""


def delay(plan: LabPlan) -> float:
    """One-way delay in seconds, 0.0 for none."""
    return delay_seconds(plan.options.latency) if plan.options.latency else 0.0
