"""Tests the list of runs, and which run on a host a name refers to."""

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


def detached_run(run_id: str = "ab" * 6, name: str = "one", **overrides: Any) -> DetachedRun:
    base = {"run_id": run_id, "name": "job", "command": ("paceline", "run", "a b.py"),
             "hosts": ("n1", "n2"), "started": 1000.0, "launched_by": "me@here",
             "launched_in": f"/home/me/runs/{name}", "supervisor_host": "n1", "pid": 3,
             "pid_start": 4.0, "run": "/home/me/.cache/x/run"}  # fmt: skip
    record_fields = {
        key: overrides.pop(key) for key in ("ended", "exit_code", "started") if key in overrides
    }
    fields: dict[str, Any] = {"alive": True, "result": "", "ranks": "", "metrics": "", **overrides}
    return DetachedRun(
        Host("n1", "10.0.0.1"), DetachedRecord(**{**base, **record_fields}), **fields
    )  # type: ignore[arg-type]


def test_best_metric_prefers_evaluation() -> None:
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


def test_runs_parses_only_part_of_large_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [{"split": "train", "step": step, "loss": 1 / (step + 1)} for step in range(5000)]
    lines.insert(10, {"split": "test", "step": 10, "accuracy": 0.9})
    lines.append({"split": "pace", "step": 5000})
    for name, selected in (("one", lines), ("two", [*lines[:10], *lines[11:]])):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text("{}")
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in selected))
    read: list[str] = []
    original_parse = records.parse_json
    monkeypatch.setattr(
        records, "parse_json", lambda text: read.append(text) or original_parse(text)
    )
    listed = CliRunner().invoke(program, ["runs", "--json"], prog_name="paceline")
    rows = {row["run"]: row for row in json.loads(listed.stdout)["runs"]}
    assert rows["one"]["best"] == "test accuracy 0.9"
    assert rows["two"]["best"] == "train loss 0.0002"
    assert rows["one"]["step"] == rows["two"]["step"] == 5000
    assert len(read) < 3000  # of more than 10,000 lines


