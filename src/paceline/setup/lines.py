"""Renders lines for the ssh config, /etc/hosts and /etc/fstab. Pure."""

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
    has_settings = host.user or host.port or host.identity_file or host.address != host.name
    return bool(has_settings) or key is not None


def alias_blocks(hosts: Sequence[Host], key: Path | None) -> str:
    """Returns the text of our ssh config for the hosts that need an alias.

    Args:
        key: The identity, unless ssh tries it by itself.

    Raises:
        SettingError: A name cannot be written into an ssh config.
    """
    return _HEAD + "".join(_block(host, key) for host in hosts if needs_alias(host, key))


def _block(host: Host, key: Path | None) -> str:
    for text in (host.name, host.address, host.user or ""):
        if any(char.isspace() or char in '*?!"#' for char in text):
            raise SettingError(f"{text!r} cannot be used in an ssh config")
    identity = host.identity_file or (str(key) if key else "")
    names = " ".join(dict.fromkeys([host.name, host.address]))
    lines = [f"Host {names}", f"  HostName {host.address}"]
    lines += [f"  User {host.user}"] if host.user else []
    lines += [f"  Port {host.port}"] if host.port else []
    lines += [f'  IdentityFile "{identity}"', "  IdentitiesOnly yes"] if identity else []
    return "\n".join(lines) + "\n"


def with_include(config: str) -> str:
    """Returns the user's config with our file included first, because ssh takes the first value."""
    if INCLUDE in (line.strip() for line in config.splitlines()):
        return config
    return f"{INCLUDE}\n{config}"


def hosts_lines(addresses: Mapping[str, str], facts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns ``ADDRESS HOSTNAME ALIAS`` for every host, the same block for all of them."""
    lines = []
    for name, address in addresses.items():
        hostname = str(facts[name]["name"]["hostname"])
        lines.append(" ".join(dict.fromkeys([address, hostname, name])))
    return lines


def loopback_lines(facts: Mapping[str, Any]) -> list[str]:
    """Returns the numbered lines of this host's file that map its own name to loopback."""
    lines: Sequence[str] = facts["name"]["hosts_lines"]
    return [line for line in lines if line.split(": ", 1)[1].startswith(("127.", "::1"))]


def edit_command(script: str, is_root: bool = False) -> str:
    """Returns the command that applies a ``sed`` script without quotes to /etc/hosts.

    The file is written in place because containers mount it, and without a temporary copy that
    other users could replace.
    """
    edit = f'sh -c \'new=$(sed "{script}" /etc/hosts) && printf "%s\\n" "$new" >/etc/hosts\''
    return edit if is_root else f"sudo {edit}"


def host_names(line: str) -> list[str]:
    """Returns the host names of a line of /etc/hosts, without words that are no names."""
    names = line.partition("#")[0].split()[1:]
    return [name for name in names if re.fullmatch(r"[\w.-]+", name, re.ASCII)]


Kind = Literal["nfs", "cifs"]


@dataclass(frozen=True, slots=True)
class Share:
    """A folder of a file server.

    Attributes:
        path: Exported path (nfs) or name of the share (cifs: Windows, Samba).
        mount_point: Path on every host.
        user: Account on the server (cifs).
        uid, gid: Owner of the files on the hosts (cifs).
    """

    kind: Kind
    server: str
    path: str
    mount_point: str
    user: str = ""
    uid: int = 1000
    gid: int = 1000

    def __post_init__(self) -> None:
        if not self.mount_point.startswith("/"):
            raise SettingError(f"--at {self.mount_point} is not an absolute path")
        for text in (self.server, self.path, self.mount_point, self.user):
            if "\n" in text or "\0" in text:
                raise SettingError(f"{text!r} cannot be used in /etc/fstab")


def mount_source(share: Share) -> str:
    if share.kind == "nfs":
        server = f"[{share.server}]" if ":" in share.server else share.server
        return f"{server}:{share.path}"
    return f"//{share.server}/{share.path.strip('/')}"


def credentials_file(share: Share) -> str:
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
    """Returns the line of /etc/fstab; blanks are escaped as in fstab(5)."""
    fields = (mount_source(share), share.mount_point, share.kind, mount_options(share))
    return " ".join(field.replace(" ", "\\040").replace("\t", "\\011") for field in fields) + " 0 0"


def mount_commands(share: Share) -> list[str]:
    """Returns the commands for every host, in order; they prompt for the password."""
    package = "nfs-common" if share.kind == "nfs" else "cifs-utils"
    steps = [
        f"sudo apt-get install -y {package}",
        f"sudo mkdir -p {shlex.quote(share.mount_point)}",
    ]
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
        f"sudo mount {shlex.quote(share.mount_point)}",
    ]
