"""Tests attaching to a run from other terminals and machines, several at the same time.

A launcher on a lab host stands in for the supervisor of these runs.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import SOURCE, TIMEOUT_S, Site, eventually, project_at

from paceline.agent.control import request
from paceline.rundir import detached_file
from paceline.spec.detached import DetachedRecord, SupervisorLocation

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def site(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("attach")
    project = project_at(folder / "project")
    return Site(new_lab(hosts=2, share=(str(project),)), project)


def launch(working_dir: Path, *arguments: str, **kwargs: Any) -> subprocess.Popen[str]:
    """Starts ``paceline WORDS`` in a folder."""
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    kwargs = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        **kwargs,
    }
    argv = [sys.executable, "-m", "paceline", *arguments]
    return subprocess.Popen(argv, env=env, cwd=working_dir, text=True, **kwargs)


def run_cli(working_dir: Path, *arguments: str) -> tuple[int, str, str]:
    """Runs ``paceline WORDS`` to its end; returns its status and its two outputs."""
    with launch(working_dir, *arguments) as process:
        out, err = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, out, err


@contextlib.contextmanager
def detached_run(site: Site, *job: str, launched_in: Path) -> Iterator[tuple[DetachedRecord, Path]]:
    """Runs a launcher on n1 in place of a supervisor; yields its record and its folder there."""
    home, remote = site.lab.home("n1"), site.lab.home_inside()
    site.runs += 1
    run = f"left-{site.runs}"
    argv = [sys.executable, "-m", "paceline", "run", "-H", "local", "--run-dir", f"{remote}/{run}",
            "--no-torch", *job]  # fmt: skip
    process = site.lab.popen("n1", argv, env={"PYTHONPATH": str(SOURCE)}, cwd=site.project,
                             stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        owner = home / run / "owner.json"
        assert eventually(lambda: (home / run / "plan.json").exists())
        mark = json.loads(owner.read_text())
        record = DetachedRecord(
            mark["run_id"], "job", ("paceline", "run", *job), ("n1",), time.time(),
            f"{getpass.getuser()}@{socket.gethostname()}", str(launched_in), mark["host"],
            mark["pid"], mark["start"], f"{remote}/{run}",
        )  # fmt: skip
        folder = home / ".cache" / "paceline" / "detached" / record.run_id
        folder.mkdir(parents=True)
        (folder / "about.json").write_text(json.dumps(record.to_json()))
        yield record, folder
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


def write_location(site: Site, record: DetachedRecord, folder: Path) -> None:
    """Writes the files that a launching machine keeps of a detached run."""
    folder.mkdir(parents=True)
    config = str(site.lab.ssh_config)
    location = SupervisorLocation(
        record.run_id,
        "n1",
        "n1",
        "/x",
        record.started - 1,
        python=sys.executable,
        ssh_config=config,
    )
    detached_file.write(folder, location)


def test_attach_and_stop_from_two_folders(site: Site, tmp_path: Path) -> None:
    launch_folder, second_folder = tmp_path / "here", tmp_path / "other"
    second_folder.mkdir()
    folder = launch_folder / "runs" / "one"
    with detached_run(site, "count.py", "30000", "0.02", launched_in=folder) as (record, location):
        write_location(site, record, folder)
        code, out, _ = run_cli(launch_folder, "status")
        assert code == 0
        assert "running" in out
        assert "supervisor: on n1" in out
        hosts = ["-H", "n1", "--ssh-config", str(site.lab.ssh_config)]
        code, out, _ = run_cli(second_folder, "runs", *hosts)
        assert code == 0
        assert "one @n1" in out
        assert "running" in out
        with (
            launch(launch_folder, "attach") as first,
            launch(second_folder, "attach", *hosts) as second,
            launch(launch_folder, "logs", "-f", "one") as logs,
        ):
            log = Path("runs/one/logs") / mark_host(location) / "0.log"
            for place in (launch_folder, second_folder):
                assert eventually(lambda place=place: (place / log).exists())  # type: ignore[misc]
                assert eventually(lambda p=place: b"out 5" in (p / log).read_bytes())  # type: ignore[misc]
            code, _, err = run_cli(launch_folder, "stop", "one")
            assert code == 0, err
            assert "stopped" in err
            first_out, first_err = first.communicate(timeout=TIMEOUT_S)
            second_out, second_err = second.communicate(timeout=TIMEOUT_S)
            logged, _ = logs.communicate(timeout=TIMEOUT_S)
        assert first.returncode == second.returncode == 143, (first_err, second_err)
        assert logs.returncode == 0
        assert "/0] 0 out " in first_out
        assert "/0] 0 out " in second_out
        assert "/0] 0 out 0 " in logged
        assert "stopped by SIGTERM" in first_err
        assert json.loads((folder / "result.json").read_text())["interrupted"] == 15
        assert eventually(lambda: not location.exists())  # all results have been fetched
        code, out, _ = run_cli(launch_folder, "runs")
        assert "stopped" in out
        assert run_cli(launch_folder, "attach", "one")[0] == 143  # the run has ended


def mark_host(location: Path) -> str:
    """Returns the name of the only host in the run's logs."""
    record = json.loads((location / "about.json").read_text())
    run = location.parents[3] / Path(record["run"]).name
    assert eventually(lambda: any((run / "logs").glob("*/0.log")))
    return next((run / "logs").glob("*/0.log")).parent.name


