"""Reports what the ranks here are doing: stacks, collectives, system calls and children."""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, List, Sequence

from . import processes, stalls
from .rank_process import TICKS_PER_S, RankProcess

Message = Dict[str, Any]
STACKS_TIMEOUT_S = 1.5
COLLECTIVES_TIMEOUT_S = 2.5  # for the ranks' flight recorders, too
CHILD_TIMEOUT_S = 0.3  # for the stack of a rank's child
POLL_S = 0.01
MAX_CHILDREN = 16  # of one rank


def request_dumps(ranks: Sequence[RankProcess], collectives: bool, stacks: bool) -> None:
    """Asks the ranks for their stacks, which interrupts them, and for their latest collectives."""
    for rank in ranks:
        if rank.process is not None and stacks:
            rank.dump.request(rank.process, collectives)
        elif rank.process is not None and collectives:
            rank.dump.request_collectives(rank.process)


def inspect(ranks: Sequence[RankProcess], closely: bool = False) -> List[Message]:
    """Returns what every rank was doing when :func:`request_dumps` asked. Blocks; not for the loop.

    ``stack`` (innermost line first; empty unless complete), ``state`` as ``ps`` shows it, ``cpu_s``
    of the rank and its children without gloo's loops, ``moved``: bytes they have read and written,
    ``sent``: bytes it has written to others than the agent and that have arrived, ``switches``:
    their context switches; ``call``, ``on`` and ``readers``: the system call it waits in.

    Args:
        ranks: Those that run.
        closely: Also report the ``children`` of each rank.
    """
    timeout_s = COLLECTIVES_TIMEOUT_S if closely else STACKS_TIMEOUT_S
    _wait_for(lambda now: all(rank.dump.is_complete(now) for rank in ranks), timeout_s)
    stats = processes.all_stats()
    reports = []
    for rank in ranks:
        if rank.process is None:
            continue
        pid = rank.process.pid
        children = sorted(processes.descendants([pid], stats))
        pids = [pid, *children]
        ticks = sum(stats[member].cpu for member in pids if member in stats)
        ticks -= rank.inspected_gloo_loops.ticks(pid, time.monotonic())
        has_stack = rank.dump.has_stacks(time.monotonic())
        to_agent = rank.event_bytes - rank.child_event_bytes
        reports.append({
            "rank": rank.rank,
            "pid": pid,
            "cpu_s": ticks / TICKS_PER_S,
            "moved": sum(map(processes.bytes_moved, pids)),
            "sent": max(processes.bytes_sent(pid) - to_agent, 0),
            "switches": sum(map(stalls.context_switches, pids)),
            **_system_call(pid, pids),
            "calls": list(rank.dump.calls),
            "unfinished": rank.dump.unfinished,
            "state": rank.dump.state,
            "stack": list(rank.dump.stack) if has_stack else [],
            "children": _inspect_children(rank, children, stats, pids) if closely else [],
        })  # fmt: skip
    return reports


def _inspect_children(rank: RankProcess, children: Sequence[int], stats: Dict[int, processes.Stat],
                      pids: List[int]) -> List[Message]:  # fmt: skip
    """Reports what a rank's children do; Python processes write their stack."""
    reports, initial_bytes = [], rank.event_bytes
    for pid in children[:MAX_CHILDREN]:
        stack: List[str] = []
        if rank.dump.has_stacks(time.monotonic()):  # else lines of another stack could come
            lines = rank.dump.request_child(processes.Process(pid, stats[pid].start))
            if _wait_for(rank.dump.has_stacks, CHILD_TIMEOUT_S):
                stack = list(lines)
        reports.append({"pid": pid, "name": stats[pid].name, **_system_call(pid, pids),
                        "stack": stack})  # fmt: skip
    rank.child_event_bytes += rank.event_bytes - initial_bytes
    return reports


def _system_call(pid: int, pids: List[int]) -> Message:
    blocked = stalls.blocking_call(pid)
    is_pipe = blocked["call"] in ("write", "writev") and blocked["on"].startswith("pipe:")
    readers = stalls.pipe_readers(blocked["on"], pids) if is_pipe else []
    return {"call": blocked["call"], "on": blocked["on"], "readers": readers}


def _wait_for(condition: Callable[[float], bool], timeout_s: float) -> bool:
    """Waits until the condition holds at a time of the monotonic clock; False after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not condition(time.monotonic()):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
