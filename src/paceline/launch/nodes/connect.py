"""Connects the hosts of a run: enough of them at its start, missing ones in the background."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence

from paceline.launch.nodes.fleet import Fleet, Node
from paceline.launch.nodes.provisioner import Provisioner
from paceline.launch.planning import planner
from paceline.launch.planning.request import Request
from paceline.launch.terminal.run_state import NodeWait
from paceline.remote.channel import Channel
from paceline.remote.login import MAX_PARALLEL_LOGINS
from paceline.remote.transport import ConnectedCallback, Transport, ignore_count
from paceline.spec.errors import ConnectError, NodeError, PacelineError, PermanentConnectError
from paceline.spec.formatting import pluralize, span
from paceline.spec.hosts import Host
from paceline.spec.plan import NodePlan

STRAGGLER_WAIT_S = 5.0  # for the other hosts, once enough are connected
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 5.0)  # between two calls of one host; the last one repeats
RELEASED_REDIAL_S = 30.0  # before a host is dialled that asked for its own end
WaitCallback = Callable[["NodeWait | None"], None]


class HostDialer:
    """Dials one host until it answers.

    Attributes:
        error: The last error; empty before the first answer.
        channel: The connection, once there is one.
        is_unreachable: Whether no further call of this run can reach the host.
    """

    def __init__(self, transport: Transport, host: Host, python: str,
                 gate: asyncio.Semaphore, changed: asyncio.Event,
                 delay_s: float = 0.0) -> None:  # fmt: skip
        self.host = host
        self.error = ""
        self.channel: Channel | None = None
        self.is_unreachable = False
        self._transport, self._python = transport, python
        self._gate, self._changed = gate, changed
        self.task = asyncio.create_task(self._dial(delay_s))

    async def _dial(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        for number in itertools.count():
            try:
                async with self._gate:
                    (self.channel,) = await self._transport.open([self.host], [self._python])
            except PacelineError as error:
                self.error = error.brief
                self.is_unreachable = isinstance(error, PermanentConnectError)
            self._changed.set()
            if self.channel is not None or self.is_unreachable:
                return
            await asyncio.sleep(PAUSES_S[min(number, len(PAUSES_S) - 1)])

    async def stop(self) -> Channel | None:
        """Stops dialling; returns the connection if there is one."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        return self.channel

    def describe(self) -> str:
        """Returns the host and its last error."""
        return f"{self.host.name} ({self.error or 'no answer yet'})"


async def connect_enough(transport: Transport, hosts: Sequence[Host], pythons: Sequence[str],
                         min_hosts: int, timeout_s: float, note: Callable[[str], None],
                         on_connected: ConnectedCallback = ignore_count,
                         background: list[HostDialer] | None = None,
                         on_wait: WaitCallback = lambda waiting: None,
                         ) -> tuple[list[Channel], dict[str, str]]:  # fmt: skip
    """Connects as many hosts as answer; arguments and result are those of :func:`connect`.

    Once there are enough, hosts that have neither answered nor refused get a few more seconds.
    Raises ConnectError if fewer than ``min_hosts`` have answered after ``timeout_s``.
    """
    gate, changed = asyncio.Semaphore(MAX_PARALLEL_LOGINS), asyncio.Event()
    dialers = [HostDialer(transport, host, python, gate, changed)
               for host, python in zip(hosts, pythons, strict=True)]  # fmt: skip

    def announce(missing: Sequence[HostDialer], waited_s: float) -> None:
        connected = pluralize(len(dialers) - len(missing), "host")
        text = f"{connected} of at least {min_hosts}: waiting up to {span(timeout_s)} for"
        text += f" {', '.join(dialer.describe() for dialer in missing[:6])}"
        text += f" and {len(missing) - 6} more" if len(missing) > 6 else ""
        note(f"paceline: {text}")
        on_wait(NodeWait.start(text, timeout_s, waited_s))

    try:
        missing = await _wait_for_enough(dialers, min_hosts, timeout_s, changed, on_connected,
                                         announce)  # fmt: skip
    except BaseException:
        for channel in await asyncio.gather(*(dialer.stop() for dialer in dialers)):
            if channel is not None:
                await channel.close()
        raise
    if background is None:
        await asyncio.gather(*(dialer.stop() for dialer in missing))
    else:
        background += missing
    channels = [dialer.channel for dialer in dialers if dialer.channel is not None]
    return channels, {d.host.name: d.error for d in dialers if d.channel is None}


