"""The plan: what runs where, with which arguments, environment, address and rank.

One pure function, ``launch.planning.planner.make_plan``, makes it from what
``launch.nodes.survey`` found out.
``--plan`` prints it, ``plan.json`` keeps it, and ``launch.launcher.run_job`` executes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.spec import jobenv, launchers
from paceline.spec.job import Entry, redact
from paceline.spec.settings import Setting


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One process.

    Attributes:
        rank: 0 … world size - 1, counted through the hosts in order.
        local_rank: 0 … processes on its node - 1.
        cpus: CPUs it is bound to; empty for no binding.
    """

    rank: int
    local_rank: int
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """A folder of the launching machine that is sent to a node before its ranks start.

    Attributes:
        name: Of the copy on the node: ``code``, ``input0``, ``input1`` …
        source: Absolute path on the launching machine.
        target: Absolute path on the node.
    """

    name: str
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One host's part.

    Attributes:
        host: Name in the description.
        node_rank: 0 for the host with rank 0.
        login: What SSH connects to, or ``this machine``.
        address: Address of this node that all others reach.
        interface: The interface that holds it.
        python: Absolute path of the interpreter.
        workdir: Folder in which the ranks run, on that node.
        code: The code is ``in place``, ``verified equal``, ``not compared`` (with ``--ship never``,
            if it is too large) or ``shipped``.
        entry: What its ranks run, with paths of that node.
        env: Variables of this node's ranks that we set, with their sources. Values of forwarded
            variables do not stand here.
        devices: What they compute on, for people: "2 GPUs", "8 CPUs".
        copies: What is sent there first.
    """

    host: str
    node_rank: int
    login: str
    address: str
    interface: str
    python: str
    workdir: str
    code: str
    entry: Entry
    env: Mapping[str, Setting[str]]
    ranks: tuple[RankPlan, ...]
    devices: str = ""
    copies: tuple[Copy, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """One attempt of a job, decided.

    Attributes:
        attempt: 0 for the first start, 1 after the first restart of all nodes.
        restarts: How many of the starts followed a failure that counts.
        entry: What every rank runs, as typed.
        master_addr: Address of the node with rank 0.
        master_port: Port of the rendezvous store there.
        agent_store: True when the agent of that node holds the store; False leaves it to rank 0
            (which then listens on every interface).
        closed_store: True when that store listens on loopback only, and the agent carries there
            what its own ranks, and the agents of other nodes, send to that address. False: it
            listens on that address.
        nodes: In rank order.
        environment: The user's variables as recorded (see ``Environment.redacted``).
        settings: Every setting that shaped the plan, with its source.
        dialects: Whose names for a rank's place are set beside torchrun's
            (:func:`paceline.spec.launchers.foreign_variables`).
        notes: What the user should know about the choices made.
        spares: Nodes without ranks, for when one is lost.
        typed: ``command`` that started it, ``folder`` in which it was typed, and ``paceline``, its
            version.
        hosts: Names of all on which it may run, also of those that were not there.
    """

    run_id: str
    attempt: int
    entry: Entry
    world_size: int
    master_addr: str
    master_port: int
    agent_store: bool
    closed_store: bool
    nodes: tuple[NodePlan, ...]
    environment: Mapping[str, str]
    settings: Mapping[str, Setting[Any]]
    notes: tuple[str, ...] = ()
    dialects: tuple[str, ...] = ()
    restarts: int = 0
    spares: tuple[NodePlan, ...] = ()
    typed: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()

    @property
    def rank_master_addr(self) -> str:
        """The address at which each rank finds the store."""
        if not self.closed_store or self.master_addr.startswith("127."):
            return self.master_addr
        return "::1" if ":" in self.master_addr else "127.0.0.1"

    @property
    def store_holder(self) -> str:
        """Who holds the store, for people."""
        if self.closed_store:
            return "agents, on loopback"
        return "agent" if self.agent_store else "rank 0"

    def rank_env(self, node: NodePlan, rank: RankPlan) -> dict[str, str]:
        """The variables by which one rank knows its place (torchrun's names and ours)."""
        place = {
            jobenv.RANK: str(rank.rank),
            jobenv.LOCAL_RANK: str(rank.local_rank),
            jobenv.WORLD_SIZE: str(self.world_size),
            jobenv.LOCAL_WORLD_SIZE: str(len(node.ranks)),
            jobenv.GROUP_RANK: str(node.node_rank),
            jobenv.GROUP_WORLD_SIZE: str(len(self.nodes)),
            jobenv.MASTER_ADDR: self.rank_master_addr,
            jobenv.MASTER_PORT: str(self.master_port),
            "ROLE_RANK": str(rank.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "ROLE_NAME": "default",
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_RESTART_COUNT": str(self.restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(self.settings["max_restarts"].value),
            "TORCHELASTIC_USE_AGENT_STORE": str(self.agent_store),
            jobenv.PLANNED_WORLD: str(self.world_size),
            jobenv.RUN_ID: self.run_id,
            jobenv.ATTEMPT: str(self.attempt),
            jobenv.HOST: node.host,
            jobenv.HOSTS: ",".join(self.hosts),
        }
        foreign = launchers.foreign_variables(self.dialects, place)  # the user's own go before them
        explicit = {*self.environment, *node.env}
        return {name: value for name, value in foreign.items() if name not in explicit} | place

    def to_json(self) -> dict[str, Any]:
        """The plan as ``plan.json`` holds it."""
        return {
            "run_id": self.run_id,
            "attempt": self.attempt,
            "entry": entry_json(self.entry),
            "world_size": self.world_size,
            "master": {"address": self.master_addr, "port": self.master_port},
            "store": self.store_holder,
            "nodes": [self._node_json(node) for node in self.nodes],
            "spares": [node.host for node in self.spares],
            "environment": dict(self.environment),
            "settings": {name: _setting_json(s) for name, s in self.settings.items()},
            "notes": list(self.notes),
            "typed": dict(self.typed),
        }

    def _node_json(self, node: NodePlan) -> dict[str, Any]:
        return {
            "host": node.host,
            "node_rank": node.node_rank,
            "login": node.login,
            "address": node.address,
            "interface": node.interface,
            "python": node.python,
            "workdir": node.workdir,
            "code": node.code,
            "devices": node.devices,
            "entry": entry_json(node.entry),
            "env": {
                name: _setting_json(replace(setting, value=redact(name, setting.value)))
                for name, setting in node.env.items()
            },
            "ranks": self.ranks_json(node),
        }

    def ranks_json(self, node: NodePlan) -> list[dict[str, Any]]:
        """A node's ranks as ``plan.json`` holds them, and as its agent is told to start them."""
        return [
            {
                "rank": rank.rank,
                "local_rank": rank.local_rank,
                "cpus": list(rank.cpus),
                "env": self.rank_env(node, rank),
            }
            for rank in node.ranks
        ]


def entry_json(entry: Entry) -> dict[str, Any]:
    """An entry in ``plan.json``, and on the wire."""
    record: dict[str, Any] = {"kind": entry.kind, "target": entry.target, "args": list(entry.args)}
    if entry.local_rank_flag:
        record["local_rank_flag"] = entry.local_rank_flag
    return {**record, "sha256": entry.sha256} if entry.kind == "function" else record


def _setting_json(setting: Setting[Any]) -> dict[str, Any]:
    record: dict[str, Any] = {"value": setting.value, "source": setting.source.label}
    if setting.detail:
        record["detail"] = setting.detail
    return record
