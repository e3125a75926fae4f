"""Assigns connecting nodes to the places of a run, each with its two connections."""

from __future__ import annotations

import asyncio
import re
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from paceline.remote.channel import Channel, LoginError
from paceline.remote.transport import ConnectedCallback, ignore_count
from paceline.rendezvous.listener import Connection, PeerLink
from paceline.spec.errors import ConnectError
from paceline.spec.events import Event
from paceline.spec.hosts import Host

_HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # safe in a path
MAX_WAITING_PER_PLACE = 2  # a broken connection may look open when its node connects again
_FIRST_MISSING = "the first connection of this node is missing"


class AdmissionError(Exception):
    """A node is rejected; the text is sent to it."""


@dataclass
class Peer:
    """A node that connected.

    Attributes:
        host: Its host.
        frames, errors: Its connections; the second follows the first.
        channel: The channel over them.
        links: The newest link of a reconnection, after the first connections broke.
    """

    host: Host
    frames: Connection
    errors: Connection | None = None
    channel: Channel | None = None
    links: asyncio.Queue[PeerLink] = field(default_factory=asyncio.Queue)
    _pending_frames: Connection | None = None
    _is_altered: bool = False  # it was reported for the newest link

    def __post_init__(self) -> None:
        self.frames.on_altered = self.report_change

    @property
    def session(self) -> Any:
        """Id that all connections of this peer share."""
        return self.frames.info.get("session")

    def add_errors(self, connection: Connection) -> None:
        """Adds its second connection."""
        self.errors, connection.on_altered = connection, self.report_change

    def report_change(self, address: str) -> None:
        """Reports, once a link, that bytes from or to ``address`` were changed on the way."""
        if self.channel is not None and not self._is_altered:
            self._is_altered = True
            fields = {"address": address, "to_launcher": True}
            self.channel.on_event(Event("connection altered", self.host.name, fields=fields))

    def reconnect(self, connection: Connection) -> None:
        """Stores a connection of a reconnecting node; with the second, queues a new link.

        The node gave up the connections that these replace. Raises AdmissionError for a second
        connection without the first.
        """
        frames, self._pending_frames = self._pending_frames, None
        if connection.info.get("stream") != "errors":
            if frames is not None:
                frames.writer.transport.abort()
            self._pending_frames = connection
        elif frames is None:
            raise AdmissionError(_FIRST_MISSING)
        else:
            assert self.channel is not None
            if frames.info.get("altered") is True:
                self.report_change(frames.local_address)
            self._is_altered = False
            frames.on_altered = connection.on_altered = self.report_change
            self.drop_links()
            self.links.put_nowait(PeerLink(frames, connection))
            self.channel.reconnect()

    def drop_links(self) -> None:
        """Closes the links that the channel has not taken."""
        while not self.links.empty():
            self.links.get_nowait().abort()

    def hang_up(self) -> None:
        """Closes its connections, except those that the channel has taken from ``links``."""
        self.frames.writer.close()
        if self.errors is not None:
            self.errors.writer.close()
        if self._pending_frames is not None:
            self._pending_frames.writer.transport.abort()
        self.drop_links()


class Admission(Protocol):
    """Decides which node gets which place.

    Attributes:
        places: The places to fill.
    """

    places: Sequence[int]

    def check(self, info: Mapping[str, Any]) -> None:
        """Raises AdmissionError for a node that does not belong to this run."""

    def place(self, connection: Connection, peers: Mapping[int, Peer]) -> tuple[int, Host]:
        """The place and host of a node; raises AdmissionError if there is none."""


