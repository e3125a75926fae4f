"""Connections of our own among the ranks of a group, for messages that are small or coded.

The thread that has a message sends and receives by itself, so it does not compete with gloo's
threads for a CPU (``docs/explanation/decisions/0014-own-sockets-beside-gloo.md``). The connections
are made in one of a group's first operations (:func:`mesh_of`), over addresses and keys that gloo
carries, and end with the process or by :func:`shut_down_all`. Without them gloo carries all.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_group

from paceline.agent.ranks import tunnels
from paceline.spec.failure import CONNECTIONS_CUT
from paceline.train.elastic import waits
from paceline.train.reduce import handshakes

MAX_RANKS = 64
"""Of a group whose ranks are all connected with each other."""

_GLOO_OPERATIONS = 4  # of a group that gloo carries: many groups end before they have more
_CONNECT_TIMEOUT_S = 5.0
_DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's own, when a group's cannot be known
_SPIN_S = 1e-4  # before this thread sleeps; two CPUs need about half of that to wake another
_MAX_SLEEP_S = 60.0  # between two looks whether the timeout is over
_SOCKET_BUFFER = 1 << 19  # bytes that the kernel takes, and keeps, of each connection
_WAKE_BYTES = 1 << 16  # that have come, or the rest, before a thread that sleeps is woken
_PIECE = 1 << 18  # bytes of a message that are worked on together
_KEY_BYTES, _RANK_BYTES = 16, 4
_PURPOSE = b"paceline gradients"
_HEADER = struct.Struct("=IQ")  # of a message: number of the operation, bytes that follow
# TCP_THIN_LINEAR_TIMEOUTS, and TCP_RTO_MAX_MS of Linux 6.15, which Python does not name
_RETRANSMIT_OPTIONS = ((16, 1), (44, 1000))


def retransmit_soon(connection: socket.socket) -> None:
    """Has the kernel send again soon what a short break of the network has swallowed.

    It doubles its pause with each try: a break of 1.5 s becomes one of 3.
    """
    for option, value in _RETRANSMIT_OPTIONS:
        with contextlib.suppress(OSError):  # an older kernel, or no TCP
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def own_address() -> str:
    """This host's address in the network that gloo uses.

    In an encrypted job it is one of loopback. Else it is the one that ``GLOO_SOCKET_IFNAME``
    names, or that by which it reaches the first host.

    Raises:
        OSError: It cannot be found out.
    """
    if (ways := tunnels.current()) is not None:
        return ways.address
    if interface := os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]:
        addresses = psutil.net_if_addrs().get(interface, [])
        families = (socket.AF_INET, socket.AF_INET6)
        is_ipv6_job = ":" in os.environ.get("MASTER_ADDR", "")  # other hosts may have no IPv4
        for family in reversed(families) if is_ipv6_job else families:
            for entry in addresses:
                if entry.family == family and "%" not in entry.address:  # none of the link's own
                    return str(entry.address)
    first_host = os.environ.get("MASTER_ADDR") or socket.gethostname()
    try:
        family, kind, _, _, target = socket.getaddrinfo(first_host, 9, type=socket.SOCK_DGRAM)[0]
    except UnicodeError as error:  # no valid name
        raise OSError(str(error)) from None
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])


class _OpenSockets:
    """All sockets of this process that are to end when a rank is lost."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self.shutdowns = 0

    def add(self, new: socket.socket, shutdowns: int) -> socket.socket:
        """Adds a new socket; shuts it down if more than ``shutdowns`` shutdowns have happened."""
        with self.lock:
            self.sockets.add(new)
            is_outdated = self.shutdowns != shutdowns
        if is_outdated:
            _shut_down(new)
        return new


_open_sockets = _OpenSockets()


def shut_down_all() -> None:
    """Ends all connections: a thread that waits on one, or waits next, has an error.

    May be called from any thread.
    """
    with _open_sockets.lock:
        _open_sockets.shutdowns += 1
        connections = list(_open_sockets.sockets)
        _open_sockets.sockets.clear()
    for connection in connections:
        _shut_down(connection)


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is not connected yet, or closed by now
        connection.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True)
