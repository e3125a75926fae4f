"""Tried connections: every target has one result, and few are open at a time."""

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
    """Of a listener that answers as an agent does."""
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
def silent() -> Iterator[int]:
    """Of a listener whose machine takes connections, and whose agent says nothing."""
    with probe.listen("127.0.0.1") as listener:
        yield int(listener.getsockname()[1])


@pytest.fixture
def closed() -> int:
    with probe.listen("127.0.0.1") as listener:
        return int(listener.getsockname()[1])


def test_many_targets_need_few_sockets(
    port: int, closed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "MAX_ATTEMPTS", 8)
    most, before = 0, _sockets()
    begin = probe._start_attempts

    def counted(*args: Any) -> Any:
        nonlocal most
        over = begin(*args)
        most = max(most, _sockets() - before)
        return over

    monkeypatch.setattr(probe, "_start_attempts", counted)
    targets = [target(f"h{at}", port if at % 3 else closed) for at in range(300)]
    results = probe.connect_all(targets, 20.0, 20.0)
    assert {result["host"] for result in results if result["ok"]} == {
        f"h{at}" for at in range(300) if at % 3
    }
    assert len(results) == 300
    # the listener is in this process, too: it holds the other end of each for a moment
    assert 0 < most <= 2 * 8 + 1
    assert _sockets() == before


def _sockets() -> int:
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listener's thread closes some meanwhile
            found += str(entry.readlink()).startswith("socket:")
    return found


def test_every_failure_has_its_reason(
    port: int, silent: int, closed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "IDENTITY_TIMEOUT_S", 0.1)
    targets = [
        target("well", port),
        target("other", port, bytes(probe.IDENTITY_BYTES)),
        target("busy", silent),
        target("shut", closed),
    ]
    found = {result["host"]: result for result in probe.connect_all(targets, 2.0, 2.0)}
    assert found["well"]["ok"]
    assert found["well"]["rtt"] >= 0
    assert (found["other"]["ok"], found["other"]["reached"]) == (False, IDENTITY.hex())
    assert found["busy"]["errno"] == errno.EBUSY
    assert found["shut"]["errno"] == errno.ECONNREFUSED


def test_an_address_more_is_not_waited_for_long(port: int, silent: int) -> None:
    """Once every host has answered somewhere, nobody waits for the rest."""
    begun = time.monotonic()
    results = probe.connect_all([target("a", silent), target("a", port)], 60.0, 0.05)
    assert sorted(result["ok"] for result in results) == [False, True]
    assert time.monotonic() - begun < 30


def test_those_that_had_no_turn_are_told_too(
    port: int, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "MAX_ATTEMPTS", 2)
    targets = [target("a", port), target("a", silent), *(target("a", silent) for _ in range(5))]
    results = probe.connect_all(targets, 60.0, 0.05)
    assert [result["ok"] for result in results].count(True) == 1
    assert len(results) == len(targets)
