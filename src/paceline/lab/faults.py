"""The faults: what each does to a host, and how it is undone. Pure; the switch acts.

A fault is one entry of :data:`FAULTS`: a function that turns the host and the fault's arguments
into steps, and one that gives the steps back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.lab import network
from paceline.lab.plan import HostPlan, LabPlan
from paceline.spec.errors import LabError


@dataclass(frozen=True)
class OnHost:
    """A command with the host's network and file systems (and all rights)."""

    argv: tuple[str, ...]


@dataclass(frozen=True)
class OnSwitch:
    """A command in the switch's network; ``text`` is its input."""

    argv: tuple[str, ...]
    text: str = ""


@dataclass(frozen=True)
class Halt:
    """SIGKILL to every process of the host at once; its namespaces end."""


@dataclass(frozen=True)
class Boot:
    """Starts the host again."""


@dataclass(frozen=True)
class Freeze:
    """SIGSTOP to every process of the host, its first one included."""


@dataclass(frozen=True)
class Thaw:
    """SIGCONT to every process of the host."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL to processes of the host: one by number, or all whose command line matches."""

    what: str


@dataclass(frozen=True)
class Fill:
    """Fills the host's file system at ``path`` but for ``free`` bytes."""

    path: str
    free: int


@dataclass(frozen=True)
class Unfill:
    """Removes what :class:`Fill` wrote."""

    path: str


Step = OnHost | OnSwitch | Halt | Boot | Freeze | Thaw | Kill | Fill | Unfill
Steps = tuple[Step, ...]


