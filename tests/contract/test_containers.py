"""Tests every container engine: quoting, no new folders, one image on all hosts or an error."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
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
SPECIAL_ARGUMENTS = ["/bin/sh", "-c", 'echo "$1"', "a,b", "it's", "$HOME", "new\nline", ""]
CONTAINER = Container(
    "paceline-1-n1", "image:1", "/work dir", ("/data:/data:ro", "/work dir:/work dir"),
    1000, 1000, (109,), ("/dev/dri",), True, "4g", ("--privileged",),
)  # fmt: skip


def engine(name: str) -> Engine:
    loaded = load(name)
    assert isinstance(loaded, Engine)
    return loaded


@pytest.mark.parametrize("name", ENGINES)
def test_removes_containers_by_name(name: str) -> None:
    """Apptainer has no daemon that keeps containers, so nothing to remove."""
    argv = engine(name).remove(["a", "b"])
    assert argv == [] if name == "apptainer" else (argv[0], argv[-2:]) == (name, ["a", "b"])


@pytest.mark.parametrize("name", ENGINES)
def test_command_is_last_and_unchanged(name: str, tmp_path: Path) -> None:
    argv = engine(name).wrap(SPECIAL_ARGUMENTS, CONTAINER)
    assert argv[0] == name
    wrapped = argv[argv.index("image:1") + 1 :]
    assert wrapped[-len(SPECIAL_ARGUMENTS) :] == SPECIAL_ARGUMENTS
    env = {"TMPDIR": str(tmp_path)}
    assert run_in_container(wrapped, env) == subprocess.check_output(SPECIAL_ARGUMENTS, text=True)


def run_in_container(wrapped: list[str], env: dict[str, str]) -> str:
    """Returns the output of a command as an engine would run it, without a container."""
    env = {"PATH": os.environ["PATH"], **env}
    return subprocess.check_output(wrapped, env=env, text=True, timeout=60)


PRINT_FOLDERS = ["/bin/sh", "-c", 'echo "$XDG_CACHE_HOME:$HOME"; stat -c %a "$XDG_CACHE_HOME"']


@pytest.mark.parametrize("uid", [0, 1000])
@pytest.mark.parametrize("name", ["docker", "podman"])
def test_container_cache_is_private(name: str, uid: int, tmp_path: Path) -> None:
    """Nobody can make it first, even if the user mounts the host's /tmp."""
    argv = engine(name).wrap(PRINT_FOLDERS, replace(CONTAINER, uid=uid))
    wrapped = argv[argv.index("image:1") + 1 :]
    env = {"TMPDIR": str(tmp_path), "HOME": "/image"}
    folders, mode = run_in_container(wrapped, env).splitlines()
    cache, home = folders.split(":")
    assert cache != run_in_container(wrapped, env).splitlines()[0].split(":")[0]
    assert (Path(cache).parent, mode) == (tmp_path, "700")
    assert home == (cache if uid else "/image")


def test_apptainer_uses_cache_of_home() -> None:
    """It mounts the home, and the host's /tmp, where other users can make files."""
    argv = engine("apptainer").wrap(["true"], replace(CONTAINER, mounts=()))
    assert argv[-2:] == ["image:1", "true"]
    assert not [word for word in argv if word.startswith("--env") or "/tmp" in word]


@pytest.mark.parametrize("name", ENGINES)
def test_container_gets_mounts_and_devices(name: str) -> None:
    """Covers folders, devices, accelerators and the user's flags, with each engine's options."""
    text = "\0".join(engine(name).wrap(["true"], CONTAINER))
    for part in ("/data", "/work dir", "/dev/dri", "--privileged"):
        assert part in text
    without_gpu = engine(name).wrap(["true"], replace(CONTAINER, nvidia=False))
    assert len(without_gpu) == len(engine(name).wrap(["true"], CONTAINER)) - 1


@pytest.mark.parametrize("name", ENGINES)
def test_caller_runs_engine_command(name: str) -> None:
    """The caller inserts the job's interpreter, which is part of the image."""
    wrap = partial(engine(name).wrap, container=CONTAINER)
    config = caller_config(
        [("10.0.0.1", 5)], "ab", ["py"], [], "X", 3.0, wrap=wrap, is_single_use=True
    )
    command = ["py" if argument == "@" else argument for argument in config["agent"]]
    assert command == wrap(agent_command("py"))
    assert config["once"]


