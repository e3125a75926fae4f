"""Real Docker over SSH: the agent in a container on each host, no sshd in it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
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
    "/usr/bin/hostname", "/usr/bin/ssh", "/usr/sbin/sshd", "/usr/sbin/useradd",
    "/usr/bin/mpirun.mpich", "/usr/bin/hydra_pmi_proxy",
)  # fmt: skip
SAYS_ITS_PLACE = "echo rank $PMI_RANK of $PMI_SIZE, $(hostname), uid $(id -u)"


@pytest.fixture
def matched(cluster: tuple[Site, Docker], docker: Docker) -> Path:
    """The folder that `paceline setup containers` has written, and its image on both hosts."""
    site = cluster[0]
    mpiexec("mpich")
    links = {"usr/bin/mpirun": "mpirun.mpich"}
    write_image_with(docker.folder / "base.tar", PROGRAMS, links)
    workers = [f"--worker=w{n}={site.lab.address(f'n{n}')}" for n in (1, 2)]
    words = ["--image=base:1", *workers, "sh", "-c", SAYS_ITS_PLACE]
    Transport(site, ()).verb("setup", "containers", "--out", str(docker.folder / "set"), *words)
    for name in ("n1", "n2"):
        docker.tell(name, "import", "-c", "ENV PATH=/usr/sbin:/usr/bin",
                    str(docker.folder / "base.tar"), "base:1")  # fmt: skip
        typed(site, name, docker.folder / "set", "docker build").check_returncode()
    return docker.folder / "set"


def test_mpirun_inside_a_matched_set(cluster: tuple[Site, Docker], matched: Path) -> None:
    """Every line of commands.sh as it stands, on the machine that it names."""
    site = cluster[0]
    with contextlib.ExitStack() as stack:
        stack.callback(site.lab.exec, "n1", ["docker", "kill", "paceline-launcher"])
        for name, alias in (("n1", "w1"), ("n2", "w2")):
            line = line_of(matched, f"--name=paceline-{alias} ")
            stack.enter_context(site.lab.popen(name, ["sh", "-c", line], cwd=matched))
            stack.callback(site.lab.exec, name, ["docker", "kill", f"paceline-{alias}"])
            assert eventually(lambda n=name: has_sshd(site, n), 20)
        done = typed(site, "n1", matched, "docker run", "--name=paceline-launcher ")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "rank 0 of 2, n1, uid 1000",
        "rank 1 of 2, n2, uid 1000",
    ]


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
