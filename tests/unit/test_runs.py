"""Tests which run and which lines of its logs a command selects by default."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from paceline.cli import program
from paceline.cli.runs import attached, run_end, run_lookup
from paceline.cli.runs import state as run_state
from paceline.cli.runs.describe import describe_run
from paceline.cli.runs.rank_logs import MAX_LINE_BYTES, last_lines
from paceline.cli.verbs import report
from paceline.explain.conclusion import conclude
from paceline.explain.evidence_reader import from_run
from paceline.explain.rules import load_all
from paceline.launch.terminal.run_state import NodeWait, RunState
from paceline.report import explanation, record
from paceline.rundir import records
from paceline.rundir.outputs import Output, OutputJournal
from paceline.rundir.ownership import FETCHED_AT, LAST_STATUS
from paceline.schedulers.scheduler import JobState
from paceline.schedulers.submission import SubmittedJob
from paceline.spec.detached import DETACHED, SupervisorLocation
from paceline.spec.errors import ConnectError, SettingError
from paceline.spec.events import Event
from paceline.spec.failure import Failure
from paceline.spec.failure import Result as RunResult

ALIVE = 4711  # a process id that is treated as alive


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for module in (run_state, run_lookup):
        monkeypatch.setattr(module, "owner_alive", lambda owner: owner["pid"] == ALIVE)


def make_run(name: str, *, alive: bool = False, code: int | None = 0, age: int = 0) -> Path:
    folder = Path("runs") / name
    (folder / "logs" / "n1").mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    owner = {"host": "x", "pid": ALIVE if alive else 7, "start": 1, "since": "now"}
    (folder / "owner.json").write_text(json.dumps(owner))
    if code is not None and not alive:
        (folder / "result.json").write_text(json.dumps({"exit_code": code}))
    os.utime(folder, (1e9 - age, 1e9 - age))
    return folder


def run_cli(*argv: str) -> Result:
    return CliRunner().invoke(program, argv, prog_name="paceline")


def test_prefers_running_run_over_newest() -> None:
    make_run("old", alive=True, age=100)
    make_run("new")
    assert "runs/old: running" in run_cli("status").output
    assert [str(path) for path in run_lookup.running_runs()] == ["runs/old"]


def test_newest_run_ignores_modification_time() -> None:
    for name, start in (("old", 10.0), ("new", 20.0)):
        (make_run(name) / "events.jsonl").write_text(json.dumps({"time": start}) + "\n")
    os.utime("runs/old", (2e9, 2e9))  # as if explain had written a file there
    assert run_lookup.newest_runs(Path("runs")) == ["new", "old"]


def test_newest_run_is_the_one_started_last() -> None:
    for name, starts, code in (("once", (20.0,), 0), ("again", (10.0, 30.0), 1)):
        folder = make_run(name, code=code)
        (folder / "owner.json").unlink()
        events = [{"time": start, "event": "connected"} for start in starts]
        events.append({"time": 40.0, "event": "connected", "late": True})
        (folder / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in events))
    assert run_lookup.newest_runs(Path("runs")) == ["again", "once"]
    assert run_cli("explain").output.splitlines()[0] == "runs/again:"
    assert run_cli("explain", "once").output.startswith("nothing went wrong")


def test_running_runs_include_measurements() -> None:
    make_run("scaling/2x1-1", alive=True)
    assert [str(path) for path in run_lookup.running_runs()] == ["runs/scaling/2x1-1"]


def test_status_but_not_stop_defaults_to_newest_run() -> None:
    make_run("old", age=100)
    make_run("new", code=3)
    assert "runs/new: failed, exit status 3" in run_cli("status").output
    stopped = run_cli("stop")
    assert stopped.exit_code == 0
    assert "no run below runs/ is running" in stopped.output
    assert "runs/old: finished already" in run_cli("stop", "old").output


@pytest.mark.parametrize("verb", ["status", "logs", "stop"])
def test_rejects_ambiguous_running_runs(verb: str) -> None:
    make_run("one", alive=True)
    make_run("two", alive=True)
    rejected = run_cli(verb)
    assert isinstance(rejected.exception, SettingError)
    assert "2 runs are running" in rejected.exception.message
    assert {"runs/one", "runs/two"} == set(rejected.exception.found.splitlines())


def test_run_directory_from_settings() -> None:
    make_run("one")
    make_run("two", age=100, code=7)
    Path("paceline.toml").write_text('[run]\nrun-dir = "runs/two"\n')
    assert "runs/two: failed, exit status 7" in run_cli("status").output
    assert "runs/one" in run_cli("status", "one").output
    rejected = run_cli("status", "one", "--run-dir", "runs/two")
    assert isinstance(rejected.exception, SettingError)


def test_logs_host_and_tail() -> None:
    folder = make_run("one")
    (folder / "logs" / "n2").mkdir()
    (folder / "logs" / "n1" / "0.log").write_text("a\nb\nc\n")
    (folder / "logs" / "n2" / "1.log").write_text("d\ne")
    assert run_cli("logs", "--tail", "1").output.splitlines() == ["[n1/0] c", "[n2/1] e"]
    last = ["[n1/0] b", "[n1/0] c", "[n2/1] d", "[n2/1] e"]
    assert run_cli("logs", "-n", "2").output.splitlines() == last
    assert run_cli("logs", "--host", "n2").output.splitlines() == last[2:]
    rejected = run_cli("logs", "--host", "n3")
    assert isinstance(rejected.exception, SettingError)
    assert "n1/0, n2/1" in rejected.exception.found


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_logs_show_progress_bar_as_single_line(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("paceline.cli.runs.rank_logs.READ_BYTES", size)
    folder = make_run("one")
    bar = "".join(f"\rstep {step}/300" for step in range(300))
    (folder / "logs" / "n1" / "0.log").write_text(f"begins\n{bar}")
    assert run_cli("logs").output.splitlines() == ["[n1/0] begins", "[n1/0] step 299/300"]
    assert run_cli("logs", "--tail", "1").output.splitlines() == ["[n1/0] step 299/300"]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reads_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("paceline.cli.runs.rank_logs.READ_BYTES", size)
    path = tmp_path / "log"
    for text in ("", "a", "a\n", "a\nb", "a\nb\n", "\n\n\n", "a\nb\nc\nd\n",
                 "a\n\rb\rc\nd\r"):  # fmt: skip
        path.write_bytes(text.encode())
        for count in range(5):
            with path.open("rb") as file:
                tail = last_lines(file, count).decode().removesuffix("\n").split("\n")
                assert file.read() == b""
            lines = text.removesuffix("\n").split("\n")
            assert tail == (lines[-count:] if count else [""])


def test_logs_show_only_ends_of_long_last_lines() -> None:
    """A sparse file of zeros would fill the terminal."""
    log = make_run("one") / "logs" / "n1" / "0.log"
    with log.open("wb") as file:
        file.truncate(50 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"the end\nlast\n")
    long_line, last_line = run_cli("logs", "--tail", "2").output.splitlines()
    assert long_line.startswith("[n1/0] [long line] ")
    assert long_line.endswith("the end")
    assert len(long_line) < 5 * MAX_LINE_BYTES
    assert last_line == "[n1/0] last"


def test_status_names_current_straggler() -> None:
    folder = make_run("one", alive=True)
    straggler_event = {
        "event": "straggler",
        "straggler": 1,
        "its_host": "n2",
        "text": "rank 1 on n2 is late",
    }
    train = {"split": "train", "step": 5, "loss": 0.5}
    pace = {"split": "pace", "step": 5, "computing_s": 0.1}
    (folder / "events.jsonl").write_text(json.dumps(straggler_event) + "\n")
    (folder / "metrics.jsonl").write_text(f"{json.dumps(train)}\n{json.dumps(pace)}\n")
    ranks_record = {"time": time.time(), "ranks": [], "hang": ""}
    (folder / "ranks.json").write_text(json.dumps(ranks_record))
    summary = run_cli("status").output
    assert "slow: rank 1 on n2 is late" in summary
    assert "loss 0.5" in summary
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({**straggler_event, "event": "straggler over"}) + "\n")
    assert "slow:" not in run_cli("status").output


def test_status_shows_node_wait() -> None:
    folder = make_run("one", alive=True)
    node_wait = NodeWait.start(
        "1 node of at least 2: dialling n2 again, for up to 10 minutes", 600.0
    )
    ranks = [{"rank": 0, "host": "n1", "phase": "running", "state": "failed", "trouble": "SIGTERM"}]
    ranks_record = {"time": time.time(), "ranks": ranks, "hang": "", "waits": asdict(node_wait)}
    (folder / "ranks.json").write_text(json.dumps(ranks_record))
    at = [
        time.strftime("%H:%M:%S", time.localtime(moment))
        for moment in (node_wait.since, node_wait.until)
    ]
    summary = run_cli("status", "one").output
    assert "runs/one: running, waits for nodes\n" in summary
    assert f"  {node_wait.text}, since {at[0]}, until " in summary
    assert f"{at[1]}\n" in summary
    assert "SIGTERM" not in summary  # not the end of the ranks in the previous start
    state = json.loads(run_cli("status", "one", "--json").output)
    assert (state["state"], state["waits"]) == ("running", asdict(node_wait))
    rows = json.loads(run_cli("runs", "--json").output)["runs"]
    assert [row["state"] for row in rows] == ["waiting"]
    (folder / "ranks.json").write_text(json.dumps({**ranks_record, "waits": None}))
    assert "runs/one: running\n" in run_cli("status", "one").output


@pytest.mark.parametrize(("age_s", "has_ended", "told"), [(1, False, True), (60, False, False),
                                                   (1, True, False)])  # fmt: skip
def test_status_of_batch_shows_recent_ranks(
    age_s: float, has_ended: bool, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old information is not shown: the job may be waiting in the queue again."""
    folder = make_run("batch", code=None)
    state = JobState("RUNNING", is_over=has_ended, exit_code=0)
    monkeypatch.setattr(SubmittedJob, "state", lambda job: state)
    (folder / "batch.json").write_text('{"scheduler": "slurm", "job": "2"}')
    ranks_record = {"time": time.time() - age_s, "ranks": [], "hang": "rank 1 on n2 sleeps"}
    (folder / "ranks.json").write_text(json.dumps(ranks_record))
    summary = describe_run(run_state.read_state(folder))
    assert "RUNNING" in summary
    assert ("hangs: rank 1 on n2 sleeps" in summary) == told


