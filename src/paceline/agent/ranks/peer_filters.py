"""Restricts listening sockets of a job to the job's hosts.

The store and gloo's devices trust whoever connects. So the kernel directs the connections of other
addresses to a second socket on the same port (``SO_ATTACH_REUSEPORT_CBPF``, no privileges needed),
which learns the address and closes them. It also drops what these addresses send to the first
socket (``SO_ATTACH_FILTER``); Linux 6.18.44 lets only processes with CAP_NET_ADMIN filter TCP.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import ipaddress
import os
import select
import signal
import socket
import struct
import threading
import time
from collections import deque
from typing import Callable, Deque, Dict, Iterable, List, Optional, Set, Tuple, Union

VARIABLE = "PACELINE_ADDRESSES"  # as in spec/jobenv.py
ADDED = "+"  # as in spec/jobenv.py; no host has such an address: the hosts are behind NAT
MAX_REPORTED = 16  # addresses for each socket
MAX_INSTRUCTIONS = 1000  # of a filter, which goes over them for each connection
MAX_PORTS = 400  # of callers that are connecting, in one filter
BACKLOG, REJECT_BACKLOG = 128, 4
ORPHANS_PERIOD_S = 1.0  # after which the port of a store that has ended is free
REPORT_PERIOD_S = 60.0  # between two reports of an address by a process with many sockets
SO_ATTACH_FILTER, SO_DETACH_FILTER, SO_ATTACH_REUSEPORT_CBPF = 26, 27, 51  # Python has no names
WHOLE_PACKET = 0xFFFFFFFF  # bytes of a packet that are kept
LISTENER_INDEX, REJECT_INDEX = 0, 1  # if the listener is the first to listen

Address = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]
Network = Union[ipaddress.IPv4Network, ipaddress.IPv6Network]
Report = Callable[[str], None]


def parse_address(text: str) -> Address:
    """Parses an address without its zone; maps an IPv4-mapped IPv6 address to IPv4.

    Raises ValueError if it is no address.
    """
    address = ipaddress.ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


class HostSet:
    """A set of IPv4 and IPv6 addresses and networks from which connections are accepted."""

    def __init__(self, networks: Iterable[Network]) -> None:
        self.networks = sorted(set(networks), key=lambda network: (network.version, network))
        self._addresses: Set[Address] = set()
        self._networks: List[Network] = []
        for network in self.networks:
            if network.prefixlen == network.max_prefixlen:
                self._addresses.add(network.network_address)
            else:
                self._networks.append(network)

    def __contains__(self, text: str) -> bool:
        address = parse_address(text)
        return address in self._addresses or any(address in network for network in self._networks)

    def program(self, member_result: int, other_result: int) -> bytes:
        """Makes a classic BPF program that returns one of two numbers by a packet's source.

        If there are too many addresses, it matches larger networks that contain them.
        """
        for dropped_bits in range(0, 33, 8):
            code = _source_filter(_widen(self.networks, dropped_bits), member_result, other_result)
            if len(code) <= MAX_INSTRUCTIONS * _INSTRUCTION.size:
                break
        return code


NO_HOSTS = HostSet(())
ALL_HOSTS = HostSet(map(ipaddress.ip_network, ("0.0.0.0/0", "::/0")))
LOOPBACK = HostSet(map(ipaddress.ip_network, ("127.0.0.0/8", "::1/128")))


@functools.lru_cache(maxsize=8)
def parse_hosts(text: str) -> Optional[HostSet]:
    """Parses the job's hosts in the form of :data:`VARIABLE`, and adds loopback.

    Returns ``None`` if the text is empty: the hosts' addresses are unknown, and all may connect.
    """
    networks = []
    for item in filter(None, (item.strip() for item in text.split(","))):
        with contextlib.suppress(ValueError):
            networks.append(ipaddress.ip_network(item.lstrip(ADDED), strict=False))
    return HostSet([*networks, *LOOPBACK.networks]) if networks else None


def admitted_hosts(text: str) -> HostSet:
    """Parses the hosts that may connect, in the form of :data:`VARIABLE`; all if it is empty."""
    return parse_hosts(text) or ALL_HOSTS


def job_hosts() -> Optional[HostSet]:
    """Returns the job's hosts from the environment; ``None`` if all may connect."""
    return parse_hosts(os.environ.get(VARIABLE, ""))


