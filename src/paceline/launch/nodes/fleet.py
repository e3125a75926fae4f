"""The connected nodes of a run: what is known of each, leases, losses, requests to all of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from paceline.launch import failure_analysis
from paceline.launch.planning.placement import HostSurvey
from paceline.remote import network
from paceline.remote.channel import Channel
from paceline.spec import jobenv
from paceline.spec.errors import PacelineError
from paceline.spec.events import Event
from paceline.spec.hosts import Host
from paceline.spec.libraries import classify_line

REQUEST_TIMEOUT_S = 3.0
GOODBYE_S = 5.0
HURRY_S = 0.4
RECONNECT_SHARE = 0.2  # of the lease: silence after which the connection is opened again
LOSS_SHARE = 0.65  # of the lease: silence after which a node is lost, before it ends its ranks
MAX_BEAT_S = 1.0  # between two renewals of a lease
MIN_BEAT_S = 0.25  # the same while ranks can go on without a node
SILENCE_TIMEOUT_S = 2.5  # after which a node is lost if ranks can go on without it
PEER_RECENCY_S = 1.25  # a node that was heard so recently shows that our own network is sound
BEATS_A_SECOND = 500  # of all nodes together, at most
CLOCK_TICK_S = 0.25  # between two checks whether this process was stopped
MIN_PAUSE_S = 1.0  # a shorter gap shows only a busy machine

# Lines on standard error that explain why a connection ended.
_AGENT_MESSAGE = re.compile(r"^paceline (?:agent|guard): (?:leaving: )?(?P<why>.+)$")
_SSH_MESSAGE = re.compile(
    r"^(?:ssh: .+|client_loop: .+|packet_write_\w+: .+|Timeout, server \S+ not responding\.?"
    r"|Connection (?:to|from) .+|Connection (?:closed|reset) by .+|Received disconnect .+"
    r"|Disconnected from .+|Read from remote host .+|Write failed: .+)$"
)
_MAX_STDERR_CHARS = 160  # characters


@dataclass(frozen=True, slots=True)
class ForkServerError:
    """Why a fork server is not available.

    Attributes:
        kind: Whether its imports failed, it died, or the node was lost.
        text: A traceback, or one line.
    """

    kind: Literal["import", "died", "lost"]
    text: str


@dataclass(slots=True, eq=False)
class Node:
    """A connected host and its state.

    Attributes:
        offset: Launcher's monotonic clock minus the node's, in seconds.
        min_rtt_s: Round trip by which the offset was measured, in seconds.
        loaded: Versions that the fork server has loaded; empty until it is up.
        preparation: The request with which the fork server was started.
        ready: Result of the fork server's imports; ``None`` if they succeeded.
        shared_run_dir: True when the node sees the launcher's run directory.
        run_folder: Where the run's files go on this node.
        running: True between the start of its ranks and the end of the last.
        lost: True after the connection has ended or fallen silent.
        loss_reason: Why it is lost; empty while it is not.
        was_dismissed: Whether it is lost because the launcher did without it.
        lost_at: When that became known, on the monotonic clock.
        is_loss_recovered: Whether the other ranks have recovered from its loss.
        common_silence_s: Seconds of silence if all others were silent, too, which points to the
            launcher's own network; 0 if only this node was silent.
        is_altered: Whether bytes of its broken connection were changed on the way.
        active_at: When one of its ranks last worked or wrote, on the launcher's monotonic clock;
            ``None`` while none runs.
        copies: Trees that were built there for this job: name → (folder there, manifest).
        survey: What a plan needs to know of it, once that is known.
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
    loss_reason: str = ""
    was_dismissed: bool = False
    lost_at: float = 0.0
    is_loss_recovered: bool = False
    common_silence_s: float = 0.0
    is_altered: bool = False
    active_at: float | None = None
    copies: dict[str, tuple[str, list[list[object]]]] = field(default_factory=dict)
    survey: HostSurvey | None = None

    @property
    def can_start_ranks(self) -> bool:
        """Whether it can start ranks now."""
        ready = self.ready
        return not self.lost and ready is not None and ready.done() and ready.result() is None

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def facts(self) -> Mapping[str, Any]:
        return self.channel.facts

    async def renew_lease(self, seconds: float) -> None:
        """Renews the node's lease for ``seconds`` and measures its clock."""
        sent = time.monotonic()
        answer = await self.channel.request("lease", seconds=seconds)
        timestamp = time.monotonic()
        if timestamp - sent < self.min_rtt_s:
            self.min_rtt_s = timestamp - sent
            self.offset = (sent + timestamp) / 2 - float(answer["monotonic"])
        quiet_s = answer.get("quiet_s")
        reported_at = float(answer["monotonic"]) + self.offset
        self.active_at = None if quiet_s is None else reported_at - quiet_s

    async def prepare(self) -> None:
        """Starts the fork server, or a new one after the first has died."""
        self.ready = asyncio.get_running_loop().create_future()
        await self.channel.request("prepare", **self.preparation)

    @property
    def fork_server_error(self) -> ForkServerError | None:
        """Why its fork server is not available, if that is known."""
        ready = self.ready
        return ready.result() if ready is not None and ready.done() else None

    @property
    def fork_server_died(self) -> bool:
        return self.fork_server_error is not None and self.fork_server_error.kind == "died"

    def on_fork_server_event(self, event: Event) -> None:
        """Handles an event of the fork server: it is up, could not import, or died."""
        error: ForkServerError | None = None
        if event.kind == "import failed":
            error = ForkServerError("import", event["traceback"])
        elif event.kind == "fork server died":
            error = ForkServerError("died", failure_analysis.describe_fork_server_end(event))
        else:
            self.loaded = dict(event.fields)
        self.resolve_ready(error)

    def resolve_ready(self, error: ForkServerError | None) -> None:
        """Sets the result of waiting for the fork server."""
        if self.ready is not None and not self.ready.done():
            self.ready.set_result(error)
        elif error is not None:
            self.ready = asyncio.get_running_loop().create_future()
            self.ready.set_result(error)


