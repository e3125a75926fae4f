"""Agents of a run that was left: somebody else starts them, and they call its supervisor.

Each host was given a caller before the supervisor was left alone. A host that is lost later has
none: then the supervisor dials it itself, over SSH from where it is, if it is let in. Where agents
are in containers it has a new one started there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from paceline.remote.channel import Channel, LoginRefused
from paceline.remote.fanout import all_opened, connect_all, wait_without_threads
from paceline.remote.openssh import SshOptions
from paceline.remote.transport import Reached, nobody
from paceline.rendezvous.endpoint import own_addresses
from paceline.rendezvous.listener import Connection, Listener
from paceline.rendezvous.peers import KnownHosts, Peers
from paceline.spec.errors import ConnectError
from paceline.spec.hosts import Host

PATIENCE_S = 60.0  # for callers that were started; whoever starts them knows sooner that one fails
SHUT_OUT_S = 60.0  # between two tries with a host that does not let us in
StartsAgain = Callable[[Host, str], Awaitable[Channel]]  # on a host, with an interpreter
_SHUT = ("login refused", "host key not known", "host key changed", "name not found")


class CalledTransport:
    """Takes the agents' calls at the first start, and dials hosts that are lost later.

    Args:
        hosts: All that may call, by their place. The agent of one that is local is a child of ours.
        key: The secret of this run.
        me: Name of the host that we are on; ``None`` when we are on none of them.
        interface: Interface on which agents connect; ``None`` for any address.
        listening: Told where, once agents may call.
        containers: Where each agent is in a container, which its caller starts, also here, and
            whose agent never calls a second time: starts another on a host that was lost.
    """

    redials = True
    dialects: tuple[str, ...] = ()

    def __init__(self, hosts: Sequence[Host], key: bytes, me: str | None, interface: str | None,
                 listening: Callable[[Sequence[tuple[str, int]]], None],
                 containers: StartsAgain | None = None) -> None:  # fmt: skip
        self._hosts, self._me, self._interface = hosts, me, interface
        self._containers = containers
        self._tell_where = listening
        self._peers = Peers(KnownHosts(hosts))
        self._listener = Listener(key, self._take)
        self._listening: asyncio.Task[None] | None = None
        self._places = {host.name: place for place, host in enumerate(hosts)}
        self._taken: set[str] = set()  # hosts whose one call was taken, or that could not make it
        self._missing: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._not_before: dict[str, float] = {}

    def cannot_call(self, why: Mapping[str, str]) -> None:
        """Hosts on which nobody could be started who calls, and why."""
        self._missing |= why
        self._wake()

    def _take(self, connection: Connection) -> None:
        self._peers.take(connection)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def open(self, hosts: Sequence[Host], pythons: Sequence[str],
                   reached: Reached = nobody) -> list[Channel]:  # fmt: skip
        """Takes the calls of these hosts; a second time it dials them.

        Raises:
            ConnectError: Names those that did not call, or cannot be logged in to from here.
            SettingError: There is no address that agents could call.
        """
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen())
        await asyncio.shield(self._listening)
        there = 0

        async def one(host: Host, python: str) -> Channel:
            nonlocal there
            calls = self._containers is not None or not host.local
            first = calls and host.name not in self._taken
            channel = await (self._called(host) if first else self._dialled(host, python))
            there += 1
            reached(there)
            return channel

        return await all_opened([one(*pair) for pair in zip(hosts, pythons, strict=True)])

    async def _listen(self) -> None:
        wait_without_threads()
        if self._containers is not None or not all(host.local for host in self._hosts):
            await self._listener.open(own_addresses(self._interface, self._hosts))
        self._tell_where(self._listener.addresses)

    async def _called(self, host: Host) -> Channel:
        """The agent that a caller on the host leads to."""
        place, loop = self._places[host.name], asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_S
        while not self._peers.came(place):
            if host.name in self._missing:
                self._taken.add(host.name)
                raise ConnectError(f"{host.name} did not call", found=self._missing[host.name])
            if loop.time() >= deadline:
                raise self._silent(host)
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - loop.time())
            except asyncio.TimeoutError:
                continue
        self._taken.add(host.name)
        channel = self._peers.channel(place, again=self._containers is None)
        if self._containers is not None:  # a container here has other files than this machine
            channel.host = replace(channel.host, local=False)
        try:
            await channel.open()
        except LoginRefused as refused:
            said = refused.refusal
            raise ConnectError(
                f"no agent on {host.name}", found=said.found, remedy=said.remedy
            ) from None
        except BaseException:
            await channel.close()
            raise
        return channel

    def _silent(self, host: Host) -> ConnectError:
        where = ", ".join(f"{address} port {port}" for address, port in self._listener.addresses)
        return ConnectError(
            f"{host.name} did not call its supervisor within {PATIENCE_S:.0f} s",
            found=f"the supervisor listens on {where}",
            remedy="Look for a firewall between the two, or name another: --supervisor HOST",
        )

    async def _dialled(self, host: Host, python: str) -> Channel:
        """By a login from here; a host that does not let us in is not asked again at once."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._not_before.get(host.name, 0.0) - loop.time())
        own = self._hosts[self._places[host.name]]  # a container here counts as another machine
        own = replace(own, local=own.local or own.name == self._me)
        try:
            if self._containers is not None:
                return await self._containers(own, python)
            (channel,) = await connect_all([own], [python], SshOptions())
        except ConnectError as error:
            if any(cause in f"{error.brief} {error.found}" for cause in _SHUT):
                self._not_before[host.name] = loop.time() + SHUT_OUT_S
            raise
        return channel

    async def close(self, exit_code: int) -> None:
        """Nobody listens any more, so callers end with their agents."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        await self._listener.close()
        self._peers.hang_up()

    async def why(self, host: Host) -> str:
        """Nobody but its user knows why a host went."""
        return ""
