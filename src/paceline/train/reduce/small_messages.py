"""Small messages among ranks over gloo: every rank sends to all others at once.

gloo's all-reduce passes parts around a ring, each in several messages: of 40 kB among four ranks
every rank sends 72 segments, one after the other, and what counts is how often a thread has to be
woken. When all ranks send what they have directly, or a part to the rank that adds it up and the
sum to all, there are one or two such rounds. They go over connections of our own as soon as a group
has them (``reduce/direct.py``). Sums are made in rank order, so that the place of an element does
not matter.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.train.elastic import waits
from paceline.train.reduce.direct import Mesh, mesh_of

MAX_BYTES = 1 << 18
"""Of a vector that is better sent so, over all networks."""
_MAX_GATHERED = 1 << 12  # bytes up to which each rank gets all, and adds up by itself


def fits(vector: Tensor, ranks: int, group: dist.ProcessGroup | None) -> bool:
    """Whether a vector on this many ranks is better sent so."""
    on_cpus = vector.device.type == "cpu" and "gloo" in dist.get_backend(group)
    return on_cpus and ranks > 1 and 0 < vector.nbytes <= MAX_BYTES


def fits_model(size: int, ranks: int, group: dist.ProcessGroup | None) -> bool:
    """Whether so many bytes of gradients on CPUs are better averaged so than in buckets."""
    return ranks > 2 and 0 < size <= MAX_BYTES and "gloo" in dist.get_backend(group)


def all_gather(vector: Tensor, ranks: int, group: dist.ProcessGroup | None) -> Tensor:
    """Every rank's tensor, of any shape, in rank order: ``[ranks, …]``; a collective."""
    return _all_gather(vector, ranks, group, mesh_of(group))


def all_reduce(vector: Tensor, ranks: int, group: dist.ProcessGroup | None) -> None:
    """The sum over all ranks in place, of any shape; the same bits everywhere; a collective."""
    mesh = mesh_of(group)
    if vector.nbytes <= _MAX_GATHERED:
        vector.copy_(_sum(_all_gather(vector, ranks, group, mesh)))
        return
    count = vector.numel()
    length = -(-count // ranks)
    padded = vector.new_zeros(ranks * length)
    padded[:count] = vector.reshape(-1)
    parts = padded.view(ranks, length)
    own = _sum(mesh.all_to_all(parts) if mesh else _all_to_all(parts, group))
    vector.copy_(_all_gather(own, ranks, group, mesh).view(-1)[:count].view_as(vector))


def _all_gather(
    vector: Tensor, ranks: int, group: dist.ProcessGroup | None, mesh: Mesh | None
) -> Tensor:
    if mesh:
        return mesh.all_gather(vector)
    return _all_to_all(vector.expand(ranks, *vector.shape).contiguous(), group)


def _all_to_all(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sends row r to rank r; returns what came, in rank order."""
    received = torch.empty_like(rows)
    waits.wait(dist.all_to_all_single(received, rows, group=group, async_op=True), received)
    return received


def _sum(rows: Tensor) -> Tensor:
    """Adds row by row: with a reduction of torch's own the order would be up to the processor."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
