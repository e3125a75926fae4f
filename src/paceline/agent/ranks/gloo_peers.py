"""Restricts a rank's gloo connections to the job's hosts.

Whoever reads an open rendezvous store, or tries all ports, can connect to gloo, and its connection
numbers can be guessed. So gloo's devices accept only the job's hosts, and nobody once a group is
complete. Before a group is used, the remote addresses of all its connections are compared with the
job's addresses, the users at the other ends of connections within this host with this process's
user, and the connections that other hosts have made with those that their ranks know.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import re
import select
import socket
import struct
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Callable, Collection, Iterator, List, NamedTuple, Optional, Tuple

from ..supervision import processes, socket_users
from ..surveys import netlink
from . import peer_filters, tunnels
from .connection_proofs import Connection, ConnectionProofs

# of torch's TCPStore, as many as may be given by position
_STORE_ARGUMENTS = (
    "host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers", "multi_tenant",
    "master_listen_fd", "use_libuv",
)  # fmt: skip
_MAX_DEVICES = 100  # that somebody calls before they have a filter
_STORE_BACKLOG = 1024  # of a store that rank 0 holds by itself
_TIMEOUT = timedelta(minutes=30)  # torch's own
_BLOCKED_BACKLOG, _DEVICE_BACKLOG = 64, 2048  # of a gloo device that is blocked, or not
_LAZY_VARIABLE, _OFF = "TORCH_GLOO_LAZY_INIT", ("", "0", "n", "no", "f", "false")  # torch's own
_STRANGERS_USER = 1 << 32  # stands for an unknown user who is none of this job: no user's number
_EPOLL_CTL_MOD = 3
# struct epoll_event in linux/eventpoll.h
_EPOLL_EVENT = struct.Struct("=IQ" if platform.machine() in ("x86_64", "AMD64") else "@IQ")
_BYTES_RECEIVED = struct.Struct("=128xQ")  # of struct tcp_info in linux/tcp.h
_REGISTERED = re.compile(
    r"^tfd: +(\d+) +events: +[0-9a-f]+ +data: +([0-9a-f]+) .*ino:([0-9a-f]+)", re.MULTILINE
)


class StrangerError(RuntimeError):
    """A group has a connection with no host of the job, or with another user of one."""

    def __init__(self, address: str) -> None:
        super().__init__(
            "gloo has a connection with %s, which is not one of this job's hosts or belongs to"
            " another user: somebody pretends to be one of its ranks. Nothing was exchanged with it"
            % address
        )


class _Peer(NamedTuple):
    """A connection of a device.

    Attributes:
        address: The remote address.
        ends: Both ends. ``None`` for a connection within this host, whose user the kernel knows.
        is_caller: Whether this rank has made the connection.
        is_stranger: Whether the other end is no rank of the job, as far as that is known.
        is_silent: Whether a stranger has sent nothing.
    """

    address: str
    ends: Optional[Connection]
    is_caller: bool
    is_stranger: bool
    is_silent: bool


@dataclass
class _Device:
    """A device of gloo: its listening socket, and the epoll that watches its connections.

    ``epoll`` and ``listener`` are gloo's own descriptors; it closes them with its last group.
    """

    epoll: int
    listener: int
    inode: int
    peer_filter: Optional[peer_filters.PeerFilter] = None

    @property
    def port(self) -> int:
        """The port on which it listens. Raises OSError if gloo has closed it."""
        with self.dup_listener() as listener:
            if listener is None:
                raise OSError("gloo's listening socket is closed")
            return int(listener.getsockname()[1])

    @contextlib.contextmanager
    def dup_listener(self) -> Iterator[Optional[socket.socket]]:
        """Duplicates the listening socket; ``None`` if gloo has closed it."""
        duplicate = _dup_socket(self.listener, self.inode)
        with duplicate or contextlib.nullcontext():
            yield duplicate

    def peers(
        self, hosts: peer_filters.HostSet, unproven: Collection[Connection] = ()
    ) -> Iterator[_Peer]:
        """Yields each connection, and shuts down those of strangers.

        Strangers are all but ``hosts``, other users of this host, and ``unproven``.
        """
        with self.dup_listener() as listener:
            port = listener.getsockname()[1] if listener is not None else 0
        for fd, inode in _watched_descriptors(self.epoll):
            connection = None if inode == self.inode else _dup_socket(fd, inode)
            if connection is None:
                continue
            with connection, contextlib.suppress(OSError):  # a pipe, or it has ended
                local, remote = connection.getsockname()[:2], connection.getpeername()[:2]
                is_caller, user = local[1] != port, _user_of(connection)
                is_unknown = user == socket_users.UNKNOWN_USER and remote[0] != local[0]
                ends = None
                if user == socket_users.NO_USER or is_unknown:
                    ends = Connection(*local, *remote) if is_caller else Connection(*remote, *local)
                is_stranger = (
                    remote[0] not in hosts
                    or user not in (os.getuid(), socket_users.NO_USER, socket_users.UNKNOWN_USER)
                    or ends in unproven
                )
                has_sent_nothing = False
                if not is_caller:
                    peer_filters.detach_filter(connection)
                    if is_stranger:
                        connection.shutdown(socket.SHUT_RDWR)
                        has_sent_nothing = not _bytes_received(connection)
                yield _Peer(remote[0], ends, is_caller, is_stranger, has_sent_nothing)

    def has_callers(self) -> bool:
        """Whether somebody has connected to a new device, or has begun to.

        The job's ranks do not know its port yet. Strangers try all ports, and gloo listens shortly
        before the filter is attached.
        """
        try:
            port = self.port
        except OSError:
            return False
        return processes.has_connections(port) or port in _accepted_ports()

    @property
    def is_open(self) -> bool:
        """Whether gloo has not closed these descriptors."""
        return any(inode == self.inode for _, inode in _watched_descriptors(self.epoll))

    def admit(self, hosts: peer_filters.HostSet) -> None:
        """Accepts connections of ``hosts`` only."""
        with self.dup_listener() as listener:
            if listener is not None and self.peer_filter is not None:
                self.peer_filter.admit(listener, hosts)
                if self._set_events(select.EPOLLIN):
                    listener.listen(_DEVICE_BACKLOG)

    def block(self) -> None:
        """Accepts no connections until :meth:`admit`.

        If the kernel does not drop them, gloo no longer learns of them: they wait in a short queue.
        gloo would keep each of them, and end the process once it may open no more files.
        """
        with self.dup_listener() as listener:
            if listener is None or self.peer_filter is None or self.peer_filter.block(listener):
                return
            if self._set_events(0):
                listener.listen(_BLOCKED_BACKLOG)

    def _set_events(self, events: int) -> bool:
        """Sets the events of the listening socket that gloo learns of; returns whether it did."""
        for fd, inode, data in _registrations(self.epoll):
            if inode == self.inode:
                event = _EPOLL_EVENT.pack(events, data)
                epoll_ctl = ctypes.CDLL(None).epoll_ctl
                return bool(epoll_ctl(self.epoll, _EPOLL_CTL_MOD, fd, event) == 0)
        return False


def _user_of(connection: socket.socket) -> int:
    """Returns the user at the other end, as ``peer_user``; a stranger's if that cannot be asked."""
    try:
        return socket_users.peer_user(connection)
    except OSError:  # too many open files: strangers could cause that
        return _STRANGERS_USER


