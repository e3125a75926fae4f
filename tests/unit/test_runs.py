"""Which run is meant when none is named, and which lines of its logs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
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
from paceline.cli.runs.rank_logs import seek_lines
from paceline.cli.verbs import report
from paceline.explain.conclusion import conclude
from paceline.explain.evidence_reader import from_run
from paceline.explain.rules import load_all
from paceline.launch.terminal.run_state import NodeWait
from paceline.report import explanation
from paceline.rundir import records
from paceline.rundir.outputs import Output, OutputJournal
from paceline.rundir.ownership import FETCHED_AT, LAST_STATUS
from paceline.spec.detached import DETACHED, SupervisorLocation
from paceline.spec.errors import ConnectError, SettingError
from paceline.spec.events import Event
from paceline.spec.failure import Result as RunResult

ALIVE = 4711  # a process id that stands for one that lives


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for module in (run_state, run_lookup):
        monkeypatch.setattr(module, "owner_alive", lambda owner: owner["pid"] == ALIVE)


def make(name: str, *, alive: bool = False, code: int | None = 0, age: int = 0) -> Path:
    folder = Path("runs") / name
    (folder / "logs" / "n1").mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    owner = {"host": "x", "pid": ALIVE if alive else 7, "start": 1, "since": "now"}
    (folder / "owner.json").write_text(json.dumps(owner))
    if code is not None and not alive:
        (folder / "result.json").write_text(json.dumps({"exit_code": code}))
    os.utime(folder, (1e9 - age, 1e9 - age))
    return folder


def call(*words: str) -> Result:
    return CliRunner().invoke(program, words, prog_name="paceline")


def test_the_run_that_is_running_is_meant_not_the_newest() -> None:
    make("old", alive=True, age=100)
    make("new")
    assert "runs/old: running" in call("status").output
    assert [str(path) for path in run_lookup.running_runs()] == ["runs/old"]


def test_to_look_at_a_run_does_not_make_it_the_newest() -> None:
    for name, start in (("old", 10.0), ("new", 20.0)):
        (make(name) / "events.jsonl").write_text(json.dumps({"time": start}) + "\n")
    os.utime("runs/old", (2e9, 2e9))  # explain writes a file there
    assert run_lookup.newest_runs(Path("runs")) == ["new", "old"]


def test_a_run_of_a_measurement_counts_too() -> None:
    make("scaling/2x1-1", alive=True)
    assert [str(path) for path in run_lookup.running_runs()] == ["runs/scaling/2x1-1"]


def test_without_any_the_newest_is_looked_at_but_none_is_stopped() -> None:
    make("old", age=100)
    make("new", code=3)
    assert "runs/new: failed, exit status 3" in call("status").output
    stopped = call("stop")
    assert stopped.exit_code == 0
    assert "no run below runs/ is running" in stopped.output
    assert "runs/old: finished already" in call("stop", "old").output


@pytest.mark.parametrize("verb", ["status", "logs", "stop"])
def test_several_are_listed(verb: str) -> None:
    make("one", alive=True)
    make("two", alive=True)
    refused = call(verb)
    assert isinstance(refused.exception, SettingError)
    assert "2 runs are running" in refused.exception.message
    assert {"runs/one", "runs/two"} == set(refused.exception.found.splitlines())


def test_the_run_may_be_named_in_the_settings() -> None:
    make("one")
    make("two", age=100, code=7)
    Path("paceline.toml").write_text('[run]\nrun-dir = "runs/two"\n')
    assert "runs/two: failed, exit status 7" in call("status").output
    assert "runs/one" in call("status", "one").output
    refused = call("status", "one", "--run-dir", "runs/two")
    assert isinstance(refused.exception, SettingError)


def test_logs_of_a_host_and_the_last_lines() -> None:
    folder = make("one")
    (folder / "logs" / "n2").mkdir()
    (folder / "logs" / "n1" / "0.log").write_text("a\nb\nc\n")
    (folder / "logs" / "n2" / "1.log").write_text("d\ne")
    assert call("logs", "--tail", "1").output.splitlines() == ["[n1/0] c", "[n2/1] e"]
    last = ["[n1/0] b", "[n1/0] c", "[n2/1] d", "[n2/1] e"]
    assert call("logs", "-n", "2").output.splitlines() == last
    assert call("logs", "--host", "n2").output.splitlines() == last[2:]
    refused = call("logs", "--host", "n3")
    assert isinstance(refused.exception, SettingError)
    assert "n1/0, n2/1" in refused.exception.found


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_progress_bar_is_one_line(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("paceline.cli.runs.rank_logs.READ_BYTES", size)
    folder = make("one")
    bar = "".join(f"\rstep {step}/300" for step in range(300))
    (folder / "logs" / "n1" / "0.log").write_text(f"begins\n{bar}")
    assert call("logs").output.splitlines() == ["[n1/0] begins", "[n1/0] step 299/300"]
    assert call("logs", "--tail", "1").output.splitlines() == ["[n1/0] step 299/300"]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_last_lines_without_reading_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("paceline.cli.runs.rank_logs.READ_BYTES", size)
    path = tmp_path / "log"
    for text in ("", "a", "a\n", "a\nb", "a\nb\n", "\n\n\n", "a\nb\nc\nd\n",
                 "a\n\rb\rc\nd\r"):  # fmt: skip
        path.write_bytes(text.encode())
        for count in range(5):
            with path.open("rb") as file:
                seek_lines(file, count)
                left = file.read().decode().removesuffix("\n").split("\n")
            lines = text.removesuffix("\n").split("\n")
            assert left == (lines[-count:] if count else [""])


def test_status_names_a_rank_that_is_slow_now() -> None:
    folder = make("one", alive=True)
    slow = {"event": "straggler", "straggler": 1, "its_host": "n2", "text": "rank 1 on n2 is late"}
    train = {"split": "train", "step": 5, "loss": 0.5}
    pace = {"split": "pace", "step": 5, "computing_s": 0.1}
    (folder / "events.jsonl").write_text(json.dumps(slow) + "\n")
    (folder / "metrics.jsonl").write_text(f"{json.dumps(train)}\n{json.dumps(pace)}\n")
    said = call("status").output
    assert "slow: rank 1 on n2 is late" in said
    assert "loss 0.5" in said
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({**slow, "event": "straggler over"}) + "\n")
    assert "slow:" not in call("status").output


def test_status_of_a_job_that_waits_for_nodes_says_for_how_many_since_when_and_until_when() -> None:
    folder = make("one", alive=True)
    waits = NodeWait.start("1 node of at least 2: dialling n2 again, for up to 10 minutes", 600.0)
    ranks = [{"rank": 0, "host": "n1", "phase": "running", "state": "failed", "trouble": "SIGTERM"}]
    where = {"time": time.time(), "ranks": ranks, "hang": "", "waits": asdict(waits)}
    (folder / "ranks.json").write_text(json.dumps(where))
    at = [time.strftime("%H:%M:%S", time.localtime(one)) for one in (waits.since, waits.until)]
    said = call("status", "one").output
    assert "runs/one: running, waits for nodes\n" in said
    assert f"  {waits.text}, since {at[0]}, until " in said
    assert f"{at[1]}\n" in said
    assert "SIGTERM" not in said  # how the ranks of the last start ended
    state = json.loads(call("status", "one", "--json").output)
    assert (state["state"], state["waits"]) == ("running", asdict(waits))
    rows = json.loads(call("runs", "--json").output)["runs"]
    assert [row["state"] for row in rows] == ["waiting"]
    (folder / "ranks.json").write_text(json.dumps({**where, "waits": None}))
    assert "runs/one: running\n" in call("status", "one").output


@pytest.mark.parametrize(("ago", "over", "told"), [(1, False, True), (60, False, False),
                                                   (1, True, False)])  # fmt: skip
def test_status_of_a_batch_says_where_its_ranks_are(
    ago: float, over: bool, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as that is of now: it may wait in its queue once more."""
    folder = make("batch", code=None)
    state = SimpleNamespace(is_over=over, exit_code=0, describe=lambda: "RUNNING")
    job = SimpleNamespace(state=lambda: state, title="Slurm job 2", job="2")
    monkeypatch.setattr(run_state, "read_submission", lambda path: job)
    where = {"time": time.time() - ago, "ranks": [], "hang": "rank 1 on n2 sleeps"}
    (folder / "ranks.json").write_text(json.dumps(where))
    said = describe_run(run_state.read_state(folder))
    assert "RUNNING" in said
    assert ("hangs: rank 1 on n2 sleeps" in said) == told


