"""What a board knows of a run: from events as they come, and from the file that is made of it."""

from __future__ import annotations

import io
import json
from typing import Any, cast

import pytest

from paceline.cli.runs.describe import describe_loads, describe_ranks
from paceline.launch.terminal.live import LiveScreen
from paceline.launch.terminal.run_state import MAX_POINTS, Curve, NodeWait, RunState, format_time
from paceline.launch.terminal.script_progress import ScriptProgress, find_progress
from paceline.spec.events import PARTS, Event


def told(board: RunState, kind: str, host: str = "", rank: int | None = None, now: float = 0.0,
         **fields: Any) -> None:  # fmt: skip
    board.apply(Event(kind, host, rank, 1000.0 + now, fields), now)


def training(hosts: int = 2, each: int = 1) -> RunState:
    """A board of ranks that train at step 10."""
    board = RunState()
    for rank in range(hosts * each):
        told(board, "rank started", f"n{rank // each + 1}", rank, pid=5)
    told(board, "started", attempt=0, world_size=hosts * each)
    for rank in range(hosts * each):
        told(board, "heartbeat", f"n{rank // each + 1}", rank, step=10, phase="train")
    return board


def test_where_ranks_are() -> None:
    board = training()
    told(board, "heartbeat", "n2", 1, 3.0, step=12, phase="evaluate")
    said = board.to_json(5.0, 2000.0)
    assert [(one["step"], one["phase"], one["silent_s"]) for one in said["ranks"]] == [
        (10, "train", 5.0), (12, "evaluate", 2.0)
    ]  # fmt: skip
    assert describe_ranks(said["ranks"]) == [
        "rank 0 on n1: step 10, train, no word for 5 s", "rank 1 on n2: step 12, evaluate"
    ]  # fmt: skip


def test_a_script_that_tells_nothing() -> None:
    board = RunState()
    told(board, "rank started", "n1", 0, pid=5)
    said = board.to_json(50.0, 2000.0)
    assert (said["ranks"][0]["step"], said["ranks"][0]["silent_s"]) == (None, None)
    assert describe_ranks(said["ranks"]) == ["rank 0 on n1: running"]


def test_parts_of_a_step_by_the_numbers_of_the_plan() -> None:
    """After a loss the group's second rank is the plan's third."""
    board = training(3)
    seconds = [[0.0, 0.6, 0.3, 0.1, 0.0, 0.0], [0.0, 0.9, 0.0, 0.1, 0.0, 0.0]]
    told(board, "regroup", generation=1, members=[0, 2], planned=False)
    told(board, "pace", "n1", 0, ranks_s=seconds, rates=[8.0, 8.0])
    assert board.ranks[1].parts == {}
    assert board.ranks[2].parts["computing"] == pytest.approx(0.9)
    assert board.ranks[2].samples_per_s == 8.0
    told(board, "pace", "n1", 0, ranks_s=[*seconds, seconds[0]], rates=[1.0] * 3)  # came late
    assert board.ranks[2].samples_per_s == 8.0
    told(board, "straggler", "n1", 0, straggler=1, its_host="n3", cause="cpu", part=0.3, text="x")
    assert board.straggler is not None
    assert (board.straggler.rank, board.straggler.part) == (2, 0.3)
    told(board, "straggler over", "n1", 0, straggler=1, text="x")
    assert board.straggler is None


def test_ends_losses_and_a_new_start() -> None:
    board = training(3)
    told(board, "rank ended", "n1", 0, code=0, signal=None)
    told(board, "exception", "n2", 1, type="ValueError", message="no")
    told(board, "rank ended", "n2", 1, code=1, signal=None)
    told(board, "lost", "n3", why="no word from n3 for 6.5 s")
    assert [(one.state, one.problem) for one in board.ranks.values()] == [
        ("ended", ""), ("failed", "ValueError"),
        ("lost", f"its host was lost at {format_time(1000.0)}"),
    ]  # fmt: skip
    assert board.hosts["n3"].state == "lost"
    assert [one.text for one in board.news] == [
        "rank 1 on n2: ValueError: no", "rank 1 on n2 ended with exit status 1",
        "lost n3: no word from n3 for 6.5 s",
    ]  # fmt: skip
    told(board, "ended", attempt=0, exit_code=1)
    assert len(board.ranks) == 3  # shown until the next start
    told(board, "rank started", "n3", 0, pid=5)
    assert list(board.ranks) == [0]
    assert board.hosts["n3"].state == "ok"


