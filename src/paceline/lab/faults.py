"""The faults: the steps that cause each of them, and those that undo it. Pure.

A fault is one entry of :data:`FAULTS`. The engine executes the steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from paceline.lab import network
from paceline.lab.plan import HostPlan, LabPlan
from paceline.spec.errors import LabError


@dataclass(frozen=True)
class OnHost:
    """A command in the host's network and file systems, with all rights."""

    argv: tuple[str, ...]


@dataclass(frozen=True)
class OnSwitch:
    """A command in the switch's network; ``text`` is its input."""

    argv: tuple[str, ...]
    text: str = ""


class Action(Enum):
    """What is done to all processes of the host."""

    HALT = "SIGKILL; its namespaces end"
    BOOT = "start it again"
    FREEZE = "SIGSTOP"
    THAW = "SIGCONT"


@dataclass(frozen=True)
class Kill:
    """Sends SIGKILL to processes of the host: by number, or whose command line matches."""

    pattern: str


@dataclass(frozen=True)
class Fill:
    """Fills the host's file system at ``path`` and leaves ``free`` bytes."""

    path: str
    free: int


Step = OnHost | OnSwitch | Action | Kill | Fill
Steps = tuple[Step, ...]


@dataclass(frozen=True)
class Target:
    """The host to which a fault is applied; ``netem`` if its link has a netem queue."""

    plan: LabPlan
    host: HostPlan
    netem: bool = False


_StepMaker = Callable[[Target, Sequence[str]], Steps]


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        usage, summary: Its arguments, and one line for users.
        strike: Makes the steps; raises LabError for wrong arguments.
        undo: Makes the steps that undo it; ``None`` if it cannot be undone, or need not be.
        arguments: Minimum and maximum number of arguments.
        exclusive: Whether only one of the kind can be active on a host, whatever its arguments.
    """

    name: str
    usage: str
    summary: str
    strike: _StepMaker
    undo: _StepMaker | None
    arguments: tuple[int, int]
    exclusive: bool = False


def find_fault(name: str, arguments: Sequence[str]) -> Fault:
    """The fault called ``name``; raises LabError if it does not take so many arguments."""
    fault = FAULTS.get(name)
    if fault is None:
        raise LabError(f"there is no fault {name!r}", found=f"the faults are {', '.join(FAULTS)}")
    minimum, maximum = fault.arguments
    if not minimum <= len(arguments) <= maximum:
        usage = f"paceline lab fault {name} HOST {fault.usage}".rstrip()
        raise LabError(f"{name} was given {len(arguments)} arguments", remedy=f"usage: {usage}")
    return fault


def _set_port(target: Target, state: str) -> OnSwitch:
    return OnSwitch(("ip", "link", "set", target.host.name, state))


def _kill(_target: Target, arguments: Sequence[str]) -> Steps:
    try:
        re.compile(arguments[0])
    except re.error as error:
        raise LabError(f"{arguments[0]!r} is not a pattern", found=str(error)) from None
    return (Kill(arguments[0]),)


_Rules = list[list[str]]
_FROM_OUTSIDE = ("INPUT", "!", "-i", "lo")
_DROP = {"tcp": ("-j", "DROP"), "udp": ("-j", "DROP")}
_REJECT = {"tcp": ("-j", "REJECT", "--reject-with", "tcp-reset"), "udp": ("-j", "REJECT")}


def _firewall(action: str, make_rules: Callable[[Target, Sequence[str]], _Rules]) -> _StepMaker:
    def make_steps(target: Target, arguments: Sequence[str]) -> Steps:
        tool = "ip6tables" if target.plan.options.ipv6_only else "iptables"
        return tuple(OnHost((tool, "-w", action, *rule)) for rule in make_rules(target, arguments))

    return make_steps


def _drop_rules(_target: Target, arguments: Sequence[str]) -> _Rules:
    if arguments[0] == "all":
        return [[*_FROM_OUTSIDE, "-j", "DROP"], ["OUTPUT", "!", "-o", "lo", "-j", "DROP"]]
    return _port_rules(arguments[0], _DROP)


def _reject_rules(_target: Target, arguments: Sequence[str]) -> _Rules:
    if arguments[0] == "all":  # the rule inserted last is the first
        return [[*_FROM_OUTSIDE, "-j", "REJECT"], [*_FROM_OUTSIDE, "-p", "tcp", *_REJECT["tcp"]]]
    return _port_rules(arguments[0], _REJECT)


def _deaf_rules(target: Target, arguments: Sequence[str]) -> _Rules:
    return [["INPUT", "-s", target.plan.host(arguments[0]).address, "-j", "DROP"]]


def _port_rules(ports: str, verdict: Mapping[str, tuple[str, ...]]) -> _Rules:
    """Rules for ``all-ephemeral`` or a list such as ``29500,30000-40000``."""
    if ports == "all-ephemeral":  # a firewall that was opened for SSH only
        syn_match = ["-p", "tcp", "--syn", "!", "--dport", "22"]
        return [
            [*_FROM_OUTSIDE, *syn_match, *verdict["tcp"]],
            [*_FROM_OUTSIDE, "-p", "udp", *verdict["udp"]],
        ]
    return [
        [*_FROM_OUTSIDE, "-p", protocol, "--dport", port, *verdict[protocol]]
        for port in _parse_ports(ports)
        for protocol in verdict
    ]


def _parse_ports(text: str) -> list[str]:
    """Converts ``29500,30000-40000`` to iptables' syntax."""
    ports = text.replace("-", ":").split(",")
    for port in ports:
        bounds = port.split(":")
        if len(bounds) > 2 or not all(n.isdigit() and 0 < int(n) < 65536 for n in bounds):
            raise LabError(
                f"{text!r} names no ports",
                remedy="write all, all-ephemeral, or for example 29500,30000-40000",
            )
    return ports