def test_status_says_when_hang_was_reported() -> None:
    folder = make_run("one", alive=True)
    reported_at = time.time() - 600
    states = RunState()
    hang = Event("hang", "n2", 1, reported_at, {"text": "rank 1 on n2 is frozen for 3 s"})
    states.apply(hang, 1.0)
    (folder / "ranks.json").write_text(json.dumps(states.to_json(1.0, time.time())))
    at = time.strftime("%H:%M:%S", time.localtime(reported_at))
    hang_line = f"  hangs: rank 1 on n2 is frozen for 3 s (reported at {at})\n"
    assert hang_line in run_cli("status", "one").output


def test_wait_of_days_shows_date() -> None:
    assert NodeWait("x", 1e9, 1e9 + 60).description.count("-") == 0
    assert NodeWait("x", 1e9, 1e9 + 3 * 86400).description.count("-") == 2


def test_session_without_launcher_is_no_unstarted_run() -> None:
    folder = Path("runs/plain")
    folder.mkdir(parents=True)
    joined = {"time": time.time(), "event": "joined", "rank": 0, "world": 1}
    (folder / "events.jsonl").write_text(json.dumps(joined) + "\n")
    assert run_state.read_state(folder).word == "no launcher"
    assert "runs/plain: no launcher\n" in run_cli("stop", "plain").stderr
    assert "no launcher recorded how this run ended" in run_cli("explain", "plain").output


