"""Transports whose agents call back: what MPI and Slurm have in common."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from paceline.agent import caller
from paceline.remote import this_machine
from paceline.remote.channel import Channel, LoginRefused
from paceline.remote.openssh import SshOptions
from paceline.remote.transport import Reached, nobody
from paceline.rendezvous.callback import (
    Call,
    CallLink,
    Switchboard,
    caller_command,
    caller_config,
)
from paceline.schedulers.options import Options
from paceline.setup.ssh import effective
from paceline.spec.errors import ConnectError, PacelineError, SettingError
from paceline.spec.hosts import Host

WORDS_KEPT = 16 * 1024
END_PATIENCE_S = 5.0
TERM_PATIENCE_S = 3.0
LOOK_EVERY_S = 0.25
ROUTES_LOOKED_AT = 8  # hosts: the others are reached the same way
STRAGGLERS_S = 2.0  # for those whose call is on its way when the scheduler gives up


@dataclass(frozen=True, slots=True)
class Start:
    """How a scheduler starts one process on each host.

    Attributes:
        argv: The scheduler's command; the node's command is appended to it.
        env: Variables on top of the launcher's; ``None`` removes one.
        places: Variables by which a started process knows its place among the hosts.
        strip: Regular expression of variables that the agents must not inherit: ranks would
            take themselves for ranks of the scheduler's job.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str | None]
    places: tuple[str, ...]
    strip: str


class Scheduler(Protocol):
    """What differs between the schedulers; :class:`CallingTransport` does the rest."""

    async def start(self, hosts: Sequence[Host]) -> Start:
        """How to start one process on each host. PacelineError when that cannot be."""

    async def explain(self, hosts: Sequence[Host], missing: Sequence[Host], status: int | None,
                      words: str) -> PacelineError:  # fmt: skip
        """The error for hosts that did not call.

        Args:
            hosts: All of them.
            missing: Those that did not call.
            status: Exit status of the scheduler's command, ``None`` while it runs.
            words: What it wrote, the end of it.
        """

    def hopeless(self, words: str) -> bool:
        """Whether the scheduler's words so far mean that it will not start all hosts."""

    async def tell_of(self, host: Host) -> str:
        """What the scheduler knows of a host that was lost; empty when nothing."""

    def end(self) -> None:
        """Gives up what :meth:`start` has made. Called once, at the end."""


@dataclass
class Gathering:
    """Puts calls in their places until every host has both of its streams."""

    hosts: Sequence[Host]
    reached: Reached = nobody
    done: asyncio.Event = field(default_factory=asyncio.Event)
    _frames: dict[int, Call] = field(default_factory=dict)
    _errors: dict[int, Call] = field(default_factory=dict)

    def take(self, call: Call) -> None:
        """Accepts a call or refuses it."""
        place = self._place(call)
        stream = self._frames if call.about.get("stream") == "frames" else self._errors
        if place is None or not 0 <= place < len(self.hosts):
            call.refuse(f"place {place} among {len(self.hosts)} nodes cannot be")
        elif place in stream:
            call.refuse(f"two processes were started as node {place}: one a node is needed")
        elif stream is self._errors and not self._pairs(place, call):
            call.refuse("no first connection belongs to this one")
        else:
            stream[place] = call
            call.accept()
            self.reached(len(self._errors))
            self._check_done()

    def _place(self, call: Call) -> int | None:
        """By the scheduler's name for the node, else by the place that it was given."""
        node = call.about.get("node")
        for at, host in enumerate(self.hosts):
            if node and node in (host.name, host.address):
                return at
        place = call.about.get("index")
        return place if isinstance(place, int) else None

    def _pairs(self, place: int, call: Call) -> bool:
        first = self._frames.get(place)
        return first is not None and first.about.get("session") == call.about.get("session")

    def _check_done(self) -> None:
        if len(self._errors) == len(self.hosts):
            self.done.set()

    def missing(self) -> list[Host]:
        return [host for at, host in enumerate(self.hosts) if at not in self._errors]

    def channels(self) -> list[Channel]:
        """One channel a host, not opened yet. Only when nobody is missing."""
        return [
            Channel(host, CallLink(self._frames[at], self._errors[at]))
            for at, host in enumerate(self.hosts)
        ]

    def names(self) -> list[str]:
        """What the callers say they are called, in the order of their places."""
        return [str(self._frames[at].about.get("name")) for at in sorted(self._frames)]

    def hang_up(self) -> None:
        for call in [*self._frames.values(), *self._errors.values()]:
            call.writer.close()


