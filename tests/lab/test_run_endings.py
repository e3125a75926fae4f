"""Tests every way in which a job can end, and that it leaves nothing on the hosts."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from launches import SOURCE, TEST_LIMIT_S, TIMEOUT_S, Launch, Site, eventually, shared_site

from paceline.launch.interrupts import ECHO_S

pytestmark = pytest.mark.lab

LEASE_S = 4.0
LOSS_OPTIONS = ("--no-torch", "--lease", str(LEASE_S))  # for tests that wait for a lost process
# for all other tests: the lease is longer than they wait
OPTIONS = ("--no-torch", "--lease", str(2 * TIMEOUT_S))
LONG_GRACE = ("--grace", str(2 * TIMEOUT_S))


@pytest.fixture(scope="module")
def shared(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return shared_site(new_lab, tmp_path_factory.mktemp("endings"), hosts=2)


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    """Heals all faults; checks that nothing runs or listens after a test."""
    yield shared
    shared.lab.heal()
    remaining = shared.leftovers()
    if remaining:  # clean up, so that the next test does not fail, too
        for name in shared.lab.names:
            shared.lab.fault("kill", name, "sleep|paceline|end.py")
    assert remaining == ""


def start_waiting(site: Site, *args: str, options: tuple[str, ...] = OPTIONS) -> Launch:
    """Starts a launch and waits until both ranks print that they wait."""
    return site.start(*options, "end.py", *args).wait_for("waiting", times=2)


# --- ends of the job by itself


def test_reports_rank_exception(site: Site) -> None:
    ended = site.run(*OPTIONS, "-p", "2", "end.py", "raise", "1")
    assert ended.code == 1
    assert (ended.out + ended.err).count("Traceback") == 1
    assert "ValueError: boom on 1" in ended.err
    summary = ended.err[ended.err.index("failed first") :]
    assert "failed first: rank 1 on n1: ValueError: boom on 1" in summary
    assert "end.py" in summary
    assert "paceline_agent" not in summary
    assert "Traceback" in (ended.directory / "logs/n1/1.log").read_text()
    assert ended.json("result.json")["first_failure"]["rank"] == 1


def test_reports_rank_crash(site: Site) -> None:
    ended = site.run(*OPTIONS, "end.py", "segv", "0")
    assert ended.code == 128 + signal.SIGSEGV
    assert "rank 0 on n1: killed by SIGSEGV" in ended.err


def test_reports_only_first_failure(site: Site) -> None:
    ended = site.run("--lease", "5", "fail_in_step.py", "1")
    assert ended.code == 1
    assert "failed first: rank 1 on n2: ZeroDivisionError" in ended.err
    assert ended.err.rstrip().count("Traceback") == 1


def test_ends_orphaned_child_processes(site: Site) -> None:
    ended = site.run(*OPTIONS, "end.py", "leave")
    assert ended.code == 0
    assert site.leftovers() == ""


# --- interrupts by the user


def test_ctrl_c_lets_ranks_save(site: Site) -> None:
    with start_waiting(site, "save", options=(*OPTIONS, *LONG_GRACE)) as launch:
        launch.signal(signal.SIGINT)
        ended = launch.end()
    assert ended.code == 130
    assert ended.out.count("saved") == 2


def test_signal_to_launcher_children_lets_ranks_save(site: Site) -> None:
    """As schedulers do: they signal every process of the job on the launcher's host."""
    with start_waiting(site, "save", options=(*OPTIONS, *LONG_GRACE)) as launch:
        launcher = psutil.Process(launch.process.pid)
        for process in [*launcher.children(recursive=True), launcher]:
            process.terminate()
        ended = launch.end()
    assert ended.code == 143
    assert ended.out.count("saved") == 2, ended.err


def test_second_interrupt_stops_immediately(site: Site) -> None:
    with start_waiting(site, "ignore", options=(*OPTIONS, *LONG_GRACE)) as launch:
        launch.signal(signal.SIGINT)
        assert eventually(lambda: "once more to stop at once" in launch.err), launch.err
        assert launch.process.poll() is None
        time.sleep(2 * ECHO_S)  # two signals within this time count as one
        launch.signal(signal.SIGINT)
        ended = launch.end()
        assert site.leftovers() == ""
    assert ended.code == 130