def test_docker_command_line() -> None:
    argv = engine("docker").wrap(["true"], CONTAINER)
    assert argv[: argv.index("image:1")] == [
        "docker", "run", "--rm", "--interactive", "--init", "--name=paceline-1-n1",
        "--label=paceline", "--network=host", "--shm-size=4g", "--workdir=/work dir",
        "--mount", "type=bind,source=/data,target=/data,readonly",
        "--mount", "type=bind,source=/work dir,target=/work dir",
        "--device=/dev/dri", "--group-add=109",
        "--user=1000:1000", "--gpus=all", "--privileged",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ENGINES)
def test_probe_runs_in_shell(name: str, tmp_path: Path) -> None:
    """Runs it even without the engine: it reports the user and which folders exist."""
    argv = probe_command(engine(name), "no such; image", [str(tmp_path), "/no/such"])
    result = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    probe = parse_probe(result.stdout + result.stderr)
    assert probe.folders == (str(tmp_path),)
    assert probe.digest == ""
    assert probe.engine_output


def read_probe(name: str) -> Probe:
    return parse_probe((FIXTURES / f"docker-{name}.txt").read_text())


def test_parses_probe() -> None:
    present, absent = read_probe("there"), read_probe("missing")
    assert present.digest.startswith("sha256:0415d637")
    assert present.engine_output == "Welcome to gpu01"
    assert (absent.uid, absent.gid, absent.groups, absent.dri) == (1000, 1000, (109,), True)
    assert absent.folders == ("/home/ann/project",)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("missing", "the image is not there"),
        ("no-daemon", "the daemon is not running"),
        ("no-permission", "no permission on the daemon's socket"),
        ("not-installed", "docker is not installed"),
    ],
)
def test_error_names_cause(name: str, cause: str) -> None:
    with pytest.raises(NodeError) as caught:
        check_images("docker", "pace:1", {"n1": read_probe("there"), "n2": read_probe(name)})
    assert "cannot be run on n2" in caught.value.message
    assert cause in caught.value.found
    assert "n2" in caught.value.remedy


def test_rejects_different_images_with_same_name() -> None:
    other_image = replace(read_probe("there"), digest="sha256:ffff")
    with pytest.raises(NodeError, match="not the same image"):
        check_images("docker", "pace:1", {"n1": read_probe("there"), "n2": other_image})


def test_rejects_returning_host_with_different_image() -> None:
    with pytest.raises(NodeError, match="not the image that the other hosts have") as caught:
        check_images("docker", "pace:1", {"n2": read_probe("there")}, "sha256:ffff")
    assert caught.value.brief.startswith("another image of that name: sha256:0415d637")
    digest = read_probe("there").digest
    assert check_images("docker", "pace:1", {"n2": read_probe("there")}, digest) == digest


