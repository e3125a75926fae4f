"""Starts agents with a scheduler's commands and accepts their connections."""

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
from paceline.remote.link import spawn, wait_for_exit
from paceline.remote.transport import ConnectedCallback, ignore_count
from paceline.rendezvous.endpoint import local_addresses
from paceline.rendezvous.listener import Connection, Listener, caller_command, caller_config
from paceline.rendezvous.peers import HostAdmission, Peers
from paceline.spec.errors import PacelineError
from paceline.spec.hosts import Host

MAX_OUTPUT_BYTES = 16 * 1024
CONNECT_S = 60.0  # until all agents have connected
END_TIMEOUT_S = 5.0
TERM_TIMEOUT_S = 3.0
PROBE_S = 8.0
POLL_S = 0.25
CONNECT_GRACE_S = 2.0  # for agents that still connect when the scheduler gives up


@dataclass(frozen=True, slots=True)
class Start:
    """A scheduler's command that starts one process on each host.

    Attributes:
        argv: The scheduler's command; the node's command is appended to it.
        env: Variables on top of the launcher's; ``None`` removes one.
        places: Variables with the started process's rank among the hosts.
        strip: Regular expression of variables that the agents must not inherit: their ranks would
            join the scheduler's job.
        names: Variables with the scheduler's name for the node.
        key_file: File for the key, which processes on this machine read; the command gives the key
            to the others as :data:`caller.KEY_VARIABLE`. If empty, its environment has the key.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str | None]
    places: tuple[str, ...]
    strip: str
    names: tuple[str, ...] = ()
    key_file: str = ""


class Starter(Protocol):
    """The scheduler-specific part of :class:`ScheduledTransport`.

    Attributes:
        starts_each_host: Each host gets its own command: a common one would end on all hosts when
            one is lost.
    """

    starts_each_host: bool

    async def start(self, hosts: Sequence[Host]) -> Start:
        """The command for these hosts; may be called concurrently. Raises PacelineError."""

    def hopeless(self, output: str) -> bool:
        """Whether the scheduler's output shows that it will not start all hosts."""

    async def explain(self, hosts: Sequence[Host], missing: Sequence[Host], status: int | None,
                      output: str) -> PacelineError:  # fmt: skip
        """The error for hosts that did not connect.

        Args:
            hosts: All hosts.
            missing: The hosts that did not connect.
            status: Exit status of the scheduler's command, ``None`` while it runs.
            output: The end of its output.

        Returns:
            A PermanentConnectError if another attempt in this run is useless.
        """

    def end(self) -> None:
        """Releases what :meth:`start` has allocated. Called once, at the end."""


