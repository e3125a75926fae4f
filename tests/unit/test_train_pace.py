"""Where the time of a step goes, and who is named for it: from looks, without any process."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from each_case import each_case
from paceline.train.comms import Comms
from paceline.train.measure.pace import (
    PARTS,
    Rate,
    StepTimer,
    StepTimings,
    Totals,
    count_elements,
    split_parts,
)
from paceline.train.measure.slow_link import (
    MIN_AGREEING,
    MIN_DURATION_S,
    STEADY_COUNT,
    recent_timings,
)
from paceline.train.measure.straggler import CAUSES, Straggler, StragglerDetector
from paceline.train.measure.straggler_reporter import StragglerMonitor
from paceline.train.measure.vitals import VITALS, Vitals
from paceline.train.world import World

STEP = 0.020


def noted(*ranks: list[tuple[float, float, float]]) -> Tensor:
    """Of notes of whole steps, waiting for data, standing still."""
    notes = torch.tensor([[(*one, 0, 0, 0) for one in rank] for rank in ranks], dtype=torch.float64)
    return split_parts(notes)


def test_a_rank_that_waits_for_another_moves_no_bytes() -> None:
    """Rank 1 needs 0.1 s more in each step; the exchange itself takes 0.01 s."""
    seconds = noted([(0.2, 0.0, 0.11)] * 10, [(0.2, 0.1, 0.01)] * 10)
    totals = Totals(seconds.sum(dim=1), 10, torch.tensor([80.0, 80.0]))
    shares = totals.shares()
    assert round(shares["waiting"], 9) == 0.5
    assert round(shares["moving"], 9) == 0.05
    assert round(shares["computing"], 9) == 0.45
    assert torch.allclose(seconds.sum(dim=2), torch.full((2, 10), 0.2, dtype=torch.float64))
    idle = Totals(totals.seconds, 10, torch.tensor([0.0, 80.0]))  # it waits all the time
    assert idle.shares()["waiting"] < 1e-9


def test_a_look_has_every_step_once() -> None:
    pace = StepTimer(Comms(World(), torch.device("cpu")), nn.Linear(2, 2))
    found = []
    for step in range(17):
        pace.start_backward(torch.zeros(()), step)
        time.sleep(0.003)
        pace.add_batch(3, (torch.zeros(3, 4), {"more": torch.zeros(3)}, "name"))
        if (look := pace.step(3, data_s=0.0)) is not None:
            found.append(look)
        pace.end_session_work()
    found += pace.finish()
    assert [number for look in found for number in _steps(look)] == list(range(17))
    assert found[0].seconds.shape == (1, 5, len(PARTS))
    assert found[0].samples.tolist() == [[3.0] * 5]
    assert found[0].elements is not None
    assert found[0].elements.tolist() == [[15.0] * 5]
    figures = pace.figures()
    assert {"noted", "computing_s"} < set(figures)
    assert pace.figures() == {}


def test_a_piece_whose_gradients_stay_here_stood_nowhere() -> None:
    pace = StepTimer(Comms(World(), torch.device("cpu")), nn.Linear(2, 2))
    for step in range(6):
        time.sleep(0.02)
        pace.end_backward()  # of the first piece of a batch
        pace.start_backward(torch.zeros(()), step)
        pace.mark_backward_end()
        pace.end_backward()
        look = pace.step(1, data_s=0.0)
    assert look is not None
    assert float(look.seconds[..., PARTS.index("moving")].median()) < 0.01


def _steps(look: StepTimings) -> list[int]:
    return list(range(look.first_step, look.first_step + look.samples.shape[1] * look.stride))


def test_saving_and_data_are_no_computing() -> None:
    pace = StepTimer(Comms(World(), torch.device("cpu")), nn.Linear(2, 2))
    for step in range(6):
        time.sleep(0.003)
        pace.start_backward(torch.zeros(()), step)
        look = pace.step(1, data_s=100.0 * step, saving_s=10.0 * step)
        pace.end_session_work(10.0 * step)
    assert look is not None
    assert look.seconds[0, 1:, PARTS.index("data")].tolist() == [100.0] * 4
    assert look.seconds[0, 1:, PARTS.index("saving")].tolist() == [10.0] * 4
    assert look.seconds[0, 1:, PARTS.index("computing")].tolist() == [0.0] * 4
    pace.restart(data_s=500.0, saving_s=50.0)
    pace.step(1, data_s=500.0, saving_s=50.0)
    assert pace.finish()[-1].seconds[0, -1, PARTS.index("data")] == 0.0


def test_the_script_s_callbacks_are_computing_and_others_wait_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between two steps: rank 1 is in a callback for 0.25 s, and rank 0 in an agreement till then.

    A callback that talks to the other ranks waits for them there, too.
    """
    now, rows = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for rank in range(2):
        comms = Comms(World(), torch.device("cpu"))
        pace = StepTimer(comms, nn.Linear(2, 2))

        def passes(seconds: float) -> None:
            now[0] += seconds

        def step(
            number: int, comms: Comms = comms, pace: StepTimer = pace, rank: int = rank
        ) -> None:
            now[0] += 0.03
            pace.start_backward(torch.zeros(()), number)
            pace.step(1, data_s=0.0)
            with pace.script_work():
                passes(0.25 * rank)
                comms.event(lambda: passes(0.05 + 0.25 * (1 - rank)))
            now[0] += 0.01  # a record
            comms.sum(torch.zeros(1))
            comms.event(lambda: passes(0.02 + 0.1 * (1 - rank)))
            pace.end_session_work()

        for number in range(3):
            step(number)
        rows.append([pace._row(*one)[:6] for one in pace._finished_notes][1:])
    seconds = split_parts(torch.tensor(rows, dtype=torch.float64))
    for part, each in {
        "computing": [0.03, 0.28], "waiting": [0.35, 0.0], "other": [0.08, 0.08],
        "moving": [0.0, 0.0],
    }.items():  # fmt: skip
        found = seconds[:, :, PARTS.index(part)]
        expected = torch.tensor(each, dtype=torch.float64)[:, None].expand(2, 2)
        assert torch.allclose(found, expected), part


