"""Rows of a batch: one example each, or several, which do not see each other."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from paceline.recipes.language.chat_templates import Example
from paceline.recipes.options import Options

IGNORED = -100
"""Label of tokens that are not trained on."""
MICRO_BATCH_TOKENS = 8192
"""Tokens that a process computes at once, unless --micro-batch says otherwise."""
R = TypeVar("R", bound=Options)


def with_micro_batch(options: R, longest: int) -> R:
    """Returns the options with a limit of examples computed at once, by the longest."""
    if options.micro_batch != "0":
        return options
    return replace(options, micro_batch=str(max(1, MICRO_BATCH_TOKENS // longest)))


class Rows(NamedTuple):
    """Tensors of a batch, all of shape ``[rows, length]``.

    Attributes:
        positions: Position of each token in its example. They start anew with each example, by
            which transformers keeps the examples of a row apart.
        labels: The token where it is trained on, else ``IGNORED``.
        examples: Number of the example in the batch.
    """

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    examples: Tensor


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Distributes examples over few rows: the longest first, each into the fullest row it fits.

    Args:
        lengths: Tokens of each example, at most ``capacity``.

    Returns:
        Numbers of the examples in each row; the same for the same lengths.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # free tokens and number of each row, sorted
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        place = bisect_left(free, (lengths[number], -1))
        if place == len(free):
            rows.append([])
            room, row = capacity, len(rows) - 1
        else:
            room, row = free.pop(place)
        rows[row].append(number)
        insort(free, (room - lengths[number], row))
    return rows


def make_rows(examples: Sequence[Example], layout: Sequence[Sequence[int]], pad: int) -> Rows:
    """Makes the tensors of a batch.

    Args:
        layout: Numbers of the examples in each row.
        pad: Token that fills rows up. It follows the last example of a row, and no token before it
            sees it. Positions start anew once they would exceed those of the longest example, which
            a model with learnt positions would not have.
    """
    length = max(sum(len(examples[number]) for number in row) for row in layout)
    longest = max(len(examples[number]) for row in layout for number in row)
    shape = len(layout), length
    tokens, positions = np.full(shape, pad), np.zeros(shape, dtype=np.int64)
    labels, owners = np.full(shape, IGNORED), np.zeros(shape, dtype=np.int64)
    for index, row in enumerate(layout):
        start = 0
        for number in row:
            example = examples[number]
            stop = start + len(example)
            tokens[index, start:stop] = example.tokens
            labels[index, start:stop] = np.where(example.targets, example.tokens, IGNORED)
            owners[index, start:stop] = number
            positions[index, start:] = np.arange(length - start) % longest
            start = stop
    return Rows(*map(torch.from_numpy, (tokens, positions, labels, owners)))
