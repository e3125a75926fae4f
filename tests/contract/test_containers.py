"""Every container engine: words survive, no folder is made up, one image or none."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.remote.openssh import agent_command
from paceline.rendezvous import callback
from paceline.rendezvous.callback import CallbackTransport
from paceline.rendezvous.listener import caller_config
from paceline.schedulers import SCHEDULERS, load
from paceline.schedulers import container as containers
from paceline.schedulers.container import (
    Container,
    ContainerTransport,
    Engine,
    Probe,
    check_images,
    container_for,
    is_removed,
    parse_probe,
    probe_command,
)
from paceline.schedulers.scheduler import ContainerOptions, Options
from paceline.spec.errors import ConnectError, NodeError, SettingError
from paceline.spec.hosts import Host

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "schedulers" / "containers"
ENGINES = [name for name in SCHEDULERS if isinstance(load(name), Engine)]
HOSTILE = ["/bin/sh", "-c", 'echo "$1"', "a,b", "it's", "$HOME", "new\nline", ""]
CONTAINER = Container(
    "paceline-1-n1", "image:1", "/work dir", ("/data:/data:ro", "/work dir:/work dir"),
    {"XDG_CACHE_HOME": "/tmp/c"}, 1000, 1000, (109,), ("/dev/dri",), True, "4g", ("--privileged",),
)  # fmt: skip


def engine(name: str) -> Engine:
    found = load(name)
    assert isinstance(found, Engine)
    return found


@pytest.mark.parametrize("name", ENGINES)
def test_what_is_left_is_removed_by_name(name: str) -> None:
    """An engine without a daemon that keeps them has nothing to remove."""
    argv = engine(name).remove(["a", "b"])
    assert argv == [] if name == "apptainer" else (argv[0], argv[-2:]) == (name, ["a", "b"])


@pytest.mark.parametrize("name", ENGINES)
def test_the_command_comes_last_and_whole(name: str) -> None:
    argv = engine(name).wrap(HOSTILE, CONTAINER)
    assert argv[0] == name
    assert argv[-len(HOSTILE) - 1 :] == ["image:1", *HOSTILE]


@pytest.mark.parametrize("name", ENGINES)
def test_what_a_container_sees(name: str) -> None:
    """Folders, devices, accelerators and the user's own flags, each engine in its own words."""
    text = "\0".join(engine(name).wrap(["true"], CONTAINER))
    for part in ("/data", "/work dir", "/dev/dri", "XDG_CACHE_HOME=/tmp/c", "--privileged"):
        assert part in text
    plain = engine(name).wrap(["true"], replace(CONTAINER, nvidia=False))
    assert len(plain) == len(engine(name).wrap(["true"], CONTAINER)) - 1


@pytest.mark.parametrize("name", ENGINES)
def test_a_caller_starts_the_engines_command(name: str) -> None:
    """With the job's interpreter in the place that the caller fills, which is in the image."""
    wrap = partial(engine(name).wrap, container=CONTAINER)
    config = caller_config([("10.0.0.1", 5)], ["py"], [], "X", 3.0, wrap=wrap, is_single_use=True)
    command = ["py" if word == "@" else word for word in config["agent"]]
    assert command == wrap(agent_command("py"))
    assert config["once"]


def test_docker_word_for_word() -> None:
    assert engine("docker").wrap(["true"], CONTAINER) == [
        "docker", "run", "--rm", "--interactive", "--init", "--name=paceline-1-n1",
        "--label=paceline", "--network=host", "--shm-size=4g", "--workdir=/work dir",
        "--mount", "type=bind,source=/data,target=/data,readonly",
        "--mount", "type=bind,source=/work dir,target=/work dir",
        "--env=XDG_CACHE_HOME=/tmp/c", "--device=/dev/dri", "--group-add=109",
        "--user=1000:1000", "--gpus=all", "--privileged", "image:1", "true",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ENGINES)
