"""Tests checkpoint copies after the loss of rank 0's host, and writes of a host that is cut off."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import Launch, Site, eventually, shared_site

from paceline.spec.rundir import parse_version

pytestmark = pytest.mark.lab

LEASE_S = 4.0
TRAIN = ("--nnodes", "2", "--lease", str(LEASE_S), "--check", "none")


@pytest.fixture(scope="module")
def shared(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("copies")
    disk = folder / "disk"  # seen by all hosts, without the network: a cut-off host keeps it
    disk.mkdir()
    return shared_site(new_lab, folder, disk, hosts=3)


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    yield shared
    shared.lab.heal()
    assert eventually(lambda: not processes_on_n1(shared)), processes_on_n1(shared)
    assert shared.leftovers(but=["n1"]) == ""


def events(directory: Path, kind: str) -> list[Any]:
    path = directory / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [entry for entry in map(json.loads, lines) if entry["event"] == kind]


def relaunch(site: Site, directory: Path, *script_arguments: str) -> Launch:
    """Starts the same job on the two remaining hosts."""
    arguments = ["--run-dir", str(directory), *TRAIN, *script_arguments]
    return Launch(site, site.argv(*arguments, hosts="n2,n3"), directory)


def test_resumes_from_copy_after_lost_host(site: Site) -> None:
    """Rank 0's host, the launcher and the checkpoints that it had fetched are lost.

    Then a rank is replaced, and its host gets copies as before.
    """
    with site.start(*TRAIN, "steps.py") as launch:
        launch.until(lambda: bool(events(launch.directory, "checkpoint copied")))
        copied = events(launch.directory, "checkpoint copied")[0]
        assert copied["hosts"] == ["n2"]
        launch.kill()
        site.lab.fault("power-off", "n1")
    shutil.rmtree(launch.directory / "checkpoints", ignore_errors=True)
    assert eventually(lambda: site.clean(but=["n1"]))
    before = len(events(launch.directory, "checkpoint copied"))
    with relaunch(site, launch.directory, "steps.py", str(copied["step"] + 150)) as second:
        second.until(lambda: len(events(launch.directory, "checkpoint copied")) > before)
        site.lab.fault("kill", "n3", r"\[rank 1")
        ended = second.end()
    assert ended.code == 0, ended.err
    assert len(ended.json("result.json")["recoveries"]["of"]) == 1
    failed = ended.events("checkpoint copy failed")  # one may be cut off when the rank is killed
    assert not [entry["warning"] for entry in failed if "writer" in entry["warning"]]
    resumed = events(launch.directory, "resumed")[0]
    assert resumed["step"] >= copied["step"]
    assert "/runs/" in resumed["source"]
    for host in ("n2", "n3"):  # all is fetched: nothing stays on the hosts, not even copies
        assert not [*site.lab.home(host).glob(".cache/paceline/runs/*")], host


NETWORK_FAULTS = {"nothing arrives": ("drop", "n1", "1-65535"), "nothing passes": ("unplug", "n1")}


@pytest.mark.parametrize("fault_name", NETWORK_FAULTS)
def test_isolated_host_writes_no_checkpoint(site: Site, fault_name: str) -> None:
    """One or both directions are blocked. n1 sees the shared disk the whole time."""
    directory = site.project.parent / "disk" / fault_name.split()[-1]
    root, arguments = directory / "checkpoints", ("--run-dir", str(directory), *TRAIN, "steps.py")
    with Launch(site, site.argv(*arguments, hosts="n1,n2"), directory) as launch:
        launch.until(lambda: (root / "latest.json").exists())
        site.lab.fault(*NETWORK_FAULTS[fault_name])
        launch.kill()
    with relaunch(site, directory, "steps.py") as second:
        second.until(lambda: tokens(root) >= {2})
        former = [entry for entry in names(root) if token(entry) == 1]
        assert eventually(lambda: not processes_on_n1(site)), processes_on_n1(site)
        latest = max(names(root), key=parse_version)
        second.until(lambda: max(names(root), key=parse_version) > latest)
        second.signal(signal.SIGINT)
        second.end()
    remaining = [entry for entry in names(root) if token(entry) == 1]
    assert set(remaining) <= set(former)
    assert tokens(root) >= {2}
    assert not list(root.glob(".*.tmp"))


def processes_on_n1(site: Site) -> list[str]:
    """Returns the processes on n1 other than sshd, which has not noticed the cut yet."""
    return [line for _, line in site.lab.processes("n1") if not line.startswith("sshd")]


def tokens(root: Path) -> set[int]:
    return {*map(token, names(root))}


def names(root: Path) -> list[str]:
    return (
        [entry.name for entry in root.iterdir() if parse_version(entry.name)]
        if root.exists()
        else []
    )


def token(name: str) -> int:
    return (parse_version(name) or (0, 0))[0]
