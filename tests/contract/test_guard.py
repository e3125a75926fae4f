"""Tests that whichever of guard and agent ends first, and however, no process of theirs remains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from background import TIMEOUT_S, eventually
from paceline.agent.supervision import processes
from paceline.remote.agent_code import agent_code

# Its agent has a child in another session, and ends when its parent changes.
AGENT = """
import os, subprocess, sys, time
sys.path.insert(0, {package!r})
from paceline_agent.supervision import guard, processes
parent = os.getpid()
guard.fork_agent({package!r})
processes.adopt_orphans()
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(os.getpid(), child.pid, flush=True)
while os.getppid() == parent:
    time.sleep(0.01)
"""


@pytest.fixture
def package(tmp_path: Path) -> str:
    for name, content in agent_code().files.items():
        path = tmp_path / "agent" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return str(tmp_path / "agent")


def has_exited(pid: int) -> bool:
    return eventually(lambda: processes.identify(pid) is None)


@pytest.mark.parametrize("errors", ["read", "closed"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_agent_and_children_end_together(package: str, signum: signal.Signals, errors: str) -> None:
    """Either the guard gets SIGTERM, perhaps before its interpreter runs, or the agent dies."""
    with subprocess.Popen([sys.executable, "-c", AGENT.format(package=package)],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as guard:  # fmt: skip
        assert guard.stdout is not None
        assert guard.stderr is not None
        if errors == "closed":
            guard.stderr.close()
        agent, child = map(int, guard.stdout.readline().split())
        os.kill(guard.pid if signum == signal.SIGTERM else agent, signum)
        assert has_exited(child)
        assert has_exited(agent)
        assert guard.wait(TIMEOUT_S) == 128 + signum
        if errors == "read":
            assert f"killed by {signum.name}" in guard.stderr.read().decode()
