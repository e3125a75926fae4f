"""A training that is struck while it runs: the others train on, and the weights are the same."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import Ended, Launch, Site, eventually, shared_site
from transports import largest_difference

pytestmark = pytest.mark.lab

STEPS = "240"
PAUSE_S = "1"  # of a step while somebody is struck, who is back long before the last one
SAME = 1e-10
STRUCK = "struck"  # the file that makes steps long
LOADING = "loading"  # the file that keeps ranks from their first step


@pytest.fixture(scope="module")
def shared(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return shared_site(new_lab, tmp_path_factory.mktemp("outlive"), hosts=3)


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    yield shared
    shared.lab.heal()
    for name in (STRUCK, LOADING):
        (shared.project / name).unlink(missing_ok=True)
    assert shared.leftovers() == ""


@pytest.fixture(scope="module")
def undisturbed(shared: Site) -> Path:
    """The run directory of the training that nobody strikes."""
    ended = shared.run("outlive.py", STEPS)
    assert ended.code == 0, ended.err
    return ended.directory


def training(site: Site, *options: str) -> Launch:
    return site.start(*options, "outlive.py", STEPS, PAUSE_S).wait_for("] step 10\n", times=3)


def send(site: Site, host: str, pattern: str) -> None:
    os.kill(site.pid(host, pattern), signal.SIGKILL)


def strike(site: Site, launch: Launch, who: str, how: Callable[[], object]) -> None:
    """Does it, and waits until who was lost is back; few steps are made meanwhile."""
    before = launch.err.count(f"{who} is back")
    (site.project / STRUCK).touch()
    how()
    there = lambda: launch.err.count(f"{who} is back") > before  # noqa: E731
    assert eventually(lambda: there() or launch.process.poll() is not None), launch.err
    assert there(), launch.err
    (site.project / STRUCK).unlink()


def judge(ended: Ended, undisturbed: Path, recoveries: int) -> None:
    """All steps, in order, each of them once, and the same weights."""
    assert ended.code == 0, ended.err
    assert ended.json("result.json")["recoveries"]["count"] == recoveries, ended.err
    for rank in range(3):
        steps = [int(line.split()[1]) for line in ended.lines(rank) if line.startswith("step")]
        assert steps == sorted(set(steps)), (rank, steps)
    assert largest_difference(undisturbed, ended.directory) < SAME


def test_losses_before_the_first_step(site: Site, undisturbed: Path) -> None:
    """All begin again: with a new process, and without a host that stays away."""
    (site.project / LOADING).touch()
    with site.start("outlive.py", STEPS) as launch:
        launch.wait_for("loading", times=3)
        send(site, "n2", "rank 1 of 3")
        launch.wait_for("loading", times=6)
        site.lab.fault("power-off", "n1")
        launch.wait_for("loading", times=8)
        (site.project / LOADING).unlink()
        ended = launch.end()
    again = "starting all nodes again, before the first step"
    assert ended.code == 0, ended.err
    assert re.search(rf"rank 1 on n2: killed by SIGKILL .*; {again} \(1 of 2\)", ended.err)
    assert re.search(rf"n1: .*; going on with n2, n3; {again} \(2 of 2\)", ended.err)
    assert largest_difference(undisturbed, ended.directory) < SAME


def test_processes_are_killed_and_a_host_loses_power(site: Site, undisturbed: Path) -> None:
    """The host comes back, and while it is away the others make steps.

    Agents that are killed and ranks that are frozen are in ``test_soak.py``.
    """

    def power() -> None:
        before = launch.err.count("Training went on")
        site.lab.fault("power-off", "n1")
        assert eventually(lambda: launch.err.count("Training went on") > before), launch.err
        steps = launch.out.count("[n2/1] step ")
        assert eventually(lambda: launch.out.count("[n2/1] step ") > steps + 3), launch.err
        site.lab.heal()

    with training(site) as launch:
        kill = lambda *how: lambda: send(site, *how)  # noqa: E731
        strike(site, launch, "rank 1 on n2", kill("n2", "rank 1 of 3"))
        strike(site, launch, "rank 0 on n1", kill("n1", "rank 0 of 3"))
        strike(site, launch, "rank 2 on n3", kill("n3", "forkserver"))
        strike(site, launch, "rank 0 on n1", power)
        ended = launch.end()
    judge(ended, undisturbed, 4)


@pytest.mark.parametrize(
    ("options", "deaf"),
    [((), [("n3", "n2")]), (("--encrypt",), [("n3", "n1"), ("n1", "n3")])],
    ids=["one way", "encrypted, store, both ways"],
)
def test_a_host_that_is_deaf_to_another_is_left_out(
    site: Site, options: tuple[str, ...], deaf: list[tuple[str, str]]
) -> None:
    """And those two go on that hear each other; the launcher hears all of them."""
    host, peer = deaf[0]
    with training(site, *options) as launch:
        for pair in deaf:
            site.lab.fault("deaf", *pair)
        assert eventually(lambda: "went on with the other 2 ranks" in launch.err), launch.err
        launch.signal(signal.SIGINT)
        ended = launch.end()
    assert (
        f"{host} and {peer} cannot reach each other (paceline check tries each direction)"
        in ended.err
    )
    assert ended.code == 130


def test_it_is_stopped_at_the_moment_of_a_loss(site: Site) -> None:
    """By somebody who sees that nothing moves, when nobody knows of the loss yet: all is saved."""
    with training(site) as launch:
        site.lab.fault("power-off", "n2")
        launch.signal(signal.SIGINT)
        ended = launch.end()
    assert ended.code == 130
    assert "the other 2 ranks save and stop" in ended.err
    assert "to resume:" in ended.err
    assert (ended.directory / "checkpoints/latest.json").exists(), ended.err