def test_status_rounds_metrics() -> None:
    at = time.mktime((2026, 11, 26, 12, 3, 44, 0, 0, -1))
    last = {"step": 12, "time": at, "loss": 0.2478179237433748}
    summary = describe_run(run_state.RunState(Path("runs/a"), "finished", 0, last_metrics=last))
    assert "last record (12:03:44): step 12, loss 0.247818" in summary.splitlines()[-1]


def restart_run(name: str, *, alive: bool) -> Path:
    """Creates the folder of a run that failed, in which a later start has written nothing yet."""
    folder = make_run(name, alive=alive)
    owner = {"host": socket.gethostname(), "pid": ALIVE if alive else 1 << 30, "start": 1.0}
    (folder / "owner.json").write_text(json.dumps({**owner, "run_id": "second"}))
    failure = Failure("exception", "n1", 0, 1.0, headline="ValueError: x").to_json()
    result = {"run_id": "first", "exit_code": 1, "first_failure": failure}
    (folder / "result.json").write_text(json.dumps(result))
    rank = {"rank": 0, "host": "n1", "phase": "running", "state": "failed", "trouble": "ValueError"}
    ranks = {"run_id": "first", "time": 1000.0, "ranks": [rank], "hang": "rank 0 sleeps"}
    (folder / "ranks.json").write_text(json.dumps(ranks))
    return folder


