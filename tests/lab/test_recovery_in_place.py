"""Tests that trainings recover in place from faults and end with the same weights."""

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
PAUSE_S = "1"  # of a step during a fault; lost ranks are back long before the last step
TOLERANCE = 1e-10
SLOW_STEPS_FILE = "struck"  # while this file exists, steps take long
LOADING_FILE = "loading"  # while this file exists, ranks wait before their first step


@pytest.fixture(scope="module")
def shared(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return shared_site(new_lab, tmp_path_factory.mktemp("outlive"), hosts=3)


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    yield shared
    shared.lab.heal()
    for name in (SLOW_STEPS_FILE, LOADING_FILE):
        (shared.project / name).unlink(missing_ok=True)
    assert shared.leftovers() == ""


@pytest.fixture(scope="module")
def reference_run(shared: Site) -> Path:
    """Runs the training without faults, on one host; returns its run directory."""
    ended = shared.run("outlive.py", STEPS, hosts="n1")
    assert ended.code == 0, ended.err
    return ended.directory


def start_training(site: Site, *options: str) -> Launch:
    return site.start(*options, "outlive.py", STEPS, PAUSE_S).wait_for("] step 10\n", times=3)


def send_sigkill(site: Site, host: str, pattern: str) -> None:
    os.kill(site.pid(host, pattern), signal.SIGKILL)


def inject_failure(site: Site, launch: Launch, rank_name: str, how: Callable[[], object]) -> None:
    """Causes a fault and waits until the lost rank is back; few steps are made meanwhile."""
    previous_count = launch.err.count(f"{rank_name} is back")
    (site.project / SLOW_STEPS_FILE).touch()
    how()
    is_back = lambda: launch.err.count(f"{rank_name} is back") > previous_count  # noqa: E731
    assert eventually(lambda: is_back() or launch.process.poll() is not None), launch.err
    assert is_back(), launch.err
    (site.project / SLOW_STEPS_FILE).unlink()


def check_training(ended: Ended, reference_run: Path, recoveries: int) -> None:
    """Checks that each step was made once, in order, and that the weights are the same."""
    assert ended.code == 0, ended.err
    assert ended.json("result.json")["recoveries"]["count"] == recoveries, ended.err
    for rank in range(3):
        steps = [int(line.split()[1]) for line in ended.lines(rank) if line.startswith("step")]
        assert steps == sorted(set(steps)), (rank, steps)
    assert largest_difference(reference_run, ended.directory) < TOLERANCE


def test_restarts_after_losses_before_first_step(site: Site, reference_run: Path) -> None:
    """All ranks start again: with a new process, then without a host that stays away."""
    (site.project / LOADING_FILE).touch()
    with site.start("outlive.py", STEPS) as launch:
        launch.wait_for("loading", times=3)
        send_sigkill(site, "n2", "rank 1 of 3")
        launch.wait_for("loading", times=6)
        site.lab.fault("power-off", "n1")
        launch.wait_for("loading", times=8)
        (site.project / LOADING_FILE).unlink()
        ended = launch.end()
    restart_message = "starting all nodes again, before the first step"
    assert ended.code == 0, ended.err
    assert re.search(
        rf"rank 1 on n2: killed by SIGKILL .*; {restart_message} \(1 of 2\)", ended.err
    )
    assert re.search(rf"n1: .*; going on with n2, n3; {restart_message} \(2 of 2\)", ended.err)
    assert largest_difference(reference_run, ended.directory) < TOLERANCE


def test_weights_match_after_kills_and_power_loss(site: Site, reference_run: Path) -> None:
    """The host comes back; while it is away, the others make steps.

    Killed agents and frozen ranks are tested in ``test_soak.py``.
    """

    def power_cycle() -> None:
        previous_count = launch.err.count("Training went on")
        site.lab.fault("power-off", "n1")
        assert eventually(lambda: launch.err.count("Training went on") > previous_count), launch.err
        steps = launch.out.count("[n2/1] step ")
        assert eventually(lambda: launch.out.count("[n2/1] step ") > steps + 3), launch.err
        site.lab.heal()

    with start_training(site) as launch:
        kill = lambda *how: lambda: send_sigkill(site, *how)  # noqa: E731
        inject_failure(site, launch, "rank 1 on n2", kill("n2", "rank 1 of 3"))
        inject_failure(site, launch, "rank 0 on n1", kill("n1", "rank 0 of 3"))
        inject_failure(site, launch, "rank 2 on n3", kill("n3", "forkserver"))
        inject_failure(site, launch, "rank 0 on n1", power_cycle)
        ended = launch.end()
    check_training(ended, reference_run, 4)


@pytest.mark.parametrize(
    ("options", "deaf"),
    [((), [("n3", "n2")]), (("--encrypt",), [("n3", "n1"), ("n1", "n3")])],
    ids=["one way", "encrypted, store, both ways"],
)
def test_drops_host_behind_blocked_link(
    site: Site, options: tuple[str, ...], deaf: list[tuple[str, str]]
) -> None:
    """The two hosts that reach each other continue; the launcher reaches all of them."""
    host, peer = deaf[0]
    with start_training(site, *options) as launch:
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


def test_interrupt_during_loss_saves_checkpoint(site: Site) -> None:
    """A user stops the run before the loss is detected; all ranks that are left save."""
    with start_training(site) as launch:
        site.lab.fault("power-off", "n2")
        launch.signal(signal.SIGINT)
        ended = launch.end()
    assert ended.code == 130
    assert "the other 2 ranks save and stop" in ended.err
    assert "to resume:" in ended.err
    assert (ended.directory / "checkpoints/latest.json").exists(), ended.err
