"""Aliases in the ssh config: one block a host in a file of ours, included by the user's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.spec.errors import SettingError
from paceline.spec.hosts import Host

NAME = "paceline.conf"
INCLUDE = f"Include {NAME}"
_HEAD = "# Hosts of paceline setup; made again by it, taken away by `paceline setup --revoke`.\n"


def needed(host: Host, key: Path | None) -> bool:
    """Whether the host's name alone would not do for ssh."""
    told = host.user or host.port or host.identity_file or host.address != host.name
    return bool(told) or key is not None


def blocks(hosts: Sequence[Host], key: Path | None) -> str:
    """The text of our file for the hosts that need an alias.

    Args:
        hosts: All hosts.
        key: The identity, when it is not one of the names that ssh tries by itself.

    Raises:
        SettingError: A name that no ssh config can hold.
    """
    return _HEAD + "".join(_block(host, key) for host in hosts if needed(host, key))


def _block(host: Host, key: Path | None) -> str:
    for word in (host.name, host.address, host.user or ""):
        if any(char.isspace() or char in '*?!"#' for char in word):
            raise SettingError(f"{word!r} cannot stand in an ssh config")
    identity = host.identity_file or (str(key) if key else "")
    names = " ".join(dict.fromkeys([host.name, host.address]))
    lines = [f"Host {names}", f"  HostName {host.address}"]
    lines += [f"  User {host.user}"] if host.user else []
    lines += [f"  Port {host.port}"] if host.port else []
    lines += [f'  IdentityFile "{identity}"', "  IdentitiesOnly yes"] if identity else []
    return "\n".join(lines) + "\n"


def with_include(config: str) -> str:
    """The user's config with our file included first (ssh takes the first value it meets)."""
    if INCLUDE in (line.strip() for line in config.splitlines()):
        return config
    return f"{INCLUDE}\n{config}"