def test_killed_launcher_in_reused_folder_is_lost() -> None:
    folder = restart_run("a", alive=False)
    summary = run_cli("status", "a").output
    assert "runs/a: lost\n  its launcher on " in summary
    assert "ValueError" not in summary
    assert json.loads(run_cli("runs", "--json").output)["runs"][0]["state"] == "lost"
    attached_run = run_cli("attach", "a")
    assert (attached_run.exit_code, "runs/a: lost" in attached_run.output) == (1, True)
    assert from_run(folder).launcher is not None
    assert not record.read(folder).has_result
    (folder / "result.json").write_text('{"run_id": "second", "exit_code": 0}')
    assert "runs/a: finished, exit status 0" in run_cli("status", "a").output
    assert record.read(folder).has_result
    assert from_run(folder).launcher is None


def test_status_shows_no_ranks_of_earlier_start() -> None:
    folder = restart_run("a", alive=True)
    state = run_state.read_state(folder)
    assert (state.word, state.ranks, state.hang) == ("running", (), "")
    (folder / "owner.json").unlink()
    location = SupervisorLocation("ab" * 6, "n2", "n2", "/x", 1000.0).to_json()
    (folder / DETACHED).write_text(json.dumps(location))
    state = run_state.read_state(folder)
    assert (state.word, state.ranks, state.hang) == ("running", (), "")
    ranks = {"run_id": "ab" * 6, "time": 1000.0, "ranks": [], "hang": "rank 1 sleeps"}
    (folder / "ranks.json").write_text(json.dumps(ranks))
    assert run_state.read_state(folder).hang == "rank 1 sleeps"


def test_ranks_without_run_id_count_if_written_since_the_start() -> None:
    folder = restart_run("a", alive=True)
    owner = json.loads((folder / "owner.json").read_text())
    ranks = json.loads((folder / "ranks.json").read_text())
    del ranks["run_id"]
    (folder / "ranks.json").write_text(json.dumps(ranks))  # of time 1000
    for start_s, hang in ((900.0, "rank 0 sleeps"), (1100.0, "")):
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start_s))
        (folder / "owner.json").write_text(json.dumps({**owner, "since": since}))
        assert run_state.read_state(folder).hang == hang
    (folder / "owner.json").write_text(json.dumps({**owner, "since": "yesterday"}))
    assert not run_state.read_state(folder).hang
    (folder / "owner.json").unlink()
    for start_s, hang in ((900.0, "rank 0 sleeps"), (1100.0, ""), (0.0, "")):
        location = SupervisorLocation("ab" * 6, "n2", "n2", "/x", start_s).to_json()
        (folder / DETACHED).write_text(json.dumps(location))
        assert run_state.read_state(folder).hang == hang


