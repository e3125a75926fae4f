"""Reports a rank's latest collectives from torch's flight recorder when the agent asks.

A thread of the rank waits for a signal that all other threads block, and answers in one line. So it
answers even while the script hangs in a collective. The recorder is part of torch, and on by
default; without it there is no answer.
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
KIND = "collectives"  # of the line with the answer
MAX_CALLS = 40
MAX_LINE_BYTES = 4000  # a pipe takes so much atomically
_started = False
_started_ns = 0  # earlier collectives belong to former groups


def block_signal() -> None:
    """Blocks the signal in this thread and in all threads that it starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {DUMP_SIGNAL})


def release_signal() -> None:
    """Ignores the signal, because this process is about to execute a program.

    The program cannot answer, and a late request must not kill it.
    """
    signal.signal(DUMP_SIGNAL, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {DUMP_SIGNAL})


def request(process: processes.Process) -> bool:
    """Asks a process if it blocks the signal, which would kill others; returns whether it did."""
    with contextlib.suppress(OSError, IndexError, KeyError, ValueError):
        with open("/proc/%d/status" % process.pid) as file:
            status = dict(line.split(":", 1) for line in file)
        is_stopped = status["State"].split()[0] == "T"  # it would answer late
        if not is_stopped and int(status["SigBlk"], 16) >> (DUMP_SIGNAL - 1) & 1:
            return processes.send(process, DUMP_SIGNAL)
    return False


def mark_start() -> None:
    """Ignores earlier collectives: the rank joins a new group, maybe with a former one's name."""
    global _started_ns
    _started_ns = time.time_ns()


def start_thread(fd: int) -> None:
    """Starts the answering thread unless it runs; call it once the rank has joined a group."""
    global _started
    module: Any = sys.modules.get("torch._C._distributed_c10d")
    if _started or not hasattr(module, "_dump_fr_trace_json"):
        return
    _started = True
    threading.Thread(
        target=_answer_loop, args=(fd, module), name="paceline-calls", daemon=True
    ).start()


def write_final(fd: int) -> None:
    """Reports the collectives of a rank that has failed in one and is about to end."""
    if _started:
        _write(fd, sys.modules["torch._C._distributed_c10d"])


def _answer_loop(fd: int, module: Any) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread gets them
    while True:
        signal.sigwait({DUMP_SIGNAL})
        _write(fd, module)


def _write(fd: int, module: Any) -> None:
    with contextlib.suppress(Exception):  # torch may change the recorder's format
        started_s = time.thread_time()
        entries = _read_entries(module)
        message: Dict[str, Any] = {"kind": KIND, "calls": format_calls(entries, _started_ns)}
        message["unfinished"] = unfinished_call(entries, _started_ns)
        message["cpu_s"] = time.thread_time() - started_s
        os.write(fd, b"\n" + json.dumps(message).encode() + b"\n")


def _read_entries(module: Any) -> List[Dict[str, Any]]:
    """Reads the recorders, oldest first: some versions of torch have one of NCCL's own."""
    entries: Dict[Any, Dict[str, Any]] = {}
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(module, name, None)
        for entry in json.loads(dump(True, False)).get("entries", ()) if dump else ():
            entries[entry["profiling_name"], entry["record_id"]] = entry
    return sorted(entries.values(), key=lambda entry: int(entry["time_created_ns"]))


def unfinished_call(entries: List[Dict[str, Any]], started_ns: int = 0) -> str:
    """Formats the NCCL collective since a time that the device has not completed; empty if none.

    The script goes on meanwhile, until it needs the result. Of several groups, which complete
    theirs independently, it is the one that was launched first.
    """
    latest = {str(entry["process_group"]): entry for entry in _current(entries, started_ns)}
    for entry in sorted(latest.values(), key=lambda entry: int(entry["time_created_ns"])):
        is_nccl = str(entry["profiling_name"]).startswith("nccl:")
        if is_nccl and entry.get("state") != "completed":
            return _format_call(entry)
    return ""


def _current(entries: List[Dict[str, Any]], started_ns: int) -> List[Dict[str, Any]]:
    return [
        entry
        for entry in entries
        if entry.get("time_created_ns", started_ns) >= started_ns and not entry.get("is_p2p")
    ]


def format_calls(entries: List[Dict[str, Any]], started_ns: int = 0) -> List[str]:
    """Formats the last collectives since a time, each as ``GROUP NUMBER OPERATION of SIZES``."""
    lines = [_format_call(entry) for entry in _current(entries[-MAX_CALLS:], started_ns)]
    while lines and sum(len(line) + 4 for line in lines) > MAX_LINE_BYTES - 100:
        del lines[0]
    return lines


def _format_call(entry: Dict[str, Any]) -> str:
    group = str(entry["process_group"][0]).replace(" ", "_")[:40]
    operation = str(entry["profiling_name"]).split(":")[-1]
    sizes = json.dumps(entry["input_sizes"], separators=(",", ":"))[1:-1]
    line = "%s %d %s of %s" % (group, entry["collective_seq_id"], operation, sizes[:60])
    return line if sizes else line[:-4]
