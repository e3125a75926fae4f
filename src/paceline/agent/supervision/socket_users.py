"""Which users' sockets are at the other ends of connections within this host.

The kernel answers by netlink (``sock_diag``), which takes 0.1 ms, or in /proc/net/tcp, for which it
walks through all sockets.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple, Optional, Tuple

from ..surveys import probe

NO_USER, UNKNOWN_USER = -1, -2
_ANY = ("0.0.0.0", 0)  # noqa: S104 - the remote address of a listening socket
_MAPPED = "0" * 16 + "%08X" % struct.unpack("=I", b"\0\0\xff\xff")[0]  # ::ffff:
_MAX_LINE = 200  # characters of /proc/net/tcp behind the addresses
# linux/inet_diag.h and sock_diag.h
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _ERROR = 4, 20, 2
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI")
_PORTS = struct.Struct("!HH")
_ANY_ID = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # interface and cookie
_ANSWER = struct.Struct("=xB2x4x16s16s12x12xII")  # state, addresses; user, inode
_LISTENING = 10  # state
_TIMEOUT_S = 1.0

Address = Tuple[str, int]


class _Owner(NamedTuple):
    address: bytes  # of the socket, packed in 16 bytes; all zeros if it listens on all
    user: int


def peer_user(connection: socket.socket) -> int:
    """Returns the user at the other end of a connection within this host, as the kernel says.

    :data:`NO_USER` if that end is closed, :data:`UNKNOWN_USER` if the kernel does not say it.

    Raises OSError if this process may open no more files: that is no property of the kernel.
    """
    try:
        names = connection.getpeername()[:2], connection.getsockname()[:2]
    except OSError:
        return NO_USER
    try:
        owner = _ask(*names)
    except OSError:
        owner = _read_owner(*names)
        if owner is None and not _knows_users():
            return UNKNOWN_USER
    return NO_USER if owner is None else owner.user


def listens(address: Address) -> bool:
    """Whether this user listens at an IPv4 address, and not on all; true if unknown.

    Raises OSError as :func:`peer_user` does.
    """
    try:
        owner = _ask(address, _ANY)
    except OSError:
        owner = _read_owner(address, _ANY)
        if owner is None and not _knows_users():
            return True
    return owner == _Owner(socket.inet_aton(address[0]).ljust(16, b"\0"), os.getuid())


def _ask(local: Address, remote: Address) -> Optional[_Owner]:
    """Asks the kernel who has the socket with these addresses; ``None`` if there is none.

    Raises OSError if it cannot be asked.
    """
    owner = _query(local, remote)
    if owner is None and not _answers():
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    return owner


def _query(local: Address, remote: Address) -> Optional[_Owner]:
    family = probe.family_of(local[0])
    packed = [socket.inet_pton(family, address[0]).ljust(16, b"\0") for address in (local, remote)]
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
    body += _PORTS.pack(local[1], remote[1]) + b"".join(packed) + _ANY_ID
    header = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, 1, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(_TIMEOUT_S)
        netlink.sendto(header + body, (0, 0))
        answer = netlink.recv(1 << 16)
    if _HEADER.unpack_from(answer)[1] == _ERROR:
        number = -struct.unpack_from("=i", answer, _HEADER.size)[0]
        if number == errno.ENOENT:
            return None
        raise OSError(number, os.strerror(number))
    state, address, _, user, inode = _ANSWER.unpack_from(answer, _HEADER.size)
    if state == _LISTENING and remote != _ANY:
        return None  # in place of a connection it gives a socket that listens on all addresses
    return _Owner(address, user if inode else NO_USER)


@functools.lru_cache(maxsize=None)
def _answers() -> bool:
    """Whether the kernel knows sockets; without inet_diag it says that there are none."""
    with contextlib.closing(probe.listen("127.0.0.1")) as listener:
        return _query(listener.getsockname(), _ANY) is not None


def _read_owner(local: Address, remote: Address) -> Optional[_Owner]:
    """Does what :func:`_ask` does with /proc/net/tcp."""
    # an IPv6 socket of the caller has IPv4 addresses at the end of mapped ones
    table = _tcp_table()
    for prefix in ("", _MAPPED) if probe.family_of(local[0]) == socket.AF_INET else ("",):
        ends = " %s%s %s%s " % (prefix, _table_entry(*local), prefix, _table_entry(*remote))
        _, separator, line = table.partition(ends)
        if separator:
            fields = line[:_MAX_LINE].split()
            user, inode = int(fields[4]), fields[6]
            packed = socket.inet_pton(probe.family_of(local[0]), local[0])
            return _Owner(packed.ljust(16, b"\0"), user if inode != "0" else NO_USER)
    return None


def _tcp_table() -> str:
    """Returns /proc/net/tcp and tcp6, without those that a sandbox does not have.

    Raises OSError for lack of descriptors or memory, which strangers could cause.
    """
    text = ""
    for name in ("tcp", "tcp6"):
        try:
            text += Path("/proc/self/net/" + name).read_text()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
    return text


def _table_entry(address: str, port: int) -> str:
    """Returns an address and port as in /proc/net/tcp."""
    packed = socket.inet_pton(probe.family_of(address), address)
    words = struct.unpack("=%dI" % (len(packed) // 4), packed)
    return "%s:%04X" % ("".join("%08X" % word for word in words), port)


@functools.lru_cache(maxsize=None)
def _knows_users() -> bool:
    """Whether /proc/net/tcp has this process's sockets; some sandboxes have no such table."""
    with contextlib.closing(probe.listen("127.0.0.1")) as listener:
        entry = _table_entry(*listener.getsockname())
        return " %s " % entry in _tcp_table()
