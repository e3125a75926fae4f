"""Addresses of this machine's interfaces, from the kernel's netlink socket (RTM_GETADDR).

``ip`` need not be installed. Formats: rtnetlink(7), netlink(7).
"""

from __future__ import annotations

import socket
import struct
from typing import Dict, Iterator, List, Tuple, Union

RTM_NEWADDR = 20
RTM_GETADDR = 22
NLMSG_DONE = 3
NLM_F_REQUEST_DUMP = 0x301
IFA_ADDRESS = 1
IFA_LOCAL = 2
IFA_FLAGS = 8
TENTATIVE = 0x40
DADFAILED = 0x08
DEPRECATED = 0x20

_MESSAGE = struct.Struct("=LHHLL")
_ADDRESS = struct.Struct("=BBBBL")
_ATTRIBUTE = struct.Struct("=HH")

Address = Dict[str, Union[str, int, bool]]


def read_dump() -> bytes:
    """Returns the kernel's raw answer with all addresses."""
    request = _MESSAGE.pack(_MESSAGE.size + _ADDRESS.size, RTM_GETADDR, NLM_F_REQUEST_DUMP, 1, 0)
    data = b""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as netlink:
        netlink.settimeout(2)
        netlink.send(request + _ADDRESS.pack(0, 0, 0, 0, 0))
        while not any(kind == NLMSG_DONE for kind, _ in _records(data, _MESSAGE)):
            data += netlink.recv(1 << 18)
    return data


def parse_dump(data: bytes, names: Dict[int, str]) -> List[Address]:
    """Parses addresses: interface, address, prefix, family (4 or 6), scope, usable.

    Args:
        data: What :func:`read_dump` gave.
        names: Interface names by index.
    """
    addresses: List[Address] = []
    for kind, body in _records(data, _MESSAGE):
        if kind != RTM_NEWADDR:
            continue
        family, prefix, flags, scope, index = _ADDRESS.unpack_from(body)
        if family not in (socket.AF_INET, socket.AF_INET6):
            continue
        attributes = {kind & 0x3FFF: value for kind, value in
                      _records(body[_ADDRESS.size :], _ATTRIBUTE)}  # fmt: skip
        raw = attributes.get(IFA_LOCAL) or attributes.get(IFA_ADDRESS)
        if raw is None:
            continue
        if IFA_FLAGS in attributes:
            flags = struct.unpack("=L", attributes[IFA_FLAGS])[0]
        addresses.append({
            "interface": names.get(index, "if%d" % index),
            "address": socket.inet_ntop(family, raw),
            "prefix": prefix,
            "family": 4 if family == socket.AF_INET else 6,
            "scope": {0: "global", 253: "link", 254: "host"}.get(scope, str(scope)),
            "usable": not flags & (TENTATIVE | DADFAILED | DEPRECATED),
        })  # fmt: skip
    return addresses


def _records(data: bytes, header: struct.Struct) -> Iterator[Tuple[int, bytes]]:
    """Yields kind and content of records whose header begins with their length and kind."""
    at = 0
    while at + header.size <= len(data):
        length, kind = header.unpack_from(data, at)[:2]
        if length < header.size:
            return
        yield kind, data[at + header.size : at + length]
        at += (length + 3) & ~3


def addresses() -> List[Address]:
    """Returns the addresses of all interfaces of this machine."""
    return parse_dump(read_dump(), dict(socket.if_nameindex()))