def test_earlier_dead_supervisor_is_no_cause_of_later_start() -> None:
    folder = make_detached_run("one", **{FETCHED_AT: 2000.0, LAST_STATUS: "lost"})
    (folder / "result.json").write_text('{"run_id": "second", "exit_code": 0}')
    assert conclude(from_run(folder), load_all()).text.startswith("nothing went wrong")
    owner = {"host": socket.gethostname(), "pid": 1 << 30, "start": 1.0, "run_id": "third"}
    (folder / "owner.json").write_text(json.dumps(owner))
    assert "one: lost\n  its launcher on " in run_cli("status", "one").output


def make_detached_run(name: str, **more: object) -> Path:
    """Creates the folder of a run whose supervisor is on another host."""
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    location = SupervisorLocation("ab" * 6, "n2", "n2", "/x", 1000.0).to_json()
    (folder / DETACHED).write_text(json.dumps({**location, **more}))
    return folder


def test_unfinished_detached_run_has_no_cause() -> None:
    folder = make_detached_run("one")
    summary = conclude(from_run(folder), load_all())
    assert summary.text.startswith("the run has not ended: its supervisor is on n2, since ")
    assert not summary.matches
    shown = explanation.lines(summary, from_run(folder))
    assert "`paceline status` says where its ranks are." in shown
    report.explain_if_missing(folder)
    assert not (folder / "findings.json").exists()
    summary = conclude(from_run(folder, confirmed=False), load_all())
    assert summary.text.startswith("the supervisor on n2 still runs or was killed")
    (folder / "result.json").write_text('{"exit_code": 0}')  # of an earlier start
    assert from_run(folder).launcher is not None
    result = {"run_id": "ab" * 6, "exit_code": 0}
    (folder / "result.json").write_text(json.dumps(result))  # meanwhile the result has arrived
    assert conclude(from_run(folder), load_all()).text.startswith("nothing went wrong")


def test_dead_supervisor_is_cause() -> None:
    folder = make_detached_run("one", **{FETCHED_AT: 2000.0, LAST_STATUS: "lost"})
    summary = conclude(from_run(folder), load_all())
    assert summary.text.startswith("the supervisor was killed or its host n2 restarted")
    assert [rule.code for rule, _ in summary.matches] == ["launcher-killed"]


def test_status_with_unreachable_supervisor_shows_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(path: Path, show: object) -> None:
        raise ConnectError("n2 cannot be reached")

    monkeypatch.setattr("paceline.cli.runs.sync.sync_run", unreachable)
    folder = make_detached_run("one")
    typed_command = {
        "command": "paceline run -H n1,n2 --detach train.py",
        "folder": str(Path.cwd()),
    }
    (folder / "plan.json").write_text(json.dumps({"typed": typed_command}))
    assert "gone for good" not in run_cli("status", "one").output  # there is no checkpoint here
    (folder / "checkpoints/450").mkdir(parents=True)
    (folder / "checkpoints/450/manifest.json").write_text("{}")
    output = run_cli("status", "one").output
    assert "  if that host is gone for good: rm runs/one/detached.json\n  to resume: " in output


