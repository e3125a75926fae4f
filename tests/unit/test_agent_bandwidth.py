"""Tests the transfer with which ``paceline check`` measures a link."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.agent import challenge
from paceline.agent.surveys import checks, probe

KEY = b"k" * 32


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with probe.listen("127.0.0.1") as opened:
        opened.setblocking(True)
        yield opened


def send_to_stalled(listener: socket.socket, buffer: int) -> dict[str, Any]:
    """Sends to a receiver whose kernel takes about ``buffer`` bytes, and which reads nothing."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    accepted = []

    def receive() -> None:
        connection, _ = listener.accept()
        accepted.append(connection)
        challenge.run(connection, challenge.listener_handshake(KEY))

    thread = threading.Thread(target=receive)
    thread.start()
    host, port = listener.getsockname()
    request = {"address": host, "port": port, "key": KEY.hex(), "seconds": 0.2, "timeout_s": 0.4}
    try:
        return checks.send_to_sink(request)
    finally:
        thread.join()
        accepted[0].close()


def test_transfer_without_end_counts_what_arrived(listener: socket.socket) -> None:
    sent = send_to_stalled(listener, 1 << 20)
    assert sent["bytes"] >= checks.BLOCK_BYTES
    assert sent["seconds"] >= 0.4


def test_transfer_fails_if_next_to_nothing_arrives(listener: socket.socket) -> None:
    with pytest.raises(TimeoutError):
        send_to_stalled(listener, 1 << 12)