class ScheduledTransport:
    """Starts agents with a scheduler and accepts their connections.

    It starts one command for all hosts, or one for each, and later one for each lost host. Agents
    send the number of their command, so that a disconnected agent of an earlier command is not
    taken for its replacement.

    Args:
        starter: The scheduler.
        interface: Interface on which agents connect; ``None`` for any address.
        loss_reason: Asks the scheduler why a host was lost, if it can know.
        dialects: Dialects of rank variables that its ranks get, too.
    """

    redials = True

    def __init__(self, starter: Starter, interface: str | None = None,
                 loss_reason: Callable[[Host], Awaitable[str]] | None = None,
                 dialects: tuple[str, ...] = ()) -> None:  # fmt: skip
        self._starter = starter
        self._interface = interface
        self._loss_reason = loss_reason
        self.dialects = dialects
        # open until the end, for reconnections and replacements
        self._listener = Listener(secrets.token_bytes(32), self._on_connection)
        self._opening = asyncio.Lock()
        self._numbers = itertools.count()
        self._commands: dict[int, _Command] = {}
        self._endings: set[asyncio.Task[None]] = set()  # of commands without agents

    async def open(self, hosts: Sequence[Host], pythons: Sequence[str],
                   on_connected: ConnectedCallback = ignore_count) -> list[Channel]:  # fmt: skip
        """Raises ConnectError with the missing hosts and the scheduler's output."""
        self._end_deserted()
        step = 1 if self._starter.starts_each_host else len(hosts)
        num_connected: dict[int, int] = {}
        commands = [
            self._command(hosts[i : i + step], pythons[i : i + step], num_connected, on_connected)
            for i in range(0, len(hosts), step)
        ]
        starts = [asyncio.create_task(self._start(command)) for command in commands]
        try:
            await asyncio.gather(*starts)
            if missing := [host for command in commands for host in command.missing]:
                failed = next(command for command in commands if command.missing)
                status = failed.status
                await failed.end(0.0)  # so that its output is complete
                raise await self._starter.explain(hosts, missing, status, failed.output)
            channels = await asyncio.gather(*(command.connect() for command in commands))
            return [*itertools.chain.from_iterable(channels)]
        except BaseException:
            for task in starts:
                task.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            for command in commands:
                del self._commands[command.number]
                command.peers.hang_up()
            await asyncio.gather(*(command.end(0.0) for command in commands))
            raise

    def _command(self, hosts: Sequence[Host], pythons: Sequence[str], num_connected: dict[int, int],
                 on_connected: ConnectedCallback) -> _Command:  # fmt: skip
        """A new command for these hosts; ``num_connected`` counts its hosts by its number."""
        number = next(self._numbers)

        def count_connected(count: int) -> None:
            num_connected[number] = count
            on_connected(sum(num_connected.values()))

        command = _Command(number, hosts, pythons, count_connected)
        self._commands[number] = command
        return command

    async def _start(self, command: _Command) -> None:
        start = await self._starter.start(command.hosts)
        addresses = await self._listen(command.hosts)
        await command.start(start, addresses, self._listener)
        await command.wait(self._starter.hopeless)

    async def _listen(self, hosts: Sequence[Host]) -> list[tuple[str, int]]:
        """Listens for agents on these hosts, on further addresses if necessary."""
        async with self._opening:
            needed = local_addresses(self._interface, hosts)
            open_addresses = [address for address, _ in self._listener.addresses]
            if missing := [address for address in needed if address not in open_addresses]:
                await self._listener.open(missing)
        return [entry for entry in self._listener.addresses if entry[0] in needed]

    def _on_connection(self, connection: Connection) -> None:
        number = connection.info.get("start")
        command = self._commands.get(number) if isinstance(number, int) else None
        if command is None:
            connection.reject("what has started this node was given up")
        else:
            command.peers.admit(connection)

    def _end_deserted(self) -> None:
        """Ends commands whose agents were all lost."""
        for command in [command for command in self._commands.values() if command.deserted]:
            del self._commands[command.number]
            command.peers.hang_up()
            ending = asyncio.create_task(command.end(0.0))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    async def close(self, exit_code: int) -> None:
        """Ends the scheduler's commands, unless they end with their agents."""
        await self._listener.close()
        for command in self._commands.values():
            command.peers.hang_up()
        endings = (command.end(END_TIMEOUT_S) for command in self._commands.values())
        await asyncio.gather(*endings, *self._endings)
        self._starter.end()

    async def loss_reason(self, host: Host) -> str:
        """The scheduler's reason for a lost host, and how the host's last command ended."""
        reasons = [await self._loss_reason(host)] if self._loss_reason else []
        commands = [command for command in self._commands.values() if host in command.hosts]
        if commands and commands[-1].status is not None:
            reasons.append(commands[-1].ending)
        return "; ".join(filter(None, reasons))


