"""What a check is: a probe that asks the nodes, and a judge of the scene, all that is known.

The scene is a value, written to and read from JSON. A probe returns JSON and judges nothing; a
judge does no I/O, and the remedies stand in what it says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from paceline.remote.channel import Channel
from paceline.remote.fanout import all_of
from paceline.remote.network import Candidate, NodeNetwork
from paceline.spec.finding import Finding
from paceline.spec.hosts import Host

Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the job that is to be checked for would need.

    Attributes:
        pythons: By host, the interpreter asked for.
        workdirs: By host, the folder that the job would run in.
        needs_torch: Whether it uses torch.
        interface: The interface asked for on all hosts.
        master_port: The rendezvous port asked for; 0 for any.
        data: Paths that must hold the same on every host.
        shared: Folders that must be the very same one on every host.
        settled: Variables that the job sets or hides itself, whatever the login says.
    """

    pythons: Mapping[str, str] = field(default_factory=dict)
    workdirs: Mapping[str, str] = field(default_factory=dict)
    needs_torch: bool = True
    interface: str | None = None
    master_port: int = 0
    data: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    settled: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scene:
    """What was found out.

    Attributes:
        hosts: All hosts, in rank order.
        refusals: By host that did not let us in: ``cause``, ``found``, ``remedy``.
        facts: By host that did, what its agent told.
        chosen: By host, the interpreter that the agent really found.
        noise: By host, what its shell start-up files printed.
        wishes: What the job would need.
        networks: By host, address and interface chosen; empty when none could be.
        evidence: By check, what its probe found.
        failures: By check, why its probe failed.
    """

    hosts: tuple[Host, ...]
    refusals: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    facts: Mapping[str, Facts] = field(default_factory=dict)
    chosen: Mapping[str, str] = field(default_factory=dict)
    noise: Mapping[str, str] = field(default_factory=dict)
    wishes: Wishes = field(default_factory=Wishes)
    networks: Mapping[str, NodeNetwork] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)

    @property
    def present(self) -> tuple[Host, ...]:
        """The hosts that let us in, in rank order."""
        return tuple(host for host in self.hosts if host.name in self.facts)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(host.name for host in self.present)

    def address(self, name: str) -> str:
        """The host's chosen address, else the first that may be one, else what it is called."""
        if name in self.networks:
            return self.networks[name].address
        links = self.facts.get(name, {}).get("interfaces") or []
        found = [a["address"] for link in links for a in link["addresses"] if usable(link, a)]
        return str(found[0]) if found else name

    def with_evidence(self, check: str, found: Any) -> Scene:
        return replace(self, evidence={**self.evidence, check: found})

    def to_json(self) -> dict[str, Any]:
        """Everything, for a bundle and for recorded cases."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Scene:
        """What :meth:`to_json` gave; parts may be missing."""
        wishes = dict(data.get("wishes", {}))
        for name in ("data", "shared", "settled"):
            wishes[name] = tuple(wishes.get(name, ()))
        rest = {
            k: data[k]
            for k in ("refusals", "facts", "chosen", "noise", "evidence", "failures")
            if k in data
        }
        return cls(
            hosts=tuple(Host(**host) for host in data["hosts"]),
            wishes=Wishes(**wishes),
            networks={k: NodeNetwork(**v) for k, v in data.get("networks", {}).items()},
            **rest,
        )


def usable(link: Mapping[str, Any], address: Mapping[str, Any]) -> bool:
    """True for an address that others may reach."""
    return bool(link["kind"] != "loopback" and address["scope"] == "global" and address["usable"])


PATIENCE_S = 20.0  # for one answer of one node


@dataclass(slots=True)
class Probing:
    """The connected nodes, and what is known so far.

    Attributes:
        channels: By host, in rank order.
        scene: What is known.
        candidates: By host, the addresses that may carry the job's traffic.
        networks: By host, the chosen ones; set by the probe of ``ports``.
    """

    channels: Mapping[str, Channel]
    scene: Scene
    candidates: Mapping[str, Sequence[Candidate]] = field(default_factory=dict)
    networks: dict[str, NodeNetwork] = field(default_factory=dict)

    async def ask(self, name: str, op: str, **fields: Any) -> dict[str, Any]:
        """One answer of one node; TimeoutError when it does not come."""
        answer = self.channels[name].request(op, **fields)
        return dict(await asyncio.wait_for(answer, PATIENCE_S))

    async def each(self, op: str, **fields: Any) -> dict[str, dict[str, Any]]:
        """The answers of all nodes, by host."""
        answers = await every([self.ask(name, op, **fields) for name in self.channels])
        return dict(zip(self.channels, answers, strict=True))


async def every(work: Sequence[Awaitable[Any]]) -> list[Any]:
    """All results; what is still under way after the first failure is cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await all_of(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


Level = Literal["facts", "quick", "full"]
LEVELS: tuple[Level, ...] = ("facts", "quick", "full")


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        id: Its name in findings.
        title: What it looks at, in a few words.
        level: ``facts`` needs nothing that the login did not bring; ``quick`` asks the nodes,
            in well under a second when all is well; ``full`` takes its time.
        judge: What the scene says. Pure. Called only when the probe (if any) has succeeded.
        probe: Asks the nodes; what it returns stands in the scene under ``id`` and must be JSON.
        several: Makes sense only where two hosts or more let us in.
        torch: Makes sense only for jobs that use torch.
    """

    id: str
    title: str
    level: Level
    judge: Callable[[Scene], list[Finding]]
    probe: Callable[[Probing], Awaitable[Any]] | None = None
    several: bool = False
    torch: bool = False


def passed(check: str, hosts: tuple[str, ...] | list[str], message: str) -> Finding:
    return Finding(check, "pass", tuple(hosts), message)


def warned(check: str, hosts: tuple[str, ...] | list[str], message: str, remedy: str) -> Finding:
    return Finding(check, "warn", tuple(hosts), message, remedy)


def failed(check: str, hosts: tuple[str, ...] | list[str], message: str, remedy: str) -> Finding:
    return Finding(check, "fail", tuple(hosts), message, remedy)


def unknown(check: str, hosts: tuple[str, ...] | list[str], message: str,
            remedy: str = "") -> Finding:  # fmt: skip
    return Finding(check, "unknown", tuple(hosts), message, remedy)


def size(count: float) -> str:
    """Bytes for people: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def listed(names: list[str] | tuple[str, ...], limit: int = 6) -> str:
    """``n1, n2 and n3``; long lists are cut."""
    shown = list(names[:limit])
    if len(names) > limit:
        return f"{', '.join(shown)} and {len(names) - limit} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))
