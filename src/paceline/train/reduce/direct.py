"""Connections of our own among the ranks of a group, for messages that are little or coded.

gloo hands each message to a thread of its own. Where ranks compute on all CPUs of a host that
thread waits for one, and so does the thread that it wakes afterwards: of 40 kB among four ranks on
two CPUs an all-reduce took 5 ms. Here the thread that has something to say sends and receives by
itself, looks for a moment whether the answers are there, and sleeps in the kernel until they are:
0.2 to 0.4 ms of the same (``bench/broadcast/small.py``). And gloo's thread asks for a connection's
lock again and again while another one that sends on it has to wait for a CPU: of a step of 60 ms of
two ranks with one CPU each, whose gradients go in codes, it used 7 for nothing.

The connections of a group are made in one of its first operations (:func:`mesh_of`), over addresses
and keys that gloo carries, and end like gloo's: with the process, or when they are cut
(:func:`cut`). Where they cannot be made, gloo carries all.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_group

from paceline.spec.failure import CONNECTIONS_CUT
from paceline.train.elastic import waits
from paceline.train.reduce import handshakes

MANY = 64
"""Ranks up to which each of them has a connection to each other."""

_USUAL = 4  # operations of a group that gloo carries: many groups end before they have more
_MAKING_S = 5.0
_PATIENCE = timedelta(minutes=30)  # torch's own, where a group's cannot be known
_LOOKING_S = 1e-4  # before this thread sleeps; two CPUs need about half of that to wake another
_ASLEEP_S = 60.0  # between two looks whether patience has ended
_BUFFER = 1 << 19  # bytes that the kernel takes, and keeps, of each connection
_AT_ONCE = 1 << 16  # bytes that have come, or the rest, before a thread that sleeps is woken
_PIECE = 1 << 18  # bytes of a message that are worked on together
_KEY = 16  # bytes
_HEAD = struct.Struct("=IQ")  # of a message: number of the operation, bytes that follow
# TCP_THIN_LINEAR_TIMEOUTS, and TCP_RTO_MAX_MS of Linux 6.15, which Python does not name
_SOON_AGAIN = ((16, 1), (44, 1000))


def retransmit_soon(one: socket.socket) -> None:
    """Has what a short break of the line has swallowed sent again soon after it.

    The kernel doubles its pause with each try: 1.5 s without a line become 3.
    """
    for option, value in _SOON_AGAIN:
        with contextlib.suppress(OSError):  # an older kernel, or no TCP
            one.setsockopt(socket.IPPROTO_TCP, option, value)


def own_address() -> str:
    """Of this host, as the job's other hosts reach it, by the network that gloo uses.

    That is the one that ``GLOO_SOCKET_IFNAME`` names, else that by which it reaches the first host.

    Raises:
        OSError: It cannot be known.
    """
    if named := os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]:
        addresses = psutil.net_if_addrs().get(named, [])
        families = (socket.AF_INET, socket.AF_INET6)
        is_ipv6_job = ":" in os.environ.get("MASTER_ADDR", "")  # other hosts may have no IPv4
        for family in reversed(families) if is_ipv6_job else families:
            for one in addresses:
                if one.family == family and "%" not in one.address:  # none of the link's own
                    return str(one.address)
    known = os.environ.get("MASTER_ADDR") or socket.gethostname()
    try:
        family, kind, _, _, place = socket.getaddrinfo(known, 9, type=socket.SOCK_DGRAM)[0]
    except UnicodeError as error:  # no name that can be
        raise OSError(str(error)) from None
    with socket.socket(family, kind) as asking:
        asking.connect(place)  # sends nothing
        return str(asking.getsockname()[0])


class _Open:
    """All sockets of this process that are to end when a rank is lost."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self.cuts = 0

    def add(self, one: socket.socket, cuts: int) -> socket.socket:
        """Takes a socket that belongs to what was begun after so many cuts."""
        with self.lock:
            self.sockets.add(one)
            late = self.cuts != cuts
        if late:
            _shut(one)
        return one


_open = _Open()


def cut() -> None:
    """Ends all connections: whoever waits on one, or waits next, has an error; from any thread."""
    with _open.lock:
        _open.cuts += 1
        every = list(_open.sockets)
        _open.sockets.clear()
    for one in every:
        _shut(one)


def _shut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is not connected yet, or closed by now
        one.shutdown(socket.SHUT_RDWR)