class Silence:
    """Measures how long a node is silent, without times in which this process did not run. Pure.

    Args:
        beat_s: Seconds between two updates if they are on time.
        timestamp: The beginning, in seconds of any clock.

    Attributes:
        seconds: Silence until the last update.
        shared_s: The part of it in which no other node was heard either.
    """

    def __init__(self, beat_s: float, timestamp: float) -> None:
        self.beat_s = beat_s
        self.seconds = 0.0
        self.shared_s = 0.0
        self._updated_at = timestamp
        self._received_at = timestamp

    def update(self, timestamp: float, received_at: float, *, hears_peers: bool = True) -> None:
        """Counts the silence until now.

        Args:
            timestamp: An update that is late shows that nobody listened: it counts as two beats.
            received_at: When the node was last heard.
            hears_peers: Whether other nodes are heard now.
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
        """Whether only this node is silent, so that the launcher's network is not the cause.

        After a common silence, each node may need as long again to be heard, because TCP doubles
        the time between retransmissions (RFC 6298, section 5.5).
        """
        return self.seconds - self.shared_s > max(SILENCE_TIMEOUT_S, self.shared_s)


class Fleet:
    """All nodes of one run.

    Args:
        channels: One per host, in rank order.
        lease_s: Seconds for which a node runs on without hearing of the launcher. A node that is
            silent for most of that time counts as lost.

    Attributes:
        nodes: Those with ranks, in rank order.
        spares: Those without: beyond the maximum, or connected while ranks run.
        former: Those that were lost before the last start.
        on_event: Called with every event of an agent.
        on_lost: Called once when a node is lost, with the reason.
        on_late: Called with the name of a request that a node has not answered for long.
    """

    def __init__(self, channels: Sequence[Channel], lease_s: float,
                 on_event: Callable[[Node, Event], None] = lambda node, event: None,
                 on_lost: Callable[[Node, str], None] = lambda node, why: None,
                 ) -> None:  # fmt: skip
        self.on_event, self.on_lost = on_event, on_lost
        self.on_late: Callable[[Node, str], None] = lambda node, op: None
        self.spares: list[Node] = []
        self.former: list[Node] = []
        self.lease_s = lease_s
        self.probe_lock = asyncio.Lock()  # held while nodes try each other's addresses
        self.watchful = False  # whether ranks can go on without a node: notice losses sooner
        self.awaits_loss = False  # whether ranks wait to hear which node is lost
        self._absence_s = 0.0  # the longest of this process
        self._ticked_at = _awake_or_not()
        self._beats = [asyncio.create_task(self._watch_ourselves())]
        self.nodes = [self._watch(channel) for channel in channels]

    def get(self, name: str) -> Node:
        """Returns the current node of a host; ConnectionError if it has no ranks."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise ConnectionError(f"{name} has no part in the job any more")

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
        """Whether a rank may be alive on a node that can be reached."""
        return any(node.running for node in self.nodes)

    @property
    def is_complete(self) -> bool:
        return not any(node.lost for node in self.nodes)

    @property
    def absence_s(self) -> float:
        """The longest time in which this process did not run: stopped, or its machine asleep."""
        gap = _awake_or_not() - self._ticked_at - CLOCK_TICK_S
        if gap > MIN_PAUSE_S:
            self._absence_s = max(gap, self._absence_s)
        return self._absence_s

    def facts(self) -> dict[str, Any]:
        """Returns the facts that agents reported, by host."""
        return {node.name: node.facts for node in self.everyone}

    def addresses(self, extra: str = "", chosen: Mapping[str, str] | None = None) -> str:
        """Returns the source addresses of the job's hosts, as ``PACELINE_ADDRESSES`` has them.

        Empty if a host has reported none: strangers cannot be refused then.

        Args:
            extra: The user's addresses, which come first and are marked.
            chosen: The address of each host in the plan, by host.
        """
        sources = [
            network.sources(facts, (chosen or {}).get(name, ""))
            for name, facts in self.facts().items()
        ]
        addresses = dict.fromkeys(itertools.chain.from_iterable(filter(None, sources)))
        added = [jobenv.ADDED_ADDRESS + item.strip() for item in extra.split(",") if item.strip()]
        return ",".join([*added, *addresses]) if all(sources) else ""

    def _watch(self, channel: Channel) -> Node:
        """Returns the node of a channel, and follows its events and silence from now on."""
        node = Node(channel.host, channel)

        def route(event: Event) -> None:
            if event.kind != "connection ended":
                launcher_time = event.time + node.offset if event.time else time.monotonic()
                self.on_event(node, replace(event, time=launcher_time))
            elif violation := event["trouble"]:
                self.lose(node, f"{node.name} sent what no agent sends: {violation}")
            else:
                self.lose(node, describe_end(node.name, event["stderr"]))

        channel.stop_watching()
        channel.on_event = route
        channel.on_late = lambda op: self.on_late(node, op)
        self._beats.append(asyncio.create_task(self._beat(node)))
        return node

    async def _beat(self, node: Node) -> None:
        """Renews the node's lease at least ten times as often as needed; detects its silence."""
        loop = asyncio.get_running_loop()
        silence = Silence(self._beat_s, loop.time())
        renewals: set[asyncio.Task[None]] = set()
        while not node.lost:
            renewal = asyncio.create_task(node.renew_lease(self.lease_s))
            renewals.add(renewal)
            renewal.add_done_callback(renewals.discard)
            # A missing answer is no error: only the silence counts.
            renewal.add_done_callback(lambda task: task.cancelled() or task.exception())
            silence.beat_s = self._beat_s
            await asyncio.sleep(silence.beat_s)
            hears_peers = self._hears_peers(node)
            silence.update(loop.time(), node.channel.received_at, hears_peers=hears_peers)
            # A broken connection is no silence, unless the ranks have lost connections, too.
            is_urgent = self.watchful and (not node.channel.is_broken or self.awaits_loss)
            urgent_s = SILENCE_TIMEOUT_S / 2 if is_urgent else math.inf
            if silence.seconds > min(self.lease_s * RECONNECT_SHARE, urgent_s):
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
        """Returns whether all remaining nodes fell silent at the same time as this one."""
        received_at = node.channel.received_at
        peers = [peer for peer in self.everyone if peer is not node]
        simultaneous = [
            peer for peer in peers if abs(peer.channel.received_at - received_at) < PEER_RECENCY_S
        ]
        return bool(simultaneous) and all(peer.lost or peer in simultaneous for peer in peers)

    def launcher_fault(self, node: Node) -> str:
        """Returns how the launcher itself explains a node's loss; empty if it does not."""
        if self.absence_s > self.lease_s / 2:
            return failure_analysis.describe_launcher_pause(self.absence_s, self.lease_s)
        if not node.common_silence_s:
            return ""
        return failure_analysis.describe_network_loss(node.common_silence_s, self.lease_s)

    @property
    def common_silences(self) -> dict[str, float]:
        """Seconds of silence by host, for nodes that were lost while no node was heard."""
        return {node.name: node.common_silence_s for node in self.everyone if node.common_silence_s}

    @property
    def _beat_s(self) -> float:
        """Seconds between two renewals of a node."""
        relaxed_s = min(self.lease_s / 10, MAX_BEAT_S)
        urgent_s = max(MIN_BEAT_S, len(self.nodes) / BEATS_A_SECOND)
        return min(relaxed_s, urgent_s) if self.watchful else relaxed_s

    async def _watch_ourselves(self) -> None:
        """Notes when this process did not run."""
        while True:
            self._ticked_at = _awake_or_not()
            await asyncio.sleep(CLOCK_TICK_S)
            _ = self.absence_s

    async def silences_resolved(self) -> None:
        """Waits until every node that is silent now has spoken again or is lost."""
        loop = asyncio.get_running_loop()
        while any(loop.time() - node.channel.received_at > 2 * MAX_BEAT_S
                  for node in self.everyone if not node.lost):  # fmt: skip
            await asyncio.sleep(CLOCK_TICK_S)

    def lose(self, node: Node, reason: str) -> None:
        """Marks a node as lost, once."""
        if not node.lost:
            node.lost, node.loss_reason, node.lost_at = True, reason, time.monotonic()
            node.resolve_ready(ForkServerError("lost", reason))
            self.on_lost(node, reason)
            node.running = False
            node.channel.abandon()

    def seat(self, nodes: Sequence[Node]) -> None:
        """Gives the ranks to these nodes, in this order; other live nodes become spares."""
        remaining = [node for node in self.everyone if node not in nodes]
        self.former += [node for node in remaining if node.lost]
        self.nodes, self.spares = list(nodes), [node for node in remaining if not node.lost]

    def add(self, channel: Channel) -> Node:
        """Adds a node as a spare."""
        self.former += [spare for spare in self.spares if spare.lost]
        self.spares = [spare for spare in self.spares if not spare.lost]
        node = self._watch(channel)
        self.spares.append(node)
        return node

    def replace_node(self, node: Node, name: str) -> None:
        """Puts a spare in the place of a lost node, whose ranks it gets."""
        place = next(at for at, node_there in enumerate(self.nodes) if node_there.name == name)
        self.former.append(self.nodes[place])
        self.nodes[place] = node
        self.spares = [spare for spare in self.spares if spare is not node]

    async def dismiss(self, node: Node, reason: str) -> None:
        """Dismisses a node; it counts as lost, without a report."""
        self.spares = [spare for spare in self.spares if spare is not node]
        node.channel.on_event = lambda event: None
        if not node.lost:
            node.lost, node.loss_reason, node.was_dismissed = True, reason, True
            await try_request(node, "bye")
        await node.channel.close(GOODBYE_S)

    async def tell(self, op: str, *, wait_s: float = REQUEST_TIMEOUT_S, **fields: Any) -> None:
        """Sends a request to every live node and ignores failures."""
        await asyncio.gather(*(try_request(node, op, wait_s, **fields)
                               for node in self.everyone if not node.lost))  # fmt: skip

    async def close(self, hurry: bool = False, keep_warm_s: float | None = 0.0) -> None:
        """Dismisses every agent and closes the connections.

        Args:
            hurry: Whether not to wait for slow agents, which end by themselves.
            keep_warm_s: Seconds for which agents wait for the next command, at least; those that
                waited for this one wait again. ``None`` to keep none.
        """
        for beat in self._beats:
            beat.cancel()
        await asyncio.gather(*self._beats, return_exceptions=True)
        for node in self.everyone:
            node.channel.on_event = lambda event: None
        if keep_warm_s is not None:
            reusable = [node for node in self.everyone if node.channel.warm_slot is not None
                        and not node.lost and not node.running]  # fmt: skip
            await asyncio.gather(*(node.channel.park(keep_warm_s, _imported(node))
                                   for node in reusable))  # fmt: skip
        goodbye_s = HURRY_S if hurry else GOODBYE_S
        await self.tell("bye", wait_s=HURRY_S if hurry else REQUEST_TIMEOUT_S)
        nodes = [*self.everyone, *self.former]
        await asyncio.gather(*(node.channel.close(0.0 if node.lost else goodbye_s)
                               for node in nodes))  # fmt: skip


