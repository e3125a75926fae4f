"""Sets the command line that ``ps``, ``htop`` and ``nvidia-smi`` show for a process.

A fork keeps the command line of the process that it came from. The kernel shows the memory in
which that line once was given, up to the first NUL when the last byte of it is none: so a process
can write another line over it, without any rights. Formats: proc(5), fs/proc/base.c.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Dict, List, Tuple

PADDING = " " * 2048  # an argument that makes room for a longer line than the first
_ELLIPSIS = " ..."


def show(text: str, tail: str = "") -> bool:
    """Shows ``text``, cut if need be, and ``tail`` as this process's command line.

    Returns False if that is impossible.
    """
    with contextlib.suppress(OSError, ValueError):
        start, end = _argument_memory()
        line = fit_line(text.encode(errors="surrogateescape"), tail.encode(), end - start - 2)
        if line:
            ctypes.memset(start, 0, end - start - 1)
            ctypes.memmove(start, line, len(line))
            ctypes.memset(end - 1, ord("."), 1)
            return True
    return False


def fit_line(text: bytes, tail: bytes, max_bytes: int) -> bytes:
    """Shortens the line to ``max_bytes`` at most, without NUL and line breaks; may be empty."""
    text = text.translate(bytes.maketrans(b"\0\n\r\t", b"    "))
    if len(text) + len(tail) > max_bytes:
        text = text[: max(0, max_bytes - len(tail) - len(_ELLIPSIS))] + _ELLIPSIS.encode()
    line = text + tail
    return line if len(line) <= max_bytes else b""


def _argument_memory() -> Tuple[int, int]:
    """Returns start and end address of this process's arguments: fields 48, 49 of ``stat``."""
    with open("/proc/self/stat", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if not 0 < start < end:  # hidden from us, as in some containers
        raise ValueError("no arguments")
    return start, end


def agent_title(argv: List[str]) -> str:
    """Returns the command line of one of the agent's own processes, without its padding."""
    return " ".join(argument for argument in argv if argument != PADDING)


def rank_title(entry: Dict[str, object], env: Dict[str, str]) -> Tuple[str, str]:
    """``python train.py --lr 0.1`` and `` [rank 1 of 4, n2]``."""
    args = entry.get("args") if entry["kind"] != "function" else []
    arguments = ["python", "-m"] if entry["kind"] == "module" else ["python"]
    arguments += map(str, [entry["target"], *(args if isinstance(args, list) else [])])
    host = env.get("PACELINE_HOST", os.uname().nodename)
    rank, world = env.get("RANK", "?"), env.get("WORLD_SIZE", "?")
    return " ".join(arguments), " [rank %s of %s, %s]" % (rank, world, host)