class PairMean:
    """Averages two ranks' tensors into this rank's, piece by piece, while others are on their way.

    Divided first, as in DDP. Both ranks add in rank order: the sum of two NaNs is the first.
    """

    local: Tensor
    remote: Tensor
    rank: int

    def before_send(self, piece: slice) -> None:
        self.local[self._elements(piece)] *= 0.5

    def after_receive(self, piece: slice) -> None:
        local, remote = (tensor[self._elements(piece)] for tensor in (self.local, self.remote))
        torch.add(*((remote, local) if self.rank else (local, remote)), out=local)

    def _elements(self, piece: slice) -> slice:
        size = self.local.element_size()
        return slice(piece.start // size, piece.stop // size)


class Mesh:
    """This rank's connections to all others of a group; one thread at a time uses them.

    Args:
        shutdowns: Calls of :func:`shut_down_all` before they were made.
        large: Messages are not small: a thread that waits for them sleeps at once.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        sockets: dict[int, socket.socket],
        shutdowns: int,
        *,
        large: bool,
    ) -> None:
        self._rank, self._ranks = group.rank(), group.size()
        # Each rank begins with another one.
        peers = [(self._rank + offset) % self._ranks for offset in range(1, self._ranks)]
        self._sockets = {peer: sockets[peer] for peer in peers}
        self._peer_names = {peer: _peer_name(sockets[peer], peer) for peer in peers}
        self._shutdowns, self._operation = shutdowns, 0
        self._error = CONNECTIONS_CUT  # or that which ended them, which says whose fault it is
        self._spin_s = 0.0 if large else _SPIN_S
        self._group = weakref.ref(group)  # which has these, as long as it exists

    def all_gather(self, message: Tensor) -> Tensor:
        """Every rank's tensor, of any shape, in rank order: ``[ranks, …]``."""
        received = message.new_empty(self._ranks, *message.shape)
        received[self._rank] = message
        self.exchange([message] * self._ranks, received)
        return received

    def all_to_all(self, rows: Tensor) -> Tensor:
        received = torch.empty_like(rows)
        received[self._rank] = rows[self._rank]
        self.exchange(rows, received)
        return received

    def exchange(
        self,
        messages: Sequence[Tensor] | Tensor,
        received: Sequence[Tensor] | Tensor,
        *,
        is_variable: bool = False,
        pipeline: PairMean | None = None,
    ) -> None:
        """Sends message r to rank r, and fills the other ranks' rows; this rank's stays.

        Args:
            received: Likewise, contiguous.
            is_variable: Messages may be shorter than their room.
            pipeline: Works on those of two ranks meanwhile, which are as long as each other.

        Raises:
            RuntimeError: A connection has ended, or the ranks are in different operations; in the
                words that gloo has for it.
        """
        self._operation = (self._operation + 1) % (1 << 32)
        transfers = {
            rank: _Transfer(
                rank, connection, self._peer_names[rank], self._operation,
                _bytes_of(messages[rank]), _bytes_of(received[rank]),
                is_variable=is_variable, pipeline=pipeline,
            )
            for rank, connection in self._sockets.items()
        }  # fmt: skip
        try:
            if len(transfers) < self._ranks - 1:
                raise RuntimeError(self._error)
            self._finish(transfers)
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError) and _open_sockets.shutdowns != self._shutdowns:
                raise waits.WaitCancelled(CONNECTIONS_CUT) from error
            if isinstance(error, RuntimeError):
                self._error = str(error)
            raise

    def _finish(self, transfers: dict[int, _Transfer]) -> None:
        """Moves bytes until all transfers are over; looks for late ones all the time at first."""
        start = progress_time = time.perf_counter()
        while True:
            has_moved = False
            for rank, transfer in list(transfers.items()):
                has_moved = transfer.move() or has_moved
                if transfer.is_finished:
                    del transfers[rank]
            if not transfers:
                return
            current = time.perf_counter()
            if has_moved:
                progress_time = current
            elif current - progress_time < self._spin_s:
                os.sched_yield()  # what is to come may need this CPU
            else:
                self._sleep(transfers, start)

    def _sleep(self, transfers: dict[int, _Transfer], start: float) -> None:
        poll = select.poll()
        for transfer in transfers.values():
            transfer.set_wake_threshold()
            poll.register(transfer.socket, transfer.poll_events)
        timeout_s = timeout_of(self._group()).total_seconds()
        remaining_s = start + timeout_s - time.perf_counter()
        if remaining_s <= 0:
            late = ", ".join(map(str, sorted(transfers)))
            raise RuntimeError(f"Timed out waiting {1e3 * timeout_s:.0f}ms for rank {late}")
        poll.poll(1e3 * min(remaining_s, _MAX_SLEEP_S) + 1)

    def close(self) -> None:
        _close(self._sockets)
        self._sockets = {}