async def _wait_for_enough(dialers: Sequence[HostDialer], min_hosts: int, timeout_s: float,
                           changed: asyncio.Event, on_connected: ConnectedCallback,
                           announce: Callable[[Sequence[HostDialer], float], None],
                           ) -> list[HostDialer]:  # fmt: skip
    """Waits until enough hosts are connected; returns the dialers of the missing ones.

    ``announce`` is called once if more hosts must answer, with those and the seconds waited.
    """
    loop = asyncio.get_running_loop()
    started_at, enough_at, is_announced = loop.time(), None, False
    while True:
        changed.clear()
        missing = [dialer for dialer in dialers if dialer.channel is None]
        num_connected, waited_s = len(dialers) - len(missing), loop.time() - started_at
        on_connected(num_connected)
        undecided = [dialer for dialer in missing if not dialer.error]
        if num_connected >= min_hosts and enough_at is None:
            enough_at = waited_s
        if not missing:
            return missing
        if enough_at is not None and (not undecided or waited_s - enough_at >= STRAGGLER_WAIT_S):
            return missing
        is_hopeless = waited_s >= timeout_s or all(d.is_unreachable for d in missing)
        if num_connected < min_hosts and not undecided and is_hopeless:
            raise _shortage_error(missing, num_connected, min_hosts, waited_s)
        if enough_at is None and not undecided and not is_announced:
            is_announced = True
            announce(missing, waited_s)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(changed.wait(), 0.2)


def _shortage_error(missing: Sequence[HostDialer], num_connected: int, min_hosts: int,
                    seconds: float) -> ConnectError:  # fmt: skip
    names = ", ".join(dialer.host.name for dialer in missing)
    duration = f" within {seconds:.0f} s" if seconds >= 1 else ""
    advice = ", or ask for fewer: --nnodes" if min_hosts > 1 else ""
    return ConnectError(
        f"{pluralize(num_connected, 'host')} can be reached, at least {min_hosts} are needed:"
        f" {names} did not answer{duration}",
        found="\n".join(f"{d.host.name}: {d.error or 'no answer'}" for d in missing),
        remedy=f"Check that they are on and that you can log in (paceline check){advice}",
    )


async def connect(request: Request, on_connected: ConnectedCallback = ignore_count,
                  note: Callable[[str], None] | None = None, is_retry: bool = False,
                  background: list[HostDialer] | None = None,
                  on_wait: WaitCallback = lambda waiting: None,
                  ) -> tuple[Fleet, dict[str, str]]:  # fmt: skip
    """Starts an agent on every host, or on enough of them if the job can run with fewer.

    Args:
        request: What to run, and where.
        on_connected: Called with the number of connected hosts.
        note: Tells the user that hosts are waited for; ``None`` waits for none.
        is_retry: Whether a host was lost since the first time: then a session may shrink, too.
        background: Receives the dialers of missing hosts, which continue; ``None`` stops them.
        on_wait: Called if too few hosts are connected, with what is waited for.

    Returns the connected nodes, and the errors of missing hosts by name.
    """
    job, hosts = request.job, request.hosts
    pythons = [planner.python_of(job, host) for host in hosts]
    missing: dict[str, str] = {}
    if request.awaits_hosts or is_retry:
        min_hosts = request.min_restart_hosts(job.trains) if is_retry else request.min_hosts
        channels, missing = await connect_enough(
            request.transport, hosts, pythons, min_hosts, request.timeout_s if note else 0.0,
            note or (lambda text: None), on_connected, background, on_wait,
        )  # fmt: skip
    else:
        channels = await request.transport.open(hosts, pythons, on_connected)
    fleet = Fleet(channels, job.lease_s.value)
    fleet.seat(fleet.nodes[: request.max_hosts])
    return fleet, missing