def test_the_end_of_a_wait_of_days_is_told_with_its_date() -> None:
    assert NodeWait("x", 1e9, 1e9 + 60).description.count("-") == 0
    assert NodeWait("x", 1e9, 1e9 + 3 * 86400).description.count("-") == 2


def test_status_rounds_figures_for_people() -> None:
    at = time.mktime((2026, 11, 26, 12, 3, 44, 0, 0, -1))
    last = {"step": 12, "time": at, "loss": 0.2478179237433748}
    said = describe_run(run_state.RunState(Path("runs/a"), "finished", 0, last_metrics=last))
    assert "last record (12:03:44): step 12, loss 0.247818" in said.splitlines()[-1]


def left_elsewhere(name: str, **more: object) -> Path:
    """The folder of a run whose supervisor is on another host."""
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    back = SupervisorLocation("ab" * 6, "n2", "n2", "/x", 1000.0).to_json()
    (folder / DETACHED).write_text(json.dumps({**back, **more}))
    return folder


def test_a_run_that_goes_on_elsewhere_has_no_cause_yet() -> None:
    folder = left_elsewhere("one")
    said = conclude(from_run(folder), load_all())
    assert said.text.startswith("the run has not ended: its supervisor is on n2, since ")
    assert not said.matches
    shown = explanation.lines(said, from_run(folder))
    assert "`paceline status` says where its ranks are." in shown
    report.explain_if_missing(folder)
    assert not (folder / "findings.json").exists()
    said = conclude(from_run(folder, confirmed=False), load_all())
    assert said.text.startswith("the supervisor on n2 still runs or was killed")
    (folder / "result.json").write_text('{"exit_code": 0}')  # it has come since
    assert conclude(from_run(folder), load_all()).text.startswith("nothing went wrong")


