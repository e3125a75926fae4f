"""The connected nodes of a run: their leases, their losses, and requests to all of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from paceline.cluster.channel import Channel, Event
from paceline.launch.node import Node
from paceline.spec.errors import PacelineError
from paceline.spec.hosts import Host

REQUEST_PATIENCE_S = 3.0
GOODBYE_S = 5.0


class Fleet:
    """All nodes of one run.

    Args:
        channels: One a host, in rank order.
        lease_s: How long a node goes on without hearing of us. Half of it is how long we go on
            without hearing of a node.
        on_event: Told everything that agents say.
        on_lost: Told once when a node is lost, and why.
    """

    def __init__(self, channels: Sequence[Channel], lease_s: float,
                 on_event: Callable[[Node, Event], None],
                 on_lost: Callable[[Node, str], None]) -> None:  # fmt: skip
        self.nodes = [Node(channel.host, channel) for channel in channels]
        self._lease_s = lease_s
        self._on_lost = on_lost
        for node in self.nodes:
            node.channel.on_event = self._router(node, on_event)
        self._beats = [asyncio.create_task(self._beat(node)) for node in self.nodes]

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

    def facts(self) -> dict[str, Any]:
        """By host name, what the agents told of their machines."""
        return {node.name: node.facts for node in self.nodes}

    def _router(
        self, node: Node, on_event: Callable[[Node, Event], None]
    ) -> Callable[[Event], None]:
        def route(event: Event) -> None:
            if event.message.get("event") != "lost":
                on_event(node, event)
                return
            words = event.message["stderr"].strip().splitlines()
            said = f": {words[-1]}" if words else ""
            self.lose(node, f"the connection to {node.name} ended{said}")

        return route

    async def _beat(self, node: Node) -> None:
        """Renews the node's lease ten times as often as needed; notices its silence."""
        loop = asyncio.get_running_loop()
        renewals: set[asyncio.Task[None]] = set()
        while not node.lost:
            renewal = asyncio.create_task(node.renew_lease(self._lease_s))
            renewals.add(renewal)
            renewal.add_done_callback(renewals.discard)
            # an answer that never comes is no error of ours: the silence is what counts
            renewal.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.sleep(self._lease_s / 10)
            silence = loop.time() - node.channel.last_heard
            if silence > self._lease_s / 2:
                self.lose(node, f"no word from {node.name} for {silence:.1f} s "
                                "(switched off, unplugged or frozen)")  # fmt: skip

    def lose(self, node: Node, why: str) -> None:
        """Marks a node as lost, once."""
        if not node.lost:
            node.lost = True
            if node.ready is not None and not node.ready.done():
                node.ready.set_result(why)
            self._on_lost(node, why)
            node.running = False
            node.channel.abandon()

    async def each(self, work: Callable[[Node], Awaitable[Any]]) -> list[Any]:
        """Does something on every node at once; the first failure ends it all."""
        return await together([work(node) for node in self.nodes])

    async def tell(self, op: str, **fields: Any) -> None:
        """Asks every node that is left, and does not mind who fails."""

        async def ask(node: Node) -> None:
            with contextlib.suppress(PacelineError, ConnectionError, asyncio.TimeoutError):
                await asyncio.wait_for(node.channel.request(op, **fields), REQUEST_PATIENCE_S)

        await asyncio.gather(*(ask(node) for node in self.nodes if not node.lost))

    async def close(self) -> None:
        """Sends every agent home and closes the connections."""
        for beat in self._beats:
            beat.cancel()
        await asyncio.gather(*self._beats, return_exceptions=True)
        for node in self.nodes:
            node.channel.on_event = _ignore
        await self.tell("bye")
        await asyncio.gather(
            *(node.channel.close(0.0 if node.lost else GOODBYE_S) for node in self.nodes)
        )


def _ignore(event: Event) -> None:
    """What agents say while they leave does not matter any more."""


async def together(work: Sequence[Awaitable[Any]]) -> list[Any]:
    """All results; after the first failure the rest is cancelled and awaited."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
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
