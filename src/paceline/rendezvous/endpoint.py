"""The rendezvous endpoint: its address, and the token from which its key is derived.

Users call the token the rendezvous' key: it is typed, or read from a file or the environment.
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
TOKEN_DIGITS = 32  # 128 bits cannot be guessed from a recorded proof
ONE_MACHINE = "For one machine alone, leave out the rendezvous (torchrun: --standalone)"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The rendezvous of nodes on which the same command is typed.

    Attributes:
        host, port: Address of the first node.
        key: Secret that proves membership, derived from the token.
        token: The token to type on other nodes, if it was generated here; else empty.
        name: The user's name for it; no secret, may be empty.
        nodes: Number of nodes.
        place: This node's rank, ``None`` for the order of arrival.
        first: This node launches.
        timeout_s: How long to wait for the other nodes.
    """

    host: str
    port: int
    key: bytes = field(repr=False)
    token: str = field(repr=False)
    name: str
    nodes: int
    place: int | None
    first: bool
    timeout_s: float


def endpoint(address: str, name: str | None, key_file: Path | None, place: int | None,
            nodes: int | None, timeout_s: float) -> Endpoint:  # fmt: skip
    """The endpoint for the options; raises SettingError if one is missing or invalid."""
    if not nodes:
        raise SettingError("--rdzv needs the number of nodes", remedy=f"--nnodes N. {ONE_MACHINE}")
    if place is not None and place >= nodes:
        raise SettingError(
            f"--node-rank {place} cannot be among {nodes} nodes", remedy=f"0 to {nodes - 1}"
        )
    host, port = parse_address(address)
    first = place == 0 if place is not None else is_local(host)
    token = read_token(key_file)
    if token is None and not first:
        token = prompt_token()
    generated = "" if token else format_token(secrets.token_hex(TOKEN_DIGITS // 2))
    key = derive_key(token or generated)
    return Endpoint(host, port, key, generated, name or "", nodes, place, first, timeout_s)


def read_token(file: Path | None) -> str | None:
    """The token from a file, or from the environment, which loses it; ``None`` for neither.

    Raises SettingError if the file cannot be read, or other users can read it.
    """
    environment = os.environ.pop(KEY_VARIABLE, None)  # so that ranks do not get it
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


def prompt_token() -> str:
    """Prompts for the token; raises SettingError without a terminal."""
    if sys.stdin is not None and sys.stdin.isatty():
        with contextlib.suppress(EOFError, OSError):
            return getpass.getpass("Key of the rendezvous, as the first node shows it: ")
    raise SettingError(
        "this node has no key for --rdzv",
        found="the node at HOST:PORT shows its key on the screen, and there is no terminal here",
        remedy=f"Give this node the same key: export {KEY_VARIABLE}, or --rdzv-key-file FILE",
    )


def derive_key(text: str) -> bytes:
    """The key of a token; blanks and dashes are ignored.

    Raises SettingError if the token is not long enough, or not hexadecimal.
    """
    digits = re.sub(r"[-\s]", "", text).lower()
    if not re.fullmatch(rf"[0-9a-f]{{{TOKEN_DIGITS},256}}", digits):
        raise SettingError(
            "that is not a key for a rendezvous",
            found=f"{len(digits)} characters; it needs {TOKEN_DIGITS} hexadecimal digits or more",
            remedy="As the first node shows it, or made by: openssl rand -hex 16",
        )
    return hashlib.sha256(b"paceline-rendezvous\0" + digits.encode()).digest()


def format_token(digits: str) -> str:
    """A token with dashes, for people."""
    return "-".join(digits[i : i + 4] for i in range(0, len(digits), 4))


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``, ``HOST`` or ``[IPV6]:PORT``."""
    host, colon, port = text.rpartition(":")
    if not colon or (host.count(":") and not host.startswith("[")):
        host, port = text, str(DEFAULT_PORT)
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingError(
            f"--rdzv {text} is not an address", remedy=f"--rdzv HOST:PORT. {ONE_MACHINE}"
        )
    return host, int(port)


def is_local(host: str) -> bool:
    """Whether an address or name is this machine."""
    name = socket.gethostname()
    if host in {name, name.split(".")[0], "localhost", "127.0.0.1", "::1"}:
        return True
    addresses = {str(entry["address"]) for entry in usable_addresses()}
    return bool(addresses & set(resolve(host)))


def resolve(host: str) -> list[str]:
    """The addresses of a name, without loopback if there are others."""
    try:
        entries = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except OSError:
        return []
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    parsed = {a: ipaddress.ip_address(a.split("%")[0]) for a in addresses}
    return [a for a in addresses if not parsed[a].is_loopback] or addresses


def listening_addresses(endpoint: Endpoint) -> list[str]:
    """The addresses on which the first node listens: only the endpoint's, if it is usable.

    A Debian machine resolves its own name to 127.0.1.1, which other nodes cannot reach: then it
    listens on all of its addresses.
    """
    local = {str(entry["address"]) for entry in usable_addresses()}
    resolved = resolve(endpoint.host)
    usable = [address for address in resolved if address in local]
    if usable or endpoint.host in ("localhost", "127.0.0.1", "::1"):
        return usable or resolved
    return sorted(local) or ["127.0.0.1"]


def local_addresses(interface: str | None, hosts: Sequence[Host],
                    name: str = "this machine") -> list[str]:  # fmt: skip
    """This machine's addresses for agents: loopback if all agents are local.

    Raises SettingError, which calls this machine by its name, if there is no usable address on the
    interface.
    """
    if all(host.local for host in hosts) and interface is None:
        return ["127.0.0.1"]
    usable = usable_addresses()
    matching = [a for a in usable if interface is None or a["interface"] == interface]
    if not matching:
        listed = ", ".join(f"{a['interface']} {a['address']}" for a in usable)
        raise SettingError(
            f"interface {interface} was asked for, but {name} has no usable address on it"
            if interface
            else f"{name} has no address that other hosts could call",
            found=listed or "loopback only",
            remedy="--iface NAME with one of these" if listed else "Bring up a network interface",
        )
    return [str(a["address"]) for a in matching]


def usable_addresses() -> list[dict[str, Any]]:
    """Addresses of this machine that other machines may reach."""
    return [
        entry
        for entry in this_machine.addresses()
        if entry["scope"] == "global" and entry["usable"] and entry["interface"] != "lo"
    ]