def test_a_supervisor_that_died_without_a_word_is_the_cause() -> None:
    folder = left_elsewhere("one", **{FETCHED_AT: 2000.0, LAST_STATUS: "lost"})
    said = conclude(from_run(folder), load_all())
    assert said.text.startswith("the supervisor was killed or its host n2 restarted")
    assert [rule.code for rule, _ in said.matches] == ["launcher-killed"]


def test_status_without_the_host_of_a_detached_run_says_how_to_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(path: Path, show: object) -> None:
        raise ConnectError("n2 cannot be reached")

    monkeypatch.setattr("paceline.cli.runs.sync.sync_run", unreachable)
    folder = left_elsewhere("one")
    typed = {"command": "paceline run -H n1,n2 --detach train.py", "folder": str(Path.cwd())}
    (folder / "plan.json").write_text(json.dumps({"typed": typed}))
    assert "gone for good" not in call("status", "one").output  # it has no checkpoint here
    (folder / "checkpoints/450").mkdir(parents=True)
    (folder / "checkpoints/450/manifest.json").write_text("{}")
    output = call("status", "one").output
    assert "  if that host is gone for good: rm runs/one/detached.json\n  to resume: " in output


def test_status_of_a_stopped_run_says_how_it_is_resumed() -> None:
    folder = make("one", code=130)
    (folder / "result.json").write_text('{"exit_code": 130, "interrupted": 2}')
    typed = {"command": "paceline run -H lab train.py", "folder": str(Path.cwd())}
    (folder / "plan.json").write_text(json.dumps({"typed": typed}))
    assert "to resume" not in call("status", "one").output  # it has no checkpoint
    (folder / "checkpoints/450").mkdir(parents=True)
    (folder / "checkpoints/450/manifest.json").write_text("{}")
    said = call("status", "one").output
    assert said.startswith("runs/one: stopped")
    assert "  to resume: paceline run --run-dir runs/one -H lab train.py" in said


