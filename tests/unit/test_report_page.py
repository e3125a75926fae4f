"""Tests the page of a report: its content for any run, even a hostile one, and in a browser."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from chromium import PROGRAM, Chromium
from paceline.cli import program
from paceline.cli.runs.state import read_state_and_replicas
from paceline.explain.evidence_reader import from_run
from paceline.report import comparison_page, run_page
from paceline.report.comparison_page import Goal
from paceline.report.curves import Point, thin_points
from paceline.report.page import Page, Section, Table, html
from paceline.report.timeline import MAX_CELLS, MAX_SPANS
from paceline.report.writer import read_run, write_at_end
from paceline.rundir.records import sampled_records
from paceline.spec import rundir as names

START_S = 1_795_000_000.0
OVERLAPS = """(() => {
  const place = document.querySelector('[aria-label^=Links]'), wrong = [];
  const all = place.getBoundingClientRect();
  const boxes = [...place.querySelectorAll('text')].map(one => [one, one.getBoundingClientRect()]);
  for (const [one, box] of boxes) {
    if (box.left < all.left || box.right > all.right || box.top < all.top ||
        box.bottom > all.bottom) wrong.push('outside: ' + one.textContent);
    for (const [other, its] of boxes) if (one !== other && box.left < its.right - 1 &&
        its.left < box.right - 1 && box.top < its.bottom - 3 && its.top < box.bottom - 3)
      wrong.push(one.textContent + ' over ' + other.textContent);
  }
  return boxes.length < 3 ? ['nothing drawn'] : wrong;
})()"""
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028\x1b[31m"


def write_records(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_run(folder: Path, *, slow: bool = False, lost: bool = False, failed: bool = False,
         name: str = "loss", lr: float = 0.1) -> Path:  # fmt: skip
    """Creates a run of two ranks on two hosts that lasted 40 seconds."""
    folder.mkdir(parents=True)

    def event(at: float, kind: str, rank: int | None = None, **extra: Any) -> dict[str, Any]:
        source = {} if rank is None else {"rank": rank, "host": f"n{rank + 1}"}
        return {"time": START_S + at, **source, "event": kind, **extra}

    ranks = range(2)
    history = [event(1, "connected", hosts=["n1", "n2"])]
    history += [event(4, "imported", rank, seconds=2.0, python="3.11.7", executable="/p",
                   torch="2.13.0") for rank in ranks]  # fmt: skip
    history += [event(5, "started", attempt=0, world_size=2)]
    history += [event(5, "rank started", rank, pid=9) for rank in ranks]
    history += [event(6, "prepared", rank, parameters=1000) for rank in ranks]
    history += [event(20, "checkpoint", 0, step=50, megabytes=1.0, seconds=0.1)]
    if slow:
        text = "rank 1 on n2 slows the others down by 0.050 s a step, 40% of the time: its CPU"
        history += [event(15, "straggler", 0, straggler=1, its_host="n2", cause="cpu", seconds=0.05,
                       part=0.4, text=text),
                 event(30, "straggler over", 0, straggler=1, its_host="n2",
                       text="rank 1 on n2 keeps up again")]  # fmt: skip
    if lost:
        history += [
            {**event(12, "lost"), "host": "n2", "why": "switched off"},
            event(12, "regroup", generation=1, members=[0], planned=False),
            event(12.2, "recovery", text="lost n2: switched off. Training went on", seconds=0.2),
            event(18, "rank started", 1, pid=10),
            event(19, "regrouped", 1, generation=2, step=40, seconds=0.1),
            event(19, "recovery", text="rank 1 on n2 is back after 7.0 s", seconds=7.0),
        ]
    if failed:
        history += [event(38, "exception", 1, type="ValueError", message="boom"),
                 event(38.2, "rank ended", 1, code=1, signal=None),
                 event(38.5, "rank ended", 0, code=1, signal=None)]  # fmt: skip
    else:
        history += [event(39, "rank ended", rank, code=0, signal=None) for rank in ranks]
    history += [event(40, "ended", attempt=0, exit_code=int(failed), seconds=35)]
    write_records(folder / names.EVENTS, sorted(history, key=lambda record: record["time"]))

    waiting_s = 0.05 if slow else 0.001
    parts = [0.001, 0.04, waiting_s, 0.01, 0.0, 0.001]
    records = []
    for at in range(1, 16):
        step, timestamp = 10 * at, START_S + 6 + 2 * at
        records += [
            {"step": step, "epoch": at, "split": "train", "samples": 640, name: 2.0 / at, "lr": lr,
             "samples_per_s": 320.0, "time": timestamp},
            {"step": step, "epoch": at, "split": "pace", "noted": 10, "computing_s": 0.04,
             "waiting_s": waiting_s / 2, "moving_s": 0.01, "data_s": 0.001, "saving_s": 0.0,
             "other_s": 0.001, "ranks_s": [parts, [0.001, 0.04 + waiting_s, 0, 0.01, 0.0, 0.001]],
             "time": timestamp},
            {"step": step, "epoch": at, "split": "test", "accuracy": 1 - lr * 5 / (at + 5),
             "samples": 100, "time": timestamp + 0.4},
        ]  # fmt: skip
    write_records(folder / names.METRICS, records)
    node = {"login": "x", "address": "10.0.0.1", "interface": "eth0", "devices": "2 CPUs",
            "python": "/p", "workdir": "/w", "code": "verified equal"}  # fmt: skip
    setting = {"value": 2, "source": "command line", "detail": "--nnodes"}
    (folder / names.PLAN).write_text(json.dumps({
        "world_size": 2, "entry": {"kind": "script", "target": "train.py", "args": [str(lr)]},
        "nodes": [{"host": f"n{rank + 1}", "ranks": [{"rank": rank}], **node} for rank in ranks],
        "settings": {"nnodes": setting}, "environment": {"A": "1"}, "notes": [],
        "typed": {"command": "paceline run -H n1,n2 train.py", "folder": "/w", "paceline": "1"},
    }))  # fmt: skip
    interface = {"name": "eth0", "speed": 10000}
    facts = {"cpu": {"model": "Xeon", "cores": [[0], [1]]}, "memory": {"total": 1 << 34},
             "interfaces": [interface], "kernel": "6.1"}  # fmt: skip
    (folder / names.HOSTS).write_text(json.dumps({"n1": facts, "n2": facts}))
    first = {"kind": "exception", "host": "n2", "rank": 1, "code": 1, "signal": None,
             "headline": "ValueError: boom",
             "traceback": "Traceback:\n  ValueError: boom"}  # fmt: skip
    (folder / names.RESULT).write_text(json.dumps({
        "exit_code": int(failed), "seconds": 40.5, "metrics": {},
        "first_failure": first if failed else None, "interrupted": None,
        **({"recoveries": {"count": 1, "seconds": 0.2, "of": []}} if lost else {}),
    }))  # fmt: skip
    (folder / names.FINDINGS).write_text(json.dumps({
        "findings": [{"check": "explain/exception", "outcome": "fail", "hosts": ["n2"],
                      "message": "rank 1 on n2 has a bug", "remedy": "mend it"}] if failed else [],
        "links": [{"from": "n1", "to": "n2", "bits_per_s": 9e8},
                  {"from": "n2", "to": "n1", "bits_per_s": 2e8}],
    }))  # fmt: skip
    return folder


def text_of(folder: Path) -> str:
    return html(run_page.build_page(read_run(folder)))


def visible_text(page: str) -> str:
    """Returns the text that is visible without JavaScript."""
    body = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.S)
    return re.sub(r"<[^>]+>", " ", body).replace("&#x27;", "'")


def test_healthy_run_is_readable_without_javascript(tmp_path: Path) -> None:
    text = visible_text(text_of(make_run(tmp_path / "run")))
    for expected in (
        "Finished: 2 ranks on 2 hosts trained 150 steps in 40 s.", "Nothing was found wrong",
        "train: from 2 at step 10 to 0.1333 at step 150", "900 Mbit/s", "200 Mbit/s",
        "cd /w", "paceline run -H n1,n2 train.py", "command line: --nnodes", "2.13.0", "Xeon",
    ):  # fmt: skip
        assert expected in text, expected


def test_times_are_of_last_start_in_reused_folder(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    events = [json.loads(line) for line in (folder / names.EVENTS).read_text().splitlines()]
    earlier = [{**event, "time": event["time"] - 3600} for event in events]
    write_records(folder / names.EVENTS, [*earlier, *events])
    run = read_run(folder)
    assert run.timeline.started_at == START_S - 0.5  # its end, less the duration in result.json
    assert run_page.outcome_of(run)[1] == (
        "Finished: 2 ranks on 2 hosts trained to step 150 in 40 s."
    )
    other = read_run(make_run(tmp_path / "other"))
    assert "run trained to step 150 in 40 s" in visible_text(
        html(comparison_page.build_page([run, other]))
    )
    assert "an earlier start in this run directory is only in the curves" in text_of(folder)


def test_refused_start_leaves_page_of_earlier_start(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", lost=True)
    result = json.loads((folder / names.RESULT).read_text())
    (folder / names.RESULT).write_text(json.dumps({**result, "run_id": "first"}))
    connected, *events = map(json.loads, (folder / names.EVENTS).read_text().splitlines())
    text = "ranks 0 and 1 train different models"
    differ = {"time": START_S + 35, "event": "replicas differ", "text": text}
    started = {"event": "started", "attempt": 0, "world_size": 2}
    refused = [{**connected, "run_id": "refused"}, started, {"event": "ended", "attempt": 0,
               "exit_code": 2, "seconds": 1}]  # fmt: skip
    history = [{**connected, "run_id": "first"}, *events, differ,
               *({**event, "time": START_S + 3600 + at} for at, event in enumerate(refused))
               ]  # fmt: skip
    write_records(folder / names.EVENTS, history)
    run = read_run(folder)
    assert run.timeline.started_at == START_S - 0.5
    assert run.record.earlier_events == ()
    status, sentence = run_page.outcome_of(run)
    assert (status, text in sentence) == ("unsure", True)
    assert from_run(folder).replica_difference == text
    assert read_state_and_replicas(folder).replica_difference == text
    # while a start goes on, the page is about it
    owner = {"host": "elsewhere", "pid": 7, "run_id": "refused"}
    (folder / names.OWNER).write_text(json.dumps(owner))
    record = read_run(folder).record
    assert [event.kind for event in record.events] == ["connected", "started", "ended"]
    assert len(record.earlier_events) == len(history) - len(record.events)


def test_names_straggler(tmp_path: Path) -> None:
    text = visible_text(text_of(make_run(tmp_path / "run", slow=True)))
    assert "Rank 1 on n2 held the others up for 15 s" in text
    assert "The others waited most for rank 1 on n2" in text
    assert "its CPU, for 15 s" in text
    assert "its CPU → End the other programs on its host" in text
    assert "keeps up again" not in text.split("Every event", 1)[0]
    (row,) = [row for row in read_run(tmp_path / "run").timeline.rows if row.slowdowns]
    assert (row.rank, row.slowdowns[0].start) == (1, pytest.approx(15, abs=1))


def test_shows_loss_in_timeline_and_text(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", lost=True))
    first, second = run.timeline.rows
    lost_spans = [span for span in second.spans if span.activity == "gone"]
    assert [round(span.end - span.start) for span in lost_spans] == [6]
    assert not [span for span in first.spans if span.activity == "gone"]
    assert [mark.kind for mark in second.marks] == ["lost", "back"]
    assert [moment.severity for moment in run.timeline.moments] == ["bad", "good"]
    assert all(
        not (cell.start < lost_spans[0].end and cell.end > lost_spans[0].start)
        for cell in second.cells
    )
    text = visible_text(text_of(tmp_path / "run"))
    assert "the others trained on after the loss of n2, which came back." in text
    assert "Rank 1 on n2 was lost once, and came back (away for 6 s)" in text
    events = tmp_path / "run" / names.EVENTS
    records = [json.loads(line) for line in events.read_text().splitlines()]
    write_records(
        events,
        [record for record in records if record.get("rank") != 1 or record["time"] < START_S + 12],
    )
    text = visible_text(text_of(tmp_path / "run"))
    assert "the others trained on after the loss of n2." in text
    assert "Rank 1 on n2 was lost for good; 1 checkpoint was written." in text
    # now only the rank was lost, and its host stayed connected
    write_records(events, [record for record in records if record["event"] != "lost"])
    assert "the others trained on after a rank was lost." in visible_text(text_of(tmp_path / "run"))


def test_restart_marks_only_lost_rank_as_lost(tmp_path: Path) -> None:
    """The script has no session: all ranks are stopped, and n1 continues alone until it fails."""
    path = make_run(tmp_path / "run", failed=True)
    events = path / names.EVENTS
    rank_0 = {"host": "n1", "rank": 0}
    records = [json.loads(line) for line in events.read_text().splitlines()]
    records = [record for record in records if record["time"] < START_S + 12] + [
        {"time": START_S + at, **fields} for at, fields in (
            (12, {"event": "lost", "host": "n2", "why": "switched off"}),
            (13, {"event": "rank ended", **rank_0, "code": None, "signal": 15}),
            (13, {"event": "ended", "attempt": 0, "exit_code": 1}),
            (14, {"event": "started", "attempt": 1, "world_size": 1}),
            (15, {"event": "rank started", **rank_0, "pid": 11}),
            (38, {"event": "exception", **rank_0, "type": "ValueError", "message": "boom"}),
            (39, {"event": "rank ended", **rank_0, "code": 1, "signal": None}),
        )
    ]  # fmt: skip
    write_records(events, records)
    result = json.loads((path / names.RESULT).read_text())
    result["first_failure"] |= rank_0
    (path / names.RESULT).write_text(json.dumps(result))
    run = read_run(path)
    first, second = run.timeline.rows
    assert [mark.kind for mark in first.marks] == ["failed"]
    assert [mark.kind for mark in second.marks] == ["lost"]
    assert [
        (round(record.at - run.timeline.moments[0].at), record.text)
        for record in run.timeline.moments
    ] == [
        (0, "lost n2: switched off"),
        (2, "all ranks were started again (attempt 2)"),
        (26, "rank 0 on n1: ValueError: boom"),
    ]
    assert "Rank 0 on n1 failed; rank 1 on n2 was lost for good" in visible_text(text_of(path))


def test_moved_rank_is_labeled_with_all_hosts(tmp_path: Path) -> None:
    """The plan in the folder belongs to the last start, in which n3 replaces n2."""
    path = make_run(tmp_path / "run")
    plan = json.loads((path / names.PLAN).read_text())
    plan["nodes"] = [
        {"host": host, "ranks": [{"rank": rank}]} for rank, host in enumerate(("n1", "n3"))
    ]
    (path / names.PLAN).write_text(json.dumps(plan))
    events = path / names.EVENTS
    records = [json.loads(line) for line in events.read_text().splitlines()]
    records = [record for record in records if record["time"] < START_S + 12] + [
        {"time": START_S + 12, "event": "lost", "host": "n2", "why": "switched off"},
        {"time": START_S + 14, "event": "started", "attempt": 1, "world_size": 2},
        {"time": START_S + 15, "event": "rank started", "host": "n3", "rank": 1, "pid": 11},
    ]
    write_records(events, records)
    assert [row.label for row in read_run(path).timeline.rows] == [
        "rank 0 on n1", "rank 1 on n2, then n3"]  # fmt: skip


def test_computing_share_matches_terminal(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    assert "76% of a step (mean of all ranks)" in visible_text(text_of(path))
    event = {"time": START_S + 39, "host": "n1", "rank": 0, "event": "trained", "steps": 150,
             "parts": {"computing": 0.39, "waiting": 0.61}}  # fmt: skip
    with (path / names.EVENTS).open("a") as events:
        events.write(json.dumps(event) + "\n")
    assert "39% of a step (rank that waited most)" in visible_text(text_of(path))


def test_steps_are_not_shown_as_evaluation(tmp_path: Path) -> None:
    """Example: a fast training with several epochs between two records of step timings."""
    folder = make_run(tmp_path / "run")
    records = [json.loads(line) for line in (folder / names.METRICS).read_text().splitlines()]
    thinned = [
        record for record in records if record["split"] != "pace" or record["epoch"] % 3 == 0
    ]
    write_records(folder / names.METRICS, thinned)
    for row in read_run(folder).timeline.rows:
        evaluated = sum(
            span.end - span.start for span in row.spans if span.activity == "evaluating"
        )
        assert evaluated == pytest.approx(15 * 0.4)
        divided = sum(cell.end - cell.start for cell in row.cells)
        assert divided == pytest.approx(15 * 2 - 14 * 0.4, abs=0.1)


def test_large_timeline_reaches_end_of_run(tmp_path: Path) -> None:
    """The run has thousands of evaluations and a lost host in between, which must stay visible."""
    folder = make_run(tmp_path / "run", lost=True)
    history = [json.loads(line) for line in (folder / names.EVENTS).read_text().splitlines()]
    end_s = 10_000.0
    write_records(folder / names.EVENTS, [
        {**record, "time": START_S + (record["time"] - START_S) * end_s / 40} for record in history
    ])  # fmt: skip
    records = []
    for at in range(1, 1500):
        timestamp = START_S + 1500 + at * 5.5
        pace = {"ranks_s": [[0.1] * 6, [0.1] * 6], "split": "pace"}
        records += [{"step": at, "split": "train", "loss": 1.0, "time": timestamp},
                    {"step": at, **pace, "time": timestamp},
                    {"step": at, "split": "test", "loss": 1.0, "time": timestamp + 2}]  # fmt: skip
    write_records(folder / names.METRICS, records)
    rows = read_run(folder).timeline.rows
    assert rows[0].cells[-1].end == pytest.approx(1250 + 1499 * 5.5, abs=30)
    for row in rows:
        assert len(row.spans) <= 2 * MAX_SPANS
        assert len(row.cells) <= 3 * MAX_CELLS
        lost_spans = [span for span in row.spans if span.activity == "gone"]
        assert len(lost_spans) == (row.rank == 1)
        for span in lost_spans:
            assert all(
                not (record.start < span.end and record.end > span.start) for record in row.cells
            )


def test_straggler_is_shown_in_its_row_after_regroup(tmp_path: Path) -> None:
    """The event identifies it by its number in the group, which changes when a rank is lost."""
    folder = make_run(tmp_path / "run")
    records = [json.loads(line) for line in (folder / names.EVENTS).read_text().splitlines()]
    source = {"rank": 1, "host": "n2"}
    fields = {"straggler": 0, "its_host": "n2", "cause": "cpu", "text": "it is slow"}
    records += [
        {"time": START_S + 12, "host": "n1", "event": "lost", "why": "off"},
        {
            "time": START_S + 12,
            "event": "regroup",
            "generation": 1,
            "members": [1],
            "planned": False,
        },
        {"time": START_S + 20, **source, "event": "straggler", **fields},
    ]
    write_records(folder / names.EVENTS, sorted(records, key=lambda record: record["time"]))
    rows = read_run(folder).timeline.rows
    assert [row.rank for row in rows if row.slowdowns] == [1]
    assert [row.label for row in rows] == ["rank 0 on n1", "rank 1 on n2"]


def test_number_columns_are_right_aligned() -> None:
    """Numeric columns and their titles are aligned right, mixed columns left."""
    rows = [["a", "1", "2:3"], ["b", "22", "3"], ["c", "", "4"]]
    page = html(Page("x", "good", "y", (), [Section("z", [Table(["", "n", "m"], rows, "t")])]))
    assert '<th scope="col" class="number">n</th><th scope="col">m</th>' in page
    assert page.count('class="number"') == 1 + 3


def test_first_failure_is_shown_at_top(tmp_path: Path) -> None:
    text = visible_text(text_of(make_run(tmp_path / "run", failed=True)))
    assert "Failed after 40 s: rank 1 on n2 has a bug" in text
    assert "Failed first: rank 1 on n2: ValueError: boom" in text
    assert "Rank 1 on n2 failed" in text
    assert "Rank 0 on n1" not in text  # it only ended after the failure
    assert text.index("mend it") < text.index("All ranks over time")
    assert "(away for" not in text  # it never came back
    assert "<details open><summary>Traceback of rank 1 on n2" in text_of(tmp_path / "run")
    resumes = "training resumes from the checkpoint of step"
    assert f"With --run-dir {tmp_path / 'run'} {resumes}" in text


def test_escapes_untrusted_text(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", name=HOSTILE)
    for name in (names.PLAN, names.HOSTS, names.EVENTS):
        text = (folder / name).read_text()
        evil = json.dumps(HOSTILE)[1:-1]
        (folder / name).write_text(text.replace("n2", evil).replace("2 CPUs", evil))
    page = text_of(folder)
    assert page.count("<script") == page.count("</script>") == 3
    assert "<img" not in page
    assert "\u2028" not in page
    assert "\x1b" not in page
    block = re.search(r'<script type="application/json" id="pictures">(.*?)</script>', page, re.S)
    assert block
    assert any("alert(1)" in str(record) for record in json.loads(block[1]))


def test_redacts_secrets(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    plan = json.loads((folder / names.PLAN).read_text())
    plan["typed"]["command"] += " --api-key hunter2hunter2"
    plan["environment"]["HF"] = "hf_" + "a" * 30
    (folder / names.PLAN).write_text(json.dumps(plan))
    page = text_of(folder)
    assert "hunter2" not in page
    assert "hf_aaa" not in page


@pytest.mark.parametrize(
    "broken", [names.PLAN, names.HOSTS, names.EVENTS, names.METRICS, names.RESULT]
)
@pytest.mark.parametrize("damage", ["missing", "cut", "list", "numbers"])
def test_names_missing_or_damaged_files(tmp_path: Path, broken: str, damage: str) -> None:
    path = make_run(tmp_path / "run", lost=True) / broken
    if damage == "missing":
        path.unlink()
    else:
        cut = path.read_text()[:30] if damage == "cut" else ""
        path.write_text({"list": "[1, 2]", "numbers": "1e999 nan"}.get(damage, cut))
    text = visible_text(text_of(path.parent))
    assert f"{broken} {'is missing' if damage == 'missing' else 'cannot be read'}" in text


def test_invalid_values_do_not_crash(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", slow=True, lost=True)
    invalid_values: list[Any] = [None, -1, 1e308, "x", [], {}, [[None]], True, 1 << 70]
    for name in (names.PLAN, names.HOSTS, names.RESULT, names.FINDINGS):
        whole = json.loads((folder / name).read_text())
        for key in whole:
            for value in invalid_values:
                (folder / name).write_text(json.dumps({**whole, key: value}))
                assert "<main" in text_of(folder), (name, key, value)
        (folder / name).write_text(json.dumps(whole))
    for name in (names.EVENTS, names.METRICS):
        records = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for value in invalid_values:
            thinned = [{key: actual if key == "event" else value for key, actual in record.items()}
                    for record in records]  # fmt: skip
            write_records(folder / name, thinned)
            assert "<main" in text_of(folder), (name, value)


def test_thins_large_metrics(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    with (folder / names.METRICS).open("w") as file:
        for step in range(40_000):
            file.write(f'{{"step": {step}, "split": "train", "loss": {1 / (step + 1)}}}\n' * 2)
    run = read_run(folder)
    assert len(run.curves[0].points) <= 600
    assert run.curves[0].last.step == 39_999
    page = html(run_page.build_page(run))
    assert len(page) < 1_200_000
    assert "metrics.jsonl is very long" in visible_text(page)


def test_thinning_keeps_extremes() -> None:
    points = [Point(step, None, 5.0 if step == 777 else math.sin(step)) for step in range(5000)]
    thinned = thin_points(points, 100)
    assert len(thinned) <= 102
    assert points[777] in thinned
    assert (thinned[0], thinned[-1]) == (points[0], points[-1])


def test_samples_records_across_large_file(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    write_records(path, [{"n": number} for number in range(50_000)])
    sampled, whole = sampled_records(path, 64 << 10)
    numbers = [record["n"] for record in sampled]
    assert not whole
    assert numbers == sorted(numbers)
    assert (numbers[0], numbers[-1]) == (0, 49_999)
    assert max(b - a for a, b in itertools.pairwise(numbers)) < 1500


def test_comparison_page(tmp_path: Path) -> None:
    runs = [
        read_run(make_run(tmp_path / "a")),
        read_run(make_run(tmp_path / "b", lr=0.5, slow=True)),
    ]
    text = visible_text(html(comparison_page.build_page(runs, [Goal("accuracy", 0.8)])))
    assert "First to reach it: a, after 8.9 s" in text
    assert re.search(r"arguments\s+0\.1\s+0\.5", text)
    assert "accuracy, test, over time" in text
    assert "2 ranks" in text
    assert "was the quickest" in text
    records = (tmp_path / "b" / names.METRICS).read_text()
    last = json.loads(records.splitlines()[-1])
    (tmp_path / "b" / names.METRICS).write_text(records + json.dumps({**last, "step": 600}) + "\n")
    longer = visible_text(html(comparison_page.build_page([runs[0], read_run(tmp_path / "b")], [])))
    assert "a trained 150 steps in 40 s; b trained 600 steps in 40 s" in longer
    rows = comparison_page.differences([comparison_page.configuration(run) for run in runs])
    assert [row[0] for row in rows] == ["arguments"]


def test_report_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        make_run(tmp_path / "runs" / name)
    invoke_cli = CliRunner().invoke
    records = invoke_cli(program, ["report", "a"]).output.splitlines()
    assert records[0] == "Finished: 2 ranks on 2 hosts trained 150 steps in 40 s."
    assert "Took            40 s" in records
    assert records[-1] == "runs/a/report.html"
    assert invoke_cli(program, ["report", "a", "--out", "x.html"]).output.endswith("\nx.html\n")
    comparison = invoke_cli(program, ["report", "a", "b", "--to", "test.accuracy=0.95"])
    assert comparison.exit_code == 0
    assert re.search(r"^a +Finished: .* 150 steps", comparison.output, re.M)
    assert (tmp_path / "runs/comparison.html").is_file()
    assert invoke_cli(program, ["report", "a", "b", "--to", "accuracy"]).exit_code == 2
    assert "several runs" in str(
        invoke_cli(program, ["report", "a", "--to", "loss=1"]).exception.remedy
    )  # type: ignore[union-attr]


def test_unwritable_report_is_warning(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / names.REPORT).mkdir()
    assert "cannot write the report" in write_at_end(folder)
    assert not [*folder.glob(f".{names.REPORT}*")]


@pytest.mark.skipif(shutil.which(PROGRAM) is None, reason="no Chromium here: make test installs it")
def test_page_renders_in_browser(tmp_path: Path) -> None:
    """On a phone and a desktop, light and dark: complete, no errors, no network, no clipping."""
    page = make_run(tmp_path / "run", slow=True, lost=True) / names.REPORT
    assert write_at_end(page.parent) == ""
    hostile = make_run(tmp_path / "evil", name=HOSTILE, failed=True) / names.REPORT
    assert write_at_end(hostile.parent) == ""
    with Chromium(tmp_path) as browser:
        for file, width, dark in ((page, 390, True), (page, 1280, False), (hostile, 390, False)):
            browser.show(file, width, dark=dark)
            pictures = browser.ask("document.querySelectorAll('.picture').length")
            assert browser.ask("document.querySelectorAll('.picture svg').length") == pictures >= 5
            assert browser.ask("document.documentElement.scrollWidth") <= width
            assert (
                browser.ask("document.querySelectorAll('.picture[aria-label]').length") == pictures
            )
        browser.show(page, 1280)
        assert "slow: slows the others down" in browser.ask(
            "document.querySelector('#p0').textContent"
        )
        browser.ask("document.querySelector('#p0').focus()")
        browser.press("ArrowRight")
        assert "lost n2" in browser.ask("document.querySelector('#r0').textContent")
        assert "rank 1 on n2" in browser.ask("document.querySelector('#p0').textContent")
        for width in (390, 1280):  # the map of hosts: nothing outside of it, no overlapping text
            browser.show(page, width)
            assert browser.ask(OVERLAPS) == []
        number = browser.ask("document.querySelector('[aria-label^=Links]').id.slice(1)")
        browser.ask(f"document.querySelector('#p{number}').focus()")
        browser.press("ArrowRight")
        readout = browser.ask(f"document.querySelector('#r{number}').textContent")
        assert readout == "n1 → n2: 900 Mbit/s"
        flat = browser.ask("document.querySelector('[aria-label^=lr]').textContent")  # always 0.1
        assert "0.09" in flat
        assert "0.11" in flat
        browser.printed(tmp_path / "page.pdf")
    assert browser.complaints == []
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
