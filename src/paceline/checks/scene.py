"""Everything that the judges know: a value, written to and read from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.remote.network import NodeNetwork
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
    """

    pythons: Mapping[str, str] = field(default_factory=dict)
    workdirs: Mapping[str, str] = field(default_factory=dict)
    needs_torch: bool = True
    interface: str | None = None
    master_port: int = 0
    data: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()


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
        for name in ("data", "shared"):
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