def test_what_a_host_counted() -> None:
    board, first = training(1), {"cpu": [100, 1000], "memory": [100, 25], "gpus": [0.5]}
    board.add_vitals("n1", {**first, "time": 10.0, "links": {"eth0": [0, 0]}}, "eth0")
    host = board.hosts["n1"]
    assert (host.cpu, host.memory, host.in_bps, list(host.gpus)) == (None, 0.75, None, [0.5])
    second = {**first, "cpu": [175, 1100], "time": 12.0, "links": {"eth0": [500_000, 0]}}
    board.add_vitals("n1", second, "eth0")
    assert (host.cpu, host.in_bps, host.out_bps) == (0.75, 2e6, 0.0)
    said = board.to_json(0.0, 0.0)["hosts"]
    assert describe_loads(said) == [
        "n1: CPU 75%, memory 75%, GPU 0 50%, receives 2 Mbit/s, sends 0 bit/s"
    ]  # fmt: skip


def test_the_file_says_all_of_it() -> None:
    board = training(2)
    told(board, "progress", "n1", 0, step=10, steps=20, loss=0.5)
    row = [0.1, 0.2, 0.3, 0.2, 0.1, 0.1]
    told(board, "pace", "n1", 0, ranks_s=[row, row], rates=[8.0, 9.0])
    told(board, "straggler", "n1", 0, straggler=1, its_host="n2", cause="cpu", part=0.3, text="x")
    told(board, "rank frozen", "n2", 1, how="stopped", seconds=3.0, on="", pid=5)
    board.add_vitals("n2", {"time": 1.0, "cpu": [1, 2], "memory": [4, 1], "links": {}, "gpus": []})
    board.hang = "rank 1 on n2 is stuck"
    board.waiting = NodeWait("1 node of at least 2: waiting for n2", 1990.0, 2590.0)
    said = json.loads(json.dumps(board.to_json(7.0, 2000.0)))
    other = RunState()
    assert other.load(said, 107.0, 2000.0)
    assert other.to_json(107.0, 2000.0) == said
    assert sum(other.ranks[0].parts.values()) == pytest.approx(1.0, abs=0.01)
    assert set(other.ranks[0].parts) == set(PARTS)


OLD = {
    "time": 1.0, "hang": "", "ranks": [
        {"rank": 0, "host": "n1", "step": 3, "phase": "train", "silent_s": 0.5}
    ],
}  # fmt: skip


def test_files_of_others() -> None:
    board = RunState()
    assert board.load(OLD, 10.0, 3.0)
    assert board.ranks[0].report_age_s(10.0) == 2.5
    for wrong in (None, [], {}, {**OLD, "ranks": [{"rank": "x"}]}, {**OLD, "hosts": 3},
                  {**OLD, "slow": {"rank": 0}}, {**OLD, "time": float("nan")}):  # fmt: skip
        assert not board.load(wrong, 10.0, 3.0)


def test_curves() -> None:
    board = RunState()
    for step in range(3):
        board.add_metrics({"split": "train", "step": step, "samples": 8, "loss": 1.0 / (step + 1)})
    board.add_metrics({"split": "test", "step": 2, "epoch": 0, "time": 1.7e9, "loss": 0.5,
                  "accuracy": 0.9})  # fmt: skip
    board.add_metrics({"split": "pace", "step": 2, "computing_s": 0.5})
    board.add_metrics({"split": "test", "step": 3, "loss": float("nan")})
    assert {name: curve.values for name, curve in board.curves.items()} == {
        "train loss": [1.0, 0.5, 1.0 / 3], "test loss": [0.5], "test accuracy": [0.9]
    }  # fmt: skip


def test_a_long_curve_and_one_that_is_resumed() -> None:
    curve = Curve()
    for step in range(10_000):
        curve.add(step, float(step))
    assert MAX_POINTS / 2 <= len(curve.points) <= MAX_POINTS
    assert curve.points[0] == (0, 0.0)
    curve.add(100, -1.0)
    assert curve.points[-1][0] <= 100


