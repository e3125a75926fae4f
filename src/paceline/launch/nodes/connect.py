"""Connects the hosts of a run: enough of them at its start, missing ones in the background."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence

from paceline.launch.nodes.fleet import Fleet, Node
from paceline.launch.nodes.provisioner import Provisioner
from paceline.launch.planning import planner
from paceline.launch.planning.request import Request, trains
from paceline.launch.terminal.run_state import Waiting
from paceline.remote.channel import Channel
from paceline.remote.login import MAX_PARALLEL_LOGINS
from paceline.remote.transport import ConnectedCallback, Transport, ignore_count
from paceline.spec.errors import ConnectError, PacelineError, PermanentConnectError
from paceline.spec.events import Event
from paceline.spec.formatting import pluralize, span
from paceline.spec.hosts import Host
from paceline.spec.plan import NodePlan

LAST_CALL_S = 5.0  # for the others, once there are enough hosts to begin
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 5.0)  # between two calls of one host; the last one for ever
LEAVING_S = 30.0  # a host that asked for its own end is about to go: it is not dialled before
Waits = Callable[["Waiting | None"], None]


def unseen(waiting: Waiting | None) -> None:
    """Is told what nobody looks at."""


class Dialling:
    """Calls one host until it answers.

    Attributes:
        host: Whom.
        why: What stood in the way last; empty before the first answer.
        channel: The connection, once there is one.
        gone: There will be none: no further call of this run can reach it.
    """

    def __init__(self, transport: Transport, host: Host, python: str,
                 gate: asyncio.Semaphore, changed: asyncio.Event,
                 after_s: float = 0.0) -> None:  # fmt: skip
        self.host = host
        self.why = ""
        self.channel: Channel | None = None
        self.gone = False
        self._transport, self._python = transport, python
        self._gate, self._changed = gate, changed
        self.task = asyncio.create_task(self._call(after_s))

    async def _call(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        for number in itertools.count():
            try:
                async with self._gate:
                    (self.channel,) = await self._transport.open([self.host], [self._python])
            except PacelineError as error:
                self.why, self.gone = error.brief, isinstance(error, PermanentConnectError)
            self._changed.set()
            if self.channel is not None or self.gone:
                return
            await asyncio.sleep(PAUSES_S[min(number, len(PAUSES_S) - 1)])

    async def stop(self) -> Channel | None:
        """Ends the calls; what came of them at the last moment."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        return self.channel

    def describe(self) -> str:
        """The host, and what stands in its way."""
        return f"{self.host.name} ({self.why or 'no answer yet'})"


async def gather(transport: Transport, hosts: Sequence[Host], pythons: Sequence[str],
                 min_hosts: int, patience_s: float, note: Callable[[str], None],
                 reached: ConnectedCallback = ignore_count, later: list[Dialling] | None = None,
                 waits: Waits = unseen) -> tuple[list[Channel], dict[str, str]]:  # fmt: skip
    """As many of the hosts as answer, in their order, and of the others by name why not.

    All that answer at once are taken; who has neither answered nor refused when there are enough
    gets a few seconds more.

    Args:
        transport: How agents are started, one by one.
        hosts, pythons: Whom to call, and the interpreter of each.
        min_hosts: Without so many nothing can begin.
        patience_s: How long to wait for those, in seconds.
        note: Tells the user.
        reached: Told how many answered by now.
        later: Gets the calls of the others, which go on; ``None``: they are ended.
        waits: Told once that too few are there and others are waited for; by whom, until when.

    Raises:
        ConnectError: There are too few; names the missing ones.
    """
    loop, gate = asyncio.get_running_loop(), asyncio.Semaphore(MAX_PARALLEL_LOGINS)
    changed, began, enough_at, announced = asyncio.Event(), loop.time(), None, False
    calls = [Dialling(transport, host, python, gate, changed)
             for host, python in zip(hosts, pythons, strict=True)]  # fmt: skip
    try:
        while True:
            changed.clear()
            missing = [call for call in calls if call.channel is None]
            here, now = len(calls) - len(missing), loop.time()
            reached(here)
            undecided = [call for call in missing if not call.why]
            if here >= min_hosts and enough_at is None:
                enough_at = now
            if not missing or (enough_at is not None and (
                    not undecided or now - enough_at >= LAST_CALL_S)):  # fmt: skip
                break
            late = now - began >= patience_s or all(call.gone for call in missing)
            if here < min_hosts and not undecided and late:
                raise _too_few(missing, here, min_hosts, now - began)
            if not announced and not undecided and enough_at is None:
                announced = True
                text = f"{pluralize(here, 'host')} of at least {min_hosts}: waiting up to"
                text += f" {span(patience_s)} for {_named(missing)}"
                note(f"paceline: {text}")
                waits(Waiting.now(text, patience_s, now - began))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(changed.wait(), 0.2)
    except BaseException:
        for channel in await asyncio.gather(*(call.stop() for call in calls)):
            if channel is not None:
                await channel.close()
        raise
    if later is None:
        await asyncio.gather(*(call.stop() for call in missing))
    else:
        later += missing
    channels = [call.channel for call in calls if call.channel is not None]
    return channels, {call.host.name: call.why for call in calls if call.channel is None}