class Reconnector:
    """Reconnects missing hosts and adds them to the fleet.

    Args:
        request: What to run, and where.
        fleet: Receives connected hosts as spares.
        on_ready: Called with every node that can start ranks, unless :meth:`reconnect` awaits it.
    """

    def __init__(self, request: Request, fleet: Fleet, provisioner: Provisioner,
                 on_ready: Callable[[Node], None],
                 note: Callable[[str], None]) -> None:  # fmt: skip
        self._request, self._fleet, self._provisioner = request, fleet, provisioner
        self._on_ready, self._note = on_ready, note
        self._gate = asyncio.Semaphore(MAX_PARALLEL_LOGINS)
        self._changed = asyncio.Event()
        self._dialers: dict[str, HostDialer] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._awaited: dict[str, asyncio.Future[Node]] = {}  # by reconnect()

    @property
    def redials(self) -> bool:
        """Whether this transport can connect to a host again."""
        return self._request.transport.redials

    @property
    def dialled(self) -> list[str]:
        """Hosts with a connection attempt under way."""
        return list(self._dialers)

    @property
    def is_provisioning(self) -> bool:
        """Whether a host has connected but cannot start ranks yet."""
        return any(dialer.channel is not None for dialer in self._dialers.values())

    def describe_missing(self) -> list[str]:
        """Describes each missing host and why it is not connected."""
        return [dialer.describe() for dialer in self._dialers.values()]

    def progress(self) -> dict[str, str]:
        """Maps each missing host to its progress, as text that follows its name."""
        return {
            name: "back, getting ready" if dialer.channel is not None
            else "lost, dialled again" + (f": {dialer.error}" if dialer.error else "")
            for name, dialer in self._dialers.items()
        }  # fmt: skip

    def follow(self, dialer: HostDialer) -> None:
        """Provisions a host of a pending connection once it answers."""
        self._dialers[dialer.host.name] = dialer
        self._tasks[dialer.host.name] = asyncio.create_task(self._connect(dialer))

    def redial(self, node: Node) -> None:
        """Starts reconnecting the host of a lost node unless that is under way."""
        if self.redials and node.name not in self._tasks:
            self.follow(self._dial(node.host, RELEASED_REDIAL_S if node.was_dismissed else 0.0))

    def _dial(self, host: Host, delay_s: float) -> HostDialer:
        python = planner.python_of(self._request.job, host)
        transport = self._request.transport
        return HostDialer(transport, host, python, self._gate, self._changed, delay_s)

    async def _connect(self, dialer: HostDialer) -> None:
        """Retries connecting a host until it can start ranks."""
        name, number, reported = dialer.host.name, 0, ""
        try:
            while True:
                await dialer.task
                if dialer.channel is None:
                    raise PermanentConnectError(f"{name} cannot come back", found=dialer.error)
                node = self._fleet.add(dialer.channel)
                try:
                    await self._provisioner.provision(node, self._fleet)
                except (PacelineError, OSError) as error:  # a file to be sent may have gone, too
                    text = str(error) or type(error).__name__
                    reason = node.loss_reason if node.lost else text.splitlines()[0]
                    await self._fleet.dismiss(node, reason)
                    if reason != reported:
                        self._note(f"paceline: {name} cannot take part yet: {reason}")
                    reported, pause_s = reason, PAUSES_S[min(number, len(PAUSES_S) - 1)]
                    number += 1
                    dialer = self._dialers[name] = self._dial(dialer.host, pause_s)
                    dialer.error = reason
                else:
                    break
        except PermanentConnectError as error:
            self._note(f"paceline: {error.message}: {error.brief}")
            if (awaited := self._awaited.pop(name, None)) is not None and not awaited.done():
                awaited.set_exception(error)
            return
        finally:
            self._dialers.pop(name, None)
            self._tasks.pop(name, None)
            self._changed.set()
        awaited = self._awaited.pop(name, None)
        if awaited is None or awaited.done():
            self._on_ready(node)
        else:
            awaited.set_result(node)
        self._changed.set()

    async def reconnect(self, host: str) -> None:
        """Retries connecting a lost host until it is back; PermanentConnectError if it never is."""
        lost = self._fleet.get(host)
        awaited = self._awaited.get(host)
        if awaited is None or awaited.done():  # an earlier wait may have been cancelled
            awaited = self._awaited[host] = asyncio.get_running_loop().create_future()
        self.redial(lost)
        self._fleet.replace_node(await awaited, host)

    def replace(self, lost: NodePlan, parts: Mapping[str, NodePlan]) -> NodePlan | None:
        """Gives a lost host's ranks to a spare that can take them; returns its plan.

        Redials the host. ``parts`` are the plans of all hosts with ranks, also of this one.
        """
        running = {host: part for host, part in parts.items() if host != lost.host}
        numbers = [rank.rank for rank in lost.ranks]
        if not self._request.elastic:
            return None
        for spare in self._fleet.spares:
            if spare.can_start_ranks and spare.survey:
                with contextlib.suppress(NodeError):
                    part = self._part(spare, lost.node_rank, numbers, running)
                    self.redial(self._fleet.get(lost.host))
                    self._fleet.replace_node(spare, lost.host)
                    return part
        return None

    def add(self, node: Node, first_rank: int, parts: Mapping[str, NodePlan]) -> NodePlan:
        """Gives new ranks to a spare; returns its plan.

        Raises:
            NodeError: It cannot take part with the hosts that have ``parts``.
        """
        count = planner.processes_on(self._request.job, node.host, node.facts).value
        numbers = range(first_rank, first_rank + count)
        part = self._part(node, len(self._fleet.nodes), numbers, parts)
        self._fleet.seat([*self._fleet.nodes, node])
        return part

    def _part(self, node: Node, node_rank: int, ranks: Sequence[int],
              parts: Mapping[str, NodePlan]) -> NodePlan:  # fmt: skip
        assert node.survey is not None
        job, run_id, supplies = self._request.job, self._request.run_id, self._provisioner.supplies
        running = [(member.survey, parts[member.name]) for member in self._fleet.everyone
                   if member.survey is not None and member.name in parts]  # fmt: skip
        return planner.newcomer_part(job, node.survey, supplies, run_id, node_rank, ranks, running)

    async def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Waits for nodes to connect; returns whether enough came in time."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not condition():
            remaining_s = deadline - asyncio.get_running_loop().time()
            if remaining_s <= 0 or not self._tasks:
                return False
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), remaining_s)
        return True

    async def close(self) -> None:
        """Cancels all connection attempts and closes connections outside the fleet."""
        dialers = list(self._dialers.values())  # which each task forgets at its end
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for dialer in dialers:
            channel = await dialer.stop()
            if channel is not None and channel not in self._fleet.channels:
                await channel.close()