@pytest.mark.parametrize("width", [80, 100, 140, 200])
def test_table_fits_terminal_width(width: int) -> None:
    rows = [
        Row("image-20261122-141407", "running", None, 100.0, ("n1", "n2"), 330, 1760,
            "test accuracy 0.9867", "paceline train image -H n1,n2 --epochs 40"),
        Row("a-very-long-name-of-a-run-that-nobody-reads", "failed", 137, 5.0,
            tuple(f"n{n}" for n in range(64)), None, None, "", "paceline run x.py " * 9,
            on="host-with-a-long-name", here=False),
        Row("evil\x1b[31m", "ended"),
        Row("train-20261122-141407", "no launcher"),
    ]  # fmt: skip
    lines = table(rows, 100.0 + 7200, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "2 h" in text
    assert "330/1760" in text
    assert "64 hosts" in text
    assert "no launcher" in text
    assert "paceline train image" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("overrides", "state", "code"),
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
def test_state_of_detached_run(overrides: dict[str, Any], state: str, code: int | None) -> None:
    row = row_of_detached(detached_run(**overrides))
    assert (row.state, row.exit_code, row.run, row.on, row.here) == (
        state,
        code,
        "one",
        "n1",
        False,
    )
    assert row.command == "paceline run 'a b.py'"


def test_progress_of_detached_run() -> None:
    metrics = '{"split": "test", "step": 7, "accuracy": 0.5}\n'
    row = row_of_detached(
        detached_run(metrics=metrics, ranks='{"progress": {"step": 9, "steps": 20}}')
    )
    assert (row.step, row.steps, row.best) == (9, 20, "test accuracy 0.5")


def test_choose_run_by_name_or_id() -> None:
    one, two = detached_run(), detached_run("cd" * 6, "two", alive=False, ended=5.0)
    assert choose_run(DetachedRuns((one, two)), None) is one
    for name in ("two", "runs/two", "cd" * 6):
        assert choose_run(DetachedRuns((one, two)), name) is two
    third = detached_run("ef" * 6, "one")
    with pytest.raises(SettingError, match="2 runs match") as caught:
        choose_run(DetachedRuns((one, third)), "one")
    assert "ab" * 6 in caught.value.remedy
    with pytest.raises(SettingError, match="no run is running") as caught:
        choose_run(DetachedRuns((two,), (("n9", "no answer"),)), None)
    assert "n9 could not be asked: no answer" in caught.value.found


def test_prune_removes_fetched_runs_and_runs_on_named_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ids = {name: f"{number}b" * 6 for number, name in enumerate(
        ["home", "cannot", "named", "read", "foreign", "running"])}  # fmt: skip
    ended_fields = {"alive": False, "ended": 1060.0, "exit_code": 0}
    runs = [
        detached_run(ids[name], name, **({} if name == "running" else ended_fields)) for name in ids
    ]
    runs[4] = replace(runs[4], host=Host("n2", "10.0.0.2"))  # supervises a run of this folder
    for run in runs[:2]:
        local_folder(run.info, detached_record(run, SshOptions()), Path("runs"))

    async def fake_query_hosts(*_: object) -> DetachedRuns:
        return DetachedRuns(tuple(runs))

    async def fake_find_detached(*_: object, discard: Sequence[str]) -> DetachedRuns:
        assert set(discard) == {ids["named"], ids["read"]}
        return DetachedRuns((runs[3],))

    def fake_try_sync(path: Path) -> bool:
        if path.name == "home":
            said = json.loads((path / DETACHED).read_text())
            (path / DETACHED).write_text(json.dumps({**said, FETCHED_AT: time.time()}))
        return path.name == "home"

    monkeypatch.setattr(runs_verb, "_query_hosts", fake_query_hosts)
    monkeypatch.setattr(detached, "find_detached", fake_find_detached)
    monkeypatch.setattr(sync, "try_sync", fake_try_sync)
    completed = CliRunner().invoke(program, ["runs", "-H", "10.0.0.1", "--prune", "--json"],
                              prog_name="paceline")  # fmt: skip
    assert completed.exception is None
    said = {line.rpartition(": ")[2] for line in completed.stderr.splitlines() if "removed" in line}
    assert said == {"home", "named"}
    listed = {row["run_id"] for row in json.loads(completed.stdout)["runs"]}
    assert listed == {*ids.values()} - {ids["named"]}


def test_concurrent_callers_share_local_folder(tmp_path: Path) -> None:
    run, parent = detached_run(), tmp_path / "runs"
    run_record, barrier = detached_record(run, SshOptions()), threading.Barrier(8)

    def create_folder() -> Path:
        barrier.wait()
        return local_folder(run.info, run_record, parent)

    for _ in range(20):
        with ThreadPoolExecutor(8) as pool:
            folders = {one.result() for one in [pool.submit(create_folder) for _ in range(8)]}
        assert folders == {parent / "one"}
        assert [*parent.iterdir()] == [parent / "one"]
        shutil.rmtree(parent)


def test_choose_run_prefers_running_then_newest() -> None:
    ended = {"alive": False, "ended": 5.0}
    older, new = detached_run(**ended), detached_run("cd" * 6, "two", started=2000.0, **ended)
    assert choose_run(DetachedRuns((older, new)), None, ended=True) is new
    running = detached_run("ef" * 6, "three", started=1.0)
    assert choose_run(DetachedRuns((older, new, running)), None, ended=True) is running


def test_fetched_run_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = detached_run(alive=False, ended=1060.0, exit_code=0)
    folder = local_folder(run.info, detached_record(run, SshOptions()), Path("runs"))
    (folder / "result.json").write_text('{"exit_code": 0}')
    said = json.loads((folder / DETACHED).read_text())
    (folder / DETACHED).write_text(json.dumps({**said, FETCHED_AT: time.time()}))
    (folder / "plan.json").write_text("{}")

    async def fake_query_hosts(*_: object) -> DetachedRuns:
        return DetachedRuns((run,))

    monkeypatch.setattr(runs_verb, "_query_hosts", fake_query_hosts)
    listed = CliRunner().invoke(program, ["runs", "--json"], prog_name="paceline")
    (row,) = json.loads(listed.stdout)["runs"]
    assert (row["run"], row["run_id"], row["here"]) == ("one", "ab" * 6, True)


def test_local_folder_of_detached_run(tmp_path: Path) -> None:
    run = detached_run()
    run_record = detached_record(run, SshOptions(Path("/c")))
    folder = local_folder(run.info, run_record, tmp_path / "runs")
    assert folder == tmp_path / "runs" / "one"
    assert json.loads((folder / DETACHED).read_text())["ssh"]["config"] == "/c"
    assert local_folder(run.info, run_record, tmp_path / "runs") == folder
    other = detached_run("cd" * 6)  # has the same name
    second = local_folder(other.info, detached_record(other, SshOptions()), tmp_path / "runs")
    assert second.name.startswith(f"job-{time.strftime('%Y')}")
