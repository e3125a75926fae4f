"""Tests messages and signals to running ranks, and ranks started in a running attempt."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.agent.supervision import job as agent_job
from paceline.agent.supervision import processes, rank_process, stalls
from paceline.agent.supervision.job import NodeJob
from paceline.remote.agent_code import _MAIN

AGENT = Path(agent_job.__file__).parents[1]
TOKEN = "0" * 32
TIMEOUT_S = 60.0
# prints every line that it receives; "deaf" reads none
SCRIPT = """
import json, os, subprocess, sys, time
events = int(os.environ["PACELINE_EVENT_FD"])
def say(**what):
    os.write(events, json.dumps({"kind": "event", "event": "told", **what}).encode() + b"\\n")
if "children" in sys.argv:
    subprocess.Popen(["sleep", "600"])
say(pid=os.getpid(), newcomer=os.environ.get("PACELINE_NEWCOMER"))
while "deaf" in sys.argv:
    time.sleep(1)
for line in open(int(os.environ["PACELINE_CONTROL_FD"])):
    told = json.loads(line)
    if told["control"] == "leave":
        break
    say(line=told if len(line) < 2000 else len(line))
say(ended=True)
"""


class Harness:
    """The job of an agent in this process; ``heard`` has the messages that it posted."""

    def __init__(self, package: Path) -> None:
        self.heard: list[dict[str, Any]] = []
        self.job = NodeJob(lambda message, blob=b"": self.heard.append(message), str(package))

    def until(self, condition: Callable[[], Any]) -> Any:
        """Runs the agent's event loop until a condition is true."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (value := condition()):
            assert time.monotonic() < deadline, self.heard
            poll = select.poll()
            for fd in self.job.readers(take_output=True):
                poll.register(fd, select.POLLIN)
            for fd in self.job.writers():
                poll.register(fd, select.POLLOUT)
            for fd, events in poll.poll(20):
                (self.job.writable if events & select.POLLOUT else self.job.readable)(fd)
            self.job.tick()
        return value

    def said(self, rank: int) -> list[dict[str, Any]]:
        return [m["data"] for m in self.heard if m["event"] == "said" and m["rank"] == rank]

    def ends(self, rank: int) -> list[dict[str, Any]]:
        return [m for m in self.heard if m["event"] == "rank ended" and m["rank"] == rank]

    def pid(self, rank: int, time: int = 1) -> int:
        """Returns the process id that a rank reports, for its first or a later start."""
        pids = self.until(
            lambda: [entry["pid"] for entry in self.said(rank) if "pid" in entry][time - 1 :]
        )
        return int(pids[0])


def request(script: Path, ranks: dict[int, dict[str, str]], *arguments: str) -> dict[str, Any]:
    return {
        "entry": {"kind": "script", "target": str(script), "args": list(arguments)},
        "workdir": str(script.parent), "env": {}, "any_world": True, "store": None,
        "ranks": [{"rank": rank, "local_rank": rank - 4, "cpus": [], "env": env}
                  for rank, env in ranks.items()],
    }  # fmt: skip


SAVES_ON_TERM = """
def save(*_):
    time.sleep(0.5)
    write("saved on SIGTERM")
    sys.exit()
signal.signal(signal.SIGTERM, save)
"""
# "saved" shows that the helper process of the rank still ran when it saved
SAVES_ON_INTERRUPT = """
helper = subprocess.Popen(["sleep", "600"])
atexit.register(write, "at exit")
write("ready")
try:
    time.sleep(600)
except KeyboardInterrupt:
    subprocess.run(["sleep", "0.5"])
    write("saved" if helper.poll() is None else "the helper was killed")
    raise
"""
# as a rank that waits for the others in init_process_group, where Python handles no signal
JOINS = """
os.write(int(os.environ["PACELINE_EVENT_FD"]), b'{"kind": "event", "event": "joining"}\\n')
write("ready")
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
time.sleep(600)
"""
BY_CHILDREN = """
import multiprocessing
def work(name):
    write("ready")
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        time.sleep(0.2)
        write("saved by " + name)
processes = [multiprocessing.get_context("fork").Process(target=work, args=[n]) for n in "ab"]
for process in processes:
    process.start()
for process in processes:
    process.join()
"""
STOPPING_HEADER = """
import atexit, os, signal, subprocess, sys, time
def write(text):
    with open("log", "a") as log:
        log.write(text + "\\n")
"""
CHILD = f"{STOPPING_HEADER}{SAVES_ON_TERM}write('ready'); time.sleep(600)"
WAITS = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {CHILD!r}])"


