"""The connected nodes of a run: what is known of each, leases, losses, requests to all of them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from paceline.launch import failure_analysis
from paceline.launch.planning.planner import HostSurvey
from paceline.remote import network
from paceline.remote.channel import Channel
from paceline.remote.fanout import join_tasks
from paceline.spec.errors import PacelineError
from paceline.spec.events import Event
from paceline.spec.hosts import Host
from paceline.transfer.data import DataPlace

REQUEST_PATIENCE_S = 3.0
GOODBYE_S = 5.0
HURRY_S = 0.4
RECONNECT_SHARE = 0.2  # of the lease: after such a silence another way to the node is looked for
LOSS_SHARE = 0.65  # the same: it is given up, just before it begins to end its ranks by itself
MAX_BEAT_S = 1.0  # between two renewals, whose answers also tell of the ranks
MIN_BEAT_S = 0.25  # the same while ranks can go on without a node
SILENCE_TIMEOUT_S = 2.5  # after which such a node is left out
PEER_RECENCY_S = 1.25  # another node that was heard so lately shows that our own line is sound
BEATS_A_SECOND = 500  # of all nodes together, at most
CLOCK_TICK_S = 0.25  # how often we look whether we were away ourselves
MIN_PAUSE_S = 1.0  # a shorter one is a busy machine's

# What ends a connection says so itself: these lines count, whatever else stands beside them.
_AGENT_MESSAGE = re.compile(r"^paceline (?:agent|guard): (?:leaving: )?(?P<why>.+)$")
_SSH_MESSAGE = re.compile(
    r"^(?:ssh: .+|client_loop: .+|packet_write_\w+: .+|Timeout, server \S+ not responding\.?"
    r"|Connection (?:to|from) .+|Connection (?:closed|reset) by .+|Received disconnect .+"
    r"|Disconnected from .+|Read from remote host .+|Write failed: .+)$"
)
_MAX_STDERR_CHARS = 160  # characters


@dataclass(frozen=True, slots=True)
class ForkServerError:
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
        min_rtt_s: Round trip by which the offset was measured, in seconds.
        loaded: What the fork server really loaded; empty until it is up.
        preparation: What the fork server was started with.
        ready: Result of the fork server's imports; ``None`` in it when all went well.
        shared_run_dir: True when the node sees the launcher's run directory.
        run_folder: Where the run's files go on this node.
        running: True between the start of its ranks and the end of the last.
        lost: True after the connection has ended or fallen silent.
        why: Why it is lost; empty while it is not.
        lost_at: When that became known, on the monotonic clock.
        outlived: Its loss is over: the other ranks have trained on without it.
        common_silence_s: How long it had been silent then together with all others, which tells of our own
            line more than of it, in seconds; 0 where it was alone.
        active_at: When one of its ranks worked or said a word last, as far as it was asked, on our
            monotonic clock; ``None`` while none runs.
        copies: Trees that were built there for this job: name → (folder there, manifest).
        data: Where it has the data, and what it lacks; ``None`` without data, or here.
        found: What a plan needs to know of it, once that was found out.
    """

    host: Host
    channel: Channel
    offset: float = 0.0
    min_rtt_s: float = float("inf")
    loaded: dict[str, Any] = field(default_factory=dict)
    preparation: dict[str, Any] = field(default_factory=dict)
    ready: asyncio.Future[ForkServerError | None] | None = None
    shared_run_dir: bool = True
    run_folder: str = ""
    running: bool = False
    lost: bool = False
    why: str = ""
    lost_at: float = 0.0
    outlived: bool = False
    common_silence_s: float = 0.0
    active_at: float | None = None
    copies: dict[str, tuple[str, list[list[object]]]] = field(default_factory=dict)
    data: DataPlace | None = None
    found: HostSurvey | None = None

    @property
    def could_start(self) -> bool:
        """Whether it could start ranks now."""
        ready = self.ready
        return not self.lost and ready is not None and ready.done() and ready.result() is None

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
        timestamp = time.monotonic()
        if timestamp - sent < self.min_rtt_s:
            self.min_rtt_s = timestamp - sent
            self.offset = (sent + timestamp) / 2 - float(answer["monotonic"])
        quiet_s = answer.get("quiet_s")
        reported_at = float(answer["monotonic"]) + self.offset
        self.active_at = None if quiet_s is None else reported_at - quiet_s

    def to_launcher_time(self, node_monotonic: float) -> float:
        """A moment of the node's monotonic clock on the launcher's; now, when none was told."""
        return node_monotonic + self.offset if node_monotonic else time.monotonic()

    async def prepare(self) -> None:
        """Starts the fork server, or a new one after the first has died."""
        self.ready = asyncio.get_running_loop().create_future()
        await self.channel.request("prepare", **self.preparation)

    @property
    def fork_server_error(self) -> ForkServerError | None:
        """Why its fork server is not there, as far as that is known."""
        ready = self.ready
        return ready.result() if ready is not None and ready.done() else None

    @property
    def fork_server_died(self) -> bool:
        return self.fork_server_error is not None and self.fork_server_error.kind == "died"

    def on_fork_server_event(self, event: Event) -> None:
        """The fork server is up, or could not import, or died."""
        error: ForkServerError | None = None
        if event.kind == "import failed":
            error = ForkServerError("import", event["traceback"])
        elif event.kind == "fork server died":
            error = ForkServerError("died", failure_analysis.how_it_died(event))
        else:
            self.loaded = dict(event.fields)
        self.resolve_ready(error)

    def resolve_ready(self, error: ForkServerError | None) -> None:
        """Tells whoever waits for the fork server, now or later."""
        if self.ready is not None and not self.ready.done():
            self.ready.set_result(error)
        elif error is not None:
            self.ready = asyncio.get_running_loop().create_future()
            self.ready.set_result(error)


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

    Attributes:
        seconds: Of silence, until the last look.
        shared_s: Those of them in which nobody else was heard either.
    """

    def __init__(self, beat_s: float, timestamp: float) -> None:
        self.beat_s = beat_s
        self.seconds = 0.0
        self.shared_s = 0.0
        self._updated_at = timestamp
        self._received_at = timestamp

    def update(self, timestamp: float, received_at: float, *, hears_peers: bool = True) -> None:
        """Counts until now.

        Args:
            timestamp: A look that comes late shows that nobody listened: it counts as two beats at most.
            received_at: When something came last.
            others: Whether others are heard now.
        """
        is_new = received_at > self._received_at
        elapsed_s = min(timestamp - (received_at if is_new else self._updated_at), 2 * self.beat_s)
        if is_new:
            self._received_at, self.seconds, self.shared_s = received_at, 0.0, 0.0
        self.seconds += elapsed_s
        self.shared_s += 0.0 if hears_peers else elapsed_s
        self._updated_at = timestamp

    @property
    def is_exclusive(self) -> bool:
        """Whether it is this one's, and not of the line that leads to all.

        After a silence of all, each may need as long again to be heard: what was sent in vain is
        sent again after twice the time (RFC 6298, section 5.5).
        """
        return self.seconds - self.shared_s > max(SILENCE_TIMEOUT_S, self.shared_s)


class Fleet:
    """All nodes of one run.

    Attributes:
        nodes: Those with ranks, in rank order.
        spares: Those without: beyond the most that were asked for, or come while ranks run.
        former: Those that were lost before the last start.

    Args:
        channels: One a host, in rank order.
        lease_s: Heartbeat timeout: how long a node runs on without hearing of us, in seconds. After
            most of it without hearing of a node, we take that for lost.
        on_event: Told everything that agents say.
        on_lost: Told once when a node is lost, and why.
    """

    def __init__(self, channels: Sequence[Channel], lease_s: float,
                 on_event: Callable[[Node, Event], None],
                 on_lost: Callable[[Node, str], None]) -> None:  # fmt: skip
        self.nodes = [Node(channel.host, channel) for channel in channels]
        self.spares: list[Node] = []
        self.former: list[Node] = []
        self.lease_s = lease_s
        self.probe_lock = asyncio.Lock()  # held while nodes try each other's addresses
        self.watchful = False  # the ranks can go on without a node: its silence counts sooner
        self.awaits_loss = False  # ranks wait to hear who is lost
        self._absence: Absence | None = None  # the longest of our own
        self._ticked = (time.monotonic(), _awake_or_not())
        self._on_event, self._on_lost = on_event, on_lost
        for node in self.nodes:
            node.channel.stop_watching()
            node.channel.on_event = self._router(node, on_event)
        self._beats = [asyncio.create_task(self._beat(node)) for node in self.nodes]
        self._beats.append(asyncio.create_task(self._watch_ourselves()))

    def get(self, name: str) -> Node:
        """The node of a host, as it is connected now; ConnectionError when it has no part."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise ConnectionError(f"{name} has no part in the job any more")

    def has(self, node: Node) -> bool:
        """Whether this is one of the nodes, and not one that another has taken the place of."""
        return any(member is node for member in self.nodes)

    @property
    def everyone(self) -> list[Node]:
        """The nodes with ranks, then the spares."""
        return [*self.nodes, *self.spares]

    @property
    def channels(self) -> list[Channel]:
        return [node.channel for node in self.everyone]

    @property
    def hosts(self) -> list[Host]:
        return [node.host for node in self.everyone]

    @property
    def first(self) -> Node:
        """The node with rank 0."""
        return self.nodes[0]

    @property
    def running(self) -> bool:
        """True while a rank may be alive on some node that we can reach."""
        return any(node.running for node in self.nodes)

    @property
    def is_complete(self) -> bool:
        return not any(node.lost for node in self.nodes)

    @property
    def absence(self) -> Absence | None:
        """The longest time in which this process did not run, one that has just ended included."""
        ticked_at, awake_s = self._ticked
        gap = _awake_or_not() - awake_s - CLOCK_TICK_S
        if gap > MIN_PAUSE_S and (self._absence is None or gap > self._absence.seconds):
            self._absence = Absence(ticked_at, gap)
        return self._absence

    def facts(self) -> dict[str, Any]:
        """By host name, what the agents told of their machines."""
        return {node.name: node.facts for node in self.everyone}

    def addresses(self, extra: str = "") -> str:
        """From which the job's hosts connect, as ``PACELINE_ADDRESSES`` has them.

        Empty where a host has told none: nobody can be kept away then.

        Args:
            extra: The user's, which go before them.
        """
        sources = [network.sources(facts) for facts in self.facts().values()]
        addresses = dict.fromkeys(
            address for host_sources in sources for address in host_sources or ()
        )
        return ",".join([*filter(None, [extra]), *addresses]) if all(sources) else ""

    def _router(
        self, node: Node, on_event: Callable[[Node, Event], None]
    ) -> Callable[[Event], None]:
        def route(event: Event) -> None:
            if event.kind != "connection ended":
                on_event(node, replace(event, time=node.to_launcher_time(event.time)))
            elif violation := event["trouble"]:
                self.lose(node, f"{node.name} sent what no agent sends: {violation}")
            else:
                self.lose(node, describe_end(node.name, event["stderr"]))

        return route

    async def _beat(self, node: Node) -> None:
        """Renews the node's lease at least ten times as often as needed; notices its silence."""
        loop = asyncio.get_running_loop()
        silence = Silence(self._beat_s, loop.time())
        renewals: set[asyncio.Task[None]] = set()
        while not node.lost:
            renewal = asyncio.create_task(node.renew_lease(self.lease_s))
            renewals.add(renewal)
            renewal.add_done_callback(renewals.discard)
            # an answer that never comes is no error of ours: the silence is what counts
            renewal.add_done_callback(lambda task: task.cancelled() or task.exception())
            silence.beat_s = self._beat_s
            await asyncio.sleep(silence.beat_s)
            silence.update(
                loop.time(), node.channel.received_at, hears_peers=self._hears_peers(node)
            )
            # a way that broke says that somebody was there to break it: that is no silence, unless
            # the ranks have lost connections, too
            is_urgent = self.watchful and (not node.channel.is_broken or self.awaits_loss)
            if silence.seconds > min(
                self.lease_s * RECONNECT_SHARE, SILENCE_TIMEOUT_S / 2 if is_urgent else math.inf
            ):
                node.channel.reconnect()
            if silence.seconds > self.lease_s * LOSS_SHARE or (is_urgent and silence.is_exclusive):
                if self._is_common_silence(node):
                    node.common_silence_s = silence.seconds
                broken = node.channel.is_broken
                self.lose(node, describe_silence(node.name, silence.seconds, broken=broken))

    def _hears_peers(self, node: Node) -> bool:
        recent = asyncio.get_running_loop().time() - PEER_RECENCY_S
        peers = (peer for peer in self.everyone if peer is not node and not peer.lost)
        return any(peer.channel.received_at > recent for peer in peers)

    def _is_common_silence(self, node: Node) -> bool:
        """Whether all others that were left were heard last when it was: nothing tells it apart."""
        received_at = node.channel.received_at
        peers = [peer for peer in self.everyone if peer is not node]
        simultaneous = [
            peer for peer in peers if abs(peer.channel.received_at - received_at) < PEER_RECENCY_S
        ]
        return bool(simultaneous) and all(peer.lost or peer in simultaneous for peer in peers)

    def launcher_fault(self, node: Node) -> str:
        """What of this launcher itself, not of the node, explains its loss; empty where nothing."""
        absence = self.absence
        if absence is not None and absence.seconds > self.lease_s / 2:
            return failure_analysis.own_pause(absence.seconds, self.lease_s)
        return (
            failure_analysis.own_silence(node.common_silence_s, self.lease_s)
            if node.common_silence_s
            else ""
        )

    @property
    def common_silences(self) -> dict[str, float]:
        """Seconds of silence by host, of those that were given up while nobody was heard."""
        return {node.name: node.common_silence_s for node in self.everyone if node.common_silence_s}

    @property
    def _beat_s(self) -> float:
        """Seconds between two renewals of a node."""
        relaxed_s = min(self.lease_s / 10, MAX_BEAT_S)
        urgent_s = max(MIN_BEAT_S, len(self.nodes) / BEATS_A_SECOND)
        return min(relaxed_s, urgent_s) if self.watchful else relaxed_s

    async def _watch_ourselves(self) -> None:
        """Notes when this process did not run: what others did meanwhile is not their fault."""
        while True:
            self._ticked = (time.monotonic(), _awake_or_not())
            await asyncio.sleep(CLOCK_TICK_S)
            _ = self.absence

    async def silences_resolved(self) -> None:
        """Waits until every node that is silent now has spoken again or is lost."""
        while any(self._in_doubt(node) for node in self.everyone):
            await asyncio.sleep(CLOCK_TICK_S)

    def _in_doubt(self, node: Node) -> bool:
        silence_s = asyncio.get_running_loop().time() - node.channel.received_at
        return not node.lost and silence_s > 2 * MAX_BEAT_S

    def lose(self, node: Node, reason: str) -> None:
        """Marks a node as lost, once."""
        if not node.lost:
            node.lost, node.why, node.lost_at = True, reason, time.monotonic()
            node.resolve_ready(ForkServerError("lost", reason))
            self._on_lost(node, reason)
            node.running = False
            node.channel.abandon()

    def seat(self, nodes: Sequence[Node]) -> None:
        """These get the ranks from now on, in this order; who else is left is a spare."""
        remaining = [node for node in self.everyone if not any(node is seated for seated in nodes)]
        self.former += [node for node in remaining if node.lost]
        self.nodes, self.spares = list(nodes), [node for node in remaining if not node.lost]

    def add(self, channel: Channel) -> Node:
        """A further node, as a spare; it takes the place of one that was lost."""
        self.former += [spare for spare in self.spares if spare.lost]
        self.spares = [spare for spare in self.spares if not spare.lost]
        node = Node(channel.host, channel)
        channel.stop_watching()
        channel.on_event = self._router(node, self._on_event)
        self.spares.append(node)
        self._beats.append(asyncio.create_task(self._beat(node)))
        return node

    def replace_node(self, node: Node, name: str) -> None:
        """A spare gets the place of the lost node of that name, whose ranks it will have."""
        place = next(at for at, node_there in enumerate(self.nodes) if node_there.name == name)
        self.former.append(self.nodes[place])
        self.nodes[place] = node
        self.spares = [spare for spare in self.spares if spare is not node]

    async def dismiss(self, node: Node) -> None:
        """Sends a node home; it counts as lost, and nobody is told."""
        self.spares = [spare for spare in self.spares if spare is not node]
        node.channel.on_event = _ignore
        if not node.lost:
            node.lost = True
            with contextlib.suppress(PacelineError, ConnectionError, asyncio.TimeoutError):
                await asyncio.wait_for(node.channel.request("bye"), REQUEST_PATIENCE_S)
        await node.channel.close(GOODBYE_S)

    async def each(self, work: Callable[[Node], Awaitable[Any]]) -> list[Any]:
        """Does something on every node at once; the first failure ends it all."""
        return await together([work(node) for node in self.everyone])

    async def tell(self, op: str, *, patience_s: float = REQUEST_PATIENCE_S, **fields: Any) -> None:
        """Asks every node that is left, and does not mind who fails."""

        async def request(node: Node) -> None:
            with contextlib.suppress(PacelineError, ConnectionError, asyncio.TimeoutError):
                await asyncio.wait_for(node.channel.request(op, **fields), patience_s)

        await asyncio.gather(*(request(node) for node in self.everyone if not node.lost))

    async def close(self, hurry: bool = False, keep_warm_s: float | None = 0.0) -> None:
        """Sends every agent home and closes the connections.

        Args:
            hurry: Somebody waits: agents that take their time end by themselves.
            keep_warm_s: For how long agents are to wait for the next command, at least; those that
                waited for this one wait again. ``None`` for none of them.
        """
        for beat in self._beats:
            beat.cancel()
        await asyncio.gather(*self._beats, return_exceptions=True)
        for node in self.everyone:
            node.channel.on_event = _ignore
        if keep_warm_s is not None:
            reusable = [
                node
                for node in self.everyone
                if node.channel.warm_slot is not None and not node.lost and not node.running
            ]
            await asyncio.gather(*(node.channel.park(keep_warm_s, _imported(node))
                                   for node in reusable))  # fmt: skip
        goodbye_s = HURRY_S if hurry else GOODBYE_S
        await self.tell("bye", patience_s=HURRY_S if hurry else REQUEST_PATIENCE_S)
        await asyncio.gather(
            *(
                node.channel.close(0.0 if node.lost else goodbye_s)
                for node in [*self.everyone, *self.former]
            )
        )


