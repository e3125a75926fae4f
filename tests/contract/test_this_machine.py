"""The launching machine as Linux shows it, and as every other system does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.remote import this_machine

GONE = 2**22 + 1  # no pid is as large


@pytest.fixture(params=["linux", "elsewhere"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Once as it is here, once with nothing to ask but psutil."""
    if request.param == "elsewhere":
        monkeypatch.delattr(socket, "AF_NETLINK")
        exists = Path.exists
        monkeypatch.setattr(
            Path, "exists", lambda path: not str(path).startswith("/proc/") and exists(path)
        )
    return str(request.param)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        yield child
        child.kill()


def test_a_process_is_known_by_its_start(system: str, sleeper: subprocess.Popen[bytes]) -> None:
    start = this_machine.start_time(sleeper.pid)
    assert start is not None
    assert start == this_machine.start_time(sleeper.pid)
    assert not this_machine.signal_process(sleeper.pid, start + 1, signal.SIGKILL)
    assert sleeper.poll() is None
    assert this_machine.signal_process(sleeper.pid, start, signal.SIGTERM)
    assert sleeper.wait(60) == -signal.SIGTERM
    assert this_machine.start_time(sleeper.pid) is None
    assert not this_machine.signal_process(sleeper.pid, start, signal.SIGTERM)


def test_a_dead_child_that_nobody_waited_for_is_gone(system: str) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        assert this_machine.start_time(pid) is None
    finally:
        os.waitpid(pid, 0)


def test_a_pid_of_nobody(system: str) -> None:
    assert this_machine.start_time(GONE) is None


def test_addresses_are_those_of_the_interfaces(system: str) -> None:
    found = this_machine.addresses()
    loopback = [one for one in found if one["address"] == "127.0.0.1"]
    assert [(one["family"], one["scope"]) for one in loopback] == [(4, "host")]
    assert {one["interface"] for one in found} <= {name for _, name in socket.if_nameindex()}
    assert not any("%" in one["address"] for one in found)


def test_default_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert this_machine.default_python() == sys.executable
    assert this_machine.default_python(image="torch:latest") == "python3"
    monkeypatch.setattr(this_machine, "LINUX", False)  # its path means nothing on the hosts
    assert this_machine.default_python() == "python3"
