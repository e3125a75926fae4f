"""A 64-bit checksum of a tensor.

It is linear in the tensor's bits with odd weights, modulo 2^64: it is computed on the device in any
order with the same result, a single changed bit always changes it, and two diverged tensors agree
with a chance of about 2^-64. It guards against accidents, not against an attacker.
"""

from __future__ import annotations

from typing import Any

_CHUNK = 1 << 20  # elements
_WEIGHT = 0x2545F4914F6CDD1D


def checksum(torch: Any, tensor: Any) -> Any:
    """Returns the checksum of a tensor that needs no gradient: a scalar, int64, on its device."""
    dtypes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    flat = tensor.contiguous().flatten()
    words = flat.view(dtypes.get(flat.element_size(), torch.int64))
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64)
        position = torch.arange(start, start + chunk.numel(), device=words.device)
        total += (chunk * ((position * _WEIGHT) | 1)).sum()
    return total
