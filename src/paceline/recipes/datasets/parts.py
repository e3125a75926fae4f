"""Parts of a data set: their names in files, and a seeded division where files have none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from paceline.train.order import permutation

T = TypeVar("T")
SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
"""Names of the parts in files, folders and on hubs."""


def divide(items: Sequence[T], fraction: float, seed: int) -> dict[str, list[T]]:
    """``train`` and ``val``, drawn from the seed alone; equal on every machine."""
    order = permutation(seed, 0, len(items)).tolist()
    count = min(max(1, round(len(items) * fraction)), max(len(items) - 1, 0))
    held_out = sorted(order[:count])
    kept = sorted(order[count:])
    return {"train": [items[i] for i in kept], "val": [items[i] for i in held_out]}