def _bytes_received(connection: socket.socket) -> int:
    """Returns the number of bytes received on a connection, read or not; 1 if unknown."""
    tcp_info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
    return int(_BYTES_RECEIVED.unpack(tcp_info)[0]) if len(tcp_info) == _BYTES_RECEIVED.size else 1


def _watched_descriptors(epoll: int) -> List[Tuple[int, int]]:
    """Returns the descriptors that an epoll watches, with their inodes; empty if unknown."""
    return [(fd, inode) for fd, inode, _ in _registrations(epoll)]


def _registrations(epoll: int) -> List[Tuple[int, int, int]]:
    """Returns descriptor, inode and data of all that an epoll watches; empty if unknown."""
    try:
        with open("/proc/self/fdinfo/%d" % epoll) as file:
            entries = _REGISTERED.findall(file.read())
    except OSError:
        return []
    return [(int(fd), int(inode, 16), int(data, 16)) for fd, data, inode in entries]


def _dup_socket(fd: int, inode: int) -> Optional[socket.socket]:
    """Duplicates gloo's socket; ``None`` if the descriptor belongs to another file by now."""
    duplicate = _dup_if_socket(fd)
    if duplicate is not None and os.fstat(duplicate.fileno()).st_ino != inode:
        duplicate.close()
        return None
    return duplicate


