"""Tests connection attempts: each target has one result, and few connections are open at once."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.agent.surveys import probe

IDENTITY = bytes(range(probe.IDENTITY_BYTES))


def target(host: str, port: int, identity: bytes = IDENTITY) -> dict[str, Any]:
    return {"host": host, "address": "127.0.0.1", "port": port, "identity": identity.hex()}


@pytest.fixture
def port() -> Iterator[int]:
    """Returns the port of a listener that answers like an agent."""
    listener = probe.listen("127.0.0.1")
    listener.setblocking(True)
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            probe.answer(listener, IDENTITY)

    thread = threading.Thread(target=serve)
    thread.start()
    number = int(listener.getsockname()[1])
    yield number
    over.set()
    socket.create_connection(("127.0.0.1", number)).close()
    thread.join()
    listener.close()


@pytest.fixture
def unresponsive_port() -> Iterator[int]:
    """Returns the port of a listener that accepts connections, but never answers."""
    with probe.listen("127.0.0.1") as listener:
        yield int(listener.getsockname()[1])


@pytest.fixture
def closed_port() -> int:
    with probe.listen("127.0.0.1") as listener:
        return int(listener.getsockname()[1])


def test_limits_open_sockets(port: int, closed_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MAX_ATTEMPTS", 8)
    max_sockets, baseline = 0, _sockets()
    start_attempts = probe._start_attempts

    def count_sockets(*args: Any) -> Any:
        nonlocal max_sockets
        over = start_attempts(*args)
        max_sockets = max(max_sockets, _sockets() - baseline)
        return over

    monkeypatch.setattr(probe, "_start_attempts", count_sockets)
    targets = [target(f"h{at}", port if at % 3 else closed_port) for at in range(300)]
    results = probe.connect_all(targets, 20.0, 20.0)
    assert {result["host"] for result in results if result["ok"]} == {
        f"h{at}" for at in range(300) if at % 3
    }
    assert len(results) == 300
    # the listener in this process has the other end of each connection for a moment
    assert 0 < max_sockets <= 2 * 8 + 1
    assert _sockets() == baseline


def _sockets() -> int:
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listener's thread may close it meanwhile
            found += str(entry.readlink()).startswith("socket:")
    return found


def test_reports_failure_reason(
    port: int, unresponsive_port: int, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "IDENTITY_TIMEOUT_S", 0.1)
    targets = [
        target("well", port),
        target("other", port, bytes(probe.IDENTITY_BYTES)),
        target("busy", unresponsive_port),
        target("shut", closed_port),
    ]
    found = {result["host"]: result for result in probe.connect_all(targets, 2.0, 2.0)}
    assert found["well"]["ok"]
    assert found["well"]["rtt"] >= 0
    assert (found["other"]["ok"], found["other"]["reached"]) == (False, IDENTITY.hex())
    assert found["busy"]["errno"] == errno.EBUSY
    assert found["shut"]["errno"] == errno.ECONNREFUSED


def test_extra_address_has_short_timeout(port: int, unresponsive_port: int) -> None:
    """Once every host has answered at one address, the other addresses are not awaited."""
    start_time = time.monotonic()
    results = probe.connect_all([target("a", unresponsive_port), target("a", port)], 60.0, 0.05)
    assert sorted(result["ok"] for result in results) == [False, True]
    assert time.monotonic() - start_time < 30


def test_reports_untried_targets(
    port: int, unresponsive_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "MAX_ATTEMPTS", 2)
    targets = [
        target("a", port),
        target("a", unresponsive_port),
        *(target("a", unresponsive_port) for _ in range(5)),
    ]
    results = probe.connect_all(targets, 60.0, 0.05)
    assert [result["ok"] for result in results].count(True) == 1
    assert len(results) == len(targets)
