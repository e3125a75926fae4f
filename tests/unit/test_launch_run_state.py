"""Tests the state of a run that is built from its events, and the file that stores it."""

from __future__ import annotations

import io
import json
from typing import Any, cast

import pytest

from paceline.cli.runs.describe import describe_loads, describe_ranks
from paceline.launch.terminal.live import LiveScreen
from paceline.launch.terminal.run_state import MAX_POINTS, Curve, NodeWait, RunState
from paceline.launch.terminal.script_progress import ScriptProgress, find_progress
from paceline.spec.events import PARTS, Event, read_events
from paceline.spec.formatting import format_time


def emit(run: RunState, kind: str, host: str = "", rank: int | None = None, time_s: float = 0.0,
         **fields: Any) -> None:  # fmt: skip
    run.apply(Event(kind, host, rank, 1000.0 + time_s, fields), time_s)


def training(hosts: int = 2, ranks_per_host: int = 1) -> RunState:
    """Returns the state of a run whose ranks train at step 10."""
    run = RunState()
    for rank in range(hosts * ranks_per_host):
        emit(run, "rank started", f"n{rank // ranks_per_host + 1}", rank, pid=5)
    emit(run, "started", attempt=0, world_size=hosts * ranks_per_host)
    for rank in range(hosts * ranks_per_host):
        emit(run, "heartbeat", f"n{rank // ranks_per_host + 1}", rank, step=10, phase="train")
    return run


def test_shows_step_and_silence_of_ranks() -> None:
    run = training()
    emit(run, "heartbeat", "n2", 1, 3.0, step=12, phase="evaluate")
    snapshot = run.to_json(5.0, 2000.0)
    assert [(item["step"], item["phase"], item["silent_s"]) for item in snapshot["ranks"]] == [
        (10, "train", 5.0), (12, "evaluate", 2.0)
    ]  # fmt: skip
    assert describe_ranks(snapshot["ranks"]) == [
        "rank 0 on n1: step 10, train, no word for 5 s", "rank 1 on n2: step 12, evaluate"
    ]  # fmt: skip


def test_shows_rank_without_heartbeats_as_running() -> None:
    run = RunState()
    emit(run, "rank started", "n1", 0, pid=5)
    snapshot = run.to_json(50.0, 2000.0)
    assert (snapshot["ranks"][0]["step"], snapshot["ranks"][0]["silent_s"]) == (None, None)
    assert describe_ranks(snapshot["ranks"]) == ["rank 0 on n1: running"]


def test_step_timings_use_rank_numbers_of_plan() -> None:
    """After the loss of rank 1, the group's second rank is rank 2 of the plan."""
    run = training(3)
    seconds = [[0.0, 0.6, 0.3, 0.1, 0.0, 0.0], [0.0, 0.9, 0.0, 0.1, 0.0, 0.0]]
    emit(run, "regroup", generation=1, members=[0, 2], planned=False)
    emit(run, "pace", "n1", 0, ranks_s=seconds, rates=[8.0, 8.0])
    assert run.ranks[1].parts == {}
    assert run.ranks[2].parts["computing"] == pytest.approx(0.9)
    assert run.ranks[2].samples_per_s == 8.0
    emit(run, "pace", "n1", 0, ranks_s=[*seconds, seconds[0]], rates=[1.0] * 3)  # outdated
    assert run.ranks[2].samples_per_s == 8.0
    emit(run, "straggler", "n1", 0, straggler=1, its_host="n3", cause="cpu", part=0.3, text="x")
    assert run.straggler is not None
    assert (run.straggler.rank, run.straggler.part) == (2, 0.3)
    emit(run, "straggler over", "n1", 0, straggler=1, text="x")
    assert run.straggler is None


def test_records_exits_losses_and_restart() -> None:
    run = training(3)
    emit(run, "rank ended", "n1", 0, code=0, signal=None)
    emit(run, "exception", "n2", 1, type="ValueError", message="no")
    emit(run, "rank ended", "n2", 1, code=1, signal=None)
    emit(run, "lost", "n3", why="no word from n3 for 6.5 s")
    assert [(item.state, item.problem) for item in run.ranks.values()] == [
        ("ended", ""), ("failed", "ValueError"),
        ("lost", f"its host was lost at {format_time(1000.0)}"),
    ]  # fmt: skip
    assert run.hosts["n3"].state == "lost"
    assert [item.text for item in run.news] == [
        "rank 1 on n2: ValueError: no", "rank 1 on n2 ended with exit status 1",
        "lost n3: no word from n3 for 6.5 s",
    ]  # fmt: skip
    emit(run, "ended", attempt=0, exit_code=1)
    assert len(run.ranks) == 3  # kept until the next start
    emit(run, "rank started", "n3", 0, pid=5)
    assert list(run.ranks) == [0]
    assert run.hosts["n3"].state == "ok"


