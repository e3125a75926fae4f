"""Every container engine: words survive, no folder is made up, one image or none."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from paceline.remote.openssh import agent_command
from paceline.rendezvous.listener import caller_config
from paceline.schedulers import SCHEDULERS, load
from paceline.schedulers.container import (
    Container,
    Engine,
    Probe,
    check_images,
    container_for,
    parse_probe,
    probe_command,
)
from paceline.schedulers.scheduler import ContainerOptions, Options
from paceline.spec.errors import NodeError
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
    config = caller_config([("10.0.0.1", 5)], ["py"], [], "X", 3.0, wrap=wrap, once=True)
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
    assert probe.words


def read(name: str) -> Probe:
    return parse_probe((FIXTURES / f"docker-{name}.txt").read_text())


def test_a_probe_is_read() -> None:
    there, lacking = read("there"), read("missing")
    assert there.digest.startswith("sha256:0415d637")
    assert there.words == "Welcome to gpu01"
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
