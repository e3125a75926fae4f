"""Reconnects missing hosts in the background, provisions them and gives them ranks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from paceline.launch.nodes.connect import PAUSES_S, Dialling
from paceline.launch.nodes.fleet import Fleet, Node
from paceline.launch.nodes.provisioner import Provisioner
from paceline.launch.planning import planner
from paceline.launch.planning.request import Request
from paceline.remote.login import MAX_PARALLEL_LOGINS
from paceline.spec.errors import PacelineError, PermanentConnectError
from paceline.spec.hosts import Host
from paceline.spec.plan import NodePlan

LEAVING_S = 30.0  # a host that asked for its own end is about to go: it is not dialled before


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
