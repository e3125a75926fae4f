"""Tests data workers and the signals that every process of a job receives."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, Dataset

from paceline.train.data.worker_signals import protect_data_workers

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Pids(Dataset[int]):
    """Returns the process id for each sample; one sample may block."""

    def __init__(self, slow: int = -1) -> None:
        self._slow = slow

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if index == self._slow:
            time.sleep(600)
        return os.getpid()


@pytest.fixture(autouse=True)
def _restore_loader() -> Iterator[None]:
    original = DataLoader._get_iterator
    yield
    DataLoader._get_iterator = original  # type: ignore[method-assign]


def install_script_handler(folder: Path, worker: int) -> None:
    """Installs a script's own signal handler in a worker."""
    signal.signal(signal.SIGUSR2, lambda *_: (folder / str(worker)).touch())


def test_workers_survive_job_signals() -> None:
    """Runs in a subprocess, as some helper processes of multiprocessing stay until it ends."""
    completed = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=300, check=False
    )
    assert completed.stdout.split() == ["fork", "fork", "spawn", "forkserver"], completed.stderr
    assert completed.returncode == 0, completed.stderr


def outlive_signals(method: str, *, persistent: bool) -> None:
    """Signals a worker before and after its start, then lets its loader end it."""
    loader = DataLoader(
        Pids(), 1, num_workers=1, multiprocessing_context=method, persistent_workers=persistent
    )
    batches = iter(loader)
    for number in SIGNALS:  # perhaps before the worker has started
        os.kill(batches._workers[0].pid, number)  # type: ignore[attr-defined]
    pids = set()
    for batch in batches:
        pids.add(int(batch))
        for number in SIGNALS:
            os.kill(int(batch), number)
    assert len(pids) == 1
    assert pids != {os.getpid()}
    loader._iterator = batches = None  # type: ignore[assignment]
    with pytest.raises(ProcessLookupError):
        os.kill(pids.pop(), 0)


def test_script_handlers_override_protection(tmp_path: Path) -> None:
    protect_data_workers()
    init = functools.partial(install_script_handler, tmp_path)
    loader = DataLoader(Pids(), 1, num_workers=1, worker_init_fn=init)
    batches = iter(loader)
    os.kill(int(next(batches)), signal.SIGUSR2)
    assert len(list(batches)) == 39
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert loader.worker_init_fn is init
    assert signal.SIGUSR2 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_stuck_worker_ends_with_its_process() -> None:
    """It ends at once, before the agent kills it, and without an error from torch."""
    script = Path(__file__)
    code = (
        f"import sys; sys.path.insert(0, {str(script.parent)!r})\n"
        f"from {script.stem} import *\n"
        "protect_data_workers()\n"
        "batches = iter(DataLoader(Pids(slow=1), 1, num_workers=1))\n"
        "print(int(next(batches)))\n"
        "sys.stdout.flush()\n"
        "raise ValueError('of the script')\n"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert completed.returncode == 1
    assert "ValueError: of the script" in completed.stderr
    assert "DataLoader worker" not in completed.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(completed.stdout), 0)


def test_worker_subprocesses_can_be_terminated() -> None:
    protect_data_workers()
    loader = DataLoader(TerminatedPrograms(), 1, num_workers=1)
    assert {int(status) for status in loader} == {-signal.SIGTERM}


class TerminatedPrograms(Dataset[int]):
    """Returns the exit status of a program that got SIGTERM."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        with subprocess.Popen(["sleep", "600"]) as program:
            program.terminate()
        return program.returncode


if __name__ == "__main__":
    protect_data_workers()
    protect_data_workers()
    for method, persistent in (
        ("fork", True),
        ("fork", False),
        ("spawn", True),
        ("forkserver", True),
    ):
        outlive_signals(method, persistent=persistent)
        sys.stdout.write(f"{method}\n")
        sys.stdout.flush()