def test_a_pause_costs_neither_its_own_time_nor_that_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four steps of a second, an evaluation of ten after the second."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    rate = Rate()
    rate.restart()
    for step in range(4):
        now[0] += 1.0
        rate.add(8)
        if step == 1:
            rate.pause()
            now[0] += 10.0
            rate.restart()
    assert rate.measure() == 8.0
    assert (rate.measured_samples, rate.measured_s) == (32, 4.0)


def test_numbers_in_a_batch() -> None:
    assert count_elements((torch.zeros(2, 3), [torch.zeros(4)], {"x": torch.zeros(5)}, 7)) == 15


# -- who is named ------------------------------------------------------------------------------


def looks(
    count: int = 6,
    ranks: int = 3,
    own: dict[int, Any] | None = None,
    data: dict[int, float] | None = None,
    moving: float = 0.001,
    size: dict[int, float] | None = None,
    share: dict[int, float] | None = None,
    facts: dict[str, dict[int, float]] | None = None,
) -> list[StepTimings]:
    """Of a run with five steps in a look.

    Args:
        count: How many.
        ranks: How many.
        own: By rank, more seconds of computing in a step, or of each step.
        data: By rank, seconds of waiting for data.
        moving: Seconds of a step.
        size: By rank, how many times as many numbers its samples hold together.
        share: By rank, how many times as many samples it has.
        facts: By name and rank, per step.
    """
    steps = 5 * count
    computing = torch.full((ranks, steps), STEP, dtype=torch.float64)
    for rank, more in (own or {}).items():
        computing[rank] += torch.as_tensor(more, dtype=torch.float64)
    seconds = torch.zeros(ranks, steps, len(PARTS), dtype=torch.float64)
    seconds[:, :, PARTS.index("computing")] = computing
    for rank, waited in (data or {}).items():
        seconds[rank, :, PARTS.index("data")] = waited
    needed = seconds.sum(dim=2)
    seconds[:, :, PARTS.index("waiting")] = needed.max(dim=0).values - needed
    seconds[:, :, PARTS.index("moving")] = moving
    work = torch.full((ranks, steps), 100.0, dtype=torch.float64)
    for rank, times in (size or {}).items():
        work[rank] *= times
    samples = torch.full((ranks, 5), 8.0, dtype=torch.float64)
    for rank, times in (share or {}).items():
        samples[rank] *= times
    seen = torch.full((ranks, len(VITALS)), math.nan, dtype=torch.float64)
    seen[:, VITALS.index("queued")] = 0.0
    for name, each in (facts or {}).items():
        for rank in range(ranks):
            different = name in ("here", "there", "swapped")
            seen[rank, VITALS.index(name)] = each.get(rank, 0.0) * (1 if different else 5)
    return [
        StepTimings(n, seconds[:, n : n + 5], samples.clone(), work[:, n : n + 5], seen)
        for n in range(0, steps, 5)
    ]


