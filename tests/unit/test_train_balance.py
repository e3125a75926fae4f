"""Tests how shares are chosen by speed, on simulated ranks."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from each_case import each_case
from paceline.spec.errors import SettingError
from paceline.spec.training.balance import validate_limits, validate_weights
from paceline.train.comms import Comms
from paceline.train.data import balance
from paceline.train.data.balance import Controller, even_shares
from paceline.train.data.division import BatchDivision, parse_balance
from paceline.train.data.fetch import Fetch
from paceline.train.data.loader import Loader, Progress
from paceline.train.data.order import Order
from paceline.train.journal import Journal
from paceline.train.measure.pace import StepTimings
from paceline.train.models import Models
from paceline.train.update import Updater
from paceline.train.world import World

Work = Callable[[int, int, int], float]
"""Seconds that a rank is busy with a step: from rank, step and samples."""
STEPS_PER_LOOK = 5  # steps between two step timings


class SimulatedJob:
    """Simulates ranks whose steps take as long as ``work`` says."""

    def __init__(self, ranks: int, batch: int, work: Work, moving: float = 0.0, **options) -> None:
        self.controller = Controller(even_shares(batch, ranks), **options)
        self.work, self.ranks, self.moving = work, ranks, moving
        self.steps: list[float] = []  # seconds of each step
        self.notes: list = []
        self.changed: list[int] = []  # steps after which shares changed
        self.advice: list[balance.Advice] = []

    def run(self, steps: int) -> SimulatedJob:
        for _ in range(steps):
            shares = self.controller.shares
            step = len(self.steps)
            busy = [self.work(r, step, n) if n else 0.0 for r, n in enumerate(shares)]
            self.steps.append(max(busy) + self.moving)
            self.notes.append(
                [
                    [[0, one, max(busy) - one, self.moving, 0, 0], n]
                    for one, n in zip(busy, shares, strict=True)
                ]
            )
            if step % STEPS_PER_LOOK == 0 and step:  # one step after the notes were sent
                self.look(step - STEPS_PER_LOOK, self.notes[-STEPS_PER_LOOK - 1 : -1], step + 1)
        return self

    def look(self, first: int, notes: list, now: int) -> None:
        seconds = torch.tensor([[one for one, _ in row] for row in notes], dtype=torch.float64)
        samples = torch.tensor([[n for _, n in row] for row in notes], dtype=torch.float64).T
        timings = StepTimings(first, seconds.transpose(0, 1), samples, elements=samples)
        advice = self.controller.observe(timings)
        if advice is not None:
            self.advice.append(advice)
            if advice.apply:
                self.controller.apply(advice.shares, now)
                self.changed.append(now)

    def mean(self, start: int, stop: int) -> float:
        return sum(self.steps[start:stop]) / (stop - start)


def make_work(
    costs: Sequence[float], fixed: Sequence[float] = (), noise: float = 0.0, seed: int = 0
) -> Work:
    """Simulates ranks with these seconds per sample and fixed seconds per step, with noise."""
    draw = random.Random(seed)
    fixed = fixed or [0.0] * len(costs)

    def work(rank: int, step: int, samples: int) -> float:
        elapsed = fixed[rank] + costs[rank] * samples
        return elapsed * max(0.3, draw.gauss(1, noise)) if noise else elapsed

    return work


def ideal_step_s(costs: Sequence[float], batch: int) -> float:
    """Returns the seconds of a step at the sum of all rates, the lower limit."""
    return batch / sum(1 / one for one in costs)


@each_case(
    "costs",
    [
        [1, 3],
        [3, 1],
        [1, 1, 3],
        [1, 2, 3, 4],
        [1, 1, 1, 1, 1, 1, 1, 3],
        [1, 20],
        [1, 20, 20, 20],
        [20, 1],
    ],
)
@each_case("noise", [0.0, 0.05])
def test_converges_to_ideal_rate_within_20_steps(costs: list[float], noise: float) -> None:
    batch = 64 * len(costs)
    costs = [one / 1000 for one in costs]
    job = SimulatedJob(len(costs), batch, make_work(costs, noise=noise)).run(100)
    settled_s = job.mean(20, 100)
    noise_allowance = 1 + (2.2 if len(costs) > 4 else 1.6) * noise  # for the slowest of all ranks
    assert ideal_step_s(costs, batch) / settled_s >= 0.95 / noise_allowance
    assert len(job.changed) <= 8


def test_gain_is_certain_after_second_share() -> None:
    """Simulates a rank that needs 0.25 s more for each step, whatever its share."""
    job = SimulatedJob(2, 32, make_work([0.001, 0.001], fixed=[0.03, 0.28])).run(60)
    first, second = [one for one in job.advice if one.apply][:2]
    assert not first.is_certain
    assert first.proposed_s < 0.2  # the best case: it is slower
    assert second.is_certain
    assert second.proposed_s > 0.25


def test_equal_shares_reach_half_of_ideal_rate() -> None:
    """Reference value for the tests of chosen shares."""
    costs = [0.001, 0.003]
    assert ideal_step_s(costs, 64) / (max(costs) * 32) == pytest.approx(0.5)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("noise", [0.02, 0.2])
def test_equal_ranks_keep_equal_shares(ranks: int, noise: float) -> None:
    runs = [
        SimulatedJob(ranks, 32 * ranks, make_work([0.001] * ranks, noise=noise, seed=seed)).run(150)
        for seed in range(3)
    ]
    assert sum(len(job.changed) for job in runs) <= 1


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_adapts_to_competing_job_within_20_steps(ranks: int) -> None:
    def work(rank: int, step: int, samples: int) -> float:
        beside = rank == ranks - 1 and 100 <= step < 200
        return 0.001 * samples * (3 if beside else 1) * draw.gauss(1, 0.02)

    draw = random.Random(1)
    batch = 32 * ranks
    job = SimulatedJob(ranks, batch, work).run(300)
    contended_s = ideal_step_s([0.001] * (ranks - 1) + [0.003], batch)
    uncontended_s = ideal_step_s([0.001] * ranks, batch)
    assert contended_s / job.mean(120, 200) > 0.93
    assert uncontended_s / job.mean(220, 300) > 0.93
    assert uncontended_s / job.mean(20, 100) > 0.95
    assert len(job.changed) <= 8


def test_single_outlier_steps_change_no_shares() -> None:
    def work(rank: int, step: int, samples: int) -> float:
        return 0.001 * samples + (1.0 if (rank, step) in ((1, 22), (0, 41), (1, 61)) else 0.0)

    assert not SimulatedJob(2, 64, work).run(200).changed


def test_ignores_steps_without_samples_of_rank() -> None:
    """Steps with three of four samples may be large enough to be measured."""
    job = SimulatedJob(4, 4, lambda rank, step, n: 0.01)
    busy = [[[0, 0.01, 0, 0, 0, 0], int(rank > 0)] for rank in range(4)]
    job.look(0, [busy] * STEPS_PER_LOOK, STEPS_PER_LOOK)
    assert not job.advice
    job.run(20)
    assert all(seconds for seconds, _ in job.controller.speeds())


@pytest.mark.parametrize("fixed", [[0.0, 0.0], [0.02, 0.02], [0.05, 0.0], [0.0, 0.05]])
def test_separates_fixed_from_per_sample_costs(fixed: list[float]) -> None:
    job = SimulatedJob(2, 64, make_work([0.001, 0.003], fixed)).run(60)
    best = min(max(fixed[0] + 0.001 * n, fixed[1] + 0.003 * (64 - n)) for n in range(1, 64))
    assert job.mean(20, 60) <= 1.04 * best


def test_gpu_with_constant_step_time_gets_most_samples() -> None:
    """Its memory limits its share; the CPU rank gets what it can compute in the same time."""

    def work(rank: int, step: int, samples: int) -> float:
        return max(0.01, samples * 1e-5) if rank == 0 else samples * 0.002

    job = SimulatedJob(2, 256, work).run(60)
    gpu, cpu = job.controller.shares
    assert gpu > 240
    assert cpu >= 4
    assert job.mean(20, 60) < 0.0125


def test_slowdown_at_share_change_is_not_overhead() -> None:
    """Another job takes half of a rank's time exactly when the rank's share is halved."""

    def work(rank: int, step: int, samples: int) -> float:
        return 0.001 * samples * (3 if rank == 1 else 1) * (2 if rank == 1 and step >= 5 else 1)

    job = SimulatedJob(2, 64, work).run(100)
    assert ideal_step_s([0.001, 0.006], 64) / job.mean(25, 100) > 0.93


@pytest.mark.parametrize("drop_slow", [False, True])
def test_reports_slow_rank_and_drops_it_if_allowed(drop_slow: bool) -> None:
    job = SimulatedJob(
        3, 60, make_work([0.001] * 3, [0.0, 0.0, 0.2]), 0.005, drop_slow=drop_slow
    ).run(60)
    said = next(one for one in job.advice if one.surplus_rank is not None)
    assert said.surplus_rank == 2
    assert said.proposed_s == pytest.approx(0.201, rel=0.2)
    assert said.reduced_s == pytest.approx(0.03, rel=0.2)
    assert job.controller.shares == ((30, 30, 0) if drop_slow else job.controller.shares)
    assert drop_slow or min(job.controller.shares) >= 1


def test_rank_0_is_reported_but_not_dropped() -> None:
    job = SimulatedJob(2, 60, make_work([0.001] * 2, [0.2, 0.0]), drop_slow=True).run(60)
    assert job.controller.shares == (1, 59)
    found = next(one for one in job.advice if one.surplus_rank is not None)
    assert found.surplus_rank == 0
    comms, journal = World(0, 2), SimpleNamespace(print=Mock(), event=Mock(), report=Mock())
    division = BatchDivision(
        cast(Comms, SimpleNamespace(world=comms)), cast(Journal, journal), Progress()
    )
    division._rank_names = ["rank 0 on n1", "rank 1 on n2"]
    division._controller = cast(
        Controller, SimpleNamespace(observe=lambda look: found, apply=Mock())
    )
    division._mode, division._hosts = "auto", ("n1", "n2")
    journal.record = Mock()
    division.update(cast(StepTimings, None), 60)
    (said,) = journal.report.call_args_list
    assert "rank 0 on n1 makes the job slower" in said.kwargs["warning"]
    assert said.kwargs["warning"].endswith("name another host first (-H), or leave its host out")


def test_dropped_rank_is_retried() -> None:
    def work(rank: int, step: int, samples: int) -> float:
        beside = 0.2 if rank == 1 and step < 100 else 0.0
        return beside + 0.001 * samples

    job = SimulatedJob(2, 60, work, drop_slow=True).run(100)
    assert job.controller.shares[1] == 0
    assert job.run(300).controller.shares == (30, 30)


def test_resume_keeps_rest_period_of_dropped_rank() -> None:
    work = make_work([0.001] * 2, [0.0, 0.2])
    job = SimulatedJob(2, 60, work, drop_slow=True).run(100)
    first_controller = job.controller
    assert list(first_controller.rest_periods) == [1]
    assert first_controller.speeds()[1][0] > 0  # its former speed, for other world sizes
    resumed_job = SimulatedJob(
        2, 60, work, drop_slow=True, rest_periods=first_controller.rest_periods
    )
    resumed_job.controller.shares = first_controller.shares
    resumed_job.steps, resumed_job.notes = job.steps, job.notes  # at the same step
    assert not resumed_job.run(60).changed
    assert resumed_job.run(300).changed


def test_min_share_is_respected() -> None:
    assert (
        min(SimulatedJob(2, 64, make_work([0.001, 0.1]), min_share=4).run(60).controller.shares)
        == 4
    )


@given(st.integers(0, 300), st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_shares_cover_any_batch(samples: int, shares: list[int]) -> None:
    shares[0] += 1
    bounds = [balance.share_bounds(samples, shares, rank) for rank in range(len(shares))]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == samples
    assert all(one[1] == other[0] for one, other in itertools.pairwise(bounds))
    full_bounds = [balance.share_bounds(sum(shares), shares, rank) for rank in range(len(shares))]
    assert [end - start for start, end in full_bounds] == shares


@given(
    st.integers(1, 500),
    st.lists(st.tuples(st.floats(1e-4, 1), st.floats(0, 1000)), min_size=1, max_size=8),
)
def test_fastest_shares_are_optimal_and_sum_to_batch(samples: int, ranks) -> None:
    costs, overheads = [c for c, _ in ranks], [h for _, h in ranks]
    shares = balance.fastest_shares(samples, costs, overheads, [float("inf")] * len(ranks))
    assert sum(shares) == samples
    assert min(shares) >= min(1, samples // len(ranks))
    elapsed = [c * (n + h) for n, c, h in zip(shares, costs, overheads, strict=True)]
    slowest = elapsed.index(max(elapsed))
    if shares[slowest] > 1:  # no gain if another rank takes a sample from it
        alternatives = [costs[r] * (shares[r] + 1 + overheads[r]) for r in range(len(ranks))]
        assert all(
            t >= max(elapsed) * (1 - 1e-9) for r, t in enumerate(alternatives) if r != slowest
        )


@given(st.integers(1, 200), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_apportion_sums_to_batch(samples: int, weights: list[float]) -> None:
    shares = balance.apportion(samples, weights)
    assert sum(shares) == samples
    assert min(shares) >= min(1, samples // len(weights))


def test_shares_follow_host_weights() -> None:
    hosts = ["n1", "n1", "n2"]
    assert balance.shares_by_host({"n1": 3, "n2": 1}, hosts, 80) == (30, 30, 20)


def test_shares_with_absent_and_unlisted_hosts() -> None:
    assert balance.shares_by_host({"n1": 3, "n2": 1, "n3": 1}, ["n1", "n2"], 80) == (60, 20)
    assert balance.shares_by_host({"n1": 3, "n2": 1}, ["n1", "n4"], 70) == (42, 28)  # n4: mean


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"n1": 3, "n3": 1}, "no host of this job is called n3"),
        ({"n1": 3}, "no weight for n2"),
        ({"n1": 3, "n2": 0}, "n2 must be greater than 0"),
    ],
)
def test_rejects_invalid_weights(weights: dict[str, float], said: str) -> None:
    with pytest.raises(SettingError, match=said) as refused:
        validate_weights(weights, ["n1", "n2"])
    assert refused.value.remedy


def test_rejects_invalid_limits() -> None:
    validate_limits({"n2": 8}, ["n1", "n2", "n2"])
    with pytest.raises(SettingError, match="no host of this job is called n9") as refused:
        validate_limits({"n9": 8}, ["n1", "n2"])
    assert refused.value.remedy == "--micro-batch n2=8"
    with pytest.raises(SettingError) as refused:
        validate_limits({"N1": 4, "n9": 8}, ["n1", "n2"])
    assert refused.value.remedy == "--micro-batch n1=4"
    with pytest.raises(SettingError) as refused:
        validate_weights({"N1": 3, "n2": 1}, ["n1", "n2"])
    assert refused.value.remedy == "--balance n1=3,n2=1"
    with pytest.raises(SettingError, match="at least 1 sample"):
        validate_limits({"n1": 0}, ["n1", "n2"])


def test_weights_must_name_exactly_planned_hosts() -> None:
    """Also required for a host that was away at the start or is lost at a restart."""
    world = World(0, 1, host="n1", hosts=("n1", "n2"))
    comms = Comms(world, torch.device("cpu"))
    division = BatchDivision(comms, cast(Journal, None), Progress())
    division.check({"n1": 3, "n2": 1}, False, 8)
    with pytest.raises(SettingError, match="no host of this job is called n3"):
        division.check({"n1": 3, "n2": 1, "n3": 1}, False, 8)
    with pytest.raises(SettingError, match="no weight for n2"):
        division.check({"n1": 3}, False, 8)


def test_parse_balance_accepts_mapping_and_text() -> None:
    assert (
        parse_balance("n1=3,n2=1")
        == {"n1": 3.0, "n2": 1.0}
        == parse_balance({"n1": 3.0, "n2": 1.0})
    )
    assert parse_balance("auto") == "auto"
    with pytest.raises(SettingError, match="balance='Auto' is not valid"):
        parse_balance("Auto")


def test_resume_restores_shares() -> None:
    state = {
        "shares": [48, 16],
        "hosts": ["n1", "n2"],
        "speeds": [[0.001, 0.0], [0.003, 0.0]],
    }
    assert balance.resumed_shares(state, ["n1", "n2"], 64) == (48, 16)
    assert balance.resumed_shares(state, ["n1", "n2"], 128) == (96, 32)
    assert balance.resumed_shares(state, ["n1", "n2", "n2"], 60) == (36, 12, 12)
    assert balance.resumed_shares(state, ["n2", "n1"], 64) == (16, 48)
    assert balance.resumed_shares(state, ["n1", "n3"], 64) is None
    assert balance.resumed_shares(state, ["n1", "n2", "n3"], 60) is None
    assert balance.resumed_shares({}, ["n1", "n2"], 60) is None


def test_resume_restores_micro_batch_limits() -> None:
    comms = Comms(World(), torch.device("cpu"))
    division = BatchDivision(comms, cast(Journal, None), Progress())
    division.load_state_dict({"fits": [["n1", 8], ["n2", 6], ["n2", 0]]})
    assert division.resolve_limits([("n1", 0), ("n2", 4), ("n2", 5)]) == [8, 4, 5]
    assert division.state_dict() == {"fits": [["n1", 8], ["n2", 4], ["n2", 5]]}
    assert division.resolve_limits([("n3", 0), ("n2", 9)]) == [0, 9]  # other hosts
    assert division.resolve_limits([]) == []  # no limit was tried
    assert division.state_dict() == {}


def test_configured_weights_survive_host_loss_and_return() -> None:
    """A newcomer knows the given weights, and all other ranks must compute the same shares."""
    configured = {"n0": 3.0, "n1": 1.0, "n2": 2.0}
    net = nn.Linear(1, 1)
    updater = Updater(net, torch.optim.SGD(net.parameters(), lr=0.1), None, None, None)
    journal = SimpleNamespace(print=Mock(), event=Mock(), record=Mock())

    def shares(*worlds: str) -> list[balance.Shares | None]:
        comms, found, progress = SimpleNamespace(is_alone=False), [], Progress()
        division = BatchDivision(cast(Comms, comms), cast(Journal, journal), progress)
        for number, hosts in enumerate(map(str.split, worlds)):
            comms.world, progress.step = World(int(number == 0), len(hosts)), 10 * number
            rank_names = [f"rank {rank} on {host}" for rank, host in enumerate(hosts)]
            comms.rank_name = rank_names[1]
            comms.texts = {rank_names[1]: rank_names, comms.world.host: hosts}.__getitem__
            if number:
                division.regroup(Models({"": updater}))
            else:
                division.start(configured, False, 24, Models({"": updater}))
            found.append(division.shares)
        return found

    assert shares("n0 n1 n2", "n0 n2", "n0 n1 n2") == [(12, 4, 8), (14, 10), (12, 4, 8)]
    assert [one.kwargs["step"] for one in journal.event.call_args_list] == [10, 20]
    assert shares("n0 n1 n2", "n0 n2", "n0 n2 s1")[-1] == shares("n0 n1 n2", "n0 n2 s1")[-1]


@pytest.mark.parametrize(
    ("headroom_factor", "pieces"), [(1.0, [16, 16, 16]), (2.0, [24, 24]), (9.0, [48])]
)
def test_splits_share_beyond_memory_into_pieces(headroom_factor: float, pieces: list[int]) -> None:
    data = TensorDataset(torch.zeros(1024, 1))
    fetch, progress = Fetch(data, torch.device("cpu")), Progress(steps=3)
    loader = Loader(fetch, Order(1024, 0), lambda: (0, 2), 64, 0, progress)
    now: list[balance.Shares] = [(16, 48)]
    loader.shares, loader.equal_pieces, loader.headroom = (
        lambda: now[0],
        lambda: False,
        lambda: headroom_factor,
    )
    counts: list[int] = []
    for batch in loader:
        counts.append(batch.count)
        if batch.last:
            progress.step, progress.offset = progress.step + 1, batch.stop
            now[0] = (48, 16) if progress.step == 1 else now[0]
    assert counts == [16, *pieces, *pieces]


@pytest.mark.parametrize(("headroom_factor", "pieces"), [(9.0, [24, 24]), (math.inf, [48])])
def test_resumed_share_is_split_to_even_size_on_gpu(
    headroom_factor: float, pieces: list[int]
) -> None:
    """Applies to an accelerator, whose memory use is unknown before the first batch."""
    fetch = Fetch(TensorDataset(torch.zeros(1024, 1)), torch.device("cpu"))
    loader = Loader(fetch, Order(1024, 0), lambda: (0, 2), 64, 0, Progress(steps=1))
    loader.shares, loader.equal_pieces, loader.headroom = (
        lambda: (48, 16),
        lambda: False,
        lambda: headroom_factor,
    )
    counts: list[int] = []
    for batch in loader:
        counts.append(batch.count)
        if batch.last:
            break
    assert counts == pieces


def test_slow_warmup_steps_are_not_overhead() -> None:
    """The first steps are slow while memory and caches are new; these are measured values."""
    warmup_seconds = [0.0, 0.253, 0.233, 0.198, 0.241, 0.228]

    def work(rank: int, step: int, samples: int) -> float:
        if rank == 0:
            return warmup_seconds[step] if 0 < step < len(warmup_seconds) else 0.00297 * samples
        return 0.00855 * samples

    controller = SimulatedJob(2, 128, work).run(60).controller
    overheads = [overhead for _, overhead in controller.speeds()]
    assert controller.shares == (95, 33)
    assert overheads[0] < 20  # otherwise a few samples less would seem to save no time


def quota_limited_work(rank: int, step: int, samples: int) -> float:
    """Simulates a container's quota: rank 1 computes for a third of each 0.1 s, then waits."""
    uncontended_s = samples * 0.00078
    return uncontended_s if rank == 0 else uncontended_s + 0.067 * int(uncontended_s / 0.033)


def test_slower_share_is_reverted_and_rarely_retried() -> None:
    job = SimulatedJob(2, 128, quota_limited_work).run(460)
    limited_share = job.controller.shares[1]
    assert limited_share <= 42  # takes 0.033 s
    slow_steps = [one for one in job.steps[20:] if one > 0.1]
    assert (
        0 < len(slow_steps) <= 2 * STEPS_PER_LOOK
    )  # it is tried again sometimes, less and less often
    assert job.mean(20, 460) < 0.08
    assert len(job.changed) <= 8


def test_lifts_limit_when_rank_speeds_up() -> None:
    speedup_step = 60

    def work(rank: int, step: int, samples: int) -> float:
        uncontended_s = samples * 0.00078
        if rank == 0:
            return uncontended_s
        if step >= speedup_step:
            return uncontended_s / 3
        return uncontended_s if uncontended_s < 0.033 else uncontended_s + 0.15

    job = SimulatedJob(2, 128, work).run(90)
    assert job.controller.shares[1] > 85
