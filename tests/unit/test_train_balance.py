"""Shares by speed: the decisions, on simulated ranks."""

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
LOOKS = 5  # steps between two


class Job:
    """Ranks whose steps take what ``work`` says."""

    def __init__(self, ranks: int, batch: int, work: Work, moving: float = 0.0, **options) -> None:
        self.controller = Controller(even_shares(batch, ranks), **options)
        self.work, self.ranks, self.moving = work, ranks, moving
        self.steps: list[float] = []  # seconds of each step
        self.notes: list = []
        self.changed: list[int] = []  # steps after which shares changed
        self.advice: list[balance.Advice] = []

    def run(self, steps: int) -> Job:
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
            if step % LOOKS == 0 and step:  # a step after the notes were sent
                self.look(step - LOOKS, self.notes[-LOOKS - 1 : -1], step + 1)
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


def speeds(
    costs: Sequence[float], fixed: Sequence[float] = (), noise: float = 0.0, seed: int = 0
) -> Work:
    """Ranks with so many seconds a sample, besides so many a step, with noise."""
    draw = random.Random(seed)
    fixed = fixed or [0.0] * len(costs)

    def work(rank: int, step: int, samples: int) -> float:
        took = fixed[rank] + costs[rank] * samples
        return took * max(0.3, draw.gauss(1, noise)) if noise else took

    return work


def bound(costs: Sequence[float], batch: int) -> float:
    """Seconds of a step at the sum of all rates."""
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
def test_settles_within_20_steps_at_the_sum_of_the_rates(costs: list[float], noise: float) -> None:
    batch = 64 * len(costs)
    costs = [one / 1000 for one in costs]
    job = Job(len(costs), batch, speeds(costs, noise=noise)).run(100)
    settled = job.mean(20, 100)
    waits = 1 + (2.2 if len(costs) > 4 else 1.6) * noise  # for the unluckiest of all ranks
    assert bound(costs, batch) / settled >= 0.95 / waits
    assert len(job.changed) <= 8


def test_what_shares_win_is_known_once_two_have_been_seen() -> None:
    """A rank that needs 0.25 s more for a step, whatever its share."""
    job = Job(2, 32, speeds([0.001, 0.001], fixed=[0.03, 0.28])).run(60)
    first, second = [one for one in job.advice if one.apply][:2]
    assert not first.is_certain
    assert first.proposed_s < 0.2  # at best: it comes to more
    assert second.is_certain
    assert second.proposed_s > 0.25


def test_equal_shares_reach_half_of_it() -> None:
    """What the above is measured against."""
    costs = [0.001, 0.003]
    assert bound(costs, 64) / (max(costs) * 32) == pytest.approx(0.5)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("noise", [0.02, 0.2])
def test_equal_ranks_keep_equal_shares(ranks: int, noise: float) -> None:
    runs = [
        Job(ranks, 32 * ranks, speeds([0.001] * ranks, noise=noise, seed=seed)).run(150)
        for seed in range(3)
    ]
    assert sum(len(job.changed) for job in runs) <= 1


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_another_job_that_comes_and_goes_is_followed_within_20_steps(ranks: int) -> None:
    def work(rank: int, step: int, samples: int) -> float:
        beside = rank == ranks - 1 and 100 <= step < 200
        return 0.001 * samples * (3 if beside else 1) * draw.gauss(1, 0.02)

    draw = random.Random(1)
    batch = 32 * ranks
    job = Job(ranks, batch, work).run(300)
    together = bound([0.001] * (ranks - 1) + [0.003], batch)
    alone = bound([0.001] * ranks, batch)
    assert together / job.mean(120, 200) > 0.93
    assert alone / job.mean(220, 300) > 0.93
    assert alone / job.mean(20, 100) > 0.95
    assert len(job.changed) <= 8


def test_one_odd_step_moves_nothing() -> None:
    def work(rank: int, step: int, samples: int) -> float:
        return 0.001 * samples + (1.0 if (rank, step) in ((1, 22), (0, 41), (1, 61)) else 0.0)

    assert not Job(2, 64, work).run(200).changed


def test_steps_of_an_epochs_last_batch_without_samples_of_a_rank_tell_nothing_of_it() -> None:
    """They may be large enough to be looked at: three of four samples."""
    job = Job(4, 4, lambda rank, step, n: 0.01)
    busy = [[[0, 0.01, 0, 0, 0, 0], int(rank > 0)] for rank in range(4)]
    job.look(0, [busy] * LOOKS, LOOKS)
    assert not job.advice
    job.run(20)
    assert all(seconds for seconds, _ in job.controller.speeds())


