"""Tests lost ranks, agents and hosts of a job that recovers in place and gets them back.

The ranks only exchange a recovery's messages (``member.py``); for trainings see
``test_recovery_in_place.py``.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from launches import Ended, Launch, Site, eventually, healed, shared_site

pytestmark = pytest.mark.lab

LEASE_S = 10.0
LONG_TRAINING_S = "300"  # seconds that the ranks would run
STOP_FILE = "over"  # the file that ends the job
OPTIONS = ("--no-torch", "--lease", str(LEASE_S), "member.py")


@pytest.fixture(scope="module")
def shared(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return shared_site(new_lab, tmp_path_factory.mktemp("recovery"), hosts=3)


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    (shared.project / STOP_FILE).unlink(missing_ok=True)
    yield from healed(shared)


def start_training(site: Site, *args: str, ranks: int = 3) -> Launch:
    """Starts a launch and waits until its ranks run."""
    at = args.index("member.py") if "member.py" in args else 0
    options = [*args[:at], *OPTIONS, *args[at + bool(at) :]]
    launch = site.start(*options).wait_for("began", times=ranks)
    time.sleep(0.5)
    return launch


def finish(site: Site, launch: Launch) -> Ended:
    """Lets all ranks exit, and returns the launch's result."""
    (site.project / STOP_FILE).touch()
    return launch.end()


def check_recoveries(ended: Ended, count: int = 1) -> Any:
    """Checks the number of recoveries; returns what the result says about them."""
    assert ended.code == 0, ended.err
    recoveries = ended.json("result.json")["recoveries"]
    assert recoveries["count"] == count, (recoveries, ended.err)
    assert f"{count} recover" in ended.err
    return recoveries["of"]


def wait_for_rejoin(launch: Launch, times: int = 1) -> None:
    """Waits until the given number of lost ranks have joined again and were reported."""
    launch.wait_for("joined", times)
    assert eventually(lambda: launch.err.count("back after") >= times), launch.err


def test_recovers_from_two_simultaneous_kills(site: Site) -> None:
    with start_training(site, LONG_TRAINING_S, "late", "2") as launch:
        for host, rank in (("n1", 0), ("n3", 2)):
            os.kill(site.pid(host, rf"rank {rank} of 3"), signal.SIGKILL)
        launch.wait_for("joined", times=2)
        ended = finish(site, launch)
    assert sum(len(entry["who"]) for entry in ended.json("result.json")["recoveries"]["of"]) == 2
    assert ended.events("regroup")[-1]["members"] == [1, 0, 2]


def test_recovers_from_killed_fork_server(site: Site) -> None:
    """On the first node: the store is lost, too, and is opened on another node."""
    with start_training(site, LONG_TRAINING_S) as launch:
        os.kill(site.pid("n1", "forkserver"), signal.SIGKILL)
        wait_for_rejoin(launch)
        ended = finish(site, launch)
    (entry,) = check_recoveries(ended)
    assert "fork server" in entry["why"]
    ports = {line.split()[-1] for line in ended.lines(1) if line.startswith("group")}
    assert len(ports) == 1
    assert ports != {str(ended.json("plan.json")["master"]["port"])}


@pytest.mark.parametrize(("host", "process_name"), [("n1", "agent"), ("n2", "guard")])
def test_recovers_from_killed_agent_or_guard(site: Site, host: str, process_name: str) -> None:
    pattern = "import select,sys;" if process_name == "agent" else " guard "
    with start_training(site, LONG_TRAINING_S) as launch:
        os.kill(site.pid(host, pattern), signal.SIGKILL)
        wait_for_rejoin(launch)
        ended = finish(site, launch)
    (entry,) = check_recoveries(ended)
    assert "killed" in entry["why"]


def test_recovers_from_powered_off_node(site: Site) -> None:
    with start_training(site, LONG_TRAINING_S) as launch:
        site.lab.fault("power-off", "n2")
        assert eventually(lambda: "Training went on" in launch.err), launch.err
        time.sleep(1)
        site.lab.heal()
        wait_for_rejoin(launch)
        ended = finish(site, launch)
    (entry,) = check_recoveries(ended)
    assert "n2: silent for" in entry["why"]
    assert "rank 1 on n2 is back" in ended.err


def test_short_link_flap_needs_no_regroup(site: Site) -> None:
    with start_training(site, "5") as launch:
        site.lab.fault("unplug", "n2")
        time.sleep(0.5)
        site.lab.heal()
        ended = launch.end()
    assert ended.code == 0
    assert ended.events("regroup") == []


def test_recovers_from_unplugged_node(site: Site) -> None:
    with start_training(site, LONG_TRAINING_S) as launch:
        site.lab.fault("unplug", "n3")
        time.sleep(5)
        site.lab.heal()
        wait_for_rejoin(launch)
        ended = finish(site, launch)
    check_recoveries(ended)


def test_recovers_from_frozen_rank(site: Site) -> None:
    with start_training(site, LONG_TRAINING_S) as launch:
        os.kill(site.pid("n2", r"rank 1 of 3"), signal.SIGSTOP)
        wait_for_rejoin(launch)
        ended = finish(site, launch)
    (entry,) = check_recoveries(ended)
    assert "SIGSTOP" in entry["why"]
    assert "rank 1 on n2 stood still, stopped by a signal (SIGSTOP): it was ended" in ended.err


