"""One node as the launcher sees it while a job runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.launch.outcome import how_it_died
from paceline.remote.channel import Channel
from paceline.spec.events import Event
from paceline.spec.hosts import Host


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a fork server is not there.

    Attributes:
        kind: Its imports failed, it died, or the whole node went away.
        text: A traceback, or one line.
    """

    kind: Literal["import", "died", "lost"]
    text: str


@dataclass(slots=True)
class Node:
    """A connected host, and what became of it.

    Attributes:
        host: Its description.
        channel: The connection to its agent.
        offset: Launcher's monotonic clock minus the node's, in seconds.
        best_rtt: Round trip by which the offset was measured, in seconds.
        loaded: What the fork server really loaded; empty until it is up.
        preparation: What the fork server was started with.
        ready: Result of the fork server's imports; ``None`` in it when all went well.
        shared_run_dir: True when the node sees the launcher's run directory.
        run_folder: Where the run's files go on this node.
        running: True between the start of its ranks and the end of the last.
        lost: True after the connection has ended or fallen silent.
        why: Why it is lost; empty while it is not.
        frozen: Ranks that a signal has stopped there, and for how many seconds.
        quiet_s: For how many seconds none of its ranks worked or said a word, when it was asked
            last; ``None`` while none runs.
        copies: Trees that were built there for this job: name → (folder there, manifest).
    """

    host: Host
    channel: Channel
    offset: float = 0.0
    best_rtt: float = float("inf")
    loaded: dict[str, Any] = field(default_factory=dict)
    preparation: dict[str, Any] = field(default_factory=dict)
    ready: asyncio.Future[Trouble | None] | None = None
    shared_run_dir: bool = True
    run_folder: str = ""
    running: bool = False
    lost: bool = False
    why: str = ""
    frozen: dict[int, float] = field(default_factory=dict)
    quiet_s: float | None = None
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
        self.quiet_s = answer.get("quiet_s")
        self.frozen = {int(rank): seconds for rank, seconds in answer.get("frozen", {}).items()}

    def to_launcher_time(self, node_monotonic: float) -> float:
        """A moment of the node's monotonic clock on the launcher's; now, when none was told."""
        return node_monotonic + self.offset if node_monotonic else time.monotonic()

    async def prepare(self) -> None:
        """Starts the fork server, or a new one after the first has died."""
        self.ready = asyncio.get_running_loop().create_future()
        await self.channel.request("prepare", **self.preparation)

    @property
    def fork_server_died(self) -> bool:
        ready = self.ready
        return ready is not None and ready.done() and getattr(ready.result(), "kind", "") == "died"

    def take_fork_server(self, event: Event) -> None:
        """The fork server is up, or could not import, or died."""
        trouble: Trouble | None = None
        if event.kind == "import failed":
            trouble = Trouble("import", event["traceback"])
        elif event.kind == "fork server died":
            trouble = Trouble("died", how_it_died(event))
        else:
            self.loaded = dict(event.fields)
        self.settle(trouble)

    def settle(self, trouble: Trouble | None) -> None:
        """Tells whoever waits for the fork server, now or later."""
        if self.ready is not None and not self.ready.done():
            self.ready.set_result(trouble)
        elif trouble is not None:
            self.ready = asyncio.get_running_loop().create_future()
            self.ready.set_result(trouble)