async def try_request(node: Node, op: str, wait_s: float = REQUEST_TIMEOUT_S,
                      **fields: Any) -> dict[str, Any] | None:  # fmt: skip
    """Sends a request; returns the answer, or ``None`` if none comes in time."""
    with contextlib.suppress(PacelineError, ConnectionError, asyncio.TimeoutError):
        return await asyncio.wait_for(node.channel.request(op, **fields), wait_s)
    return None


def _imported(node: Node) -> str:
    """Describes what a node's fork server has imported."""
    torch = node.loaded.get("torch")
    return f"torch {torch}" if torch else "Python alone" if node.loaded else ""


def describe_silence(name: str, seconds: float, *, broken: bool) -> str:
    """Describes why a silent node counts as lost.

    ``broken``: its connection has ended and no other could be opened.
    """
    if broken:
        return (f"the connection to {name} ended, and no other could be made for {seconds:.1f} s "
                "(its agent was ended, or the host is cut off)")  # fmt: skip
    return f"silent for {seconds:.1f} s (switched off, unplugged or frozen)"


def describe_end(name: str, stderr: str) -> str:
    """Describes why a connection ended, from its standard error. Pure.

    Only lines of the agent or of ssh are a reason. Any other last line, such as a warning of a
    library, is quoted as such.
    """
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    reasons = [match["why"] for line in lines if (match := _AGENT_MESSAGE.match(line))]
    if reasons:
        return f"the connection to {name} ended: {reasons[-1]}"
    ssh = [line for line in lines if _SSH_MESSAGE.match(line)]
    if ssh:
        return f"the SSH connection to {name} ended: {ssh[-1]}"
    lines = [line for line in lines if classify_line(line) != "told"]
    excerpt = f" (last on its standard error: {lines[-1][:_MAX_STDERR_CHARS]})" if lines else ""
    return f"the connection to {name} ended{excerpt}"


def _awake_or_not() -> float:
    """Returns the seconds of a clock that runs on while the machine sleeps."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


async def first_of(*work: Awaitable[Any]) -> None:
    """Returns when the first has finished; the others are cancelled."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def finishes_in(work: Awaitable[Any], seconds: float) -> bool:
    """Returns whether it finished in time."""
    try:
        await asyncio.wait_for(asyncio.ensure_future(work), seconds)
    except asyncio.TimeoutError:
        return False
    return True
