"""Tests that ``paceline stop`` signals only the launcher of a run directory, whoever wrote it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from paceline.agent.control import request
from paceline.cli import program
from paceline.launch.control import ControlServer
from paceline.remote import this_machine
from paceline.rundir.ownership import is_launcher, read_owner
from paceline.schedulers import load, submission
from paceline.spec.errors import NodeError, SettingError

RUN_ID = f"stop{os.getpid()}"
LAUNCHER = """
import sys, time
from pathlib import Path
from paceline.rundir.directory import RunDirectory
directory = RunDirectory(Path(sys.argv[1]))
print("runs", flush=True)
time.sleep(600)
"""
VICTIM = """
import sys, time
held = [open(name) for name in sys.argv[1:]]
print("runs", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _isolate_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def start_program() -> Iterator[Any]:
    """Returns a function that starts a program and waits for its first line."""
    processes = []

    def start(code: str, *arguments: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"runs\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def write_run_directory(pid: int, **fields: Any) -> Path:
    """Creates a run directory whose owner file names a process."""
    folder = Path("runs/one")
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    (folder / ".paceline-probe").write_text("0" * 32)
    owner = {"host": socket.gethostname(), "pid": pid, "start": this_machine.start_time(pid),
             "since": "now", **fields}  # fmt: skip
    (folder / "owner.json").write_text(json.dumps(owner))
    return folder


def stop(*arguments: str) -> Result:
    return CliRunner().invoke(program, ("stop", *arguments), prog_name="paceline")


@pytest.mark.parametrize("arguments", [(), ("one",), ("one", "--now")])
def test_spares_process_that_is_not_launcher(
    start_program: Any, arguments: tuple[str, ...]
) -> None:
    victim = start_program(VICTIM)
    write_run_directory(victim.pid)
    result = stop(*arguments)
    assert isinstance(result.exception, NodeError)
    assert f"process {victim.pid} is not the launcher of runs/one" in result.exception.message
    assert victim.poll() is None


def test_symlinked_probe_does_not_identify_launcher(start_program: Any, tmp_path: Path) -> None:
    (tmp_path / "notes").touch()
    victim = start_program(VICTIM, str(tmp_path / "notes"))
    folder = write_run_directory(victim.pid)
    (folder / ".paceline-probe").unlink()
    (folder / ".paceline-probe").symlink_to(tmp_path / "notes")
    assert isinstance(stop("one").exception, NodeError)
    assert victim.poll() is None


def test_signals_launcher_before_it_listens(start_program: Any) -> None:
    launcher = start_program(LAUNCHER, "runs/one")
    owner = read_owner(Path("runs/one"))
    assert owner is not None
    assert is_launcher(Path("runs/one"), owner)
    Path("runs/one/plan.json").write_text("{}")
    threading.Thread(target=launcher.wait).start()  # reaps it: a zombie would count as alive
    result = stop("one")
    assert result.exit_code == 0, result.exception
    assert launcher.wait() == -signal.SIGTERM


class FakeLauncher:
    """Stands in for the launcher of another run."""

    run_id = RUN_ID

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.stopped = run_dir, False

    def stop(self, *, immediately: bool = False) -> str:
        self.stopped = True
        (self.run_dir / "owner.json").unlink()
        (self.run_dir / "result.json").write_text('{"exit_code": 143}')
        return "stopping"

    def state(self) -> dict[str, Any]:
        return {"run_id": self.run_id, "run_dir": str(self.run_dir.absolute())}


@pytest.mark.parametrize("is_run_directory", [True, False])
def test_stops_run_only_from_its_run_directory(
    start_program: Any, tmp_path: Path, is_run_directory: bool
) -> None:
    victim = start_program(VICTIM)
    folder = write_run_directory(victim.pid, run_id=RUN_ID)
    (tmp_path / "other").mkdir()

    async def run() -> tuple[Result, FakeLauncher]:
        fake = FakeLauncher(folder if is_run_directory else tmp_path / "other")
        async with ControlServer(fake):  # type: ignore[arg-type]
            assert await asyncio.to_thread(request, RUN_ID, {"do": "state"}) is not None
            return await asyncio.to_thread(stop, "one"), fake

    result, fake = asyncio.run(run())
    assert fake.stopped is is_run_directory
    assert (result.exit_code == 0) is is_run_directory
    assert victim.poll() is None


# --- batch jobs


@pytest.fixture
def cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts stand-ins for Slurm's commands on the PATH; returns the file of cancelled jobs."""
    cancel_log, programs = tmp_path / "cancelled", tmp_path / "bin"
    programs.mkdir()
    for name, text in {
        "sbatch": "echo 12",
        "scancel": f'echo "$@" >> {cancel_log}',
        "scontrol": f'[ -e {cancel_log} ] && s=CANCELLED || s=RUNNING; echo "JobId=12 JobState=$s"',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return cancel_log


def test_cancels_job_only_from_submit_folder(cancelled: Path) -> None:
    submission.submit_job(load("slurm"), "the script", Path("runs/one"))
    shutil.copytree("runs/one", "runs/two")  # a copy that names the same job
    refusal = stop("two")
    assert isinstance(refusal.exception, SettingError)
    assert "Slurm job 12 is left alone" in refusal.exception.message
    assert not cancelled.exists()
    assert stop("one").exit_code == 0
    assert cancelled.read_text() == "12\n"


@pytest.mark.parametrize("seal", [{}, {"seal": "0" * 64}, {"seal": 7}, {"seal": "é"}])
def test_spares_job_without_valid_seal(cancelled: Path, seal: Any) -> None:
    Path("runs/one").mkdir(parents=True)
    record = {"scheduler": "slurm", "job": "12", "output": "", "typed": "", **seal}
    Path("runs/one/batch.json").write_text(json.dumps(record))
    for arguments in ((), ("one",)):
        assert isinstance(stop(*arguments).exception, SettingError)
    assert not cancelled.exists()
