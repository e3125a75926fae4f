"""Quantisation errors of a rank's gradients, added to the next ones (error feedback)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.train.reduce.collectives import Collectives, ReduceContext
from paceline.train.reduce.reducer import Bucket

_DTYPE = torch.bfloat16  # its own error is a five-hundredth of what is a hundredth of a gradient


@dataclass(slots=True)
class Residual:
    """Quantisation error of one bucket, added to the next step's gradients (Seide et al. 2014).

    Attributes:
        committed: Error after the last step that counted. One-dimensional, bfloat16, as long as the
            bucket; of a parameter that is in no bucket, with its shape.
        pending: Error of the step in flight. Shares memory with ``committed`` when steps cannot be
            rolled back.
        is_written: Whether the step in flight has written ``pending``.
    """

    committed: Tensor
    pending: Tensor
    is_written: bool = False

    def keep_unused(self, errors: Tensor, spans: Sequence[slice], used: Tensor) -> None:
        """Puts the committed error of parameters that no rank has used into ``errors``.

        DDP drops their mean.

        Args:
            errors: Of the whole bucket, after this pass.
            spans: Of parameters that a step may leave unused.
            used: More than 0 for each that some rank has used.
        """
        for span, count in zip(spans, used, strict=True):
            former = self.committed[span].to(errors.dtype)
            errors[span] = torch.where(count > 0, errors[span], former)


@dataclass(frozen=True, slots=True)
class _ParameterView:
    """Where the error of one parameter lies in a residual."""

    residual: Residual
    size: torch.Size
    stride: tuple[int, ...]
    start: int

    @property
    def committed(self) -> Tensor:
        return self.residual.committed.as_strided(self.size, self.stride, self.start)


class ErrorFeedback:
    """The residuals of one rank, by parameter; they outlive a new layout of the buckets.

    The mean over all ranks is what the training still has to get: so another number of ranks goes
    on with that mean (:func:`inherit_residual`). When a rank may be lost in the middle of a pass,
    which is then void, a second copy holds what that pass left.
    """

    def __init__(self, collectives: Collectives, context: ReduceContext) -> None:
        self._collectives, self._names = collectives, context.names
        self._can_roll_back = context.can_roll_back
        self._views: dict[str, _ParameterView] = {}
        self._written: list[Residual] = []
        self._device = torch.device("cpu")
        self._loaded: Mapping[str, Tensor] | None = None  # until a bucket adds its error

    def residual_of(self, bucket: Bucket, length: int) -> Residual:
        """The residual of a bucket whose layout is new; at least as long as it."""
        flat = torch.zeros(length, dtype=_DTYPE, device=bucket.flat.device)
        residual = Residual(flat, torch.zeros_like(flat) if self._can_roll_back else flat)
        start, self._device, self._loaded = bucket.flat.storage_offset(), flat.device, None
        for parameter, gradient in zip(bucket.parameters, bucket.gradients, strict=True):
            offset = int(gradient.storage_offset() - start)
            view = _ParameterView(residual, gradient.size(), gradient.stride(), offset)
            name = self._names[parameter]
            if name in self._views:
                view.committed.copy_(self._views[name].committed)
            self._views[name] = view
        return residual

    def mark_written(self, residual: Residual) -> None:
        """The running pass has written what this is when it counts."""
        if residual.pending is not residual.committed and not residual.is_written:
            residual.is_written = True
            self._written.append(residual)

    def commit(self) -> None:
        """The running pass counts: its errors are to be added to the next gradients."""
        written, self._written = self._written, []
        for residual in written:
            residual.committed, residual.pending = residual.pending, residual.committed
            residual.is_written = False

    def rollback(self) -> None:
        """The running pass does not count: errors are what they were when it began."""
        written, self._written = self._written, []
        for residual in written:
            residual.is_written = False

    def adopt(self, other: ErrorFeedback) -> None:
        """Takes over this rank's errors from another reducer, of the same or other ranks."""
        former, ranks = other._collectives.world_size, self._collectives.world_size
        self._hold({
            name: inherit_residual(view.committed[None], former, ranks)
            for name, view in other._views.items()
        })  # fmt: skip
        self._device, self._loaded = other._device, other._loaded if former == ranks else None

    def _hold(self, errors: Mapping[str, Tensor]) -> None:
        self._views = {
            name: _ParameterView(Residual(error, error), error.size(), error.stride(), 0)
            for name, error in errors.items()
        }

    def state(self) -> dict[str, Any]:
        """The errors of all ranks, on rank 0, by name and then by rank; a collective."""
        if not self._views or self._loaded is not None:
            return dict(self._loaded or {})
        # Of every parameter and in one order: who has come later may have had other buckets.
        shapes = {name: parameter.shape for parameter, name in self._names.items()}
        mine = torch.cat([self._error_of(name, shape) for name, shape in shapes.items()])
        rows = self._collectives.gather(mine.view(torch.uint8))
        if rows is None:
            return {}
        sizes = [shape.numel() for shape in shapes.values()]
        columns = torch.split(rows.view(_DTYPE), sizes, dim=1)
        return {
            name: column.reshape(self._collectives.world_size, *shape).clone()
            for (name, shape), column in zip(shapes.items(), columns, strict=True)
        }

    def _error_of(self, name: str, shape: torch.Size) -> Tensor:
        if name not in self._views:
            return torch.zeros(shape.numel(), dtype=_DTYPE, device=self._device)
        # what a checkpoint had and no bucket has had since is still where it was read
        return self._views[name].committed.reshape(-1).to(self._device)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes a state of :meth:`state`, the same on every rank."""
        self._loaded = dict(state)
        rank, ranks = self._collectives.rank, self._collectives.world_size
        self._hold({
            name: inherit_residual(rows[rank, None], ranks, ranks)
            if len(rows) == ranks
            else inherit_residual(rows, len(rows), ranks, heirs=ranks)
            for name, rows in state.items()
        })  # fmt: skip


def inherit_residual(rows: Tensor, former: int, ranks: int, *, heirs: int = 1) -> Tensor:
    """The error of one of ``ranks`` that takes the place of some of ``former``: the mean stays.

    Args:
        rows: Errors of those whose place it takes, shape ``[n, …]``: its own, or those of all ranks
            when no rank has one of its own. A rank that takes no place begins with zero.
        former: Ranks that had residuals.
        ranks: That go on with them.
        heirs: So many take these rows together, each an equal part.
    """
    if former == ranks and len(rows) == heirs == 1:
        return rows[0].clone()
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    return (rows.to(dtype).sum(0) * (ranks / (former * heirs))).to(rows.dtype)
