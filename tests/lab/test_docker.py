"""Real Docker over SSH: the agent in a container on each host, no sshd in it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dockerlab import IMAGE, Docker, docker_on, python_mounts
from every_way import EveryWay
from launches import SOURCE, Site, eventually
from ways import Way, site_in

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
def way(cluster: tuple[Site, Docker], docker: Docker) -> Way:
    site = cluster[0]
    prefixes = {str(Path(sys.prefix)), str(Path(sys.base_prefix)), str(SOURCE.parent)}
    options = ("-H", "n1,n2", "--via", "docker", "--image", IMAGE, "--python", sys.executable)
    return Way(site, (*options, *python_mounts(sorted(prefixes))))


class TestDocker(EveryWay):
    """A container a host."""


def test_an_image_that_one_host_lacks(way: Way, docker: Docker) -> None:
    docker.tell("n1", "tag", IMAGE, "only-here:1")
    options = [word.replace(IMAGE, "only-here:1") for word in way.options]
    ended = Way(way.site, tuple(options)).run("--no-torch", "tell.py")
    assert ended.code == 1
    assert "only-here:1 cannot be run on n2" in ended.err
    assert "the image is not there" in ended.err


def test_another_image_of_the_same_name(way: Way, docker: Docker) -> None:
    for name in ("n1", "n2"):  # imported twice: another date, so another image
        docker.tell(name, "import", str(docker.folder / "root.tar"), f"two:{name}")
        docker.tell(name, "tag", f"two:{name}", "twice:1")
    options = [word.replace(IMAGE, "twice:1") for word in way.options]
    ended = Way(way.site, tuple(options)).run("--no-torch", "tell.py")
    assert ended.code == 1
    assert "twice:1 is not the same image on all hosts" in ended.err


def test_no_daemon(way: Way, docker: Docker) -> None:
    docker.stop("n2")
    try:
        ended = way.run("--no-torch", "tell.py")
    finally:
        docker.start("n2")
    assert ended.code == 1
    assert "cannot be run on n2" in ended.err
    assert "the daemon is not running" in ended.err