def own_addresses() -> HostSet:
    """Returns the addresses that hosts of the job have, without those that the user has added."""
    items = os.environ.get(VARIABLE, "").split(",")
    return parse_hosts(",".join(item for item in items if not item.startswith(ADDED))) or NO_HOSTS


# --- programs for the kernel: linux/filter.h, linux/bpf_common.h --------------------------------

_INSTRUCTION = struct.Struct("=HBBI")
_LOAD_HALF, _LOAD_BYTE = 0x28, 0x30
_LOAD, _AND, _EQUAL, _JUMP, _RETURN = 0x20, 0x54, 0x15, 0x05, 0x06
_PROTOCOL = -0x1000  # SKF_AD_OFF + SKF_AD_PROTOCOL: of a packet
_NETWORK_HEADER = -0x100000  # SKF_NET_OFF
_SOURCE_4, _SOURCE_6 = _NETWORK_HEADER + 12, _NETWORK_HEADER + 8
_IPV4_HEADER_BYTES = 20
_IPV4_WITHOUT_OPTIONS = 0x45  # version, and length of the header in words
_IPV6 = 0x86DD


def _widen(networks: List[Network], bits: int) -> List[Network]:
    """Widens networks by ``bits`` bits of IPv4 addresses, and 4 × ``bits`` of IPv6 addresses."""
    if not bits:
        return networks
    wider = set()
    for network in networks:
        prefix = network.max_prefixlen - bits * (1 if network.version == 4 else 4)
        wider.add(network.supernet(new_prefix=min(network.prefixlen, prefix)))
    return sorted(wider, key=lambda item: (item.version, item))


def _source_filter(networks: List[Network], member_result: int, other_result: int) -> bytes:
    """Returns classic BPF that gives ``member_result`` to packets from the networks."""
    parts: Dict[int, List[bytes]] = {4: [], 6: []}
    for network in networks:
        size = len(network.network_address.packed) // 4
        values = struct.unpack(">%dI" % size, network.network_address.packed)
        masks = struct.unpack(">%dI" % size, network.netmask.packed)
        positions = [at for at in range(size) if masks[at]]
        source = _SOURCE_4 if network.version == 4 else _SOURCE_6
        for remaining, at in zip(range(len(positions) - 1, -1, -1), positions):
            parts[network.version] += [
                _instruction(_LOAD, source + 4 * at), _instruction(_AND, masks[at]),
                _instruction(_EQUAL, values[at], jump_if_false=3 * remaining + 1),
            ]  # fmt: skip
        parts[network.version].append(_instruction(_RETURN, member_result))
    four, six = ([*parts[family], _instruction(_RETURN, other_result)] for family in (4, 6))
    chooses = [
        _instruction(_LOAD, _PROTOCOL),
        _instruction(_EQUAL, _IPV6, jump_if_false=1),
        _instruction(_JUMP, len(four)),
    ]
    return b"".join([*chooses, *four, *six])


def _instruction(code: int, value: int, jump_if_false: int = 0) -> bytes:
    return _INSTRUCTION.pack(code, 0, jump_if_false, value & 0xFFFFFFFF)


def _require(load: int, offset: int, value: int, other_result: int) -> bytes:
    """Returns classic BPF that returns ``other_result`` unless a field has the value."""
    return b"".join([
        _instruction(load, offset), _instruction(_EQUAL, value, jump_if_false=1),
        _instruction(_JUMP, 1), _instruction(_RETURN, other_result),
    ])  # fmt: skip