@dataclass(frozen=True)
class Target:
    """The host that a fault strikes, in its plan; ``netem``: its link is delayed by that."""

    plan: LabPlan
    host: HostPlan
    netem: bool = False


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        name: What the user types.
        usage: Its arguments, as shown.
        summary: One line for people.
        strike: Target and arguments → steps; raises LabError for wrong arguments.
        undo: The same → the steps back; None when there is no way back (or none needed).
        arguments: Least and greatest number of arguments.
        once: At most one of the kind can be in force on a host, whatever its arguments.
    """

    name: str
    usage: str
    summary: str
    strike: Callable[[Target, Sequence[str]], Steps]
    undo: Callable[[Target, Sequence[str]], Steps] | None
    arguments: tuple[int, int]
    once: bool = False


def find(name: str, arguments: Sequence[str]) -> Fault:
    """The fault called ``name``, if it takes so many arguments."""
    fault = FAULTS.get(name)
    if fault is None:
        raise LabError(f"there is no fault {name!r}", found=f"the faults are {', '.join(FAULTS)}")
    least, most = fault.arguments
    if not least <= len(arguments) <= most:
        usage = f"paceline lab fault {name} HOST {fault.usage}".rstrip()
        raise LabError(f"{name} was given {len(arguments)} arguments", remedy=f"usage: {usage}")
    return fault


# --- power, cable, processes


def _port(target: Target, state: str) -> OnSwitch:
    return OnSwitch(("ip", "link", "set", target.host.name, state))


def _power_off(target: Target, _: Sequence[str]) -> Steps:
    # The cable first: no FIN and no RST may tell the others what a dead machine cannot tell.
    return (_port(target, "down"), Halt())


def _power_on(_target: Target, _: Sequence[str]) -> Steps:
    return (Boot(),)


def _freeze(_target: Target, _: Sequence[str]) -> Steps:
    return (Freeze(),)


def _thaw(_target: Target, _: Sequence[str]) -> Steps:
    return (Thaw(),)


def _unplug(target: Target, _: Sequence[str]) -> Steps:
    return (_port(target, "down"),)


def _plug(target: Target, _: Sequence[str]) -> Steps:
    return (_port(target, "up"),)


def _kill(_target: Target, arguments: Sequence[str]) -> Steps:
    try:
        re.compile(arguments[0])
    except re.error as error:
        raise LabError(f"{arguments[0]!r} is not a pattern", found=str(error)) from None
    return (Kill(arguments[0]),)


# --- the host's firewall


def _firewall(target: Target, action: str, rules: Sequence[Sequence[str]]) -> Steps:
    """iptables commands; ``action`` is ``-I`` (insert) or ``-D`` (delete)."""
    tool = "ip6tables" if target.plan.options.ipv6_only else "iptables"
    return tuple(OnHost((tool, "-w", action, *rule)) for rule in rules)


_OUTSIDE = ("INPUT", "!", "-i", "lo")
_DROP = {"tcp": ("-j", "DROP"), "udp": ("-j", "DROP")}
_REJECT = {"tcp": ("-j", "REJECT", "--reject-with", "tcp-reset"), "udp": ("-j", "REJECT")}


def _drop_rules(arguments: Sequence[str]) -> list[list[str]]:
    if arguments[0] == "all":
        return [[*_OUTSIDE, "-j", "DROP"], ["OUTPUT", "!", "-o", "lo", "-j", "DROP"]]
    return _rules(arguments[0], _DROP)


def _reject_rules(arguments: Sequence[str]) -> list[list[str]]:
    if arguments[0] == "all":  # the rule inserted last stands first
        return [[*_OUTSIDE, "-j", "REJECT"], [*_OUTSIDE, "-p", "tcp", *_REJECT["tcp"]]]
    return _rules(arguments[0], _REJECT)


def _rules(ports: str, verdict: Mapping[str, tuple[str, ...]]) -> list[list[str]]:
    """Rules for ``all-ephemeral`` or a list such as ``29500,30000-40000``."""
    if ports == "all-ephemeral":  # a host whose firewall was opened for SSH and nothing else
        new = ["-p", "tcp", "--syn", "!", "--dport", "22"]
        return [[*_OUTSIDE, *new, *verdict["tcp"]], [*_OUTSIDE, "-p", "udp", *verdict["udp"]]]
    return [
        [*_OUTSIDE, "-p", protocol, "--dport", port, *verdict[protocol]]
        for port in _ports(ports)
        for protocol in verdict
    ]


def _ports(text: str) -> list[str]:
    """``29500,30000-40000`` → what iptables takes."""
    ports = text.replace("-", ":").split(",")
    for port in ports:
        ends = port.split(":")
        if len(ends) > 2 or not all(end.isdigit() and 0 < int(end) < 65536 for end in ends):
            raise LabError(
                f"{text!r} names no ports",
                remedy="write all, all-ephemeral, or for example 29500,30000-40000",
            )
    return ports


def _drop(target: Target, arguments: Sequence[str]) -> Steps:
    return _firewall(target, "-I", _drop_rules(arguments))


def _undrop(target: Target, arguments: Sequence[str]) -> Steps:
    return _firewall(target, "-D", _drop_rules(arguments))


def _reject(target: Target, arguments: Sequence[str]) -> Steps:
    return _firewall(target, "-I", _reject_rules(arguments))


def _unreject(target: Target, arguments: Sequence[str]) -> Steps:
    return _firewall(target, "-D", _reject_rules(arguments))


# --- routes and links


def _route(target: Target, action: str, peer: str) -> Steps:
    return (OnHost(("ip", "route", action, "unreachable", target.plan.host(peer).address)),)


def _unreachable(target: Target, arguments: Sequence[str]) -> Steps:
    return _route(target, "add", arguments[0])


def _reachable(target: Target, arguments: Sequence[str]) -> Steps:
    return _route(target, "del", arguments[0])


def _deaf_rules(target: Target, arguments: Sequence[str]) -> list[list[str]]:
    return [["INPUT", "-s", target.plan.host(arguments[0]).address, "-j", "DROP"]]


def _deaf(target: Target, arguments: Sequence[str]) -> Steps:
    return _firewall(target, "-I", _deaf_rules(target, arguments))


def _hearing(target: Target, arguments: Sequence[str]) -> Steps:
    return _firewall(target, "-D", _deaf_rules(target, arguments))


def _placed(commands: Sequence[network.Placed]) -> Steps:
    places = {"host": OnHost, "switch": OnSwitch}
    return tuple(places[where](argv) for where, argv in commands)


def _slow(target: Target, arguments: Sequence[str]) -> Steps:
    return _placed(network.shape(target.plan, target.host, target.netem, rate=arguments[0]))


def _fast(target: Target, _: Sequence[str]) -> Steps:
    if target.plan.options.rate:
        return _placed(network.shape(target.plan, target.host, target.netem))
    return _placed(network.unshape(target.host, target.netem))


def _loss_table(target: Target) -> str:
    return f"loss_{target.host.name}"


def _loss(target: Target, arguments: Sequence[str]) -> Steps:
    """Frames vanish on the switch, so that neither side is told."""
    percent = _percent(arguments[0])
    name, port = _loss_table(target), target.host.name
    chance = f"numgen random mod 10000 <= {max(0, round(percent * 100) - 1)} drop"
    text = "\n".join(
        (
            f"table bridge {name} {{",
            f'  chain a {{ type filter hook prerouting priority 0; iifname "{port}" {chance}; }}',
            f'  chain b {{ type filter hook postrouting priority 0; oifname "{port}" {chance}; }}',
            "}\n",
        )
    )
    return (OnSwitch(("nft", "-f", "-"), text),)


def _no_loss(target: Target, _: Sequence[str]) -> Steps:
    return (OnSwitch(("nft", "-f", "-"), f"delete table bridge {_loss_table(target)}\n"),)


def _percent(text: str) -> float:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 < value <= 100:
        raise LabError(f"{text!r} is not a percentage between 0 and 100")
    return value


# --- disks


def _fill(_target: Target, arguments: Sequence[str]) -> Steps:
    path, free = arguments[0], arguments[1] if len(arguments) > 1 else "0"
    return (Fill(path, size_bytes(free)),)


def _unfill(_target: Target, arguments: Sequence[str]) -> Steps:
    return (Unfill(arguments[0]),)


def size_bytes(text: str) -> int:
    """Bytes of a size such as ``10m``; raises LabError."""
    match = re.fullmatch(r"(\d+)([kmg]?)", text.lower())
    if not match:
        raise LabError(f"{text!r} is not a size", remedy="write for example 10m")
    return int(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}[match[2]]


_ALL = (
    Fault(
        "power-off",
        "",
        "the host dies at once and says nothing",
        _power_off,
        _power_on,
        (0, 0),
        True,
    ),
    Fault(
        "freeze",
        "",
        "every process stops (SIGSTOP); the kernel goes on",
        _freeze,
        _thaw,
        (0, 0),
        True,
    ),
    Fault("unplug", "", "the cable is pulled", _unplug, _plug, (0, 0), True),
    Fault("drop", "PORTS|all|all-ephemeral", "what comes in vanishes", _drop, _undrop, (1, 1)),
    Fault("reject", "PORTS|all|all-ephemeral", "it is refused", _reject, _unreject, (1, 1)),
    Fault("unreachable", "PEER", "no route to PEER (errno 113)", _unreachable, _reachable, (1, 1)),
    Fault(
        "deaf", "PEER", "nothing from PEER arrives; the other way works", _deaf, _hearing, (1, 1)
    ),
    Fault("slow", "RATE", "the link carries no more than RATE", _slow, _fast, (1, 1), True),
    Fault("loss", "PERCENT", "packets are lost, both ways", _loss, _no_loss, (1, 1), True),
    Fault("fill-disk", "PATH [FREE]", "the file system at PATH is full", _fill, _unfill, (1, 2)),
    Fault("kill", "PID|PATTERN", "kill -9 of processes, by number or command", _kill, None, (1, 1)),
)
FAULTS: dict[str, Fault] = {fault.name: fault for fault in _ALL}