def test_status_of_stopped_run_shows_resume_command() -> None:
    folder = make_run("one", code=130)
    (folder / "result.json").write_text('{"exit_code": 130, "interrupted": 2}')
    typed_command = {"command": "paceline run -H lab train.py", "folder": str(Path.cwd())}
    (folder / "plan.json").write_text(json.dumps({"typed": typed_command}))
    assert "to resume" not in run_cli("status", "one").output  # there is no checkpoint
    (folder / "checkpoints/450").mkdir(parents=True)
    (folder / "checkpoints/450/manifest.json").write_text("{}")
    summary = run_cli("status", "one").output
    assert summary.startswith("runs/one: stopped")
    assert "  to resume: paceline run --run-dir runs/one -H lab train.py" in summary


def test_resume_command_of_moved_run() -> None:
    folder = make_run("new", code=130)
    (folder / "result.json").write_text('{"exit_code": 130, "interrupted": 2}')
    typed_command = {
        "command": "paceline train image --run-dir runs/old",
        "folder": str(Path.cwd()),
    }
    (folder / "plan.json").write_text(json.dumps({"typed": typed_command}))
    (folder / "checkpoints/450").mkdir(parents=True)
    (folder / "checkpoints/450/manifest.json").write_text("{}")
    for selector in ("", " --resume never", " --resume=22", " --resume ../other"):
        typed_command["command"] = f"paceline train image --run-dir runs/old{selector}"
        (folder / "plan.json").write_text(json.dumps({"typed": typed_command}))
        shown = run_cli("status", "new").output
        assert "to resume: paceline train image --run-dir runs/new\n" in shown
    typed_command["command"] = "paceline run --run-dir=runs/old train.py --run-dir ckpt"
    (folder / "plan.json").write_text(json.dumps({"typed": typed_command}))
    resume_command = "paceline run --run-dir runs/new train.py --run-dir ckpt"
    assert f"to resume: {resume_command}\n" in run_cli("status", "new").output
    (Path("runs") / "old").mkdir()
    assert (
        "to resume: paceline run --run-dir=runs/old train.py --run-dir ckpt\n"
        in run_cli("status", "new").output
    )


@pytest.mark.parametrize(
    "command", ["rm -rf run", "./paceline run a.py", "paceline", "paceline stop one", "python run"]
)
def test_no_resume_command_for_unrelated_command(command: str) -> None:
    folder = make_run("one", code=130)
    (folder / "result.json").write_text('{"exit_code": 130, "interrupted": 2}')
    typed_command = {"command": command, "folder": str(Path.cwd())}
    (folder / "plan.json").write_text(json.dumps({"typed": typed_command}))
    (folder / "checkpoints/450").mkdir(parents=True)
    (folder / "checkpoints/450/manifest.json").write_text("{}")
    shown = run_cli("status", "one").output
    assert shown.startswith("runs/one: stopped")
    assert "to resume" not in shown


