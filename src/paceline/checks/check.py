"""The parts of a check: a probe that queries nodes, and a pure function from a survey to findings.

A survey is everything that logins and probes found; it can be written as JSON and read back. Probes
return JSON and draw no conclusions. Evaluation does no I/O; its findings carry the remedies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from paceline.remote.channel import Channel
from paceline.remote.fanout import gather_all
from paceline.remote.network import Candidate, NodeNetwork
from paceline.spec.finding import Finding
from paceline.spec.hosts import Host

Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Requirements:
    """What the job to be checked for needs.

    Attributes:
        pythons: Interpreter to use, by host.
        workdirs: Folder the job would run in, by host.
        interface: Interface requested for all hosts.
        master_port: Rendezvous port requested; 0 for any.
        data: Paths that must have the same content on every host.
        shared: Folders that must be one shared folder on all hosts.
        settled: Variables that the job sets or hides, whatever the login sets.
        job_variables: Those of them that it sets.
    """

    pythons: Mapping[str, str] = field(default_factory=dict)
    workdirs: Mapping[str, str] = field(default_factory=dict)
    needs_torch: bool = True
    interface: str | None = None
    master_port: int = 0
    data: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    settled: tuple[str, ...] = ()
    job_variables: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Survey:
    """What the logins and the probes found.

    Attributes:
        hosts: All hosts, in rank order.
        refusals: ``cause``, ``found`` and ``remedy``, by host that refused the login.
        facts: What the agent reported, by host that accepted the login.
        interpreters: Interpreter that runs the agent, by host.
        shell_output: What the shell start-up files printed, by host.
        networks: Chosen address and interface, by host; empty if none could be chosen.
        evidence: Results of the probes, by check.
        failures: Why a probe failed, by check.
    """

    hosts: tuple[Host, ...]
    refusals: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    facts: Mapping[str, Facts] = field(default_factory=dict)
    interpreters: Mapping[str, str] = field(default_factory=dict)
    shell_output: Mapping[str, str] = field(default_factory=dict)
    requirements: Requirements = field(default_factory=Requirements)
    networks: Mapping[str, NodeNetwork] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)

    @property
    def present(self) -> tuple[Host, ...]:
        """The hosts that accepted the login, in rank order."""
        return tuple(host for host in self.hosts if host.name in self.facts)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(host.name for host in self.present)

    def interfaces(self, name: str) -> list[Mapping[str, Any]]:
        """What the host reported of its network interfaces."""
        return self.facts.get(name, {}).get("interfaces") or []

    def addresses(self, name: str) -> list[str]:
        """The host's addresses that other hosts may reach."""
        links = [link for link in self.interfaces(name) if link["kind"] != "loopback"]
        addresses = [address for link in links for address in link["addresses"]]
        return [a["address"] for a in addresses if a["scope"] == "global" and a["usable"]]

    def address(self, name: str) -> str:
        """The host's chosen address, else its first routable one, else its name."""
        if name in self.networks:
            return self.networks[name].address
        return next(iter(self.addresses(name)), name)

    def with_evidence(self, check: str, result: Any) -> Survey:
        return replace(self, evidence={**self.evidence, check: result})

    def to_json(self) -> dict[str, Any]:
        """Returns the survey for a bundle or a recorded case."""
        document = asdict(self)
        return {_JSON_KEYS.get(name, name): value for name, value in document.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Survey:
        """Reads what :meth:`to_json` wrote; parts may be missing."""
        names = {item.name: _JSON_KEYS.get(item.name, item.name) for item in fields(cls)}
        values = {name: data[key] for name, key in names.items() if key in data}
        values["hosts"] = tuple(Host(**host) for host in data["hosts"])
        values["networks"] = {k: NodeNetwork(**v) for k, v in data.get("networks", {}).items()}
        wishes = data.get("wishes", {})
        lists = {
            name: tuple(wishes.get(name, ()))
            for name in ("data", "shared", "settled", "job_variables")
        }
        values["requirements"] = Requirements(**{**wishes, **lists})
        return cls(**values)


_JSON_KEYS = {"interpreters": "chosen", "shell_output": "noise", "requirements": "wishes"}


REPLY_TIMEOUT_S = 20.0  # for one answer of one node


@dataclass(slots=True)
class ProbeSession:
    """The connected nodes and the survey so far.

    Attributes:
        channels: Connections by host, in rank order.
        candidates: Addresses that may carry the job's traffic, by host.
        networks: Chosen address and interface, by host; set by the probe of ``ports``.
    """

    channels: Mapping[str, Channel]
    survey: Survey
    candidates: Mapping[str, Sequence[Candidate]] = field(default_factory=dict)
    networks: dict[str, NodeNetwork] = field(default_factory=dict)

    async def request(self, name: str, op: str, **fields: Any) -> dict[str, Any]:
        """Returns one node's reply; raises TimeoutError without one."""
        answer = self.channels[name].request(op, **fields)
        return dict(await asyncio.wait_for(answer, REPLY_TIMEOUT_S))

    async def request_all(self, op: str, **fields: Any) -> dict[str, dict[str, Any]]:
        """Returns the replies of all nodes, by host."""
        answers = await gather_all([self.request(name, op, **fields) for name in self.channels])
        return dict(zip(self.channels, answers, strict=True))


Level = Literal["facts", "quick", "full"]
LEVELS: tuple[Level, ...] = ("facts", "quick", "full")
"""``facts`` needs only what the login returned; ``quick`` queries the nodes, normally in well under
a second; ``full`` may take longer."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        id: Name in findings.
        title: What it examines, in a few words.
        evaluate: Pure function from a survey to findings; called only after the probe succeeded.
        probe: Queries the nodes; its JSON result becomes ``survey.evidence[id]``.
        needs_several_hosts: Applies only if at least two hosts accepted the login.
        needs_torch: Applies only to jobs that use torch.
    """

    id: str
    title: str
    evaluate: Callable[[Survey], list[Finding]]
    probe: Callable[[ProbeSession], Awaitable[Any]] | None = None
    needs_several_hosts: bool = False
    needs_torch: bool = False


def passed(check: str, hosts: tuple[str, ...] | list[str], message: str) -> Finding:
    return Finding(check, "pass", tuple(hosts), message)


def warned(check: str, hosts: tuple[str, ...] | list[str], message: str, remedy: str) -> Finding:
    return Finding(check, "warn", tuple(hosts), message, remedy)


def failed(check: str, hosts: tuple[str, ...] | list[str], message: str, remedy: str) -> Finding:
    return Finding(check, "fail", tuple(hosts), message, remedy)


def unknown(check: str, hosts: tuple[str, ...] | list[str], message: str,
            remedy: str = "") -> Finding:  # fmt: skip
    return Finding(check, "unknown", tuple(hosts), message, remedy)


def format_bytes(value: float) -> str:
    """Formats a size for people: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def join_names(names: list[str] | tuple[str, ...], limit: int = 6) -> str:
    """Joins names as ``n1, n2 and n3``; long lists are cut."""
    first_names = list(names[:limit])
    if len(names) > limit:
        return f"{', '.join(first_names)} and {len(names) - limit} more"
    return " and ".join(filter(None, [", ".join(first_names[:-1]), *first_names[-1:]]))
