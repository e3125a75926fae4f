"""The same command typed on each node: they meet at an address, the first of them launches.

The node that has the address listens there and is the launcher; the others call it, prove that
they know the rendezvous' key, and become its agents.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import hashlib
import ipaddress
import os
import re
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.agent.caller import mac
from paceline.launch.view import entry_argv
from paceline.remote.channel import Channel, connect
from paceline.remote.openssh import SshOptions
from paceline.remote.transport import Reached, nobody
from paceline.rendezvous.callback import Call, CallLink, Switchboard
from paceline.rendezvous.calling import open_channels, usable_addresses
from paceline.spec.errors import ConnectError, SettingError
from paceline.spec.hosts import Host
from paceline.spec.job import Job

DEFAULT_PORT = 29400
KEY_VARIABLE = "PACELINE_RDZV_KEY"
KEY_DIGITS = 32  # 128 bits: nobody who has heard a proof can find the key
NOTE_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where and with whom.

    Attributes:
        host, port: The address.
        key: Proves that a node belongs to it.
        shown: The key as it is to be typed on the other nodes, when it was made up here.
        name: What the user calls it; no secret, may be empty.
        nodes: How many nodes meet.
        place: This node's place, ``None`` for the order of arrival.
        first: This node launches.
        patience_s: How long to wait for the others.
    """

    host: str
    port: int
    key: bytes = field(repr=False)
    shown: str = field(repr=False)
    name: str
    nodes: int
    place: int | None
    first: bool
    patience_s: float


def meeting(address: str, name: str | None, key_file: Path | None, place: int | None,
            nodes: int | None, patience_s: float) -> Meeting:  # fmt: skip
    """What the options mean on this machine. SettingError when something is missing."""
    if not nodes:
        raise SettingError("--rdzv needs the number of nodes", remedy="--nnodes N")
    if place is not None and place >= nodes:
        raise SettingError(
            f"--node-rank {place} cannot be among {nodes} nodes", remedy=f"0 to {nodes - 1}"
        )
    host, port = parse_address(address)
    first = place == 0 if place is not None else is_mine(host)
    given = given_key(key_file)
    if given is None and not first:
        given = asked_key()
    shown = "" if given else spelled(secrets.token_hex(KEY_DIGITS // 2))
    key = key_of(given or shown)
    return Meeting(host, port, key, shown, name or "", nodes, place, first, patience_s)


def given_key(file: Path | None) -> str | None:
    """The key from a file or the environment, from which it is taken away; ``None`` for neither.

    Raises:
        SettingError: The file cannot be read, or others can read it, too.
    """
    environment = os.environ.pop(KEY_VARIABLE, None)  # the ranks need not have it
    if file is None:
        return environment
    try:
        mode, text = file.stat().st_mode, file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SettingError(f"--rdzv-key-file {file} cannot be read", found=str(error)) from None
    if mode & 0o077:
        raise SettingError(
            f"--rdzv-key-file {file} can be read by others",
            found=f"its mode is {mode & 0o777:o}", remedy=f"chmod 600 {file}",
        )  # fmt: skip
    return text


def asked_key() -> str:
    """The key as typed at this terminal. SettingError when there is none."""
    if sys.stdin is not None and sys.stdin.isatty():
        with contextlib.suppress(EOFError, OSError):
            return getpass.getpass("Key of the rendezvous, as the first node shows it: ")
    raise SettingError(
        "--rdzv needs the rendezvous' key on this node",
        found="the first node shows one when it was given none",
        remedy=f"Type it at a terminal, export {KEY_VARIABLE}, or --rdzv-key-file FILE",
    )


def key_of(text: str) -> bytes:
    """The key that was typed; blanks and dashes do not count.

    Raises:
        SettingError: It is no key: one that could be guessed is none.
    """
    digits = re.sub(r"[-\s]", "", text).lower()
    if not re.fullmatch(rf"[0-9a-f]{{{KEY_DIGITS},256}}", digits):
        raise SettingError(
            "that is no key for a rendezvous",
            found=f"{len(digits)} characters; it needs {KEY_DIGITS} hexadecimal digits or more",
            remedy="As the first node shows it, or made by: openssl rand -hex 16",
        )
    return hashlib.sha256(b"paceline-rendezvous\0" + digits.encode()).digest()


def spelled(digits: str) -> str:
    """A key as people type it."""
    return "-".join(digits[at : at + 4] for at in range(0, len(digits), 4))


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
        meeting: For its name and how many are expected, the first node among them.
        command: Hash of what the first node was told to run; the others must agree.
        on_change: Called when somebody has come.
    """

    def __init__(self, meeting: Meeting, command: str, on_change: Callable[[], None]) -> None:
        self._nodes = meeting.nodes
        self._name = meeting.name
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
        said = call.about.get("place")
        asked = said if isinstance(said, int) else None
        place = self._free_place(asked)
        if place is None:
            call.refuse(self._no_place(asked))
            return
        self.by_place[place] = Guest(self._host(call, place), call)
        call.accept()

    def _problem(self, about: Mapping[str, Any]) -> str:
        if about.get("rendezvous", "") != self._name:
            return f"the rendezvous here is called {self._name!r} (--rdzv-id)"
        if about.get("nodes") != self._nodes:
            found = about.get("nodes")
            return f"the first node waits for {self._nodes} nodes, this one for {found}"
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
        said = str(call.about.get("name") or "")
        name = said if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", said) else f"node{place}"
        taken = {guest.host.name for guest in self.by_place.values()} | {socket.gethostname()}
        unique = name if name not in taken else f"{name}-{place}"
        python, folder = (str(call.about.get(about) or "") for about in ("python", "workdir"))
        other = None if folder == str(Path.cwd()) else folder or None
        return Host(unique, call.peer, python=python or None, workdir=other)

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
        self._command = command_hash(self._meeting.key, job)

    async def open(self, hosts: Sequence[Host], pythons: Sequence[str],
                   reached: Reached = nobody) -> list[Channel]:  # fmt: skip
        """Waits for all nodes. ConnectError when they do not come in time."""
        changed = asyncio.Event()
        guests = self._guests = Guests(self._meeting, self._command, changed.set)
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
        others = meeting.nodes - 1
        if not others:
            return
        _say(f"waiting for {others} more of {meeting.nodes} nodes at {meeting.host}:{meeting.port}")
        if meeting.shown:
            _say("type the same command there; it asks for this key (or takes it from "
                 f"{KEY_VARIABLE} or --rdzv-key-file): {meeting.shown}")  # fmt: skip

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
            found.append(f"with another key: {', '.join(strangers)}")
        missing = ", ".join(map(str, guests.missing()))
        meeting = self._meeting
        return ConnectError(
            f"{len(guests.missing())} of {meeting.nodes} nodes did not come to "
            f"{meeting.host}:{meeting.port} within {meeting.patience_s:.0f} s "
            f"(node rank {missing})",
            found="\n".join(found),
            remedy="Type the same command there, with the same key, --rdzv and --nnodes",
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


def command_hash(key: bytes, job: Job) -> str:
    """A fingerprint of what is to be run, by which nodes find out that they agree."""
    return mac(key, "command", *entry_argv(job.entry, "python"))


def _say(text: str) -> None:
    sys.stderr.write(f"paceline: {text}\n")
    sys.stderr.flush()
