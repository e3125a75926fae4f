"""The state folders of labs: making, finding and clearing them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.lab import texts
from paceline.lab.layout import Layout
from paceline.lab.options import (
    HostPlan,
    LabOptions,
    LabPlan,
    PrivateFolder,
    Surroundings,
)
from paceline.spec.errors import LabError

START = Path(__file__).with_name("start.py")


def program(name: str) -> list[str]:
    """Command line of one of the lab's own programs, quick to start: standard library only."""
    return [sys.executable, "-I", "-S", str(START), name]


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


def surroundings(share: Sequence[str] = ()) -> Surroundings:
    """What the plan needs to know of this machine, process and user."""
    user = _account(os.geteuid())
    package = str(Path(__file__).resolve().parents[2])
    shared = (sys.prefix, sys.base_prefix, str(Path.cwd()), package, *share)
    return Surroundings(
        python=sys.executable,
        shared=tuple(dict.fromkeys(path for path in shared if Path(path).exists())),
        uid=user.pw_uid,
        gid=user.pw_gid,
        user=user.pw_name,
        shell=_shell(user),
    )


def _account(uid: int) -> pwd.struct_passwd:
    try:
        return pwd.getpwuid(uid)
    except KeyError:
        raise LabError(
            "a lab needs a user that has an account",
            found=f"user id {uid} is not in /etc/passwd, and OpenSSH does without nobody",
        ) from None


def _shell(account: pwd.struct_passwd) -> str:
    """The account's shell, where that is one."""
    shell = account.pw_shell
    barred = shell.endswith(("/nologin", "/false")) or not Path(shell).is_file()
    return "/bin/sh" if barred else shell


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


def write_owner(layout: Layout, pid: int) -> None:
    started = start_time(pid)
    _write(layout.owner, json.dumps({"pid": pid, "started": started}))


def alive(layout: Layout) -> bool:
    """Whether the lab is up. Its socket answers even where its process cannot be seen."""
    owner = read_owner(layout)
    if owner is not None and owner.alive():
        return True
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(layout.control)) == 0


@contextlib.contextmanager
def _exclusive(parent: Path) -> Iterator[None]:
    with (parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def claim(name: str) -> Layout:
    """An empty state folder for a lab called ``name``; also clears what dead labs left.

    Raises:
        LabError: A lab of that name is up.
    """
    parent = parent_folder()
    with _exclusive(parent):
        _clear_dead(parent)
        layout = Layout(parent / name)
        try:
            layout.root.mkdir(mode=0o700)
        except FileExistsError:
            raise LabError(
                f"a lab called {name!r} is up already",
                remedy=f"paceline lab down --name {name}, or give another --name",
            ) from None
        write_owner(layout, os.getpid())  # until the lab's own process takes over
    return layout


def labs() -> list[Layout]:
    """The labs of this user, dead ones included."""
    folders = (entry for entry in parent_folder().iterdir() if entry.is_dir())
    return [Layout(folder) for folder in sorted(folders)]


def remove(layout: Layout) -> None:
    """Removes a lab's folder; an overlay's work folder may lack the rights to be read."""
    for folder in layout.root.glob("hosts/*/private/*/work/work"):
        with contextlib.suppress(OSError):
            folder.chmod(0o700)
    shutil.rmtree(layout.root, ignore_errors=True)


def _clear_dead(parent: Path) -> None:
    for layout in [Layout(entry) for entry in parent.iterdir() if entry.is_dir()]:
        if not alive(layout):
            remove(layout)


def write_files(plan: LabPlan, layout: Layout) -> None:
    """Fills a claimed folder with everything the lab reads."""
    if len(str(layout.control)) > 100:
        raise LabError(f"the path {layout.root} is too long for a socket", remedy="shorter --name")
    write_plan(plan, layout)
    _make_keys(plan, layout)
    _write(layout.hostfile, texts.hostfile(plan))
    _write(layout.settings, texts.settings(plan))
    _write(layout.ssh_config, texts.ssh_config(plan, layout, _dialer(layout)))
    passwd, group = (Path(file).read_text() for file in ("/etc/passwd", "/etc/group"))
    for host in plan.hosts:
        _write_etc(layout, host, texts.etc_files(plan, host, passwd, group))
        _write_host(plan, layout, host)


def _write_etc(layout: Layout, host: HostPlan, files: dict[str, str]) -> None:
    for name, text in files.items():
        _write(layout.etc(host.name) / name, text)
    (layout.etc(host.name) / "shadow").chmod(0o600)


def _write_host(plan: LabPlan, layout: Layout, host: HostPlan) -> None:
    _write(layout.etc(host.name) / "boot_id", texts.boot_id(plan, host))
    _write(layout.sshd_config(host.name), texts.sshd_config(plan, layout, host))
    ssh = layout.home(host.name) / ".ssh"
    _write(ssh / "authorized_keys", layout.identity.with_suffix(".pub").read_text())
    _write(ssh / "config", f'Include "{layout.ssh_config}"\n')
    ssh.chmod(0o700)
    for file in ssh.iterdir():
        file.chmod(0o600)


def _dialer(layout: Layout) -> str:
    return " ".join(_quoted(part) for part in [*program("dial"), str(layout.root)])


def _quoted(part: str) -> str:
    # ssh expands % in it, then a shell reads it.
    return "'" + part.replace("%", "%%").replace("'", "'\\''") + "'"


def _make_keys(plan: LabPlan, layout: Layout) -> None:
    """The client's key and one key a host, made side by side."""
    files = {host.name: layout.host_key(host.name) for host in plan.hosts}
    wanted = [layout.identity, *files.values()]
    for file in wanted:
        file.parent.mkdir(parents=True, exist_ok=True)
    makers = [subprocess.Popen(_keygen(file), stdin=subprocess.DEVNULL) for file in wanted]
    statuses = [maker.wait() for maker in makers]  # all, lest one is left behind
    if any(statuses):
        raise LabError("ssh-keygen could not make the lab's keys")
    public = {name: file.with_suffix(".pub").read_text() for name, file in files.items()}
    _write(layout.known_hosts, texts.known_hosts(plan, public))


def _keygen(file: Path) -> list[str]:
    return ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "paceline-lab", "-f", str(file)]


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def write_plan(plan: LabPlan, layout: Layout) -> None:
    _write(layout.plan, json.dumps(asdict(plan)))


def read_plan(layout: Layout) -> LabPlan:
    """The plan that :func:`write_plan` left."""
    raw = json.loads(layout.plan.read_text())
    options = {key: _frozen(value) for key, value in raw["options"].items()}
    return LabPlan(
        options=LabOptions(**options),
        hosts=tuple(HostPlan(**host) for host in raw["hosts"]),
        around=Surroundings(**{key: _frozen(value) for key, value in raw["around"].items()}),
        prefix_length=raw["prefix_length"],
        gateway=raw["gateway"],
        private=tuple(PrivateFolder(**folder) for folder in raw["private"]),
        shared=tuple(raw["shared"]),
    )


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