class _Transfer:
    """A message to another rank and the one from it, as far as they have come."""

    def __init__(
        self,
        rank: int,
        connection: socket.socket,
        peer: str,
        operation: int,
        message: memoryview,
        target: memoryview,
        *,
        is_variable: bool = False,
        pipeline: PairMean | None = None,
    ) -> None:
        self.socket, self._rank, self._peer, self._operation = connection, rank, peer, operation
        self._out_header = memoryview(_HEADER.pack(operation, len(message)))
        self._message, self._to_send = message, _HEADER.size + len(message)
        self._pipeline, self._ready, self._done = pipeline, 0 if pipeline else len(message), 0
        self._in_header, self._target = bytearray(_HEADER.size), target
        self._is_variable, self._to_receive = is_variable, _HEADER.size + len(target)
        # Behind a message of variable length there could be bytes of the next.
        self._targets = [memoryview(self._in_header), *([] if is_variable else [target])]

    @property
    def is_finished(self) -> bool:
        return not self._to_send and not self._to_receive

    @property
    def poll_events(self) -> int:
        return (select.POLLOUT if self._to_send else 0) | (select.POLLIN if self._to_receive else 0)

    def set_wake_threshold(self) -> None:
        """Has the kernel wake a sleeping thread when there is something to do, not at each packet.

        The header of a message of variable length says how much is to come.
        """
        is_in_header = self._is_variable and self._to_receive > len(self._target)
        threshold = 1 if is_in_header else min(max(1, self._to_receive), _WAKE_BYTES)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, threshold)

    def move(self) -> bool:
        """Sends and receives what goes without waiting; whether anything did."""
        try:
            has_sent = self._send() if self._to_send else False
            has_moved = (self._receive() if self._to_receive else False) or has_sent
        except OSError as error:
            raise RuntimeError(f"Read error {self._peer}: {error.strerror or error}") from error
        if self._pipeline and has_moved:
            self._finish_pieces(self._pipeline)
        return has_moved

    def _send(self) -> bool:
        sent = len(self._message) - self._to_send  # below 0 in the header
        if self._pipeline and self._ready <= max(0, sent):
            piece = slice(self._ready, min(len(self._message), self._ready + _PIECE))
            self._pipeline.before_send(piece)
            self._ready = piece.stop
        header = [self._out_header[sent:]] if sent < 0 else []
        body = self._message[max(0, sent) : self._ready]
        try:
            self._to_send -= self.socket.sendmsg([*header, body])
        except BlockingIOError:
            return False
        return True

    def _finish_pieces(self, pipeline: PairMean) -> None:
        """Has the pipeline work on the pieces that were both sent and received."""
        length = len(self._message)
        stop = min(max(0, length - remaining) for remaining in (self._to_send, self._to_receive))
        if stop < length:
            stop -= stop % _PIECE
        if stop > self._done:
            pipeline.after_receive(slice(self._done, stop))
            self._done = stop

    def _receive(self) -> bool:
        try:
            count = self.socket.recvmsg_into(self._targets)[0]
        except BlockingIOError:
            return False
        if not count:
            raise RuntimeError(f"Connection closed by peer {self._peer}")
        was_in_header = self._to_receive > len(self._target)
        self._to_receive -= count
        if was_in_header and self._to_receive <= len(self._target):
            self._check_header()
        if self._to_receive:
            received = _HEADER.size + len(self._target) - self._to_receive
            body = self._target[max(0, received - _HEADER.size) :]
            with_body = not self._is_variable or received >= _HEADER.size
            header = memoryview(self._in_header)[received:]
            self._targets = [header, *([body] if with_body else [])]
        return True

    def _check_header(self) -> None:
        operation, length = _HEADER.unpack(self._in_header)
        is_shorter = self._is_variable and length <= len(self._target)
        if is_shorter and operation == self._operation:
            self._to_receive -= len(self._target) - length
            self._target = self._target[:length]
        if (operation, length) != (self._operation, len(self._target)):
            raise RuntimeError(
                f"rank {self._rank} sent {length} bytes in operation {operation} where this rank is"
                f" in operation {self._operation} and expects {len(self._target)}: they are not in"
                " the same line of the script, or have different data"
            )


