"""Agents that a scheduler's commands start, and that connect back to the launcher."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.agent import caller
from paceline.remote import this_machine
from paceline.remote.channel import Channel
from paceline.remote.link import ended
from paceline.remote.transport import Reached, nobody
from paceline.rendezvous.endpoint import own_addresses
from paceline.rendezvous.listener import Connection, Listener, caller_command, caller_config
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
    """What differs between the schedulers; :class:`StartedTransport` does the rest.

    Attributes:
        apart: Each host has a command of its own from the beginning: one for all would be ended on
            all of them when one is lost.
    """

    apart: bool

    async def start(self, hosts: Sequence[Host]) -> Start:
        """How to start one process on each host, at the beginning or later, several at once.

        PacelineError when that cannot be.
        """

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

        Returns:
            A GoneError where it is no use to try once more in this run.
        """

    def end(self) -> None:
        """Gives up what :meth:`start` has made. Called once, at the end."""


class StartedTransport:
    """Has a scheduler start the agents, and takes their connections.

    Each :meth:`open` is a command of its own: one for all hosts at the beginning, or one for each,
    and later one for each host that was lost. Its agents say its number, so that nobody takes an
    agent of an earlier command, which was only cut off, for the one that was started in its place.

    Args:
        starter: The scheduler.
        interface: Interface on which agents connect; ``None`` for any address.
        why: What the scheduler knows of a host that was lost; ``None`` when nothing ever.
        dialects: Whose names for a rank's place its ranks find, too.
    """

    redials = True

    def __init__(self, starter: Starter, interface: str | None = None,
                 why: Callable[[Host], Awaitable[str]] | None = None,
                 dialects: tuple[str, ...] = ()) -> None:  # fmt: skip
        self._starter = starter
        self._interface = interface
        self._why = why
        self.dialects = dialects
        # to the end: who was cut off calls again, and who was lost is started again
        self._listener = Listener(secrets.token_bytes(32), self._take)
        self._opening = asyncio.Lock()
        self._numbers = itertools.count()
        self._commands: dict[int, _Command] = {}
        self._ends: set[asyncio.Task[None]] = set()  # of commands of which nobody is left

    async def open(self, hosts: Sequence[Host], pythons: Sequence[str],
                   reached: Reached = nobody) -> list[Channel]:  # fmt: skip
        """ConnectError names the hosts that did not connect, and what the scheduler said."""
        self._end_deserted()
        each = 1 if self._starter.apart else len(hosts)
        here: dict[int, int] = {}
        commands = [
            self._command(hosts[at : at + each], pythons[at : at + each], here, reached)
            for at in range(0, len(hosts), each)
        ]
        beginning = [asyncio.create_task(self._begin(command)) for command in commands]
        try:
            await asyncio.gather(*beginning)
            if missing := [host for command in commands for host in command.missing]:
                worst = next(command for command in commands if command.missing)
                status = worst.status
                await worst.end(0.0)  # so that all of its words are there
                raise await self._starter.explain(hosts, missing, status, worst.words)
            every = await asyncio.gather(*(command.connect() for command in commands))
            return [channel for channels in every for channel in channels]
        except BaseException:
            for task in beginning:
                task.cancel()
            await asyncio.gather(*beginning, return_exceptions=True)
            for command in commands:
                del self._commands[command.number]
                command.peers.hang_up()
            await asyncio.gather(*(command.end(0.0) for command in commands))
            raise

    def _command(self, hosts: Sequence[Host], pythons: Sequence[str], here: dict[int, int],
                 reached: Reached) -> _Command:  # fmt: skip
        """The next one, for these hosts; ``here`` has by its number how many of them have come."""
        number = next(self._numbers)

        def come(count: int) -> None:
            here[number] = count
            reached(sum(here.values()))

        command = _Command(number, hosts, pythons, come)
        self._commands[number] = command
        return command

    async def _begin(self, command: _Command) -> None:
        start = await self._starter.start(command.hosts)
        addresses = await self._listen(command.hosts)
        await command.begin(start, addresses, self._listener.key)
        await command.wait(self._starter.hopeless)

    async def _listen(self, hosts: Sequence[Host]) -> list[tuple[str, int]]:
        """Where agents on these hosts can call; more of our addresses than for earlier ones."""
        async with self._opening:
            wanted = own_addresses(self._interface, hosts)
            there = [address for address, _ in self._listener.addresses]
            if new := [address for address in wanted if address not in there]:
                await self._listener.open(new)
        return [one for one in self._listener.addresses if one[0] in wanted]

    def _take(self, connection: Connection) -> None:
        number = connection.about.get("start")
        command = self._commands.get(number) if isinstance(number, int) else None
        if command is None:
            connection.refuse("what has started this node was given up")
        else:
            command.peers.take(connection)

    def _end_deserted(self) -> None:
        """Ends commands all of whose agents were lost: an agent there is one that was cut off."""
        for command in [one for one in self._commands.values() if one.deserted]:
            del self._commands[command.number]
            command.peers.hang_up()
            ending = asyncio.create_task(command.end(0.0))
            self._ends.add(ending)
            ending.add_done_callback(self._ends.discard)

    async def close(self, exit_code: int) -> None:
        """The agents have gone, so the scheduler's commands end by themselves, or are ended."""
        await self._listener.close()
        for command in self._commands.values():
            command.peers.hang_up()
        ends = (command.end(END_PATIENCE_S) for command in self._commands.values())
        await asyncio.gather(*ends, *self._ends)
        self._starter.end()

    async def why(self, host: Host) -> str:
        """The scheduler's own word on a lost host, and the last of what had started its agent."""
        said = [await self._why(host)] if self._why else []
        started = [one for one in self._commands.values() if host in one.hosts]
        if started and started[-1].status is not None:
            said.append(started[-1].ending)
        return "; ".join(filter(None, said))


