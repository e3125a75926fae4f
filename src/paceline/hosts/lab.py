"""Finds the labs that are up on this machine, and their files (``-H lab``).

A lab's folder is removed with the lab. ``paceline.lab`` creates labs.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.agent.supervision import processes
from paceline.spec.errors import HostsError, LabError


class Layout:
    """Paths below a lab's state folder ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.plan = root / "plan.json"
        self.owner = root / "owner.json"  # process id and start time of the lab's owner
        self.owner_log = root / "owner.log"
        self.control = root / "control.sock"
        self.ssh_config = root / "ssh_config"
        self.identity = root / "id_ed25519"
        self.known_hosts = root / "known_hosts"
        self.hostfile = root / "hostfile"
        self.settings = root / "paceline.toml"  # settings of single hosts

    def host(self, name: str) -> Path:
        return self.root / "hosts" / name

    def home(self, name: str) -> Path:
        return self.host(name) / "home"

    def etc(self, name: str) -> Path:
        """Returns the folder of files that the host sees in /etc."""
        return self.host(name) / "etc"

    def host_key(self, name: str) -> Path:
        return self.host(name) / "ssh_host_ed25519_key"

    def sshd_config(self, name: str) -> Path:
        return self.host(name) / "sshd_config"

    def sshd_log(self, name: str) -> Path:
        return self.host(name) / "sshd.log"

    def disk(self, name: str, index: int) -> Path:
        """Returns what the host wrote into its private folder number ``index``."""
        return self.host(name) / "private" / str(index)


def parent_folder() -> Path:
    """Returns the folder for the state of this user's labs; it is private to the user."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir() and os.access(runtime, os.W_OK):
        folder = Path(runtime) / "paceline-lab"
    else:
        folder = Path(f"/tmp/paceline-lab-{os.geteuid()}")  # noqa: S108 - checked below
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise LabError(
            f"the folder {folder} cannot hold a lab's keys",
            found="it is not a folder of yours that only you can read",
            remedy=f"look at it, then remove it: rm -r {folder}; if it is another user's, name a"
            " private folder of yours: export XDG_RUNTIME_DIR=FOLDER",
        )
    return folder


@dataclass(frozen=True)
class Owner:
    """A process, identified by number and start time, because numbers are reused."""

    pid: int
    started: int

    def is_alive(self) -> bool:
        return processes.identify(self.pid) == (self.pid, self.started)


def read_owner(layout: Layout) -> Owner | None:
    try:
        return Owner(**json.loads(layout.owner.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def is_running(layout: Layout) -> bool:
    """Whether the lab is up. Its socket answers even if its process cannot be seen."""
    owner = read_owner(layout)
    if owner is not None and owner.is_alive():
        return True
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(layout.control)) == 0


def list_labs() -> list[Layout]:
    """Returns the labs of this user, including dead ones."""
    folders = (entry for entry in parent_folder().iterdir() if entry.is_dir())
    return [Layout(folder) for folder in sorted(folders)]


# --- -H lab


KEYWORD = "lab"


def lab_name(source: str) -> str | None:
    """Returns the lab that a source names, empty for the default one; ``None`` for other sources.

    ``lab:4`` is a host called lab with four slots, as in any list.
    """
    keyword, colon, lab = source.strip().partition(":")
    if keyword != KEYWORD or (colon and (not lab or lab.isdigit() or set(lab) & set(",@[ "))):
        return None
    return lab


def find_lab(name: str, environ: Mapping[str, str]) -> Layout:
    """Returns the files of a lab that is up. Raises HostsError if none is, or several are.

    An empty ``name`` means that of ``PACELINE_LAB``, else the only one, else ``default``.
    """
    running = {layout.root.name: layout for layout in list_labs() if is_running(layout)}
    requested = name or environ.get("PACELINE_LAB", "")
    if requested in running:
        return running[requested]
    names = ", ".join(running)
    if requested:
        report = f"up are: {names}" if running else "no lab is up"
        remedy = f"paceline lab up --name {requested}"
        raise HostsError(f"no lab called {requested!r} is up", found=report, remedy=remedy)
    if not running:
        raise HostsError("no lab is up", remedy="paceline lab up; a host called that: `lab,`")
    first = next(iter(running))
    if len(running) > 1 and "default" not in running:
        raise HostsError("several labs are up", found=names, remedy=f"name one: -H lab:{first}")
    return running.get("default", running[first])