@pytest.mark.parametrize(
    ("text", "signum", "saved", "ended_by"),
    [
        (SAVES_ON_INTERRUPT, signal.SIGINT, ["saved", "at exit"], signal.SIGINT),
        (SAVES_ON_INTERRUPT, signal.SIGTERM, [], signal.SIGTERM),
        (SAVES_ON_TERM + SAVES_ON_INTERRUPT, signal.SIGINT, ["at exit", "saved on SIGTERM"], None),
        (BY_CHILDREN, signal.SIGINT, ["saved by a", "saved by b"], signal.SIGINT),
        (WAITS, signal.SIGINT, ["saved on SIGTERM"], signal.SIGTERM),
        (JOINS, signal.SIGINT, [], signal.SIGTERM),
    ],
)
def test_stopped_rank_saves(
    harness: Harness, tmp_path: Path, text: str, signum: int, saved: list[str], ended_by: int | None
) -> None:
    """SIGINT is the user's; ranks get the signal that they, or what they wait for, handle."""
    script, log = tmp_path / "train.py", tmp_path / "log"
    script.write_text(STOPPING_HEADER + text)
    harness.job.start(request(script, {4: {}}), None)
    num_processes = 1 + (text == BY_CHILDREN)
    harness.until(lambda: log.exists() and log.read_text() == "ready\n" * num_processes)
    (rank,) = harness.job.ranks
    assert rank.process is not None
    pid = rank.process.pid
    if text == WAITS:
        harness.until(lambda: stalls.awaited_child(pid))
    harness.until(lambda: text != JOINS or harness.said(4))
    harness.job.stop(signum, TIMEOUT_S)
    harness.until(lambda: not harness.job.running)
    assert sorted(log.read_text().splitlines()[num_processes:]) == sorted(saved)
    assert harness.ends(4)[0]["signal"] == ended_by


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__main__.py").write_text(_MAIN)
    (package / "paceline_agent").symlink_to(AGENT)
    node = Harness(package)
    preparation = {"python": sys.executable, "preload": [], "env": {}, "token": TOKEN}
    node.job.prepare(preparation)
    node.until(lambda: any(message["event"] == "imported" for message in node.heard))
    try:
        yield node
    finally:
        node.job.kill()
        node.job.close()
        for rank in node.job.ranks:
            rank.close_control()
            for fd in rank.fds:
                os.close(fd)


def test_ranks_receive_control_messages(harness: Harness, script: Path) -> None:
    harness.job.start(request(script, {4: {}, 5: {}}), None)
    assert harness.pid(4) != harness.pid(5)
    harness.job.send_to_ranks({"control": "end", "why": "so"})
    line = {"kind": "event", "event": "told", "line": {"control": "end", "why": "so"}}
    harness.until(lambda: line in harness.said(4) and line in harness.said(5))
    harness.job.send_to_ranks({"control": "leave"})
    harness.until(lambda: not harness.job.running)
    assert [end["code"] for end in harness.ends(4) + harness.ends(5)] == [0, 0]


def test_unread_control_messages_do_not_block(harness: Harness, script: Path) -> None:
    harness.job.start(request(script, {4: {}}, "deaf"), None)
    harness.pid(4)
    for _ in range(40):
        harness.job.send_to_ranks({"control": "x" * 100_000})
    (rank,) = harness.job.ranks
    assert len(rank.unsent) < 2 * rank_process.MAX_LINE_BYTES
    os.kill(harness.pid(4), signal.SIGKILL)
    harness.until(lambda: harness.ends(4))
    harness.job.send_to_ranks({"control": "nobody is there"})


