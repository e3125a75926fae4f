"""Whose connections a job takes: those of its own hosts, by a filter on each listening socket.

What listens in a job (the rendezvous store, gloo's devices) believes whoever connects, and the
whole network reaches it. So the kernel drops at the socket what other addresses send
(``SO_ATTACH_FILTER``, which needs no privileges). A stranger's connection goes to a second socket
on the same port, the door (``SO_ATTACH_REUSEPORT_CBPF``), which learns the address and closes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
import os
import select
import signal
import socket
import struct
import threading
from typing import Callable, Dict, FrozenSet, Iterable, List, Optional, Tuple, Union

VARIABLE = "PACELINE_ADDRESSES"  # as in spec/jobenv.py
MOST_STRANGERS = 16  # that a door tells of
MOST_INSTRUCTIONS = 1000  # of a filter, which goes over them for each connection
BACKLOG = 4
SO_ATTACH_FILTER, SO_DETACH_FILTER, SO_ATTACH_REUSEPORT_CBPF = 26, 27, 51  # Python has no names
EVERYTHING = 0xFFFFFFFF  # bytes of a packet that are kept
LISTENER, DOOR = 0, 1  # in the order in which they began to listen

Address = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]
Network = Union[ipaddress.IPv4Network, ipaddress.IPv6Network]
Tell = Callable[[str], None]


def parse_address(text: str) -> Address:
    """An address without its zone; an IPv4 address that IPv6 carries is itself.

    Raises:
        ValueError: It is none.
    """
    address = ipaddress.ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


class Hosts:
    """Addresses and networks from which connections are taken.

    Args:
        networks: Of both families.
    """

    def __init__(self, networks: Iterable[Network]) -> None:
        self.networks = sorted(set(networks), key=lambda one: (one.version, one))
        whole = [one for one in self.networks if one.prefixlen == one.max_prefixlen]
        self._addresses: FrozenSet[Address] = frozenset(one.network_address for one in whole)
        self._wider = [one for one in self.networks if one.prefixlen < one.max_prefixlen]

    def __contains__(self, text: str) -> bool:
        address = parse_address(text)
        return address in self._addresses or any(address in network for network in self._wider)

    def program(self, of_these: int, of_others: int) -> bytes:
        """A classic BPF program that returns one of two numbers, by a packet's source address.

        Of too many addresses it knows the networks that they lie in.
        """
        for dropped_bits in range(0, 33, 8):
            code = _program(_widened(self.networks, dropped_bits), of_these, of_others)
            if len(code) <= MOST_INSTRUCTIONS * _INSTRUCTION.size:
                break
        return code


NOBODY = Hosts(())
ANYBODY = Hosts(map(ipaddress.ip_network, ("0.0.0.0/0", "::/0")))
_LOOPBACK = ("127.0.0.0/8", "::1/128")


@functools.lru_cache(maxsize=8)
def parse_hosts(text: str) -> Optional[Hosts]:
    """The job's hosts as :data:`VARIABLE` has them, with this one's loopback.

    ``None`` where it is empty: nobody knows from where they connect, and all may.
    """
    networks = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        with contextlib.suppress(ValueError):
            networks.append(ipaddress.ip_network(word, strict=False))
    return Hosts([*networks, *map(ipaddress.ip_network, _LOOPBACK)]) if networks else None


def job_hosts() -> Optional[Hosts]:
    """The job's hosts as this process is told them; ``None`` if connections of all are taken."""
    return parse_hosts(os.environ.get(VARIABLE, ""))


# --- programs for the kernel: linux/filter.h, linux/bpf_common.h --------------------------------

_INSTRUCTION = struct.Struct("=HBBI")
_LOAD, _AND, _EQUAL, _JUMP, _RETURN = 0x20, 0x54, 0x15, 0x05, 0x06
_PROTOCOL = -0x1000  # SKF_AD_OFF + SKF_AD_PROTOCOL: of a packet
_SOURCE_4, _SOURCE_6 = -0x100000 + 12, -0x100000 + 8  # SKF_NET_OFF: in its network header
_IPV6 = 0x86DD


