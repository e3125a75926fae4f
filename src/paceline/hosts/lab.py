"""The labs that are up on this machine: where each keeps its files, and which ``-H lab`` means.

A lab's folder is gone when the lab is. Making labs is another matter (``paceline.lab``), of which
nothing here knows.
"""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.spec.errors import HostsError, LabError


@dataclass(frozen=True)
class Layout:
    """Paths below a lab's state folder ``root``."""

    root: Path

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def owner(self) -> Path:
        """Process id and start time of the lab's owner."""
        return self.root / "owner.json"

    @property
    def owner_log(self) -> Path:
        return self.root / "owner.log"

    @property
    def control(self) -> Path:
        return self.root / "control.sock"

    @property
    def ssh_config(self) -> Path:
        return self.root / "ssh_config"

    @property
    def identity(self) -> Path:
        return self.root / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        return self.root / "known_hosts"

    @property
    def hostfile(self) -> Path:
        return self.root / "hostfile"

    @property
    def settings(self) -> Path:
        """Per-host settings in the form of paceline.toml."""
        return self.root / "paceline.toml"

    def host(self, name: str) -> Path:
        return self.root / "hosts" / name

    def home(self, name: str) -> Path:
        return self.host(name) / "home"

    def etc(self, name: str) -> Path:
        """Files that the host sees in /etc."""
        return self.host(name) / "etc"

    def host_key(self, name: str) -> Path:
        return self.host(name) / "ssh_host_ed25519_key"

    def sshd_config(self, name: str) -> Path:
        return self.host(name) / "sshd_config"

    def sshd_log(self, name: str) -> Path:
        return self.host(name) / "sshd.log"

    def disk(self, name: str, index: int) -> Path:
        """What the host wrote into its private folder number ``index``."""
        return self.host(name) / "private" / str(index)


def parent_folder() -> Path:
    """Folder that holds the state of this user's labs; private to the user."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir() and os.access(runtime, os.W_OK):
        folder = Path(runtime) / "paceline-lab"
    else:
        folder = Path(f"/tmp/paceline-lab-{os.geteuid()}")  # noqa: S108 - checked below
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise LabError(
            f"the folder {folder} cannot hold a lab's keys",
            found="it is not a folder of yours that only you can read",
            remedy=f"look at it, then remove it: rm -r {folder}",
        )
    return folder


@dataclass(frozen=True)
class Owner:
    """A process, known by more than its number (numbers are used again)."""

    pid: int
    started: int

    def alive(self) -> bool:
        return start_time(self.pid) == self.started


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when there is none (or a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def read_owner(layout: Layout) -> Owner | None:
    try:
        return Owner(**json.loads(layout.owner.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def alive(layout: Layout) -> bool:
    """Whether the lab is up. Its socket answers even where its process cannot be seen."""
    owner = read_owner(layout)
    if owner is not None and owner.alive():
        return True
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(layout.control)) == 0


def labs() -> list[Layout]:
    """The labs of this user, dead ones included."""
    folders = (entry for entry in parent_folder().iterdir() if entry.is_dir())
    return [Layout(folder) for folder in sorted(folders)]


# --- -H lab


KEYWORD = "lab"


def lab_name(source: str) -> str | None:
    """The lab that a source names, empty for the one that is up; ``None`` for other sources.

    ``lab:4`` is a host called lab with four slots, as in any list.
    """
    keyword, colon, name = source.strip().partition(":")
    if keyword != KEYWORD or (colon and (not name or name.isdigit() or set(name) & set(",@[ "))):
        return None
    return name


def find_lab(name: str, environ: Mapping[str, str]) -> Layout:
    """Where the files of a lab are that is up.

    Args:
        name: Of the lab; empty for the one of ``PACELINE_LAB``, else the only one, else the one
            that ``paceline lab`` means when none is named.
        environ: Environment variables.

    Raises:
        HostsError: There is none, or there are several to choose from.
    """
    up = {layout.root.name: layout for layout in labs() if alive(layout)}
    wanted = name or environ.get("PACELINE_LAB", "")
    if wanted in up:
        return up[wanted]
    listed = ", ".join(up)
    if wanted:
        found = f"up are: {listed}" if up else "no lab is up"
        raise HostsError(f"no lab called {wanted!r} is up", found=found,
                         remedy=f"paceline lab up --name {wanted}")  # fmt: skip
    if not up:
        raise HostsError("no lab is up", remedy="paceline lab up; a host called that: `lab,`")
    if len(up) > 1 and "default" in up:
        return up["default"]
    if len(up) > 1:
        raise HostsError("several labs are up", found=listed,
                         remedy=f"name one: -H lab:{next(iter(up))}")  # fmt: skip
    return next(iter(up.values()))
