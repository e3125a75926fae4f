"""Runs a script on N local ranks without Paceline's launcher.

Ranks are forked from a process that has imported PyTorch, which saves two seconds of CPU time per
rank. ``conftest.py`` starts this process; it lives as long as the test session.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

SRC = Path(__file__).parents[2] / "src"
LIMIT_S = 550.0  # for a busy machine; a hang must end before pytest ends the test


FORKED = multiprocessing.get_context("forkserver")
PRELOADED = [
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "paceline.train.session",
]


def start_fork_server() -> None:
    """Starts the process that ranks are forked from, unless it runs."""
    FORKED.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        multiprocessing.forkserver.ensure_running()


@dataclass(frozen=True)
class Ended:
    """The result of one rank."""

    status: int
    out: str
    err: str


def free_port() -> int:
    """Returns a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(
    rank: int, size: int, port: int, extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Returns torchrun's variables for one rank, on loopback."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    return {
        **ours,
        "PYTHONPATH": os.pathsep.join([str(SRC), str(Path(__file__).parent)]),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **(extra or {}),
    }


def start(
    size: int, argv: Sequence[str], folder: Path, extra: Mapping[str, str] | None = None
) -> list[subprocess.Popen[bytes]]:
    """Starts ``python ARGV`` on every rank; output goes to files in ``folder``."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    started = []
    for rank in range(size):
        with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as err:
            started.append(
                subprocess.Popen(
                    [sys.executable, *argv],
                    env=environment(rank, size, port, extra),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                )
            )
    return started


def finish(started: Sequence[subprocess.Popen[bytes]], folder: Path, timeout: float) -> list[Ended]:
    """Waits for all ranks; kills those that are left at the end of the time."""
    deadline = time.monotonic() + timeout
    try:
        for process in started:
            process.wait(max(0.1, deadline - time.monotonic()))
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [
        Ended(process.returncode, _text(folder / f"{rank}.out"), _text(folder / f"{rank}.err"))
        for rank, process in enumerate(started)
    ]


def run(
    size: int,
    argv: Sequence[str],
    folder: Path,
    timeout: float = LIMIT_S,
    extra: Mapping[str, str] | None = None,
) -> list[Ended]:
    """Runs ``python ARGV`` to its end on ``size`` forked ranks."""
    port = free_port()
    return _run_forked(
        argv, [environment(rank, size, port, extra) for rank in range(size)], folder, timeout
    )


def run_script(argv: Sequence[str], folder: Path, timeout: float = LIMIT_S) -> Ended:
    """Runs ``python ARGV`` in a forked process that is not a rank; it must succeed."""
    (ended,) = _run_forked(argv, [dict(os.environ)], folder, timeout)
    assert ended.status == 0, ended.err
    return ended


def _run_forked(
    argv: Sequence[str], environments: Sequence[Mapping[str, str]], folder: Path, timeout: float
) -> list[Ended]:
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout
    processes = []
    for rank, environ in enumerate(environments):
        args = [*argv], dict(environ), folder / f"{rank}.out", folder / f"{rank}.err"
        processes.append(FORKED.Process(target=_become, args=args))
        processes[-1].start()
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
    late = [process for process in processes if process.exitcode is None]
    for process in late:
        process.kill()
        process.join()
    statuses = [process.exitcode or 0 for process in processes]
    for process in processes:
        process.close()
    ended = [
        Ended(status, _text(folder / f"{rank}.out"), _text(folder / f"{rank}.err"))
        for rank, status in enumerate(statuses)
    ]
    assert not late, f"killed after {timeout:.0f} s: " + "\n".join(one.err for one in ended)
    return ended


def _become(argv: list[str], environ: dict[str, str], out: Path, err: Path) -> None:
    """Turns this process into one that runs ``python ARGV``."""
    multiprocessing.set_start_method(None, force=True)  # data workers use the default, not FORKED
    gc.freeze()  # otherwise collections copy the pages of all imported modules
    for path, number in ((out, 1), (err, 2)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(environ)
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        elif argv[0] == "-c":
            sys.argv = ["-c", *argv[2:]]
            exec(argv[1], {"__name__": "__main__"})
        else:
            sys.argv = argv
            sys.path.insert(0, str(Path(argv[0]).parent))
            runpy.run_path(argv[0], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:  # as an interpreter does at its end, but a process of multiprocessing does not
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def run_ok(
    size: int,
    argv: Sequence[str],
    folder: Path,
    timeout: float = LIMIT_S,
    extra: Mapping[str, str] | None = None,
) -> list[Ended]:
    """Like :func:`run`; every rank must succeed."""
    ended = run(size, argv, folder, timeout, extra)
    assert all(one.status == 0 for one in ended), "\n".join(one.err for one in ended)
    return ended


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
