"""Agents that a scheduler starts on all nodes at once, and that connect back to the launcher."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.agent import caller
from paceline.remote.channel import Channel
from paceline.remote.transport import Reached, nobody
from paceline.rendezvous.endpoint import own_addresses
from paceline.rendezvous.listener import Listener, caller_command, caller_config
from paceline.rendezvous.peers import KnownHosts, Peers
from paceline.spec.errors import PacelineError
from paceline.spec.hosts import Host

WORDS_KEPT = 16 * 1024
CONNECT_S = 60.0  # that all agents together may take
END_PATIENCE_S = 5.0
TERM_PATIENCE_S = 3.0
PROBE_S = 8.0
LOOK_EVERY_S = 0.25
STRAGGLERS_S = 2.0  # for those whose connection is under way when the scheduler gives up


@dataclass(frozen=True, slots=True)
class Start:
    """How a scheduler starts one process on each host.

    Attributes:
        argv: The scheduler's command; the node's command is appended to it.
        env: Variables on top of the launcher's; ``None`` removes one.
        places: Variables by which a started process knows its place among the hosts.
        strip: Regular expression of variables that the agents must not inherit: ranks would
            take themselves for ranks of the scheduler's job.
        names: Variables that hold the scheduler's name for the node.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str | None]
    places: tuple[str, ...]
    strip: str
    names: tuple[str, ...] = ()


class Starter(Protocol):
    """What differs between the schedulers; :class:`StartedTransport` does the rest."""

    async def start(self, hosts: Sequence[Host]) -> Start:
        """How to start one process on each host. PacelineError when that cannot be."""

    def hopeless(self, words: str) -> bool:
        """Whether the scheduler's words so far mean that it will not start all hosts."""

    async def explain(self, hosts: Sequence[Host], missing: Sequence[Host], status: int | None,
                      words: str) -> PacelineError:  # fmt: skip
        """The error for hosts that did not connect.

        Args:
            hosts: All of them.
            missing: Those that did not connect.
            status: Exit status of the scheduler's command, ``None`` while it runs.
            words: What it wrote, the end of it.
        """

    def end(self) -> None:
        """Gives up what :meth:`start` has made. Called once, at the end."""


class StartedTransport:
    """Has a scheduler start the agents, and takes their connections.

    Args:
        starter: The scheduler.
        interface: Interface on which agents connect; ``None`` for any address.
        why: What the scheduler knows of a host that was lost; ``None`` when nothing ever.
        dialects: Whose names for a rank's place its ranks find, too.
    """

    redials = False  # the scheduler starts all agents at once

    def __init__(self, starter: Starter, interface: str | None = None,
                 why: Callable[[Host], Awaitable[str]] | None = None,
                 dialects: tuple[str, ...] = ()) -> None:  # fmt: skip
        self._starter = starter
        self._interface = interface
        self._why = why
        self.dialects = dialects
        self._process: asyncio.subprocess.Process | None = None
        self._words = bytearray()
        self._readers: list[asyncio.Task[None]] = []
        self._listener: Listener | None = None  # to the end: who was cut off calls again
        self._peers: Peers | None = None

    async def open(self, hosts: Sequence[Host], pythons: Sequence[str],
                   reached: Reached = nobody) -> list[Channel]:  # fmt: skip
        """ConnectError names the hosts that did not connect, and what the scheduler said."""
        peers = self._peers = Peers(KnownHosts(hosts), reached)
        listener = self._listener = Listener(secrets.token_bytes(32), peers.take)
        try:
            start = await self._starter.start(hosts)
            await listener.open(own_addresses(self._interface, hosts))
            await self._start(start, listener, pythons)
            await self._wait(peers)
            if missing := [hosts[place] for place in peers.missing()]:
                assert self._process is not None
                status = self._process.returncode
                await self._end(0.0)
                raise await self._starter.explain(hosts, missing, status, self.words)
            return await peers.channels()
        except BaseException:
            peers.hang_up()
            await listener.close()
            await self._end(0.0)
            raise

    async def _start(self, start: Start, listener: Listener, pythons: Sequence[str]) -> None:
        config = caller_config(
            listener.addresses, pythons, start.places, start.strip, CONNECT_S, names=start.names
        )
        env = {**os.environ, **start.env, caller.KEY: listener.key.hex()}
        self._process = await asyncio.create_subprocess_exec(
            *start.argv,
            *caller_command(config),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={name: value for name, value in env.items() if value is not None},
            start_new_session=True,  # Ctrl-C is for the launcher, which ends the job in order
        )
        assert self._process.stdout is not None
        self._readers = [asyncio.create_task(_read(self._process.stdout, self._words))]

    async def _wait(self, peers: Peers) -> None:
        """Until all have connected, or nobody else will."""
        assert self._process is not None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CONNECT_S
        while not peers.complete.is_set() and loop.time() < deadline:
            if self._process.returncode is not None or self._starter.hopeless(self.words):
                deadline = min(deadline, loop.time() + STRAGGLERS_S)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(peers.complete.wait(), LOOK_EVERY_S)

    @property
    def words(self) -> str:
        """What the scheduler's command wrote, the end of it."""
        return self._words.decode(errors="replace").strip()

    async def close(self, exit_code: int) -> None:
        """The agents have gone, so the scheduler's command ends by itself, or is ended."""
        if self._listener is not None:
            await self._listener.close()
        if self._peers is not None:
            self._peers.hang_up()
        await self._end(END_PATIENCE_S)
        self._starter.end()

    async def why(self, host: Host) -> str:
        """The scheduler's own word on a lost host."""
        return await self._why(host) if self._why else ""

    async def _end(self, patience_s: float) -> None:
        if self._process is None:
            return
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._process.wait(), patience_s or 0.01)
        await end_group(self._process)
        await asyncio.wait(self._readers, timeout=0.5)
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)


async def said_by(argv: Sequence[str], env: Mapping[str, str | None]) -> tuple[int | None, str]:
    """Exit status (``None`` when it took too long) and words of a command."""
    own: dict[str, str | None] = {**os.environ, **env}
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={name: value for name, value in own.items() if value is not None},
        start_new_session=True,
    )
    assert process.stdout is not None
    words = bytearray()
    try:
        await asyncio.wait_for(_read(process.stdout, words), PROBE_S)
        await asyncio.wait_for(process.wait(), PROBE_S)
    except asyncio.TimeoutError:
        words += f"\nOperation timed out: no end within {PROBE_S:.0f} s".encode()
    status = process.returncode
    await end_group(process)
    return status, words.decode(errors="replace").strip()


async def _read(stream: asyncio.StreamReader, words: bytearray) -> None:
    while data := await stream.read(1 << 16):
        words += data
        del words[:-WORDS_KEPT]


async def end_group(process: asyncio.subprocess.Process) -> None:
    """Ends a command that leads a process group: politely, then with all that it has started."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), TERM_PATIENCE_S)
    if process.returncode is None:  # so the group is still its own
        # macOS says "not permitted" of a group that has just ended
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    transport = getattr(process, "_transport", None)  # asyncio offers no other access
    if transport is not None:
        transport.close()  # what it has started may hold the pipes open
