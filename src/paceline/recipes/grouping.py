"""Shares of equal work among ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def spread(lengths: Sequence[int], ranks: int) -> list[int]:
    """Sample ids so ordered that equal contiguous shares hold equal work, longest first."""
    ids = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    return [int(one) for rank in range(ranks) for one in ids[rank::ranks]]