def test_status_of_run_with_dead_supervisor() -> None:
    folder = make_detached_run("one", **{FETCHED_AT: 2000.0, LAST_STATUS: "lost"})
    typed_command = {
        "command": "paceline run -H n1,n2 --detach 'my train.py'",
        "folder": str(Path.cwd()),
    }
    plan = {"typed": typed_command, "settings": {"lease_s": {"value": 7.0}},
            "nodes": [{"host": "n1"}, {"host": "n2"}]}  # fmt: skip
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "logs/n1").mkdir(parents=True)
    (folder / "logs/n1/0.log").write_text("a line\n")
    now = time.time()
    (folder / "ranks.json").write_text(json.dumps({"time": now, "ranks": [], "hang": ""}))
    summary = run_cli("status", "one").output
    assert "one: lost\n  its supervisor on n2 was killed, or its host went down " in summary
    assert time.strftime("at %Y-%m-%d %H:%M:%S", time.localtime(now)) in summary
    assert "  the nodes end their ranks: the lease was not renewed for 7 s\n" in summary
    assert "  checkpoint: none is recorded; a restart begins at step 0, unless the" in summary
    OutputJournal(folder).add([Output("out/a.pt", 1, "", "n1", "", 1, 1.0, 1)])
    suffix = "; a later one would lie on n1, where the next start finds it"
    assert f"  checkpoint of the script: out/a.pt{suffix}\n" in run_cli("status", "one").output
    (folder / "outputs.jsonl").unlink()
    resume_command = "paceline run --run-dir runs/one -H n1,n2 --detach 'my train.py'"
    assert f"  to resume: {resume_command}\n" in summary
    assert json.loads(run_cli("status", "one", "--json").output)["lost"]["again"] == resume_command
    ranks_record = {"time": now - 100, "ranks": [], "hang": ""}
    (folder / "ranks.json").write_text(json.dumps(ranks_record))
    saved = folder / "checkpoints/450"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    summary = run_cli("status", "one").output
    assert "went down 1 min 40 s ago" in summary
    assert "  the nodes have ended their ranks: " in summary
    assert "  checkpoint: step 450, in runs/one/checkpoints; a later one would lie on n1" in summary
    shown = run_cli("logs", "one")
    assert "[n1/0] a line" in shown.stdout
    assert f"  to resume: {resume_command}\n" in shown.stderr
    ended = run_cli("attach", "one")
    assert (ended.exit_code, f"  to resume: {resume_command}\n" in ended.output) == (1, True)
    os.chdir(folder)
    at = Path.cwd()
    resume_command = f"(in {at.parents[1]}): paceline run --run-dir {at} -H n1,n2"
    assert resume_command in run_cli("status", ".").output


def test_explain_run_by_name() -> None:
    make_run("one", code=0)
    (Path("runs/one/owner.json")).unlink()
    assert "nothing went wrong" in run_cli("explain", "one").output


def test_explain_names_nan_loss_of_run_that_ended_well() -> None:
    folder = make_run("one", code=0)
    (folder / "owner.json").unlink()
    (folder / "logs/n1/0.log").write_text("step 1 loss 2.5\nstep 2 loss nan\nstep 3 loss nan\n")
    assert run_cli("explain", "one").output.startswith("rank 0 on n1: the loss became nan\n")


@pytest.mark.parametrize("is_saved_again", [False, True])
def test_explain_names_failed_last_checkpoint_of_successful_run(is_saved_again: bool) -> None:
    folder = make_run("one", code=0)
    (folder / "owner.json").unlink()
    told = [
        {"event": "checkpoint", "rank": 0, "step": 10},
        {"event": "checkpoint failed", "rank": 0, "step": 20, "problem": "the disk is full"},
        *([{"event": "checkpoint", "rank": 0, "step": 30}] if is_saved_again else []),
    ]
    (folder / "events.jsonl").write_text("\n".join(map(json.dumps, told)))
    answer = "the run ended with status 0, but its last checkpoint was not saved: the disk is full"
    assert (answer in run_cli("explain", "one").output) != is_saved_again


def test_explain_lists_losses_of_successful_run() -> None:
    folder = make_run("one", code=0)
    (folder / "owner.json").unlink()
    told = [
        {"event": "recovery", "text": "rank 1 on n2 was killed: the other rank trained on"},
        {"event": "newcomer lost", "host": "n2", "rank": 1, "why": "killed by SIGKILL"},
        {"event": "started", "attempt": 1, "world_size": 2},
    ]
    (folder / "events.jsonl").write_text("\n".join(map(json.dumps, told)))
    assert run_cli("explain", "one").output.splitlines() == [
        "the run ended with status 0, although something was lost on the way",
        "    rank 1 on n2 was killed: the other rank trained on",
        "    rank 1 on n2 was lost before it had joined: killed by SIGKILL",
        "    all ranks were started again",
    ]