def test_too_few_nodes_wait_for_lost_node(site: Site) -> None:
    with start_training(site, "--nnodes", "3", "member.py", LONG_TRAINING_S) as launch:
        site.lab.fault("power-off", "n2")
        assert eventually(lambda: "too few nodes are left: waiting for n2" in launch.err)
        time.sleep(1)
        assert "regroup" not in (launch.directory / "events.jsonl").read_text()
        site.lab.heal()
        wait_for_rejoin(launch)
        site.lab.fault("power-off", "n2")  # and Ctrl-C while the ranks wait again
        assert eventually(lambda: launch.err.count("too few nodes are left") == 2), launch.err
        launch.signal(signal.SIGINT)
        ended = launch.end()
    assert ended.code == 130
    assert ended.out.count("saved at") == 2


def test_ranks_save_and_stop_if_node_does_not_return(site: Site) -> None:
    with start_training(
        site, "--nnodes", "3", "--wait-for-nodes", "2", "member.py", LONG_TRAINING_S
    ) as launch:
        site.lab.fault("power-off", "n2")
        ended = launch.end()
    assert ended.code == 1
    assert ended.out.count("saved at") == 2
    assert "failed first: n2: " in ended.err
    assert "to resume:" in ended.err


def test_exception_ends_job(site: Site) -> None:
    with start_training(site, LONG_TRAINING_S, "fails", "1") as launch:
        ended = launch.end()
    assert ended.code == 1
    assert "failed first: rank 1 on n2: ValueError: boom" in ended.err


def test_exception_after_loss_ends_job(site: Site) -> None:
    """The others had continued without the lost host, so its loss is no reason for a restart."""
    with start_training(
        site, "--nnodes", "1:3", "member.py", LONG_TRAINING_S, "bereft", "0"
    ) as launch:
        site.lab.fault("power-off", "n3")
        ended = launch.end()
    assert ended.code == 1
    assert "failed first: rank 0 on n1: ValueError: boom" in ended.err
    assert len(ended.events("started")) == 1


def test_max_restarts_recovers_rank_after_exception(site: Site) -> None:
    with start_training(
        site, "--max-restarts", "1", "member.py", LONG_TRAINING_S, "fails", "1"
    ) as launch:
        wait_for_rejoin(launch)
        ended = finish(site, launch)
    (entry,) = check_recoveries(ended)
    assert "ValueError: boom" in entry["why"]


def test_restarts_if_ranks_are_killed_together(site: Site) -> None:
    """Newcomers between the first and the last killed rank do not prevent the restart."""
    args = ("--nnodes", "1", "-p", "3", "--max-restarts", "1", "member.py", "3")
    with start_training(site, *args) as launch:
        pids = [site.pid("n1", rf"rank {rank} of 3") for rank in range(3)]
        for signum in (signal.SIGSTOP, signal.SIGKILL):  # none may continue while others are killed
            for pid in pids:
                os.kill(pid, signum)
        ended = launch.end()
    assert ended.code == 0, ended.err
    assert ended.err.count("starting all nodes again, 1 of 1") == 1
    assert "SIGTERM" not in ended.err
    assert [entry["attempt"] for entry in ended.events("started")] == [0, 1]
    assert "recoveries" not in ended.json("result.json")


def test_job_unable_to_recover_ends(site: Site) -> None:
    with start_training(site, LONG_TRAINING_S, "unable", "0") as launch:
        os.kill(site.pid("n2", r"rank 1 of 3"), signal.SIGKILL)
        ended = launch.end()
    assert ended.code == 137
    assert "failed first: rank 1 on n2: killed by SIGKILL" in ended.err


def test_drops_newcomer_that_fails(site: Site) -> None:
    with start_training(site, LONG_TRAINING_S, "short", "1") as launch:
        os.kill(site.pid("n2", r"rank 1 of 3"), signal.SIGKILL)
        assert eventually(lambda: "could not join again" in launch.err), launch.err
        ended = finish(site, launch)
    check_recoveries(ended)
    assert "rank 1 on n2 could not join again (ValueError: not again): left out" in ended.err
    assert [
        (entry["host"], entry["rank"], entry["why"]) for entry in ended.events("newcomer lost")
    ] == [("n2", 1, "ValueError: not again")] * 3


def test_recovers_from_repeated_losses(site: Site) -> None:
    with start_training(site, LONG_TRAINING_S) as launch:
        for number, (host, rank) in enumerate((("n2", 1), ("n1", 0), ("n3", 2), ("n2", 1))):
            os.kill(site.pid(host, rf"rank {rank} of 3"), signal.SIGKILL)
            wait_for_rejoin(launch, number + 1)
        ended = finish(site, launch)
    assert check_recoveries(ended, 4)[0]["who"] == ["rank 1 on n2"]
    assert re.search(
        r"rank 1 on n2 was killed by SIGKILL.*\. Training went on with the other 2 ranks after"
        r" \d+\.\d s; no step was lost", ended.err,
    )  # fmt: skip
    assert re.search(r"rank 1 on n2 is back after", ended.err)
    groups = ended.events("regroup")
    assert [(g["generation"], g["members"], g["planned"]) for g in groups][:2] == [
        (1, [0, 2], False), (2, [0, 2, 1], True),
    ]  # fmt: skip
    log = (ended.directory / "logs/n2/1.log").read_text()
    assert log.index("began") < log.index("joined") < log.index("ended")
