"""The nodes that connect to a run: each gets one place, and then has its two connections."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from paceline.remote.channel import Channel, LoginRefused
from paceline.remote.link import Link
from paceline.remote.transport import Reached, nobody
from paceline.rendezvous.listener import Connection, PeerLink
from paceline.spec.errors import ConnectError
from paceline.spec.hosts import Host

_HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # good for a path, too


class Refused(Exception):
    """Why a node does not get a place, as it is told."""


@dataclass
class Peer:
    """A node that connected.

    Attributes:
        host: What the run calls it.
        frames, errors: Its connections; the second comes after the first.
        channel: What is said over them, once it is open.
        calls: Links of later calls, after the first connections broke.
    """

    host: Host
    frames: Connection
    errors: Connection | None = None
    channel: Channel | None = None
    calls: asyncio.Queue[Link] = field(default_factory=asyncio.Queue)
    _frames_again: Connection | None = None

    @property
    def session(self) -> Any:
        """What tells this peer's calls from those of others."""
        return self.frames.about.get("session")

    def called_again(self, connection: Connection) -> None:
        """Takes one connection of a later call; the two of them make a link."""
        if connection.about.get("stream") != "errors":
            self._frames_again = connection
        elif self._frames_again is not None and self.channel is not None:
            self.calls.put_nowait(PeerLink(self._frames_again, connection))
            self._frames_again = None
            self.channel.look_again()


class Admission(Protocol):
    """Who may take which place.

    Attributes:
        places: Those that are to be filled.
    """

    places: Sequence[int]

    def check(self, about: Mapping[str, Any]) -> None:
        """Refused for a node that does not belong to this run."""

    def place(self, connection: Connection, taken: Mapping[int, Peer]) -> tuple[int, Host]:
        """The place of a node, and its host. Refused when it can have none."""


class Peers:
    """Puts connections in their places until every place has both.

    Attributes:
        by_place: The nodes that came.
        complete: Set once all are here.
        waiting: Connections of nodes that want to hear how the job ends.
    """

    def __init__(self, admission: Admission, reached: Reached = nobody) -> None:
        self._admission = admission
        self._reached = reached
        self.by_place: dict[int, Peer] = {}
        self.complete = asyncio.Event()
        if not admission.places:
            self.complete.set()
        self.waiting: list[Connection] = []

    def take(self, connection: Connection) -> None:
        """Accepts a connection, by its stream, or refuses it and says why."""
        try:
            stream = connection.about.get("stream")
            if connection.about.get("again"):
                self._known(connection).called_again(connection)
            elif stream == "errors":
                self._pair(connection)
            else:
                self._admission.check(connection.about)
                if stream == "status":
                    self.waiting.append(connection)
                else:
                    place, host = self._admission.place(connection, self.by_place)
                    self.by_place[place] = Peer(host, connection)
        except Refused as why:
            connection.refuse(str(why))
            return
        connection.accept()
        here = len(self._admission.places) - len(self.missing())
        if stream == "errors":
            self._reached(here)
        if here == len(self._admission.places):
            self.complete.set()

    def _known(self, connection: Connection) -> Peer:
        """The peer that calls again; the run still counts on it."""
        session = connection.about.get("session")
        for peer in self.by_place.values():
            if session and peer.session == session:
                if peer.channel is None or peer.channel.lost.is_set():
                    raise Refused("this node was given up")
                return peer
        raise Refused("nobody called like that before")

    def _pair(self, connection: Connection) -> None:
        session = connection.about.get("session")
        for peer in self.by_place.values():
            if peer.session == session and peer.errors is None:
                peer.errors = connection
                return
        raise Refused("no first connection belongs to this one")

    def missing(self) -> list[int]:
        """The places of which a connection is still wanted."""
        return [place for place in self._admission.places if not self.came(place)]

    def came(self, place: int) -> bool:
        """Whether both connections of a place are there."""
        peer = self.by_place.get(place)
        return peer is not None and peer.errors is not None

    def channel(self, place: int, *, again: bool = True) -> Channel:
        """What is said over the connections of a place that came; it is still to be opened.

        ``again``: when they break, that peer calls again.
        """
        peer = self.by_place[place]
        assert peer.errors is not None
        link = PeerLink(peer.frames, peer.errors)
        peer.channel = Channel(peer.host, link, peer.calls.get if again else None)
        return peer.channel

    async def channels(self) -> list[Channel]:
        """An open channel to each, in the order of their places. Only when nobody is missing.

        Raises:
            ConnectError: Names those that do not become an agent.
        """
        channels = [self.channel(place) for place in sorted(self.by_place) if self.came(place)]
        opening = (channel.open() for channel in channels)
        results = await asyncio.gather(*opening, return_exceptions=True)
        problems = [result for result in results if isinstance(result, BaseException)]
        if not problems:
            return channels
        await asyncio.gather(*(channel.close() for channel in channels))
        refused = [one for one in problems if isinstance(one, LoginRefused)]
        if len(refused) < len(problems):
            raise next(one for one in problems if not isinstance(one, LoginRefused))
        raise ConnectError(
            f"no agent on {', '.join(one.host.name for one in refused)}",
            found="\n".join(f"{one.host.name}: {one.refusal.found}" for one in refused),
            remedy="\n".join(f"{one.host.name}: {one.refusal.remedy}" for one in refused),
        )

    def hang_up(self) -> None:
        """Gives all of them up."""
        for peer in self.by_place.values():
            peer.frames.writer.close()
            if peer.errors is not None:
                peer.errors.writer.close()
            while not peer.calls.empty():
                peer.calls.get_nowait().writer.transport.abort()

    def dismiss(self, exit_code: int) -> None:
        """Tells those who wait how the job ended."""
        for connection in self.waiting:
            connection.tell(exit_code=exit_code)
            connection.writer.close()


