"""Tests step timings and the detection of stragglers, from timings without processes."""

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

STEP_S = 0.020


def split_notes(*ranks: list[tuple[float, float, float]]) -> Tensor:
    """Splits notes of steps into parts; a note is seconds in total, for data, and stalled."""
    notes = torch.tensor([[(*one, 0, 0, 0) for one in rank] for rank in ranks], dtype=torch.float64)
    return split_parts(notes)


def test_waiting_for_slow_rank_is_not_communication() -> None:
    """Rank 1 needs 0.1 s more in each step; communication takes 0.01 s."""
    seconds = split_notes([(0.2, 0.0, 0.11)] * 10, [(0.2, 0.1, 0.01)] * 10)
    totals = Totals(seconds.sum(dim=1), 10, torch.tensor([80.0, 80.0]))
    shares = totals.shares()
    assert round(shares["waiting"], 9) == 0.5
    assert round(shares["moving"], 9) == 0.05
    assert round(shares["computing"], 9) == 0.45
    assert torch.allclose(seconds.sum(dim=2), torch.full((2, 10), 0.2, dtype=torch.float64))
    idle = Totals(totals.seconds, 10, torch.tensor([0.0, 80.0]))  # it always waits
    assert idle.shares()["waiting"] < 1e-9


def test_timings_contain_each_step_once() -> None:
    pace = StepTimer(Comms(World(), torch.device("cpu")), nn.Linear(2, 2))
    found = []
    for step in range(17):
        pace.start_backward(torch.zeros(()), step)
        time.sleep(0.003)
        pace.add_batch(3, (torch.zeros(3, 4), {"more": torch.zeros(3)}, "name"))
        if (timings := pace.step(3, data_s=0.0)) is not None:
            found.append(timings)
        pace.end_session_work()
    found += pace.finish()
    assert [number for timings in found for number in _step_numbers(timings)] == list(range(17))
    assert found[0].seconds.shape == (1, 5, len(PARTS))
    assert found[0].samples.tolist() == [[3.0] * 5]
    assert found[0].elements is not None
    assert found[0].elements.tolist() == [[15.0] * 5]
    figures = pace.figures()
    assert {"noted", "computing_s"} < set(figures)
    assert pace.figures() == {}


def test_unsynced_piece_counts_no_communication() -> None:
    pace = StepTimer(Comms(World(), torch.device("cpu")), nn.Linear(2, 2))
    for step in range(6):
        time.sleep(0.02)
        pace.end_backward()  # for the first part of a batch
        pace.start_backward(torch.zeros(()), step)
        pace.mark_backward_end()
        pace.end_backward()
        timings = pace.step(1, data_s=0.0)
    assert timings is not None
    assert float(timings.seconds[..., PARTS.index("moving")].median()) < 0.01


def _step_numbers(timings: StepTimings) -> list[int]:
    return list(
        range(timings.first_step, timings.first_step + timings.samples.shape[1] * timings.stride)
    )


def test_saving_and_data_do_not_count_as_computing() -> None:
    pace = StepTimer(Comms(World(), torch.device("cpu")), nn.Linear(2, 2))
    for step in range(6):
        time.sleep(0.003)
        pace.start_backward(torch.zeros(()), step)
        timings = pace.step(1, data_s=100.0 * step, saving_s=10.0 * step)
        pace.end_session_work(10.0 * step)
    assert timings is not None
    assert timings.seconds[0, 1:, PARTS.index("data")].tolist() == [100.0] * 4
    assert timings.seconds[0, 1:, PARTS.index("saving")].tolist() == [10.0] * 4
    assert timings.seconds[0, 1:, PARTS.index("computing")].tolist() == [0.0] * 4
    pace.restart(data_s=500.0, saving_s=50.0)
    pace.step(1, data_s=500.0, saving_s=50.0)
    assert pace.finish()[-1].seconds[0, -1, PARTS.index("data")] == 0.0


