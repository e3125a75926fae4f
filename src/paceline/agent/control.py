"""Asks the launcher of a run that runs on this machine: one line there, one line back.

A launcher listens on a Unix socket with an abstract name while its run lasts (see
``launch/control.py``). Such a name has no permissions, so both sides hear the kernel's word on who
is at the other end.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from typing import Any, Dict, Optional

from .reconnection import connect, peer_uid

Message = Dict[str, Any]
SOCKET_NAME = "paceline-run-%s"  # without the leading zero byte
RUN_ID = re.compile("[0-9a-z][0-9a-z-]{0,63}")
MAX_REQUEST_BYTES = 4096  # bytes
MAX_REPLY_BYTES = 4 << 20
REPLY_TIMEOUT_S = 30.0


def address(run_id: str) -> str:
    """Returns the launcher's socket address. ValueError for an invalid run id."""
    if not RUN_ID.fullmatch(run_id):
        raise ValueError("not the id of a run: %r" % run_id[:100])
    return "\0" + SOCKET_NAME % run_id


def request(run_id: str, message: Message, timeout_s: float = REPLY_TIMEOUT_S) -> Optional[Message]:
    """Sends a message (``do`` and its arguments) to the launcher of a run on this machine.

    Returns its reply; ``None`` if no launcher of this user listens.

    Raises:
        TimeoutError: The request may still be carried out.
        ValueError: The reply is invalid.
    """
    if not hasattr(socket, "SO_PEERCRED"):  # no Linux: nothing listens either
        return None
    deadline = time.monotonic() + timeout_s
    try:
        connection = connect(address(run_id)[1:], timeout_s)
    except BlockingIOError:
        raise TimeoutError("no answer after %.0f s" % timeout_s) from None
    except (ConnectionError, FileNotFoundError):
        return None
    with connection:
        try:
            if peer_uid(connection) != os.getuid():
                return None
            connection.sendall(json.dumps(message).encode() + b"\n")
        except ConnectionError:
            return None
        received = b""
        while not received.endswith(b"\n"):
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                chunk = connection.recv(1 << 16)
            except socket.timeout:
                raise TimeoutError("no answer after %.0f s" % timeout_s) from None
            except ConnectionError:
                return None  # it ended meanwhile
            if not chunk and not received:
                return None
            received += chunk
            if not chunk or len(received) > MAX_REPLY_BYTES:
                raise ValueError("the launcher's answer is cut short or far too long")
    reply = json.loads(received.decode("utf-8", "replace"))
    if not isinstance(reply, dict):
        raise ValueError("the launcher's answer is not an object")
    return reply
