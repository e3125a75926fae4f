"""What is a hang, and what only looks like one."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.explain.conclude import conclude
from paceline.explain.evidence import Evidence
from paceline.explain.rules import load_all
from paceline.explain.stacks import Frame, Stand
from paceline.launch.hangs import BUSY_S, Hang, Heartbeats, Look, judge
from paceline.spec.events import Event
from paceline.spec.failure import Result

ALL_REDUCE = (
    Frame("/v/site-packages/torch/distributed/distributed_c10d.py", 2800, "all_reduce"),
    Frame("/home/me/train.py", 40, "step"),
)
BACKWARD = (
    Frame("/v/site-packages/torch/autograd/graph.py", 979, "_engine_run_backward"),
    Frame("/home/me/train.py", 39, "<module>"),
)
ASLEEP = (Frame("/home/me/train.py", 21, "fetch"),)


def look(rank: int, frames: tuple[Frame, ...], cpu_s: float = 1.0, state: str = "S") -> Look:
    return Look(Stand(f"n{rank + 1}", rank, state, frames), cpu_s)


def judged(
    before: list[Look], after: list[Look], silent_s: float = 8.0, **more: Any
) -> Hang | None:
    return judge(before, after, 2.0, silent_s, **more)


@pytest.mark.parametrize("wait", [ALL_REDUCE, BACKWARD])
def test_one_that_stands_still_while_others_wait(wait: tuple[Frame, ...]) -> None:
    looks = [look(0, wait), look(1, ASLEEP)]
    found = judged(looks, looks)
    assert found is not None
    assert (found.host, found.rank) == ("n2", 1)
    assert found.text.startswith("rank 1 on n2 stands still at train.py, line 21, in fetch while")
    assert "rank 0 on n1 waits for it in" in found.text


def test_one_that_works_alone_is_told_of_late() -> None:
    before = [look(0, ALL_REDUCE), look(1, ASLEEP, 1.0)]
    after = [look(0, ALL_REDUCE), look(1, ASLEEP, 2.9)]
    assert judged(before, after) is None
    found = judged(before, after, BUSY_S + 1)
    assert found is not None
    assert "rank 1 on n2 is busy at train.py, line 21" in found.text


def test_one_that_writes_or_waits_for_its_disk_works() -> None:
    """A checkpoint on a slow disk uses next to no CPU."""
    still = look(1, ASLEEP)
    written = Look(still.stand, still.cpu_s, moved=1e6)
    waiting = look(0, ALL_REDUCE)
    on_disk = look(1, ASLEEP, state="D")
    for before, after in ((still, written), (on_disk, on_disk)):
        assert judged([waiting, before], [waiting, after]) is None
        assert judged([waiting, before], [waiting, after], BUSY_S + 1) is not None
    assert judged([waiting, still], [waiting, Look(still.stand, 1.0, moved=4096)]) is not None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([look(0, ASLEEP), look(1, ASLEEP)], [look(0, ASLEEP), look(1, ASLEEP)]),  # nobody waits
        ([look(0, ALL_REDUCE), look(1, ASLEEP)], [look(0, ASLEEP), look(1, ASLEEP)]),
        ([look(0, ALL_REDUCE), look(1, ())], [look(0, ALL_REDUCE), look(1, ())]),  # not known
        (
            [look(0, ALL_REDUCE, 1.0), look(1, ALL_REDUCE)],
            [look(0, ALL_REDUCE, 2.5), look(1, ALL_REDUCE)],  # data moves
        ),
        (
            [look(0, ALL_REDUCE), look(1, ASLEEP)],
            [look(0, ALL_REDUCE), look(1, (Frame("/home/me/train.py", 22, "fetch"),))],
        ),
        ([], []),
        ([look(0, ALL_REDUCE)], [look(0, ALL_REDUCE), look(1, ASLEEP)]),
        ([look(0, ALL_REDUCE)], [look(0, ALL_REDUCE)]),
    ],
)
def test_what_only_looks_like_a_hang(before: list[Look], after: list[Look]) -> None:
    assert judged(before, after, 1000.0) is None


def test_all_wait_for_each_other() -> None:
    looks = [look(0, ALL_REDUCE), look(1, ALL_REDUCE)]
    found = judged(looks, looks)
    assert found is not None
    assert found.text.startswith(
        "rank 0 on n1, rank 1 on n2 wait for each other in all_reduce (train.py, line 40, in step)"
    )
    other = [look(0, ALL_REDUCE), look(1, BACKWARD)]
    found = judged(other, other)
    assert found is not None
    assert "they do not wait for the same" in found.text


def test_one_that_ended_while_others_wait() -> None:
    looks = [look(0, ALL_REDUCE)]
    found = judged(looks, looks, ended=[("n2", 1)])
    assert found is not None
    assert found.text.startswith("rank 1 on n2 ended with status 0 while rank 0 on n1 waits")


def test_patience_follows_what_is_usual() -> None:
    beats = Heartbeats()
    for second in range(4):
        assert not beats.known
        beats.take(0, "train", float(second))
    assert beats.known
    assert beats.patience_s == pytest.approx(5.0)
    assert beats.silent_s(10.0) == pytest.approx(7.0)
    beats.take(0, "train", 9.0)  # a step of six seconds
    assert beats.patience_s == pytest.approx(24.0)
    beats.take(1, "evaluate", 10.0)
    assert beats.patience_s >= 60.0


def test_a_stopped_job_that_had_gone_on_did_not_hang() -> None:
    hang = Event("hang", "n2", 1, fields={"text": "rank 1 on n2 stands still"})
    told = Evidence(events=(hang,), result=Result(130, interrupted=2))
    assert "the job hung: rank 1 on n2" in conclude(told, load_all()).text
    over = Evidence(events=(hang, Event("hang over")), result=Result(130, interrupted=2))
    assert "nothing failed" in conclude(over, load_all()).text