def told(run: list[StepTimings]) -> list[Straggler | None]:
    """What is said in a run."""
    judge = StragglerDetector()
    return [judge.current for look in run if judge.update(look)]


LINKS = {
    "sent": {0: 2e6, 1: 2e6, 2: 2e6},
    "sending": {0: 0.002, 1: 0.030, 2: 0.002},
    "here": {0: 10.0, 1: 11.0, 2: 12.0},
    "there": {0: 11.0, 1: 12.0, 2: 10.0},
    "resent": {},
}


@each_case(
    ("cause", "run"),
    [
        ("cpu", {"own": {1: 0.02}, "facts": {"queued": {1: 0.018, 0: 0.001}}}),
        ("quota", {"own": {1: 0.02}, "facts": {"throttled": {1: 0.02}, "queued": {1: 0.01}}}),
        ("stolen", {"own": {1: 0.02}, "facts": {"stolen": {1: 0.02}}}),
        ("swap", {"own": {1: 0.02}, "facts": {"faults": {1: 20}, "swapped": {1: 1e9}}}),
        ("hot", {"own": {1: 0.02}, "facts": {"hot": {1: 0.02}}}),
        ("data", {"data": {1: 0.02}}),
        ("link", {"moving": 0.03, "facts": LINKS}),
        ("batch", {"own": {1: 0.02}, "size": {1: 2.0}}),
        ("share", {"own": {1: 0.02}, "size": {1: 2.0}, "share": {1: 2.0}}),
        ("computing", {"own": {1: 0.02}}),
    ],
)
@each_case("ranks", [2, 3, 4])
def test_a_straggler_is_named_once_with_its_cause(
    ranks: int, cause: str, run: dict[str, Any]
) -> None:
    if cause == "link" and ranks != 3:
        return
    found = told(looks(ranks=ranks, **run))
    assert [(one.rank, one.cause) for one in found if one] == [(1, cause)]
    assert found[0] is not None
    assert 0.015 < found[0].seconds < 0.03
    assert CAUSES[cause] in found[0].describe("rank 1 on n2")


def test_what_takes_a_cpu_is_told_from_a_quota_only_where_that_is_seen() -> None:
    queued = {"queued": {1: 0.02}}
    seen, unseen = (told(looks(own={1: 0.02}, facts=facts))[0]
                    for facts in ({**queued, "throttled": {}}, queued))  # fmt: skip
    assert seen is not None
    assert unseen is not None
    assert (seen.cause, unseen.cause) == ("cpu", "cpu")
    assert "quota" not in seen.detail
    assert "a CPU quota could do the same" in unseen.detail


@pytest.mark.parametrize(("ranks", "dropped"), [(2, [1]), (4, [2, 3])])
def test_nobody_is_slow_beside_ranks_that_were_dropped(ranks: int, dropped: list[int]) -> None:
    """Who has no samples computes nothing, and waits for those who have."""
    own = {rank: 0.0 if rank in dropped else 0.05 for rank in range(ranks)}
    idle = looks(16, ranks=ranks, own=own)
    for look in idle:
        look.samples[dropped] = 0.0
    assert told(idle) == []
    before = looks(8, ranks=ranks, own={dropped[0]: 0.02})
    after = [replace(one, first_step=one.first_step + 40) for one in idle]
    assert [one and one.rank for one in told(before + after)] == [dropped[0]]
    links = looks(16, ranks=3, own={1: 0.0}, moving=0.03, facts=LINKS)
    assert [one and one.rank for one in told(links)] == [1]
    for look in links:
        look.samples[1] = 0.0
    assert told(links) == []  # its bytes are on their way for as long as the others compute
    slow = looks(16, ranks=4, own={2: 0.02, 3: -0.009})
    for look in slow:
        look.samples[3] = 0.0
    assert [one and one.rank for one in told(slow)] == [2]