def _widened(networks: List[Network], bits: int) -> List[Network]:
    """Without the last so many bits of an IPv4 address, and four times as many of an IPv6 one."""
    if not bits:
        return networks
    found = set()
    for network in networks:
        kept = network.max_prefixlen - bits * (1 if network.version == 4 else 4)
        found.add(network.supernet(new_prefix=min(network.prefixlen, kept)))
    return sorted(found, key=lambda one: (one.version, one))


def _program(networks: List[Network], of_these: int, of_others: int) -> bytes:
    parts: Dict[int, List[bytes]] = {4: [], 6: []}
    for network in networks:
        size = len(network.network_address.packed) // 4
        words = struct.unpack(">%dI" % size, network.network_address.packed)
        masks = struct.unpack(">%dI" % size, network.netmask.packed)
        compared = [at for at in range(size) if masks[at]]
        source = _SOURCE_4 if network.version == 4 else _SOURCE_6
        for left, at in zip(range(len(compared) - 1, -1, -1), compared):
            parts[network.version] += [
                _step(_LOAD, source + 4 * at), _step(_AND, masks[at]),
                _step(_EQUAL, words[at], otherwise=3 * left + 1),
            ]  # fmt: skip
        parts[network.version].append(_step(_RETURN, of_these))
    four, six = ([*parts[family], _step(_RETURN, of_others)] for family in (4, 6))
    chooses = [_step(_LOAD, _PROTOCOL), _step(_EQUAL, _IPV6, otherwise=1), _step(_JUMP, len(four))]
    return b"".join([*chooses, *four, *six])


def _step(code: int, value: int, otherwise: int = 0) -> bytes:
    return _INSTRUCTION.pack(code, 0, otherwise, value & 0xFFFFFFFF)