class _Command:
    """One command of the scheduler, and the agents that it has started.

    Args:
        number: Its own among those of the run; its agents say it.
        hosts: On which it starts agents.
        pythons: Of each of them.
        reached: Told how many of them are connected by now.

    Attributes:
        peers: Who called.
        channels: To its agents, once all are there.
    """

    def __init__(self, number: int, hosts: Sequence[Host], pythons: Sequence[str],
                 reached: Reached = nobody) -> None:  # fmt: skip
        self.number, self.hosts, self._pythons = number, hosts, pythons
        self.peers = Peers(KnownHosts(hosts), reached)
        self.channels: Sequence[Channel] = ()
        self._process: asyncio.subprocess.Process | None = None
        self._name, self._words = "", bytearray()
        self._reading: asyncio.Task[None] | None = None
        self._left: asyncio.Task[list[tuple[int, float]]] | None = None
        self._started: list[tuple[int, float]] = []

    async def begin(self, start: Start, addresses: Sequence[tuple[str, int]], key: bytes) -> None:
        """Starts it; ``addresses`` and ``key``: of the launcher, which its agents call."""
        config = caller_config(
            addresses, self._pythons, start.places, start.strip, CONNECT_S, {"start": self.number},
            start.names,
        )  # fmt: skip
        env = {**os.environ, **start.env, caller.KEY: key.hex()}
        self._name = Path(start.argv[0]).name
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
        self._reading = asyncio.create_task(_read(self._process.stdout, self._words))
        self._left = asyncio.create_task(left_by(self._process))

    async def wait(self, hopeless: Callable[[str], bool]) -> None:
        """Until all have connected, or nobody else will."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CONNECT_S
        while not self.peers.complete.is_set() and loop.time() < deadline:
            if self.status is not None or hopeless(self.words):
                deadline = min(deadline, loop.time() + STRAGGLERS_S)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.peers.complete.wait(), LOOK_EVERY_S)

    async def connect(self) -> Sequence[Channel]:
        """Its agents' channels, once all have called."""
        self.channels = await self.peers.channels()
        if self._process is not None:
            # Open MPI's ssh has a session of its own, and where its host loses power it stays
            # behind, with the command's pipes: later nothing leads from the command to it.
            pid = self._process.pid
            self._started = await asyncio.to_thread(this_machine.started_by, pid)
        return self.channels

    @property
    def missing(self) -> list[Host]:
        """Of its hosts those whose agents have not called."""
        return [self.hosts[place] for place in self.peers.missing()]

    @property
    def status(self) -> int | None:
        """Its exit status; ``None`` while it runs."""
        return self._process.returncode if self._process is not None else None

    @property
    def words(self) -> str:
        """What it wrote, the end of it."""
        return self._words.decode(errors="replace").strip()

    @property
    def ending(self) -> str:
        """How it ended, for people: its status, and the last line of what it wrote."""
        assert self._process is not None
        last = self.words.splitlines()[-1:]
        status = f"{self._name} ended with status {self.status}"
        return ": ".join([status, *last])

    @property
    def deserted(self) -> bool:
        """Whether all its agents were there, and were lost."""
        return bool(self.channels) and all(one.lost.is_set() for one in self.channels)

    async def end(self, patience_s: float) -> None:
        """Ends it, unless it does so by itself within so many seconds."""
        if self._process is None or self._reading is None or self._left is None:
            return
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ended(self._process), patience_s or 0.01)
        await end_group(self._process)
        for pid, began in (*await self._left, *self._started):
            this_machine.send(pid, began, signal.SIGKILL)
        await asyncio.wait([self._reading], timeout=0.5)
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


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
        await asyncio.wait_for(ended(process), PROBE_S)
    except asyncio.TimeoutError:
        words += f"\nOperation timed out: no end within {PROBE_S:.0f} s".encode()
    status = process.returncode
    await end_group(process)
    return status, words.decode(errors="replace").strip()


async def _read(stream: asyncio.StreamReader, words: bytearray) -> None:
    while data := await stream.read(1 << 16):
        words += data
        del words[:-WORDS_KEPT]


async def left_by(process: asyncio.subprocess.Process) -> list[tuple[int, float]]:
    """What a command that leads a session has left running when it ends by itself.

    As hydra, which ends with the agents that it can still reach, leaves its ssh to a host without
    power: that waits there for ever. At that moment, for its number may be another's later.
    """
    await ended(process)
    return await asyncio.to_thread(this_machine.started_by, process.pid)


async def end_group(process: asyncio.subprocess.Process) -> None:
    """Ends a command that leads a session: politely, then with all that it has started."""
    left: list[tuple[int, float]] = []
    if process.returncode is None:
        left = await asyncio.to_thread(this_machine.started_by, process.pid)
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ended(process), TERM_PATIENCE_S)
    if process.returncode is None:  # so the group is still its own
        # macOS says "not permitted" of a group that has just ended
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await ended(process)
    for pid, began in left:  # as an ssh to a host without power, which would wait there for ever
        this_machine.send(pid, began, signal.SIGKILL)
    transport = getattr(process, "_transport", None)  # asyncio offers no other access
    if transport is not None:
        transport.close()  # what it has started may hold the pipes open