class KnownHosts:
    """For nodes that a scheduler starts: the hosts are known before, in rank order."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = hosts
        self.places: Sequence[int] = range(len(hosts))

    def check(self, about: Mapping[str, Any]) -> None:
        """Whoever knows the key was started by us; there is nothing to wait for."""
        if about.get("stream") == "status":
            raise Refused("nobody waits for the end of this run")

    def place(self, connection: Connection, taken: Mapping[int, Peer]) -> tuple[int, Host]:
        """By the scheduler's name for the node, else by the place that it was given."""
        node, place = connection.about.get("node"), connection.about.get("index")
        for at, host in enumerate(self._hosts):
            if node and node in (host.name, host.address):
                place = at
                break
        if not isinstance(place, int) or place not in self.places:
            raise Refused(f"place {place} among {len(self._hosts)} nodes cannot be")
        if place in taken:
            raise Refused(f"two processes were started as node {place}: one a node is needed")
        return place, self._hosts[place]


class SameCommand:
    """For nodes on which the same command is typed: they are who they say they are.

    Args:
        nodes: How many meet, the first node among them, whose place is 0.
        name: What the rendezvous is called.
        command: Hash of what the first node was told to run; the others must agree.
    """

    def __init__(self, nodes: int, name: str, command: str) -> None:
        self._nodes, self._name, self._command = nodes, name, command
        self.places: Sequence[int] = range(1, nodes)

    def check(self, about: Mapping[str, Any]) -> None:
        """All have to mean the same run."""
        if about.get("rendezvous", "") != self._name:
            raise Refused(f"the rendezvous here is called {self._name!r} (--rdzv-id)")
        if about.get("nodes") != self._nodes:
            found = about.get("nodes")
            raise Refused(f"the first node waits for {self._nodes} nodes, this one for {found}")
        if about.get("command") != self._command:
            raise Refused(
                "this node was given another script or other arguments than the first node"
            )

    def place(self, connection: Connection, taken: Mapping[int, Peer]) -> tuple[int, Host]:
        """As it asks for, else in order of arrival."""
        said = connection.about.get("place")
        asked = said if isinstance(said, int) else None
        free = [place for place in self.places if place not in taken]
        if asked in free or (asked is None and free):
            place = free[0] if asked is None else asked
            return place, self._host(connection, place, taken)
        if asked is None or asked not in taken:
            raise Refused(f"all {self._nodes} nodes are here already")
        name = taken[asked].host.name
        raise Refused(f"there is a node with --node-rank {asked} already: {name}")

    def _host(self, connection: Connection, place: int, taken: Mapping[int, Peer]) -> Host:
        """Under a name of its own that is good for a path."""
        said = str(connection.about.get("name") or "")
        name = said if _HOST_NAME.fullmatch(said) else f"node{place}"
        names = {peer.host.name for peer in taken.values()} | {socket.gethostname()}
        unique = name if name not in names else f"{name}-{place}"
        python, folder = (str(connection.about.get(key) or "") for key in ("python", "workdir"))
        elsewhere = None if folder == str(Path.cwd()) else folder or None
        return Host(unique, connection.peer, python=python or None, workdir=elsewhere)
