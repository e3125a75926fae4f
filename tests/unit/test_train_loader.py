"""Tests batches while the group of ranks changes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count

import pytest
import torch
from torch.utils.data import TensorDataset

from paceline.train.data.balance import Shares
from paceline.train.data.fetch import Fetch
from paceline.train.data.loader import Batch, Loader, Progress, Shard
from paceline.train.data.order import Order

SAMPLES, BATCH = 24, 6


class Group:
    """The place of a rank in several generations of its group."""

    def __init__(self, *places: tuple[int, int]) -> None:
        self.places, self.generation = places, 0

    def loader(self, progress: Progress) -> Loader:
        data = TensorDataset(torch.arange(SAMPLES))
        fetch = Fetch(data, torch.device("cpu"))
        order = Order(SAMPLES, 0, shuffle=False)
        loader = Loader(fetch, order, lambda: self.places[self.generation], BATCH, 0, progress)
        loader.generation = lambda: self.generation
        return loader


def commit_batch(loader: Loader, batch: Batch) -> None:
    """Marks a batch as completed, like ``session.step``."""
    loader.progress.step += 1
    loader.progress.offset = loader.take().stop


def batch_ids(batch: Batch) -> list[int]:
    return batch.ids[: batch.count].tolist()


def test_void_batch_is_repeated_for_remaining_ranks() -> None:
    group = Group((1, 3), (0, 1))
    loader = group.loader(Progress(steps=4))
    seen = []
    for number, batch in enumerate(loader):
        if number == 1:
            group.generation = 1
            assert loader.is_outdated
        else:
            seen.append(batch_ids(batch))
            commit_batch(loader, batch)
    assert seen == [[2, 3], [*range(6, 12)], [*range(12, 18)], [*range(18, 24)]]


def test_void_batch_is_repeated_for_unchanged_place() -> None:
    group = Group((1, 2), (1, 2))
    loader = group.loader(Progress(steps=4))
    batches = iter(loader)
    first = next(batches)
    group.generation = 1
    assert batch_ids(next(batches)) == batch_ids(first)


def test_committed_batch_is_not_repeated() -> None:
    """The group may also change after the step: in a replica check or a record."""
    group = Group((1, 2), (0, 1))
    loader = group.loader(Progress(steps=4))
    batches = iter(loader)
    commit_batch(loader, next(batches))
    group.generation = 1
    assert batch_ids(next(batches)) == [*range(6, 12)]


def test_ranks_join_only_at_batch_boundaries() -> None:
    group, join_calls = Group((0, 1), (1, 2)), count()
    progress = Progress(steps=4)
    loader = group.loader(progress)
    loader.limit = 2

    def join() -> None:
        next(join_calls)
        if progress.step == 1:
            group.generation = 1

    loader.on_boundary, seen = join, []
    for batch in loader:
        seen.append((progress.step, batch_ids(batch)))
        if batch.last:
            commit_batch(loader, batch)
    assert seen[:3] == [(0, [0, 1]), (0, [2, 3]), (0, [4, 5])]
    assert seen[3:5] == [(1, [9]), (1, [10, 11])]  # the second half of 6 to 11, in two pieces
    assert seen[-1] == (3, [22, 23])


def test_void_batch_after_pause_does_not_pause_again() -> None:
    """The evaluation at this step is already done."""
    group = Group((0, 2), (0, 1))
    progress = Progress(steps=4)
    loader = group.loader(progress)
    loader.pause_interval = 2
    rounds = []
    while not progress.finished:
        rounds.append(0)
        for batch in loader:
            if progress.step == 2 and not group.generation:
                group.generation = 1
                continue
            commit_batch(loader, batch)
            rounds[-1] += 1
        progress.evaluated = progress.step  # like session.epochs
    assert rounds == [2, 2]


def test_unused_batch_is_error() -> None:
    with pytest.raises(RuntimeError, match="not given to session"):
        list(Group((0, 1)).loader(Progress(steps=4)))


# -- evaluation --------------------------------------------------------------------------


def run_evaluation(
    slot: int, meetings: Sequence[Sequence[int]], samples: int = 20, weights: Shares | None = None
) -> tuple[list[int], int]:
    """Returns a rank's samples and number of batches in an evaluation among these ranks."""
    fetch = Fetch(TensorDataset(torch.arange(samples)), torch.device("cpu"))
    slots_per_batch = iter(meetings)
    shard = Shard(
        fetch, samples, lambda: (0, 3), 3, Progress(), lambda: None, lambda: weights,
        slot=slot, list_slots=lambda: next(slots_per_batch),
    )  # fmt: skip
    shard_batches = list(shard)
    assert next(slots_per_batch, None) is None
    return [sample_id for batch in shard_batches for sample_id in batch_ids(batch)], len(
        shard_batches
    )


