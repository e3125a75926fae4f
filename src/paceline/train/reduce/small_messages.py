"""Little messages among ranks over gloo: everybody sends to everybody at once.

gloo's all-reduce passes parts around a ring, each in several messages: of 40 kB among four ranks
every rank sends 72 segments, one after the other, and what counts is how often a thread has to be
woken. Where all send what they have directly, or a part to the rank that adds it up and the sum
to all, there are one or two such rounds. They go over connections of our own as soon as a group has
them (``reduce/direct.py``). Sums are made in rank order, so that the place of an element
does not matter.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.train.elastic import waits
from paceline.train.reduce.direct import Mesh, mesh_of

MOST = 1 << 18
"""Bytes of a vector up to which it is worth it, over all lines."""
_AT_ONCE = 1 << 12  # bytes up to which each rank gets all, and adds up by itself


def fits(vector: Tensor, ranks: int, group: dist.ProcessGroup | None) -> bool:
    """Whether a vector on this many ranks is better sent so."""
    on_cpus = vector.device.type == "cpu" and "gloo" in dist.get_backend(group)
    return on_cpus and ranks > 1 and 0 < vector.nbytes <= MOST


def pays(size: int, ranks: int, group: dist.ProcessGroup | None) -> bool:
    """Whether so many bytes of gradients on CPUs are better averaged so than in buckets."""
    return ranks > 2 and 0 < size <= MOST and "gloo" in dist.get_backend(group)


def rows(vector: Tensor, ranks: int, group: dist.ProcessGroup | None) -> Tensor:
    """Every rank's tensor, of any shape, in rank order: ``[ranks, …]``; a collective."""
    return _rows(vector, ranks, group, mesh_of(group))


def add_up(vector: Tensor, ranks: int, group: dist.ProcessGroup | None) -> None:
    """The sum over all ranks in place, of any shape; the same bits everywhere; a collective."""
    mesh = mesh_of(group)
    if vector.nbytes <= _AT_ONCE:
        vector.copy_(_total(_rows(vector, ranks, group, mesh)))
        return
    count = vector.numel()
    length = -(-count // ranks)
    parts = vector.new_zeros(ranks * length)
    parts[:count] = vector.reshape(-1)
    sent = parts.view(ranks, length)
    own = _total(mesh.swapped(sent) if mesh else _swapped(sent, group))
    vector.copy_(_rows(own, ranks, group, mesh).view(-1)[:count].view_as(vector))


def _rows(vector: Tensor, ranks: int, group: dist.ProcessGroup | None, mesh: Mesh | None) -> Tensor:
    if mesh:
        return mesh.rows(vector)
    return _swapped(vector.expand(ranks, *vector.shape).contiguous(), group)


def _swapped(sent: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Row r goes to rank r; what came, in rank order."""
    came = torch.empty_like(sent)
    waits.wait(dist.all_to_all_single(came, sent, group=group, async_op=True), came)
    return came


def _total(came: Tensor) -> Tensor:
    """Row by row: with a reduction of torch's own the order would be up to the processor."""
    total = came[0].clone()
    for row in came[1:]:
        total += row
    return total
