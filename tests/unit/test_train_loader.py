"""Batches while the ranks among which they are divided change."""

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
    """The place of a rank in groups that follow each other."""

    def __init__(self, *places: tuple[int, int]) -> None:
        self.places, self.generation = places, 0

    def loader(self, progress: Progress) -> Loader:
        data = TensorDataset(torch.arange(SAMPLES))
        fetch = Fetch(data, torch.device("cpu"))
        order = Order(SAMPLES, 0, shuffle=False)
        loader = Loader(fetch, order, lambda: self.places[self.generation], BATCH, 0, progress)
        loader.generation = lambda: self.generation
        return loader


def counted(loader: Loader, batch: Batch) -> None:
    """What ``session.step`` does of it."""
    loader.progress.step += 1
    loader.progress.offset = loader.take().stop


def ids(batch: Batch) -> list[int]:
    return batch.ids[: batch.count].tolist()


def test_a_void_batch_is_given_again_among_those_who_are_left() -> None:
    group = Group((1, 3), (0, 1))
    loader = group.loader(Progress(steps=4))
    seen = []
    for number, batch in enumerate(loader):
        if number == 1:
            group.generation = 1
            assert loader.is_outdated
        else:
            seen.append(ids(batch))
            counted(loader, batch)
    assert seen == [[2, 3], [*range(6, 12)], [*range(12, 18)], [*range(18, 24)]]


def test_the_same_place_in_another_group_gets_the_same_batch_again() -> None:
    group = Group((1, 2), (1, 2))
    loader = group.loader(Progress(steps=4))
    batches = iter(loader)
    first = next(batches)
    group.generation = 1
    assert ids(next(batches)) == ids(first)


def test_a_batch_that_counts_is_not_given_again() -> None:
    """The group may change after the step, too: in a proof or a record."""
    group = Group((1, 2), (0, 1))
    loader = group.loader(Progress(steps=4))
    batches = iter(loader)
    counted(loader, next(batches))
    group.generation = 1
    assert ids(next(batches)) == [*range(6, 12)]


def test_ranks_join_before_a_batch_and_never_in_its_pieces() -> None:
    group, asked = Group((0, 1), (1, 2)), count()
    progress = Progress(steps=4)
    loader = group.loader(progress)
    loader.limit = 2

    def join() -> None:
        next(asked)
        if progress.step == 1:
            group.generation = 1

    loader.on_boundary, seen = join, []
    for batch in loader:
        seen.append((progress.step, ids(batch)))
        if batch.last:
            counted(loader, batch)
    assert seen[:3] == [(0, [0, 1]), (0, [2, 3]), (0, [4, 5])]
    assert seen[3:5] == [(1, [9]), (1, [10, 11])]  # the second half of 6 to 11, in two pieces
    assert seen[-1] == (3, [22, 23])


def test_a_void_batch_after_a_pause_is_no_second_pause() -> None:
    """The evaluation has been done at this step."""
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
            counted(loader, batch)
            rounds[-1] += 1
        progress.evaluated = progress.step  # as session.epochs does
    assert rounds == [2, 2]


def test_a_batch_that_was_forgotten_is_still_an_error() -> None:
    with pytest.raises(RuntimeError, match="not given to session"):
        list(Group((0, 1)).loader(Progress(steps=4)))


# -- evaluation --------------------------------------------------------------------------


def evaluated(
    slot: int, meetings: Sequence[Sequence[int]], samples: int = 20, by: Shares | None = None
) -> tuple[list[int], int]:
    """What one rank sees of an evaluation, where such ranks meet; and how many batches."""
    fetch = Fetch(TensorDataset(torch.arange(samples)), torch.device("cpu"))
    at = iter(meetings)
    shard = Shard(
        fetch, samples, lambda: (0, 3), 3, Progress(), lambda: None, lambda: by,
        slot=slot, list_slots=lambda: next(at),
    )  # fmt: skip
    found = list(shard)
    assert next(at, None) is None
    return [one for batch in found for one in ids(batch)], len(found)


def test_an_evaluation_goes_on_with_the_samples_of_the_lost() -> None:
    """Also with those that the lost had seen: what they measured of them is gone."""
    meetings = [(0, 1, 2), (0, 2), (0, 2)]
    seen = [evaluated(slot, meetings) for slot in (0, 2)]
    assert sorted(seen[0][0] + seen[1][0]) == [*range(20)]
    assert seen[0][0] == [*range(6), *range(6, 9)]
    assert seen[0][1] == seen[1][1]  # the model may communicate


def test_ranks_may_be_lost_while_they_help() -> None:
    meetings = [(0, 1, 2), (0, 2), (2,), (2,)]
    seen, _ = evaluated(2, meetings)
    assert sorted(seen) == [*range(20)]
    by = (1, 1, 2)
    seen, _ = evaluated(2, meetings, by=by)
    assert sorted(seen) == [*range(20)]
    assert seen[:10] == [*range(10, 20)]


def test_who_is_not_there_yet_computes_as_many_batches_of_nothing() -> None:
    assert evaluated(7, [(0, 1, 2), (0, 1, 2)]) == ([], 3)


@pytest.mark.parametrize(
    ("left", "ranks", "limit", "parts"),
    [
        (3, 2, 0, [([8, 9, 10], 3), ([8, 9], 0)]),
        (2, 3, 0, [([8, 9], 2), ([8, 9], 0), ([8, 9], 0)]),
        (1, 2, 0, [([8, 8], 1), ([8, 8], 0)]),  # twice: their mean is the one's
        (3, 1, 2, [([8, 8], 1)]),  # the first piece
        (2, 2, 1, [([8], 1), ([9], 1)]),  # single samples were asked for
    ],
)
def test_a_model_with_batch_normalisation_never_gets_one_sample(
    left: int, ranks: int, limit: int, parts: list[tuple[list[int], int]]
) -> None:
    for rank, wanted in enumerate(parts):
        fetch = Fetch(TensorDataset(torch.arange(8 + left)), torch.device("cpu"))
        order = Order(8 + left, 0, shuffle=False)
        place = partial(tuple[int, int], (rank, ranks))
        loader = Loader(fetch, order, place, 8, limit, Progress(step=1, offset=8, steps=2))
        loader.min_samples = 2
        batch = next(iter(loader))
        assert (batch.ids.tolist(), batch.count) == wanted
        assert len(batch.data[0]) == len(wanted[0])


def test_limits_of_single_ranks_neither_lose_nor_repeat_a_sample() -> None:
    """Two ranks, of which the second computes one or two samples at once; the last batch is odd."""
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
                    counted(loader, batch)
                else:
                    loader.take()
        assert sorted(seen) == [*range(13)]


def test_who_asks_for_batches_of_one_gets_them() -> None:
    fetch, order = Fetch(TensorDataset(torch.arange(6)), torch.device("cpu")), Order(6, 0)
    loader = Loader(fetch, order, lambda: (1, 2), 2, 0, Progress(steps=3))
    loader.min_samples = 2
    for batch in loader:
        assert len(batch.ids) == batch.count == 1
        counted(loader, batch)