def _attach(listener: socket.socket, option: int, program: bytes) -> None:
    code = ctypes.create_string_buffer(program, len(program))
    filter_program = struct.pack("HL", len(program) // _INSTRUCTION.size, ctypes.addressof(code))
    listener.setsockopt(socket.SOL_SOCKET, option, filter_program)


def attach_filter(listener: socket.socket, hosts: HostSet) -> bool:
    """Makes the kernel drop what other hosts send to a socket; False if it cannot."""
    try:
        _attach(listener, SO_ATTACH_FILTER, hosts.program(WHOLE_PACKET, 0))
    except OSError:  # no Linux, or a sandbox that refuses it
        return False
    return True


def open_reject_socket(listener: socket.socket, program: bytes) -> socket.socket:
    """Opens a second socket on a socket's port, and has a program choose between both.

    ``program``: returns the index of one of them, in the order in which they begin to listen.
    Raises OSError if the kernel is too old, or a sandbox refuses it.
    """
    reject_socket = socket.socket(listener.family, socket.SOCK_STREAM)
    try:
        if listener.family == socket.AF_INET6:
            ipv6_only = listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
            reject_socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, ipv6_only)
        reject_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for sock in (listener, reject_socket):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reject_socket.bind(listener.getsockname())
        reject_socket.listen(REJECT_BACKLOG)
        reject_socket.setblocking(False)
        _attach(reject_socket, SO_ATTACH_REUSEPORT_CBPF, program)
    except OSError:
        reject_socket.close()
        raise
    return reject_socket


def detach_filter(connection: socket.socket) -> None:
    """Removes from an accepted connection the filter that it has of its listening socket."""
    with contextlib.suppress(OSError):  # it has none
        connection.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


class PeerFilter:
    """Restricts a listening socket to some hosts and learns which other addresses try.

    Other hosts may have connected, or have begun to, before the filter is attached; not to a
    ``listener`` that is bound and begins to listen later.

    Attributes:
        is_attached: Whether the kernel keeps all other connections from the socket.
        reject_socket: Takes refused connections; ``None`` when there is none.
    """

    def __init__(self, listener: socket.socket, hosts: HostSet) -> None:
        self.reject_socket: Optional[socket.socket] = None
        self._hosts = hosts
        self._rejected: List[str] = []
        self._indices = LISTENER_INDEX, REJECT_INDEX
        if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            self._indices = REJECT_INDEX, LISTENER_INDEX  # it is the second
        self._has_filter = attach_filter(listener, hosts)
        with contextlib.suppress(OSError):
            self.reject_socket = open_reject_socket(listener, self._selection)

    @property
    def is_attached(self) -> bool:
        return self._has_filter or self.reject_socket is not None

    @property
    def _selection(self) -> bytes:
        """Program that hands connections of other hosts to the reject socket."""
        return self._hosts.program(*self._indices)

    def admit(self, listener: socket.socket, hosts: HostSet) -> None:
        """Accepts the connections of ``hosts`` instead of the former ones."""
        self._hosts = hosts
        self._has_filter = attach_filter(listener, hosts)
        if self.reject_socket is not None:
            with contextlib.suppress(OSError):
                _attach(self.reject_socket, SO_ATTACH_REUSEPORT_CBPF, self._selection)

    def renew(self, listener: socket.socket) -> None:
        """Replaces a listening socket by a new one on its port, under the same descriptor.

        This ends the connections to it that were made, or begun, before the filter was attached.
        The listening socket must have no other descriptor. May raise OSError.
        """
        with socket.socket(listener.family) as renewed:
            if listener.family == socket.AF_INET6:
                ipv6_only = listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
                renewed.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, ipv6_only)
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                renewed.setsockopt(socket.SOL_SOCKET, option, 1)
            renewed.settimeout(listener.gettimeout())
            renewed.bind(listener.getsockname())
            attach_filter(renewed, self._hosts)
            renewed.listen(BACKLOG)
            # the kernel gives it the index of the one that this closes
            os.dup2(renewed.fileno(), listener.fileno(), inheritable=False)

    def block(self, listener: socket.socket) -> bool:
        """Drops connections until :meth:`admit`: the kernel repeats those that came too early.

        Returns False, and does nothing, without packet filters: a rank that came too early would be
        rejected.
        """
        self._has_filter = attach_filter(listener, NO_HOSTS)
        return self._has_filter

    def accept_rejected(self) -> str:
        """Closes one refused connection; returns its address the first time it is seen, else "".

        If the kernel takes packet filters, it drops what that address sends from then on: a flood
        costs nothing.
        """
        if self.reject_socket is None:
            return ""
        try:
            connection, (address, *_) = self.reject_socket.accept()
        except OSError:
            return ""
        with contextlib.suppress(OSError):  # nothing stays of it
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        connection.close()
        address = str(parse_address(str(address)))
        if address in self._rejected or len(self._rejected) >= MAX_REPORTED:
            return ""
        self._rejected.append(address)
        rejected_hosts = HostSet(map(ipaddress.ip_network, self._rejected))
        is_full = len(self._rejected) >= MAX_REPORTED
        program = rejected_hosts.program(0, 0 if is_full else WHOLE_PACKET)
        with contextlib.suppress(OSError):
            _attach(self.reject_socket, SO_ATTACH_FILTER, program)
        return "" if address in self._hosts else address  # it came before strangers were told apart

    def close(self) -> None:
        """Closes the reject socket; the listening socket stays as it is."""
        if self.reject_socket is not None:
            self.reject_socket.close()
            self.reject_socket = None


