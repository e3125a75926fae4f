"""``paceline stop`` on folders from anybody: only the launcher of a folder is signalled."""

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
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def started() -> Iterator[Any]:
    """Starts a program, and returns when it has said a word."""
    processes = []

    def start(code: str, *words: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"runs\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def planted(pid: int, **more: Any) -> Path:
    """A run directory that names a process."""
    folder = Path("runs/one")
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    (folder / ".paceline-probe").write_text("0" * 32)
    owner = {"host": socket.gethostname(), "pid": pid, "start": this_machine.start_time(pid),
             "since": "now", **more}  # fmt: skip
    (folder / "owner.json").write_text(json.dumps(owner))
    return folder


def stop(*words: str) -> Result:
    return CliRunner().invoke(program, ("stop", *words), prog_name="paceline")


@pytest.mark.parametrize("words", [(), ("one",), ("one", "--now")])
def test_a_process_that_a_folder_names_is_left_alone(started: Any, words: tuple[str, ...]) -> None:
    victim = started(VICTIM)
    planted(victim.pid)
    ended = stop(*words)
    assert isinstance(ended.exception, NodeError)
    assert f"process {victim.pid} is not the launcher of runs/one" in ended.exception.message
    assert victim.poll() is None


def test_a_link_to_a_file_of_the_process_makes_it_no_launcher(started: Any, tmp_path: Path) -> None:
    (tmp_path / "notes").touch()
    victim = started(VICTIM, str(tmp_path / "notes"))
    folder = planted(victim.pid)
    (folder / ".paceline-probe").unlink()
    (folder / ".paceline-probe").symlink_to(tmp_path / "notes")
    assert isinstance(stop("one").exception, NodeError)
    assert victim.poll() is None


def test_a_launcher_that_does_not_listen_yet_is_signalled(started: Any) -> None:
    launcher = started(LAUNCHER, "runs/one")
    owner = read_owner(Path("runs/one"))
    assert owner is not None
    assert is_launcher(Path("runs/one"), owner)
    Path("runs/one/plan.json").write_text("{}")
    threading.Thread(target=launcher.wait).start()  # a zombie would count as alive
    ended = stop("one")
    assert ended.exit_code == 0, ended.exception
    assert launcher.wait() == -signal.SIGTERM


class Fake:
    """Another run's launcher."""

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


@pytest.mark.parametrize("own", [True, False])
def test_a_run_is_stopped_by_its_own_folder_alone(started: Any, tmp_path: Path, own: bool) -> None:
    victim = started(VICTIM)
    folder = planted(victim.pid, run_id=RUN_ID)
    (tmp_path / "other").mkdir()

    async def run() -> tuple[Result, Fake]:
        fake = Fake(folder if own else tmp_path / "other")
        async with ControlServer(fake):  # type: ignore[arg-type]
            assert await asyncio.to_thread(request, RUN_ID, {"do": "state"}) is not None
            return await asyncio.to_thread(stop, "one"), fake

    ended, fake = asyncio.run(run())
    assert fake.stopped is own
    assert (ended.exit_code == 0) is own
    assert victim.poll() is None


# --- batches


@pytest.fixture
def cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's commands; the file that tells which jobs were cancelled."""
    told, programs = tmp_path / "cancelled", tmp_path / "bin"
    programs.mkdir()
    for name, text in {
        "sbatch": "echo 12",
        "scancel": f'echo "$@" >> {told}',
        "scontrol": f'[ -e {told} ] && s=CANCELLED || s=RUNNING; echo "JobId=12 JobState=$s"',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return told


def test_a_job_is_cancelled_by_the_folder_that_it_was_handed_in_from(cancelled: Path) -> None:
    submission.submit_job(load("slurm"), "the script", Path("runs/one"))
    shutil.copytree("runs/one", "runs/two")  # a copy of it names the same job
    refused = stop("two")
    assert isinstance(refused.exception, SettingError)
    assert "Slurm job 12 is left alone" in refused.exception.message
    assert not cancelled.exists()
    assert stop("one").exit_code == 0
    assert cancelled.read_text() == "12\n"


@pytest.mark.parametrize("seal", [{}, {"seal": "0" * 64}, {"seal": 7}, {"seal": "é"}])
def test_a_job_that_a_folder_names_is_left_alone(cancelled: Path, seal: Any) -> None:
    Path("runs/one").mkdir(parents=True)
    record = {"scheduler": "slurm", "job": "12", "output": "", "typed": "", **seal}
    Path("runs/one/batch.json").write_text(json.dumps(record))
    for words in ((), ("one",)):
        assert isinstance(stop(*words).exception, SettingError)
    assert not cancelled.exists()