@pytest.mark.parametrize("fixed", [[0.0, 0.0], [0.02, 0.02], [0.05, 0.0], [0.0, 0.05]])
def test_fixed_costs_are_told_from_costs_of_a_sample(fixed: list[float]) -> None:
    job = Job(2, 64, speeds([0.001, 0.003], fixed)).run(60)
    best = min(max(fixed[0] + 0.001 * n, fixed[1] + 0.003 * (64 - n)) for n in range(1, 64))
    assert job.mean(20, 60) <= 1.04 * best


def test_a_gpu_whose_steps_cost_the_same_at_any_share() -> None:
    """As far as its memory goes; the CPU beside it gets what it can do meanwhile."""

    def work(rank: int, step: int, samples: int) -> float:
        return max(0.01, samples * 1e-5) if rank == 0 else samples * 0.002

    job = Job(2, 256, work).run(60)
    gpu, cpu = job.controller.shares
    assert gpu > 240
    assert cpu >= 4
    assert job.mean(20, 60) < 0.0125


def test_a_speed_that_changes_with_the_shares_is_not_taken_for_an_overhead() -> None:
    """Just when its share halves another job takes half of a rank's time."""

    def work(rank: int, step: int, samples: int) -> float:
        return 0.001 * samples * (3 if rank == 1 else 1) * (2 if rank == 1 and step >= 5 else 1)

    job = Job(2, 64, work).run(100)
    assert bound([0.001, 0.006], 64) / job.mean(25, 100) > 0.93


@pytest.mark.parametrize("drop_slow", [False, True])
def test_a_rank_that_makes_steps_slower_is_named_and_dropped_where_allowed(drop_slow: bool) -> None:
    job = Job(3, 60, speeds([0.001] * 3, [0.0, 0.0, 0.2]), 0.005, drop_slow=drop_slow).run(60)
    said = next(one for one in job.advice if one.surplus_rank is not None)
    assert said.surplus_rank == 2
    assert said.proposed_s == pytest.approx(0.201, rel=0.2)
    assert said.reduced_s == pytest.approx(0.03, rel=0.2)
    assert job.controller.shares == ((30, 30, 0) if drop_slow else job.controller.shares)
    assert drop_slow or min(job.controller.shares) >= 1


def test_rank_0_is_named_and_never_dropped() -> None:
    job = Job(2, 60, speeds([0.001] * 2, [0.2, 0.0]), drop_slow=True).run(60)
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


def test_a_dropped_rank_is_tried_again() -> None:
    def work(rank: int, step: int, samples: int) -> float:
        beside = 0.2 if rank == 1 and step < 100 else 0.0
        return beside + 0.001 * samples

    job = Job(2, 60, work, drop_slow=True).run(100)
    assert job.controller.shares[1] == 0
    assert job.run(300).controller.shares == (30, 30)


def test_a_resumed_run_leaves_a_dropped_rank_its_rest() -> None:
    work = speeds([0.001] * 2, [0.0, 0.2])
    job = Job(2, 60, work, drop_slow=True).run(100)
    kept = job.controller
    assert list(kept.rest_periods) == [1]
    assert kept.speeds()[1][0] > 0  # what it was before, for other worlds
    again = Job(2, 60, work, drop_slow=True, rest_periods=kept.rest_periods)
    again.controller.shares = kept.shares
    again.steps, again.notes = job.steps, job.notes  # at the same step
    assert not again.run(60).changed
    assert again.run(300).changed


def test_batch_norm_keeps_a_least_share() -> None:
    assert min(Job(2, 64, speeds([0.001, 0.1]), min_share=4).run(60).controller.shares) == 4


