"""Runs a script on N local ranks without any launcher of ours."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"
LIMIT_S = 550.0  # a busy machine is slow, and what hangs is to end before pytest ends the test


@dataclass(frozen=True)
class Ended:
    """How one rank ended."""

    status: int
    out: str
    err: str


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(
    rank: int, size: int, port: int, extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """torchrun's variables for one rank, on loopback."""
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
    """Waits for all ranks and ends those that are still there at the end of the time."""
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
    """Runs ``python ARGV`` on ``size`` ranks to its end."""
    return finish(start(size, argv, folder, extra), folder, timeout)


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