class _Command:
    """A command of the scheduler and its agents.

    Args:
        number: Number within the run, which its agents send.
        hosts, pythons: Hosts on which it starts agents, and their interpreters.
        on_connected: Called with the number of connected hosts.

    Attributes:
        peers: The connected nodes.
        channels: Channels to its agents, once all have connected.
    """

    def __init__(self, number: int, hosts: Sequence[Host], pythons: Sequence[str],
                 on_connected: ConnectedCallback = ignore_count) -> None:  # fmt: skip
        self.number, self.hosts, self._pythons = number, hosts, pythons
        self.peers = Peers(HostAdmission(hosts), on_connected)
        self.channels: Sequence[Channel] = ()
        self._process: asyncio.subprocess.Process | None = None
        self._name, self._output = "", bytearray()
        self._reading: asyncio.Task[None] | None = None
        self._leftovers: asyncio.Task[list[tuple[int, float]]] | None = None
        self._processes: list[tuple[int, float]] = []

    async def start(
        self, start: Start, addresses: Sequence[tuple[str, int]], listener: Listener
    ) -> None:
        """Starts the command; agents connect to ``addresses`` of the launcher's listener."""
        config = caller_config(
            addresses, listener.certificate, self._pythons, start.places, start.strip, CONNECT_S,
            {"start": self.number}, start.names, key_file=start.key_file,
        )  # fmt: skip
        key = listener.key
        env = {**start.env, caller.KEY_VARIABLE: None if start.key_file else key.hex()}
        if start.key_file:
            Path(start.key_file).touch(mode=0o600)
            Path(start.key_file).write_text(f"{key.hex()}\n", encoding="ascii")
        self._name = Path(start.argv[0]).name
        argv = [*start.argv, *caller_command(config)]
        self._process = await _spawn(argv, env)
        assert self._process.stdout is not None
        self._reading = asyncio.create_task(_read(self._process.stdout, self._output))
        self._leftovers = asyncio.create_task(leftover_processes(self._process))

    async def wait(self, hopeless: Callable[[str], bool]) -> None:
        """Waits until all agents have connected, or no more will."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CONNECT_S
        while not self.peers.complete.is_set() and loop.time() < deadline:
            if self.status is not None or hopeless(self.output):
                deadline = min(deadline, loop.time() + CONNECT_GRACE_S)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.peers.complete.wait(), POLL_S)

    async def connect(self) -> Sequence[Channel]:
        """Opens the channels to its agents."""
        self.channels = await self.peers.channels()
        if self._process is not None:
            # Open MPI's ssh is in another session, and if its host loses power it outlives the
            # command and keeps its pipes; it can only be found now
            pid = self._process.pid
            self._processes = await asyncio.to_thread(this_machine.session_processes, pid)
        return self.channels

    @property
    def missing(self) -> list[Host]:
        """The hosts whose agents have not connected."""
        return [self.hosts[place] for place in self.peers.missing()]

    @property
    def status(self) -> int | None:
        """Its exit status; ``None`` while it runs."""
        return self._process.returncode if self._process is not None else None

    @property
    def output(self) -> str:
        """The end of its output."""
        return self._output.decode(errors="replace").strip()

    @property
    def ending(self) -> str:
        """How it ended, for people: its exit status and the last line of its output."""
        assert self._process is not None
        last_line = self.output.splitlines()[-1:]
        status = f"{self._name} ended with status {self.status}"
        return ": ".join([status, *last_line])

    @property
    def deserted(self) -> bool:
        """Whether all its agents were connected and are lost."""
        return bool(self.channels) and all(channel.lost.is_set() for channel in self.channels)

    async def end(self, timeout_s: float) -> None:
        """Waits for its end, then ends it and its processes."""
        if self._process is None or self._reading is None or self._leftovers is None:
            return
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(wait_for_exit(self._process), timeout_s or 0.01)
        await end_group(self._process)
        for pid, start in (*await self._leftovers, *self._processes):
            this_machine.signal_process(pid, start, signal.SIGKILL)
        await asyncio.wait([self._reading], timeout=0.5)
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


async def run_command(argv: Sequence[str], env: Mapping[str, str | None]) -> tuple[int | None, str]:
    """Runs a command; returns its exit status (``None`` after a time-out) and output."""
    process = await _spawn(argv, env)
    assert process.stdout is not None
    output = bytearray()
    try:
        await asyncio.wait_for(_read(process.stdout, output), PROBE_S)
        await asyncio.wait_for(wait_for_exit(process), PROBE_S)
    except asyncio.TimeoutError:
        output += f"\nOperation timed out: no end within {PROBE_S:.0f} s".encode()
    status = process.returncode
    await end_group(process)
    return status, output.decode(errors="replace").strip()


async def _spawn(argv: Sequence[str], env: Mapping[str, str | None]) -> asyncio.subprocess.Process:
    """Starts a command with these variables on top of the launcher's; ``None`` removes one."""
    merged: dict[str, str | None] = {**os.environ, **env}
    return await spawn(
        argv, stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.STDOUT,
        env={name: value for name, value in merged.items() if value is not None},
    )  # fmt: skip


async def _read(stream: asyncio.StreamReader, output: bytearray) -> None:
    while data := await stream.read(1 << 16):
        output += data
        del output[:-MAX_OUTPUT_BYTES]


async def leftover_processes(process: asyncio.subprocess.Process) -> list[tuple[int, float]]:
    """The processes of a command's session that still run when it ends by itself.

    For example, hydra leaves its ssh to a host without power, which would wait forever. They are
    listed at once, because process ids are reused.
    """
    await wait_for_exit(process)
    return await asyncio.to_thread(this_machine.session_processes, process.pid)


async def end_group(process: asyncio.subprocess.Process) -> None:
    """Terminates a command that leads a session, then kills all processes of the session."""
    processes: list[tuple[int, float]] = []
    if process.returncode is None:
        processes = await asyncio.to_thread(this_machine.session_processes, process.pid)
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(wait_for_exit(process), TERM_TIMEOUT_S)
    if process.returncode is None:  # so the process group still exists
        # macOS raises "not permitted" for a group that has just ended
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await wait_for_exit(process)
    for pid, start in processes:  # such as an ssh to a host without power
        this_machine.signal_process(pid, start, signal.SIGKILL)
    transport = getattr(process, "_transport", None)  # asyncio offers no other access
    if transport is not None:
        transport.close()  # its children may hold the pipes open
