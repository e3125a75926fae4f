"""Commands to the agents and ranks of one attempt: start, regroup, open a store, end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections import Counter
from collections.abc import Sequence
from typing import Any

from paceline.launch.elastic.actions import Regroup
from paceline.launch.nodes.fleet import Fleet, Node
from paceline.spec import jobenv
from paceline.spec.errors import PacelineError
from paceline.spec.job import Job
from paceline.spec.plan import NodePlan, Plan, entry_json

REPLY_TIMEOUT_S = 5.0


class RankCommands:
    """Sends commands to the hosts of one attempt, and knows which host has which ranks.

    Args:
        plan: What runs where; its ranks are the slots.
        job: For the values that the plan does not record.
        fleet: The nodes.
        run_dir: The run directory as the user names it.

    Attributes:
        parts: By host, its part of the plan.
        hosts_of: By slot, its host.
    """

    def __init__(self, plan: Plan, job: Job, fleet: Fleet, run_dir: str) -> None:
        self.parts = {part.host: part for part in plan.nodes}
        self.hosts_of = {rank.rank: part.host for part in plan.nodes for rank in part.ranks}
        self._plan, self._job, self._fleet, self._run_dir = plan, job, fleet, run_dir
        self._store: dict[str, Any] = {"address": plan.master_addr, "port": plan.master_port}

    @property
    def next_slot(self) -> int:
        """The slot number that the next new rank gets."""
        return max(self.hosts_of) + 1

    @property
    def addresses(self) -> dict[str, str]:
        """Maps each host with ranks to its address for the traffic of the job."""
        return {host: part.address for host, part in self.parts.items()}

    def host_at(self, address: str) -> str:
        """Returns the host with this address, or an empty string."""
        return next((host for host, part in self.parts.items()
                     if address and _same_address(part.address, address)), "")  # fmt: skip

    def node(self, host: str) -> Node | None:
        """The node of a host; ``None`` when another host has taken its place."""
        return next((node for node in self._fleet.nodes if node.name == host), None)

    def add(self, part: NodePlan) -> list[int]:
        """Adds the plan of a new host; returns the slots that no rank had before."""
        slots = [rank.rank for rank in part.ranks]
        fresh = [slot for slot in slots if slot not in self.hosts_of]
        self.parts[part.host] = part
        self.hosts_of.update(dict.fromkeys(slots, part.host))
        return fresh

    # --- starts ------------------------------------------------------------------------------

    async def start(self, node: Node, part: NodePlan) -> None:
        """Starts all ranks of a node for the first time, with the store on the first node."""
        has_store = self._plan.agent_store and part.node_rank == 0
        store = self._store if has_store else None
        await node.channel.request("start", store=store, **self.start_request(node, part))

    def start_request(self, node: Node, part: NodePlan) -> dict[str, Any]:
        """Returns the message with which the agent of a node starts its ranks."""
        env = {name: setting.value for name, setting in part.env.items()}
        env[jobenv.RUN_DIR] = node.run_folder
        env[jobenv.LAUNCHER_RUN_DIR] = self._run_dir
        env[jobenv.ADDRESSES] = self._admitted()
        return {
            "entry": entry_json(part.entry),
            "workdir": part.workdir,
            # the plan leaves out what goes before it
            "env": {**self._job.environment.variables(), **env},
            "any_world": self._job.any_world,
            "ranks": self._plan.ranks_json(part),
        }

    async def start_newcomers(self, node: Node, part: NodePlan, slots: Sequence[int]) -> None:
        """Forks ranks that will join the running ones."""
        request = self.start_request(node, part)
        size = str(self.next_slot)  # a rank's number has to be less
        env = {jobenv.NEWCOMER: "1", jobenv.MASTER_ADDR: self._store["address"],
               jobenv.MASTER_PORT: str(self._store["port"]),
               jobenv.WORLD_SIZE: size, jobenv.PLANNED_WORLD: size}  # fmt: skip
        ranks = [
            {**spec, "env": {**spec["env"], **env}}
            for spec in request["ranks"]
            if spec["rank"] in slots
        ]
        await self._admit_newcomers()
        starting = node.channel.request("add_ranks", **{**request, "ranks": ranks})
        await asyncio.wait_for(starting, REPLY_TIMEOUT_S)
        node.running = True

    async def _admit_newcomers(self) -> None:
        """Makes the store accept connections from hosts that came after it was opened."""
        host, addresses = self.host_at(str(self._store["address"])), self._admitted()
        if host and addresses:
            admitting = self._fleet.named(host).channel.request("admit", addresses=addresses)
            await asyncio.wait_for(admitting, REPLY_TIMEOUT_S)

    def _admitted(self) -> str:
        """Source addresses of the current hosts of the job."""
        return self._fleet.addresses(self._job.environment.variables().get(jobenv.ADDRESSES, ""))

    # --- ranks that run ----------------------------------------------------------------------

    async def ask(self, host: str, op: str, **fields: Any) -> None:
        """Sends a request to an agent and ignores failures."""
        with contextlib.suppress(PacelineError, ConnectionError, asyncio.TimeoutError):
            channel = self._fleet.named(host).channel
            await asyncio.wait_for(channel.request(op, **fields), REPLY_TIMEOUT_S)

    async def open_store(self, host: str) -> None:
        """Opens a fresh rendezvous store on a host.

        Raises:
            PacelineError, ConnectionError, asyncio.TimeoutError: It could not be opened.
        """
        node, address = self._fleet.named(host), self.parts[host].address
        opening = node.channel.request("open_store", address=address, addresses=self._admitted())
        answer = await asyncio.wait_for(opening, REPLY_TIMEOUT_S)
        self._store = {"address": address, "port": int(answer["port"])}

    def regroup_message(self, group: Regroup) -> dict[str, Any]:
        """Returns the message that describes the new group; local ranks are counted within it."""
        sizes = Counter(self.hosts_of[slot] for slot in group.members)
        counts: Counter[str] = Counter()
        local_ranks = {}
        for slot in sorted(group.members):
            local_ranks[slot] = counts[self.hosts_of[slot]]
            counts[self.hosts_of[slot]] += 1
        members = [
            {"slot": slot, "host": host, "local_rank": local_ranks[slot], "local_size": sizes[host]}
            for slot in group.members
            for host in [self.hosts_of[slot]]
        ]
        return {"control": "regroup", "generation": group.generation, "members": members,
                "store": self._store, "planned": group.planned, "holds": group.holds,
                "addresses": self._admitted()}  # fmt: skip


def _same_address(first: str, second: str) -> bool:
    """Whether two spellings mean the same IP address."""
    try:
        return _plain_address(first) == _plain_address(second)
    except ValueError:
        return first == second


def _plain_address(text: str) -> str:
    address = ipaddress.ip_address(text.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)