def _imported(node: Node) -> str:
    """What a node's fork server has, in a few words."""
    torch = node.loaded.get("torch")
    return f"torch {torch}" if torch else "Python alone" if node.loaded else ""


def describe_silence(name: str, seconds: float, *, broken: bool) -> str:
    """Why a node is given up of which nothing was heard for so long, as far as we can see it.

    Args:
        name: Of the node.
        seconds: Since it was heard last.
        broken: Its connection has ended, and no other could be made.
    """
    if broken:
        return (f"the connection to {name} ended, and no other could be made for {seconds:.1f} s "
                "(its agent was ended, or the host is cut off)")  # fmt: skip
    return f"silent for {seconds:.1f} s (switched off, unplugged or frozen)"


def describe_end(name: str, stderr: str) -> str:
    """Why a connection ended, from what was written on standard error. Pure.

    Only lines that we or ssh write are a reason. Whatever else stands last there, a warning of a
    start-up file or of a library, is shown for what it is.
    """
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    reasons = [match["why"] for line in lines if (match := _AGENT_MESSAGE.match(line))]
    if reasons:
        return f"the connection to {name} ended: {reasons[-1]}"
    ssh = [line for line in lines if _SSH_MESSAGE.match(line)]
    if ssh:
        return f"the SSH connection to {name} ended: {ssh[-1]}"
    excerpt = f" (last on its standard error: {lines[-1][:_MAX_STDERR_CHARS]})" if lines else ""
    return f"the connection to {name} ended{excerpt}"


def _awake_or_not() -> float:
    """Seconds of a clock that goes on while the machine sleeps."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


def _ignore(event: Event) -> None:
    """What agents say while they leave does not matter any more."""


async def together(work: Sequence[Awaitable[Any]]) -> list[Any]:
    """All results; after the first failure the rest is cancelled and awaited."""
    tasks = [asyncio.ensure_future(task_work) for task_work in work]
    try:
        return await join_tasks(tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def first_of(*work: Awaitable[Any]) -> None:
    """Returns when the first is done; the others are cancelled."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def finishes_in(work: Awaitable[Any], seconds: float) -> bool:
    """True when it was done in time."""
    try:
        await asyncio.wait_for(asyncio.ensure_future(work), seconds)
    except asyncio.TimeoutError:
        return False
    return True