class Mesh:
    """This rank's connections to all others of a group; one thread at a time uses them.

    Args:
        group: Whose rank this is, and whose timeout holds.
        sockets: Of each other rank.
        cuts: That there had been when they were made.
        large: Messages are no little ones: a thread that waits for them sleeps at once.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        sockets: dict[int, socket.socket],
        cuts: int,
        *,
        large: bool,
    ) -> None:
        self._rank, self._ranks = group.rank(), group.size()
        # Everybody begins with another one.
        after = [(self._rank + number) % self._ranks for number in range(1, self._ranks)]
        self._sockets = {one: sockets[one] for one in after}
        self._names = {one: _name(sockets[one], one) for one in after}
        self._cuts, self._number = cuts, 0
        self._ended = CONNECTIONS_CUT  # or the error that ended them, which says whose fault it is
        self._looking = 0.0 if large else _LOOKING_S
        self._group = weakref.ref(group)  # which has these, until nobody has it

    def rows(self, message: Tensor) -> Tensor:
        """Every rank's tensor, of any shape, in rank order: ``[ranks, …]``."""
        came = message.new_empty(self._ranks, *message.shape)
        came[self._rank] = message
        self.carry([message] * self._ranks, came)
        return came

    def swapped(self, sent: Tensor) -> Tensor:
        """Row r goes to rank r; what came, in rank order."""
        came = torch.empty_like(sent)
        came[self._rank] = sent[self._rank]
        self.carry(sent, came)
        return came

    def carry(
        self,
        given: Sequence[Tensor] | Tensor,
        came: Sequence[Tensor] | Tensor,
        *,
        shorter: bool = False,
        work: Work | None = None,
    ) -> None:
        """Sends message r to rank r, and has the others' come into the rows; this rank's stays.

        Args:
            given: By rank.
            came: Likewise, contiguous.
            shorter: Messages may be shorter than their room.
            work: To be done with those of two ranks meanwhile, which are as long as each other.

        Raises:
            RuntimeError: A connection has ended, or the ranks are in different operations; in the
                words that gloo has for it.
        """
        self._number = (self._number + 1) % (1 << 32)
        left = {
            rank: _Both(
                rank, one, self._names[rank], self._number, _content(given[rank]),
                _content(came[rank]), shorter=shorter, work=work,
            )
            for rank, one in self._sockets.items()
        }  # fmt: skip
        try:
            if len(left) < self._ranks - 1:
                raise RuntimeError(self._ended)
            self._move(left)
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError) and _open.cuts != self._cuts:
                raise waits.GivenUp(CONNECTIONS_CUT) from error
            if isinstance(error, RuntimeError):
                self._ended = str(error)
            raise

    def _move(self, left: dict[int, _Both]) -> None:
        """Until nothing is left. Whoever is late is looked for all the time at first."""
        began = looked = time.perf_counter()
        while True:
            moved = False
            for rank, both in list(left.items()):
                moved = both.move() or moved
                if both.over:
                    del left[rank]
            if not left:
                return
            now = time.perf_counter()
            if moved:
                looked = now
            elif now - looked < self._looking:
                os.sched_yield()  # what is to come may need this CPU
            else:
                self._sleep(left, began)

    def _sleep(self, left: dict[int, _Both], began: float) -> None:
        asking = select.poll()
        for both in left.values():
            both.wake_me()
            asking.register(both.socket, both.wants)
        patience = _patience(self._group()).total_seconds()
        remaining = began + patience - time.perf_counter()
        if remaining <= 0:
            who = ", ".join(map(str, sorted(left)))
            raise RuntimeError(f"Timed out waiting {1e3 * patience:.0f}ms for rank {who}")
        asking.poll(1e3 * min(remaining, _ASLEEP_S) + 1)

    def close(self) -> None:
        _close(self._sockets)
        self._sockets = {}


class Work(Protocol):
    """What is done with a message piece by piece, while others of its pieces are on their way."""

    def before(self, piece: slice) -> None:
        """These bytes are about to be sent."""

    def after(self, piece: slice) -> None:
        """They were sent, and those that the other rank has in their place have come."""