def _attach(listener: socket.socket, option: int, program: bytes) -> None:
    code = ctypes.create_string_buffer(program, len(program))
    about = struct.pack("HL", len(program) // _INSTRUCTION.size, ctypes.addressof(code))
    listener.setsockopt(socket.SOL_SOCKET, option, about)


def restrict(listener: socket.socket, hosts: Hosts) -> bool:
    """Has the kernel drop what others send to a socket; whether it does."""
    try:
        _attach(listener, SO_ATTACH_FILTER, hosts.program(EVERYTHING, 0))
    except OSError:  # no Linux, or a sandbox that refuses it
        return False
    return True


def lift(connection: socket.socket) -> None:
    """Removes from an accepted connection the filter that it has of its listening socket."""
    with contextlib.suppress(OSError):  # it has none
        connection.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


class Guard:
    """Keeps a listening socket to some hosts, and tells of others that try.

    Args:
        listener: TCP, listening.
        hosts: From which connections are taken.

    Attributes:
        holds: The kernel drops all other connections.
        door: To which strangers come; ``None`` when there is none.
    """

    def __init__(self, listener: socket.socket, hosts: Hosts) -> None:
        self.holds = restrict(listener, hosts)
        self.door: Optional[socket.socket] = None
        self._hosts = hosts
        self._strangers: List[str] = []
        if self.holds:
            with contextlib.suppress(OSError):  # an old kernel
                self._open_door(listener)

    def _open_door(self, listener: socket.socket) -> None:
        door = socket.socket(listener.family, socket.SOCK_STREAM)
        try:
            if listener.family == socket.AF_INET6:
                only = listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
                door.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            for one in (listener, door):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            door.bind(listener.getsockname())
            door.listen(BACKLOG)
            door.setblocking(False)
            _attach(listener, SO_ATTACH_REUSEPORT_CBPF, self._hosts.program(LISTENER, DOOR))
        except OSError:
            door.close()
            raise
        self.door = door

    def admit(self, listener: socket.socket, hosts: Hosts) -> None:
        """Takes the connections of other hosts from now on.

        Args:
            listener: The same socket.
            hosts: Instead of those before.
        """
        self._hosts = hosts
        self.holds = restrict(listener, hosts)
        if self.door is not None:
            with contextlib.suppress(OSError):
                _attach(listener, SO_ATTACH_REUSEPORT_CBPF, hosts.program(LISTENER, DOOR))

    def shut(self, listener: socket.socket) -> None:
        """Takes nobody's connections any more, until others are admitted.

        The calls of the job's hosts are dropped, not refused: the kernel repeats them, and one that
        came too early is taken after :meth:`admit`. Strangers still come to the door.

        Args:
            listener: The same socket.
        """
        self.holds = restrict(listener, NOBODY)

    def stranger(self) -> str:
        """Closes what has come to the door; its address, if nobody was told of it yet.

        The kernel drops what that address sends from then on: a flood costs nothing.
        """
        if self.door is None:
            return ""
        try:
            connection, (address, *_) = self.door.accept()
        except OSError:
            return ""
        with contextlib.suppress(OSError):  # nothing stays of it
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        connection.close()
        address = str(parse_address(str(address)))
        if address in self._strangers:
            return ""
        self._strangers.append(address)
        known = Hosts(map(ipaddress.ip_network, self._strangers))
        enough = len(self._strangers) >= MOST_STRANGERS
        with contextlib.suppress(OSError):
            _attach(self.door, SO_ATTACH_FILTER, known.program(0, 0 if enough else EVERYTHING))
        return "" if address in self._hosts else address  # it came before strangers were told apart

    def close(self) -> None:
        """Closes the door; the listening socket stays as it is."""
        if self.door is not None:
            self.door.close()
            self.door = None


class DoorKeeper:
    """Tells of strangers at the doors of this process, in a thread of its own.

    Args:
        tell: Called with each stranger's address, once for each socket.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._pid = 0  # a fork has descriptors of this one's doors, and no thread
        self._epoll: Optional[select.epoll] = None
        self._guards: Dict[int, Tuple[Guard, int, int]] = {}  # by door; listener and its inode

    def watch(self, guard: Guard, listener: int) -> None:
        """Watches one more door until its listening socket is closed.

        Args:
            guard: Whose door it is.
            listener: Descriptor of the listening socket.
        """
        if guard.door is None:
            return
        if self._epoll is None or self._pid != os.getpid():
            self._epoll, self._pid, self._guards = select.epoll(), os.getpid(), {}
            about = (self._epoll, self._guards)
            threading.Thread(target=self._keep, args=about, name="paceline-doors",
                             daemon=True).start()  # fmt: skip
        self._close_orphans(self._epoll)
        self._guards[guard.door.fileno()] = guard, listener, os.fstat(listener).st_ino
        self._epoll.register(guard.door.fileno(), select.EPOLLIN)

    def end(self) -> None:
        """Closes all doors, and ends the thread."""
        self._epoll = None
        for guard, _, _ in self._guards.values():
            if guard.door is not None:
                guard.door.shutdown(socket.SHUT_RDWR)  # wakes it

    def _close_orphans(self, epoll: select.epoll) -> None:
        """Closes the doors of sockets that are closed."""
        for door, (guard, listener, inode) in list(self._guards.items()):
            with contextlib.suppress(OSError):
                if os.fstat(listener).st_ino == inode:
                    continue
            del self._guards[door]
            epoll.unregister(door)  # a forked child may still have it
            guard.close()

    def _keep(self, epoll: select.epoll, guards: Dict[int, Tuple[Guard, int, int]]) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # for the main thread
        while self._epoll is epoll:
            for door, _ in epoll.poll():
                guard, _, _ = guards.get(door, (None, 0, 0))
                if guard is not None and (address := guard.stranger()):
                    self._tell(address)
        for guard, _, _ in guards.values():
            guard.close()
        epoll.close()