def test_ranks_that_have_done_fewer_steps_sum_up_alike() -> None:
    """Who has joined later knows fewer steps, of which a short delay would be a larger part."""
    judge, asked = StragglerDetector(), list[str]()
    late = torch.zeros(80)
    late[22:50] = 0.02
    for look in looks(16, own={1: late}):
        judge.update(look)
    assert judge.costliest(80) is not None
    comms = SimpleNamespace(
        max=lambda _: [40_000.0], texts=asked.append, is_alone=False, rank_name=""
    )
    rate = SimpleNamespace(measured_samples=1, measured_s=1.0)
    pace = SimpleNamespace(finish=list, totals=None, rate=rate)
    member = SimpleNamespace(comms=comms, world=World(1, 2), say=lambda text: None)
    for steps in (40_000, 80):
        lookout = StragglerMonitor(cast(Any, member))
        lookout.detector = judge
        lookout.summarize(cast(Any, pace), steps, 0.0)
    assert asked == []


def test_it_is_named_within_twenty_steps_and_no_longer_than_it_lasts() -> None:
    late = torch.zeros(80)
    late[22:50] = 0.02  # begins within a look
    judge, said = StragglerDetector(), []
    for look in looks(16, own={1: late}):
        if judge.update(look):
            said.append((look.first_step + 6, judge.current))  # it is known one step later
    assert [(one is not None) for _, one in said] == [True, False]
    assert 22 < said[0][0] <= 42
    assert 50 < said[1][0] <= 70
    worst = judge.costliest(80)
    assert worst is not None
    assert worst.rank == 1
    assert 0.005 < worst.seconds < 0.012
    assert judge.costliest(40_000) is None  # of so many steps it is nothing to be named for


@pytest.mark.parametrize(
    "own",
    [
        {},
        {1: 0.001},
        {1: [0.5] + [0.0] * 29},  # the first step
        {1: [0.0] * 12 + [3.0] + [0.0] * 17},  # a compilation
        {1: [0.0] * 8 + [0.1] + [0.0] * 10 + [0.1] + [0.0] * 10},  # garbage
        {rank: [0.015 * (step % 3 == rank) for step in range(30)] for rank in range(3)},
        {0: 0.02, 1: 0.02, 2: 0.02},
    ],
)
def test_nobody_is_named_in_a_healthy_run(own: dict[int, Any]) -> None:
    assert told(looks(own=own)) == []


def test_nobody_is_named_for_what_costs_nothing_or_all_have() -> None:
    slow = {**LINKS, "sending": {0: 0.03, 1: 0.031, 2: 0.03}}
    assert told(looks(moving=0.03, facts=slow)) == []  # the network is slow for all
    near = {**LINKS, "there": LINKS["here"]}
    assert told(looks(moving=0.03, facts=near)) == []  # ranks of one host
    assert told(looks(moving=0.001, facts=LINKS)) == []  # behind computing
    assert told(looks(ranks=1, own={0: 0.1})) == []


def test_a_host_with_a_slow_link_both_ways_is_between_two_slow_ones() -> None:
    both = {**LINKS, "sending": {0: 0.002, 1: 0.031, 2: 0.030, 3: 0.002}}
    both |= {"here": {n: 10.0 + n for n in range(4)}, "there": {0: 11.0, 1: 12.0, 2: 13.0, 3: 10.0}}
    both["sent"] = dict.fromkeys(range(4), 2e6)
    found = told(looks(ranks=4, moving=0.03, facts=both))
    assert [(one.rank, one.cause) for one in found if one] == [(2, "link")]