def test_the_probe_is_good_shell(name: str, tmp_path: Path) -> None:
    """Run here, engine or not: it says who we are and which folders exist."""
    import subprocess

    argv = probe_command(engine(name), "no such; image", [str(tmp_path), "/no/such"])
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    probe = parse_probe(done.stdout + done.stderr)
    assert probe.folders == (str(tmp_path),)
    assert probe.digest == ""
    assert probe.engine_output


def read(name: str) -> Probe:
    return parse_probe((FIXTURES / f"docker-{name}.txt").read_text())


def test_a_probe_is_read() -> None:
    there, lacking = read("there"), read("missing")
    assert there.digest.startswith("sha256:0415d637")
    assert there.engine_output == "Welcome to gpu01"
    assert (lacking.uid, lacking.gid, lacking.groups, lacking.dri) == (1000, 1000, (109,), True)
    assert lacking.folders == ("/home/ann/project",)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("missing", "the image is not there"),
        ("no-daemon", "the daemon is not running"),
        ("no-permission", "no permission on the daemon's socket"),
        ("not-installed", "docker is not installed"),
    ],
)
def test_each_cause_has_its_own_words(name: str, cause: str) -> None:
    with pytest.raises(NodeError) as caught:
        check_images("docker", "pace:1", {"n1": read("there"), "n2": read(name)})
    assert "cannot be run on n2" in caught.value.message
    assert cause in caught.value.found
    assert "n2" in caught.value.remedy


def test_another_image_of_the_same_name_is_refused() -> None:
    other = replace(read("there"), digest="sha256:ffff")
    with pytest.raises(NodeError, match="not the same image"):
        check_images("docker", "pace:1", {"n1": read("there"), "n2": other})


def test_a_host_that_comes_back_with_another_image_is_refused() -> None:
    with pytest.raises(NodeError, match="not the image that the other hosts have") as caught:
        check_images("docker", "pace:1", {"n2": read("there")}, "sha256:ffff")
    assert caught.value.brief.startswith("another image of that name: sha256:0415d637")
    digest = read("there").digest
    assert check_images("docker", "pace:1", {"n2": read("there")}, digest) == digest


@pytest.mark.parametrize(
    ("status", "words", "gone"),
    [
        (0, "paceline-1-n1", True),
        (1, "Error: No such container: paceline-1-n1", True),
        (1, "Error response from daemon: removal of container 1 is already in progress", True),
        (1, 'Welcome!\nError: no container with name or ID "x" found: no such container', True),
        (1, "Error: No such container: a\nError response from daemon: cannot remove b", False),
        (1, "Error response from daemon: could not kill: tried to kill container", False),
        (1, "Got permission denied while trying to connect to the Docker daemon socket", False),
        (1, "", False),
        (None, "Operation timed out: no end within 8 s", False),
    ],
)
def test_a_container_is_gone_or_not(status: int | None, words: str, gone: bool) -> None:
    assert is_removed(status, words) is gone


