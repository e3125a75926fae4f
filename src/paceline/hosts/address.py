"""Parses ``[user@]host[:n]``, with IPv6 addresses and node-list brackets."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from paceline.hosts.dialect import UnreadableError
from paceline.hosts.nodelist import expand_item

_NAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?\.?")
_USER = re.compile(r"[A-Za-z0-9_.](?:[A-Za-z0-9_.+\\-]|@(?=[A-Za-z0-9]))*\$?")
_ZONE = re.compile(r"[A-Za-z0-9_.-]+")
_BRACKETED = re.compile(r"\[([^\]]*)\](?::(.*))?")
_TAIL = re.compile(r"(.*?)(?::([^:\]]*))?")  # a colon after the last bracket

HOST_FORM = "a host name or an IP address (letters, digits, `.`, `-`, `_`)"


@dataclass(frozen=True, slots=True)
class HostToken:
    """One host as written; ``number`` followed the colon and may be slots or a port."""

    address: str
    user: str | None = None
    number: int | None = None


def parse_host_token(text: str) -> list[HostToken]:
    """Returns the hosts of a token, all with its number; several for a bracket range.

    Raises UnreadableError.
    """
    user, at, host_and_number = text.rpartition("@")
    if at:
        check_user(user)
    host, number = _split_number(host_and_number)
    addresses = [host] if _is_v6(host) else expand_item(host)
    return [HostToken(check_address(a), user if at else None, number) for a in addresses]


def check_address(text: str) -> str:
    """Returns the address if SSH accepts it; raises UnreadableError otherwise."""
    if ":" in text:
        if not _is_v6(text):
            raise UnreadableError("an IPv6 address (`fd00::1`, with a number `[fd00::1]:2`)")
    elif text.isdigit():
        raise UnreadableError(f"a host, or `slots={text}` instead of `{text}`")
    elif re.fullmatch(r"[0-9]+\.[0-9.]+-[0-9.]+", text):
        raise UnreadableError("`10.0.0.[3-6]` for a range of addresses")
    elif re.fullmatch(r"[0-9.]+", text):
        if not _is_v4(text):
            without_zeros = re.sub(r"\b0+(?=[0-9])", "", text)
            if _is_v4(without_zeros):
                raise UnreadableError(
                    f"`{without_zeros}`: to some programs a leading zero means octal"
                )
            raise UnreadableError("an IPv4 address of four numbers from 0 to 255")
    elif not _NAME.fullmatch(text):
        raise UnreadableError(HOST_FORM)
    _check_is_host_address(text)
    return text


def _check_is_host_address(text: str) -> None:
    ip = parse_ip(text)
    if ip is not None and (ip.is_unspecified or text == "255.255.255.255"):
        raise UnreadableError(f"an address of one machine, not `{text}`")
    if isinstance(ip, ipaddress.IPv6Address) and ip.is_link_local and not ip.scope_id:
        raise UnreadableError(f"an interface behind a link-local address: `{text}%eth0`")


def parse_ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Returns the IP address; ``None`` for any other text."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def check_user(user: str) -> str:
    """Returns the login name; raises UnreadableError."""
    if not _USER.fullmatch(user):
        raise UnreadableError("a login name of letters, digits, `.`, `-`, `_`")
    return user


def canonical_address(address: str) -> str:
    """Returns one spelling for all spellings of an address or name."""
    ip = parse_ip(address)
    return address.lower().rstrip(".") if ip is None else str(ip)


def join_number(address: str, number: int | None) -> str:
    """Returns ``host:n``, with brackets around IPv6, or the address if there is no number."""
    if number is None:
        return address
    return f"[{address}]:{number}" if ":" in address else f"{address}:{number}"


def parse_integer(text: str, description: str, maximum: int) -> int:
    """Parses a number from 1 to ``maximum``; raises UnreadableError."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= maximum:
        raise UnreadableError(f"{description} as a whole number from 1 to {maximum}")
    return int(text)


def _split_number(text: str) -> tuple[str, int | None]:
    bracketed = _BRACKETED.fullmatch(text)
    if bracketed and ":" in bracketed[1]:
        return bracketed[1], _parse_number(bracketed[2])
    if _is_v6(text):
        return text, None
    tail = _TAIL.fullmatch(text)
    return (tail[1], _parse_number(tail[2])) if tail else (text, None)


def _parse_number(text: str | None) -> int | None:
    return None if text is None else parse_integer(text, "slots or a port after the colon", 65535)


def _is_v6(text: str) -> bool:
    ip = parse_ip(text)
    if not isinstance(ip, ipaddress.IPv6Address):
        return False
    return ip.scope_id is None or bool(_ZONE.fullmatch(ip.scope_id))


def _is_v4(text: str) -> bool:
    return isinstance(parse_ip(text), ipaddress.IPv4Address)