def test_kills_rank_ignoring_interrupt_when_grace_ends(site: Site) -> None:
    with site.start(*OPTIONS, "--grace", "0.5", "end.py", "ignore") as launch:
        launch.wait_for("waiting", times=2)
        launch.signal(signal.SIGINT)
        ended = launch.end()
    assert ended.code == 130


def test_ends_stopped_rank(site: Site) -> None:
    with start_waiting(site, "stopped") as launch:
        launch.signal(signal.SIGTERM)
        ended = launch.end()
    assert ended.code == 143


def test_ends_grandchildren(site: Site) -> None:
    with start_waiting(site, "children") as launch:
        assert eventually(lambda: _count(site, "n1", "sleep 611") == 3)
        launch.signal(signal.SIGTERM)
        launch.end()
    assert site.leftovers() == ""


def test_spares_unrelated_processes(site: Site) -> None:
    """Neither a foreign process nor one with the command line of a rank is killed."""
    script = str(site.project / "end.py")
    twin = [sys.executable, script, "echo"]
    with (
        site.lab.popen("n1", ["sleep", "612"]) as unrelated,
        site.lab.popen("n1", twin, env={"RANK": "0"}, stdout=subprocess.DEVNULL) as same_command,
    ):
        try:
            with start_waiting(site, "echo") as launch:
                launch.signal(signal.SIGINT)
                launch.end()
            time.sleep(0.3)
            assert unrelated.poll() is None
            assert same_command.poll() is None
        finally:
            unrelated.terminate()
            same_command.terminate()


def test_interrupt_while_connecting(site: Site) -> None:
    site.lab.fault("unplug", "n2")
    with site.start(*OPTIONS, "end.py", "echo") as launch:
        launcher = psutil.Process(launch.process.pid)
        assert eventually(lambda: any(launched.name() == "ssh" for launched in launcher.children()))
        launch.signal(signal.SIGINT)
        ended = launch.end()
    assert ended.code == 130
    assert "cannot log in" not in ended.err  # the launcher did not wait for the login
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("after_s", [0.3, 0.5])
def test_interrupt_at_start(site: Site, after_s: float) -> None:
    """A rank that is just being started or forked gets the signal, too."""
    with site.start(*OPTIONS, "end.py", "echo") as launch:
        time.sleep(after_s)
        launch.signal(signal.SIGINT)
        ended = launch.end()
    mentions_paceline = (
        "paceline" in ended.err
    )  # false if it was still starting, which exits differently
    assert ended.code in (130, -signal.SIGINT) or not mentions_paceline


def test_interrupt_during_torch_import(site: Site) -> None:
    with site.start("train.py") as launch:
        assert eventually(lambda: _count(site, "n2", "forkserver") > 0)
        launch.signal(signal.SIGINT)
        ended = launch.end()
    assert ended.code == 130
    assert "Traceback" not in ended.err


def test_closed_terminal_lets_ranks_save(site: Site) -> None:
    """SIGHUP arrives and output fails; ranks save nevertheless."""
    directory = site.fresh()
    argv = site.argv("--run-dir", str(directory), *OPTIONS, *LONG_GRACE, "end.py", "save")
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(site.project)
        os.environ["PYTHONPATH"] = str(SOURCE)
        os.execv(argv[0], argv)
    output = b""
    while output.count(b"waiting") < 2:
        output += os.read(terminal, 4096)
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    assert [log.read_text().count("saved") for log in directory.glob("logs/*/[01].log")] == [1, 1]
    assert site.leftovers() == ""