# As the engine, without containers: what is in one runs beside it.
STAND_IN = """#!/bin/sh
echo "$*" >> {said}
case "$1" in
image) echo sha256:abc ;;
rm) echo "Error: No such container" >&2; exit {status} ;;
run) while [ "$1" != image:1 ]; do shift; done; shift; exec "$@" ;;
esac
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[str]]:
    """Puts a stand-in on the path; gives what it was asked before."""
    said, program = tmp_path / "said", tmp_path / "bin" / "docker"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def put(status: int) -> list[str]:
        lines = said.read_text().splitlines() if said.exists() else []
        said.unlink(missing_ok=True)
        program.write_text(STAND_IN.format(said=said, status=status))
        program.chmod(0o755)
        return [re.sub(r"-[0-9a-f]{8}", "", line).split(" --label")[0] for line in lines]

    return put


def test_a_lost_container_is_removed_and_another_takes_its_place(
    docker: Callable[[int], list[str]],
) -> None:
    """Under another name; also when the one before came to nothing, and by another launcher."""
    hosts = (Host("n1", local=True), Host("n2", local=True))
    begun = "run --rm --interactive --init --name=paceline"

    async def go() -> None:
        docker(1)
        options = Options(container=ContainerOptions("image:1", folders=("/",)))
        transport = ContainerTransport(engine("docker"), options)
        first, second = await transport.open(hosts, [sys.executable] * 2)
        assert second.host == Host("n2")  # it has other files than this machine
        asked = docker(1)
        assert sorted(asked[2:]) == [f"{begun}-n1", f"{begun}-n2"]
        await second.close()
        (again,) = await transport.open([second.host], [sys.executable])
        await again.close()
        assert docker(2)[1:] == ["rm --force paceline-n2", f"{begun}.2-n2"]
        supervisor = ContainerTransport.from_json(
            json.loads(json.dumps(transport.to_json())), hosts
        )
        (third,) = await supervisor.open([hosts[1]], [sys.executable])
        await third.close()
        assert docker(0)[1:] == ["rm --force paceline-n2", f"{begun}.2-n2"]
        await first.close()

    asyncio.run(go())


def test_where_it_cannot_be_removed_no_other_is_started(
    docker: Callable[[int], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "is_removed", lambda status, words: False)

    async def go() -> None:
        docker(1)
        options = Options(container=ContainerOptions("image:1"))
        transport = ContainerTransport.from_json(
            ContainerTransport(engine("docker"), options).to_json(), [Host("n1")]
        )
        with pytest.raises(NodeError, match="n1 has lost cannot be removed") as caught:
            await transport.open([Host("n1", local=True)], [sys.executable])
        assert "docker rm --force paceline-" in caught.value.remedy
        assert not [line for line in docker(0) if line.startswith("run")]

    asyncio.run(go())


def test_a_supervisor_has_lost_containers_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on its own host, whichever way that was called by then."""
    monkeypatch.setattr(callback, "local_addresses", lambda interface, hosts: ["127.0.0.1"])
    asked: list[Host] = []

    async def start(host: Host, python: str) -> Any:
        asked.append(host)
        raise NodeError("there is none")

    async def go() -> None:
        hosts = (Host("n1"), Host("n2"))
        transport = CallbackTransport(hosts, b"k" * 32, "n2", None, lambda where: None, start)
        assert transport.redials
        transport.cannot_call({"n1": "no caller", "n2": "no caller"})
        for kind in (ConnectError, NodeError):  # the first time it has to call
            for host in hosts:
                with pytest.raises(kind):
                    await transport.open([host], ["python3"])
        await transport.close(0)

    asyncio.run(go())
    assert asked == [Host("n1"), Host("n2", local=True)]


def test_what_gpus_of_amd_and_intel_need() -> None:
    said = "paceline-uid 1000\npaceline-group 109\npaceline-dri\n"
    options = Options(container=ContainerOptions("i"))
    amd = container_for(Host("n1"), parse_probe(f"{said}paceline-kfd\n"), options, "1")
    assert (amd.devices, amd.groups, amd.mounts) == (("/dev/dri", "/dev/kfd"), (109,), ())
    intel = container_for(Host("n1"), parse_probe(f"{said}paceline-by_path\n"), options, "1")
    assert intel.devices == ("/dev/dri",)
    assert intel.mounts == ("/dev/dri/by-path:/dev/dri/by-path:ro",)


def test_only_folders_that_a_host_has_are_mounted() -> None:
    options = Options(container=ContainerOptions("i", ("/x:/y",), ("/home/ann/project", "/runs")))
    container = container_for(Host("n1"), read("missing"), options, "1")
    assert container.mounts == ("/x:/y", "/home/ann/project:/home/ann/project")
    assert container.workdir == "/home/ann/project"
    assert container.env["HOME"] == "/tmp"
    elsewhere = container_for(Host("n1"), read("there"), options, "1")
    assert elsewhere.workdir == "/"
    assert elsewhere.groups == ()


@pytest.mark.parametrize("word", ["--network", "--net=none", "--network=bridge", "--net"])
def test_another_network_than_the_hosts_is_refused(word: str) -> None:
    options = Options(container=ContainerOptions("i"), arguments=(word,))
    with pytest.raises(SettingError, match="use the network of their host"):
        engine("docker").start(options)
    for harmless in ("--network=host", "--network-alias=a"):
        engine("docker").start(replace(options, arguments=(harmless,)))