class Peers:
    """Admits connections until every place has both of its own.

    Attributes:
        by_place: The connected nodes.
        complete: Set once all are connected.
        waiting: Connections of nodes that wait for the job's exit status.
    """

    def __init__(
        self, admission: Admission, on_connected: ConnectedCallback = ignore_count
    ) -> None:
        self._admission = admission
        self._on_connected = on_connected
        self.by_place: dict[int, Peer] = {}
        self.complete = asyncio.Event()
        if not admission.places:
            self.complete.set()
        self.waiting: list[Connection] = []

    def admit(self, connection: Connection) -> None:
        """Accepts a connection according to its stream, or rejects it with a reason."""
        try:
            stream = connection.info.get("stream")
            if connection.info.get("again"):
                self._reconnecting_peer(connection).reconnect(connection)
            elif stream == "errors":
                self._pair(connection)
            else:
                self._admission.check(connection.info)
                if stream == "status":
                    self._add_waiting(connection)
                else:
                    place, host = self._admission.place(connection, self.by_place)
                    self.by_place[place] = Peer(host, connection)
        except AdmissionError as error:
            connection.reject(str(error))
            return
        connection.accept()
        num_connected = len(self._admission.places) - len(self.missing())
        if stream == "errors":
            self._on_connected(num_connected)
        if num_connected == len(self._admission.places):
            self.complete.set()

    def _reconnecting_peer(self, connection: Connection) -> Peer:
        """The peer of a reconnection, unless the run has given it up."""
        session = connection.info.get("session")
        for peer in self.by_place.values():
            if session and peer.session == session:
                if peer.channel is None or peer.channel.lost.is_set():
                    raise AdmissionError("this node was given up")
                return peer
        raise AdmissionError("no node with this session id has connected")

    def _pair(self, connection: Connection) -> None:
        session = connection.info.get("session")
        for peer in self.by_place.values():
            if peer.session == session and peer.errors is None:
                peer.add_errors(connection)
                return
        raise AdmissionError(_FIRST_MISSING)

    def _add_waiting(self, connection: Connection) -> None:
        """Keeps a connection; if they are too many, closes the oldest of the busiest address."""
        self.waiting = [other for other in self.waiting if not other.writer.is_closing()]
        self.waiting.append(connection)
        if len(self.waiting) > MAX_WAITING_PER_PLACE * len(self._admission.places):
            counts = Counter(waiting.peer for waiting in self.waiting)
            index = max(range(len(self.waiting)), key=lambda i: counts[self.waiting[i].peer])
            self.waiting.pop(index).writer.transport.abort()

    def missing(self) -> list[int]:
        """The places without both connections."""
        return [place for place in self._admission.places if not self.is_connected(place)]

    def is_connected(self, place: int) -> bool:
        """Whether a place has both of its connections."""
        peer = self.by_place.get(place)
        return peer is not None and peer.errors is not None

    def channel(self, place: int, *, reconnects: bool = True) -> Channel:
        """An unopened channel over the connections of a place.

        ``reconnects``: the peer reconnects when they break.
        """
        peer = self.by_place[place]
        assert peer.errors is not None
        link = PeerLink(peer.frames, peer.errors)
        peer.channel = Channel(peer.host, link, peer.links.get if reconnects else None)
        return peer.channel

    async def channels(self) -> list[Channel]:
        """Opens a channel to each connected node, in the order of their places.

        Raises:
            ConnectError: Names the nodes whose agents fail to start.
        """
        places = sorted(filter(self.is_connected, self.by_place))
        channels = [self.channel(place) for place in places]
        results = await asyncio.gather(*(c.open() for c in channels), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if not errors:
            return channels
        await asyncio.gather(*(channel.close() for channel in channels))
        refused = [error for error in errors if isinstance(error, LoginError)]
        if len(refused) < len(errors):
            raise next(error for error in errors if not isinstance(error, LoginError))
        raise ConnectError(
            f"no agent on {', '.join(error.host.name for error in refused)}",
            found="\n".join(f"{error.host.name}: {error.refusal.details}" for error in refused),
            remedy="\n".join(f"{error.host.name}: {error.refusal.remedy}" for error in refused),
        )

    def hang_up(self) -> None:
        """Closes all connections."""
        for peer in self.by_place.values():
            peer.hang_up()

    def dismiss(self, exit_code: int) -> None:
        """Sends the job's exit status to the waiting nodes."""
        for connection in self.waiting:
            connection.send_status(exit_code)


class HostAdmission:
    """Admits nodes that a scheduler started on known hosts, in rank order."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = hosts
        self.places: Sequence[int] = range(len(hosts))

    def check(self, info: Mapping[str, Any]) -> None:
        """Accepts every node with the key; no node waits for the exit status."""
        if info.get("stream") == "status":
            raise AdmissionError("this run does not report its exit status to nodes")

    def place(self, connection: Connection, peers: Mapping[int, Peer]) -> tuple[int, Host]:
        """Finds the host of a node by the scheduler's name for it, else by its rank variable."""
        node, place = connection.info.get("node"), connection.info.get("index")
        for index, host in enumerate(self._hosts):
            if node and node in (host.name, host.address):
                place = index
                break
        if not isinstance(place, int) or place not in self.places:
            raise AdmissionError(f"node rank {place} is not in 0 to {len(self._hosts) - 1}")
        if place in peers:
            error = f"two processes were started as node {place}: start one process per node"
            raise AdmissionError(error)
        return place, self._hosts[place]


class CommandAdmission:
    """Admits nodes on which the same command was typed.

    Args:
        nodes: Number of nodes, including the first node, whose place is 0.
        name: Name of the rendezvous.
        command: Hash of the first node's command, which must be equal on all nodes.
        encrypts: Whether the first node encrypts the job; all nodes must agree.
    """

    def __init__(self, nodes: int, name: str, command: str, encrypts: bool = False) -> None:
        self._nodes, self._name, self._command = nodes, name, command
        self._encrypts = encrypts
        self.places: Sequence[int] = range(1, nodes)

    def check(self, info: Mapping[str, Any]) -> None:
        if info.get("rendezvous", "") != self._name:
            raise AdmissionError(f"the rendezvous here is called {self._name!r} (--rdzv-id)")
        if (nodes := info.get("nodes")) != self._nodes:
            raise AdmissionError(
                f"the first node waits for {self._nodes} nodes, this one for {nodes}"
            )
        if info.get("command") != self._command:
            raise AdmissionError(
                "this node was given another script or other arguments than the first node"
            )
        if (info.get("encrypt") is True) != self._encrypts:
            which = "the first node, not this one" if self._encrypts else "this node, not the first"
            raise AdmissionError(f"--encrypt was given to {which}")

    def place(self, connection: Connection, peers: Mapping[int, Peer]) -> tuple[int, Host]:
        """The requested place, else the first free one."""
        value = connection.info.get("place")
        requested = value if isinstance(value, int) else None
        free = [place for place in self.places if place not in peers]
        if requested in free or (requested is None and free):
            place = free[0] if requested is None else requested
            return place, self._host(connection, place, peers)
        if requested is None or requested not in peers:
            raise AdmissionError(f"all {self._nodes} nodes are here already")
        name = peers[requested].host.name
        raise AdmissionError(f"there is a node with --node-rank {requested} already: {name}")

    def _host(self, connection: Connection, place: int, peers: Mapping[int, Peer]) -> Host:
        """The node's host, under a unique name that is safe in a path."""
        claimed = str(connection.info.get("name") or "")
        name = claimed if _HOST_NAME.fullmatch(claimed) else f"node{place}"
        names = {peer.host.name for peer in peers.values()} | {socket.gethostname()}
        unique = name if name not in names else f"{name}-{place}"
        python, folder = (str(connection.info.get(key) or "") for key in ("python", "workdir"))
        workdir = None if folder == str(Path.cwd()) else folder or None
        return Host(unique, connection.peer, python=python or None, workdir=workdir)
