"""Real Docker on lab hosts: one dockerd a host, with an image made here, no registry."""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from launches import eventually
from ways import missing

from paceline.cluster.lab import Lab

IMAGE = "paceline-test:1"
FOLDERS = (
    "usr", "tmp", "etc", "proc", "sys", "dev", "root", "run", "var", "var/tmp", "home", "opt",
    "sbin",
)  # fmt: skip
_CGROUPS = (
    "mount -t tmpfs -o mode=755 none /sys/fs/cgroup; "
    "for c in cpu cpuacct cpuset memory devices freezer blkio pids; do "
    "mkdir -p /sys/fs/cgroup/$c; mount -t cgroup -o $c none /sys/fs/cgroup/$c; done; "
    "mkdir -p /var/tmp/docker /run/docker"
)
_DOCKERD = (
    "/usr/sbin/dockerd", "--bridge=none", "--iptables=false", "--ip6tables=false",
    "--ip-forward=false", "--storage-driver=vfs", "--data-root=/var/tmp/docker",
    "--exec-root=/run/docker-exec", "--pidfile=/run/docker.pid", "-H", "unix:///var/run/docker.sock",
)  # fmt: skip


def require() -> None:
    if shutil.which("dockerd", path="/usr/sbin:/usr/bin") is None:
        missing("docker is not installed")


def write_image(path: Path) -> None:
    """A root file system without files: programs come from the host's /usr, mounted."""
    with tarfile.open(path, "w") as tar:
        for name in [
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
        ]:
            entry = tarfile.TarInfo(name)
            entry.type = tarfile.DIRTYPE
            entry.mode = 0o1777 if name.endswith("tmp") else 0o755
            tar.addfile(entry)
        for name in ("bin", "lib", "lib64"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(entry)
        _text(tar, "etc/passwd", "root:x:0:0:root:/root:/bin/sh\n")


def _text(tar: tarfile.TarFile, name: str, text: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(text)
    tar.addfile(entry, io.BytesIO(text.encode()))


class Docker:
    """The daemons of one lab."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def up(self) -> None:
        """Daemons on all hosts, with the very same image."""
        self.folder.mkdir()
        write_image(self.folder / "root.tar")
        for name in self.lab.names:
            self.lab.exec(name, ["sh", "-c", _CGROUPS], timeout=20)
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
        assert eventually(up, 20), f"dockerd on {name}"

    def stop(self, name: str) -> None:
        daemon = self._daemons.pop(name)
        daemon.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(10)
        if daemon.poll() is None:
            daemon.kill()
            daemon.wait()

    def tell(self, name: str, *words: str) -> str:
        done = self.lab.exec(name, ["docker", *words], timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def containers(self) -> list[str]:
        """Of all hosts, running or not."""
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


def python_mounts(prefixes: Sequence[str]) -> list[str]:
    """Options that show the host's programs and this Python's environment in a container."""
    folders = ["/usr", "/etc", *prefixes]
    return [word for folder in folders for word in ("--mount", f"{folder}:{folder}:ro")]
