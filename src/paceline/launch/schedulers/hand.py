"""The same command typed on each node: they meet at an address, the first of them launches.

The node that has the address listens there and is the launcher; the others call it, prove that
they know the meeting's word, and become its agents.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.agent.caller import mac
from paceline.cluster.callback import Call, CallLink, Switchboard
from paceline.cluster.channel import Channel, connect
from paceline.cluster.openssh import SshOptions
from paceline.launch.schedulers.calling import open_channels, usable_addresses
from paceline.launch.showing import entry_argv
from paceline.launch.transport import Reached, nobody
from paceline.spec.command import shell_text
from paceline.spec.errors import ConnectError, SettingError
from paceline.spec.hosts import Host
from paceline.spec.job import Job

DEFAULT_PORT = 29400
NOTE_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where and with whom.

    Attributes:
        host, port: The address.
        word: The shared secret.
        made_up: The word is ours and has to be told to the other nodes.
        nodes: How many nodes meet.
        place: This node's place, ``None`` for the order of arrival.
        first: This node launches.
        patience_s: How long to wait for the others.
    """

    host: str
    port: int
    word: str
    made_up: bool
    nodes: int
    place: int | None
    first: bool
    patience_s: float

    @property
    def key(self) -> bytes:
        """The word as a key."""
        return hashlib.sha256(b"paceline-meeting\0" + self.word.encode()).digest()