def _peer_name(connection: socket.socket, rank: int) -> str:
    """The other end, as gloo writes it; a connection that has ended does not know it."""
    with contextlib.suppress(OSError):
        address, port, *_ = connection.getpeername()
        return f"[{address}]:{port}"
    return f"of rank {rank}"


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if len(flat) else memoryview(b"")


# -- how they come about ---------------------------------------------------------------------


@dataclass(slots=True)
class _GroupState:
    operations: int = 0
    large: bool = False
    mesh: Mesh | None = field(default=None, repr=False)


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupState] = weakref.WeakKeyDictionary()


def mesh_of(group: dist.ProcessGroup | None, *, large: bool = False) -> Mesh | None:
    """The connections of a group over gloo; ``None`` when gloo is to carry what is sent.

    To be called by all its ranks alike, once for each operation.

    Args:
        large: The messages of this operation are not small.

    Raises:
        RuntimeError: A rank was lost while they were made.
    """
    group = group or _get_default_group()
    state = _groups.setdefault(group, _GroupState())
    state.operations, state.large = state.operations + 1, state.large or large
    if state.operations == _GLOO_OPERATIONS and group.size() <= MAX_RANKS:
        state.mesh = _make_mesh(group, large=state.large)
    return state.mesh


def leave(group: dist.ProcessGroup | None) -> None:
    state = None if group is None else _groups.pop(group, None)
    if state is not None and state.mesh is not None:
        state.mesh.close()


def _make_mesh(group: dist.ProcessGroup, *, large: bool) -> Mesh | None:
    """Connects all ranks of a group; ``None``: some could not be reached. A collective."""
    shutdowns, ranks = _open_sockets.shutdowns, group.size()
    key = secrets.token_bytes(_KEY_BYTES)
    listener = _listen(shutdowns, ranks)
    with listener or contextlib.nullcontext():
        rows = map(_ENDPOINT.unpack, _all_gather(_endpoint(listener, key), group))
        endpoints = [(host.rstrip(b"\0").decode(), port, code) for port, code, host in rows]
        if listener is None or not all(port for _, port, _ in endpoints):
            return None
        sockets: dict[int, socket.socket] = {}
        with contextlib.suppress(OSError):  # all learn of it now; if a rank is lost, from gloo
            sockets = _connect_all(listener, endpoints, group.rank(), shutdowns)
            if not large:  # else the kernel fits buffers to what the network holds
                _enlarge_buffers(sockets)
        if all(map(any, _all_gather(bytes([len(sockets) == ranks - 1]), group))):
            return Mesh(group, sockets, shutdowns, large=large)
    _close(sockets)
    return None  # of this group; the next one may have more luck


def _listen(shutdowns: int, ranks: int) -> socket.socket | None:
    """A listening socket for the other ranks; ``None`` when this host has no address for it."""
    with contextlib.suppress(OSError):
        address = own_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        backlog = ranks + handshakes.MAX_CALLERS
        listener = socket.create_server((address, 0), family=family, backlog=backlog)
        handshakes.guard(listener)
        return _open_sockets.add(listener, shutdowns)
    return None


_ENDPOINT = struct.Struct(f"=H{_KEY_BYTES}s46s")  # port, key and address


def _endpoint(listener: socket.socket | None, key: bytes) -> bytes:
    """What the others need to call this rank; port 0: none is to call."""
    address, port = listener.getsockname()[:2] if listener is not None else ("", 0)
    return _ENDPOINT.pack(port, key, address.encode())