def _named(missing: Sequence[Dialling], most: int = 6) -> str:
    shown = ", ".join(call.describe() for call in missing[:most])
    return shown if len(missing) <= most else f"{shown} and {len(missing) - most} more"


def _too_few(missing: Sequence[Dialling], here: int, least: int, seconds: float) -> ConnectError:
    names = ", ".join(call.host.name for call in missing)
    waited = f" within {seconds:.0f} s" if seconds >= 1 else ""
    fewer = ", or ask for fewer: --nnodes" if least > 1 else ""
    return ConnectError(
        f"{pluralize(here, 'host')} can be reached, at least {least} are needed: {names} did not"
        f" answer{waited}",
        found="\n".join(f"{call.host.name}: {call.why or 'no answer'}" for call in missing),
        remedy=f"See that they are on and let you in (paceline check){fewer}",
    )


async def connect(request: Request, on_event: Callable[[Node, Event], None],
                  on_lost: Callable[[Node, str], None], reached: ConnectedCallback = ignore_count,
                  note: Callable[[str], None] | None = None, again: bool = False,
                  later: list[Dialling] | None = None,
                  waits: Waits = unseen,
                  ) -> tuple[Fleet, dict[str, str]]:  # fmt: skip
    """Has an agent started on every host, or on enough of them where the job can do with fewer.

    Args:
        request: What is to run, and where.
        on_event, on_lost: Of the fleet.
        reached: Told how many hosts have an agent by now.
        note: Tells the user that hosts are waited for; ``None`` waits for none.
        again: Somebody was lost since the first time: also a session goes on with fewer then.
        later: Gets the calls of hosts that are not waited for, which go on; ``None`` ends them.
        waits: Told that too few are there and others are waited for.

    Returns:
        The nodes that are there, and why the others are not, by host.
    """
    job, hosts = request.job, request.hosts
    pythons = [planner.python_of(job, host) for host in hosts]
    missing: dict[str, str] = {}
    if request.waits or again:
        least = request.least_again(trains(job)) if again else request.least
        patience_s = request.patience_s if note else 0.0
        channels, missing = await gather(
            request.transport,
            hosts,
            pythons,
            least,
            patience_s,
            note or _nobody,
            reached,
            later,
            waits,
        )
    else:
        channels = await request.transport.open(hosts, pythons, reached)
    fleet = Fleet(channels, job.lease_s.value, on_event, on_lost)
    fleet.seat(fleet.nodes[: request.most])
    return fleet, missing


def _nobody(text: str) -> None:
    """Is told what nobody waits for."""


