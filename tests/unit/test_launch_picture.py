"""The live screen as text: what stands on it, and that it fits."""

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


def told(
    board: RunState, kind: str, host: str = "", rank: int | None = None, **fields: Any
) -> None:
    board.apply(Event(kind, host, rank, 1_700_000_000.0, fields), 0.0)


def trained(hosts: int = 2, each: int = 1, slow: int | None = None) -> RunState:
    """A board of a training under way."""
    board, count = RunState(), hosts * each
    for rank in range(count):
        told(board, "rank started", f"n{rank // each + 1}", rank, pid=5)
    told(board, "started", attempt=0, world_size=count)
    for rank in range(count):
        told(board, "heartbeat", f"n{rank // each + 1}", rank, step=100, phase="train")
    seconds = [SLOWEST if rank == slow else EVEN for rank in range(count)]
    told(board, "pace", "n1", 0, ranks_s=seconds, rates=[406.0] * count)
    told(board, "progress", "n1", 0, step=100, steps=400, epoch=2, epochs=8, loss=0.3,
         samples_per_s=812.0)  # fmt: skip
    if slow is not None:
        text = f"rank {slow} on n{slow // each + 1} slows the others down by 0.3 s a step"
        told(board, "straggler", "n1", 0, straggler=slow, cause="cpu", part=0.31, text=text)
    for host, time in itertools.product(range(hosts), (1.0, 2.0)):
        links = {"eth0": [int(time * 1e8), int(time * 2e8)]}
        board.add_vitals(f"n{host + 1}", {"time": time, "cpu": [int(80 * time), int(100 * time)],
                     "memory": [100, 60], "links": links, "gpus": [0.9]}, "eth0")  # fmt: skip
    for step in range(100):
        board.add_metrics({"split": "train", "step": step, "loss": 1 / (step + 1)})
    board.add_metrics({"split": "test", "step": 99, "loss": 0.5, "accuracy": 0.9})
    return board


def drawn(board: RunState, columns: int = 80, lines: int = 24, signs: SymbolSet = UNICODE,
          **around: Any) -> str:  # fmt: skip
    whole = frame(board, View(**around), columns, lines, signs)
    assert len(whole) == lines
    assert all(isinstance(one, Text) and one.cell_len <= columns for one in whole)
    return "\n".join(one.plain.rstrip() for one in whole)