def _dup_if_socket(fd: int) -> Optional[socket.socket]:
    """Duplicates a descriptor as a socket; ``None`` if it is none."""
    with contextlib.suppress(OSError):
        duplicate = os.dup(fd)
        try:
            return socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
    return None


def _accepted_ports() -> Iterator[int]:
    """Yields the local port of each connection of this process."""
    for name in os.listdir("/proc/self/fd"):
        duplicate = _dup_if_socket(int(name))
        if duplicate is None:
            continue
        with duplicate, contextlib.suppress(OSError):
            is_listening = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if duplicate.family in (socket.AF_INET, socket.AF_INET6) and not is_listening:
                yield int(duplicate.getsockname()[1])


def _epolls() -> List[int]:
    """Returns this process's epoll descriptors."""
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink("/proc/self/fd/" + name) == "anon_inode:[eventpoll]":
                descriptors.append(int(name))
    return descriptors


def _find_device(previous_epolls: List[int]) -> Optional[_Device]:
    """Finds the device of an epoll that is not in ``previous_epolls``; ``None`` if none is."""
    for epoll in set(_epolls()) - set(previous_epolls):
        for fd, inode in _watched_descriptors(epoll):
            duplicate = _dup_socket(fd, inode)
            if duplicate is None:
                continue
            with duplicate, contextlib.suppress(OSError):
                if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    return _Device(epoll, fd, inode)
    return None


def job_address(interface: str) -> str:
    """Returns the address to use on ``interface`` in a job over IPv6; "" lets gloo choose.

    gloo would take an IPv4 address even if other hosts of the job have only IPv6 addresses.
    """
    if ":" not in os.environ.get("MASTER_ADDR", ""):
        return ""
    criteria = {"interface": interface, "family": 6, "scope": "global", "usable": True}
    with contextlib.suppress(OSError):
        for entry in netlink.addresses():
            if criteria.items() <= entry.items():
                return str(entry["address"])
    return ""


