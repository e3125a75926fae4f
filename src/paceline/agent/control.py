"""Asks the launcher of a run that runs on this machine: one line there, one line back.

A launcher listens on a Unix socket with an abstract name while its run lasts (see
``launch/control.py``). Such a name has no permissions, so both sides hear the kernel's word on who
is at the other end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from typing import Any, Dict, Optional

from .reconnection import uid_of

Message = Dict[str, Any]
NAME = "paceline-run-%s"  # without the leading zero byte
RUN_ID = re.compile("[0-9a-z][0-9a-z-]{0,63}")
LONGEST_WISH = 4096  # bytes
LONGEST_ANSWER = 4 << 20
PATIENCE_S = 30.0


def address(run_id: str) -> str:
    """Of the launcher's socket. ValueError for what is no id of a run."""
    if not RUN_ID.fullmatch(run_id):
        raise ValueError("not the id of a run: %r" % run_id[:100])
    return "\0" + NAME % run_id


def ask(run_id: str, wish: Message, patience_s: float = PATIENCE_S) -> Optional[Message]:
    """What the run's launcher answers; ``None``: none of ours listens on this machine.

    Args:
        run_id: Of the run.
        wish: ``do`` and what belongs to it.
        patience_s: For the whole answer.

    Raises:
        TimeoutError: No answer in that time; what was asked for may be under way.
        ValueError: What came is no answer.
    """
    if not hasattr(socket, "SO_PEERCRED"):  # no Linux: nothing listens either
        return None
    until = time.monotonic() + patience_s
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as line:
        line.settimeout(patience_s)
        try:
            line.connect(address(run_id))
            if uid_of(line) != os.getuid():
                return None
            line.sendall(json.dumps(wish).encode() + b"\n")
        except (ConnectionError, FileNotFoundError):
            return None
        answer = b""
        while not answer.endswith(b"\n"):
            line.settimeout(max(0.01, until - time.monotonic()))
            try:
                came = line.recv(1 << 16)
            except socket.timeout:
                raise TimeoutError("no answer after %.0f s" % patience_s) from None
            except ConnectionError:
                return None  # it ended meanwhile
            if not came and not answer:
                return None
            answer += came
            if not came or len(answer) > LONGEST_ANSWER:
                raise ValueError("the launcher's answer is cut short or far too long")
    said = json.loads(answer.decode("utf-8", "replace"))
    if not isinstance(said, dict):
        raise ValueError("the launcher's answer is no object")
    return said