def test_a_moved_run_is_resumed_where_it_is() -> None:
    folder = make("new", code=130)
    (folder / "result.json").write_text('{"exit_code": 130, "interrupted": 2}')
    typed = {"command": "paceline train image --run-dir runs/old", "folder": str(Path.cwd())}
    (folder / "plan.json").write_text(json.dumps({"typed": typed}))
    (folder / "checkpoints/450").mkdir(parents=True)
    (folder / "checkpoints/450/manifest.json").write_text("{}")
    assert "to resume: paceline train image --run-dir runs/new\n" in call("status", "new").output
    typed["command"] = "paceline run --run-dir=runs/old train.py --run-dir ckpt"
    (folder / "plan.json").write_text(json.dumps({"typed": typed}))
    again = "paceline run --run-dir runs/new train.py --run-dir ckpt"
    assert f"to resume: {again}\n" in call("status", "new").output
    (Path("runs") / "old").mkdir()
    assert (
        "to resume: paceline run --run-dir=runs/old train.py --run-dir ckpt\n"
        in call("status", "new").output
    )


@pytest.mark.parametrize(
    "command", ["rm -rf run", "./paceline run a.py", "paceline", "paceline stop one", "python run"]
)
def test_a_command_that_starts_no_run_does_not_resume_one(command: str) -> None:
    folder = make("one", code=130)
    (folder / "result.json").write_text('{"exit_code": 130, "interrupted": 2}')
    typed = {"command": command, "folder": str(Path.cwd())}
    (folder / "plan.json").write_text(json.dumps({"typed": typed}))
    (folder / "checkpoints/450").mkdir(parents=True)
    (folder / "checkpoints/450/manifest.json").write_text("{}")
    shown = call("status", "one").output
    assert shown.startswith("runs/one: stopped")
    assert "to resume" not in shown


def test_of_a_run_whose_supervisor_died_it_is_said_since_when_and_how_it_goes_on() -> None:
    folder = left_elsewhere("one", **{FETCHED_AT: 2000.0, LAST_STATUS: "lost"})
    typed = {"command": "paceline run -H n1,n2 --detach 'my train.py'", "folder": str(Path.cwd())}
    plan = {"typed": typed, "settings": {"lease_s": {"value": 7.0}},
            "nodes": [{"host": "n1"}, {"host": "n2"}]}  # fmt: skip
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "logs/n1").mkdir(parents=True)
    (folder / "logs/n1/0.log").write_text("a line\n")
    now = time.time()
    (folder / "ranks.json").write_text(json.dumps({"time": now, "ranks": [], "hang": ""}))
    said = call("status", "one").output
    assert "one: lost\n  its supervisor on n2 was killed, or its host went down " in said
    assert time.strftime("at %Y-%m-%d %H:%M:%S", time.localtime(now)) in said
    assert "  the nodes end their ranks: the lease was not renewed for 7 s\n" in said
    assert "  checkpoint: none found; a restart begins at step 0\n" in said
    OutputJournal(folder).add([Output("out/a.pt", 1, "", "n1", "", 1, 1.0, 1)])
    later = "; a later one would lie on n1, where the next start finds it"
    assert f"  checkpoint of the script: out/a.pt{later}\n" in call("status", "one").output
    (folder / "outputs.jsonl").unlink()
    again = "paceline run --run-dir runs/one -H n1,n2 --detach 'my train.py'"
    assert f"  to resume: {again}\n" in said
    assert json.loads(call("status", "one", "--json").output)["lost"]["again"] == again
    where = {"time": now - 100, "ranks": [], "hang": ""}
    (folder / "ranks.json").write_text(json.dumps(where))
    saved = folder / "checkpoints/450"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    said = call("status", "one").output
    assert "went down 1 min 40 s ago" in said
    assert "  the nodes have ended their ranks: " in said
    assert "  checkpoint: step 450, in runs/one/checkpoints; a later one would lie on n1" in said
    shown = call("logs", "one")
    assert "[n1/0] a line" in shown.stdout
    assert f"  to resume: {again}\n" in shown.stderr
    ended = call("attach", "one")
    assert (ended.exit_code, f"  to resume: {again}\n" in ended.output) == (1, True)
    os.chdir(folder)
    at = Path.cwd()
    again = f"(in {at.parents[1]}): paceline run --run-dir {at} -H n1,n2"
    assert again in call("status", ".").output


