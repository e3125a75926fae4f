"""What ranks are told while they run, and ranks that are started into a running attempt."""

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
from paceline.agent.supervision import processes, rank_process
from paceline.agent.supervision.job import NodeJob
from paceline.remote.agent_code import _MAIN

AGENT = Path(agent_job.__file__).parents[1]
TOKEN = "0" * 32
TIMEOUT_S = 60.0
# says every line that it is told; "deaf" reads none
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


class Here:
    """The job of an agent in this process; ``heard`` is what it posted."""

    def __init__(self, package: Path) -> None:
        self.heard: list[dict[str, Any]] = []
        self.job = NodeJob(lambda message, blob=b"": self.heard.append(message), str(package))

    def until(self, true: Callable[[], Any]) -> Any:
        """Does the agent's rounds until it comes true."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (found := true()):
            assert time.monotonic() < deadline, self.heard
            poll = select.poll()
            for fd in self.job.readers(take_output=True):
                poll.register(fd, select.POLLIN)
            for fd in self.job.writers():
                poll.register(fd, select.POLLOUT)
            for fd, events in poll.poll(20):
                (self.job.writable if events & select.POLLOUT else self.job.readable)(fd)
            self.job.tick()
        return found

    def said(self, rank: int) -> list[dict[str, Any]]:
        return [m["data"] for m in self.heard if m["event"] == "said" and m["rank"] == rank]

    def ends(self, rank: int) -> list[dict[str, Any]]:
        return [m for m in self.heard if m["event"] == "rank ended" and m["rank"] == rank]

    def pid(self, rank: int, time: int = 1) -> int:
        """Of the rank's process, as it says itself; of the one that was started so often."""
        pids = self.until(
            lambda: [one["pid"] for one in self.said(rank) if "pid" in one][time - 1 :]
        )
        return int(pids[0])


def request(script: Path, ranks: dict[int, dict[str, str]], *words: str) -> dict[str, Any]:
    return {
        "entry": {"kind": "script", "target": str(script), "args": list(words)},
        "workdir": str(script.parent), "env": {}, "any_world": True, "store": None,
        "ranks": [{"rank": rank, "local_rank": rank - 4, "cpus": [], "env": env}
                  for rank, env in ranks.items()],
    }  # fmt: skip


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__main__.py").write_text(_MAIN)
    (package / "paceline_agent").symlink_to(AGENT)
    node = Here(package)
    about = {"python": sys.executable, "preload": [], "env": {}, "token": TOKEN}
    node.job.prepare(about)
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


def test_ranks_are_told(here: Here, script: Path) -> None:
    here.job.start(request(script, {4: {}, 5: {}}), None)
    assert here.pid(4) != here.pid(5)
    here.job.send_to_ranks({"control": "end", "why": "so"})
    line = {"kind": "event", "event": "told", "line": {"control": "end", "why": "so"}}
    here.until(lambda: line in here.said(4) and line in here.said(5))
    here.job.send_to_ranks({"control": "leave"})
    here.until(lambda: not here.job.running)
    assert [end["code"] for end in here.ends(4) + here.ends(5)] == [0, 0]


def test_who_does_not_listen_holds_nobody_up(here: Here, script: Path) -> None:
    here.job.start(request(script, {4: {}}, "deaf"), None)
    here.pid(4)
    for _ in range(40):
        here.job.send_to_ranks({"control": "x" * 100_000})
    (rank,) = here.job.ranks
    assert len(rank.unsent) < 2 * rank_process.MAX_LINE_BYTES
    os.kill(here.pid(4), signal.SIGKILL)
    here.until(lambda: here.ends(4))
    here.job.send_to_ranks({"control": "nobody is there"})


def test_a_long_line_comes_whole(here: Here, script: Path) -> None:
    here.job.start(request(script, {4: {}}), None)
    os.kill(here.pid(4), signal.SIGSTOP)
    for _ in range(3):
        here.job.send_to_ranks({"control": "x" * 100_000})
    assert here.job.writers()
    os.kill(here.pid(4), signal.SIGCONT)
    here.until(lambda: [m["line"] for m in here.said(4) if "line" in m] == [100_016] * 3)
    assert not here.job.writers()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_lost_rank_is_replaced_beside_the_others(here: Here, script: Path, stopped: bool) -> None:
    here.job.start(request(script, {4: {}, 5: {}}, "children"), None)
    pids = here.pid(4), here.pid(5)
    if stopped:
        os.kill(pids[1], signal.SIGSTOP)
        assert here.job.kill_ranks([5]) == 1
    else:
        os.kill(pids[1], signal.SIGKILL)
    (end,) = here.until(lambda: here.ends(5))
    assert end["signal"] == signal.SIGKILL
    started = [stat.pid for stat in processes.all_stats().values() if stat.session == pids[1]]
    assert [pid for pid in started if holds(pid)] == []  # devices, for example
    here.job.add(request(script, {5: {"PACELINE_NEWCOMER": "1"}}))
    assert here.pid(5, 2) != pids[1]
    assert here.said(5)[-1]["newcomer"] == "1"
    here.job.send_to_ranks({"control": "leave"})
    here.until(lambda: not here.job.running)
    assert [end["code"] for end in here.ends(4)] == [0]
    assert [(end["code"], end["signal"]) for end in here.ends(5)] == [(None, 9), (0, None)]


def holds(pid: int) -> bool:
    """Whether a process has anything open.

    One that ends closes everything before it is a zombie, and may still run for a moment.
    """
    with contextlib.suppress(OSError):
        return any(Path(f"/proc/{pid}/fd").iterdir())
    return False


def test_a_living_rank_is_not_replaced(here: Here, script: Path) -> None:
    here.job.start(request(script, {4: {}}), None)
    here.pid(4)
    with pytest.raises(RuntimeError, match="still runs"):
        here.job.add(request(script, {4: {}}))


def test_the_ranks_of_a_fork_server_that_died_come_back(here: Here, script: Path) -> None:
    here.job.start(request(script, {4: {}, 5: {}}), None)
    here.pid(4), here.pid(5)
    assert here.job._server is not None
    here.job._server.kill()
    here.until(lambda: here.ends(4) and here.ends(5))
    with pytest.raises(RuntimeError, match="fork server is gone"):
        here.job.add(request(script, {4: {}, 5: {}}))
    here.heard.clear()
    here.job.prepare({"python": sys.executable, "preload": [], "env": {}, "token": TOKEN})
    here.until(lambda: any(message["event"] == "imported" for message in here.heard))
    here.job.add(request(script, {4: {}, 5: {}}))
    assert here.pid(4) != here.pid(5)


def test_what_another_agent_of_the_job_ends_is_its_own(here: Here, script: Path) -> None:
    """One that was cut off may still be at it when its host has another one."""
    other = Here(script.parent / "package")
    other.job.prepare({"python": sys.executable, "preload": [], "env": {}, "token": TOKEN})
    assert here.job._server is not None
    assert other.job._server is not None
    try:
        other.until(lambda: any(message["event"] == "imported" for message in other.heard))
        marked = {process.pid for process in processes.job_processes(here.job.token, [], [])}
        assert here.job._server.pid in marked
        assert other.job._server.pid not in marked
    finally:
        other.job.close()
