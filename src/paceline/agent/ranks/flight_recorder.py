"""Which collectives a rank has begun last, as torch's flight recorder has them; asked from outside.

A thread of the rank waits for a signal that no other thread takes, and answers in one line. So it
answers also while the script hangs in a collective. The recorder is torch's own, and on by default;
where torch has none nothing is answered.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from typing import Any, Dict, List

from ..supervision import processes

DUMP_SIGNAL = signal.SIGRTMAX - 4
KIND = "collectives"  # of the line that answers
MAX_CALLS = 40
MAX_LINE_BYTES = 4000  # so much goes into a pipe in one piece
_started = False
_started_ns = 0  # what was begun before belongs to groups that are no more


def block_signal() -> None:
    """Has every thread to come leave the signal to the one that waits for it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {DUMP_SIGNAL})


def release_signal() -> None:
    """A program is to take this process's place, and cannot answer.

    It shall not die of a question that is on its way: a shell gives all signals way.
    """
    signal.signal(DUMP_SIGNAL, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {DUMP_SIGNAL})


def request(process: processes.Process) -> bool:
    """Asks a process that holds the signal: another would die of it. Whether it was asked."""
    with contextlib.suppress(OSError, IndexError, KeyError, ValueError):
        with open("/proc/%d/status" % process.pid) as file:
            status = dict(line.split(":", 1) for line in file)
        is_stopped = status["State"].split()[0] == "T"  # it would answer when it goes on
        if not is_stopped and int(status["SigBlk"], 16) >> (DUMP_SIGNAL - 1) & 1:
            return processes.send(process, DUMP_SIGNAL)
    return False


def mark_start() -> None:
    """The rank joins a group, perhaps once more: torch gives its groups the same names again."""
    global _started_ns
    _started_ns = time.time_ns()


def start_thread(fd: int) -> None:
    """Starts the thread, once; to be called in a rank that has joined a group."""
    global _started
    module: Any = sys.modules.get("torch._C._distributed_c10d")
    if _started or not hasattr(module, "_dump_fr_trace_json"):
        return
    _started = True
    threading.Thread(
        target=_answer_loop, args=(fd, module), name="paceline-calls", daemon=True
    ).start()


def write_final(fd: int) -> None:
    """Says it once more, of a rank that has failed in a collective and is about to end."""
    if _started:
        _write(fd, sys.modules["torch._C._distributed_c10d"])


def _answer_loop(fd: int, module: Any) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the main thread
    while True:
        signal.sigwait({DUMP_SIGNAL})
        _write(fd, module)


def _write(fd: int, module: Any) -> None:
    with contextlib.suppress(Exception):  # the recorder's form is torch's to change
        started_s = time.thread_time()
        entries = json.loads(module._dump_fr_trace_json(True, False))["entries"]
        message: Dict[str, Any] = {"kind": KIND, "calls": format_calls(entries, _started_ns)}
        message["cpu_s"] = time.thread_time() - started_s
        os.write(fd, b"\n" + json.dumps(message).encode() + b"\n")


def format_calls(entries: List[Dict[str, Any]], started_ns: int = 0) -> List[str]:
    """The last of them, as ``GROUP NUMBER OPERATION of SIZES``, from a moment on."""
    lines = []
    for entry in entries[-MAX_CALLS:]:
        if entry.get("is_p2p") or entry.get("time_created_ns", started_ns) < started_ns:
            continue
        group = str(entry["process_group"][0]).replace(" ", "_")[:40]
        operation = str(entry["profiling_name"]).split(":")[-1]
        sizes = json.dumps(entry["input_sizes"], separators=(",", ":"))[1:-1]
        line = "%s %d %s of %s" % (group, entry["collective_seq_id"], operation, sizes[:60])
        lines.append(line if sizes else line[:-4])
    while lines and sum(len(line) + 4 for line in lines) > MAX_LINE_BYTES - 100:
        del lines[0]
    return lines