def test_reports_diverged_replicas_of_successful_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = make_run("one", code=0)
    (folder / "owner.json").unlink()
    told = "rank 0 on n1 trains a different model from the others: weight differs after step 0"
    started = Event("started", fields={"attempt": 0})
    events = (started, Event("replicas differ", fields={"text": told}))
    lines = [{"event": event.kind, **event.fields} for event in events]
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert run_cli("explain", "one").output.splitlines()[0] == told
    assert f"  warning: {told}\n" in run_cli("status", "one").output
    assert json.loads(run_cli("status", "--json", "one").output)["replicas_differ"] == told
    assert f"; {told}." in " ".join(run_cli("report", "one").output.split())
    run_end.explain_difference(folder, RunResult(0), events)
    assert f"paceline: cause: {told} [replicas-differ]\n  remedy: " in capsys.readouterr().err
    run_end.explain_difference(folder, RunResult(0), (*events, started))
    assert not capsys.readouterr().err


def test_explain_prefers_running_run() -> None:
    make_run("old", alive=True, age=100)
    make_run("new", code=1)
    assert f"process {ALIVE} on x" in run_cli("explain").output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGINT])
def test_detaches_terminal_if_host_does_not_answer(
    tmp_path: Path, number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    async def wait_forever(**_: object) -> None:
        await asyncio.Event().wait()

    async def close() -> None:
        pass

    async def attach() -> int:
        client: Any = SimpleNamespace(
            path=tmp_path, look=wait_forever, stop=wait_forever, close=close
        )
        terminal = attached._AttachedTerminal(client, lines=True)
        loop = asyncio.get_running_loop()
        for count in range(3):  # the second SIGINT stops the run at once
            loop.call_later(0.3 * (count + 1), os.kill, os.getpid(), number)
            if number != signal.SIGINT:
                break
        return await asyncio.wait_for(terminal.run(), 10.0)

    assert asyncio.run(attach()) == 0
    assert "the run continues; to attach again" in capfd.readouterr().err


def test_reads_start_and_end_of_endless_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostile host controls the content, which may not fit into memory."""
    monkeypatch.setattr(records, "RECORDS_BYTES", 1000)
    monkeypatch.setattr(attached, "READ_BYTES", 100)
    path, file = tmp_path / "events.jsonl", attached._GrowingFile(tmp_path / "events.jsonl")
    path.write_text("".join(f'{{"n": {n}}}\n\n\n' for n in range(1000)))
    numbers = [json.loads(line)["n"] for line in file.lines() if line.startswith(b"{")]
    count = len(numbers)
    assert 100 < count < 220
    assert numbers[0] == 0
    assert numbers[-1] == 999
    assert numbers == sorted(numbers)
    with path.open("a") as more:
        more.write('{"n": 1000}\n')
    assert [*file.lines()] == [b'{"n": 1000}']


def test_attached_terminal_skips_output_of_earlier_starts(tmp_path: Path) -> None:
    def write(*events: dict[str, object]) -> None:
        with (tmp_path / "events.jsonl").open("a") as file:
            file.writelines(f"{json.dumps({'time': 1.0, **event})}\n" for event in events)

    def start(rank: int) -> dict[str, object]:
        return {"event": "rank started", "host": "n1", "rank": rank, "pid": 7}

    output = list[tuple[int, bytes]]()
    screen: Any = SimpleNamespace(output=lambda _h, rank, _s, data: output.append((rank, data)))
    (tmp_path / "logs/n1").mkdir(parents=True)
    for rank in (0, 1):
        (tmp_path / f"logs/n1/{rank}.log").write_text("Traceback\n")
    write({"event": "connected"}, start(0), start(1), {"event": "connected"})
    write({"event": "log begins", "host": "n1", "rank": 0, "bytes": 10}, start(0))
    with (tmp_path / "logs/n1/0.log").open("a") as log:
        log.write("iter 35\n")
    feed = attached.Feed(tmp_path, screen)
    feed.update()
    assert output == [(0, b"iter 35\n")]
    write({"event": "log begins", "host": "n1", "rank": 1, "bytes": 10}, start(1))
    with (tmp_path / "logs/n1/1.log").open("a") as log:
        log.write("ready\n")
    feed.update()
    assert output[1:] == [(1, b"ready\n")]
