"""Hosts that are made ready for the next command, looked at, and let go: ``paceline warm``."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.launch.nodes import survey
from paceline.launch.nodes.connect import connect
from paceline.launch.nodes.fleet import Node, together
from paceline.launch.nodes.provisioner import fork_servers_up, start_fork_server
from paceline.launch.planning.request import Request
from paceline.remote import warm
from paceline.remote.fanout import use_pidfd_watcher
from paceline.remote.login import connect_to_warm_agent
from paceline.spec.events import Event


async def make_ready(request: Request) -> list[str]:
    """Has an agent wait on every host, with a fork server that has imported what the job needs.

    Args:
        request: The job, of which only that matters, its hosts, and for how long.

    Returns:
        Hosts on which an agent cannot be left to wait.

    Raises:
        PacelineError: The hosts cannot be reached, or cannot train together.
    """

    def heard(node: Node, event: Event) -> None:
        if event.kind in ("imported", "import failed", "fork server died"):
            node.on_fork_server_event(event)

    fleet, _ = await connect(request, heard, lambda node, why: None)
    nodes = fleet.everyone
    try:
        with survey.naming_lost_nodes(fleet):
            survey.approve(request, fleet, request.inspect)
            token = os.urandom(16).hex()
            await together([start_fork_server(node, request.job, token) for node in nodes])
            await fork_servers_up(fleet, nodes, request.job)
    finally:
        await fleet.close(keep_warm_s=request.keep_warm_s)
        await request.transport.close(0)
    return [node.name for node in nodes if not node.channel.is_parked]


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of an agent that waits.

    Attributes:
        waiting: As its file told.
        state: It ``waits``, or did until now; a command that runs has it ``in use``; or it was
            not found any more (``gone``).
    """

    waiting: warm.WarmAgent
    state: Literal["waits", "in use", "gone"]

    @property
    def left_s(self) -> float:
        """For how long it still waits."""
        return max(0.0, self.waiting.until - time.time())


async def look(names: frozenset[str], end: bool = False) -> list[Seen]:
    """Meets the agents that wait for this user's commands.

    Args:
        names: Hosts; empty for all.
        end: They are not to wait any longer.
    """
    use_pidfd_watcher()
    nests = [one for one in warm.warm_slots() if not names or one[1].host in names]
    seen = await asyncio.gather(*(_look(*nest, end) for nest in nests))
    return sorted(seen, key=lambda one: (one.waiting.host, one.waiting.python))


async def _look(path: Path, waiting: warm.WarmAgent, used: bool, end: bool) -> Seen:
    if used:
        return Seen(waiting, "in use")
    host, options = waiting.as_host(), waiting.options()
    nest = warm.WarmSlot.from_file(path, waiting)
    channel = await connect_to_warm_agent(host, waiting.python, options, nest)
    if end:
        await warm.end_login(host, options)
    if channel is None:
        return Seen(waiting, "gone")
    if end:
        await channel.close(1.0)
    elif not await channel.park(0.0, restart_timer=False):
        await channel.close(1.0)
        return Seen(waiting, "gone")
    return Seen(waiting, "waits")
