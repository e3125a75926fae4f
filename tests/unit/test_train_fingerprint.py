"""Tests the description of a data set by which ranks notice that theirs differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from paceline.train.data.fetch import Data
from paceline.train.data.fingerprint import fingerprint

INPUTS = torch.arange(400.0).reshape(100, 4)


class Unread:
    """A data set whose samples must not be read."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> object:
        raise AssertionError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_equal_data_have_equal_fingerprints(dtype: torch.dtype) -> None:
    data = TensorDataset(INPUTS.to(dtype), torch.zeros(100))
    assert fingerprint(data) == fingerprint(TensorDataset(*(t.clone() for t in data.tensors)))
    assert fingerprint(data).startswith("100 samples, hash ")


@pytest.mark.parametrize(
    "other",
    [
        TensorDataset(INPUTS + 1),
        TensorDataset(INPUTS[:99]),
        TensorDataset(INPUTS.double()),
        Subset(TensorDataset(INPUTS), range(100)),
        ConcatDataset([TensorDataset(INPUTS[50:]), TensorDataset(INPUTS[:50])]),
    ],
)
def test_other_data_have_other_fingerprints(other: Data) -> None:
    assert fingerprint(other) != fingerprint(TensorDataset(INPUTS))


def test_subsets_differ_by_their_indices() -> None:
    data = TensorDataset(INPUTS)
    assert fingerprint(Subset(data, [1, 2, 3])) == fingerprint(Subset(data, range(1, 4)))
    assert fingerprint(Subset(data, [1, 2, 3])) != fingerprint(Subset(data, [1, 2, 4]))


def test_indices_may_be_names() -> None:
    data: Any = Unread()
    names: Any = ["a", "b"], ["a", "c"]
    assert fingerprint(Subset(data, names[0])) != fingerprint(Subset(data, names[1]))


def test_more_rows_than_float32_can_number() -> None:
    data = TensorDataset(torch.zeros(20_000_000, dtype=torch.bool))
    assert fingerprint(data).startswith("20000000 samples")


def test_samples_of_other_data_sets_are_not_read() -> None:
    assert fingerprint(Unread()).startswith("7 samples")
    assert fingerprint(Subset(Unread(), [0, 5])).startswith("2 samples")


def test_empty_tensors() -> None:
    assert fingerprint(TensorDataset(torch.empty(0, 4))).startswith("0 samples")
