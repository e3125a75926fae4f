"""Runs real Docker on lab hosts: one dockerd per host, an image that is built here, no registry."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import cgroups
from launches import eventually
from transports import missing

from paceline.lab import Lab

IMAGE = "paceline-test:1"
FOLDERS = (
    "usr",
    "tmp",
    "etc",
    "proc",
    "sys",
    "dev",
    "root",
    "run",
    "var",
    "var/tmp",
    "home",
    "opt",
)
CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids")
_GROUND = f"{cgroups.mounting(CONTROLLERS)}; mkdir -p /var/tmp/docker /run/docker"
_DOCKERD = (
    "/usr/sbin/dockerd", "--bridge=none", "--iptables=false", "--ip6tables=false",
    "--ip-forward=false", "--storage-driver=vfs", "--data-root=/var/tmp/docker",
    "--exec-root=/run/docker-exec", "--pidfile=/run/docker.pid", "-H", "unix:///var/run/docker.sock",
)  # fmt: skip


def require() -> None:
    if shutil.which("dockerd", path="/usr/sbin:/usr/bin") is None:
        missing("docker is not installed")


ROOT = "root:x:0:0:root:/root:/bin/sh\n"


def write_image(path: Path, users: str = ROOT) -> None:
    """Writes a root file system without files; programs come from the host's mounted /usr."""
    with tarfile.open(path, "w") as tar:
        for name in FOLDERS:
            _folder(tar, name)
        for name in ("bin", "lib", "lib64"):
            _link(tar, name, f"usr/{name}")
        _text(tar, "etc/passwd", users)


def write_image_with(
    path: Path, programs: Sequence[str], links: Mapping[str, str], users: str = ROOT
) -> None:
    """Writes a root file system that holds some of this machine's programs and their libraries.

    Args:
        path: Path of the tar file to write.
        programs: Paths of the programs on this machine; they have the same paths in the image.
        links: Further names of programs, by path in the image.
        users: Content of ``/etc/passwd``.
    """
    write_image(path, users)
    files = {*programs, *(library for program in programs for library in libraries(program))}
    with tarfile.open(path, "a") as tar:
        parents = {str(parent) for name in files for parent in Path(own_place(name)).parents}
        for folder in sorted(parents - {*FOLDERS, "."}):
            _folder(tar, folder)
        for name in sorted(files):
            entry = tar.gettarinfo(str(Path(name).resolve()), arcname=own_place(name))
            with Path(name).open("rb") as file:
                tar.addfile(entry, file)
        for name, target in links.items():
            _link(tar, name, target)
        _text(tar, "etc/group", "root:x:0:\n")
        _text(tar, "etc/shadow", "root:*:19000:0:99999:7:::\n", 0o640)


def libraries(program: str) -> list[str]:
    """Returns the paths of the program's shared libraries and of the loader."""
    done = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
    return re.findall(r"(/\S+) \(0x", done.stdout)


def own_place(name: str) -> str:
    """Returns a file's path in the image, where /bin and /lib are links into /usr."""
    return re.sub(r"^/(bin|sbin|lib|lib64)/", r"/usr/\1/", name).lstrip("/")


def _link(tar: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    tar.addfile(entry)


def _folder(tar: tarfile.TarFile, name: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type = tarfile.DIRTYPE
    entry.mode = 0o1777 if name.endswith("tmp") else 0o755
    tar.addfile(entry)


def _text(tar: tarfile.TarFile, name: str, text: str, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(text), mode
    tar.addfile(entry, io.BytesIO(text.encode()))


class Docker:
    """Controls the Docker daemons of one lab."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def up(self) -> None:
        """Starts daemons on all hosts and gives all of them the same image."""
        self.folder.mkdir()
        write_image(self.folder / "root.tar")
        for name in self.lab.names:
            self.lab.exec(name, ["sh", "-c", _GROUND], timeout=60)
            self.start(name)
        first, *others = self.lab.names
        self.tell(first, "import", str(self.folder / "root.tar"), IMAGE)
        self.tell(first, "save", "-o", str(self.folder / "image.tar"), IMAGE)
        for name in others:
            self.tell(name, "load", "-i", str(self.folder / "image.tar"))

    def start(self, name: str) -> None:
        nothing = subprocess.DEVNULL
        self._daemons[name] = self.lab.popen(
            name, _DOCKERD, stdin=nothing, stdout=nothing, stderr=nothing, cwd="/"
        )
        up = lambda: self.lab.exec(name, ["docker", "version"]).returncode == 0  # noqa: E731
        assert eventually(up), f"dockerd on {name}"

    def stop(self, name: str) -> None:
        daemon = self._daemons.pop(name)
        daemon.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(10)
        if daemon.poll() is None:
            daemon.kill()
            daemon.wait()

    def tell(self, name: str, *words: str) -> str:
        done = self.lab.exec(name, ["docker", *words], timeout=150)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def containers(self) -> list[str]:
        """Returns the containers of all hosts, including stopped ones."""
        found = []
        for name in self._daemons:
            found += [f"{name}: {c}" for c in self.tell(name, "ps", "-aq").split()]
        return found

    def down(self) -> None:
        for name in list(self._daemons):
            self.stop(name)


@contextlib.contextmanager
def docker_on(lab: Lab, folder: Path) -> Iterator[Docker]:
    require()
    docker = Docker(lab, folder)
    try:
        docker.up()
        yield docker
    finally:
        docker.down()
        cgroups.remove("docker")


def python_mounts(prefixes: Sequence[str]) -> list[str]:
    """Returns options that mount the host's programs and this Python's environment."""
    folders = dict.fromkeys(["/usr", "/etc", *prefixes])  # a system Python's prefix is /usr
    return [word for folder in folders for word in ("--mount", f"{folder}:{folder}:ro")]
