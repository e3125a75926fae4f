"""Describes a map-style data set, so that ranks notice if theirs are not the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from paceline.train.data.fetch import Data

NUM_ROWS = 16  # of each tensor that count


def fingerprint(data: Data) -> str:
    """Returns the number of samples, and a hash of what identifies them without reading them all.

    These are the indices of a ``Subset``, and some rows of the tensors of a ``TensorDataset``, also
    inside of each other and of a ``ConcatDataset``. Samples of other data sets are not read: this
    may take long, or give other values each time.
    """
    digest = hashlib.sha256()
    for part in _parts(data):
        digest.update(part)
    return f"{len(data)} samples, hash {digest.hexdigest()[:12]}"


def _parts(data: object) -> Iterator[bytes]:
    if isinstance(data, Subset):
        try:
            yield numpy.asarray(data.indices, dtype=numpy.int64).tobytes()
        except (TypeError, ValueError, OverflowError):  # such as names, or a tensor on a GPU
            yield repr(data.indices).encode()
        yield from _parts(data.dataset)
    elif isinstance(data, ConcatDataset):
        for inner in data.datasets:
            yield from _parts(inner)
    elif isinstance(data, TensorDataset):
        for tensor in data.tensors:
            yield repr((tensor.dtype, tuple(tensor.shape))).encode()
            if tensor.numel() and tensor.layout is torch.strided:
                # integers: float32 rounds the numbers of more than 16 million rows
                numbers = [row * (len(tensor) - 1) // (NUM_ROWS - 1) for row in range(NUM_ROWS)]
                rows = tensor.detach()[numbers].cpu().contiguous().flatten()
                yield rows.view(torch.uint8).numpy().tobytes()