def _connect_all(
    listener: socket.socket, endpoints: Sequence[tuple[str, int, bytes]], rank: int, shutdowns: int
) -> dict[int, socket.socket]:
    """Calls the ranks before this one and accepts the calls of those behind it, at once.

    Both sides prove the key of the rank that is called; the caller's number is part of the proof.

    Raises:
        OSError: Not all could be reached, in time.
    """
    deadline = time.monotonic() + _CONNECT_TIMEOUT_S
    connections: dict[int, socket.socket] = {}

    def add(peer: int, connection: socket.socket) -> socket.socket:
        connections[peer] = _open_sockets.add(_configured(connection, deadline), shutdowns)
        return connections[peer]

    try:
        with ThreadPoolExecutor(1, "paceline-calls") as pool:
            calls = pool.submit(_call_lower_ranks, endpoints[:rank], rank, deadline, add)
            _accept_higher_ranks(listener, endpoints, rank, deadline, add)
            calls.result()
    except OSError:
        _close(connections)
        raise
    for connection in connections.values():
        connection.setblocking(False)
    return connections


def _call_lower_ranks(
    endpoints: Sequence[tuple[str, int, bytes]],
    rank: int,
    deadline: float,
    add: Callable[[int, socket.socket], socket.socket],
) -> None:
    """Opens a connection for gradients to each rank before this one; they prove each other's key.

    Raises:
        OSError: A rank cannot be reached, or does not answer by the deadline.
    """
    content = rank.to_bytes(_RANK_BYTES, "big")
    callings = []
    tunnels.open_known([(address, port) for address, port, _ in endpoints])
    for peer, (address, port, _) in enumerate(endpoints):
        calling = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        callings.append(add(peer, calling))
        calling.connect((address, port))
    proofs = [
        (calling, handshakes.prove(calling, key, _PURPOSE, deadline, content))
        for calling, (_, _, key) in zip(callings, endpoints, strict=True)
    ]
    for calling, connection_key in proofs:
        handshakes.check_reply(calling, connection_key, deadline, content)


def _accept_higher_ranks(
    listener: socket.socket,
    endpoints: Sequence[tuple[str, int, bytes]],
    rank: int,
    deadline: float,
    add: Callable[[int, socket.socket], socket.socket],
) -> None:
    """Accepts a connection for gradients from each rank behind this one; closes all others.

    Raises:
        OSError: A rank has not connected by the deadline.
    """
    missing = {*range(rank + 1, len(endpoints))}
    callers = handshakes.greetings(listener, _RANK_BYTES, _CONNECT_TIMEOUT_S, until=deadline)
    with contextlib.closing(callers):
        while missing:
            caller = next(callers)
            verified = handshakes.verify(caller, endpoints[rank][2], _PURPOSE)
            peer = int.from_bytes(verified[1], "big") if verified else -1
            if verified is None or peer not in missing:
                caller.connection.close()
                continue
            missing.remove(peer)
            handshakes.reply(add(peer, caller.connection), *verified)


def _close(sockets: Mapping[int, socket.socket]) -> None:
    for connection in sockets.values():
        _shut_down(connection)  # also when a child of this process has it, too
        connection.close()


def _configured(connection: socket.socket, deadline: float) -> socket.socket:
    connection.settimeout(max(0.01, deadline - time.monotonic()))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if waits.is_enabled():  # else the kernel is as patient with it as with gloo's
        retransmit_soon(connection)
    return connection


def _enlarge_buffers(sockets: Mapping[int, socket.socket]) -> None:
    """Has the kernel take a whole small message at once, before it knows the network's speed."""
    for connection in sockets.values():
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)


def _all_gather(content: bytes, group: dist.ProcessGroup) -> list[bytes]:
    local = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    rows = [torch.empty_like(local) for _ in range(group.size())]
    waits.wait(dist.all_gather(rows, local, group=group, async_op=True), local)
    return [bytes(row.tolist()) for row in rows]


def timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    """The longest wait in one of a group's collectives; it may be changed at any time."""
    backend = None if group is None else group._get_backend(torch.device("cpu"))
    options = getattr(backend, "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else _DEFAULT_TIMEOUT
