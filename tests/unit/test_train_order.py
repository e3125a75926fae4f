"""Tests that the order of data is a pure function, and that shares are exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.spec.errors import DataError, SettingError
from paceline.train.data.loader import check_batch_size, rank_pieces
from paceline.train.data.order import (
    Order,
    group_by_length,
    permutation,
    rank_range,
    uniforms,
    with_script_order,
)


def test_permutation_matches_recorded_values() -> None:
    """Compares with recorded values: other numpy versions and platforms give the same order."""
    assert permutation(7, 3, 10).tolist() == [2, 5, 9, 7, 3, 0, 6, 8, 4, 1]


@given(st.integers(0, 2**63), st.integers(0, 1000), st.integers(1, 300))
def test_permutation_contains_each_index_once(seed: int, epoch: int, size: int) -> None:
    assert sorted(permutation(seed, epoch, size).tolist()) == list(range(size))


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(permutation(seed, epoch, 50)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_order_without_shuffle() -> None:
    assert Order(5, 1, shuffle=False).epoch(4).tolist() == [0, 1, 2, 3, 4]


@given(st.integers(0, 100), st.integers(0, 200), st.integers(1, 17))
def test_parts_are_disjoint_and_complete(start: int, count: int, size: int) -> None:
    parts = [rank_range(start, start + count, rank, size) for rank in range(size)]
    covered = [position for first, end in parts for position in range(first, end)]
    assert covered == list(range(start, start + count))
    lengths = [end - first for first, end in parts]
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(0, 100), st.integers(1, 200), st.integers(1, 9), st.integers(0, 20))
def test_shares_have_equal_numbers_of_pieces(start: int, count: int, size: int, limit: int) -> None:
    by_rank = [rank_pieces(start, start + count, rank, size, limit) for rank in range(size)]
    assert len({len(pieces) for pieces in by_rank}) == 1
    covered = [p for pieces in by_rank for first, end in pieces for p in range(first, end)]
    assert covered == list(range(start, start + count))
    assert not limit or max(end - first for pieces in by_rank for first, end in pieces) <= limit


@given(
    st.integers(0, 200),
    st.integers(1, 9).flatmap(
        lambda ranks: st.one_of(
            st.tuples(st.just(ranks), st.none()),
            st.tuples(
                st.just(ranks),
                st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks).filter(any).map(tuple),
            ),
        )
    ),
)
def test_min_samples_avoids_single_sample_ranks(
    count: int, ranks: tuple[int, tuple[int, ...] | None]
) -> None:
    """Applies if a rank needs two samples, as for batch normalisation."""
    size, share_weights = ranks
    parts = [
        rank_pieces(0, count, rank, size, weights=share_weights, min_samples=2)[0]
        for rank in range(size)
    ]
    assert [p for first, end in parts for p in range(first, end)] == list(range(count))
    lengths = [end - first for first, end in parts]
    assert count == 1 or 1 not in lengths
    assert share_weights is None or not any(
        length for length, weight in zip(lengths, share_weights, strict=True) if not weight
    )
    unconstrained = [
        rank_pieces(0, count, rank, size, weights=share_weights)[0] for rank in range(size)
    ]
    assert parts == unconstrained or any(end - first == 1 for first, end in unconstrained)


def test_uniforms_depend_only_on_position() -> None:
    values = uniforms(1, 2, np.arange(100), 3)
    assert np.array_equal(values[37:41], uniforms(1, 2, np.arange(37, 41), 3))
    assert 0 <= values.min() < 0.05
    assert 0.95 < values.max() < 1
    assert abs(values.mean() - 0.5) < 0.05
    assert len(np.unique(values)) == 300
    assert not np.array_equal(values, uniforms(1, 3, np.arange(100), 3))


def test_more_ranks_than_samples() -> None:
    with pytest.raises(DataError, match="3 samples, 4 ranks"):
        check_batch_size(8, 3, 4)
    with pytest.raises(SettingError, match="--global-batch 0"):
        check_batch_size(0, 3, 1)


def test_script_order_must_fit_data() -> None:
    assert with_script_order(Order(3, 0), lambda epoch: [2, 2, epoch]).epoch(1).tolist() == [
        2,
        2,
        1,
    ]
    for wrong in ([0, 1], [0, 1, 3], [-1, 0, 1], []):
        with pytest.raises(SettingError, match="must be 3 numbers from 0 to 2"):
            with_script_order(Order(3, 0), lambda epoch, wrong=wrong: wrong).epoch(0)
    with pytest.raises(SettingError, match="one number for each sample"):
        group_by_length(Order(3, 0), [1, 2], 2)
