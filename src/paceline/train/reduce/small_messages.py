"""Collectives for small messages among ranks over gloo: every rank sends to all others at once.

gloo's all-reduce passes many segments around a ring, and wakes a thread for each. Here each rank
sends all it has to all others in one round, or in two rounds a part to the rank that sums it and
the sum to all, over direct connections if the group has them (``reduce/direct.py``). Sums are made
in rank order, whatever the position of an element.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.train.elastic import waits
from paceline.train.reduce.direct import Mesh, mesh_of

MAX_BYTES = 1 << 18
"""Size up to which a vector is faster this way, over all networks."""
_MAX_GATHERED = 1 << 12  # bytes up to which each rank gets all vectors and sums them itself


def fits(vector: Tensor, ranks: int, group: dist.ProcessGroup | None) -> bool:
    """Whether these collectives are faster for a vector than the backend's."""
    on_cpus = vector.device.type == "cpu" and "gloo" in dist.get_backend(group)
    return on_cpus and ranks > 1 and 0 < vector.nbytes <= MAX_BYTES


def fits_model(size: int, ranks: int, group: dist.ProcessGroup | None) -> bool:
    """Whether they are faster than DDP's buckets for ``size`` bytes of gradients on CPUs."""
    return ranks > 2 and 0 < size <= MAX_BYTES and "gloo" in dist.get_backend(group)


def all_gather(vector: Tensor, ranks: int, group: dist.ProcessGroup | None) -> Tensor:
    """Returns every rank's tensor, of any shape, in rank order: ``[ranks, …]``; a collective."""
    return _all_gather(vector, ranks, group, mesh_of(group))


def all_reduce(vector: Tensor, ranks: int, group: dist.ProcessGroup | None) -> None:
    """Sums a tensor of any shape over all ranks in place; the same bits on every rank."""
    mesh = mesh_of(group)
    if vector.nbytes <= _MAX_GATHERED:
        vector.copy_(_sum(_all_gather(vector, ranks, group, mesh)))
        return
    count = vector.numel()
    length = -(-count // ranks)
    padded = vector.new_zeros(ranks * length)
    padded[:count] = vector.reshape(-1)
    parts = padded.view(ranks, length)
    segment = _sum(mesh.all_to_all(parts) if mesh else _all_to_all(parts, group))
    vector.copy_(_all_gather(segment, ranks, group, mesh).view(-1)[:count].view_as(vector))


def _all_gather(
    vector: Tensor, ranks: int, group: dist.ProcessGroup | None, mesh: Mesh | None
) -> Tensor:
    if mesh:
        return mesh.all_gather(vector)
    return _all_to_all(vector.expand(ranks, *vector.shape).contiguous(), group)


def _all_to_all(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    received = torch.empty_like(rows)
    waits.wait(dist.all_to_all_single(received, rows, group=group, async_op=True), received)
    return received


def _sum(rows: Tensor) -> Tensor:
    """Sums row by row: the order of torch's own reduction depends on the processor."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