class Reconnector:
    """Reconnects missing hosts and adds them to the fleet.

    Args:
        request: What to run, and where.
        fleet: Gets the hosts that came, as spares.
        provisioner: Gives them what the others have.
        on_ready: Told of every node that could start ranks now.
        note: Tells the user.
    """

    def __init__(self, request: Request, fleet: Fleet, provisioner: Provisioner,
                 on_ready: Callable[[Node], None],
                 note: Callable[[str], None]) -> None:  # fmt: skip
        self._request, self._fleet, self._provisioner = request, fleet, provisioner
        self._on_ready, self._note = on_ready, note
        self._gate = asyncio.Semaphore(MAX_PARALLEL_LOGINS)
        self._changed = asyncio.Event()
        self._calls: dict[str, Dialling] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._awaited: dict[str, asyncio.Future[Node]] = {}  # by bring(), who seats them

    @property
    def redials(self) -> bool:
        """Whether this transport can connect to a host again."""
        return self._request.transport.redials

    @property
    def dialled(self) -> list[str]:
        """Hosts with a connection attempt under way."""
        return list(self._calls)

    @property
    def is_provisioning(self) -> bool:
        """Whether a host has connected but cannot start ranks yet."""
        return any(call.channel is not None for call in self._calls.values())

    def describe_missing(self) -> list[str]:
        """Describes each missing host and why it is not connected."""
        return [call.describe() for call in self._calls.values()]

    def progress(self) -> dict[str, str]:
        """Maps each missing host to its progress, as text that follows its name."""
        return {
            name: "back, getting ready" if call.channel is not None
            else "lost, dialled again" + (f": {call.why}" if call.why else "")
            for name, call in self._calls.items()
        }  # fmt: skip

    def follow(self, call: Dialling) -> None:
        """Provisions a host of a pending connection once it answers."""
        self._calls[call.host.name] = call
        self._tasks[call.host.name] = asyncio.create_task(self._connect(call))

    def redial(self, node: Node) -> None:
        """Starts reconnecting the host of a lost node unless that is under way."""
        if self.redials and node.name not in self._tasks:
            self.follow(self._dial(node.host, 0.0 if node.why else LEAVING_S))

    def _dial(self, host: Host, after_s: float) -> Dialling:
        python = planner.python_of(self._request.job, host)
        transport = self._request.transport
        return Dialling(transport, host, python, self._gate, self._changed, after_s)

    async def _connect(self, call: Dialling) -> None:
        """Retries connecting a host until it can start ranks."""
        name, number, last_why = call.host.name, 0, ""
        try:
            while True:
                await call.task
                if call.channel is None:
                    raise PermanentConnectError(f"{name} cannot come back", found=call.why)
                node = self._fleet.add(call.channel)
                try:
                    await self._provisioner.provision(node, self._fleet)
                except (PacelineError, OSError) as error:  # a file to be sent may have gone, too
                    text = str(error) or type(error).__name__
                    why = node.why if node.lost else text.splitlines()[0]
                    await self._fleet.dismiss(node)
                    if why != last_why:
                        self._note(f"paceline: {name} cannot take part yet: {why}")
                    last_why, pause_s = why, PAUSES_S[min(number, len(PAUSES_S) - 1)]
                    number += 1
                    call = self._calls[name] = self._dial(call.host, pause_s)
                    call.why = why
                else:
                    break
        except PermanentConnectError as gone:
            self._note(f"paceline: {gone.message}: {gone.brief}")
            if (awaited := self._awaited.pop(name, None)) is not None and not awaited.done():
                awaited.set_exception(gone)
            return
        finally:
            self._calls.pop(name, None)
            self._tasks.pop(name, None)
            self._changed.set()
        awaited = self._awaited.pop(name, None)
        if awaited is None or awaited.done():
            self._on_ready(node)
        else:
            awaited.set_result(node)
        self._changed.set()

    async def bring_back(self, host: str) -> None:
        """Retries connecting a lost host until it is back in the fleet, without a limit.

        Raises:
            GoneError: It never comes back.
        """
        lost = self._fleet.named(host)
        awaited = self._awaited.get(host)
        if awaited is None or awaited.done():  # an earlier wait may have been cancelled
            awaited = self._awaited[host] = asyncio.get_running_loop().create_future()
        self.redial(lost)
        self._fleet.take_place(await awaited, host)

    def replace(self, lost: NodePlan) -> NodePlan | None:
        """Gives the ranks of a lost host to a spare and keeps reconnecting that host.

        Returns:
            The spare's part of the plan; ``None`` without a spare.
        """
        spare = next((node for node in self._fleet.spares if node.could_start and node.found), None)
        if spare is None or not self._request.elastic:
            return None
        self.redial(self._fleet.named(lost.host))
        self._fleet.take_place(spare, lost.host)
        return self._part(spare, lost.node_rank, [rank.rank for rank in lost.ranks])

    def add(self, node: Node, first_rank: int) -> NodePlan:
        """Gives new ranks to a spare; returns its plan."""
        count = planner.processes_on(self._request.job, node.host, node.facts).value
        part = self._part(node, len(self._fleet.nodes), range(first_rank, first_rank + count))
        self._fleet.seat([*self._fleet.nodes, node])
        return part

    def _part(self, node: Node, node_rank: int, ranks: Sequence[int]) -> NodePlan:
        assert node.found is not None
        supplies, request = self._provisioner.supplies, self._request
        return planner.further_part(
            request.job, node.found, supplies, request.run_id, node_rank, ranks
        )

    async def until(self, enough: Callable[[], bool], patience_s: float) -> bool:
        """Waits for nodes to connect; returns whether enough came in time."""
        deadline = asyncio.get_running_loop().time() + patience_s
        while not enough():
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0 or not self._tasks:
                return False
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s)
        return True

    async def close(self) -> None:
        """Cancels all connection attempts and closes connections outside the fleet."""
        calls = list(self._calls.values())  # which each task forgets at its end
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for call in calls:
            channel = await call.stop()
            if channel is not None and channel not in self._fleet.channels:
                await channel.close()
