"""Agents of a detached run, which connect to its supervisor.

Each host got a caller process before the launcher left. If a host is lost later, the supervisor
logs in to it over SSH, or starts a new container there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from paceline.remote.channel import Channel, LoginError
from paceline.remote.fanout import connect_hosts, open_channels, use_pidfd_watcher
from paceline.remote.openssh import SshOptions
from paceline.remote.transport import ConnectedCallback, Transport, ignore_count
from paceline.rendezvous.endpoint import local_addresses
from paceline.rendezvous.listener import Connection, Listener
from paceline.rendezvous.peers import HostAdmission, Peers
from paceline.spec.errors import ConnectError
from paceline.spec.hosts import Host

TIMEOUT_S = 60.0  # for started callers; failures to start are reported sooner
RETRY_LOGIN_S = 60.0  # between two logins to a host that refuses them
AgentStarter = Callable[[Host, str], Awaitable[Channel]]  # on a host, with an interpreter
_LOGIN_CAUSES = ("login refused", "host key not known", "host key changed", "name not found")


class CallbackTransport(Transport):
    """Accepts the agents' connections at the first start, and logs in to hosts that are lost later.

    Args:
        hosts: All hosts that may connect, by place. A local host's agent is a child process.
        key: The secret of this run.
        me: Name of the host of this process, if it is one of them.
        interface: Interface on which agents connect; ``None`` for any address.
        listening: Called once it listens.
        containers: Starts an agent in a container on a lost host; given if all agents, also local
            ones, run in containers and never reconnect.
    """

    redials = True
    dialects: tuple[str, ...] = ()

    def __init__(self, hosts: Sequence[Host], key: bytes, me: str | None, interface: str | None,
                 listening: Callable[[Listener], None],
                 containers: AgentStarter | None = None) -> None:  # fmt: skip
        self._hosts, self._me, self._interface = hosts, me, interface
        self._containers = containers
        self._on_listening = listening
        self._peers = Peers(HostAdmission(hosts))
        self._listener = Listener(key, self._on_connection)
        self._listening: asyncio.Task[None] | None = None
        self._places = {host.name: place for place, host in enumerate(hosts)}
        self._called: set[str] = set()  # hosts that connected, or could not
        self._missing: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._next_login: dict[str, float] = {}  # earliest time by host

    def cannot_call(self, reasons: Mapping[str, str]) -> None:
        """Records hosts on which no caller could be started, with the reasons."""
        self._missing |= reasons
        self._wake()

    def _on_connection(self, connection: Connection) -> None:
        self._peers.admit(connection)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def open(self, hosts: Sequence[Host], pythons: Sequence[str],
                   on_connected: ConnectedCallback = ignore_count) -> list[Channel]:  # fmt: skip
        """Accepts the connections of these hosts; the second time it logs in to them.

        Raises:
            ConnectError: Names hosts that did not connect, or refuse the login.
            SettingError: This machine has no address for agents.
        """
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen())
        await asyncio.shield(self._listening)
        num_connected = 0

        async def connect(host: Host, python: str) -> Channel:
            nonlocal num_connected
            has_caller = self._containers is not None or not host.local
            is_first = has_caller and host.name not in self._called
            channel = await (self._accept(host) if is_first else self._log_in(host, python))
            num_connected += 1
            on_connected(num_connected)
            return channel

        return await open_channels([connect(*pair) for pair in zip(hosts, pythons, strict=True)])

    async def _listen(self) -> None:
        use_pidfd_watcher()
        if self._containers is not None or not all(host.local for host in self._hosts):
            name = self._me or "this machine"  # what it says is read on the launching machine
            await self._listener.open(local_addresses(self._interface, self._hosts, name))
        self._on_listening(self._listener)

    async def _accept(self, host: Host) -> Channel:
        """Waits for the host's caller."""
        place, loop = self._places[host.name], asyncio.get_running_loop()
        deadline = loop.time() + TIMEOUT_S
        while not self._peers.is_connected(place):
            if host.name in self._missing:
                self._called.add(host.name)
                raise ConnectError(f"{host.name} did not call", found=self._missing[host.name])
            if loop.time() >= deadline:
                raise self._timeout_error(host)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), deadline - loop.time())
        self._called.add(host.name)
        channel = self._peers.channel(place, reconnects=self._containers is None)
        if self._containers is not None:  # a container has other files than this machine
            channel.host = replace(channel.host, local=False)
        try:
            await channel.open()
        except LoginError as error:
            refusal = error.refusal
            raise ConnectError(
                f"no agent on {host.name}", found=refusal.details, remedy=refusal.remedy
            ) from None
        except BaseException:
            await channel.close()
            raise
        return channel

    def _timeout_error(self, host: Host) -> ConnectError:
        addresses = ", ".join(f"{host} port {port}" for host, port in self._listener.addresses)
        return ConnectError(
            f"{host.name} did not call its supervisor within {TIMEOUT_S:.0f} s",
            found=f"the supervisor listens on {addresses}",
            remedy="Look for a firewall between the two, or name another: --supervisor HOST",
        )

    async def _log_in(self, host: Host, python: str) -> Channel:
        """Logs in from this machine, with a pause after a refusal."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._next_login.get(host.name, 0.0) - loop.time())
        # the given host may be a local container, which is not local to SSH
        original = self._hosts[self._places[host.name]]
        target = replace(original, local=original.local or original.name == self._me)
        try:
            if self._containers is not None:
                return await self._containers(target, python)
            (channel,) = await connect_hosts([target], [python], SshOptions())
        except ConnectError as error:
            if any(cause in f"{error.brief} {error.found}" for cause in _LOGIN_CAUSES):
                self._next_login[host.name] = loop.time() + RETRY_LOGIN_S
            raise
        return channel

    async def close(self, exit_code: int) -> None:
        """Stops listening, so that callers end with their agents."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        await self._listener.close()
        self._peers.hang_up()
