"""Tests which sockets a process on a node closes that it inherited from an MPI launcher."""

from __future__ import annotations

import socket
import subprocess
import sys

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