class GlooFilter:
    """Restricts the groups that gloo makes in this process to the job's hosts.

    Args:
        gloo: torch's ``ProcessGroupGloo``.
        on_reject: Called with each address whose connection a device has rejected.
        on_stranger: Called with an address that a group is connected with, before the error.
    """

    def __init__(
        self, gloo: Any, on_reject: peer_filters.Report, on_stranger: peer_filters.Report
    ) -> None:
        self._gloo, self._on_stranger = gloo, on_stranger
        self.rejects = peer_filters.RejectWatcher(on_reject)
        self._make_lock()
        os.register_at_fork(after_in_child=self._make_lock)
        self._devices: List[_Device] = []

    def _make_lock(self) -> None:
        """Makes the lock under which a device is created; a fork may inherit a locked one."""
        self._creating = threading.Lock()  # new epolls are of one device

    def make_options(
        self, timeout: timedelta, hosts: peer_filters.HostSet, address: str = ""
    ) -> Tuple[Any, List[_Device]]:
        """Makes gloo's default options, with devices that accept only ``hosts``.

        ``address``: of the only device; empty for one on each interface that the user has named.
        """
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        options, devices = self._gloo._Options(), []
        for interface in [""] if address else interfaces or [""]:
            for _ in range(_MAX_DEVICES):
                with self._creating:
                    epolls = _epolls()
                    gloo_device = self._create_device(interface, address)
                    device = _find_device(epolls)
                if device is not None:
                    self._attach(device, hosts)
                if device is None or not device.has_callers():
                    break
            options._devices = [*options._devices, gloo_device]
            if device is not None:
                devices.append(device)
        options._timeout = timeout
        options._threads = 2 * len(options._devices)
        return options, devices

    def _create_device(self, interface: str, address: str) -> Any:
        if address:
            return self._gloo.create_device(hostname=address)
        if interface:
            return self._gloo.create_device(hostname=job_address(interface), interface=interface)
        return self._gloo.create_default_device()

    def _attach(self, device: _Device, hosts: peer_filters.HostSet) -> None:
        with device.dup_listener() as listener:
            if listener is not None:
                device.peer_filter = peer_filters.PeerFilter(listener, hosts)
                self.rejects.watch(device.peer_filter, device.listener)

    def verify(
        self,
        devices: List[_Device],
        hosts: peer_filters.HostSet,
        ranks: int,
        proofs: Optional[ConnectionProofs] = None,
    ) -> None:
        """Checks the connections of a group of ``ranks`` ranks, and blocks its devices.

        ``proofs``: of connections between hosts; ``None`` where these are not compared.

        Raises StrangerError if a connection leads to none of ``hosts``, to another user of this
        one, or to a process of another one that is no rank.
        """
        for device in devices:
            members = self._without_strangers(device.peers(hosts))
            if len(members) >= ranks - 1:  # else ranks connect when they first send something
                device.block()
        if proofs is not None:
            # again: until its device was blocked, a rank may have accepted others
            ends = [(peer.ends, peer.is_caller) for device in devices
                    for peer in device.peers(hosts) if peer.ends is not None]  # fmt: skip
            proofs.publish([each for each, is_caller in ends if is_caller], bool(devices))
            own = peer_filters.own_addresses()  # behind NAT, both ends differ
            accepted = [each for each, is_caller in ends if not is_caller and each.caller in own]
            if unproven := proofs.find_unproven(accepted):
                for device in devices:
                    self._without_strangers(device.peers(hosts, unproven))
        self._devices += [device for device in devices if device not in self._devices]

    def _without_strangers(self, peers: Iterator[_Peer]) -> List[_Peer]:
        """Returns the members among all peers; StrangerError if a stranger is no harmless one.

        A stranger may have connected before the filter was attached. It is harmless unless it has
        sent data: a connection's number makes gloo take it for a rank.
        """
        members = []
        for peer in list(peers):
            if not peer.is_stranger:
                members.append(peer)
            elif not peer.is_silent:
                address = str(peer_filters.parse_address(peer.address))
                self._on_stranger(address)
                raise StrangerError(address)
        return members

    @contextlib.contextmanager
    def reopened(self, hosts: peer_filters.HostSet) -> Iterator[None]:
        """Reopens all devices while groups are made over them, as when torch splits groups."""
        devices = self._devices = [device for device in self._devices if device.is_open]
        for device in devices:
            device.admit(hosts)
        yield
        self.verify([*devices], hosts, 0)


