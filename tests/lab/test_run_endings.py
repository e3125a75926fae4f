"""Every way in which a job can end; afterwards the hosts are as they were before."""

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
LOSSES = ("--no-torch", "--lease", str(LEASE_S))  # where somebody is waited for in vain
# all else ends without that: longer than any test here is patient
OPTIONS = ("--no-torch", "--lease", str(2 * TIMEOUT_S))
LONG_GRACE = ("--grace", str(2 * TIMEOUT_S))


@pytest.fixture(scope="module")
def shared(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return shared_site(new_lab, tmp_path_factory.mktemp("endings"), hosts=2)


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    """Nothing may run or listen after a test; faults are healed."""
    yield shared
    shared.lab.heal()
    found = shared.leftovers()
    if found:  # the next test shall not pay for this one
        for name in shared.lab.names:
            shared.lab.fault("kill", name, "sleep|paceline|end.py")
    assert found == ""


def waiting(site: Site, *words: str, options: tuple[str, ...] = OPTIONS) -> Launch:
    """A launch whose ranks have all begun to wait."""
    return site.start(*options, "end.py", *words).wait_for("waiting", times=2)


# --- the job's own end


def test_a_rank_raises(site: Site) -> None:
    ended = site.run(*OPTIONS, "-p", "2", "end.py", "raise", "1")
    assert ended.code == 1
    assert (ended.out + ended.err).count("Traceback") == 1
    assert "ValueError: boom on 1" in ended.err
    last = ended.err[ended.err.index("failed first") :]
    assert "failed first: rank 1 on n1: ValueError: boom on 1" in last
    assert "end.py" in last
    assert "paceline_agent" not in last
    assert "Traceback" in (ended.directory / "logs/n1/1.log").read_text()
    assert ended.json("result.json")["first_failure"]["rank"] == 1


def test_a_rank_crashes(site: Site) -> None:
    ended = site.run(*OPTIONS, "end.py", "segv", "0")
    assert ended.code == 128 + signal.SIGSEGV
    assert "rank 0 on n1: killed by SIGSEGV" in ended.err


def test_the_first_failure_is_named_not_its_echoes(site: Site) -> None:
    ended = site.run("--lease", "5", "fail_in_step.py", "1")
    assert ended.code == 1
    assert "failed first: rank 1 on n2: ZeroDivisionError" in ended.err
    assert ended.err.rstrip().count("Traceback") == 1


def test_what_ranks_leave_behind_is_ended(site: Site) -> None:
    ended = site.run(*OPTIONS, "end.py", "leave")
    assert ended.code == 0
    assert site.leftovers() == ""


# --- the user's wish


def test_ctrl_c_lets_ranks_save(site: Site) -> None:
    with waiting(site, "save", options=(*OPTIONS, *LONG_GRACE)) as launch:
        launch.signal(signal.SIGINT)
        ended = launch.end()
    assert ended.code == 130
    assert ended.out.count("saved") == 2


def test_a_signal_to_the_connections_too_lets_ranks_save(site: Site) -> None:
    """So do schedulers: they signal every process of the launcher's host that is the job's."""
    with waiting(site, "save", options=(*OPTIONS, *LONG_GRACE)) as launch:
        launcher = psutil.Process(launch.process.pid)
        for process in [*launcher.children(recursive=True), launcher]:
            process.terminate()
        ended = launch.end()
    assert ended.code == 143
    assert ended.out.count("saved") == 2, ended.err


def test_twice_means_now(site: Site) -> None:
    with waiting(site, "ignore", options=(*OPTIONS, *LONG_GRACE)) as launch:
        launch.signal(signal.SIGINT)
        assert eventually(lambda: "once more to stop at once" in launch.err), launch.err
        assert launch.process.poll() is None
        time.sleep(2 * ECHO_S)  # two at once are one wish
        launch.signal(signal.SIGINT)
        ended = launch.end()
        assert site.leftovers() == ""
    assert ended.code == 130


def test_a_rank_that_ignores_the_wish_is_killed_after_the_grace(site: Site) -> None:
    with site.start(*OPTIONS, "--grace", "0.5", "end.py", "ignore") as launch:
        launch.wait_for("waiting", times=2)
        launch.signal(signal.SIGINT)
        ended = launch.end()
    assert ended.code == 130


def test_a_stopped_rank_is_ended_too(site: Site) -> None:
    with waiting(site, "stopped") as launch:
        launch.signal(signal.SIGTERM)
        ended = launch.end()
    assert ended.code == 143


def test_grandchildren_are_ended(site: Site) -> None:
    with waiting(site, "children") as launch:
        assert eventually(lambda: _count(site, "n1", "sleep 611") == 3)
        launch.signal(signal.SIGTERM)
        launch.end()
    assert site.leftovers() == ""


def test_strangers_are_left_alone(site: Site) -> None:
    """Neither another's process nor one that is called like ours."""
    script = str(site.project / "end.py")
    twin = [sys.executable, script, "echo"]
    with (
        site.lab.popen("n1", ["sleep", "612"]) as stranger,
        site.lab.popen("n1", twin, env={"RANK": "0"}, stdout=subprocess.DEVNULL) as double,
    ):
        try:
            with waiting(site, "echo") as launch:
                launch.signal(signal.SIGINT)
                launch.end()
            time.sleep(0.3)
            assert stranger.poll() is None
            assert double.poll() is None
        finally:
            stranger.terminate()
            double.terminate()


def test_interrupted_while_connecting(site: Site) -> None:
    site.lab.fault("unplug", "n2")
    with site.start(*OPTIONS, "end.py", "echo") as launch:
        launcher = psutil.Process(launch.process.pid)
        assert eventually(lambda: any(one.name() == "ssh" for one in launcher.children()))
        launch.signal(signal.SIGINT)
        ended = launch.end()
    assert ended.code == 130
    assert "cannot log in" not in ended.err  # nobody waited for that
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("after_s", [0.3, 0.5])
def test_interrupted_at_once(site: Site, after_s: float) -> None:
    """Also a rank that is ordered or forked at this very moment hears of it."""
    with site.start(*OPTIONS, "end.py", "echo") as launch:
        time.sleep(after_s)
        launch.signal(signal.SIGINT)
        ended = launch.end()
    ours = "paceline" in ended.err  # not the interpreter's own start, which ends in its own way
    assert ended.code in (130, -signal.SIGINT) or not ours


def test_interrupted_during_the_import(site: Site) -> None:
    with site.start("train.py") as launch:
        assert eventually(lambda: _count(site, "n2", "forkserver") > 0)
        launch.signal(signal.SIGINT)
        ended = launch.end()
    assert ended.code == 130
    assert "Traceback" not in ended.err


def test_the_terminal_is_closed(site: Site) -> None:
    """SIGHUP comes, and nothing can be written any more; ranks save all the same."""
    directory = site.fresh()
    argv = site.argv("--run-dir", str(directory), *OPTIONS, *LONG_GRACE, "end.py", "save")
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(site.project)
        os.environ["PYTHONPATH"] = str(SOURCE)
        os.execv(argv[0], argv)
    said = b""
    while said.count(b"waiting") < 2:
        said += os.read(terminal, 4096)
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    assert [log.read_text().count("saved") for log in directory.glob("logs/*/[01].log")] == [1, 1]
    assert site.leftovers() == ""


def test_nobody_reads_the_output(site: Site) -> None:
    """As with a pager that was not scrolled: the job goes on."""
    words = ("--env", "T_BLOCKS=100", "end.py", "flood")
    argv = site.argv("--run-dir", str(site.fresh()), *OPTIONS, *words)
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


def test_the_output_is_closed(site: Site) -> None:
    """As with ``| head``: the job goes on, and its logs are complete."""
    argv = site.argv("--run-dir", str(site.fresh()), *OPTIONS, "end.py", "both")
    with subprocess.Popen(argv, cwd=site.project, env={**os.environ, "PYTHONPATH": str(SOURCE)},
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as launch:  # fmt: skip
        assert launch.stdout is not None
        launch.stdout.close()
        _, err = launch.communicate(timeout=TIMEOUT_S)
    assert launch.returncode == 0, err
    assert b"Traceback" not in err


# --- what dies without a word


def _count(site: Site, host: str, pattern: str) -> int:
    return sum(bool(re.search(pattern, line)) for _, line in site.lab.processes(host))


def _ours(site: Site, host: str) -> list[str]:
    return [line for _, line in site.lab.processes(host) if not line.startswith("sshd")]


def test_the_launcher_is_killed(site: Site) -> None:
    with waiting(site, "children", options=LOSSES) as launch:
        launch.kill()
    assert site.leftovers() == ""


def test_a_stopped_agent_goes_on(site: Site) -> None:
    with waiting(site, "save") as launch:
        (agent,) = (pid for pid, line in site.lab.processes("n2") if "import select,sys;" in line)
        os.kill(agent, signal.SIGSTOP)
        time.sleep(1.5)
        assert launch.process.poll() is None
        launch.signal(signal.SIGTERM)
        ended = launch.end()
    assert ended.code == 143, ended.err
    assert ended.out.count("saved") == 2


@pytest.mark.parametrize("fault", ["unplug", "freeze"])
def test_a_host_goes_away(site: Site, fault: str) -> None:
    with waiting(site, "children", options=LOSSES) as launch:
        site.lab.fault(fault, "n2")
        ended = launch.end()
        assert eventually(lambda: not site.processes()["n1"])
        if fault == "unplug":  # it cannot be told, and ends the job by itself; sshd waits on
            assert eventually(lambda: not _ours(site, "n2"))
    assert ended.code != 0
    assert "n2" in ended.err
    site.lab.heal()
    assert site.leftovers() == ""


def test_the_first_host_goes_away(site: Site) -> None:
    with waiting(site, "echo", options=LOSSES) as launch:
        site.lab.fault("power-off", "n1")
        ended = launch.end()
    assert ended.code != 0
    assert "n1" in ended.err


# --- beside each other


def test_two_jobs_at_once_on_the_same_hosts(site: Site) -> None:
    """One of them might have worlds of its own, and is not blamed for having none."""
    words = ("--any-world", "train.py", "0.5")
    with site.start("train.py", "0.5") as one, site.start(*words) as two:
        ends = [one.end(), two.end()]
    assert [ended.code for ended in ends] == [0, 0], ends
    assert all(ended.out.count("sum 3") == 2 for ended in ends)
    assert [len(ended.events("world joined")) for ended in ends] == [2, 2]
    assert all("the ranks exchanged" not in ended.err for ended in ends)
    ports = {ended.json("plan.json")["master"]["port"] for ended in ends}
    assert len(ports) == 2


def test_one_job_ends_and_the_other_does_not_notice(site: Site) -> None:
    with waiting(site, "echo") as one:
        assert site.run(*OPTIONS, "end.py", "raise", "1").code == 1
        time.sleep(0.3)
        assert one.process.poll() is None
        one.signal(signal.SIGINT)
        assert one.end().code == 130


def test_a_rank_may_outlive_rank_zero(site: Site) -> None:
    """The store belongs to the attempt, not to the first node's ranks."""
    ended = site.run("late.py")
    assert ended.code == 0, ended.err


def test_after_a_killed_launcher_the_same_job_starts_again(site: Site) -> None:
    """Same port, same run directory, while the first job's ranks may still be on their way out."""
    words = [*LOSSES, "--master-port", "29877"]
    with site.start(*words, "end.py", "ignore") as one:
        one.wait_for("waiting", times=2)
        one.kill()
        argv = site.argv("--run-dir", str(one.directory), *words, "end.py", "both")
        env = {**os.environ, "PYTHONPATH": str(SOURCE)}
        two = subprocess.run(argv, cwd=site.project, env=env, capture_output=True, text=True)
    assert two.returncode == 0, two.stderr
