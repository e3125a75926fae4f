"""Proof that all ranks hold the same model: one 64-bit checksum for each tensor, compared.

A parameter that is spread over the ranks (FSDP2) is compared as each rank puts it together, one
after the other. A buffer that every rank has changed since they were last made equal holds batch
statistics of each rank's own share; those of rank 0 are then taken by all, as DDP does before each
forward pass. Any other difference between buffers is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from paceline.agent.ranks.checksum import checksum
from paceline.spec.errors import JobError
from paceline.train import parallel
from paceline.train.comms import Comms

_MAX_DEVIATION = 1e-3  # as a part of a tensor's size, between kinds of devices


class ReplicaChecksum:
    """Compares a module over all ranks, and remembers what its buffers were.

    Attributes:
        deviation: Between kinds of devices: how far a parameter was from rank 0's at the last
            check, as a part of its size.
    """

    def __init__(self, comms: Comms, module: nn.Module) -> None:
        self._comms, self._module = comms, module
        self.deviation = 0.0
        self._is_replicated = not parallel.is_sharded(module)
        self._buffers, self._has_stepped = checksums(module.buffers()), False

    def stepped(self) -> None:
        self._has_stepped = True

    def verify(self) -> None:
        """Proves that parameters and buffers are bit-identical on all ranks.

        Raises:
            JobError: Names rank, host and the first tensor that differs.
        """
        if self._comms.mixed:
            self._verify_mixed()
            return
        parallel.reshard(self._module)
        parameters = [*self._module.named_parameters()]
        buffers = checksums(self._module.buffers())
        changed = (buffers != self._buffers).long()
        sums = torch.cat([checksums(tensor for _, tensor in parameters), buffers, changed])
        rows = self._comms.rows(sums)
        if bool((rows == rows[0]).all()):
            self._buffers, self._has_stepped = buffers, False
            return
        names = [name for name, _ in parameters]
        self._compare(names, rows[:, : len(names)])
        sums, changed = rows[:, len(names) :].tensor_split(2, dim=1)
        # DDP has made them equal in each forward pass. Elsewhere a rank that has something else
        # than one that kept what all had is not in step.
        is_local = changed.bool().all(dim=0) | self._is_replicated if self._has_stepped else False
        comparable = sums.masked_fill(torch.as_tensor(is_local), 0)
        self._compare([name for name, _ in self._module.named_buffers()], comparable)
        self.align()

    def diverged_parameter(self, slot: int, newcomers: Collection[int]) -> str:
        """Returns the first parameter of a newcomer that differs from those of the other ranks.

        Empty on the other ranks, and if they differ from each other, which :meth:`verify` reports.
        """
        names = [name for name, _ in self._module.named_parameters()]
        sums = checksums(self._module.parameters())
        rows = self._comms.rows(torch.cat([torch.tensor([slot]), sums]))
        others = [row[1:] for row in rows if int(row[0]) not in newcomers]
        if slot not in newcomers or not others or any((row != others[0]).any() for row in others):
            return ""
        differing = (sums != others[0]).nonzero()
        return names[int(differing[0])] if len(differing) else ""

    def _verify_mixed(self) -> None:
        """Gives all ranks rank 0's parameters if they are close: device kinds round differently."""
        names = [name for name, _ in self._module.named_parameters()]
        parameters = [parameter.detach() for parameter in self._module.parameters()]
        former = [parameter.clone() for parameter in parameters]
        self._comms.broadcast(parameters)
        deviations = [_deviation(*pair) for pair in zip(parameters, former, strict=True)]
        rows = self._comms.rows(torch.stack(deviations))
        self.deviation = float(rows.max())
        if not self.deviation <= _MAX_DEVIATION:
            ranks = self._comms.texts(self._comms.rank_name)
            rank, tensor = divmod(int(rows.argmax()), len(names))
            raise JobError(
                "the ranks no longer train the same model",
                found=f"{names[tensor]} differs by {self.deviation:.1g} of its size on"
                f" {ranks[rank]}, more than devices of different kinds round differently",
                remedy="look for a training loop that calls another module than session.prepare"
                " returned, or parameters changed outside session.step",
            )
        self.align()

    def _compare(self, names: Sequence[str], by_rank: Tensor) -> None:
        if not bool((by_rank == by_rank[0]).all()):
            compare(names, by_rank, self._comms.texts(self._comms.rank_name))

    def align(self) -> None:
        """Gives every rank the buffers of rank 0."""
        self._comms.broadcast([*self._module.buffers()])
        self._buffers, self._has_stepped = checksums(self._module.buffers()), False


def _deviation(first: Tensor, second: Tensor) -> Tensor:
    """Returns the relative norm of the difference, without elements that are finite in neither."""
    not_finite = ~first.isfinite() & ~second.isfinite()
    first, second = first.masked_fill(not_finite, 0), second.masked_fill(not_finite, 0)
    size = torch.linalg.vector_norm(first).clamp(min=1e-30)
    deviation: Tensor = torch.linalg.vector_norm(first - second) / size
    return deviation.double().cpu()


def checksums(tensors: Iterable[Tensor]) -> Tensor:
    """Returns one int64 for each tensor, on the CPU, shape ``[n]``; a collective for shards."""
    sums = [_checksum(tensor) for tensor in tensors]
    return torch.stack(sums).cpu() if sums else torch.zeros(0, dtype=torch.int64)


@torch.no_grad()
def _checksum(tensor: Tensor) -> Tensor:
    return cast(Tensor, checksum(torch, parallel.full_tensor(tensor.detach())))


def compare(names: Sequence[str], by_rank: Tensor, ranks: Sequence[str]) -> None:
    """Raises when a rank differs from the majority.

    Args:
        by_rank: Checksums, shape ``[ranks, tensors]``.

    Raises:
        JobError: Names the first differing tensor and every rank that holds another value.
    """
    majority = by_rank.mode(dim=0).values
    wrong = by_rank != majority
    if not bool(wrong.any()):
        return
    tensor = int(wrong.any(dim=0).nonzero()[0])
    raise JobError(
        "the ranks no longer train the same model",
        found=f"first differing tensor: {names[tensor]}; {_minority(wrong[:, tensor], ranks)}"
        f" ({int(wrong.any(dim=0).sum())} of {len(names)} tensors differ somewhere)",
        remedy="look for a training loop that calls another module than session.prepare returned,"
        " parameters changed outside session.step, or faulty memory on that host",
    )


def _minority(wrong: Tensor, ranks: Sequence[str]) -> str:
    """Names the ranks in the minority; all ranks if there is no majority."""
    minority = [ranks[int(rank)] for rank in wrong.nonzero()]
    if len(minority) * 2 >= len(ranks):
        return f"no majority among {', '.join(ranks)}"
    return f"{', '.join(minority)} differs from the majority"
