"""gloo's threads in a process, by the names that the system has for them.

``paceline.train.elastic.gloo`` knows the same names: neither of the two can import the other.
"""

from __future__ import annotations

import os
import time
from typing import Dict, List, Union

from . import processes

LOOP_THREADS = "gloo_tcp_loop"  # move what goes over connections
WORKER_THREADS = "pt_gloo_runloop"  # run collectives
IDLE_CHECKS, CHECK_INTERVAL_S = 3, 0.002  # in a row, after which workers count as idle
MAX_WAIT_S = 2.0
LIST_INTERVAL_S = 5.0  # a process may have hundreds of threads: they are listed again after so long


def threads(pid: Union[int, str], name: str) -> List[int]:
    """Returns a process's threads of that name; none if it cannot be seen."""
    folder = "/proc/%s/task" % pid
    try:
        return [int(task) for task in os.listdir(folder) if _thread_name(folder, task) == name]
    except OSError:
        return []


def _thread_name(folder: str, task: str) -> str:
    try:
        with open("%s/%s/comm" % (folder, task)) as file:
            return file.read().strip()
    except OSError:  # it has just ended
        return ""


def wait_for_idle_workers() -> None:
    """Waits until this process's worker threads have nothing to do, at most two seconds.

    Sleeping releases the interpreter's lock, so a worker that needs it gets it and is seen running.
    """
    pid, workers, num_idle = os.getpid(), threads("self", WORKER_THREADS), 0
    deadline = time.monotonic() + MAX_WAIT_S
    while workers and num_idle < IDLE_CHECKS and time.monotonic() < deadline:
        time.sleep(CHECK_INTERVAL_S)
        stats = [processes.read_stat(pid, worker) for worker in workers]
        is_busy = any(stat is not None and stat.state == "R" for stat in stats)
        num_idle = 0 if is_busy else num_idle + 1


def ticks(pid: int, tasks: List[int]) -> Dict[int, int]:
    """Returns CPU ticks of a process's threads."""
    stats = {task: processes.read_stat(pid, task) for task in tasks}
    return {task: stat.cpu for task, stat in stats.items() if stat is not None}


class LoopClock:
    """CPU time of gloo's loop threads, which is no computing: epoll may wake them for nothing."""

    def __init__(self) -> None:
        self._pid = 0
        self._listed_at = 0.0
        self._tasks: List[int] = []
        self._counts: Dict[int, int] = {}
        self._total = 0

    def ticks(self, pid: int, now_s: float) -> int:
        """Returns the ticks since the first call; ``now_s`` is of the monotonic clock."""
        if pid != self._pid or now_s - self._listed_at >= LIST_INTERVAL_S:
            self._pid, self._listed_at, self._tasks = pid, now_s, threads(pid, LOOP_THREADS)
        counts = ticks(pid, self._tasks)
        self._total += sum(count - self._counts.get(task, count) for task, count in counts.items())
        self._counts = counts
        return self._total
