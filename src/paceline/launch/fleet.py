"""The connected nodes of a run: what is known of each, leases, losses, requests to all of them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from paceline.launch.outcome import how_it_died
from paceline.remote.channel import Channel
from paceline.remote.fanout import all_of
from paceline.spec.errors import PacelineError
from paceline.spec.events import Event
from paceline.spec.hosts import Host
from paceline.transfer.data import DataPlace

REQUEST_PATIENCE_S = 3.0
GOODBYE_S = 5.0
HURRY_S = 0.4
MOST_BEAT_S = 1.0  # between two renewals, whose answers also tell of the ranks
OWN_TICK_S = 0.25  # how often we look whether we were away ourselves
OWN_GAP_S = 1.0  # a shorter one is a busy machine's

# What ends a connection says so itself: these lines count, whatever else stands beside them.
_OWN_WORDS = re.compile(r"^paceline (?:agent|guard): (?:leaving: )?(?P<why>.+)$")
_SSH_WORDS = re.compile(
    r"^(?:ssh: .+|client_loop: .+|packet_write_\w+: .+|Timeout, server \S+ not responding\.?"
    r"|Connection (?:to|from) .+|Connection (?:closed|reset) by .+|Received disconnect .+"
    r"|Disconnected from .+|Read from remote host .+|Write failed: .+)$"
)
_LAST_WORD = 160  # characters


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
        data: Where it has the data, and what it lacks; ``None`` without data, or here.
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
    data: DataPlace | None = None

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


@dataclass(frozen=True, slots=True)
class Absence:
    """A time in which this very process did not run: stopped, or its machine asleep.

    Attributes:
        since: Seconds of the monotonic clock.
        seconds: How long, sleep of the machine included.
    """

    since: float
    seconds: float


class Silence:
    """How long somebody was silent while we listened: our own absence is not theirs. Pure.

    Args:
        beat_s: Seconds between two looks, as far as they are on time.
        now: The beginning, in seconds of any clock.
    """

    def __init__(self, beat_s: float, now: float) -> None:
        self._beat_s = beat_s
        self._looked = now
        self._heard = now
        self._silent = 0.0

    def look(self, now: float, last_heard: float) -> float:
        """Seconds of silence until now.

        Args:
            now: A look that comes late shows that nobody listened: it counts as two beats at most.
            last_heard: When something came last.
        """
        if last_heard > self._heard:
            self._heard = last_heard
            self._silent = min(now - last_heard, 2 * self._beat_s)
        else:
            self._silent += min(now - self._looked, 2 * self._beat_s)
        self._looked = now
        return self._silent


class Fleet:
    """All nodes of one run.

    Args:
        channels: One a host, in rank order.
        lease_s: Heartbeat timeout: how long a node runs on without hearing of us, in seconds. After
            half of it without hearing of a node, we take that for lost.
        on_event: Told everything that agents say.
        on_lost: Told once when a node is lost, and why.
    """

    def __init__(self, channels: Sequence[Channel], lease_s: float,
                 on_event: Callable[[Node, Event], None],
                 on_lost: Callable[[Node, str], None]) -> None:  # fmt: skip
        self.nodes = [Node(channel.host, channel) for channel in channels]
        self.lease_s = lease_s
        self._absence: Absence | None = None  # the longest of our own
        self._ticked = (time.monotonic(), _awake_or_not())
        self._on_event, self._on_lost = on_event, on_lost
        for node in self.nodes:
            node.channel.leased()
            node.channel.on_event = self._router(node, on_event)
        self._beats = [asyncio.create_task(self._beat(node)) for node in self.nodes]
        self._beats.append(asyncio.create_task(self._watch_ourselves()))

    @property
    def hosts(self) -> list[Host]:
        return [node.host for node in self.nodes]

    @property
    def first(self) -> Node:
        """The node with rank 0."""
        return self.nodes[0]

    @property
    def running(self) -> bool:
        """True while a rank may be alive on some node that we can reach."""
        return any(node.running for node in self.nodes)

    @property
    def whole(self) -> bool:
        return not any(node.lost for node in self.nodes)

    @property
    def absence(self) -> Absence | None:
        """The longest time in which this process did not run, one that has just ended included."""
        since, before = self._ticked
        gap = _awake_or_not() - before - OWN_TICK_S
        if gap > OWN_GAP_S and (self._absence is None or gap > self._absence.seconds):
            self._absence = Absence(since, gap)
        return self._absence

    def facts(self) -> dict[str, Any]:
        """By host name, what the agents told of their machines."""
        return {node.name: node.facts for node in self.nodes}

    def _router(
        self, node: Node, on_event: Callable[[Node, Event], None]
    ) -> Callable[[Event], None]:
        def route(event: Event) -> None:
            if event.kind != "connection ended":
                on_event(node, replace(event, time=node.to_launcher_time(event.time)))
            elif trouble := event["trouble"]:
                self.lose(node, f"{node.name} sent what no agent sends: {trouble}")
            else:
                self.lose(node, why_ended(node.name, event["stderr"]))

        return route

    async def _beat(self, node: Node) -> None:
        """Renews the node's lease at least ten times as often as needed; notices its silence."""
        loop = asyncio.get_running_loop()
        beat_s = min(self.lease_s / 10, MOST_BEAT_S)
        silence = Silence(beat_s, loop.time())
        renewals: set[asyncio.Task[None]] = set()
        while not node.lost:
            renewal = asyncio.create_task(node.renew_lease(self.lease_s))
            renewals.add(renewal)
            renewal.add_done_callback(renewals.discard)
            # an answer that never comes is no error of ours: the silence is what counts
            renewal.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.sleep(beat_s)
            seconds = silence.look(loop.time(), node.channel.last_heard)
            if seconds > self.lease_s / 2:
                self.lose(node, f"no word from {node.name} for {seconds:.1f} s "
                                "(switched off, unplugged or frozen)")  # fmt: skip

    async def _watch_ourselves(self) -> None:
        """Notes when this process did not run: what others did meanwhile is not their fault."""
        while True:
            self._ticked = (time.monotonic(), _awake_or_not())
            await asyncio.sleep(OWN_TICK_S)
            _ = self.absence

    def lose(self, node: Node, why: str) -> None:
        """Marks a node as lost, once."""
        if not node.lost:
            node.lost, node.why = True, why
            node.settle(Trouble("lost", why))
            self._on_lost(node, why)
            node.running = False
            node.channel.abandon()

    def take_back(self, channels: Sequence[Channel]) -> None:
        """Puts freshly connected nodes into the places of lost ones of the same name."""
        for channel in channels:
            place = [node.name for node in self.nodes].index(channel.host.name)
            node = self.nodes[place] = Node(channel.host, channel)
            channel.leased()
            channel.on_event = self._router(node, self._on_event)
            self._beats.append(asyncio.create_task(self._beat(node)))

    async def each(self, work: Callable[[Node], Awaitable[Any]]) -> list[Any]:
        """Does something on every node at once; the first failure ends it all."""
        return await together([work(node) for node in self.nodes])

    async def tell(self, op: str, *, patience_s: float = REQUEST_PATIENCE_S, **fields: Any) -> None:
        """Asks every node that is left, and does not mind who fails."""

        async def ask(node: Node) -> None:
            with contextlib.suppress(PacelineError, ConnectionError, asyncio.TimeoutError):
                await asyncio.wait_for(node.channel.request(op, **fields), patience_s)

        await asyncio.gather(*(ask(node) for node in self.nodes if not node.lost))

    async def close(self, hurry: bool = False) -> None:
        """Sends every agent home and closes the connections.

        Args:
            hurry: Somebody waits: agents that take their time end by themselves.
        """
        for beat in self._beats:
            beat.cancel()
        await asyncio.gather(*self._beats, return_exceptions=True)
        for node in self.nodes:
            node.channel.on_event = _ignore
        goodbye_s = HURRY_S if hurry else GOODBYE_S
        await self.tell("bye", patience_s=HURRY_S if hurry else REQUEST_PATIENCE_S)
        await asyncio.gather(
            *(node.channel.close(0.0 if node.lost else goodbye_s) for node in self.nodes)
        )