def meeting(address: str, word: str | None, place: int | None, nodes: int | None,
            patience_s: float) -> Meeting:  # fmt: skip
    """What the options mean on this machine. SettingError when something is missing."""
    if not nodes:
        raise SettingError("--rdzv needs the number of nodes", remedy="--nnodes N")
    if place is not None and place >= nodes:
        raise SettingError(
            f"--node-rank {place} cannot be among {nodes} nodes", remedy=f"0 to {nodes - 1}"
        )
    host, port = parse_address(address)
    first = place == 0 if place is not None else is_mine(host)
    if word is None and not first:
        raise SettingError(
            "--rdzv needs the meeting's word on this node",
            remedy="--rdzv-id WORD as on the first node (it prints one when you give none), or "
            "export PACELINE_RDZV_ID=WORD",
        )
    known = word or secrets.token_hex(8)
    return Meeting(host, port, known, word is None, nodes, place, first, patience_s)


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``, ``HOST`` or ``[IPV6]:PORT``."""
    host, colon, port = text.rpartition(":")
    if not colon or (host.count(":") and not host.startswith("[")):
        host, port = text, str(DEFAULT_PORT)
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingError(f"--rdzv {text} is no address", remedy="--rdzv HOST:PORT")
    return host, int(port)


def is_mine(host: str) -> bool:
    """Whether an address or name is this machine."""
    name = socket.gethostname()
    if host in {name, name.split(".")[0], "localhost", "127.0.0.1", "::1"}:
        return True
    mine = {str(entry["address"]) for entry in usable_addresses()}
    return bool(mine & set(addresses_of(host)))


def addresses_of(host: str) -> list[str]:
    """What a name resolves to, without loopback where there is anything else."""
    try:
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except OSError:
        return []
    every = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    return [a for a in every if not ipaddress.ip_address(a.split("%")[0]).is_loopback] or every


def listening_addresses(meeting: Meeting) -> list[str]:
    """Where the first node listens: on the meeting's address and on nothing else.

    A Debian machine resolves its own name to 127.0.1.1, where nobody else can call: then on
    every address of its own.
    """
    mine = {str(entry["address"]) for entry in usable_addresses()}
    named = [a for a in addresses_of(meeting.host) if a in mine]
    if named or meeting.host in ("localhost", "127.0.0.1", "::1"):
        return named or addresses_of(meeting.host)
    return sorted(mine) or ["127.0.0.1"]


@dataclass
class Guest:
    """A node that came to the meeting."""

    host: Host
    frames: Call
    errors: Call | None = None


class Guests:
    """Gives places to those who come. Pure but for answering them.

    Args:
        nodes: How many are expected, the first node among them.
        command: Hash of what the first node was told to run; the others must agree.
        on_change: Called when somebody has come.
    """

    def __init__(self, nodes: int, command: str, on_change: Callable[[], None]) -> None:
        self._nodes = nodes
        self._command = command
        self._on_change = on_change
        self.by_place: dict[int, Guest] = {}
        self.waiting: list[Call] = []  # they want to hear how the job ends

    def take(self, call: Call) -> None:
        """Accepts or refuses a call, by its stream."""
        stream = call.about.get("stream")
        if stream == "status":
            self._listener(call)
        elif stream == "errors":
            self._second(call)
        else:
            self._first(call)

    def _listener(self, call: Call) -> None:
        if problem := self._problem(call.about):
            call.refuse(problem)
            return
        call.accept()
        self.waiting.append(call)

    def _first(self, call: Call) -> None:
        problem = self._problem(call.about)
        if problem:
            call.refuse(problem)
            return
        place = self._free_place(call.about.get("place"))
        if place is None:
            call.refuse(self._no_place(call.about.get("place")))
            return
        self.by_place[place] = Guest(self._host(call, place), call)
        call.accept()

    def _problem(self, about: Mapping[str, Any]) -> str:
        if about.get("nodes") != self._nodes:
            return f"the first node waits for {self._nodes} nodes, this one for {about['nodes']}"
        if about.get("command") != self._command:
            return "this node was given another script or other arguments than the first node"
        return ""

    def _free_place(self, asked: int | None) -> int | None:
        free = [place for place in range(1, self._nodes) if place not in self.by_place]
        if asked is None:
            return free[0] if free else None
        return asked if asked in free else None

    def _no_place(self, asked: int | None) -> str:
        if asked is None or asked not in self.by_place:
            return f"all {self._nodes} nodes are here already"
        return f"there is a node with --node-rank {asked} already: {self.by_place[asked].host.name}"

    def _host(self, call: Call, place: int) -> Host:
        name = str(call.about.get("name") or f"node{place}")
        taken = {guest.host.name for guest in self.by_place.values()} | {socket.gethostname()}
        unique = name if name not in taken else f"{name}-{place}"
        folder = call.about.get("workdir")
        other = None if folder == str(Path.cwd()) else folder
        return Host(unique, call.peer, python=call.about.get("python"), workdir=other)

    def _second(self, call: Call) -> None:
        session = call.about.get("session")
        for guest in self.by_place.values():
            if guest.frames.about.get("session") == session and guest.errors is None:
                guest.errors = call
                call.accept()
                self._on_change()
                return
        call.refuse("no first connection belongs to this one")

    @property
    def complete(self) -> bool:
        here = [guest for guest in self.by_place.values() if guest.errors is not None]
        return len(here) == self._nodes - 1

    def missing(self) -> list[int]:
        return [place for place in range(1, self._nodes) if place not in self.by_place]

    def channels(self) -> list[Channel]:
        """In the order of their places."""
        return [
            Channel(guest.host, CallLink(guest.frames, guest.errors))
            for _, guest in sorted(self.by_place.items())
            if guest.errors is not None
        ]

    def hang_up(self) -> None:
        for guest in self.by_place.values():
            guest.frames.writer.close()
            if guest.errors is not None:
                guest.errors.writer.close()

    def dismiss(self, exit_code: int) -> None:
        """Tells those who wait how the job ended."""
        for call in self.waiting:
            call.tell(exit_code=exit_code)
            call.writer.close()


class HandTransport:
    """The first node: listens, waits for the others, launches."""

    redials = False

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._command = ""
        self._board: Switchboard | None = None
        self._guests: Guests | None = None

    def agree_on(self, job: Job) -> None:
        """Nodes that were given something else to run will be refused."""
        self._command = command_hash(self._meeting.word, job)

    async def open(self, hosts: Sequence[Host], pythons: Sequence[str],
                   reached: Reached = nobody) -> list[Channel]:  # fmt: skip
        """Waits for all nodes. ConnectError when they do not come in time."""
        changed = asyncio.Event()
        guests = self._guests = Guests(self._meeting.nodes, self._command, changed.set)
        self._board = Switchboard(self._meeting.key, guests.take)
        await self._listen(self._board)
        own: Channel | None = None
        try:
            own = await connect(own_host(), pythons[0], SshOptions())
            await self._wait(guests, changed)
            return [own, *await open_channels(guests.channels())]
        except BaseException:
            guests.hang_up()
            if own is not None:
                await own.close()
            raise

    async def _listen(self, board: Switchboard) -> None:
        port = self._meeting.port
        try:
            await board.open(listening_addresses(self._meeting), port)
        except OSError as error:
            raise SettingError(
                f"the nodes cannot meet at {self._meeting.host} port {port}",
                found=str(error.strerror or error),
                remedy="Another port in --rdzv, the same on each node",
                exit_code=1,
            ) from None
        self._announce()

    def _announce(self) -> None:
        meeting = self._meeting
        _say(f"waiting for {meeting.nodes - 1} more of {meeting.nodes} nodes at "
             f"{meeting.host}:{meeting.port}")  # fmt: skip
        if meeting.made_up:
            more = ["--rdzv", f"{meeting.host}:{meeting.port}", "--rdzv-id", meeting.word]
            _say(f"on the other nodes add: {shell_text(more)}")

    async def _wait(self, guests: Guests, changed: asyncio.Event) -> None:
        deadline = asyncio.get_running_loop().time() + self._meeting.patience_s
        while not guests.complete:
            left = deadline - asyncio.get_running_loop().time()
            changed.clear()
            try:
                await asyncio.wait_for(changed.wait(), max(left, 0.01))
            except asyncio.TimeoutError:
                raise self._nobody_came(guests) from None

    def _nobody_came(self, guests: Guests) -> ConnectError:
        assert self._board is not None
        here = [guest.host.name for guest in guests.by_place.values()]
        strangers = sorted(set(self._board.strangers))
        found = [f"here: {', '.join([socket.gethostname(), *here])}"]
        if strangers:
            found.append(f"with another --rdzv-id: {', '.join(strangers)}")
        missing = ", ".join(map(str, guests.missing()))
        meeting = self._meeting
        return ConnectError(
            f"{len(guests.missing())} of {meeting.nodes} nodes did not come to "
            f"{meeting.host}:{meeting.port} within {meeting.patience_s:.0f} s "
            f"(node rank {missing})",
            found="\n".join(found),
            remedy="Type the same command there, with the same --rdzv, --rdzv-id and --nnodes",
        )

    async def close(self, exit_code: int) -> None:
        """Tells the other nodes how it ended."""
        if self._guests is not None:
            self._guests.dismiss(exit_code)
        if self._board is not None:
            await self._board.close()

    async def tell_of(self, host: Host) -> str:
        return ""


def own_host() -> Host:
    """This machine as a node."""
    return Host(socket.gethostname(), local=True)


def command_hash(word: str, job: Job) -> str:
    """A fingerprint of what is to be run, by which nodes find out that they agree."""
    return mac(word.encode(), "command", *entry_argv(job.entry, "python"))


def _say(text: str) -> None:
    sys.stderr.write(f"paceline: {text}\n")
    sys.stderr.flush()