def test_computes_host_loads() -> None:
    run, first = training(1), {"cpu": [100, 1000], "memory": [100, 25], "gpus": [0.5]}
    run.add_vitals("n1", {**first, "time": 10.0, "links": {"eth0": [0, 0]}}, "eth0")
    host = run.hosts["n1"]
    assert (host.cpu, host.memory, host.in_bps, list(host.gpus)) == (None, 0.75, None, [0.5])
    second = {**first, "cpu": [175, 1100], "time": 12.0, "links": {"eth0": [500_000, 0]}}
    run.add_vitals("n1", second, "eth0")
    assert (host.cpu, host.in_bps, host.out_bps) == (0.75, 2e6, 0.0)
    snapshot = run.to_json(0.0, 0.0)["hosts"]
    assert describe_loads(snapshot) == [
        "n1: CPU 75%, memory 75%, GPU 0 50%, receives 2 Mbit/s, sends 0 bit/s"
    ]  # fmt: skip


def test_state_round_trips_through_json() -> None:
    run = training(2)
    emit(run, "progress", "n1", 0, step=10, steps=20, loss=0.5)
    row = [0.1, 0.2, 0.3, 0.2, 0.1, 0.1]
    emit(run, "pace", "n1", 0, ranks_s=[row, row], rates=[8.0, 9.0])
    emit(run, "straggler", "n1", 0, straggler=1, its_host="n2", cause="cpu", part=0.3, text="x")
    emit(run, "rank frozen", "n2", 1, how="stopped", seconds=3.0, on="", pid=5)
    run.add_vitals("n2", {"time": 1.0, "cpu": [1, 2], "memory": [4, 1], "links": {}, "gpus": []})
    run.hang = "rank 1 on n2 is stuck"
    run.waiting = NodeWait("1 node of at least 2: waiting for n2", 1990.0, 2590.0)
    snapshot = json.loads(json.dumps(run.to_json(7.0, 2000.0)))
    restored = RunState()
    assert restored.load(snapshot, 107.0, 2000.0)
    assert restored.to_json(107.0, 2000.0) == snapshot
    assert sum(restored.ranks[0].parts.values()) == pytest.approx(1.0, abs=0.01)
    assert set(restored.ranks[0].parts) == set(PARTS)


LEGACY = {
    "time": 1.0, "hang": "", "ranks": [
        {"rank": 0, "host": "n1", "step": 3, "phase": "train", "silent_s": 0.5}
    ],
}  # fmt: skip


def test_loads_legacy_and_rejects_invalid_state() -> None:
    run = RunState()
    assert run.load(LEGACY, 10.0, 3.0)
    assert run.ranks[0].report_age_s(10.0) == 2.5
    for invalid in (None, [], {}, {**LEGACY, "ranks": [{"rank": "x"}]}, {**LEGACY, "hosts": 3},
                  {**LEGACY, "slow": {"rank": 0}}, {**LEGACY, "time": float("nan")}):  # fmt: skip
        assert not run.load(invalid, 10.0, 3.0)


def test_collects_metric_curves() -> None:
    run = RunState()
    for step in range(3):
        run.add_metrics({"split": "train", "step": step, "samples": 8, "loss": 1.0 / (step + 1)})
    run.add_metrics({"split": "test", "step": 2, "epoch": 0, "time": 1.7e9, "loss": 0.5,
                  "accuracy": 0.9})  # fmt: skip
    run.add_metrics({"split": "pace", "step": 2, "computing_s": 0.5})
    run.add_metrics({"split": "test", "step": 3, "loss": float("nan")})
    assert {name: curve.values for name, curve in run.curves.items()} == {
        "train loss": [1.0, 0.5, 1.0 / 3], "test loss": [0.5], "test accuracy": [0.9]
    }  # fmt: skip


def test_curve_is_thinned_and_truncated_on_resume() -> None:
    curve = Curve()
    for step in range(10_000):
        curve.add(step, float(step))
    assert MAX_POINTS / 2 <= len(curve.points) <= MAX_POINTS
    assert curve.points[0] == (0, 0.0)
    curve.add(100, -1.0)
    assert curve.points[-1][0] <= 100


def test_lost_host_is_listed_in_plan_order() -> None:
    run = RunState()
    for rank in (2, 0, 1):  # in any order
        emit(run, "rank started", f"n{rank + 1}", rank, pid=5)
    emit(run, "lost", "n2", why="no route to host")
    run.set_reconnects({"n2": "lost, dialled again: no route to host", "n9": "x"})
    snapshot = run.to_json(1.0, 2000.0)
    assert [item["name"] for item in snapshot["hosts"]] == ["n1", "n2", "n3"]
    assert describe_loads(snapshot["hosts"]) == ["n2: lost, dialled again: no route to host"]
    reloaded = RunState()
    assert reloaded.load(json.loads(json.dumps(snapshot)), 1.0, 2000.0)
    assert reloaded.to_json(1.0, 2000.0) == snapshot
    emit(run, "rank started", "n2", 1, pid=6)
    run.set_reconnects({})
    assert describe_loads(run.to_json(2.0, 2001.0)["hosts"]) == []