def test_a_healthy_run() -> None:
    board = trained()
    told(board, "checkpoint", "n1", 0, step=90)
    screen = drawn(board, title="runs/one", seconds=83.0, remaining_s=63.0, log=["[n1/0] hello"],
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


def test_who_is_slow_and_who_is_gone_can_be_read_without_colours() -> None:
    board = trained(3, slow=1)
    told(board, "lost", "n3", why="no word from n3 for 6.5 s")
    rows = drawn(board, title="r").splitlines()
    assert rows[0].startswith(" r · 2 of 3 ranks on 3 hosts")
    (slow,) = [row for row in rows if row.startswith(" !   1 n2    slow 31%")]
    (usual,) = [row for row in rows if row.startswith("     0 n1    train")]
    assert slow.count("█") > usual.count("█")
    assert slow.count("·") < usual.count("·")
    (lost,) = [row for row in rows if row.startswith(" !   2 n3    lost")]
    assert re.search(r"its host was lost at \d\d:\d\d:\d\d$", lost)
    assert any(row.startswith("! ") and "rank 1 on n2 slows the others down" in row for row in rows)
    assert any(row.startswith("! ") and "lost n3: no word" in row for row in rows)


def test_the_time_that_is_left_is_told_whole_where_there_is_little_room() -> None:
    board = trained()
    told(board, "checkpoint", "n1", 0, step=1_234_500)
    told(board, "progress", "n1", 0, step=1_234_567, steps=2_345_678, epoch=52, epochs=100,
         loss=0.3, samples_per_s=3001.0)  # fmt: skip
    for columns in (60, 80, 100):
        row = drawn(board, columns, remaining_s=40_000.0).splitlines()[1]
        assert row.startswith(" epoch 53/100  step 1,234,567/2,345,678")
        assert row.endswith("53%  11:06:40 left")
    assert "saved" in row


def test_a_rank_that_comes_back_starts_while_others_train() -> None:
    board = trained(3)
    told(board, "lost", "n3", why="no word")
    told(board, "rank started", "n3", 2, pid=7)
    assert "     2 n3    starting\n" in drawn(board)
    told(board, "heartbeat", "n3", 2, step=100, phase="train")
    assert "     2 n3    train " in drawn(board)


def test_signs_are_told_that_are_there() -> None:
    """All of them on one line of 80 columns, others where they come up."""
    board = trained()
    legend = "  ██ computing ▒▒ waiting for data ·· waiting for slower ranks ══ communication"
    assert legend in drawn(board).splitlines()
    told(board, "pace", "n1", 0, ranks_s=[[0, 0.5, 0.2, 0, 0.3, 0]] * 2, rates=[1.0] * 2)
    assert "  ██ computing ·· waiting for slower ranks ++ saving checkpoints" in drawn(board)
    told(board, "pace", "n1", 0, ranks_s=[[0.2, 0.2, 0.2, 0.2, 0.1, 0.1]] * 2, rates=[1.0] * 2)
    assert f"{legend}\n  ++ saving checkpoints -- other\n" in drawn(board)
    assert "++ saving checkpoints -- other" in drawn(board, 80, 24, ASCII)


def test_a_rank_that_was_slow_for_a_while_takes_one_line() -> None:
    board = trained(2)
    text = "rank 1 on n2 slows the others down by 0.3 s a step"
    for _ in range(5):
        told(board, "straggler", "n1", 0, straggler=1, its_host="n2", part=0.3, text=text)
        told(board, "straggler over", "n1", 0, straggler=1, its_host="n2", text="it keeps up")
    assert [one.text for one in board.news] == [
        "rank 1 on n2 held the others up for 0 s; it keeps up again"
    ] * 5
    assert not any(one.is_bad for one in board.news)


def test_long_names_can_be_told_apart() -> None:
    board = RunState()
    hosts = [f"gpu-node-of-the-cluster-{rank}.example.org" for rank in range(3)]
    for rank, host in enumerate(hosts):
        told(board, "rank started", host, rank, pid=5)
    board.add_metrics({"split": "train", "step": 1, "the_loss_of_" + "a" * 80: 0.5})
    for step in range(9):
        for split, name in (("train", "loss_" + "long" * 20), ("test", "score_" + "long" * 20)):
            board.add_metrics({"split": split, "step": step, name: 0.25})
    keys = "up/down rank's log  a all  s save  t stacks  x stop  d leave  q lines  ? help"
    for columns in (60, 80, 140):
        screen = drawn(board, columns, signs=ASCII, title="runs/" + "x" * 200, keys=keys)
        rows = screen.splitlines()
        assert " | 3 ranks on 3 hosts" in rows[0]
        assert all(f"ster-{rank} " in rows[rank + 2] for rank in range(2))
        assert rows[-1].endswith("? help")
        assert " 0.25 __" in screen


def test_a_job_that_waits_for_nodes_says_so_in_the_words_of_status() -> None:
    board = trained(2)
    waits = board.waiting = NodeWait.start("1 node of at least 2: dialling n2 again", 600.0)
    shown = " ".join(drawn(board, columns=120).split())
    assert f"waits for nodes: {waits.description}" in shown


def test_a_failure() -> None:
    board = trained()
    told(board, "exception", "n2", 1, type="ValueError", message="the batch\nis empty")
    told(board, "rank ended", "n2", 1, code=1, signal=None)
    screen = drawn(board)
    assert " !   1 n2    failed" in screen
    assert "rank 1 on n2: ValueError: the batch\n" in screen


def test_ranks_that_were_asked_to_stop_make_no_news() -> None:
    board = trained()
    told(board, "exception", "n2", 1, type="Stopped", message="stopped on SIGINT after step 9")
    told(board, "rank ended", "n2", 1, code=1, signal=None)
    assert not board.news


def test_a_script_that_tells_nothing_has_no_empty_columns() -> None:
    board = RunState()
    told(board, "rank started", "n1", 0, pid=5)
    screen = drawn(board, log=["one", "two"])
    assert "     0 n1    running\n" in screen
    for word in ("step", "samples", "cpu", "loss", "a step"):
        assert word not in screen
    assert drawn(RunState())  # before any rank has started


@each_case(("columns", "lines"), [(60, 16), (80, 24), (80, 40), (140, 50), (300, 90)])
@each_case("signs", [UNICODE, ASCII])
@each_case(("hosts", "each"), [(1, 1), (2, 4), (64, 8)])
def test_it_fits(columns: int, lines: int, signs: SymbolSet, hosts: int, each: int) -> None:
    board = trained(hosts, each, slow=hosts * each - 1)
    for step in range(30):
        told(board, "warning", "n1", 0, warning=f"{step} " + "words " * 60)
    log = ["x" * 1000, "\x1b[31mred " + "y" * 500 + "\x1b[0m", "短い" * 200, ""]
    screen = drawn(board, columns, lines, signs, log=log, title="t" * 300, keys="k" * 300)
    assert f"{hosts * each - 1} n{hosts}" in screen  # the slowest is always there
    if signs is ASCII:
        assert screen.replace("短い", "").replace("短", "").isascii()


def test_of_many_hosts_those_that_matter_are_shown_and_the_others_summed_up() -> None:
    board = trained(64, 8, slow=300)
    told(board, "rank ended", "n20", 155, code=None, signal=9)
    told(board, "lost", "n50", why="x")
    screen = drawn(board, 80, 40, selected=77)
    assert " ! 300 n38   slow 31%" in screen
    assert " ! 155 n20   failed" in screen
    assert "▸   77 n10   train" in screen
    assert " ! 392 n50   lost" in screen
    assert " 393 n50" not in screen  # one stands for all of a host
    assert "more ranks on 63 hosts: 489 train, 7 lost, step 100" in screen
    assert "more hosts, cpu 80% on average" in screen
    assert "  n50" in screen


def test_a_chosen_ranks_log_and_a_page() -> None:
    board = trained()
    screen = drawn(board, selected=1, log_title="log of rank 1 on n2", log=["mine"])
    assert "▸    1 n2" in screen
    assert "── log of rank 1 on n2 ─" in screen
    page = [f'  File "/a/very/long/{"folder/" * 20}name.py", line 3 in f', "second"]
    screen = drawn(board, page=page, log=["not this"], log_title="stacks")
    assert "\n  …folder/" in screen
    assert 'name.py", line 3 in f' in screen
    assert "not this" not in screen


def test_a_notice_stands_where_the_keys_were() -> None:
    screen = drawn(trained(), keys="the keys", notice="checkpoint of step 7 is complete")
    assert screen.splitlines()[-1] == " checkpoint of step 7 is complete"


def test_a_silent_rank() -> None:
    board = trained()
    board.apply(Event("heartbeat", "n1", 0, 0.0, {"step": 120, "phase": "train"}), 30.0)
    screen = drawn(board, now=30.0)
    assert " !   1 n2    quiet 30 s" in screen
    assert "     0 n1    train" in screen


def test_parts_fill_the_bar_exactly() -> None:
    for width in range(1, 50):
        counts = cell_counts(
            {"computing": 1 / 3, "data": 1 / 3, "waiting": 1 / 3, "other": 0.0}, width
        )
        assert sum(count for _, count in counts) == width
    assert describe_parts(dict(zip(PARTS, EVEN, strict=True))) == (
        "60% computing, 30% waiting for slower ranks, 8% communication, 2% waiting for data"
    )


def test_curves() -> None:
    assert draw_curve([1, 2, 3, 4, 5, 6, 7, 8], 8, 1, UNICODE) == ["▁▂▃▄▅▆▇█"]
    assert draw_curve([3, 3], 4, 1, UNICODE) == ["▁▁▁▁"]
    assert draw_curve([0.0, 1.0], 2, 2, UNICODE) == [" █", "▁█"]
    assert draw_curve([1000.0, 100.0, 10.0], 3, 1, UNICODE)[0][1] in "▄▅"  # by its logarithm
    assert len(draw_curve([float(one) for one in range(1000)], 20, 1, ASCII)[0]) == 20
    assert draw_curve([], 20, 2, UNICODE) == ["", ""]


def test_all_ranks_where_there_is_room() -> None:
    board = trained(2)
    shown, rest = select_ranks(board, View(), 10)
    assert ([one.rank for one in shown], rest) == ([0, 1], [])


@pytest.mark.parametrize(("rate", "said"), [(3.14, "3.1"), (1234, "1,234"), (2.5e6, "2.5 M")])
def test_short_numbers(rate: float, said: str) -> None:
    assert format_rate(rate) == said
    assert format_clock(3723) == "1:02:03"
    assert truncate("abcdef", 4, "…") == "abc…"


def test_lines_of_the_log_are_folded_between_words() -> None:
    line = "\x1b[36m[n1/0]\x1b[0m " + "word " * 30
    rows = drawn(trained(), log=[line]).splitlines()
    folded = rows[rows.index(next(row for row in rows if row.startswith("── log"))) + 1 :]
    assert folded[0].startswith("[n1/0] word")
    assert folded[1].startswith("word word")
    assert all(word in ("[n1/0]", "word") for row in folded[:2] for word in row.split())


def test_nothing_that_a_terminal_obeys_gets_into_it() -> None:
    """Names, phases and metrics are the words of hosts, scripts and run directories."""
    evil = "\x1b]0;evil\x07\x1b[2J\x9b2J\u202e\ud800\n"
    board = RunState()
    told(board, "rank started", f"n{evil}", 0, pid=5)
    told(board, "heartbeat", f"n{evil}", 0, step=1, phase=f"train{evil}")
    told(board, "exception", f"n{evil}", 0, type=f"Error{evil}", text=evil)
    told(board, "hang", text=evil)
    told(board, "lost", f"n{evil}", problem=evil)
    for step in range(3):
        board.add_metrics({"split": f"train{evil}", "step": step, f"loss{evil}": float(step)})
    around = View(f"run{evil}", 1.0, 1.0, None, 0, [], f"log of n{evil}", [], "keys", evil)
    for page in ([], [f"page{evil}"]):
        lines = frame(board, replace(around, page=page), 120, 40)
        assert "".join(line.plain for line in lines).isprintable()
        assert "evil" in "".join(line.plain for line in lines)


@pytest.mark.parametrize("signs", [UNICODE, ASCII])
def test_a_scripts_own_bar_stands_where_that_of_a_session_would(signs: SymbolSet) -> None:
    board = RunState()
    told(board, "rank started", "n1", 0, pid=5)
    script = ScriptProgress("epoch 3", 9, 20, "3.31it/s", "00:05", "loss=0.12")
    second = drawn(board, signs=signs, script=script).splitlines()[1]
    assert second.startswith(" epoch 3  step 9/20  3.31it/s  loss=0.12  ")
    assert second.endswith("45%  00:05 left")
    narrow = drawn(board, 30, signs=signs, script=script).splitlines()[1]
    assert narrow.startswith(" epoch 3  ")
    assert narrow.endswith("00:05 left")
    assert "9/20" not in drawn(trained(), script=script)
