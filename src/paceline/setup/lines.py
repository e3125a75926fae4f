"""Lines for other programs' files: the ssh config, /etc/hosts, /etc/fstab. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.spec.errors import SettingError
from paceline.spec.hosts import Host

ALIASES = "paceline.conf"
INCLUDE = f"Include {ALIASES}"
_HEAD = "# Hosts of paceline setup; made again by it, taken away by `paceline setup --revoke`.\n"


def needs_alias(host: Host, key: Path | None) -> bool:
    """Whether the host's name alone would not do for ssh."""
    told = host.user or host.port or host.identity_file or host.address != host.name
    return bool(told) or key is not None


def alias_blocks(hosts: Sequence[Host], key: Path | None) -> str:
    """The text of our file for the hosts that need an alias.

    Args:
        hosts: All hosts.
        key: The identity, when it is not one of the names that ssh tries by itself.

    Raises:
        SettingError: A name that no ssh config can hold.
    """
    return _HEAD + "".join(_block(host, key) for host in hosts if needs_alias(host, key))


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


def hosts_lines(addresses: Mapping[str, str], facts: Mapping[str, Mapping[str, Any]]) -> list[str]:
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


Kind = Literal["nfs", "cifs"]


@dataclass(frozen=True, slots=True)
class Share:
    """A folder of a server.

    Attributes:
        kind: ``nfs`` or ``cifs`` (Windows, Samba).
        server: Name or address.
        path: Exported path (nfs) or share's name (cifs).
        at: Where it is to be seen on every host.
        user: Account on the server (cifs).
        uid, gid: Who owns the files here (cifs).
    """

    kind: Kind
    server: str
    path: str
    at: str
    user: str = ""
    uid: int = 1000
    gid: int = 1000

    def __post_init__(self) -> None:
        if not self.at.startswith("/"):
            raise SettingError(f"--at {self.at} is not an absolute path")
        for word in (self.server, self.path, self.at, self.user):
            if "\n" in word or "\0" in word:
                raise SettingError(f"{word!r} cannot stand in /etc/fstab")


def mount_source(share: Share) -> str:
    """What is mounted, as mount(8) takes it."""
    if share.kind == "nfs":
        server = f"[{share.server}]" if ":" in share.server else share.server
        return f"{server}:{share.path}"
    return f"//{share.server}/{share.path.strip('/')}"


def credentials_file(share: Share) -> str:
    """The root-only file with the account (cifs)."""
    return f"/etc/paceline-{share.server}.cred"


def mount_options(share: Share) -> str:
    if share.kind == "nfs":
        # hard: a short outage blocks instead of corrupting; noatime: fewer writes
        return "rw,hard,noatime,_netdev"
    return (
        f"credentials={credentials_file(share)},uid={share.uid},gid={share.gid},"
        "file_mode=0664,dir_mode=0775,_netdev"
    )


def fstab_line(share: Share) -> str:
    """The line of /etc/fstab; blanks are written as fstab(5) wants them."""
    fields = (mount_source(share), share.at, share.kind, mount_options(share))
    return " ".join(field.replace(" ", "\\040").replace("\t", "\\011") for field in fields) + " 0 0"


def mount_commands(share: Share) -> list[str]:
    """What to type on every host, in order. No password stands in them: it is asked for."""
    package = "nfs-common" if share.kind == "nfs" else "cifs-utils"
    steps = [f"sudo apt-get install -y {package}", f"sudo mkdir -p {shlex.quote(share.at)}"]
    if share.kind == "cifs":
        file = shlex.quote(credentials_file(share))
        steps += [
            f"sudo install -m 600 -o root -g root /dev/null {file}",
            f"read -rsp 'Password of {share.user} on {share.server}: ' P && "
            f"printf 'username=%s\\npassword=%s\\n' {shlex.quote(share.user)} \"$P\" | "
            f"sudo tee {file} > /dev/null; unset P",
        ]
    line = shlex.quote(fstab_line(share))
    return [
        *steps,
        f"grep -qxF {line} /etc/fstab || echo {line} | sudo tee -a /etc/fstab",
        f"sudo mount {shlex.quote(share.at)}",
    ]