def ring(sending: list[float], resent: list[float]) -> dict[str, dict[int, float]]:
    """Facts of hosts of which each sends to the next one; the latter in parts of its bytes."""
    size = len(sending)
    facts = {"here": {n: 10.0 + n for n in range(size)}, "sent": dict.fromkeys(range(size), 2e6)}
    facts["there"] = {n: 10.0 + (n + 1) % size for n in range(size)}
    facts["sending"] = dict(enumerate(sending))
    return facts | {"resent": {n: 2e6 * part for n, part in enumerate(resent)}}


@pytest.mark.parametrize(
    ("sending", "resent", "named"),
    [
        ([0.020, 0.031, 0.002], [0.05, 0.09, 0.0], [1]),
        ([0.031, 0.020, 0.002], [0.09, 0.05, 0.0], [1]),  # slowest towards it
        ([0.002, 0.031, 0.002, 0.031], [0.0, 0.09, 0.0, 0.09], []),  # two that have nothing common
        ([0.031, 0.002, 0.002], [0.09, 0.0, 0.0], []),  # one of both ends
        ([0.031, 0.028, 0.010], [0.09, 0.08, 0.05], []),  # two hosts, or all
        ([0.031, 0.012], [0.09, 0.05], []),  # nothing tells two hosts apart
        ([0.031, 0.002], [0.09, 0.0], []),
    ],
)
def test_bytes_sent_again_are_of_the_host_that_the_ways_have_in_common(
    sending: list[float], resent: list[float], named: list[int]
) -> None:
    run = looks(ranks=len(sending), moving=0.03, facts=ring(sending, resent))
    found = told(run)
    assert [(one.rank, one.cause) for one in found if one] == [(rank, "link") for rank in named]


@pytest.mark.parametrize(
    ("back", "beside", "named"),
    [
        (0.06, [1.37, 1.12, 0.99], []),  # one look alone; seen on two hosts whose links are alike
        (0.06, [1.51, 1.26, 0.98], [1]),  # these on a slow one
        (0.06, [1.31, 1.15, 1.15], [1]),
        (0.06, [2.0, 2.0, 2.0], [1]),
        (0.02, [1.33, 1.15, 1.2], []),  # what comes of ticks: alike, with short steps
        (0.02, [1.22] * 9, [1]),
        (0.02, [3.0, *[1.0] * 8], []),
        (0.02, [1.33, 1.15, 1.2, 1.0, 1.0, 1.2, 0.9, 1.2, 1.2], []),
    ],
)
def test_of_two_hosts_one_sends_more_slowly_in_more_than_one_look(
    back: float, beside: list[float], named: list[int]
) -> None:
    """Seconds of the way back, and of the other one as multiples of them."""
    run = []
    for number, longer in enumerate(beside):
        facts = ring([back, longer * back], [0.0, 0.0])
        run.append(looks(len(beside), ranks=2, moving=back, facts=facts)[number])
    assert [(one.rank, one.cause) for one in told(run) if one] == [(r, "link") for r in named]


def test_a_connection_that_was_busy_once_says_nothing_of_later() -> None:
    """Weights went along it in the first steps; gradients take others."""
    first, *others = looks(moving=0.03, facts=ring([0.002, 0.031, 0.002], [0.0] * 3))
    assert first.vitals is not None
    later = first.vitals.clone()
    later[:, VITALS.index("sent")] = 500.0
    assert told([first, *(replace(look, vitals=later) for look in others)]) == []


def test_times_are_told_in_units_that_show_them() -> None:
    said = Straggler(1, "link", 0.0004, 0.3).summarize("n2")
    assert "waited 0.4 ms a step" in said
    assert "by 21 ms a step" in Straggler(1, "cpu", 0.021, 0.3).describe("n2")
    assert "by 1.2 s a step" in Straggler(1, "cpu", 1.2, 0.3).describe("n2")