def test_evaluation_covers_samples_of_lost_ranks() -> None:
    """The samples of lost ranks are evaluated again, as their measurements are lost."""
    meetings = [(0, 1, 2), (0, 2), (0, 2)]
    seen = [run_evaluation(slot, meetings) for slot in (0, 2)]
    assert sorted(seen[0][0] + seen[1][0]) == [*range(20)]
    assert seen[0][0] == [*range(6), *range(6, 9)]
    assert seen[0][1] == seen[1][1]  # equal, as the model may communicate


def test_evaluation_survives_repeated_rank_loss() -> None:
    meetings = [(0, 1, 2), (0, 2), (2,), (2,)]
    seen, _ = run_evaluation(2, meetings)
    assert sorted(seen) == [*range(20)]
    weights = (1, 1, 2)
    seen, _ = run_evaluation(2, meetings, weights=weights)
    assert sorted(seen) == [*range(20)]
    assert seen[:10] == [*range(10, 20)]


def test_absent_rank_evaluates_empty_batches() -> None:
    assert run_evaluation(7, [(0, 1, 2), (0, 1, 2)]) == ([], 3)


@pytest.mark.parametrize(
    ("remainder", "ranks", "limit", "parts"),
    [
        (3, 2, 0, [([8, 9, 10], 3), ([8, 9], 0)]),
        (2, 3, 0, [([8, 9], 2), ([8, 9], 0), ([8, 9], 0)]),
        (1, 2, 0, [([8, 8], 1), ([8, 8], 0)]),  # the sample twice: its mean is unchanged
        (3, 1, 2, [([8, 8], 1)]),  # the first part
        (2, 2, 1, [([8], 1), ([9], 1)]),  # with a limit of one sample
    ],
)
def test_min_samples_fills_small_batches(
    remainder: int, ranks: int, limit: int, parts: list[tuple[list[int], int]]
) -> None:
    for rank, expected in enumerate(parts):
        fetch = Fetch(TensorDataset(torch.arange(8 + remainder)), torch.device("cpu"))
        order = Order(8 + remainder, 0, shuffle=False)
        place = partial(tuple[int, int], (rank, ranks))
        loader = Loader(fetch, order, place, 8, limit, Progress(step=1, offset=8, steps=2))
        loader.min_samples = 2
        batch = next(iter(loader))
        assert (batch.ids.tolist(), batch.count) == expected
        assert len(batch.data[0]) == len(expected[0])


def test_per_rank_limits_cover_each_sample_once() -> None:
    """Two ranks; the second is limited to a few samples at once; the last batch is odd."""
    for limit in (1, 2, 3):
        seen: list[int] = []
        for rank in range(2):
            fetch = Fetch(TensorDataset(torch.arange(13)), torch.device("cpu"))
            place = partial(tuple[int, int], (rank, 2))
            order = Order(13, 0, shuffle=False)
            loader = Loader(fetch, order, place, 10, limit * rank, Progress(steps=2))
            loader.min_samples, loader.has_common_limit, loader.equal_pieces = (
                2,
                False,
                lambda: False,
            )
            for batch in loader:
                seen += batch.ids[: batch.count].tolist()
                assert len(batch.ids) >= (1 if rank and limit == 1 else 2)
                if batch.last:
                    commit_batch(loader, batch)
                else:
                    loader.take()
        assert sorted(seen) == [*range(13)]


def test_single_sample_batches_are_allowed_on_request() -> None:
    fetch, order = Fetch(TensorDataset(torch.arange(6)), torch.device("cpu")), Order(6, 0)
    loader = Loader(fetch, order, lambda: (1, 2), 2, 0, Progress(steps=3))
    loader.min_samples = 2
    for batch in loader:
        assert len(batch.ids) == batch.count == 1
        commit_batch(loader, batch)