class PortFilter:
    """Restricts a listening socket to callers that this process has bound to its address.

    No other user of the host can send from such a caller's port. If the kernel takes no packet
    filters, it directs other connections to the reject socket.

    Args:
        listener: Of IPv4; bound, but not listening yet: it would have connections of others.

    Raises OSError if another user has bound the same address.

    Attributes:
        reject_socket: ``None`` if there is a packet filter, or the kernel takes neither.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener.dup()
        self._address = int(ipaddress.ip_address(listener.getsockname()[0]))
        self._ports: Deque[int] = deque(maxlen=MAX_PORTS)  # newest first
        self.reject_socket: Optional[socket.socket] = None
        self._has_filter = attach_filter(listener, NO_HOSTS)
        if self._has_filter:
            return
        try:
            self.reject_socket = open_reject_socket(listener, self._selection())
        except OSError as error:
            if error.errno == errno.EADDRINUSE:  # another user has bound the same address
                self._listener.close()
                raise

    @property
    def is_attached(self) -> bool:
        """Whether the kernel keeps all other connections from the socket."""
        return self._has_filter or self.reject_socket is not None

    def admit(self, caller: socket.socket) -> None:
        """Lets a bound socket connect; connections that exist stay."""
        self._ports.appendleft(caller.getsockname()[1])
        self._update()

    def release(self, caller: socket.socket) -> None:
        """Forgets a caller that is about to be closed: another user could get its port."""
        with contextlib.suppress(OSError, ValueError):  # it is not one of the newest
            self._ports.remove(caller.getsockname()[1])
            self._update()

    def _update(self) -> None:
        if self._has_filter:
            load_port = _instruction(_LOAD_HALF, 0)  # it begins the packet
            program = self._caller_match(load_port, WHOLE_PACKET, 0)
            _attach(self._listener, SO_ATTACH_FILTER, program)
        elif self.reject_socket is not None:
            _attach(self._listener, SO_ATTACH_REUSEPORT_CBPF, self._selection())

    def _selection(self) -> bytes:
        """Makes a program that hands other connections to the reject socket.

        It does not see where the TCP header begins, so it accepts no options before it.
        """
        listener, reject = REJECT_INDEX, LISTENER_INDEX  # the listener is the second to listen
        has_no_options = _require(_LOAD_BYTE, _NETWORK_HEADER, _IPV4_WITHOUT_OPTIONS, reject)
        load_port = _instruction(_LOAD_HALF, _NETWORK_HEADER + _IPV4_HEADER_BYTES)
        return has_no_options + self._caller_match(load_port, listener, reject)

    def _caller_match(self, load_port: bytes, member_result: int, other_result: int) -> bytes:
        program = [_require(_LOAD, _SOURCE_4, self._address, other_result), load_port]
        for port in self._ports:
            program.append(_instruction(_EQUAL, port, jump_if_false=1))
            program.append(_instruction(_RETURN, member_result))
        return b"".join([*program, _instruction(_RETURN, other_result)])

    def close(self) -> None:
        """Closes the reject socket, and this process's copy of the listening socket."""
        self._listener.close()
        if self.reject_socket is not None:
            self.reject_socket.close()


