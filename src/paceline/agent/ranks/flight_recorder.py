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

SIGNAL = signal.SIGRTMAX - 4
KIND = "collectives"  # of the line that answers
MOST_CALLS = 40
MOST_BYTES = 4000  # so much goes into a pipe in one piece
_started = False
_since_ns = 0  # what was begun before belongs to groups that are no more


def hold() -> None:
    """Has every thread to come leave the signal to the one that waits for it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})


def let_go() -> None:
    """A program is to take this process's place, and cannot answer.

    It shall not die of a question that is on its way: a shell gives all signals way.
    """
    signal.signal(SIGNAL, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {SIGNAL})


def ask(process: processes.Process) -> bool:
    """Asks a process that holds the signal: another would die of it. Whether it was asked."""
    with contextlib.suppress(OSError, IndexError, KeyError, ValueError):
        with open("/proc/%d/status" % process.pid) as file:
            said = dict(line.split(":", 1) for line in file)
        stopped = said["State"].split()[0] == "T"  # it would answer when it goes on
        if not stopped and int(said["SigBlk"], 16) >> (SIGNAL - 1) & 1:
            return processes.send(process, SIGNAL)
    return False


def begin() -> None:
    """The rank joins a group, perhaps once more: torch gives its groups the same names again."""
    global _since_ns
    _since_ns = time.time_ns()


def answer_on(fd: int) -> None:
    """Starts the thread, once; to be called in a rank that has joined a group."""
    global _started
    module: Any = sys.modules.get("torch._C._distributed_c10d")
    if _started or not hasattr(module, "_dump_fr_trace_json"):
        return
    _started = True
    threading.Thread(target=_answer, args=(fd, module), name="paceline-calls", daemon=True).start()


def tell(fd: int) -> None:
    """Says it once more, of a rank that has failed in a collective and is about to end."""
    if _started:
        _say(fd, sys.modules["torch._C._distributed_c10d"])


def _answer(fd: int, module: Any) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the main thread
    while True:
        signal.sigwait({SIGNAL})
        _say(fd, module)


def _say(fd: int, module: Any) -> None:
    with contextlib.suppress(Exception):  # the recorder's form is torch's to change
        begun_s = time.thread_time()
        entries = json.loads(module._dump_fr_trace_json(True, False))["entries"]
        said: Dict[str, Any] = {"kind": KIND, "calls": called(entries, _since_ns)}
        said["cpu_s"] = time.thread_time() - begun_s
        os.write(fd, b"\n" + json.dumps(said).encode() + b"\n")


def called(entries: List[Dict[str, Any]], since_ns: int = 0) -> List[str]:
    """The last of them, as ``GROUP NUMBER OPERATION of SIZES``, from a moment on."""
    lines = []
    for entry in entries[-MOST_CALLS:]:
        if entry.get("is_p2p") or entry.get("time_created_ns", since_ns) < since_ns:
            continue
        group = str(entry["process_group"][0]).replace(" ", "_")[:40]
        operation = str(entry["profiling_name"]).split(":")[-1]
        sizes = json.dumps(entry["input_sizes"], separators=(",", ":"))[1:-1]
        line = "%s %d %s of %s" % (group, entry["collective_seq_id"], operation, sizes[:60])
        lines.append(line if sizes else line[:-4])
    while lines and sum(len(line) + 4 for line in lines) > MOST_BYTES - 100:
        del lines[0]
    return lines
