"""A run is come back to: from other terminals, from other machines, several at once.

The supervisor of these runs is a launcher that was started on a host of the lab.
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


def typed(where: Path, *words: str, **how: Any) -> subprocess.Popen[str]:
    """``paceline WORDS`` in a folder, under way."""
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    how = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
    argv = [sys.executable, "-m", "paceline", *words]
    return subprocess.Popen(argv, env=env, cwd=where, text=True, **how)


def said(where: Path, *words: str) -> tuple[int, str, str]:
    """The same to its end: status, and what it wrote."""
    with typed(where, *words) as process:
        out, err = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, out, err


@contextlib.contextmanager
def left(site: Site, *job: str, launched_in: Path) -> Iterator[tuple[DetachedRecord, Path]]:
    """A run that a launcher on n1 has in the place of a detached one; and its folder there."""
    home, inside = site.lab.home("n1"), site.lab.home_inside()
    site.runs += 1
    run = f"left-{site.runs}"
    argv = [sys.executable, "-m", "paceline", "run", "-H", "local", "--run-dir", f"{inside}/{run}",
            "--no-torch", *job]  # fmt: skip
    process = site.lab.popen("n1", argv, env={"PYTHONPATH": str(SOURCE)}, cwd=site.project,
                             stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        owner = home / run / "owner.json"
        assert eventually(lambda: (home / run / "plan.json").exists())
        mark = json.loads(owner.read_text())
        about = DetachedRecord(
            mark["run_id"], "job", ("paceline", "run", *job), ("n1",), time.time(),
            f"{getpass.getuser()}@{socket.gethostname()}", str(launched_in), mark["host"],
            mark["pid"], mark["start"], f"{inside}/{run}",
        )  # fmt: skip
        folder = home / ".cache" / "paceline" / "detached" / about.run_id
        folder.mkdir(parents=True)
        (folder / "about.json").write_text(json.dumps(about.to_json()))
        yield about, folder
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


def leads_there(site: Site, about: DetachedRecord, folder: Path) -> None:
    """What a launching machine keeps of a run that it has left."""
    folder.mkdir(parents=True)
    config = str(site.lab.ssh_config)
    there = SupervisorLocation(
        about.run_id, "n1", "n1", "/x", about.started - 1, python=sys.executable, ssh_config=config
    )
    detached_file.write(folder, there)


def test_a_run_on_a_host_is_looked_at_from_two_places_ended_and_comes_home(
    site: Site, tmp_path: Path
) -> None:
    here, other = tmp_path / "here", tmp_path / "other"
    other.mkdir()
    folder = here / "runs" / "one"
    with left(site, "count.py", "30000", "0.02", launched_in=folder) as (about, there):
        leads_there(site, about, folder)
        code, out, _ = said(here, "status")
        assert code == 0
        assert "running" in out
        assert "supervisor: on n1" in out
        hosts = ["-H", "n1", "--ssh-config", str(site.lab.ssh_config)]
        code, out, _ = said(other, "runs", *hosts)
        assert code == 0
        assert "one @n1" in out
        assert "running" in out
        with (
            typed(here, "attach") as first,
            typed(other, "attach", *hosts) as second,
            typed(here, "logs", "-f", "one") as logs,
        ):
            log = Path("runs/one/logs") / mark_host(there) / "0.log"
            for place in (here, other):
                assert eventually(lambda place=place: (place / log).exists())  # type: ignore[misc]
                assert eventually(lambda p=place: b"out 5" in (p / log).read_bytes())  # type: ignore[misc]
            code, _, err = said(here, "stop", "one")
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
        assert eventually(lambda: not there.exists())  # everything is at home
        code, out, _ = said(here, "runs")
        assert "stopped" in out
        assert said(here, "attach", "one")[0] == 143  # what was to be seen is over


def mark_host(there: Path) -> str:
    """The name of the one host in the run's logs."""
    about = json.loads((there / "about.json").read_text())
    run = there.parents[3] / Path(about["run"]).name
    assert eventually(lambda: any((run / "logs").glob("*/0.log")))
    return next((run / "logs").glob("*/0.log")).parent.name


