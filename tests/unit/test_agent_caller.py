"""What a node's process that a launcher has started keeps of the launcher."""

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


def test_listening_sockets_of_the_launcher_are_closed_and_nothing_else() -> None:
    """As hydra passes on its own, and the one that tells it of this process's end (PMI_FD)."""
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as other:
        fds = server.fileno(), theirs.fileno(), other.fileno()
        argv = [sys.executable, "-c", CLOSES, *map(str, fds)]
        done = subprocess.run(argv, pass_fds=fds, capture_output=True, text=True, check=True)
    assert done.stdout == "[False, True, True]\n"