def test_restart_with_fewer_hosts_is_single_message() -> None:
    """Ranks that were stopped for the restart are not mentioned."""
    run = training(2)
    emit(run, "lost", "n2", why="silent for 6.5 s")
    emit(run, "rank ended", "n1", 0, code=None, signal=15)
    emit(run, "ended", attempt=0, exit_code=1)
    emit(run, "started", attempt=1, world_size=1)
    assert [item.text for item in run.news] == [
        "lost n2: silent for 6.5 s", "second start; stopped all ranks to go on with n1 alone",
    ]  # fmt: skip
    emit(run, "rank ended", "n1", 0, code=None, signal=15)  # not by the launcher
    assert run.news[-1].text == "rank 0 on n1 was ended by SIGTERM"


def test_checkpoint_key_requires_checkpoints_in_script() -> None:
    live = LiveScreen(run := training(1), cast(Any, io.StringIO()))
    live._on_key("s")
    assert "session.checkpoints" in live._notice
    live._on_key("?")
    assert not any("save a checkpoint" in line for line in live._page)
    live._on_key("escape")
    emit(run, "keeps checkpoints", "n1", 0, keep=3)
    live._on_key("?")
    assert any("save a checkpoint" in line for line in live._page)


def test_merges_equal_log_lines_and_shows_progress_bar() -> None:
    run = training(1)
    for rank in (0, 1):
        emit(run, "rank started", f"n{rank + 1}", rank, pid=5)
    live = LiveScreen(run, cast(Any, io.StringIO()))
    bar = "\repoch 3:  45%|####      | 9/20 [00:04<00:05,  3.31it/s, loss=0.12]"
    live.watch_bar(1, bar.replace("3.31", "1.00").encode())
    for rank in (0, 1):
        live.log(rank, ["warning", f"mine {rank}", bar[1:]], f"[n{rank + 1}/{rank}]")
    live.watch_bar(0, bar.encode())
    live.watch_bar(1, bar.replace("3.31", "2.00").encode())
    view = live._view()
    assert [*view.log] == ["[all] warning", "[n1/0] mine 0", "[n2/1] mine 1"]
    assert view.script == ScriptProgress("epoch 3", 9, 20, "3.31it/s", "00:05", "loss=0.12")
    live.log(0, ["warning"], "[n1/0]")  # the same line again
    assert live._view().log[-1] == "[n1/0] warning"


@pytest.mark.parametrize(("text", "expected"), [
    ("  0%|          | 0/150 [00:00<?, ?it/s]", ScriptProgress("", 0, 150, "?it/s", "?", "")),
    ("a: 12%|#2 | 1.2k/3M [00:10<01:02, 2.1s/it]",
     ScriptProgress("a", 1200, 3_000_000, "2.1s/it", "01:02", "")),
    ("Epoch 1/-2 ━━━━ 20/30 0:00:00 • 0:00:10 41.43it/s v_num: 1",
     ScriptProgress("Epoch 1/-2", 20, 30, "41.43it/s", "0:00:10", "v_num: 1")),
    ("50%| of it", None),
    ("a • b", None),
])  # fmt: skip
def test_parses_progress_bars(text: str, expected: ScriptProgress | None) -> None:
    assert find_progress(text.encode()) == expected
    assert find_progress(f"other\r{text}".encode()) == expected


def test_lost_hosts_are_shown_first() -> None:
    hosts = [{"name": f"n{number}", "cpu": 0.5, "state": "running"} for number in range(1, 9)]
    hosts[7] |= {"state": "lost", "trouble": "lost: no route to host"}
    lines = describe_loads(hosts)
    assert lines[0] == "n8: lost: no route to host"
    assert lines[-1] == "and 4 more hosts: --json"


def test_impossible_values_of_events_are_accepted() -> None:
    """The run's supervisor may be hostile."""
    run = RunState()
    run.apply(Event("rank started", "n1", 0, 1.0, {"pid": 3}), 0.0)
    for when in (1e18, -1e18, float("inf")):
        run.apply(Event("lost", "n1", time=when, fields={"why": "x"}), 0.0)
        assert "since ?, until ?" in NodeWait("1 node", when, when).description
    assert run.ranks[0].problem == "its host was lost at ?"
    run.apply(Event("started", fields={"attempt": 0, "world_size": 1 << 24}), 0.0)
    assert len(run._members) == 1 << 24
    line = {"event": "started", "attempt": 0, "world_size": 400_000_000}
    assert read_events([line])[0]["world_size"] is None