def test_a_lost_host_and_what_is_done_about_it_are_told_in_the_plans_order() -> None:
    board = RunState()
    for rank in (2, 0, 1):  # as they happen to speak
        told(board, "rank started", f"n{rank + 1}", rank, pid=5)
    told(board, "lost", "n2", why="no route to host")
    board.set_reconnects({"n2": "lost, dialled again: no route to host", "n9": "x"})
    said = board.to_json(1.0, 2000.0)
    assert [one["name"] for one in said["hosts"]] == ["n1", "n2", "n3"]
    assert describe_loads(said["hosts"]) == ["n2: lost, dialled again: no route to host"]
    again = RunState()
    assert again.load(json.loads(json.dumps(said)), 1.0, 2000.0)
    assert again.to_json(1.0, 2000.0) == said
    told(board, "rank started", "n2", 1, pid=6)
    board.set_reconnects({})
    assert describe_loads(board.to_json(2.0, 2001.0)["hosts"]) == []


def test_a_start_without_a_lost_host_is_one_line() -> None:
    """Ranks that were stopped for it need no attention."""
    board = training(2)
    told(board, "lost", "n2", why="silent for 6.5 s")
    told(board, "rank ended", "n1", 0, code=None, signal=15)
    told(board, "ended", attempt=0, exit_code=1)
    told(board, "started", attempt=1, world_size=1)
    assert [one.text for one in board.news] == [
        "lost n2: silent for 6.5 s", "second start; stopped all ranks to go on with n1 alone",
    ]  # fmt: skip
    told(board, "rank ended", "n1", 0, code=None, signal=15)  # by somebody else
    assert board.news[-1].text == "rank 0 on n1 was ended by SIGTERM"


def test_a_checkpoint_is_offered_where_the_script_keeps_some() -> None:
    live = LiveScreen(board := training(1), cast(Any, io.StringIO()))
    live._on_key("s")
    assert "session.checkpoints" in live._notice
    live._on_key("?")
    assert not any("save a checkpoint" in line for line in live._page)
    live._on_key("escape")
    told(board, "keeps checkpoints", "n1", 0, keep=3)
    live._on_key("?")
    assert any("save a checkpoint" in line for line in live._page)


def test_equal_lines_of_ranks_are_one_and_a_bar_stands_at_the_top() -> None:
    board = training(1)
    for rank in (0, 1):
        told(board, "rank started", f"n{rank + 1}", rank, pid=5)
    live = LiveScreen(board, cast(Any, io.StringIO()))
    bar = "\repoch 3:  45%|####      | 9/20 [00:04<00:05,  3.31it/s, loss=0.12]"
    live.watch_bar(1, bar.replace("3.31", "1.00").encode())
    for rank in (0, 1):
        live.log(rank, ["warning", f"mine {rank}", bar[1:]], f"[n{rank + 1}/{rank}]")
    live.watch_bar(0, bar.encode())
    live.watch_bar(1, bar.replace("3.31", "2.00").encode())
    view = live._view()
    assert [*view.log] == ["[all] warning", "[n1/0] mine 0", "[n2/1] mine 1"]
    assert view.script == ScriptProgress("epoch 3", 9, 20, "3.31it/s", "00:05", "loss=0.12")
    live.log(0, ["warning"], "[n1/0]")  # once more
    assert live._view().log[-1] == "[n1/0] warning"


@pytest.mark.parametrize(("text", "found"), [
    ("  0%|          | 0/150 [00:00<?, ?it/s]", ScriptProgress("", 0, 150, "?it/s", "?", "")),
    ("a: 12%|#2 | 1.2k/3M [00:10<01:02, 2.1s/it]",
     ScriptProgress("a", 1200, 3_000_000, "2.1s/it", "01:02", "")),
    ("Epoch 1/-2 ━━━━ 20/30 0:00:00 • 0:00:10 41.43it/s v_num: 1",
     ScriptProgress("Epoch 1/-2", 20, 30, "41.43it/s", "0:00:10", "v_num: 1")),
    ("50%| of it", None),
    ("a • b", None),
])  # fmt: skip
def test_bars_of_scripts_are_read(text: str, found: ScriptProgress | None) -> None:
    assert find_progress(text.encode()) == found
    assert find_progress(f"other\r{text}".encode()) == found