def test_job_continues_with_unread_output(site: Site) -> None:
    """As with a pager that does not scroll: the job continues."""
    args = ("--env", "T_BLOCKS=100", "end.py", "flood")
    argv = site.argv("--run-dir", str(site.fresh()), *OPTIONS, *args)
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(argv, cwd=site.project, env=env, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as launch:  # fmt: skip
        result = site.project.parent / "runs" / str(site.runs) / "result.json"
        assert eventually(result.exists, TEST_LIMIT_S)
        assert launch.stdout is not None
        launch.stdout.read()
        assert launch.wait(TIMEOUT_S) == 0
        assert launch.stderr is not None
        launch.stderr.read()


def test_job_continues_with_closed_output(site: Site) -> None:
    """As with ``| head``: the job continues, and its logs are complete."""
    argv = site.argv("--run-dir", str(site.fresh()), *OPTIONS, "end.py", "both")
    with subprocess.Popen(argv, cwd=site.project, env={**os.environ, "PYTHONPATH": str(SOURCE)},
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as launch:  # fmt: skip
        assert launch.stdout is not None
        launch.stdout.close()
        _, err = launch.communicate(timeout=TIMEOUT_S)
    assert launch.returncode == 0, err
    assert b"Traceback" not in err


# --- silent failures


def _count(site: Site, host: str, pattern: str) -> int:
    return sum(bool(re.search(pattern, line)) for _, line in site.lab.processes(host))


def _job_processes(site: Site, host: str) -> list[str]:
    return [line for _, line in site.lab.processes(host) if not line.startswith("sshd")]


def test_killed_launcher_ends_ranks(site: Site) -> None:
    with start_waiting(site, "children", options=LOSS_OPTIONS) as launch:
        launch.kill()
    assert site.leftovers() == ""


def test_stopped_agent_resumes_and_ranks_save(site: Site) -> None:
    with start_waiting(site, "save") as launch:
        (agent,) = (pid for pid, line in site.lab.processes("n2") if "import select,sys;" in line)
        os.kill(agent, signal.SIGSTOP)
        time.sleep(1.5)
        assert launch.process.poll() is None
        launch.signal(signal.SIGTERM)
        ended = launch.end()
    assert ended.code == 143, ended.err
    assert ended.out.count("saved") == 2


@pytest.mark.parametrize("fault", ["unplug", "freeze"])
def test_lost_host_ends_job(site: Site, fault: str) -> None:
    with start_waiting(site, "children", options=LOSS_OPTIONS) as launch:
        site.lab.fault(fault, "n2")
        ended = launch.end()
        assert eventually(lambda: not site.processes()["n1"])
        if fault == "unplug":  # n2 gets no message, and ends the job by itself; its sshd stays
            assert eventually(lambda: not _job_processes(site, "n2"))
    assert ended.code != 0
    assert "n2" in ended.err
    site.lab.heal()
    assert site.leftovers() == ""


def test_lost_first_host_ends_job(site: Site) -> None:
    with start_waiting(site, "echo", options=LOSS_OPTIONS) as launch:
        site.lab.fault("power-off", "n1")
        ended = launch.end()
    assert ended.code != 0
    assert "n1" in ended.err


# --- several jobs


def test_two_jobs_share_hosts(site: Site) -> None:
    """``--any-world`` allows a job several process groups; a job with only one is not blamed."""
    args = ("--any-world", "train.py", "0.5")
    with site.start("train.py", "0.5") as launched, site.start(*args) as second:
        ends = [launched.end(), second.end()]
    assert [ended.code for ended in ends] == [0, 0], ends
    assert all(ended.out.count("sum 3") == 2 for ended in ends)
    assert [len(ended.events("world joined")) for ended in ends] == [2, 2]
    assert all("the ranks exchanged" not in ended.err for ended in ends)
    ports = {ended.json("plan.json")["master"]["port"] for ended in ends}
    assert len(ports) == 2


def test_failed_job_does_not_affect_other_job(site: Site) -> None:
    with start_waiting(site, "echo") as launched:
        assert site.run(*OPTIONS, "end.py", "raise", "1").code == 1
        time.sleep(0.3)
        assert launched.process.poll() is None
        launched.signal(signal.SIGINT)
        assert launched.end().code == 130


def test_rank_may_outlive_rank_zero(site: Site) -> None:
    """The store belongs to the attempt, not to the first node's ranks."""
    ended = site.run("late.py")
    assert ended.code == 0, ended.err


def test_job_restarts_after_killed_launcher(site: Site) -> None:
    """With the same port and run directory, while the first job's ranks may still be exiting."""
    args = [*LOSS_OPTIONS, "--master-port", "29877"]
    with site.start(*args, "end.py", "ignore") as launched:
        launched.wait_for("waiting", times=2)
        launched.kill()
        argv = site.argv("--run-dir", str(launched.directory), *args, "end.py", "both")
        env = {**os.environ, "PYTHONPATH": str(SOURCE)}
        second = subprocess.run(argv, cwd=site.project, env=env, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
