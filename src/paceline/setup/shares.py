"""Lines that mount a shared folder, with credentials in a file for root only. Pure."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal

from paceline.spec.errors import SettingError

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


def source(share: Share) -> str:
    """What is mounted, as mount(8) takes it."""
    if share.kind == "nfs":
        server = f"[{share.server}]" if ":" in share.server else share.server
        return f"{server}:{share.path}"
    return f"//{share.server}/{share.path.strip('/')}"


def credentials(share: Share) -> str:
    """The root-only file with the account (cifs)."""
    return f"/etc/paceline-{share.server}.cred"


def options(share: Share) -> str:
    if share.kind == "nfs":
        # hard: a short outage blocks instead of corrupting; noatime: fewer writes
        return "rw,hard,noatime,_netdev"
    return (
        f"credentials={credentials(share)},uid={share.uid},gid={share.gid},"
        "file_mode=0664,dir_mode=0775,_netdev"
    )


def fstab(share: Share) -> str:
    """The line of /etc/fstab; blanks are written as fstab(5) wants them."""
    fields = (source(share), share.at, share.kind, options(share))
    return " ".join(field.replace(" ", "\\040").replace("\t", "\\011") for field in fields) + " 0 0"


def commands(share: Share) -> list[str]:
    """What to type on every host, in order. No password stands in them: it is asked for."""
    package = "nfs-common" if share.kind == "nfs" else "cifs-utils"
    steps = [f"sudo apt-get install -y {package}", f"sudo mkdir -p {shlex.quote(share.at)}"]
    if share.kind == "cifs":
        file = shlex.quote(credentials(share))
        steps += [
            f"sudo install -m 600 -o root -g root /dev/null {file}",
            f"read -rsp 'Password of {share.user} on {share.server}: ' P && "
            f"printf 'username=%s\\npassword=%s\\n' {shlex.quote(share.user)} \"$P\" | "
            f"sudo tee {file} > /dev/null; unset P",
        ]
    line = shlex.quote(fstab(share))
    return [
        *steps,
        f"grep -qxF {line} /etc/fstab || echo {line} | sudo tee -a /etc/fstab",
        f"sudo mount {shlex.quote(share.at)}",
    ]
