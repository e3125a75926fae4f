"""Tests what a node does before its agent runs: inherited sockets, and the launcher's answer."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import threading
from typing import cast

import pytest

from paceline.agent.caller import read_line

CLOSES = """
import os, sys
from paceline.agent.caller import close_listeners
close_listeners()
print([os.path.exists(f"/proc/self/fd/{fd}") for fd in sys.argv[1:]])
"""


def test_closes_only_listening_sockets() -> None:
    """MPICH's Hydra passes on its listening socket, and one that must stay open (PMI_FD)."""
    local_end, remote_end = socket.socketpair()
    with (
        local_end,
        remote_end,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket() as unbound,
    ):
        fds = server.fileno(), remote_end.fileno(), unbound.fileno()
        argv = [sys.executable, "-c", CLOSES, *map(str, fds)]
        result = subprocess.run(argv, pass_fds=fds, capture_output=True, text=True, check=True)
    assert result.stdout == "[False, True, True]\n"


def test_slow_answer_has_one_deadline() -> None:
    """A stranger at the launcher's address may send a byte now and then, but no line."""
    local_end, remote_end = socket.socketpair()
    stopping = threading.Event()

    def send_slowly() -> None:
        while not stopping.wait(0.02):
            remote_end.sendall(b"x")

    thread = threading.Thread(target=send_slowly)
    with local_end, remote_end:
        thread.start()
        try:
            with pytest.raises(TimeoutError):
                read_line(cast(ssl.SSLSocket, local_end), 0.3)
        finally:
            stopping.set()
            thread.join()


def test_undecodable_answer_is_text() -> None:
    local_end, remote_end = socket.socketpair()
    with local_end, remote_end:
        remote_end.sendall(b"\xff\xfe\n")
        assert read_line(cast(ssl.SSLSocket, local_end), 5.0) == "\ufffd\ufffd\n"