def why_ended(name: str, stderr: str) -> str:
    """Why a connection ended, from what was written on standard error. Pure.

    Only lines that we or ssh write are a reason. Whatever else stands last there, a warning of a
    start-up file or of a library, is shown for what it is.
    """
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    own = [found["why"] for line in lines if (found := _OWN_WORDS.match(line))]
    if own:
        return f"the connection to {name} ended: {own[-1]}"
    ssh = [line for line in lines if _SSH_WORDS.match(line)]
    if ssh:
        return f"the SSH connection to {name} ended: {ssh[-1]}"
    last = f" (last on its standard error: {lines[-1][:_LAST_WORD]})" if lines else ""
    return f"the connection to {name} ended{last}"


def _awake_or_not() -> float:
    """Seconds of a clock that goes on while the machine sleeps."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


def _ignore(event: Event) -> None:
    """What agents say while they leave does not matter any more."""


async def together(work: Sequence[Awaitable[Any]]) -> list[Any]:
    """All results; after the first failure the rest is cancelled and awaited."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await all_of(tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def first_of(*work: Awaitable[Any]) -> None:
    """Returns when the first is done; the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def within(work: Awaitable[Any], seconds: float) -> bool:
    """True when it was done in time."""
    try:
        await asyncio.wait_for(asyncio.ensure_future(work), seconds)
    except asyncio.TimeoutError:
        return False
    return True