def test_a_busiest_connection_that_changes_is_not_taken_for_one() -> None:
    """Where all send to all: rank 2 sends to the lossy host 1, then to host 0."""
    facts = ring([0.020, 0.025, 0.031], [0.06, 0.07, 0.09])
    run = looks(moving=0.03, facts=facts)
    for number, look in enumerate(run):
        assert look.vitals is not None
        to = VITALS.index("there")
        look.vitals[2, to] = 11.0 if number % 2 else 10.0
        if not number % 2:
            look.vitals[2, VITALS.index("resent")] = 0.0
            look.vitals[0, to], look.vitals[0, VITALS.index("resent")] = 12.0, 0.0
    found = told(run)
    assert {one.rank for one in found if one} <= {1}
    run = looks(moving=0.03, facts=ring([0.02, 0.031, 0.002], [0.05, 0.09, 0.0]))
    assert "(9.0% of the bytes on it are sent again)" in str(told(run)[0].describe("n2"))  # type: ignore[union-attr]


RECORDED = Path(__file__).parents[1] / "fixtures" / "stragglers" / "runs.json.gz"


def test_recorded_runs() -> None:
    """Looks of real ranks on 16 and on 2 CPUs (bench/stragglers), planted and healthy."""
    with gzip.open(RECORDED, "rt") as file:
        recorded = json.load(file)
    assert {run["kind"] for run in recorded} > {"cpu", "quota", "data", "link", "batch", "plain"}
    for run in recorded:
        judge, named = StragglerDetector(), []
        for kept in run["looks"]:
            held = {name: _tensor(kept[name]) for name in ("samples", "elements")}
            held["vitals"] = _tensor(kept["facts"])
            look = StepTimings(kept["first_step"], torch.tensor(kept["seconds"]).double(), **held)
            known = kept["first_step"] + look.samples.shape[1] + 1
            if judge.update(look) and judge.current:
                named.append((judge.current.rank, judge.current.cause, known - run["onset"]))
        if run["kind"] not in CAUSES:
            assert named == [], run["kind"]
            continue
        assert {one[:2] for one in named} == {(run["rank"], run["kind"])}
        assert 0 < named[0][2] <= 20


