"""One node as the launcher sees it while a job runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.cluster.channel import Channel
from paceline.spec.hosts import Host


@dataclass(slots=True)
class Node:
    """A connected host, and what became of it.

    Attributes:
        host: Its description.
        channel: The connection to its agent.
        offset: Launcher's monotonic clock minus the node's, in seconds.
        best_rtt: Round trip by which the offset was measured, in seconds.
        loaded: What the fork server really loaded; empty until it is up.
        ready: Result of the fork server's imports; an exception text when they failed.
        shared_run_dir: True when the node sees the launcher's run directory.
        run_folder: Where the run's files go on this node.
        running: True between the start of its ranks and the end of the last.
        lost: True after the connection has ended or fallen silent.
        copies: Trees that were built there for this job: name → (folder there, manifest).
    """

    host: Host
    channel: Channel
    offset: float = 0.0
    best_rtt: float = float("inf")
    loaded: dict[str, Any] = field(default_factory=dict)
    ready: asyncio.Future[str] | None = None
    shared_run_dir: bool = True
    run_folder: str = ""
    running: bool = False
    lost: bool = False
    copies: dict[str, tuple[str, list[list[object]]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def facts(self) -> Mapping[str, Any]:
        return self.channel.facts

    async def renew_lease(self, seconds: float) -> None:
        """Asks the node to go on for ``seconds``, and measures its clock."""
        sent = time.monotonic()
        answer = await self.channel.request("lease", seconds=seconds)
        now = time.monotonic()
        if now - sent < self.best_rtt:
            self.best_rtt = now - sent
            self.offset = (sent + now) / 2 - float(answer["monotonic"])

    def to_launcher_time(self, node_monotonic: float) -> float:
        """A moment of the node's monotonic clock on the launcher's."""
        return node_monotonic + self.offset

    def take_fork_server(self, said: Mapping[str, Any]) -> None:
        """The fork server is up, or could not import, or died."""
        problem = ""
        if "failed" in said:
            problem = str(said["traceback"])
        elif "died" in said:
            problem = f"the fork server died (status {said['died']})"
        else:
            self.loaded = dict(said["loaded"])
        if self.ready is not None and not self.ready.done():
            self.ready.set_result(problem)
