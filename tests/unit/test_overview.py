"""The list of runs, and which of those on hosts is meant."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from paceline.cli import program
from paceline.cli.runs import detached, sync
from paceline.cli.runs.detached import (
    DetachedRun,
    DetachedRuns,
    choose_run,
    detached_record,
    local_folder,
)
from paceline.cli.verbs import runs as runs_verb
from paceline.cli.verbs.runs import Row, best_metric, row_of_detached, table
from paceline.remote.openssh import SshOptions
from paceline.rundir import records
from paceline.rundir.ownership import FETCHED_AT
from paceline.spec.detached import DETACHED, DetachedRecord
from paceline.spec.errors import SettingError
from paceline.spec.hosts import Host


def left(run_id: str = "ab" * 6, name: str = "one", **more: Any) -> DetachedRun:
    about = {"run_id": run_id, "name": "job", "command": ("paceline", "run", "a b.py"),
             "hosts": ("n1", "n2"), "started": 1000.0, "launched_by": "me@here",
             "launched_in": f"/home/me/runs/{name}", "supervisor_host": "n1", "pid": 3,
             "pid_start": 4.0, "run": "/home/me/.cache/x/run"}  # fmt: skip
    own = {key: more.pop(key) for key in ("ended", "exit_code", "started") if key in more}
    fields: dict[str, Any] = {"alive": True, "result": "", "ranks": "", "metrics": "", **more}
    return DetachedRun(Host("n1", "10.0.0.1"), DetachedRecord(**{**about, **own}), **fields)  # type: ignore[arg-type]


def test_the_best_figure_is_that_of_an_evaluation() -> None:
    records = [
        {"split": "train", "loss": 0.1, "accuracy": 0.99},
        {"split": "test", "loss": 0.4, "accuracy": 0.8},
        {"split": "test", "loss": 0.5, "accuracy": 0.9},
        {"split": "pace", "loss": 0.0},
        {"split": 3, "loss": "x"},
    ]
    assert best_metric(records) == "test accuracy 0.9"
    assert best_metric(records[:1]) == "train accuracy 0.99"
    assert best_metric([{"split": "train", "loss": 2.0}, {"split": "train", "loss": 1.0}]) == (
        "train loss 1"
    )
    assert best_metric([]) == ""


def test_long_records_are_listed_by_their_evaluations_and_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [{"split": "train", "step": step, "loss": 1 / (step + 1)} for step in range(5000)]
    lines.insert(10, {"split": "test", "step": 10, "accuracy": 0.9})
    lines.append({"split": "pace", "step": 5000})
    for name, some in (("one", lines), ("two", [*lines[:10], *lines[11:]])):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text("{}")
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in some))
    read: list[str] = []
    plainly = records.parse_json
    monkeypatch.setattr(records, "parse_json", lambda text: read.append(text) or plainly(text))
    listed = CliRunner().invoke(program, ["runs", "--json"], prog_name="paceline")
    rows = {row["run"]: row for row in json.loads(listed.stdout)["runs"]}
    assert rows["one"]["best"] == "test accuracy 0.9"
    assert rows["two"]["best"] == "train loss 0.0002"
    assert rows["one"]["step"] == rows["two"]["step"] == 5000
    assert len(read) < 3000  # of more than 10,000 lines


@pytest.mark.parametrize("width", [80, 100, 140, 200])
def test_the_table_keeps_within_the_terminal(width: int) -> None:
    rows = [
        Row("image-20261122-141407", "running", None, 100.0, ("n1", "n2"), 330, 1760,
            "test accuracy 0.9867", "paceline train image -H n1,n2 --epochs 40"),
        Row("a-very-long-name-of-a-run-that-nobody-reads", "failed", 137, 5.0,
            tuple(f"n{n}" for n in range(64)), None, None, "", "paceline run x.py " * 9,
            on="host-with-a-long-name", here=False),
        Row("evil\x1b[31m", "ended"),
    ]  # fmt: skip
    lines = table(rows, 100.0 + 7200, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "2 h" in text
    assert "330/1760" in text
    assert "64 hosts" in text
    assert "paceline train image" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("more", "state", "code"),
    [
        ({}, "running", None),
        ({"alive": None}, "running", None),
        ({"alive": False}, "lost", None),
        ({"alive": False, "ended": 5.0, "exit_code": 0}, "finished", 0),
        ({"alive": False, "ended": 5.0, "exit_code": 3}, "failed", 3),
        ({"ended": 5.0, "exit_code": 143, "result": '{"exit_code": 143, "interrupted": 15}'},
         "stopped", 143),
        ({"result": "no JSON", "ranks": "[", "metrics": "{\n1\n"}, "running", None),
    ],
)  # fmt: skip
def test_how_a_run_on_a_host_stands(more: dict[str, Any], state: str, code: int | None) -> None:
    row = row_of_detached(left(**more))
    assert (row.state, row.exit_code, row.run, row.on, row.here) == (
        state,
        code,
        "one",
        "n1",
        False,
    )
    assert row.command == "paceline run 'a b.py'"


def test_where_a_run_on_a_host_is() -> None:
    metrics = '{"split": "test", "step": 7, "accuracy": 0.5}\n'
    row = row_of_detached(left(metrics=metrics, ranks='{"progress": {"step": 9, "steps": 20}}'))
    assert (row.step, row.steps, row.best) == (9, 20, "test accuracy 0.5")


def test_which_run_on_hosts_is_meant() -> None:
    one, two = left(), left("cd" * 6, "two", alive=False, ended=5.0)
    assert choose_run(DetachedRuns((one, two)), None) is one
    for name in ("two", "runs/two", "cd" * 6):
        assert choose_run(DetachedRuns((one, two)), name) is two
    third = left("ef" * 6, "one")
    with pytest.raises(SettingError, match="2 runs match") as caught:
        choose_run(DetachedRuns((one, third)), "one")
    assert "ab" * 6 in caught.value.remedy
    with pytest.raises(SettingError, match="no run is running") as caught:
        choose_run(DetachedRuns((two,), (("n9", "no answer"),)), None)
    assert "n9 could not be asked: no answer" in caught.value.found


def test_pruned_is_what_came_home_or_lies_on_hosts_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ids = {name: f"{number}b" * 6 for number, name in enumerate(
        ["home", "cannot", "named", "read", "foreign", "running"])}  # fmt: skip
    over = {"alive": False, "ended": 1060.0, "exit_code": 0}
    runs = [left(ids[name], name, **({} if name == "running" else over)) for name in ids]
    runs[4] = replace(runs[4], host=Host("n2", "10.0.0.2"))  # which supervises a run of this folder
    for run in runs[:2]:
        local_folder(run.info, detached_record(run, SshOptions()), Path("runs"))

    async def there(*_: object) -> DetachedRuns:
        return DetachedRuns(tuple(runs))

    async def discards(*_: object, discard: Sequence[str]) -> DetachedRuns:
        assert set(discard) == {ids["named"], ids["read"]}
        return DetachedRuns((runs[3],))

    def comes(path: Path) -> bool:
        if path.name == "home":
            said = json.loads((path / DETACHED).read_text())
            (path / DETACHED).write_text(json.dumps({**said, FETCHED_AT: time.time()}))
        return path.name == "home"

    monkeypatch.setattr(runs_verb, "_query_hosts", there)
    monkeypatch.setattr(detached, "find_detached", discards)
    monkeypatch.setattr(sync, "try_sync", comes)
    done = CliRunner().invoke(program, ["runs", "-H", "10.0.0.1", "--prune", "--json"],
                              prog_name="paceline")  # fmt: skip
    assert done.exception is None
    said = {line.rpartition(": ")[2] for line in done.stderr.splitlines() if "removed" in line}
    assert said == {"home", "named"}
    listed = {row["run_id"] for row in json.loads(done.stdout)["runs"]}
    assert listed == {*ids.values()} - {ids["named"]}


def test_several_who_come_at_once_have_one_folder(tmp_path: Path) -> None:
    run, parent = left(), tmp_path / "runs"
    back, at_once = detached_record(run, SshOptions()), threading.Barrier(8)

    def come() -> Path:
        at_once.wait()
        return local_folder(run.info, back, parent)

    for _ in range(20):
        with ThreadPoolExecutor(8) as pool:
            folders = {one.result() for one in [pool.submit(come) for _ in range(8)]}
        assert folders == {parent / "one"}
        assert [*parent.iterdir()] == [parent / "one"]
        shutil.rmtree(parent)


def test_where_none_goes_on_the_newest_may_be_meant() -> None:
    ended = {"alive": False, "ended": 5.0}
    old, new = left(**ended), left("cd" * 6, "two", started=2000.0, **ended)
    assert choose_run(DetachedRuns((old, new)), None, ended=True) is new
    running = left("ef" * 6, "three", started=1.0)
    assert choose_run(DetachedRuns((old, new, running)), None, ended=True) is running


def test_a_run_of_another_machine_that_came_home_is_listed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = left(alive=False, ended=1060.0, exit_code=0)
    folder = local_folder(run.info, detached_record(run, SshOptions()), Path("runs"))
    (folder / "result.json").write_text('{"exit_code": 0}')
    said = json.loads((folder / DETACHED).read_text())
    (folder / DETACHED).write_text(json.dumps({**said, FETCHED_AT: time.time()}))
    (folder / "plan.json").write_text("{}")

    async def there(*_: object) -> DetachedRuns:
        return DetachedRuns((run,))

    monkeypatch.setattr(runs_verb, "_query_hosts", there)
    listed = CliRunner().invoke(program, ["runs", "--json"], prog_name="paceline")
    (row,) = json.loads(listed.stdout)["runs"]
    assert (row["run"], row["run_id"], row["here"]) == ("one", "ab" * 6, True)


def test_a_run_of_another_machine_gets_one_folder_here(tmp_path: Path) -> None:
    run = left()
    back = detached_record(run, SshOptions(Path("/c")))
    folder = local_folder(run.info, back, tmp_path / "runs")
    assert folder == tmp_path / "runs" / "one"
    assert json.loads((folder / DETACHED).read_text())["ssh"]["config"] == "/c"
    assert local_folder(run.info, back, tmp_path / "runs") == folder
    other = left("cd" * 6)  # of the same name
    second = local_folder(other.info, detached_record(other, SshOptions()), tmp_path / "runs")
    assert second.name.startswith(f"job-{time.strftime('%Y')}")
