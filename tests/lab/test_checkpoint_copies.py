"""Checkpoints outlive rank 0's host, and a host that is cut off writes none beside the others."""

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
    disk = folder / "disk"  # of all hosts, and not over the network: a host that is cut off has it
    disk.mkdir()
    return shared_site(new_lab, folder, disk, hosts=3)


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    yield shared
    shared.lab.heal()
    assert eventually(lambda: not ours(shared)), ours(shared)
    assert shared.leftovers(but=["n1"]) == ""


def events(directory: Path, kind: str) -> list[Any]:
    path = directory / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [one for one in map(json.loads, lines) if one["event"] == kind]


def again(site: Site, directory: Path, *words: str) -> Launch:
    """The same job on the two hosts that are left."""
    typed = ["--run-dir", str(directory), *TRAIN, *words]
    return Launch(site, site.argv(*typed, hosts="n2,n3"), directory)


def test_the_copy_is_there_when_nothing_else_is(site: Site) -> None:
    """Rank 0's host, the launcher and what it had brought home are gone.

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
    with again(site, launch.directory, "steps.py", str(copied["step"] + 150)) as second:
        second.until(lambda: len(events(launch.directory, "checkpoint copied")) > 1)
        site.lab.fault("kill", "n3", r"\[rank 1")
        ended = second.end()
    assert ended.code == 0, ended.err
    assert len(ended.json("result.json")["recoveries"]["of"]) == 1
    failed = ended.events("checkpoint copy failed")  # one may be cut off when the rank is killed
    assert not [one["warning"] for one in failed if "writer" in one["warning"]]
    resumed = events(launch.directory, "resumed")[0]
    assert resumed["step"] >= copied["step"]
    assert "/runs/" in resumed["source"]
    for host in ("n2", "n3"):  # all is at home: nothing stays, the copies neither
        assert not [*site.lab.home(host).glob(".cache/paceline/runs/*")], host


CUTS = {"nothing arrives": ("drop", "n1", "1-65535"), "nothing passes": ("unplug", "n1")}


@pytest.mark.parametrize("cut", CUTS)
def test_who_is_cut_off_writes_nothing_beside_the_others(site: Site, cut: str) -> None:
    """One direction, and both; n1 sees the disk of all the while."""
    directory = site.project.parent / "disk" / cut.split()[-1]
    root, typed = directory / "checkpoints", ("--run-dir", str(directory), *TRAIN, "steps.py")
    with Launch(site, site.argv(*typed, hosts="n1,n2"), directory) as launch:
        launch.until(lambda: (root / "latest.json").exists())
        site.lab.fault(*CUTS[cut])
        launch.kill()
    with again(site, directory, "steps.py") as second:
        second.until(lambda: tokens(root) >= {2})
        former = [one for one in names(root) if token(one) == 1]
        assert eventually(lambda: not ours(site)), ours(site)
        newest = max(names(root), key=parse_version)
        second.until(lambda: max(names(root), key=parse_version) > newest)
        second.signal(signal.SIGINT)
        second.end()
    left = [one for one in names(root) if token(one) == 1]
    assert set(left) <= set(former)
    assert tokens(root) >= {2}
    assert not list(root.glob(".*.tmp"))


def ours(site: Site) -> list[str]:
    """What runs on n1, but for sshd, which knows nothing of the cut yet."""
    return [line for _, line in site.lab.processes("n1") if not line.startswith("sshd")]


def tokens(root: Path) -> set[int]:
    return {*map(token, names(root))}


def names(root: Path) -> list[str]:
    return [one.name for one in root.iterdir() if parse_version(one.name)] if root.exists() else []


def token(name: str) -> int:
    return (parse_version(name) or (0, 0))[0]