class CallingTransport:
    """Has a scheduler start the agents, and takes their calls.

    Args:
        scheduler: The scheduler.
        options: For the interface to listen on and the time to wait.
    """

    redials = False  # the scheduler starts all agents at once

    def __init__(self, scheduler: Scheduler, options: Options) -> None:
        self._scheduler = scheduler
        self._options = options
        self._process: asyncio.subprocess.Process | None = None
        self._words = bytearray()
        self._readers: list[asyncio.Task[None]] = []

    async def open(self, hosts: Sequence[Host], pythons: Sequence[str],
                   reached: Reached = nobody) -> list[Channel]:  # fmt: skip
        """ConnectError names the hosts that did not call, and what the scheduler said."""
        gathering = Gathering(hosts, reached)
        board = Switchboard(secrets.token_bytes(32), gathering.take)
        try:
            start = await self._scheduler.start(hosts)
            await board.open(own_addresses(self._options.interface, hosts))
            await self._start(start, board, pythons)
            await self._wait(gathering)
            if missing := gathering.missing():
                raise await self._failed(hosts, missing)
            return await open_channels(gathering.channels())
        except BaseException:
            gathering.hang_up()
            await self._end(0.0)
            raise
        finally:
            await board.close()

    async def _start(self, start: Start, board: Switchboard, pythons: Sequence[str]) -> None:
        config = caller_config(
            board.addresses, pythons, start.places, start.strip, self._options.connect_s
        )
        env = {**os.environ, **start.env, caller.KEY: board.key.hex()}
        self._process = await asyncio.create_subprocess_exec(
            *start.argv,
            *caller_command(config),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={name: value for name, value in env.items() if value is not None},
            start_new_session=True,  # Ctrl-C is for the launcher, which ends the job in order
        )
        self._readers = [asyncio.create_task(self._read_words())]

    async def _read_words(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        while data := await self._process.stdout.read(1 << 16):
            self._words += data
            del self._words[:-WORDS_KEPT]

    async def _wait(self, gathering: Gathering) -> None:
        """Until all have called, or nobody else will."""
        assert self._process is not None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._options.connect_s
        while not gathering.done.is_set() and loop.time() < deadline:
            if self._process.returncode is not None or self._scheduler.hopeless(self.words):
                deadline = min(deadline, loop.time() + STRAGGLERS_S)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(gathering.done.wait(), LOOK_EVERY_S)

    async def _failed(self, hosts: Sequence[Host], missing: Sequence[Host]) -> PacelineError:
        assert self._process is not None
        status = self._process.returncode
        await self._end(0.0)
        return await self._scheduler.explain(hosts, missing, status, self.words)

    @property
    def words(self) -> str:
        """What the scheduler's command wrote, the end of it."""
        return self._words.decode(errors="replace").strip()

    async def close(self, exit_code: int) -> None:
        """The agents have gone, so the scheduler's command ends by itself, or is ended."""
        await self._end(END_PATIENCE_S)
        self._scheduler.end()

    async def tell_of(self, host: Host) -> str:
        """The scheduler's own word on a lost host."""
        return await self._scheduler.tell_of(host)

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
    transport = getattr(process, "_transport", None)  # asyncio offers no other way
    if transport is not None:
        transport.close()  # what it has started may hold the pipes open


async def open_channels(channels: Sequence[Channel]) -> list[Channel]:
    """Makes agents of them all; ConnectError names those that do not become one."""
    results = await asyncio.gather(
        *(channel.open() for channel in channels), return_exceptions=True
    )
    refused = [result for result in results if isinstance(result, LoginRefused)]
    others = [
        r for r in results if isinstance(r, BaseException) and not isinstance(r, LoginRefused)
    ]
    if refused or others:
        await asyncio.gather(*(channel.close() for channel in channels))
    if others:
        raise others[0]
    if refused:
        raise ConnectError(
            f"no agent on {', '.join(one.host.name for one in refused)}",
            found="\n".join(f"{one.host.name}: {one.refusal.found}" for one in refused),
            remedy="\n".join(f"{one.host.name}: {one.refusal.remedy}" for one in refused),
        )
    return list(channels)


def own_addresses(interface: str | None, hosts: Sequence[Host]) -> list[str]:
    """Where agents can call this machine: loopback when they are all here.

    Raises:
        SettingError: The interface that was asked for has no usable address.
    """
    if all(host.local for host in hosts) and interface is None:
        return ["127.0.0.1"]
    found = usable_addresses()
    wanted = [a for a in found if interface is None or a["interface"] == interface]
    if not wanted:
        listed = ", ".join(f"{a['interface']} {a['address']}" for a in found)
        raise SettingError(
            f"interface {interface} was asked for, but this machine has no usable address on it"
            if interface
            else "this machine has no address that other hosts could call",
            found=listed or "loopback only",
            remedy="--iface NAME with one of these" if listed else "Bring up a network interface",
        )
    return [str(a["address"]) for a in wanted]


async def interface_towards(hosts: Sequence[Host], ssh: SshOptions) -> str | None:
    """The interface of this machine from which the hosts are reached.

    For programs that otherwise tell the hosts to call back by this machine's name, which perhaps
    nobody can resolve. ``None`` when no route can be found.
    """
    others = [host for host in hosts if not host.local][:ROUTES_LOOKED_AT]
    if not others:
        return "lo" if Path("/sys/class/net/lo").is_dir() else None
    names = await asyncio.gather(*(effective(host, ssh) for host in others))
    targets = [name.get("hostname", [host.address])[0] for name, host in zip(names, others,
               strict=True)]  # fmt: skip
    sources = await asyncio.gather(*(asyncio.to_thread(source_towards, one) for one in targets))
    by_address = {str(entry["address"]): str(entry["interface"]) for entry in usable_addresses()}
    used = Counter(by_address[source] for source in sources if source in by_address)
    return used.most_common(1)[0][0] if used else None


def source_towards(target: str) -> str | None:
    """The address of this machine from which the kernel would send to another. Sends nothing."""
    try:
        kind, _, _, _, where = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as way:
            way.connect(where)
            return str(way.getsockname()[0])
    except OSError:
        return None


def usable_addresses() -> list[dict[str, Any]]:
    """Addresses of this machine that others may reach."""
    return [
        entry
        for entry in this_machine.addresses()
        if entry["scope"] == "global" and entry["usable"] and entry["interface"] != "lo"
    ]
