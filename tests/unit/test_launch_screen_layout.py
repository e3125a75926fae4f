"""Tests the text of the live screen: contents, and that it fits the terminal."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.text import Text

from each_case import each_case
from paceline.launch.terminal.render import (
    ASCII,
    UNICODE,
    SymbolSet,
    View,
    cell_counts,
    describe_parts,
    draw_curve,
    format_clock,
    format_rate,
    frame,
    select_ranks,
    truncate,
)
from paceline.launch.terminal.run_state import NodeWait, RunState
from paceline.launch.terminal.script_progress import ScriptProgress
from paceline.spec.events import PARTS, Event

EVEN = [0.02, 0.6, 0.3, 0.08, 0.0, 0.0]
SLOWEST = [0.02, 0.9, 0.0, 0.08, 0.0, 0.0]


def emit(
    board: RunState, kind: str, host: str = "", rank: int | None = None, **fields: Any
) -> None:
    board.apply(Event(kind, host, rank, 1_700_000_000.0, fields), 0.0)


def training_state(hosts: int = 2, each: int = 1, slow: int | None = None) -> RunState:
    """Returns the state of a running training."""
    board, count = RunState(), hosts * each
    for rank in range(count):
        emit(board, "rank started", f"n{rank // each + 1}", rank, pid=5)
    emit(board, "started", attempt=0, world_size=count)
    for rank in range(count):
        emit(board, "heartbeat", f"n{rank // each + 1}", rank, step=100, phase="train")
    seconds = [SLOWEST if rank == slow else EVEN for rank in range(count)]
    emit(board, "pace", "n1", 0, ranks_s=seconds, rates=[406.0] * count)
    emit(board, "progress", "n1", 0, step=100, steps=400, epoch=2, epochs=8, loss=0.3,
         samples_per_s=812.0)  # fmt: skip
    if slow is not None:
        text = f"rank {slow} on n{slow // each + 1} slows the others down by 0.3 s a step"
        emit(board, "straggler", "n1", 0, straggler=slow, cause="cpu", part=0.31, text=text)
    for host, time in itertools.product(range(hosts), (1.0, 2.0)):
        links = {"eth0": [int(time * 1e8), int(time * 2e8)]}
        board.add_vitals(f"n{host + 1}", {"time": time, "cpu": [int(80 * time), int(100 * time)],
                     "memory": [100, 60], "links": links, "gpus": [0.9]}, "eth0")  # fmt: skip
    for step in range(100):
        board.add_metrics({"split": "train", "step": step, "loss": 1 / (step + 1)})
    board.add_metrics({"split": "test", "step": 99, "loss": 0.5, "accuracy": 0.9})
    return board


def draw(board: RunState, columns: int = 80, lines: int = 24, signs: SymbolSet = UNICODE,
          **view: Any) -> str:  # fmt: skip
    screen_lines = frame(board, View(**view), columns, lines, signs)
    assert len(screen_lines) == lines
    assert all(isinstance(item, Text) and item.cell_len <= columns for item in screen_lines)
    return "\n".join(item.plain.rstrip() for item in screen_lines)


def test_healthy_run() -> None:
    board = training_state()
    emit(board, "checkpoint", "n1", 0, step=90)
    screen = draw(board, title="runs/one", seconds=83.0, remaining_s=63.0, log=["[n1/0] hello"],
                   keys="? help")  # fmt: skip
    assert " runs/one · 2 ranks on 2 hosts" in screen
    assert "0:01:23" in screen
    assert "epoch 3/8  step 100/400  812 samples/s  saved at 90" in screen
    assert "25%  0:01:03 left" in screen
    assert "     0 n1    train           100        406  ████" in screen
    assert "  n1       80%   40%   90%   800 Mbit/s   1.6 Gbit/s" in screen
    assert "train loss 0.01 █" in screen
    assert "[n1/0] hello" in screen
    assert screen.endswith(" ? help")
    assert "!" not in screen


def test_slow_and_lost_ranks_are_marked_without_color() -> None:
    board = training_state(3, slow=1)
    emit(board, "lost", "n3", why="no word from n3 for 6.5 s")
    rows = draw(board, title="r").splitlines()
    assert rows[0].startswith(" r · 2 of 3 ranks on 3 hosts")
    (slow,) = [row for row in rows if row.startswith(" !   1 n2    slow 31%")]
    (normal_row,) = [row for row in rows if row.startswith("     0 n1    train")]
    assert slow.count("█") > normal_row.count("█")
    assert slow.count("·") < normal_row.count("·")
    (lost,) = [row for row in rows if row.startswith(" !   2 n3    lost")]
    assert re.search(r"its host was lost at \d\d:\d\d:\d\d$", lost)
    assert any(row.startswith("! ") and "rank 1 on n2 slows the others down" in row for row in rows)
    assert any(row.startswith("! ") and "lost n3: no word" in row for row in rows)


def test_remaining_time_is_shown_on_narrow_screens() -> None:
    board = training_state()
    emit(board, "checkpoint", "n1", 0, step=1_234_500)
    emit(board, "progress", "n1", 0, step=1_234_567, steps=2_345_678, epoch=52, epochs=100,
         loss=0.3, samples_per_s=3001.0)  # fmt: skip
    for columns in (60, 80, 100):
        row = draw(board, columns, remaining_s=40_000.0).splitlines()[1]
        assert row.startswith(" epoch 53/100  step 1,234,567/2,345,678")
        assert row.endswith("53%  11:06:40 left")
    assert "saved" in row


def test_restarted_rank_is_shown_as_starting() -> None:
    board = training_state(3)
    emit(board, "lost", "n3", why="no word")
    emit(board, "rank started", "n3", 2, pid=7)
    assert "     2 n3    starting\n" in draw(board)
    emit(board, "heartbeat", "n3", 2, step=100, phase="train")
    assert "     2 n3    train " in draw(board)


def test_legend_lists_symbols_in_use() -> None:
    """The usual symbols fit on one line of 80 columns; others are listed when they occur."""
    board = training_state()
    legend = "  ██ computing ▒▒ waiting for data ·· waiting for slower ranks ══ communication"
    assert legend in draw(board).splitlines()
    emit(board, "pace", "n1", 0, ranks_s=[[0, 0.5, 0.2, 0, 0.3, 0]] * 2, rates=[1.0] * 2)
    assert "  ██ computing ·· waiting for slower ranks ++ saving checkpoints" in draw(board)
    emit(board, "pace", "n1", 0, ranks_s=[[0.2, 0.2, 0.2, 0.2, 0.1, 0.1]] * 2, rates=[1.0] * 2)
    assert f"{legend}\n  ++ saving checkpoints -- other\n" in draw(board)
    assert "++ saving checkpoints -- other" in draw(board, 80, 24, ASCII)


def test_resolved_straggler_is_single_line() -> None:
    board = training_state(2)
    text = "rank 1 on n2 slows the others down by 0.3 s a step"
    for _ in range(5):
        emit(board, "straggler", "n1", 0, straggler=1, its_host="n2", part=0.3, text=text)
        emit(board, "straggler over", "n1", 0, straggler=1, its_host="n2", text="it keeps up")
    assert [item.text for item in board.news] == [
        "rank 1 on n2 held the others up for 0 s; it keeps up again"
    ] * 5
    assert not any(item.is_bad for item in board.news)


def test_truncated_names_stay_distinguishable() -> None:
    board = RunState()
    hosts = [f"gpu-node-of-the-cluster-{rank}.example.org" for rank in range(3)]
    for rank, host in enumerate(hosts):
        emit(board, "rank started", host, rank, pid=5)
    board.add_metrics({"split": "train", "step": 1, "the_loss_of_" + "a" * 80: 0.5})
    for step in range(9):
        for split, name in (("train", "loss_" + "long" * 20), ("test", "score_" + "long" * 20)):
            board.add_metrics({"split": split, "step": step, name: 0.25})
    keys = "up/down rank's log  a all  s save  t stacks  x stop  d leave  q lines  ? help"
    for columns in (60, 80, 140):
        screen = draw(board, columns, signs=ASCII, title="runs/" + "x" * 200, keys=keys)
        rows = screen.splitlines()
        assert " | 3 ranks on 3 hosts" in rows[0]
        assert all(f"ster-{rank} " in rows[rank + 2] for rank in range(2))
        assert rows[-1].endswith("? help")
        assert " 0.25 __" in screen


def test_shows_reason_for_waiting_for_nodes() -> None:
    board = training_state(2)
    waits = board.waiting = NodeWait.start("1 node of at least 2: dialling n2 again", 600.0)
    displayed = " ".join(draw(board, columns=120).split())
    assert f"waits for nodes: {waits.description}" in displayed


def test_failed_rank() -> None:
    board = training_state()
    emit(board, "exception", "n2", 1, type="ValueError", message="the batch\nis empty")
    emit(board, "rank ended", "n2", 1, code=1, signal=None)
    screen = draw(board)
    assert " !   1 n2    failed" in screen
    assert "rank 1 on n2: ValueError: the batch\n" in screen


def test_requested_stop_is_not_news() -> None:
    board = training_state()
    emit(board, "exception", "n2", 1, type="Stopped", message="stopped on SIGINT after step 9")
    emit(board, "rank ended", "n2", 1, code=1, signal=None)
    assert not board.news


def test_no_empty_columns_without_reports() -> None:
    board = RunState()
    emit(board, "rank started", "n1", 0, pid=5)
    screen = draw(board, log=["one", "two"])
    assert "     0 n1    running\n" in screen
    for word in ("step", "samples", "cpu", "loss", "a step"):
        assert word not in screen
    assert draw(RunState())  # before any rank starts


@each_case(("columns", "lines"), [(60, 16), (80, 24), (80, 40), (140, 50), (300, 90)])
@each_case("signs", [UNICODE, ASCII])
@each_case(("hosts", "each"), [(1, 1), (2, 4), (64, 8)])
def test_screen_fits_terminal_size(
    columns: int, lines: int, signs: SymbolSet, hosts: int, each: int
) -> None:
    board = training_state(hosts, each, slow=hosts * each - 1)
    for step in range(30):
        emit(board, "warning", "n1", 0, warning=f"{step} " + "words " * 60)
    log = ["x" * 1000, "\x1b[31mred " + "y" * 500 + "\x1b[0m", "短い" * 200, ""]
    screen = draw(board, columns, lines, signs, log=log, title="t" * 300, keys="k" * 300)
    assert f"{hosts * each - 1} n{hosts}" in screen  # the slowest rank is always shown
    if signs is ASCII:
        assert screen.replace("短い", "").replace("短", "").isascii()


def test_summarizes_healthy_ranks_of_many_hosts() -> None:
    board = training_state(64, 8, slow=300)
    emit(board, "rank ended", "n20", 155, code=None, signal=9)
    emit(board, "lost", "n50", why="x")
    screen = draw(board, 80, 40, selected=77)
    assert " ! 300 n38   slow 31%" in screen
    assert " ! 155 n20   failed" in screen
    assert "▸   77 n10   train" in screen
    assert " ! 392 n50   lost" in screen
    assert " 393 n50" not in screen  # one row for all ranks of a lost host
    assert "more ranks on 63 hosts: 489 train, 7 lost, step 100" in screen
    assert "more hosts, cpu 80% on average" in screen
    assert "  n50" in screen


def test_selected_rank_log_and_page() -> None:
    board = training_state()
    screen = draw(board, selected=1, log_title="log of rank 1 on n2", log=["mine"])
    assert "▸    1 n2" in screen
    assert "── log of rank 1 on n2 ─" in screen
    page = [f'  File "/a/very/long/{"folder/" * 20}name.py", line 3 in f', "second"]
    screen = draw(board, page=page, log=["not this"], log_title="stacks")
    assert "\n  …folder/" in screen
    assert 'name.py", line 3 in f' in screen
    assert "not this" not in screen


def test_notice_replaces_key_help() -> None:
    screen = draw(training_state(), keys="the keys", notice="checkpoint of step 7 is complete")
    assert screen.splitlines()[-1] == " checkpoint of step 7 is complete"


def test_quiet_rank() -> None:
    board = training_state()
    board.apply(Event("heartbeat", "n1", 0, 0.0, {"step": 120, "phase": "train"}), 30.0)
    screen = draw(board, now=30.0)
    assert " !   1 n2    quiet 30 s" in screen
    assert "     0 n1    train" in screen


def test_parts_fill_bar_exactly() -> None:
    for width in range(1, 50):
        counts = cell_counts(
            {"computing": 1 / 3, "data": 1 / 3, "waiting": 1 / 3, "other": 0.0}, width
        )
        assert sum(count for _, count in counts) == width
    assert describe_parts(dict(zip(PARTS, EVEN, strict=True))) == (
        "60% computing, 30% waiting for slower ranks, 8% communication, 2% waiting for data"
    )


def test_draw_curve() -> None:
    assert draw_curve([1, 2, 3, 4, 5, 6, 7, 8], 8, 1, UNICODE) == ["▁▂▃▄▅▆▇█"]
    assert draw_curve([3, 3], 4, 1, UNICODE) == ["▁▁▁▁"]
    assert draw_curve([0.0, 1.0], 2, 2, UNICODE) == [" █", "▁█"]
    assert draw_curve([1000.0, 100.0, 10.0], 3, 1, UNICODE)[0][1] in "▄▅"  # logarithmic scale
    assert len(draw_curve([float(item) for item in range(1000)], 20, 1, ASCII)[0]) == 20
    assert draw_curve([], 20, 2, UNICODE) == ["", ""]


def test_select_ranks_shows_all_if_they_fit() -> None:
    board = training_state(2)
    displayed, hidden = select_ranks(board, View(), 10)
    assert ([item.rank for item in displayed], hidden) == ([0, 1], [])


@pytest.mark.parametrize(("rate", "expected"), [(3.14, "3.1"), (1234, "1,234"), (2.5e6, "2.5 M")])
def test_number_formats(rate: float, expected: str) -> None:
    assert format_rate(rate) == expected
    assert format_clock(3723) == "1:02:03"
    assert truncate("abcdef", 4, "…") == "abc…"


def test_log_lines_wrap_between_words() -> None:
    line = "\x1b[36m[n1/0]\x1b[0m " + "word " * 30
    rows = draw(training_state(), log=[line]).splitlines()
    folded = rows[rows.index(next(row for row in rows if row.startswith("── log"))) + 1 :]
    assert folded[0].startswith("[n1/0] word")
    assert folded[1].startswith("word word")
    assert all(word in ("[n1/0]", "word") for row in folded[:2] for word in row.split())


def test_strips_terminal_control_sequences() -> None:
    """Names, phases and metrics come from hosts, scripts and run directories."""
    evil = "\x1b]0;evil\x07\x1b[2J\x9b2J\u202e\ud800\n"
    board = RunState()
    emit(board, "rank started", f"n{evil}", 0, pid=5)
    emit(board, "heartbeat", f"n{evil}", 0, step=1, phase=f"train{evil}")
    emit(board, "exception", f"n{evil}", 0, type=f"Error{evil}", text=evil)
    emit(board, "hang", text=evil)
    emit(board, "lost", f"n{evil}", problem=evil)
    for step in range(3):
        board.add_metrics({"split": f"train{evil}", "step": step, f"loss{evil}": float(step)})
    view = View(f"run{evil}", 1.0, 1.0, None, 0, [], f"log of n{evil}", [], "keys", evil)
    for page in ([], [f"page{evil}"]):
        lines = frame(board, replace(view, page=page), 120, 40)
        assert "".join(line.plain for line in lines).isprintable()
        assert "evil" in "".join(line.plain for line in lines)


@pytest.mark.parametrize("signs", [UNICODE, ASCII])
def test_shows_progress_bar_of_script(signs: SymbolSet) -> None:
    board = RunState()
    emit(board, "rank started", "n1", 0, pid=5)
    script = ScriptProgress("epoch 3", 9, 20, "3.31it/s", "00:05", "loss=0.12")
    second = draw(board, signs=signs, script=script).splitlines()[1]
    assert second.startswith(" epoch 3  step 9/20  3.31it/s  loss=0.12  ")
    assert second.endswith("45%  00:05 left")
    narrow = draw(board, 30, signs=signs, script=script).splitlines()[1]
    assert narrow.startswith(" epoch 3  ")
    assert narrow.endswith("00:05 left")
    assert "9/20" not in draw(training_state(), script=script)