class RejectWatcher:
    """Reports refused addresses in a thread, each at most once in ``REPORT_PERIOD_S``."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._reported_at: Dict[str, float] = {}
        self._pid = 0  # a fork inherits the sockets, but not the thread
        self._epoll: Optional[select.epoll] = None
        self._lock = threading.Lock()  # of the filters
        # by reject socket: its filter, the listener and the listener's inode
        self._filters: Dict[int, Tuple[PeerFilter, int, int]] = {}

    def watch(self, peer_filter: PeerFilter, listener: int) -> None:
        """Watches the filter's reject socket until its listening socket is closed."""
        if peer_filter.reject_socket is None:
            return
        if self._epoll is None or self._pid != os.getpid():
            self._epoll, self._pid, self._filters = select.epoll(), os.getpid(), {}
            self._lock = threading.Lock()  # the parent may have held the other when it forked
            state = (self._epoll, self._filters)
            threading.Thread(target=self._watch_loop, args=state, name="paceline-rejects",
                             daemon=True).start()  # fmt: skip
        self.close_orphans()
        fd = peer_filter.reject_socket.fileno()
        with self._lock:
            self._filters[fd] = peer_filter, listener, os.fstat(listener).st_ino
            self._epoll.register(fd, select.EPOLLIN)

    def end(self) -> None:
        """Closes all reject sockets and ends the thread."""
        self._epoll = None
        with self._lock:
            filters = [peer_filter for peer_filter, _, _ in self._filters.values()]
        for peer_filter in filters:
            if (reject_socket := peer_filter.reject_socket) is not None:
                with contextlib.suppress(OSError):  # the thread was awake, and has closed it
                    reject_socket.shutdown(socket.SHUT_RDWR)  # wakes it

    def close_orphans(self) -> None:
        """Closes reject sockets whose listening socket is closed: they hold its port."""
        epoll = self._epoll
        if epoll is None or self._pid != os.getpid():
            return
        with self._lock:
            for reject_socket, (peer_filter, listener, inode) in list(self._filters.items()):
                with contextlib.suppress(OSError):
                    if os.fstat(listener).st_ino == inode:
                        continue
                del self._filters[reject_socket]
                epoll.unregister(reject_socket)  # a forked child may still have it
                peer_filter.close()

    def _watch_loop(
        self, epoll: select.epoll, filters: Dict[int, Tuple[PeerFilter, int, int]]
    ) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # for the main thread
        while self._epoll is epoll:
            for reject_socket, _ in epoll.poll(ORPHANS_PERIOD_S):
                peer_filter, _, _ = filters.get(reject_socket, (None, 0, 0))
                if peer_filter is not None and (address := peer_filter.accept_rejected()):
                    now = time.monotonic()
                    if now - self._reported_at.get(address, -REPORT_PERIOD_S) >= REPORT_PERIOD_S:
                        self._reported_at[address] = now
                        self._report(address)
            self.close_orphans()
        for peer_filter, _, _ in filters.values():
            peer_filter.close()
        epoll.close()