def _route(action: str) -> _StepMaker:
    return lambda target, arguments: (
        OnHost(("ip", "route", action, "unreachable", target.plan.host(arguments[0]).address)),
    )


def _to_steps(commands: Sequence[network.PlacedCommand]) -> Steps:
    step_types = {"host": OnHost, "switch": OnSwitch}
    return tuple(step_types[location](argv) for location, argv in commands)


def _slow(target: Target, arguments: Sequence[str]) -> Steps:
    return _to_steps(network.shape(target.plan, target.host, target.netem, rate=arguments[0]))


def _undo_slow(target: Target, _: Sequence[str]) -> Steps:
    if target.plan.options.rate:
        return _to_steps(network.shape(target.plan, target.host, target.netem))
    return _to_steps(network.unshape(target.host, target.netem))


def _loss(target: Target, arguments: Sequence[str]) -> Steps:
    """Drops frames on the switch, so that neither side notices."""
    percent, port = _parse_percent(arguments[0]), target.host.name
    verdict = f"numgen random mod 10000 <= {max(0, round(percent * 100) - 1)} drop"
    text = f"""table bridge loss_{port} {{
  chain a {{ type filter hook prerouting priority 0; iifname "{port}" {verdict}; }}
  chain b {{ type filter hook postrouting priority 0; oifname "{port}" {verdict}; }}
}}
"""
    return (OnSwitch(("nft", "-f", "-"), text),)


def _undo_loss(target: Target, _: Sequence[str]) -> Steps:
    return (OnSwitch(("nft", "-f", "-"), f"delete table bridge loss_{target.host.name}\n"),)


def _parse_percent(text: str) -> float:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 < value <= 100:
        raise LabError(f"{text!r} is not a percentage between 0 and 100")
    return value


def _fill(_target: Target, arguments: Sequence[str]) -> Steps:
    return (Fill(arguments[0], size_bytes(arguments[1] if len(arguments) > 1 else "0")),)


def size_bytes(text: str) -> int:
    """Bytes of a size such as ``10m``; raises LabError."""
    match = re.fullmatch(r"(\d+)([kmg]?)", text.lower())
    if not match:
        raise LabError(f"{text!r} is not a size", remedy="write for example 10m")
    return int(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}[match[2]]


BALLAST = ".paceline-lab-ballast"  # the file that fills a disk
_PORTS = "PORTS|all|all-ephemeral"
FAULTS: dict[str, Fault] = {fault.name: fault for fault in (
    # the port goes down first, so that no FIN or RST leaves a host that lost power
    Fault("power-off", "", "the host dies at once, without closing connections",
          lambda target, _: (_set_port(target, "down"), Action.HALT), lambda *_: (Action.BOOT,),
          (0, 0), True),
    Fault("freeze", "", "every process stops (SIGSTOP); the kernel keeps running",
          lambda *_: (Action.FREEZE,), lambda *_: (Action.THAW,), (0, 0), True),
    Fault("unplug", "", "the cable is pulled", lambda target, _: (_set_port(target, "down"),),
          lambda target, _: (_set_port(target, "up"),), (0, 0), True),
    Fault("drop", _PORTS, "incoming packets are dropped", _firewall("-I", _drop_rules),
          _firewall("-D", _drop_rules), (1, 1)),
    Fault("reject", _PORTS, "incoming packets are rejected", _firewall("-I", _reject_rules),
          _firewall("-D", _reject_rules), (1, 1)),
    Fault("unreachable", "PEER", "no route to PEER (errno 113)", _route("add"), _route("del"),
          (1, 1)),
    Fault("deaf", "PEER", "nothing from PEER arrives; the other direction works",
          _firewall("-I", _deaf_rules), _firewall("-D", _deaf_rules), (1, 1)),
    Fault("slow", "RATE", "the link carries no more than RATE", _slow, _undo_slow, (1, 1), True),
    Fault("loss", "PERCENT", "packets are lost in both directions", _loss, _undo_loss, (1, 1),
          True),
    Fault("fill-disk", "PATH [FREE]", "the file system at PATH is full", _fill,
          lambda _, arguments: (OnHost(("rm", "-f", f"{arguments[0]}/{BALLAST}")),), (1, 2)),
    Fault("kill", "PID|PATTERN", "kill -9 of processes, by number or command", _kill, None, (1, 1)),
)}  # fmt: skip