def install(c10d: Any, on_reject: peer_filters.Report, on_stranger: peer_filters.Report) -> None:
    """Restricts all gloo groups of ``torch.distributed.distributed_c10d``: see GlooFilter."""
    gloo = getattr(c10d, "ProcessGroupGloo", None)
    if gloo is None or not all(hasattr(gloo, name) for name in ("_Options", "create_device")):
        return
    original, gloo_filter = gloo.__init__, GlooFilter(gloo, on_reject, on_stranger)

    @functools.wraps(original)
    def init(self: Any, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> None:
        ways = tunnels.current()
        hosts = peer_filters.LOOPBACK if ways else peer_filters.job_hosts()
        arguments = {"timeout": args[0]} if args else kwargs
        timeout = arguments.get("timeout", arguments.get("options", _TIMEOUT))
        if ways and not isinstance(timeout, timedelta):
            raise RuntimeError(
                "--encrypt: the script makes gloo's devices itself, whose connections Paceline"
                " cannot encrypt. Let init_process_group and new_group make them"
            )
        if hosts is None or not isinstance(timeout, timedelta):  # the caller has made devices
            original(self, store, rank, size, *args, **kwargs)
            return
        for attempt in range(tunnels.MAX_ATTEMPTS):
            address = ways.address if ways else ""
            options, devices = gloo_filter.make_options(timeout, hosts, address)
            if not ways or tunnels.meet(ways, store, rank, size, devices[0].port, attempt):
                break
        # tunnels have proved who they are; lazy connections are made once the group is there
        is_lazy = os.environ.get(_LAZY_VARIABLE, "").lower() not in _OFF
        proofs = None if ways or is_lazy else ConnectionProofs(store, size)
        try:
            original(self, store, rank, size, options)
        except Exception:
            if proofs is not None:
                with contextlib.suppress(RuntimeError):  # the store is gone, too
                    proofs.withdraw()
            raise
        gloo_filter.verify(devices, hosts, size, proofs)

    gloo.__init__ = init
    store: Any = getattr(sys.modules.get("torch.distributed"), "TCPStore", None)
    if store is not None:
        store.__init__ = _guard_stores(store.__init__, gloo_filter.rejects)
    for name in ("split_group", "merge_remote_group"):
        if hasattr(c10d.ProcessGroup, name):
            method = getattr(c10d.ProcessGroup, name)
            setattr(c10d.ProcessGroup, name, _wrap_group_method(method, gloo_filter))


def _guard_stores(
    original: Callable[..., None], rejects: peer_filters.RejectWatcher
) -> Callable[..., None]:
    """Wraps ``TCPStore.__init__``: stores of this rank, on all interfaces, get a filter."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(_STORE_ARGUMENTS, args)), **kwargs}
        hosts, port = peer_filters.job_hosts(), given.get("port", 0)
        is_server = given.get("is_master") and given.get("master_listen_fd") is None
        if hosts is not None and is_server:
            rejects.close_orphans()  # of an earlier store on this port
            # this process has a store there, or torch says why
            with contextlib.suppress(OSError, OverflowError, TypeError):
                listener = _listen_everywhere(port, hosts, rejects)
                given.update(port=listener.getsockname()[1], master_listen_fd=listener.detach())
        original(self, **given)

    return init


def _listen_everywhere(
    port: int, hosts: peer_filters.HostSet, rejects: peer_filters.RejectWatcher
) -> socket.socket:
    """Listens on all interfaces, and never accepts others than ``hosts``. May raise OSError."""
    has_ipv6 = socket.has_dualstack_ipv6()
    listener = socket.socket(socket.AF_INET6 if has_ipv6 else socket.AF_INET)
    try:
        if has_ipv6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", port))
        rejects.watch(peer_filters.PeerFilter(listener, hosts), listener.fileno())
        listener.listen(_STORE_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _wrap_group_method(method: Callable[..., Any], gloo_filter: GlooFilter) -> Callable[..., Any]:
    """Wraps a method that makes groups from a group, over the same devices."""

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        hosts = peer_filters.LOOPBACK if tunnels.current() else peer_filters.job_hosts()
        with contextlib.nullcontext() if hosts is None else gloo_filter.reopened(hosts):
            return method(self, *args, **kwargs)

    return wrapped
