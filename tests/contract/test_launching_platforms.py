"""Tests the facts of the launching machine, read from Linux or, on other systems, by psutil."""

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

UNUSED_PID = 2**22 + 1  # larger than any process id


@pytest.fixture(params=["linux", "elsewhere"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Selects this system, or simulates one with only psutil."""
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


def test_identifies_process_by_start_time(system: str, sleeper: subprocess.Popen[bytes]) -> None:
    start = this_machine.start_time(sleeper.pid)
    assert start is not None
    assert start == this_machine.start_time(sleeper.pid)
    assert not this_machine.signal_process(sleeper.pid, start + 1, signal.SIGKILL)
    assert sleeper.poll() is None
    assert this_machine.signal_process(sleeper.pid, start, signal.SIGTERM)
    assert sleeper.wait(60) == -signal.SIGTERM
    assert this_machine.start_time(sleeper.pid) is None
    assert not this_machine.signal_process(sleeper.pid, start, signal.SIGTERM)


def test_zombie_has_no_start_time(system: str) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        assert this_machine.start_time(pid) is None
    finally:
        os.waitpid(pid, 0)


def test_unused_pid_has_no_start_time(system: str) -> None:
    assert this_machine.start_time(UNUSED_PID) is None


def test_addresses_match_interfaces(system: str) -> None:
    entries = this_machine.addresses()
    loopback = [entry for entry in entries if entry["address"] == "127.0.0.1"]
    assert [(entry["family"], entry["scope"]) for entry in loopback] == [(4, "host")]
    assert {entry["interface"] for entry in entries} <= {name for _, name in socket.if_nameindex()}
    assert not any("%" in entry["address"] for entry in entries)


def test_default_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert this_machine.default_python() == sys.executable
    assert this_machine.default_python(image="torch:latest") == "python3"
    monkeypatch.setattr(this_machine, "LINUX", False)  # its path is not valid on the hosts
    assert this_machine.default_python() == "python3"