def test_ctrl_c_stops_run_but_hangup_does_not(site: Site, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "two"
    with detached_run(site, "count.py", "30000", "0.02", launched_in=folder) as (record, location):
        write_location(site, record, folder)
        results = {}
        for signum in (signal.SIGHUP, signal.SIGINT):
            file = tmp_path / f"{signum}.err"
            with file.open("w") as err, launch(tmp_path, "attach", stderr=err) as attached:
                assert eventually(lambda f=file: "Ctrl-C stops" in f.read_text())  # type: ignore[misc]
                attached.send_signal(signum)
                shown, _ = attached.communicate(timeout=TIMEOUT_S)
            results[signum] = attached.returncode, file.read_text()
        code, printed = results[signal.SIGHUP]
        assert code == 0
        assert "the run continues; to attach again: paceline attach two" in printed
        code, printed = results[signal.SIGINT]
        assert code == 143, printed
        assert "once more to stop at once" in printed
        (log,) = (folder / "logs").glob("*/0.log")
        assert "KeyboardInterrupt" in log.read_text()
        assert "KeyboardInterrupt" not in shown  # the traceback would tell nothing new
        assert eventually(lambda: not location.exists())  # the hung-up process may still be exiting


def test_unreachable_supervisor_is_reported(site: Site, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "three"
    folder.mkdir(parents=True)
    location = SupervisorLocation(
        "ab" * 6, "n1", "n1", "/x", 5.0, port=1, ssh_config=str(site.lab.ssh_config)
    )
    detached_file.write(folder, location)
    code, out, err = run_cli(tmp_path, "status", "three")
    assert code == 1
    assert "runs/three: running" in out
    assert "which cannot be asked now" in err
    for arguments in (["attach"], ["stop"], ["logs", "-f"]):
        code, _, err = run_cli(tmp_path, *arguments, "three")
        assert code == 1, arguments
        assert "the run is on n1" in err
    code, out, err = run_cli(tmp_path, "runs")
    assert code == 0
    assert "n1 could not be asked" in err
    missing_run = SupervisorLocation(
        "ab" * 6, "n1", "n1", "/x", 5.0, ssh_config=str(site.lab.ssh_config)
    )
    detached_file.write(folder, missing_run)
    code, _, err = run_cli(tmp_path, "attach", "three")
    assert code == 1
    assert "has no run" in err


def test_control_requests_and_ctrl_z_do_not_end_run(tmp_path: Path) -> None:
    project = project_at(tmp_path / "project")
    out = (tmp_path / "out").open("wb")
    with out, launch(project, "run", "-H", "local", "-p", "2", "--run-dir", "runs/four", "keep.py",
                    stdout=out, stderr=out) as launcher:  # fmt: skip
        folder = project / "runs" / "four"
        assert eventually(lambda: "step 3" in log_of(folder)), (tmp_path / "out").read_text()
        run_id = json.loads((folder / "owner.json").read_text())["run_id"]
        text = (request(run_id, {"do": "save"}) or {})["text"]
        (checkpoint,) = (path for path in (folder / "checkpoints").iterdir() if path.is_dir())
        assert text.startswith(f"checkpoint of step {checkpoint.name} is complete")
        second_reply = (request(run_id, {"do": "save"}) or {})["text"]
        assert second_reply != text
        stacks = (request(run_id, {"do": "stacks"}) or {})["text"]
        assert "rank 1 on" in stacks
        assert len(list((folder / "stacks").iterdir())) == 1
        master_fd, terminal_fd = pty.openpty()
        with launch(project, "attach", "--lines", stdin=terminal_fd, stdout=terminal_fd,
                   stderr=terminal_fd, start_new_session=True) as attached:  # fmt: skip
            os.close(terminal_fd)
            output = read_until(master_fd, b"leaves it running")
            attached.send_signal(signal.SIGTSTP)
            output += read_until(master_fd, b"to attach again")
            attached.wait(TIMEOUT_S)
        os.close(master_fd)
        assert attached.returncode == 0, output
        assert launcher.poll() is None
        code, _, err = run_cli(project, "stop")
        assert code == 0, err
        launcher.wait(TIMEOUT_S)
    assert launcher.returncode == 143
    kinds = [json.loads(line)["event"] for line in (folder / "events.jsonl").open()]
    assert kinds.count("saving") == kinds.count("checkpoint") - 1 == 2  # plus one at the stop


def log_of(folder: Path) -> str:
    return "".join(file.read_text() for file in folder.glob("logs/*/0.log"))


def read_until(fd: int, text: bytes) -> bytes:
    """Reads a terminal until a text appears or the terminal is closed."""
    output = b""
    while text not in output:
        try:
            output += os.read(fd, 1 << 16)
        except OSError:
            break
    return output
