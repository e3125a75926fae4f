"""Tests that a failure or a hang is quickly attributed to the right host, process and cause."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from launches import TIMEOUT_S, Ended, Launch, Site, eventually, shared_site

pytestmark = pytest.mark.lab

LEASE_S = 6.0
OPTIONS = ("--nnodes", "2", "--no-torch", "--lease", str(LEASE_S))
TRAIN = ("--nnodes", "2", "--lease", str(LEASE_S))
LONG_GRACE = ("--grace", str(2 * TIMEOUT_S))  # longer than the tests wait


@pytest.fixture(scope="module")
def shared(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return shared_site(new_lab, tmp_path_factory.mktemp("attribution"), hosts=3)


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    yield shared
    shared.lab.heal()
    # nodes whose launcher was killed may wait for it until the lease ends
    assert shared.leftovers() == ""


def running(site: Site, *arguments: str, attempt: str = "waiting") -> Launch:
    return site.start(*OPTIONS, *arguments).wait_for(attempt, times=2)


def training(site: Site, *arguments: str, **how: Any) -> Launch:
    """Starts a training and waits for its first checkpoint."""
    launch = site.start(*TRAIN, *arguments, **how)
    return launch.until((launch.directory / "checkpoints" / "latest.json").exists)


def first(ended: Ended) -> Any:
    return ended.json("result.json")["first_failure"]


# --- failures of the launcher


def test_stopped_launcher_blames_no_host(site: Site) -> None:
    with running(site, "end.py", "echo") as launch:
        for seconds in (LEASE_S / 3, LEASE_S + 3):
            launch.signal(signal.SIGSTOP)
            time.sleep(seconds)
            launch.signal(signal.SIGCONT)
            if seconds < LEASE_S:
                time.sleep(1.5)
                assert launch.process.poll() is None, launch.err
        ended = launch.end()
    assert ended.code == 1
    assert re.search(
        rf"failed first: this launcher was stopped for \d+ s, longer than the lease of "
        rf"{LEASE_S:g} s; the nodes ended their ranks", ended.err,
    )  # fmt: skip
    assert not re.search(r"n[12] (went away|heard)|unplugged|failed first: n[12]", ended.err)
    assert first(ended)["kind"] == "launcher"


def test_launcher_stopped_during_start_blames_no_host(site: Site) -> None:
    with site.start("--lease", str(LEASE_S), "--max-restarts", "0", "train.py") as launch:
        has_fork_server = lambda: "forkserver" in str(site.processes().get("n2"))  # noqa: E731
        assert eventually(has_fork_server)
        launch.signal(signal.SIGSTOP)
        time.sleep(LEASE_S + 3)
        launch.signal(signal.SIGCONT)
        ended = launch.end()
    assert ended.code == 1
    assert re.search(r"this launcher was stopped for \d+ s, longer than the lease", ended.err)
    assert "went away" not in ended.err


# --- failures of the agent, the guard and ssh


def test_reports_killed_agent(site: Site) -> None:
    with running(site, "end.py", "children") as launch:
        lines = [line for _, line in site.lab.processes("n2")]
        os.kill(site.pid("n2", "import select,sys;"), signal.SIGKILL)
        ended = launch.end()
    # the command line names the rank; a child between fork and exec still has its rank's line
    assert {line for line in lines if "end.py" in line} == {
        "python end.py children [rank 1 of 2, n2]"
    }, lines
    assert "failed first: n2: the connection to n2 ended: the agent was killed by SIGKILL" in (
        ended.err
    )


def test_reports_killed_guard(site: Site) -> None:
    with running(site, "end.py", "children") as launch:
        os.kill(site.pid("n2", " guard "), signal.SIGKILL)
        ended = launch.end()
    assert re.search(r"failed first: n2: its guard .* was killed; the agent ended", ended.err)


def test_reconnects_after_killed_ssh_server(site: Site) -> None:
    with running(site, "end.py", "echo") as launch:
        site.lab.fault("kill", "n2", "sshd: .*notty")
        assert eventually(lambda: "dialled again" in launch.err), launch.err
        launch.signal(signal.SIGINT)
        ended = launch.end()
    assert ended.code == 130, ended.err
    assert "the connection to n2 was lost; dialled again after" in ended.err


def test_reports_host_lost_during_start(site: Site) -> None:
    with site.start("--lease", str(LEASE_S), "--max-restarts", "0", "train.py") as launch:
        has_fork_server = lambda: "forkserver" in str(site.processes().get("n2"))  # noqa: E731
        assert eventually(has_fork_server)
        site.lab.fault("power-off", "n2")
        ended = launch.end()
    assert ended.code == 1
    assert "n2 went away while starting" in ended.err
    assert not re.search(r"ImportError|cannot import|could not import", ended.err)


# --- failures of the fork server


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_replaces_fork_server(site: Site, signum: int) -> None:
    with running(site, "--max-restarts", "1", "end.py", "children") as launch:
        os.kill(site.pid("n2", "forkserver"), signum)
        launch.wait_for("waiting", times=4)
        launch.signal(signal.SIGINT)
        ended = launch.end()
    assert ended.code == 130
    how = "killed by SIGKILL" if signum == signal.SIGKILL else "stood still"
    assert re.search(f"n2: the fork server .*{how}.*; starting all nodes again, 1 of 1", ended.err)


# --- ranks that end early


def test_names_rank_stopped_by_sigterm(site: Site) -> None:
    with training(site, "steps.py") as launch:
        os.kill(site.pid("n2", r"rank 1 of 2"), signal.SIGTERM)
        ended = launch.end()
    assert re.search(r"failed first: rank 1 on n2: Stopped: stopped on SIGTERM", ended.err)
    assert re.search(r"\nto resume: paceline run .*--run-dir \S+ .*steps\.py\n", ended.err)
    assert ended.err.count("stopped on SIGTERM") <= 2, ended.err
    assert first(ended)["rank"] == 1


def test_names_rank_that_exits_early(site: Site) -> None:
    ended = site.run(*TRAIN, "steps.py", "1000", "exit", "1", "5")
    assert ended.code == 1
    assert (
        "failed first: rank 1 on n2: ended with status 0 while the others were still training"
        in ended.err
    )


# --- interrupts by the user


def test_nohup_survives_hangup(site: Site) -> None:
    directory = site.fresh()
    argv = site.argv("--run-dir", str(directory), *OPTIONS, "end.py", "echo")
    with Launch(site, ["nohup", *argv], directory) as launch:
        launch.wait_for("waiting", times=2)
        launch.signal(signal.SIGHUP)
        time.sleep(0.5)
        assert launch.process.poll() is None
        launch.signal(signal.SIGTERM)
        assert launch.end().code == 143


def test_interrupt_during_restart(site: Site) -> None:
    """One interrupt, at several moments between the failure and the next start."""
    for delay in (0.1, 0.9, 1.6):
        with running(site, "--max-restarts", "3", *LONG_GRACE, "end.py", "ignore") as launch:
            os.kill(site.pid("n2", r"rank 1 of 2"), signal.SIGKILL)
            time.sleep(delay)
            launch.signal(signal.SIGINT)
            has_exited = lambda: launch.process.poll() is not None  # noqa: E731
            restarted = lambda: launch.out.count("waiting") > 2  # noqa: E731
            assert eventually(lambda: has_exited() or restarted()), (delay, launch.err)  # noqa: B023
            if not has_exited():  # the ranks run again, and ignore the first interrupt
                launch.signal(signal.SIGINT)
            ended = launch.end()
            assert ended.code == 130, ended.err  # also if the second came during the explanation
            assert "Traceback" not in ended.err
        assert eventually(site.clean)


# --- loss of rank 0's host


def test_resumes_on_remaining_hosts(site: Site) -> None:
    """The launcher is killed, too: otherwise the remaining rank would continue its training."""
    with training(site, "steps.py") as launch:
        site.lab.fault("power-off", "n1")
        launch.kill()
    checkpoint_folder = launch.directory / "checkpoints"
    assert not (checkpoint_folder / "writer.json").exists()
    arguments = ["--run-dir", str(launch.directory), *TRAIN, "steps.py", "300"]
    restarted = Launch(site, site.argv(*arguments, hosts="n2,n3"), launch.directory)
    with restarted:
        restarted.wait_for("resumed after step")
        restarted.wait_for("from ", times=2)
        restarted.signal(signal.SIGINT)
        restarted.end()
    assert "another job writes" not in restarted.err

    def clients() -> bool:
        """Returns whether an ssh client to the dead host still runs."""
        listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
        return any(str(site.lab.ssh_config) in line for line in listed.stdout.splitlines()
                   if line.startswith("ssh "))  # fmt: skip

    assert eventually(lambda: not clients())  # it exits by itself, after 15 s without an answer


def test_recovered_host_rejoins(site: Site) -> None:
    with running(site, "--max-restarts", "1", "end.py", "echo") as launch:
        site.lab.fault("power-off", "n2")
        assert eventually(lambda: "dialling n2 again" in launch.err), launch.err
        site.lab.undo("power-off", "n2")
        launch.wait_for("waiting", times=4)
        launch.signal(signal.SIGINT)
        ended = launch.end()
    assert ended.code == 130, ended.err
    assert "n2 is back; starting all nodes again, 1 of 1" in ended.err


# --- no hangs (for hangs see test_hangs.py)


def test_long_work_of_single_rank_is_no_hang(site: Site) -> None:
    arguments = ("steps.py", "80", "evaluate,compile,write", "0", "40")
    ended = site.run(*TRAIN, "--hang-timeout", "3", *arguments)
    assert ended.code == 0, ended.err
    assert "no step for" not in ended.err