def test_ctrl_c_ends_a_run_on_a_host_and_a_closed_terminal_leaves_it(
    site: Site, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "two"
    with left(site, "count.py", "30000", "0.02", launched_in=folder) as (about, there):
        leads_there(site, about, folder)
        ends = {}
        for signum in (signal.SIGHUP, signal.SIGINT):
            file = tmp_path / f"{signum}.err"
            with file.open("w") as err, typed(tmp_path, "attach", stderr=err) as attached:
                assert eventually(lambda f=file: "Ctrl-C stops" in f.read_text())  # type: ignore[misc]
                attached.send_signal(signum)
                attached.communicate(timeout=TIMEOUT_S)
            ends[signum] = attached.returncode, file.read_text()
        code, said_then = ends[signal.SIGHUP]
        assert code == 0
        assert "the run continues; to attach again: paceline attach two" in said_then
        code, said_then = ends[signal.SIGINT]
        assert code == 143, said_then
        assert "once more to stop at once" in said_then
        assert eventually(lambda: not there.exists())  # who was hung up on may be leaving


def test_a_host_that_cannot_be_asked_is_told_and_what_is_known_is_shown(
    site: Site, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "three"
    folder.mkdir(parents=True)
    there = SupervisorLocation(
        "ab" * 6, "n1", "n1", "/x", 5.0, port=1, ssh_config=str(site.lab.ssh_config)
    )
    detached_file.write(folder, there)
    code, out, err = said(tmp_path, "status", "three")
    assert code == 1
    assert "runs/three: running" in out
    assert "which cannot be asked now" in err
    for words in (["attach"], ["stop"], ["logs", "-f"]):
        code, _, err = said(tmp_path, *words, "three")
        assert code == 1, words
        assert "the run is on n1" in err
    code, out, err = said(tmp_path, "runs")
    assert code == 0
    assert "n1 could not be asked" in err
    nobody = SupervisorLocation(
        "ab" * 6, "n1", "n1", "/x", 5.0, ssh_config=str(site.lab.ssh_config)
    )
    detached_file.write(folder, nobody)
    code, _, err = said(tmp_path, "attach", "three")
    assert code == 1
    assert "has no run" in err


def test_a_run_of_another_terminal_saves_tells_and_goes_on(tmp_path: Path) -> None:
    project = project_at(tmp_path / "project")
    out = (tmp_path / "out").open("wb")
    with out, typed(project, "run", "-H", "local", "-p", "2", "--run-dir", "runs/four", "keep.py",
                    stdout=out, stderr=out) as launcher:  # fmt: skip
        folder = project / "runs" / "four"
        assert eventually(lambda: "step 3" in log_of(folder)), (tmp_path / "out").read_text()
        run_id = json.loads((folder / "owner.json").read_text())["run_id"]
        text = (request(run_id, {"do": "save"}) or {})["text"]
        (made,) = (one for one in (folder / "checkpoints").iterdir() if one.is_dir())
        assert text.startswith(f"checkpoint of step {made.name} is complete")
        again = (request(run_id, {"do": "save"}) or {})["text"]
        assert again != text
        stacks = (request(run_id, {"do": "stacks"}) or {})["text"]
        assert "rank 1 on" in stacks
        assert len(list((folder / "stacks").iterdir())) == 1
        ours, theirs = pty.openpty()
        with typed(project, "attach", "--lines", stdin=theirs, stdout=theirs,
                   stderr=theirs, start_new_session=True) as attached:  # fmt: skip
            os.close(theirs)
            shown = read_until(ours, b"leaves it running")
            attached.send_signal(signal.SIGTSTP)
            shown += read_until(ours, b"to attach again")
            attached.wait(TIMEOUT_S)
        os.close(ours)
        assert attached.returncode == 0, shown
        assert launcher.poll() is None
        code, _, err = said(project, "stop")
        assert code == 0, err
        launcher.wait(TIMEOUT_S)
    assert launcher.returncode == 143
    kinds = [json.loads(line)["event"] for line in (folder / "events.jsonl").open()]
    assert kinds.count("saving") == kinds.count("checkpoint") - 1 == 2  # and one at the stop


def log_of(folder: Path) -> str:
    return "".join(file.read_text() for file in folder.glob("logs/*/0.log"))


def read_until(fd: int, text: bytes) -> bytes:
    """What a terminal shows, until a text is there or it ends."""
    shown = b""
    while text not in shown:
        try:
            shown += os.read(fd, 1 << 16)
        except OSError:
            break
    return shown