def test_a_run_is_explained_by_its_name() -> None:
    make("one", code=0)
    (Path("runs/one/owner.json")).unlink()
    assert "nothing went wrong" in call("explain", "one").output


def test_of_a_run_that_ended_well_its_losses_are_told() -> None:
    folder = make("one", code=0)
    (folder / "owner.json").unlink()
    told = [
        {"event": "recovery", "text": "rank 1 on n2 was killed: the other rank trained on"},
        {"event": "newcomer lost", "host": "n2", "rank": 1, "why": "killed by SIGKILL"},
        {"event": "started", "attempt": 1, "world_size": 2},
    ]
    (folder / "events.jsonl").write_text("\n".join(map(json.dumps, told)))
    assert call("explain", "one").output.splitlines() == [
        "the run ended with status 0, although something was lost on the way",
        "    rank 1 on n2 was killed: the other rank trained on",
        "    rank 1 on n2 was lost before it had joined: killed by SIGKILL",
        "    all ranks were started again",
    ]


def test_ranks_that_trained_apart_are_told_although_the_run_ended_well(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = make("one", code=0)
    (folder / "owner.json").unlink()
    told = "rank 0 on n1 trains a different model from the others: weight differs after step 0"
    started = Event("started", fields={"attempt": 0})
    events = (started, Event("replicas differ", fields={"text": told}))
    lines = [{"event": event.kind, **event.fields} for event in events]
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert call("explain", "one").output.splitlines()[0] == told
    assert f"  warning: {told}\n" in call("status", "one").output
    assert json.loads(call("status", "--json", "one").output)["replicas_differ"] == told
    assert f"; {told}." in " ".join(call("report", "one").output.split())
    run_end.explain_difference(folder, RunResult(0), events)
    assert f"paceline: cause: {told} [replicas-differ]\n  remedy: " in capsys.readouterr().err
    run_end.explain_difference(folder, RunResult(0), (*events, started))
    assert not capsys.readouterr().err


def test_of_several_the_running_one_is_explained() -> None:
    make("old", alive=True, age=100)
    make("new", code=1)
    assert f"process {ALIVE} on x" in call("explain").output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGINT])
def test_a_terminal_is_left_though_the_host_never_answers(
    tmp_path: Path, number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    async def never(**_: object) -> None:
        await asyncio.Event().wait()

    async def close() -> None:
        pass

    async def attach() -> int:
        client: Any = SimpleNamespace(path=tmp_path, look=never, stop=never, close=close)
        terminal = attached._AttachedTerminal(client, lines=True)
        loop = asyncio.get_running_loop()
        for count in range(3):  # SIGINT asks the run to stop twice
            loop.call_later(0.3 * (count + 1), os.kill, os.getpid(), number)
            if number != signal.SIGINT:
                break
        return await asyncio.wait_for(terminal.run(), 10.0)

    assert asyncio.run(attach()) == 0
    assert "the run continues; to attach again" in capfd.readouterr().err


def test_an_endless_file_is_read_at_its_beginning_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostile host decides what is in it: it does not fit into memory."""
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