@given(st.integers(0, 300), st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_shares_cover_any_batch(samples: int, shares: list[int]) -> None:
    shares[0] += 1
    cuts = [balance.share_bounds(samples, shares, rank) for rank in range(len(shares))]
    assert cuts[0][0] == 0
    assert cuts[-1][1] == samples
    assert all(one[1] == other[0] for one, other in itertools.pairwise(cuts))
    whole = [balance.share_bounds(sum(shares), shares, rank) for rank in range(len(shares))]
    assert [end - start for start, end in whole] == shares


@given(
    st.integers(1, 500),
    st.lists(st.tuples(st.floats(1e-4, 1), st.floats(0, 1000)), min_size=1, max_size=8),
)
def test_the_fastest_shares_are_whole_and_all(samples: int, ranks) -> None:
    costs, overheads = [c for c, _ in ranks], [h for _, h in ranks]
    shares = balance.fastest_shares(samples, costs, overheads, [float("inf")] * len(ranks))
    assert sum(shares) == samples
    assert min(shares) >= min(1, samples // len(ranks))
    took = [c * (n + h) for n, c, h in zip(shares, costs, overheads, strict=True)]
    slowest = took.index(max(took))
    if shares[slowest] > 1:  # one sample fewer there makes nobody faster than it was
        others = [costs[r] * (shares[r] + 1 + overheads[r]) for r in range(len(ranks))]
        assert all(t >= max(took) * (1 - 1e-9) for r, t in enumerate(others) if r != slowest)


@given(st.integers(1, 200), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_weights_become_whole_shares(samples: int, weights: list[float]) -> None:
    shares = balance.apportion(samples, weights)
    assert sum(shares) == samples
    assert min(shares) >= min(1, samples // len(weights))


def test_hosts_share_by_their_weights() -> None:
    hosts = ["n1", "n1", "n2"]
    assert balance.shares_by_host({"n1": 3, "n2": 1}, hosts, 80) == (30, 30, 20)


def test_hosts_that_are_away_or_came_later_have_their_part_of_the_weights() -> None:
    assert balance.shares_by_host({"n1": 3, "n2": 1, "n3": 1}, ["n1", "n2"], 80) == (60, 20)
    assert balance.shares_by_host({"n1": 3, "n2": 1}, ["n1", "n4"], 70) == (42, 28)  # their mean


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"n1": 3, "n3": 1}, "no host of this job is called n3"),
        ({"n1": 3}, "no weight for n2"),
        ({"n1": 3, "n2": 0}, "n2 must be greater than 0"),
    ],
)
def test_wrong_weights_are_refused(weights: dict[str, float], said: str) -> None:
    with pytest.raises(SettingError, match=said) as refused:
        validate_weights(weights, ["n1", "n2"])
    assert refused.value.remedy


def test_wrong_limits_are_refused() -> None:
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


def test_weights_are_for_all_hosts_of_the_plan_whoever_is_there() -> None:
    """Also of one that was away when the job began, or is lost at a restart."""
    world = World(0, 1, host="n1", hosts=("n1", "n2"))
    comms = Comms(world, torch.device("cpu"))
    division = BatchDivision(comms, cast(Journal, None), Progress())
    division.check({"n1": 3, "n2": 1}, False, 8)
    with pytest.raises(SettingError, match="no host of this job is called n3"):
        division.check({"n1": 3, "n2": 1, "n3": 1}, False, 8)
    with pytest.raises(SettingError, match="no weight for n2"):
        division.check({"n1": 3}, False, 8)


def test_a_script_says_weights_as_a_mapping_or_as_they_are_typed() -> None:
    assert (
        parse_balance("n1=3,n2=1")
        == {"n1": 3.0, "n2": 1.0}
        == parse_balance({"n1": 3.0, "n2": 1.0})
    )
    assert parse_balance("auto") == "auto"
    with pytest.raises(SettingError, match="balance='Auto' is not valid"):
        parse_balance("Auto")


def test_a_resumed_run_has_its_shares() -> None:
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


def test_a_resumed_run_has_its_pieces_unless_they_do_not_fit_any_more() -> None:
    comms = Comms(World(), torch.device("cpu"))
    division = BatchDivision(comms, cast(Journal, None), Progress())
    division.load_state_dict({"fits": [["n1", 8], ["n2", 6], ["n2", 0]]})
    assert division.resolve_limits([("n1", 0), ("n2", 4), ("n2", 5)]) == [8, 4, 5]
    assert division.state_dict() == {"fits": [["n1", 8], ["n2", 4], ["n2", 5]]}
    assert division.resolve_limits([("n3", 0), ("n2", 9)]) == [0, 9]  # other hosts
    assert division.resolve_limits([]) == []  # nothing was tried
    assert division.state_dict() == {}


