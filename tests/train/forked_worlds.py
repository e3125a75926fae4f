"""Forks worlds of ranks, so that torch is imported once for many runs.

Only for test scripts that have started no thread and no computation before.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import local_ranks

Body = Callable[[], object]


def start(size: int, body: Body, extra: Mapping[str, str] | None = None) -> list[int]:
    """Forks a world of ``size`` ranks; each runs ``body`` and exits. Returns process ids."""
    port = reserved_port()
    return [forked(local_ranks.environment(rank, size, port, extra), body) for rank in range(size)]


def reserved_port() -> int:
    """Returns a port for a store; no other process gets it while this process lives.

    Otherwise worlds that run at the same time take each other's ports before their stores listen.
    """
    reserving = socket.socket()
    reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserving.bind(("127.0.0.1", 0))
    _reserving.append(reserving)
    return int(reserving.getsockname()[1])


_reserving: list[socket.socket] = []


def forked(environ: Mapping[str, str], body: Body) -> int:
    """Forks a process that runs ``body`` with these variables and exits; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        os.environ.update(environ)
        body()
        status = 0
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    except BaseException as error:
        traceback.print_exc()
        status = int(getattr(error, "exit_code", 1))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def side_by_side(bodies: Iterable[Body], most: int = 4) -> None:
    """Runs each body in its own process, ``most`` at a time; every one must succeed.

    Worlds wait more than they compute.
    """
    statuses: list[int] = []
    running: set[int] = set()
    for body in bodies:
        running.add(forked({}, body))
        if len(running) == most:
            statuses.append(_reap_one(running))
    while running:
        statuses.append(_reap_one(running))
    assert not any(statuses), statuses


def _reap_one(running: set[int]) -> int:
    """Waits for one of these processes, and returns its exit status."""
    while True:
        for pid in running:
            if (ended := os.waitpid(pid, os.WNOHANG))[0]:
                running.discard(pid)
                return os.waitstatus_to_exitcode(ended[1])
        time.sleep(0.01)


def store(patience: timedelta = timedelta(minutes=1)) -> tuple[int, int]:
    """Starts a process with a rendezvous store; returns its process id and port.

    A separate process, because a process with a store's threads must not fork: they may hold a lock
    at that moment.
    """
    from torch.distributed import TCPStore

    reads, writes = os.pipe()

    def serve() -> None:
        os.close(reads)
        held = TCPStore("127.0.0.1", 0, None, True, patience, wait_for_workers=False)
        os.write(writes, str(held.port).encode())
        while os.getppid() != 1:
            time.sleep(0.5)

    pid = forked({}, serve)
    os.close(writes)
    port = int(os.read(reads, 16))
    os.close(reads)
    return pid, port


def finish(pids: list[int], timeout: float = local_ranks.LIMIT_S) -> list[int]:
    """Waits for processes, kills late ones, and returns exit statuses (negative for signals)."""
    deadline = time.monotonic() + timeout
    statuses = {}
    while len(statuses) < len(pids):
        for pid in pids:
            if pid not in statuses and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                statuses[pid] = os.waitstatus_to_exitcode(ended[1])
            if time.monotonic() > deadline and pid not in statuses:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [statuses[pid] for pid in pids]


def run(size: int, body: Body, extra: Mapping[str, str] | None = None) -> list[int]:
    """Runs ``body`` in a world of ``size`` ranks to its end."""
    return finish(start(size, body, extra))


def run_ok(size: int, body: Body, extra: Mapping[str, str] | None = None) -> None:
    """Like :func:`run`; every rank must succeed."""
    statuses = run(size, body, extra)
    assert not any(statuses), statuses
