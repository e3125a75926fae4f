"""Lines for /etc/hosts: suggested, never written. Pure."""

from __future__ import annotations

import re
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


def edit_command(script: str) -> str:
    """The command that applies a ``sed`` script, free of quotes, to /etc/hosts.

    It is read whole before it is written, into the same file, because containers mount that: no
    copy lies in a folder where others could exchange it before root takes it.
    """
    return f'sudo sh -c \'new=$(sed "{script}" /etc/hosts) && printf "%s\\n" "$new" >/etc/hosts\''


def plain_names(line: str) -> list[str]:
    """Host names of a line of somebody's /etc/hosts; words that no name can be are left out."""
    words = line.partition("#")[0].split()[1:]
    return [word for word in words if re.fullmatch(r"[\w.-]+", word, re.ASCII)]