class _Both:
    """A message to another rank and the one from it, as far as they have come."""

    def __init__(
        self,
        rank: int,
        one: socket.socket,
        name: str,
        number: int,
        given: memoryview,
        room: memoryview,
        *,
        shorter: bool = False,
        work: Work | None = None,
    ) -> None:
        self.socket, self._rank, self._peer, self._number = one, rank, name, number
        self._before, self._given = memoryview(_HEAD.pack(number, len(given))), given
        self._work, self._ready, self._done = work, 0 if work else len(given), 0
        self._left = _HEAD.size + len(given)  # to send
        self._head, self._room, self._shorter = bytearray(_HEAD.size), room, shorter
        # Of one that may be shorter, what follows it could be of the next.
        self._coming = [memoryview(self._head), *([] if shorter else [room])]
        self._missing = _HEAD.size + len(room)

    @property
    def over(self) -> bool:
        return not self._left and not self._missing

    @property
    def wants(self) -> int:
        """What to wait for, as ``poll`` names it."""
        return (select.POLLOUT if self._left else 0) | (select.POLLIN if self._missing else 0)

    def wake_me(self) -> None:
        """Has the kernel wake who sleeps when there is something to do, not at each packet.

        Of a message that may be shorter its head says how much is to come.
        """
        headless = self._shorter and self._missing > len(self._room)
        least = 1 if headless else min(max(1, self._missing), _AT_ONCE)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)

    def move(self) -> bool:
        """Sends and takes what goes without waiting; whether anything did."""
        try:
            sent = self._send() if self._left else False
            moved = (self._take() if self._missing else False) or sent
        except OSError as error:
            raise RuntimeError(f"Read error {self._peer}: {error.strerror or error}") from error
        if self._work and moved:
            self._finish(self._work)
        return moved

    def _send(self) -> bool:
        sent = len(self._given) - self._left  # below 0 in the head
        if self._work and self._ready <= max(0, sent):
            piece = slice(self._ready, min(len(self._given), self._ready + _PIECE))
            self._work.before(piece)
            self._ready = piece.stop
        parts = [self._before[sent:]] if sent < 0 else []
        try:
            self._left -= self.socket.sendmsg([*parts, self._given[max(0, sent) : self._ready]])
        except BlockingIOError:
            return False
        return True

    def _finish(self, work: Work) -> None:
        """Does what there is to be done with pieces that have gone and come."""
        gone, come = (max(0, len(self._given) - one) for one in (self._left, self._missing))
        stop = min(gone, come)
        if stop < len(self._given):
            stop -= stop % _PIECE
        if stop > self._done:
            work.after(slice(self._done, stop))
            self._done = stop

    def _take(self) -> bool:
        try:
            count = self.socket.recvmsg_into(self._coming)[0]
        except BlockingIOError:
            return False
        if not count:
            raise RuntimeError(f"Connection closed by peer {self._peer}")
        headless = self._missing > len(self._room)
        self._missing -= count
        if headless and self._missing <= len(self._room):
            self._check()
        if self._missing:
            done = _HEAD.size + len(self._room) - self._missing
            rest = self._room[max(0, done - _HEAD.size) :]
            beside = not self._shorter or done >= _HEAD.size
            self._coming = [memoryview(self._head)[done:], *([rest] if beside else [])]
        return True

    def _check(self) -> None:
        number, length = _HEAD.unpack(self._head)
        if self._shorter and number == self._number and length <= len(self._room):
            self._missing -= len(self._room) - length
            self._room = self._room[:length]
        if (number, length) != (self._number, len(self._room)):
            raise RuntimeError(
                f"rank {self._rank} sent {length} bytes in operation {number} where this rank is "
                f"in operation {self._number} and expects {len(self._room)}: they are not in the "
                "same line of the script, or have different data"
            )


def _name(one: socket.socket, rank: int) -> str:
    """Of the other end, as gloo writes it; a connection that has ended does not know it."""
    with contextlib.suppress(OSError):
        address, port, *_ = one.getpeername()
        return f"[{address}]:{port}"
    return f"of rank {rank}"


def _content(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, which it goes on to own."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if len(flat) else memoryview(b"")


# -- how they come about ---------------------------------------------------------------------


@dataclass(slots=True)
class _Group:
    asked: int = 0
    large: bool = False
    mesh: Mesh | None = field(default=None, repr=False)


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _Group] = weakref.WeakKeyDictionary()


def mesh_of(group: dist.ProcessGroup | None, *, large: bool = False) -> Mesh | None:
    """Those of a group over gloo; ``None`` while, and where, gloo is to carry what is sent.

    To be asked by all its ranks alike, once for each operation.

    Args:
        group: ``None`` is the whole job's.
        large: The messages of this operation are no little ones.

    Raises:
        RuntimeError: A rank was lost while they were made.
    """
    group = group or _get_default_group()
    known = _groups.setdefault(group, _Group())
    known.asked, known.large = known.asked + 1, known.large or large
    if known.asked == _USUAL and group.size() <= MANY:
        known.mesh = _made(group, large=known.large)
    return known.mesh


def leave(group: dist.ProcessGroup | None) -> None:
    """Ends the connections of a group that is over."""
    known = None if group is None else _groups.pop(group, None)
    if known is not None and known.mesh is not None:
        known.mesh.close()