def test_stated_weights_outlive_a_host_that_goes_and_comes_back() -> None:
    """Who comes knows what was stated, and all others have to find the same shares."""
    stated = {"n0": 3.0, "n1": 1.0, "n2": 2.0}
    net = nn.Linear(1, 1)
    updater = Updater(net, torch.optim.SGD(net.parameters(), lr=0.1), None, None, None)
    journal = SimpleNamespace(print=Mock(), event=Mock(), record=Mock())

    def shares(*worlds: str) -> list[balance.Shares | None]:
        comms, found, progress = SimpleNamespace(is_alone=False), [], Progress()
        division = BatchDivision(cast(Comms, comms), cast(Journal, journal), progress)
        for number, hosts in enumerate(map(str.split, worlds)):
            comms.world, progress.step = World(int(number == 0), len(hosts)), 10 * number
            called = [f"rank {rank} on {host}" for rank, host in enumerate(hosts)]
            comms.rank_name = called[1]
            comms.texts = {called[1]: called, comms.world.host: hosts}.__getitem__
            if number:
                division.regroup(Models({"": updater}))
            else:
                division.start(stated, False, 24, Models({"": updater}))
            found.append(division.shares)
        return found

    assert shares("n0 n1 n2", "n0 n2", "n0 n1 n2") == [(12, 4, 8), (14, 10), (12, 4, 8)]
    assert [one.kwargs["step"] for one in journal.event.call_args_list] == [10, 20]
    assert shares("n0 n1 n2", "n0 n2", "n0 n2 s1")[-1] == shares("n0 n1 n2", "n0 n2 s1")[-1]


@pytest.mark.parametrize(("room", "pieces"), [(1.0, [16, 16, 16]), (2.0, [24, 24]), (9.0, [48])])
def test_a_share_beyond_a_ranks_memory_comes_in_pieces(room: float, pieces: list[int]) -> None:
    data = TensorDataset(torch.zeros(1024, 1))
    fetch, progress = Fetch(data, torch.device("cpu")), Progress(steps=3)
    loader = Loader(fetch, Order(1024, 0), lambda: (0, 2), 64, 0, progress)
    now: list[balance.Shares] = [(16, 48)]
    loader.shares, loader.equal_pieces, loader.headroom = (
        lambda: now[0],
        lambda: False,
        lambda: room,
    )
    counts: list[int] = []
    for batch in loader:
        counts.append(batch.count)
        if batch.last:
            progress.step, progress.offset = progress.step + 1, batch.stop
            now[0] = (48, 16) if progress.step == 1 else now[0]
    assert counts == [16, *pieces, *pieces]


@pytest.mark.parametrize(("room", "pieces"), [(9.0, [24, 24]), (math.inf, [48])])
def test_a_resumed_share_is_no_larger_at_once_than_an_even_one(
    room: float, pieces: list[int]
) -> None:
    """Of an accelerator, whose memory nothing is known of before a first batch."""
    fetch = Fetch(TensorDataset(torch.zeros(1024, 1)), torch.device("cpu"))
    loader = Loader(fetch, Order(1024, 0), lambda: (0, 2), 64, 0, Progress(steps=1))
    loader.shares, loader.equal_pieces, loader.headroom = (
        lambda: (48, 16),
        lambda: False,
        lambda: room,
    )
    counts: list[int] = []
    for batch in loader:
        counts.append(batch.count)
        if batch.last:
            break
    assert counts == pieces


def test_slow_first_steps_are_not_taken_for_an_overhead() -> None:
    """As they are while memory and caches are new; these were measured."""
    early = [0.0, 0.253, 0.233, 0.198, 0.241, 0.228]

    def work(rank: int, step: int, samples: int) -> float:
        if rank == 0:
            return early[step] if 0 < step < len(early) else 0.00297 * samples
        return 0.00855 * samples

    controller = Job(2, 128, work).run(60).controller
    overheads = [overhead for _, overhead in controller.speeds()]
    assert controller.shares == (95, 33)
    assert overheads[0] < 20  # else a few samples less would seem to make no difference


def of_a_quota(rank: int, step: int, samples: int) -> float:
    """Rank 1 computes for a third of each 0.1 s, as a container may; then it waits for the next."""
    alone = samples * 0.00078
    return alone if rank == 0 else alone + 0.067 * int(alone / 0.033)


def test_a_share_that_only_looked_better_is_taken_back_and_not_tried_soon_again() -> None:
    job = Job(2, 128, of_a_quota).run(460)
    limited = job.controller.shares[1]
    assert limited <= 42  # 0.033 s of computing
    bad = [one for one in job.steps[20:] if one > 0.1]
    assert 0 < len(bad) <= 2 * LOOKS  # it is tried again now and then, ever more seldom
    assert job.mean(20, 460) < 0.08
    assert len(job.changed) <= 8


def test_who_was_held_and_gets_quicker_is_held_no_longer() -> None:
    quick_at = 60

    def work(rank: int, step: int, samples: int) -> float:
        alone = samples * 0.00078
        if rank == 0:
            return alone
        if step >= quick_at:
            return alone / 3
        return alone if alone < 0.033 else alone + 0.15

    job = Job(2, 128, work).run(90)
    assert job.controller.shares[1] > 85