def test_delivers_large_control_messages(harness: Harness, script: Path) -> None:
    harness.job.start(request(script, {4: {}}), None)
    os.kill(harness.pid(4), signal.SIGSTOP)
    for _ in range(3):
        harness.job.send_to_ranks({"control": "x" * 100_000})
    assert harness.job.writers()
    os.kill(harness.pid(4), signal.SIGCONT)
    harness.until(lambda: [m["line"] for m in harness.said(4) if "line" in m] == [100_016] * 3)
    assert not harness.job.writers()


@pytest.mark.parametrize("stopped", [False, True])
def test_replaces_lost_rank_in_running_attempt(
    harness: Harness, script: Path, stopped: bool
) -> None:
    harness.job.start(request(script, {4: {}, 5: {}}, "children"), None)
    pids = harness.pid(4), harness.pid(5)
    if stopped:
        os.kill(pids[1], signal.SIGSTOP)
        assert harness.job.kill_ranks([5]) == 1
    else:
        os.kill(pids[1], signal.SIGKILL)
    (end,) = harness.until(lambda: harness.ends(5))
    assert end["signal"] == signal.SIGKILL
    started = [stat.pid for stat in processes.all_stats().values() if stat.session == pids[1]]
    assert [pid for pid in started if has_open_files(pid)] == []  # such as devices
    harness.job.add(request(script, {5: {"PACELINE_NEWCOMER": "1"}}))
    assert harness.pid(5, 2) != pids[1]
    assert harness.said(5)[-1]["newcomer"] == "1"
    harness.job.send_to_ranks({"control": "leave"})
    harness.until(lambda: not harness.job.running)
    assert [end["code"] for end in harness.ends(4)] == [0]
    assert [(end["code"], end["signal"]) for end in harness.ends(5)] == [(None, 9), (0, None)]


def has_open_files(pid: int) -> bool:
    """Returns whether a process has open files.

    A process that ends closes all files before it is a zombie, and may still run for a moment.
    """
    with contextlib.suppress(OSError):
        return any(Path(f"/proc/{pid}/fd").iterdir())
    return False


def test_rejects_replacing_live_rank(harness: Harness, script: Path) -> None:
    harness.job.start(request(script, {4: {}}), None)
    harness.pid(4)
    with pytest.raises(RuntimeError, match="still runs"):
        harness.job.add(request(script, {4: {}}))


def test_restarts_ranks_after_fork_server_dies(harness: Harness, script: Path) -> None:
    harness.job.start(request(script, {4: {}, 5: {}}), None)
    harness.pid(4), harness.pid(5)
    assert harness.job._server is not None
    harness.job._server.kill()
    harness.until(lambda: harness.ends(4) and harness.ends(5))
    with pytest.raises(RuntimeError, match="fork server is gone"):
        harness.job.add(request(script, {4: {}, 5: {}}))
    harness.heard.clear()
    harness.job.prepare({"python": sys.executable, "preload": [], "env": {}, "token": TOKEN})
    harness.until(lambda: any(message["event"] == "imported" for message in harness.heard))
    harness.job.add(request(script, {4: {}, 5: {}}))
    assert harness.pid(4) != harness.pid(5)


def test_agents_of_same_job_own_separate_processes(harness: Harness, script: Path) -> None:
    """An agent that was cut off may still run when its host has a new one."""
    other_agent = Harness(script.parent / "package")
    other_agent.job.prepare({"python": sys.executable, "preload": [], "env": {}, "token": TOKEN})
    assert harness.job._server is not None
    assert other_agent.job._server is not None
    try:
        other_agent.until(
            lambda: any(message["event"] == "imported" for message in other_agent.heard)
        )
        marked = {process.pid for process in processes.job_processes(harness.job.token, [], [])}
        assert harness.job._server.pid in marked
        assert other_agent.job._server.pid not in marked
    finally:
        other_agent.job.close()