def test_callbacks_count_as_computing_and_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between two steps, rank 1 is in a callback for 0.25 s, and rank 0 waits for it.

    Communication in a callback also waits for the other ranks.
    """
    clock, rows = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    for rank in range(2):
        comms = Comms(World(), torch.device("cpu"))
        pace = StepTimer(comms, nn.Linear(2, 2))

        def advance_clock(seconds: float) -> None:
            clock[0] += seconds

        def step(
            number: int, comms: Comms = comms, pace: StepTimer = pace, rank: int = rank
        ) -> None:
            clock[0] += 0.03
            pace.start_backward(torch.zeros(()), number)
            pace.step(1, data_s=0.0)
            with pace.script_work():
                advance_clock(0.25 * rank)
                comms.event(lambda: advance_clock(0.05 + 0.25 * (1 - rank)))
            clock[0] += 0.01  # as for a record
            comms.sum(torch.zeros(1))
            comms.event(lambda: advance_clock(0.02 + 0.1 * (1 - rank)))
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


def test_rate_excludes_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four steps of one second, with an evaluation of ten seconds after the second."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    rate = Rate()
    rate.restart()
    for step in range(4):
        clock[0] += 1.0
        rate.add(8)
        if step == 1:
            rate.pause()
            clock[0] += 10.0
            rate.restart()
    assert rate.measure() == 8.0
    assert (rate.measured_samples, rate.measured_s) == (32, 4.0)


def test_count_elements_of_nested_batch() -> None:
    assert count_elements((torch.zeros(2, 3), [torch.zeros(4)], {"x": torch.zeros(5)}, 7)) == 15


# -- detected stragglers ------------------------------------------------------------------


def make_timings(
    count: int = 6,
    ranks: int = 3,
    own: dict[int, Any] | None = None,
    data: dict[int, float] | None = None,
    moving: float = 0.001,
    size: dict[int, float] | None = None,
    share: dict[int, float] | None = None,
    facts: dict[str, dict[int, float]] | None = None,
) -> list[StepTimings]:
    """Returns step timings of a run, each for five steps.

    Args:
        count: Number of step timings.
        ranks: Number of ranks.
        own: By rank, additional seconds of computing in every step, or in each.
        data: By rank, seconds of waiting for data.
        moving: Seconds of communication per step.
        size: By rank, the factor by which its samples have more elements.
        share: By rank, the factor by which it has more samples.
        facts: By name and rank, values per step.
    """
    steps = 5 * count
    computing = torch.full((ranks, steps), STEP_S, dtype=torch.float64)
    for rank, extra_s in (own or {}).items():
        computing[rank] += torch.as_tensor(extra_s, dtype=torch.float64)
    seconds = torch.zeros(ranks, steps, len(PARTS), dtype=torch.float64)
    seconds[:, :, PARTS.index("computing")] = computing
    for rank, data_wait_s in (data or {}).items():
        seconds[rank, :, PARTS.index("data")] = data_wait_s
    busy_s = seconds.sum(dim=2)
    seconds[:, :, PARTS.index("waiting")] = busy_s.max(dim=0).values - busy_s
    seconds[:, :, PARTS.index("moving")] = moving
    work = torch.full((ranks, steps), 100.0, dtype=torch.float64)
    for rank, factor in (size or {}).items():
        work[rank] *= factor
    samples = torch.full((ranks, 5), 8.0, dtype=torch.float64)
    for rank, factor in (share or {}).items():
        samples[rank] *= factor
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


def stragglers_in(run: list[StepTimings]) -> list[Straggler | None]:
    """Returns the detected stragglers of a run at each change."""
    straggler_detector = StragglerDetector()
    return [straggler_detector.current for timings in run if straggler_detector.update(timings)]


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
def test_straggler_is_reported_once_with_cause(ranks: int, cause: str, run: dict[str, Any]) -> None:
    if cause == "link" and ranks != 3:
        return
    found = stragglers_in(make_timings(ranks=ranks, **run))
    assert [(one.rank, one.cause) for one in found if one] == [(1, cause)]
    assert found[0] is not None
    assert 0.015 < found[0].seconds < 0.03
    assert CAUSES[cause] in found[0].describe("rank 1 on n2")


def test_cpu_cause_mentions_quota_if_unmeasured() -> None:
    queued = {"queued": {1: 0.02}}
    seen, unseen = (stragglers_in(make_timings(own={1: 0.02}, facts=facts))[0]
                    for facts in ({**queued, "throttled": {}}, queued))  # fmt: skip
    assert seen is not None
    assert unseen is not None
    assert (seen.cause, unseen.cause) == ("cpu", "cpu")
    assert "quota" not in seen.detail
    assert "a CPU quota could do the same" in unseen.detail


@pytest.mark.parametrize(("ranks", "dropped"), [(2, [1]), (4, [2, 3])])
def test_dropped_ranks_are_ignored(ranks: int, dropped: list[int]) -> None:
    """Ranks without samples compute nothing and wait for the others."""
    own = {rank: 0.0 if rank in dropped else 0.05 for rank in range(ranks)}
    idle = make_timings(16, ranks=ranks, own=own)
    for timings in idle:
        timings.samples[dropped] = 0.0
    assert stragglers_in(idle) == []
    before = make_timings(8, ranks=ranks, own={dropped[0]: 0.02})
    after = [replace(one, first_step=one.first_step + 40) for one in idle]
    assert [one and one.rank for one in stragglers_in(before + after)] == [dropped[0]]
    links = make_timings(16, ranks=3, own={1: 0.0}, moving=0.03, facts=LINKS)
    assert [one and one.rank for one in stragglers_in(links)] == [1]
    for timings in links:
        timings.samples[1] = 0.0
    assert stragglers_in(links) == []  # its communication lasts while the others compute
    slow = make_timings(16, ranks=4, own={2: 0.02, 3: -0.009})
    for timings in slow:
        timings.samples[3] = 0.0
    assert [one and one.rank for one in stragglers_in(slow)] == [2]


def test_summary_agrees_for_ranks_with_fewer_steps() -> None:
    """Ranks that joined later have fewer steps, of which a short delay would be a larger part."""
    straggler_detector, sent_texts = StragglerDetector(), list[str]()
    delays = torch.zeros(80)
    delays[22:50] = 0.02
    for timings in make_timings(16, own={1: delays}):
        straggler_detector.update(timings)
    assert straggler_detector.costliest(80) is not None
    comms = SimpleNamespace(
        max=lambda _: [40_000.0], texts=sent_texts.append, is_alone=False, rank_name=""
    )
    rate = SimpleNamespace(measured_samples=1, measured_s=1.0)
    pace = SimpleNamespace(finish=list, totals=None, rate=rate)
    member = SimpleNamespace(comms=comms, world=World(1, 2), say=lambda text: None)
    for steps in (40_000, 80):
        monitor = StragglerMonitor(cast(Any, member))
        monitor.detector = straggler_detector
        monitor.summarize(cast(Any, pace), steps, 0.0)
    assert sent_texts == []


def test_straggler_is_reported_and_cleared_within_20_steps() -> None:
    delays = torch.zeros(80)
    delays[22:50] = 0.02  # begins within the steps of one timing
    straggler_detector, said = StragglerDetector(), []
    for timings in make_timings(16, own={1: delays}):
        if straggler_detector.update(timings):
            said.append(
                (timings.first_step + 6, straggler_detector.current)
            )  # known one step later
    assert [(one is not None) for _, one in said] == [True, False]
    assert 22 < said[0][0] <= 42
    assert 50 < said[1][0] <= 70
    worst = straggler_detector.costliest(80)
    assert worst is not None
    assert worst.rank == 1
    assert 0.005 < worst.seconds < 0.012
    assert straggler_detector.costliest(40_000) is None  # negligible in so many steps


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
def test_no_straggler_in_healthy_run(own: dict[int, Any]) -> None:
    assert stragglers_in(make_timings(own=own)) == []


def test_no_straggler_for_shared_or_hidden_costs() -> None:
    slow = {**LINKS, "sending": {0: 0.03, 1: 0.031, 2: 0.03}}
    assert stragglers_in(make_timings(moving=0.03, facts=slow)) == []  # equally slow for all
    single_host = {**LINKS, "there": LINKS["here"]}
    assert stragglers_in(make_timings(moving=0.03, facts=single_host)) == []  # ranks of one host
    assert stragglers_in(make_timings(moving=0.001, facts=LINKS)) == []  # hidden by computing
    assert stragglers_in(make_timings(ranks=1, own={0: 0.1})) == []


def test_slow_duplex_link_is_attributed_to_its_host() -> None:
    slow_pair = {**LINKS, "sending": {0: 0.002, 1: 0.031, 2: 0.030, 3: 0.002}}
    slow_pair |= {
        "here": {n: 10.0 + n for n in range(4)},
        "there": {0: 11.0, 1: 12.0, 2: 13.0, 3: 10.0},
    }
    slow_pair["sent"] = dict.fromkeys(range(4), 2e6)
    found = stragglers_in(make_timings(ranks=4, moving=0.03, facts=slow_pair))
    assert [(one.rank, one.cause) for one in found if one] == [(2, "link")]


def ring(sending: list[float], resent: list[float]) -> dict[str, dict[int, float]]:
    """Returns facts of hosts that each send to the next; ``resent`` is a fraction of the bytes."""
    size = len(sending)
    facts = {"here": {n: 10.0 + n for n in range(size)}, "sent": dict.fromkeys(range(size), 2e6)}
    facts["there"] = {n: 10.0 + (n + 1) % size for n in range(size)}
    facts["sending"] = dict(enumerate(sending))
    return facts | {"resent": {n: 2e6 * part for n, part in enumerate(resent)}}


@pytest.mark.parametrize(
    ("sending", "resent", "named"),
    [
        ([0.020, 0.031, 0.002], [0.05, 0.09, 0.0], [1]),
        ([0.031, 0.020, 0.002], [0.09, 0.05, 0.0], [1]),  # slowest towards host 1
        ([0.002, 0.031, 0.002, 0.031], [0.0, 0.09, 0.0, 0.09], []),  # two links with no common host
        ([0.031, 0.002, 0.002], [0.09, 0.0, 0.0], []),  # it could be either end
        ([0.031, 0.028, 0.010], [0.09, 0.08, 0.05], []),  # two hosts, or all
        ([0.031, 0.012], [0.09, 0.05], []),  # no difference between the two hosts
        ([0.031, 0.002], [0.09, 0.0], []),
    ],
)
def test_retransmits_are_attributed_to_common_host(
    sending: list[float], resent: list[float], named: list[int]
) -> None:
    run = make_timings(ranks=len(sending), moving=0.03, facts=ring(sending, resent))
    found = stragglers_in(run)
    assert [(one.rank, one.cause) for one in found if one] == [(rank, "link") for rank in named]


@pytest.mark.parametrize(
    ("return_s", "ratios", "named"),
    [
        (0.06, [1.37, 1.12, 0.99], []),  # only one of three; recorded on two hosts with equal links
        (0.06, [1.51, 1.26, 0.98], [1]),  # recorded with a slow link
        (0.06, [1.31, 1.15, 1.15], [1]),
        (0.06, [2.0, 2.0, 2.0], [1]),
        (0.02, [1.33, 1.15, 1.2], []),  # timer resolution: equal links with short steps
        (0.02, [1.22] * 9, [1]),
        (0.02, [3.0, *[1.0] * 8], []),
        (0.02, [1.33, 1.15, 1.2, 1.0, 1.0, 1.2, 0.9, 1.2, 1.2], []),
    ],
)
def test_two_hosts_need_repeated_evidence_of_slow_link(
    return_s: float, ratios: list[float], named: list[int]
) -> None:
    """Cases are the seconds of one direction, and the other direction as multiples of it."""
    run = []
    for number, ratio in enumerate(ratios):
        facts = ring([return_s, ratio * return_s], [0.0, 0.0])
        run.append(make_timings(len(ratios), ranks=2, moving=return_s, facts=facts)[number])
    assert [(one.rank, one.cause) for one in stragglers_in(run) if one] == [
        (r, "link") for r in named
    ]


def test_idle_connection_is_no_evidence() -> None:
    """Weights used this connection in the first steps; gradients use others."""
    first, *others = make_timings(moving=0.03, facts=ring([0.002, 0.031, 0.002], [0.0] * 3))
    assert first.vitals is not None
    idle_vitals = first.vitals.clone()
    idle_vitals[:, VITALS.index("sent")] = 500.0
    assert (
        stragglers_in([first, *(replace(timings, vitals=idle_vitals) for timings in others)]) == []
    )


def test_straggler_times_use_readable_units() -> None:
    said = Straggler(1, "link", 0.0004, 0.3).summarize("n2")
    assert "waited 0.4 ms a step" in said
    assert "by 21 ms a step" in Straggler(1, "cpu", 0.021, 0.3).describe("n2")
    assert "by 1.2 s a step" in Straggler(1, "cpu", 1.2, 0.3).describe("n2")


def test_changing_busiest_connection_is_not_misattributed() -> None:
    """In an all-to-all, rank 2 sends to the lossy host 1, then to host 0."""
    facts = ring([0.020, 0.025, 0.031], [0.06, 0.07, 0.09])
    run = make_timings(moving=0.03, facts=facts)
    for number, timings in enumerate(run):
        assert timings.vitals is not None
        remote_index = VITALS.index("there")
        timings.vitals[2, remote_index] = 11.0 if number % 2 else 10.0
        if not number % 2:
            timings.vitals[2, VITALS.index("resent")] = 0.0
            timings.vitals[0, remote_index], timings.vitals[0, VITALS.index("resent")] = 12.0, 0.0
    found = stragglers_in(run)
    assert {one.rank for one in found if one} <= {1}
    run = make_timings(moving=0.03, facts=ring([0.02, 0.031, 0.002], [0.05, 0.09, 0.0]))
    assert "(9.0% of the bytes on it are sent again)" in str(stragglers_in(run)[0].describe("n2"))  # type: ignore[union-attr]


RECORDED = Path(__file__).parents[1] / "fixtures" / "stragglers" / "runs.json.gz"


def test_recorded_runs() -> None:
    """Uses timings of real ranks on 16 and 2 CPUs (bench/stragglers), some with stragglers."""
    with gzip.open(RECORDED, "rt") as file:
        recorded = json.load(file)
    assert {run["kind"] for run in recorded} > {"cpu", "quota", "data", "link", "batch", "plain"}
    for run in recorded:
        straggler_detector, named = StragglerDetector(), []
        for record in run["looks"]:
            tensors = {name: _tensor(record[name]) for name in ("samples", "elements")}
            tensors["vitals"] = _tensor(record["facts"])
            timings = StepTimings(
                record["first_step"], torch.tensor(record["seconds"]).double(), **tensors
            )
            known_at_step = record["first_step"] + timings.samples.shape[1] + 1
            if straggler_detector.update(timings) and straggler_detector.current:
                named.append(
                    (
                        straggler_detector.current.rank,
                        straggler_detector.current.cause,
                        known_at_step - run["onset"],
                    )
                )
        if run["kind"] not in CAUSES:
            assert named == [], run["kind"]
            continue
        assert {one[:2] for one in named} == {(run["rank"], run["kind"])}
        assert 0 < named[0][2] <= 20


def test_slow_link_is_attributed_to_sending_rank() -> None:
    """The first rank of each host sends to the second one, which uses the host's link."""
    facts = {
        "here": {rank: 10.0 + rank // 2 for rank in range(6)},
        "there": {rank: 10.0 + (rank + 1) // 2 % 3 for rank in range(6)},
        "sent": dict.fromkeys(range(6), 2e6),
        "sending": {0: 0.04, 1: 0.002, 2: 0.04, 3: 0.03, 4: 0.04, 5: 0.002},
        "resent": {},
    }
    found = stragglers_in(make_timings(ranks=6, moving=0.03, facts=facts))
    assert [(one.rank, one.cause) for one in found if one] == [(3, "link")]


def test_slow_link_among_three_recorded_hosts() -> None:
    """Uses timings of lab hosts at 100 Mbit/s, one of them at 50 or 20.

    Each host sends to both others, alternately more to one of them.
    """
    with gzip.open(RECORDED.with_name("three_hosts.json.gz"), "rt") as file:
        recorded = json.load(file)
    for run in recorded:
        straggler_detector, named = StragglerDetector(), set()
        for record in run["looks"]:
            tensors = {name: _tensor(record[name]) for name in ("samples", "elements")}
            tensors["vitals"] = _tensor(record["facts"])
            seconds = torch.tensor(record["seconds"]).double()
            if straggler_detector.update(StepTimings(record["first_step"], seconds, **tensors)):
                named.add(
                    (straggler_detector.current.rank, straggler_detector.current.cause)
                    if straggler_detector.current
                    else None
                )
        assert named - {None} == {(run["rank"], "link")}


def test_short_steps_need_more_agreeing_timings() -> None:
    """An external delay of one direction for a fifth of a second is not a slow link."""
    run = make_timings(count=40, ranks=2, moving=0.01)
    window_s = 5 * float(run[0].seconds[0, 0].sum())
    assert len(recent_timings(run[: int(0.5 / window_s)])) == 0
    assert len(recent_timings(run)) == math.ceil(MIN_DURATION_S / window_s)
    slow = [replace(one, seconds=100 * one.seconds) for one in run]
    assert len(recent_timings(slow)) == MIN_AGREEING
    straggler_detector, short_run = (
        StragglerDetector(),
        [replace(one, seconds=one.seconds / 3) for one in run],
    )
    for one in short_run:
        straggler_detector.update(one)
    assert len(straggler_detector._history) == len(recent_timings(short_run)) > STEADY_COUNT


def test_ranks_of_single_host_are_not_two_directions() -> None:
    """A rank's busiest connection may be local, which hides those of the other host."""
    local_ends, remote_ends = {0: 10.0, 1: 10.0, 2: 11.0, 3: 11.0}, dict.fromkeys(range(4), 11.0)
    sending = {0: 0.03, 1: 0.02, 2: 0.002, 3: 0.002}
    facts = {"here": local_ends, "there": remote_ends, "sent": dict.fromkeys(range(4), 2e6),
             "sending": sending, "resent": {}}  # fmt: skip
    assert stragglers_in(make_timings(ranks=4, moving=0.03, facts=facts)) == []


def test_two_links_of_three_hosts_are_not_compared() -> None:
    """The third rank has no samples or no data: the slow link of its host is not another's."""
    run = make_timings(ranks=3, moving=0.03, facts=ring([0.002, 0.031, 0.031], [0.0] * 3))
    for one in run:
        one.samples[2] = 0
    assert stragglers_in(run) == []


def test_medium_speed_link_does_not_clear_host() -> None:
    run = make_timings(ranks=3, moving=0.03, facts=ring([0.031, 0.018, 0.002], [0.0] * 3))
    assert {one.rank for one in stragglers_in(run) if one} == {1}


def _tensor(rows: list[list[float | None]]) -> Tensor:
    return torch.tensor(
        [[math.nan if one is None else one for one in row] for row in rows]
    ).double()


# -- facts that a rank reads --------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "stat_folder", "before", "after"),
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
def test_reads_throttling_of_cgroup_v1_and_v2(
    tmp_path: Path, group: str, stat_folder: str, before: str, after: str
) -> None:
    """Also a quota of a parent group."""
    own = tmp_path / "proc/self"
    own.mkdir(parents=True)
    (own / "cgroup").write_text(group)
    (own / "schedstat").write_text("100 5000000 7")
    stat = tmp_path / "sys/fs/cgroup" / stat_folder / "cpu.stat"
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


def test_reads_bytes_sent_on_connection() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        vitals = Vitals()
        one.sendall(b"x" * 300_000)
        remaining = 300_000
        while remaining:
            remaining -= len(other.recv(remaining))
        found = dict(zip(VITALS, vitals.read(), strict=True))
    if os.uname().sysname == "Linux":
        assert found["sent"] > 100_000
        assert found["here"] == found["there"]


def test_reads_active_connection_among_idle_connections() -> None:
    """Covers a process with old connections of former groups, on which much was sent."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def connect_pair() -> tuple[socket.socket, socket.socket]:
            one = stack.enter_context(socket.create_connection(server.getsockname()))
            return one, stack.enter_context(server.accept()[0])

        def send(ends: tuple[socket.socket, socket.socket], remaining: int) -> None:
            ends[0].sendall(b"x" * remaining)
            while remaining:
                remaining -= len(ends[1].recv(remaining))

        for _ in range(10):
            send(connect_pair(), 300_000)
        vitals, active_pair = Vitals(), connect_pair()
        for _ in range(3):
            send(active_pair, 20_000)
            found = dict(zip(VITALS, vitals.read(), strict=True))
    if os.uname().sysname == "Linux":
        assert 10_000 < found["sent"] < 60_000
