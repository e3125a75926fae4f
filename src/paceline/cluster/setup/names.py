"""Lines for /etc/hosts: suggested, never written. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def wanted(addresses: Mapping[str, str], facts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """``ADDRESS HOSTNAME ALIAS`` for every host: the same block for all of them."""
    lines = []
    for name, address in addresses.items():
        called = str(facts[name]["name"]["hostname"])
        lines.append(" ".join(dict.fromkeys([address, called, name])))
    return lines


def loopback_lines(facts: Mapping[str, Any]) -> list[str]:
    """The lines of this host's file that map its own name to loopback, with their numbers."""
    lines: Sequence[str] = facts["name"]["hosts_lines"]
    return [line for line in lines if line.split(": ", 1)[1].startswith(("127.", "::1"))]
