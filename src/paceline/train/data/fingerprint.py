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
        yield numpy.asarray(data.indices, dtype=numpy.int64).tobytes()
        yield from _parts(data.dataset)
    elif isinstance(data, ConcatDataset):
        for inner in data.datasets:
            yield from _parts(inner)
    elif isinstance(data, TensorDataset):
        for tensor in data.tensors:
            yield repr((tensor.dtype, tuple(tensor.shape))).encode()
            if tensor.numel():
                numbers = torch.linspace(0, len(tensor) - 1, NUM_ROWS).long().to(tensor.device)
                rows = tensor.detach()[numbers].cpu().contiguous().flatten()
                yield rows.view(torch.uint8).numpy().tobytes()