def test_of_a_hosts_ranks_one_that_sends_to_others_is_named() -> None:
    """The first rank of each host sends to its second one, whose link is the host's."""
    facts = {
        "here": {rank: 10.0 + rank // 2 for rank in range(6)},
        "there": {rank: 10.0 + (rank + 1) // 2 % 3 for rank in range(6)},
        "sent": dict.fromkeys(range(6), 2e6),
        "sending": {0: 0.04, 1: 0.002, 2: 0.04, 3: 0.03, 4: 0.04, 5: 0.002},
        "resent": {},
    }
    found = told(looks(ranks=6, moving=0.03, facts=facts))
    assert [(one.rank, one.cause) for one in found if one] == [(3, "link")]


def test_of_three_hosts_the_one_with_the_slow_link_is_named_and_no_other() -> None:
    """Looks of a lab's hosts at 100 Mbit/s, of which one has 50 or 20: each sends to both others,
    now more to the one, now to the other.
    """
    with gzip.open(RECORDED.with_name("three_hosts.json.gz"), "rt") as file:
        recorded = json.load(file)
    for run in recorded:
        judge, named = StragglerDetector(), set()
        for kept in run["looks"]:
            held = {name: _tensor(kept[name]) for name in ("samples", "elements")}
            held["vitals"] = _tensor(kept["facts"])
            seconds = torch.tensor(kept["seconds"]).double()
            if judge.update(StepTimings(kept["first_step"], seconds, **held)):
                named.add((judge.current.rank, judge.current.cause) if judge.current else None)
        assert named - {None} == {(run["rank"], "link")}


def test_of_short_steps_so_many_have_to_agree_that_they_last() -> None:
    """A fifth of a second, in which something outside held one way up, is no slow link."""
    run = looks(count=40, ranks=2, moving=0.01)
    a_look = 5 * float(run[0].seconds[0, 0].sum())
    assert len(recent_timings(run[: int(0.5 / a_look)])) == 0
    assert len(recent_timings(run)) == math.ceil(MIN_DURATION_S / a_look)
    slow = [replace(one, seconds=100 * one.seconds) for one in run]
    assert len(recent_timings(slow)) == MIN_AGREEING
    judge, short = StragglerDetector(), [replace(one, seconds=one.seconds / 3) for one in run]
    for one in short:
        judge.update(one)
    assert len(judge._history) == len(recent_timings(short)) > STEADY_COUNT


def test_two_ranks_of_one_host_are_not_there_and_back() -> None:
    """A rank's busiest connection may be a near one, and then the other host's are not seen."""
    here, there = {0: 10.0, 1: 10.0, 2: 11.0, 3: 11.0}, dict.fromkeys(range(4), 11.0)
    sending = {0: 0.03, 1: 0.02, 2: 0.002, 3: 0.002}
    facts = {"here": here, "there": there, "sent": dict.fromkeys(range(4), 2e6),
             "sending": sending, "resent": {}}  # fmt: skip
    assert told(looks(ranks=4, moving=0.03, facts=facts)) == []


def test_two_ways_of_three_hosts_are_no_pair() -> None:
    """The third rank was left out, or says nothing: its host's slow link is not another's."""
    run = looks(ranks=3, moving=0.03, facts=ring([0.002, 0.031, 0.031], [0.0] * 3))
    for one in run:
        one.samples[2] = 0
    assert told(run) == []


def test_a_way_that_is_neither_slow_nor_quick_acquits_nobody() -> None:
    run = looks(ranks=3, moving=0.03, facts=ring([0.031, 0.018, 0.002], [0.0] * 3))
    assert {one.rank for one in told(run) if one} == {1}


def _tensor(rows: list[list[float | None]]) -> Tensor:
    return torch.tensor(
        [[math.nan if one is None else one for one in row] for row in rows]
    ).double()


# -- what a rank sees --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "where", "before", "after"),
    [
        ("0::/job/rank1", "job", "throttled_usec 5000000", "throttled_usec 6500000"),
        (
            "3:cpuset:/\n2:cpu,cpuacct:/job/rank1\n0::/",
            "cpu,cpuacct/job/rank1",
            "throttled_time 1000000000",
            "throttled_time 2500000000",
        ),
    ],
)
def test_a_quota_of_either_version_is_seen(
    tmp_path: Path, group: str, where: str, before: str, after: str
) -> None:
    """Also one of a group around it."""
    own = tmp_path / "proc/self"
    own.mkdir(parents=True)
    (own / "cgroup").write_text(group)
    (own / "schedstat").write_text("100 5000000 7")
    stat = tmp_path / "sys/fs/cgroup" / where / "cpu.stat"
    stat.parent.mkdir(parents=True)
    stat.write_text(f"nr_periods 3\nnr_throttled 1\n{before}\n")
    vitals = Vitals(tmp_path)
    stat.write_text(f"nr_periods 9\nnr_throttled 7\n{after}\n")
    (own / "schedstat").write_text("100 255000000 9")
    found = dict(zip(VITALS, vitals.read(), strict=True))
    assert found["throttled"] == pytest.approx(1.5)
    assert found["queued"] == pytest.approx(0.25)
    assert math.isnan(found["hot"])
    assert found["passed"] > 0


def test_bytes_on_a_connection_are_seen() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        vitals = Vitals()
        one.sendall(b"x" * 300_000)
        left = 300_000
        while left:
            left -= len(other.recv(left))
        found = dict(zip(VITALS, vitals.read(), strict=True))
    if os.uname().sysname == "Linux":
        assert found["sent"] > 100_000
        assert found["here"] == found["there"]


def test_the_connection_in_use_is_seen_among_many_that_were() -> None:
    """As of a process whose former groups of ranks have left theirs, on which much was sent."""
    with contextlib.ExitStack() as open_:
        server = open_.enter_context(socket.create_server(("127.0.0.1", 0)))

        def connected() -> tuple[socket.socket, socket.socket]:
            one = open_.enter_context(socket.create_connection(server.getsockname()))
            return one, open_.enter_context(server.accept()[0])

        def send(ends: tuple[socket.socket, socket.socket], left: int) -> None:
            ends[0].sendall(b"x" * left)
            while left:
                left -= len(ends[1].recv(left))

        for _ in range(10):
            send(connected(), 300_000)
        vitals, present = Vitals(), connected()
        for _ in range(3):
            send(present, 20_000)
            found = dict(zip(VITALS, vitals.read(), strict=True))
    if os.uname().sysname == "Linux":
        assert 10_000 < found["sent"] < 60_000
