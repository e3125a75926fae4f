"""Where nodes connect to, and the token by which they prove that they belong there.

The token is what people type, keep in a file or in the environment (there it is called the
rendezvous' key); the key of the proofs is made of it.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import ipaddress
import os
import re
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.remote import this_machine
from paceline.spec.errors import SettingError
from paceline.spec.hosts import Host

DEFAULT_PORT = 29400
KEY_VARIABLE = "PACELINE_RDZV_KEY"
TOKEN_DIGITS = 32  # 128 bits: nobody who has heard a proof can find them


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where nodes meet on which the same command is typed, and what they prove.

    Attributes:
        host, port: The address.
        key: Proves that a node belongs to it; made of the token.
        token: As it is to be typed on the other nodes, when it was made up here; else empty.
        name: What the user calls it; no secret, may be empty.
        nodes: How many nodes meet.
        place: This node's place, ``None`` for the order of arrival.
        first: This node launches.
        patience_s: How long to wait for the others.
    """

    host: str
    port: int
    key: bytes = field(repr=False)
    token: str = field(repr=False)
    name: str
    nodes: int
    place: int | None
    first: bool
    patience_s: float


def endpoint(address: str, name: str | None, key_file: Path | None, place: int | None,
            nodes: int | None, patience_s: float) -> Endpoint:  # fmt: skip
    """What the options mean on this machine. SettingError when something is missing."""
    if not nodes:
        raise SettingError("--rdzv needs the number of nodes", remedy="--nnodes N")
    if place is not None and place >= nodes:
        raise SettingError(
            f"--node-rank {place} cannot be among {nodes} nodes", remedy=f"0 to {nodes - 1}"
        )
    host, port = parse_address(address)
    first = place == 0 if place is not None else is_mine(host)
    given = given_token(key_file)
    if given is None and not first:
        given = asked_token()
    made = "" if given else spelled(secrets.token_hex(TOKEN_DIGITS // 2))
    key = key_of(given or made)
    return Endpoint(host, port, key, made, name or "", nodes, place, first, patience_s)


def given_token(file: Path | None) -> str | None:
    """The token from a file or the environment, from which it is taken away; ``None`` for neither.

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


def asked_token() -> str:
    """The token as typed at this terminal. SettingError when there is none."""
    if sys.stdin is not None and sys.stdin.isatty():
        with contextlib.suppress(EOFError, OSError):
            return getpass.getpass("Key of the rendezvous, as the first node shows it: ")
    raise SettingError(
        "--rdzv needs the rendezvous' key on this node",
        found="the first node shows one when it was given none",
        remedy=f"Type it at a terminal, export {KEY_VARIABLE}, or --rdzv-key-file FILE",
    )


def key_of(text: str) -> bytes:
    """The key that a token stands for; blanks and dashes do not count.

    Raises:
        SettingError: It is none: what could be guessed proves nothing.
    """
    digits = re.sub(r"[-\s]", "", text).lower()
    if not re.fullmatch(rf"[0-9a-f]{{{TOKEN_DIGITS},256}}", digits):
        raise SettingError(
            "that is no key for a rendezvous",
            found=f"{len(digits)} characters; it needs {TOKEN_DIGITS} hexadecimal digits or more",
            remedy="As the first node shows it, or made by: openssl rand -hex 16",
        )
    return hashlib.sha256(b"paceline-rendezvous\0" + digits.encode()).digest()


def spelled(digits: str) -> str:
    """A token as people type it."""
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


def listening_addresses(endpoint: Endpoint) -> list[str]:
    """Where the first node listens: on the endpoint's address and on nothing else.

    A Debian machine resolves its own name to 127.0.1.1, where nobody else can call: then on
    every address of its own.
    """
    mine = {str(entry["address"]) for entry in usable_addresses()}
    named = [a for a in addresses_of(endpoint.host) if a in mine]
    if named or endpoint.host in ("localhost", "127.0.0.1", "::1"):
        return named or addresses_of(endpoint.host)
    return sorted(mine) or ["127.0.0.1"]


def own_addresses(interface: str | None, hosts: Sequence[Host]) -> list[str]:
    """Where agents can call this machine: loopback when they are all here.

    Raises:
        SettingError: The interface that was asked for has no usable address.
    """
    if all(host.local for host in hosts) and interface is None:
        return ["127.0.0.1"]
    found = usable_addresses()
    wanted = [a for a in found if interface is None or a["interface"] == interface]
    if not wanted:
        listed = ", ".join(f"{a['interface']} {a['address']}" for a in found)
        raise SettingError(
            f"interface {interface} was asked for, but this machine has no usable address on it"
            if interface
            else "this machine has no address that other hosts could call",
            found=listed or "loopback only",
            remedy="--iface NAME with one of these" if listed else "Bring up a network interface",
        )
    return [str(a["address"]) for a in wanted]


def usable_addresses() -> list[dict[str, Any]]:
    """Addresses of this machine that others may reach."""
    return [
        entry
        for entry in this_machine.addresses()
        if entry["scope"] == "global" and entry["usable"] and entry["interface"] != "lo"
    ]
