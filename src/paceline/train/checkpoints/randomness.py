"""States of the random generators of one rank, as one row of bytes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def capture(device: torch.device) -> Tensor:
    """All generators that a training script draws from, uint8, shape ``[n]``.

    The length is the same on all ranks with devices of one kind.
    """
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    numbers = [version, *words, position, has_gauss, gauss is not None]
    parts = [
        np.array(numbers, dtype=np.int64).tobytes(),
        np.array([gauss or 0.0, cached], dtype=np.float64).tobytes(),
        np.asarray(keys, dtype=np.uint32).tobytes(),
        torch.get_rng_state().numpy().tobytes(),
        _device_state(device),
    ]
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def restore(state: Tensor, device: torch.device) -> None:
    """Puts all generators back."""
    raw = bytes(state.numpy().tobytes())
    words = len(random.getstate()[1])
    numbers = np.frombuffer(raw, np.int64, words + 4)
    offset = numbers.nbytes
    gauss, cached = np.frombuffer(raw, np.float64, 2, offset).tolist()
    keys = np.frombuffer(raw, np.uint32, 624, offset + 16)
    version, *rest = numbers.tolist()
    position, has_gauss, python_gauss = rest[words:]
    random.setstate((version, tuple(rest[:words]), gauss if python_gauss else None))
    np.random.set_state(("MT19937", keys, position, has_gauss, cached))
    start = offset + 16 + keys.nbytes
    end = start + torch.get_rng_state().numel()
    torch.set_rng_state(_tensor(raw[start:end]))
    if device.type != "cpu" and len(raw) > end:  # else it was made on a CPU
        _module(device).set_rng_state(_tensor(raw[end:]), device)


def _device_state(device: torch.device) -> bytes:
    if device.type == "cpu":
        return b""
    return bytes(_module(device).get_rng_state(device).numpy().tobytes())


def _tensor(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
