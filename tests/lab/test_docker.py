"""Real Docker over SSH: the agent in a container on each host, no sshd in it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dockerlab import IMAGE, Docker, docker_on, python_mounts, write_image_with
from every_transport import EveryTransport
from launches import SOURCE, Site, eventually
from transports import Transport, mpiexec, site_in

pytestmark = [pytest.mark.lab, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(
    new_lab: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Site, Docker]]:
    folder = tmp_path_factory.mktemp("docker")
    site = site_in(new_lab, folder)
    with docker_on(site.lab, folder / "docker") as docker:
        yield site, docker


@pytest.fixture
def docker(cluster: tuple[Site, Docker]) -> Iterator[Docker]:
    """No container may be left after a test, in whatever state."""
    docker = cluster[1]
    yield docker
    eventually(lambda: not docker.containers(), 8)
    assert docker.containers() == []


@pytest.fixture
def transport(cluster: tuple[Site, Docker], docker: Docker) -> Transport:
    site = cluster[0]
    prefixes = {str(Path(sys.prefix)), str(Path(sys.base_prefix)), str(SOURCE.parent)}
    options = ("-H", "n1,n2", "--via", "docker", "--image", IMAGE, "--python", sys.executable)
    return Transport(site, (*options, *python_mounts(sorted(prefixes))))


class TestDocker(EveryTransport):
    """A container a host."""


def test_an_image_that_one_host_lacks(transport: Transport, docker: Docker) -> None:
    docker.tell("n1", "tag", IMAGE, "only-here:1")
    options = [word.replace(IMAGE, "only-here:1") for word in transport.options]
    ended = Transport(transport.site, tuple(options)).run("--no-torch", "tell.py")
    assert ended.code == 1
    assert "only-here:1 cannot be run on n2" in ended.err
    assert "the image is not there" in ended.err


def test_another_image_of_the_same_name(transport: Transport, docker: Docker) -> None:
    for name in ("n1", "n2"):  # imported twice: another date, so another image
        docker.tell(name, "import", str(docker.folder / "root.tar"), f"two:{name}")
        docker.tell(name, "tag", f"two:{name}", "twice:1")
    options = [word.replace(IMAGE, "twice:1") for word in transport.options]
    ended = Transport(transport.site, tuple(options)).run("--no-torch", "tell.py")
    assert ended.code == 1
    assert "twice:1 is not the same image on all hosts" in ended.err


def test_no_daemon(transport: Transport, docker: Docker) -> None:
    docker.stop("n2")
    try:
        ended = transport.run("--no-torch", "tell.py")
    finally:
        docker.start("n2")
    assert ended.code == 1
    assert "cannot be run on n2" in ended.err
    assert "the daemon is not running" in ended.err


# --- containers with sshd inside

PROGRAMS = (
    "/bin/sh", "/bin/bash", "/usr/bin/id", "/usr/bin/install", "/usr/bin/mkdir",
    "/usr/bin/ssh", "/usr/sbin/sshd", "/usr/sbin/useradd",
)  # fmt: skip
LAPTOP = "a-laptop"  # what the launching machine is called; nobody can resolve it
TELL = (
    "echo rank $RANK of $WORLD_SIZE, $LOCAL_RANK on $(hostname), uid $(id -u), "
    "at $MASTER_ADDR:$MASTER_PORT, $SAID, $OF_IMAGE, $WORDS words"
)


@pytest.fixture(scope="module")
def sets(cluster: tuple[Site, Docker]) -> Callable[..., Path]:
    """Writes a set whose ranks source a file; the image is built with the first of them.

    The base has what sshd needs; MPI is this machine's, mounted.
    """
    site, docker = cluster
    home = docker.folder / "sets"
    home.mkdir()
    write_image_with(docker.folder / "base.tar", PROGRAMS, {})
    for name in ("n1", "n2"):
        docker.tell(name, "import", "-c", "ENV PATH=/usr/sbin:/usr/bin", "-c",
                    "ENV OF_IMAGE=there", str(docker.folder / "base.tar"), "base:1")  # fmt: skip

    def make(flavour: str, *words: str) -> Path:
        mpirun, first = Path(mpiexec(flavour)).with_name("mpirun"), not list(home.iterdir())
        if flavour != "intel":  # Debian's mpirun is the one or the other
            mpirun = home / flavour / "mpirun"
            mpirun.parent.mkdir(exist_ok=True)
            mpirun.write_text(f'#!/bin/sh\nexec /usr/bin/mpirun.{flavour} "$@"\n')
            mpirun.chmod(0o755)
        vars_sh = home / "vars.sh"
        vars_sh.write_text(f"export WORDS=$# PATH={mpirun.parent}:$PATH\n")
        seen = sorted({"/usr", str(home), str(mpirun.parents[1])})
        mounts = [f"--mount={one}:{one}:ro" for one in seen]
        own = ["--image=base:1", f"--activate={vars_sh}", "--env=SAID=a b", f"--mpi={flavour}"]
        out = home / f"set{len(list(home.iterdir()))}"
        own += [*mounts, *words, "--out", str(out), "sh", "-c", TELL]
        Transport(site, ()).verb("setup", "containers", *own)
        for name in ("n1", "n2") if first else ():
            typed(site, name, out, "docker build").check_returncode()
        return out

    return make


@pytest.mark.parametrize("flavour", ["mpich", "intel", "openmpi"])
def test_mpirun_inside_a_matched_set(
    flavour: str, cluster: tuple[Site, Docker], docker: Docker, sets: Callable[..., Path]
) -> None:
    """Two workers, and then ``mpirun -hosts localhost,worker`` with two ranks in each."""
    site = cluster[0]
    n1, n2 = site.lab.address("n1"), site.lab.address("n2")
    rest = f"uid 1000, at {n1}:29500, a b, there, 0 words"
    said = runs(site, sets(flavour, f"--worker=w1={n1}", f"--worker=w2={n2}"), "n1", "n2")
    assert said == [f"rank 0 of 2, 0 on n1, {rest}", f"rank 1 of 2, 0 on n2, {rest}"]
    said = runs(site, sets(flavour, f"--launcher={n1}", f"--worker=w2={n2}", "-p2"), "n2")
    assert said == [
        f"rank 0 of 4, 0 on {LAPTOP}, {rest}",
        f"rank 1 of 4, 1 on {LAPTOP}, {rest}",
        f"rank 2 of 4, 0 on n2, {rest}",
        f"rank 3 of 4, 1 on n2, {rest}",
    ]


def runs(site: Site, folder: Path, *workers: str) -> list[str]:
    """What ranks say. Every line of commands.sh, on the machine that it names."""
    with contextlib.ExitStack() as stack:
        stack.callback(site.lab.exec, "n1", ["docker", "kill", "paceline-launcher"])
        for name in workers:
            line = line_of(folder, f"--name=paceline-w{name[1:]} ")
            stack.enter_context(site.lab.popen(name, ["sh", "-c", line], cwd=folder))
            stack.callback(site.lab.exec, name, ["docker", "kill", f"paceline-w{name[1:]}"])
            assert eventually(lambda n=name: has_sshd(site, n), 20)
        line = line_of(folder, "docker run", "--name=paceline-launcher ")
        line = line.replace("--network=host", f"--network=host --hostname={LAPTOP}")
        done = site.lab.exec("n1", ["sh", "-c", line], cwd=folder, timeout=40)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def has_sshd(site: Site, host: str) -> bool:
    """Whether the worker's own sshd listens."""
    return any(":1234" in address for address in site.lab.listeners(host))


def line_of(folder: Path, *words: str) -> str:
    lines = (folder / "commands.sh").read_text().splitlines()
    (line,) = [line for line in lines if all(word in line for word in words) and line[0] != "#"]
    return line


def typed(site: Site, host: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The one line of commands.sh with these words."""
    return site.lab.exec(host, ["sh", "-c", line_of(folder, *words)], cwd=folder, timeout=40)