@pytest.mark.parametrize(
    ("status", "engine_reply", "expected"),
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
def test_recognizes_removed_container(
    status: int | None, engine_reply: str, expected: bool
) -> None:
    assert is_removed(status, engine_reply) is expected


# Stands in for the engine: runs the command directly, without a container.
FAKE_DOCKER = """#!/bin/sh
echo "$*" >> {said}
case "$1" in
image) echo sha256:abc ;;
rm) echo "Error: No such container" >&2; exit {status} ;;
run) while [ "$1" != image:1 ]; do shift; done; shift; exec "$@" ;;
esac
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[str]]:
    """Returns a function that puts a stand-in on the PATH, and returns the previous calls."""
    output, program = tmp_path / "said", tmp_path / "bin" / "docker"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def install(status: int) -> list[str]:
        lines = output.read_text().splitlines() if output.exists() else []
        output.unlink(missing_ok=True)
        program.write_text(FAKE_DOCKER.format(said=output, status=status))
        program.chmod(0o755)
        return [re.sub(r"-[0-9a-f]{8}", "", line).split(" --label")[0] for line in lines]

    return install


def test_replaces_lost_container(
    docker: Callable[[int], list[str]],
) -> None:
    """It has a new name, also after a failed try, and if another launcher starts it."""
    hosts = (Host("n1", local=True), Host("n2", local=True))
    run_prefix = "run --rm --interactive --init --name=paceline"

    async def scenario() -> None:
        docker(1)
        options = Options(container=ContainerOptions("image:1", folders=("/",)))
        transport = ContainerTransport(engine("docker"), options)
        first, second = await transport.open(hosts, [sys.executable] * 2)
        assert second.host == Host("n2")  # its file system differs from this machine's
        requests = docker(1)
        assert sorted(requests[2:]) == [f"{run_prefix}-n1", f"{run_prefix}-n2"]
        await second.close()
        (restarted,) = await transport.open([second.host], [sys.executable])
        await restarted.close()
        assert docker(2)[1:] == ["rm --force paceline-n2", f"{run_prefix}.2-n2"]
        supervisor = ContainerTransport.from_json(
            json.loads(json.dumps(transport.to_json())), hosts
        )
        (third,) = await supervisor.open([hosts[1]], [sys.executable])
        await third.close()
        assert docker(0)[1:] == ["rm --force paceline-n2", f"{run_prefix}.2-n2"]
        await first.close()

    asyncio.run(scenario())


def test_does_not_replace_unremovable_container(
    docker: Callable[[int], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "is_removed", lambda status, engine_reply: False)

    async def scenario() -> None:
        docker(1)
        options = Options(container=ContainerOptions("image:1"))
        transport = ContainerTransport.from_json(
            ContainerTransport(engine("docker"), options).to_json(), [Host("n1")]
        )
        with pytest.raises(NodeError, match="n1 has lost cannot be removed") as caught:
            await transport.open([Host("n1", local=True)], [sys.executable])
        assert "docker rm --force paceline-" in caught.value.remedy
        assert not [line for line in docker(0) if line.startswith("run")]

    asyncio.run(scenario())


def test_supervisor_restarts_lost_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers the supervisor's own host, whose address may be of another kind by then."""
    monkeypatch.setattr(callback, "local_addresses", lambda *_: ["127.0.0.1"])
    requests: list[Host] = []

    async def start(host: Host, python: str) -> Any:
        requests.append(host)
        raise NodeError("there is none")

    async def scenario() -> None:
        hosts = (Host("n1"), Host("n2"))
        transport = CallbackTransport(hosts, b"k" * 32, "n2", None, lambda where: None, start)
        assert transport.redials
        transport.cannot_call({"n1": "no caller", "n2": "no caller"})
        for kind in (ConnectError, NodeError):  # on the first try it has to be called
            for host in hosts:
                with pytest.raises(kind):
                    await transport.open([host], ["python3"])
        await transport.close(0)

    asyncio.run(scenario())
    assert requests == [Host("n1"), Host("n2", local=True)]


def test_adds_devices_of_amd_and_intel_gpus() -> None:
    output = "paceline-uid 1000\npaceline-group 109\npaceline-dri\n"
    options = Options(container=ContainerOptions("i"))
    amd = container_for(Host("n1"), parse_probe(f"{output}paceline-kfd\n"), options, "1")
    assert (amd.devices, amd.groups, amd.mounts) == (("/dev/dri", "/dev/kfd"), (109,), ())
    intel = container_for(Host("n1"), parse_probe(f"{output}paceline-by_path\n"), options, "1")
    assert intel.devices == ("/dev/dri",)
    assert intel.mounts == ("/dev/dri/by-path:/dev/dri/by-path:ro",)


def test_mounts_only_existing_folders() -> None:
    options = Options(container=ContainerOptions("i", ("/x:/y",), ("/home/ann/project", "/runs")))
    container = container_for(Host("n1"), read_probe("missing"), options, "1")
    assert container.mounts == ("/x:/y", "/home/ann/project:/home/ann/project")
    assert container.workdir == "/home/ann/project"
    other_host = container_for(Host("n1"), read_probe("there"), options, "1")
    assert other_host.workdir == "/"
    assert other_host.groups == ()


@pytest.mark.parametrize("argument", ["--network", "--net=none", "--network=bridge", "--net"])
def test_rejects_network_options(argument: str) -> None:
    options = Options(container=ContainerOptions("i"), arguments=(argument,))
    with pytest.raises(SettingError, match="use the network of their host"):
        engine("docker").start(options)
    for harmless in ("--network=host", "--network-alias=a"):
        engine("docker").start(replace(options, arguments=(harmless,)))
