"""Warm agents: started ahead of the next command, inspected and ended by ``paceline warm``."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.launch.nodes import survey
from paceline.launch.nodes.connect import connect
from paceline.launch.nodes.fleet import Node
from paceline.launch.nodes.provisioner import fork_servers_up, start_fork_server
from paceline.launch.planning.request import Request
from paceline.remote import warm
from paceline.remote.fanout import gather_all, use_pidfd_watcher
from paceline.remote.login import connect_to_warm_agent
from paceline.spec.events import Event


async def make_ready(request: Request) -> list[str]:
    """Leaves a warm agent on every host, with a fork server that has imported the job's modules.

    Returns the hosts on which no agent could be left. Raises PacelineError if hosts cannot be
    reached, or cannot train together.
    """

    def on_event(node: Node, event: Event) -> None:
        if event.kind in ("imported", "import failed", "fork server died"):
            node.on_fork_server_event(event)

    fleet, _ = await connect(request)
    fleet.on_event = on_event
    nodes = fleet.everyone
    try:
        with survey.naming_lost_nodes(fleet):
            survey.approve(request, fleet, request.inspect)
            token = os.urandom(16).hex()
            package = await asyncio.to_thread(survey.package_of, request)
            await gather_all([start_fork_server(node, request, package, token) for node in nodes])
            await fork_servers_up(fleet, nodes, request.job)
    finally:
        await fleet.close(keep_warm_s=request.keep_warm_s)
        await request.transport.close(0)
    return [node.name for node in nodes if not node.channel.is_parked]


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """A warm agent.

    Attributes:
        state: ``waits`` for a command (or did until now), is ``in use`` by one, or ``gone``.
    """

    record: warm.WarmAgent
    state: Literal["waits", "in use", "gone"]

    @property
    def remaining_s(self) -> float:
        """Seconds until it ends by itself."""
        return max(0.0, self.record.until - time.time())


async def inspect_agents(names: frozenset[str], end: bool) -> list[AgentStatus]:
    """Returns the state of this user's warm agents on hosts (empty: all); may end them."""
    use_pidfd_watcher()
    slots = [slot for slot in warm.warm_slots() if not names or slot[1].host in names]
    statuses = await asyncio.gather(*(_inspect_agent(*slot, end) for slot in slots))
    return sorted(statuses, key=lambda status: (status.record.host, status.record.python))


async def _inspect_agent(path: Path, record: warm.WarmAgent, used: bool, end: bool) -> AgentStatus:
    if used:
        return AgentStatus(record, "in use")
    host, options = record.as_host(), record.options()
    slot = warm.WarmSlot.from_file(path, record)
    channel = await connect_to_warm_agent(host, record.python, options, slot)
    if end:
        await warm.end_login(host, options)
    if channel is None:
        return AgentStatus(record, "gone")
    if end:
        await channel.close(1.0)
    elif not await channel.park(0.0, restart_timer=False):
        await channel.close(1.0)
        return AgentStatus(record, "gone")
    return AgentStatus(record, "waits")