def _made(group: dist.ProcessGroup, *, large: bool) -> Mesh | None:
    """A collective."""
    cuts, ranks = _open.cuts, group.size()
    key = secrets.token_bytes(_KEY)
    listening = _listening(cuts, ranks)
    with listening or contextlib.nullcontext():
        places = [_place(one) for one in _all_gathered(_card(listening, key), group)]
        if listening is None or not all(port for _, port, _ in places):
            return None
        sockets: dict[int, socket.socket] = {}
        with contextlib.suppress(OSError):  # all learn of it now; if a rank is lost, from gloo
            sockets = _connected(listening, places, group.rank(), cuts)
            if not large:  # which the kernel fits to what a line holds
                _widen(sockets)
        if all(map(any, _all_gathered(bytes([len(sockets) == ranks - 1]), group))):
            return Mesh(group, sockets, cuts, large=large)
    _close(sockets)
    return None  # of this group; the next one may have more luck


def _listening(cuts: int, ranks: int) -> socket.socket | None:
    """For the others' calls; ``None`` where this host has no address for that."""
    with contextlib.suppress(OSError):
        address = own_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        backlog = ranks + handshakes.MAX_CALLERS
        listening = socket.create_server((address, 0), family=family, backlog=backlog)
        handshakes.guard(listening)
        return _open.add(listening, cuts)
    return None


_CARD = struct.Struct(f"=H{_KEY}s46s")  # port, key and address


def _card(listening: socket.socket | None, key: bytes) -> bytes:
    """What the others need to call this rank; port 0: nobody is to call."""
    address, port = listening.getsockname()[:2] if listening is not None else ("", 0)
    return _CARD.pack(port, key, address.encode())


def _place(card: bytes) -> tuple[str, int, bytes]:
    port, key, address = _CARD.unpack(card)
    return address.rstrip(b"\0").decode(), port, key


def _connected(
    listening: socket.socket, places: Sequence[tuple[str, int, bytes]], rank: int, cuts: int
) -> dict[int, socket.socket]:
    """Calls the ranks before this one and takes the calls of those behind it.

    Who calls says the key of whom it calls and its own number, and hears its own key.

    Raises:
        OSError: Not all could be reached, in time.
    """
    until = time.monotonic() + _MAKING_S
    own, made = places[rank][2], {}
    try:
        for one, (address, port, key) in enumerate(places[:rank]):
            calling = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            made[one] = _open.add(_prepared(calling, until), cuts)
            calling.connect((address, port))
            calling.sendall(key + rank.to_bytes(4, "big"))
        callers = handshakes.greetings(listening, _KEY + 4, _MAKING_S, until=until)
        with contextlib.closing(callers):
            while len(made) < len(places) - 1:
                caller = next(callers)
                answering, said = caller.connection, bytes(caller.greeting)
                one = int.from_bytes(said[_KEY:], "big")
                if secrets.compare_digest(said[:_KEY], own) and rank < one < len(places):
                    made[one] = _open.add(_prepared(answering, until), cuts)
                    answering.sendall(places[one][2])
                else:
                    answering.close()
        for one in range(rank):
            if not secrets.compare_digest(handshakes.read_exactly(made[one], _KEY, until), own):
                raise ConnectionError("somebody else answers there")
    except OSError:
        _close(made)
        raise
    for connection in made.values():
        connection.setblocking(False)
    return made


def _close(sockets: Mapping[int, socket.socket]) -> None:
    for one in sockets.values():
        _shut(one)  # also where a child of this process has it, too
        one.close()


def _prepared(one: socket.socket, until: float) -> socket.socket:
    one.settimeout(_remaining(until))
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if waits.heeded():  # else the kernel is as patient with it as with gloo's
        retransmit_soon(one)
    return one


def _widen(sockets: Mapping[int, socket.socket]) -> None:
    """Has the kernel take a whole little message at once, before anything is known of the line."""
    for one in sockets.values():
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            one.setsockopt(socket.SOL_SOCKET, buffer, _BUFFER)


def _remaining(until: float) -> float:
    return max(0.01, until - time.monotonic())


def _all_gathered(content: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Every rank's, by gloo."""
    mine = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    every = [torch.empty_like(mine) for _ in range(group.size())]
    waits.wait(dist.all_gather(every, mine, group=group, async_op=True), mine)
    return [bytes(one.tolist()) for one in every]


def _patience(group: dist.ProcessGroup | None) -> timedelta:
    """The longest wait in one of a group's collectives; it may be changed at any time."""
    backend = None if group is None else group._get_backend(torch.device("cpu"))
    options = getattr(backend, "options", None)
    longest = getattr(options, "_timeout", None)
    return longest if isinstance(longest, timedelta) else _PATIENCE
