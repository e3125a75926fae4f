"""Proof that all ranks hold the same model: one 64-bit checksum for each tensor, compared.

The checksum is linear in the tensor's bits with odd weights, modulo 2^64: it is computed on the
device in any order with the same result, a single changed bit always changes it, and two
diverged tensors agree with a chance of about 2^-64. It guards against accidents, not against an
attacker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paceline.spec.errors import JobError

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22
_WEIGHT = 0x2545F4914F6CDD1D


def checksums(tensors: Iterable[Tensor]) -> Tensor:
    """One int64 for each tensor, on the CPU, shape ``[n]``."""
    sums = [_checksum(tensor) for tensor in tensors]
    return torch.stack(sums).cpu() if sums else torch.zeros(0, dtype=torch.int64)


@torch.no_grad()
def _checksum(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().flatten()
    words = flat.view(_WORDS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + chunk.numel(), device=words.device)
        total += (chunk * ((place * _WEIGHT) | 1)).sum()
    return total


def compare(names: Sequence[str], by_rank: Tensor, hosts: Sequence[str]) -> None:
    """Raises when a rank differs from the majority.

    Args:
        names: Name of each tensor.
        by_rank: Checksums, shape ``[ranks, tensors]``.
        hosts: Host of each rank.

    Raises:
        JobError: Names the first differing tensor and every rank that holds another value.
    """
    agreed = by_rank.mode(dim=0).values
    wrong = by_rank != agreed
    if not bool(wrong.any()):
        return
    tensor = int(wrong.any(dim=0).nonzero()[0])
    raise JobError(
        "the ranks no longer train the same model",
        found=f"first differing tensor: {names[tensor]}; {_who(wrong[:, tensor], hosts)}"
        f" ({int(wrong.any(dim=0).sum())} of {len(names)} tensors differ somewhere)",
        remedy="look for a training loop that calls another module than session.prepare returned,"
        " parameters changed outside session.step, or faulty memory on that host",
    )


def _who(wrong: Tensor, hosts: Sequence[str]) -> str:
    """The minority by rank and host; without a majority everybody is named."""
    minority = [int(rank) for rank in wrong.nonzero()]
    if len(minority) * 2 >= len(hosts):
        everyone = ", ".join(f"rank {rank} on {host}" for rank, host in enumerate(hosts))
        return f"no majority among {everyone}"
    named = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in minority)
    return f"{named} differs from the majority"
