"""Gradients of matrices as products of two thin ones: PowerSGD (Vogels and others, 2019).

``M ≈ P Qᵀ`` with a few columns. Q is that of the last step, so that over the steps P comes to the
directions that matter most (a power iteration); what the product does not say is kept for the next
step. Rank 0 makes the columns of P orthogonal for all, and the product is made of single
multiplications and additions: so hosts with different processors get the same bits.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paceline.train.communication.kept import Kept, Rests, hold_back, same, used
from paceline.train.communication.wire import Wire
from paceline.train.exchange import Bucket, Line, Method

RANK = 4
"""Columns, where nobody says another number."""
EXACT = 0.1
"""Part of the training at whose beginning averages are exact: gradients change quickly there."""
_ROOM = 1 << 16  # elements that are worked on at once


@dataclass(slots=True)
class _Matrix:
    """A gradient that is sent as a product.

    Attributes:
        name: Of the parameter.
        start, rows, columns: Where it is in its bucket, as memory has it.
        rank: Columns of the factors.
    """

    name: str
    start: int
    rows: int
    columns: int
    rank: int

    @property
    def span(self) -> slice:
        return slice(self.start, self.start + self.rows * self.columns)


@dataclass(slots=True)
class _Layout:
    """Of one bucket: its matrices, what else there is, and what is left to say.

    Attributes:
        seldom: Parts of the matrices, where a step may leave some unused on every rank.
    """

    parameters: list[nn.Parameter]
    matrices: list[_Matrix]
    seldom: list[slice]
    rest: Tensor
    rests: Rests


class PowerSgd:
    """Averages by products of thin matrices.

    Attributes:
        number: Columns of each factor.
        exact_steps: At the beginning, with exact averages.
    """

    name: ClassVar[str] = "powersgd"

    def __init__(self, line: Line, wire: Wire | None = None) -> None:
        self.number, self.exact_steps = RANK, 0
        self._wire, self._names = wire or Wire(line), line.names
        self._kept, self._unused = Kept(self._wire, line, torch.float32), line.unused
        self._width = line.width
        self._factors: dict[str, Tensor] = {}  # Q of each matrix
        self._layouts: dict[int, _Layout] = {}
        self._steps = 0
        # what the running pass adds when it counts
        self._next: dict[str, Tensor] = {}
        self._passed, self._may_be_void = 0, line.void

    def begin(self, steps: int) -> str:
        """Says how long the training is; returns what is to be told."""
        self.exact_steps = int(EXACT * steps)
        return ""

    def average(self, bucket: Bucket) -> None:
        self._average(bucket)
        self._passed += bucket.last
        if not self._may_be_void:
            self.counted()

    def _average(self, bucket: Bucket) -> None:
        exact, flat = self._steps < self.exact_steps, bucket.flat
        layout = None if exact else self._layout(bucket)
        if layout is None or not layout.matrices:
            flat.mul_(1 / self._wire.ranks)
            self._wire.sum(flat)
            return
        if self._wire.ranks == 1:  # the others were lost: what is left is said as it is
            rests, left_over = layout.rests, torch.zeros_like(layout.rests.now)
            hold_back(left_over, rests, layout.seldom, used(flat, layout.seldom))
            flat += rests.now - left_over
            rests.then.copy_(left_over)
            self._kept.left(rests)
            return
        wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
        work = flat.to(wide, copy=True)
        for one in layout.matrices:
            work[one.span] += layout.rests.now[one.span]
        left, rest, counts = self._columns(work, layout, used(flat, layout.seldom).to(wide))
        self._rows(work, layout, left, counts)
        self._product(work, layout, left)
        for span, one in zip(layout.seldom, counts, strict=True):
            work[span] *= one > 0
        flat.copy_(work)
        flat[layout.rest] = rest.to(flat.dtype)

    def _columns(
        self, work: Tensor, layout: _Layout, counts: Tensor
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """P of each matrix, and the means of the rest and of the news which matrices are used.

        One message there and one back: rank 0 adds up, and makes columns orthogonal.
        """
        own = [
            work[one.span].view(one.rows, one.columns) @ self._factor(one, work)
            for one in layout.matrices
        ]
        message = torch.cat([*(one.reshape(-1) for one in own), work[layout.rest], counts])
        sizes = [one.numel() for one in (*own, layout.rest, counts)]
        *parts, rest, counts = torch.split(message, sizes)
        left = [part.view_as(one) for part, one in zip(parts, own, strict=True)]
        self._wire.at_first(message)
        if self._wire.rank == 0:
            message /= self._wire.ranks
            for one in left:
                poison = one.sum() * 0  # what is not finite stays so, and reaches all
                one.copy_(torch.linalg.qr(one.nan_to_num(0.0, 0.0, 0.0)).Q + poison)
        self._wire.from_first(message)
        return left, rest, counts

    def _rows(self, work: Tensor, layout: _Layout, left: list[Tensor], counts: Tensor) -> None:
        """Finds Q of all matrices, and keeps what this rank's product does not say."""
        right = []
        for one, columns in zip(layout.matrices, left, strict=True):
            matrix = work[one.span].view(one.rows, one.columns)
            right.append(matrix.T @ columns)
            matrix.addmm_(columns, right[-1].T, alpha=-1)
            work[one.span].nan_to_num_(0.0, 0.0, 0.0)
        hold_back(work, layout.rests, layout.seldom, counts)
        for one in layout.matrices:
            layout.rests.then[one.span].copy_(work[one.span])
        self._kept.left(layout.rests)
        message = torch.cat([one.reshape(-1) for one in right]) / self._wire.ranks
        self._wire.sum(message)
        parts = torch.split(message, [one.numel() for one in right])
        for one, part, own in zip(layout.matrices, parts, right, strict=True):
            self._next[one.name] = part.view_as(own)

    def _product(self, work: Tensor, layout: _Layout, left: list[Tensor]) -> None:
        """Writes P Qᵀ; each step of it is exact, or rounded alike everywhere."""
        for one, columns in zip(layout.matrices, left, strict=True):
            right = self._next[one.name].T.contiguous()
            matrix = work[one.span].view(one.rows, one.columns)
            step = max(1, _ROOM // one.columns) if work.device.type == "cpu" else one.rows
            spare = torch.empty_like(matrix[:step])
            for start in range(0, one.rows, step):
                part, some = matrix[start : start + step], columns[start : start + step]
                torch.mul(some[:, :1], right[0], out=part)
                for number in range(1, one.rank):
                    term = torch.mul(some[:, number, None], right[number], out=spare[: len(part)])
                    part.add_(term)
            self._next[one.name].nan_to_num_(0.0, 0.0, 0.0)  # the next P is then any

    def _factor(self, one: _Matrix, like: Tensor) -> Tensor:
        known = self._factors.get(one.name)
        if known is None or known.shape != (one.columns, one.rank):
            return self._fresh(one, like)
        return known.to(like.device, like.dtype)

    def _fresh(self, one: _Matrix, like: Tensor) -> Tensor:
        """A first Q: drawn by the parameter's name, the same on every rank."""
        seed = int.from_bytes(hashlib.sha256(one.name.encode()).digest()[:6], "big")
        source = torch.Generator().manual_seed(seed)
        drawn = torch.randn(one.columns, one.rank, generator=source)
        return drawn.to(like.device, like.dtype)

    def _layout(self, bucket: Bucket) -> _Layout:
        known = self._layouts.get(bucket.number)
        if known is not None and same(known.parameters, bucket.parameters):
            return known
        start, matrices = bucket.flat.storage_offset(), []
        rest = torch.ones(bucket.flat.numel(), dtype=torch.bool)
        for parameter, gradient in zip(bucket.parameters, bucket.gradients, strict=True):
            if gradient.dim() < 2 or not gradient.numel():
                continue
            # in the order of memory, which channels last has changed
            rows = gradient.shape[0]
            columns = gradient.numel() // rows
            rank = min(self.number, rows, columns)
            if 2 * rank * (rows + columns) > rows * columns:
                continue
            at = int(gradient.storage_offset()) - int(start)
            one = _Matrix(self._names[parameter], at, rows, columns, rank)
            matrices.append(one)
            rest[one.span] = False
        index = rest.nonzero()[:, 0].to(bucket.flat.device)
        rests = self._kept.of(bucket, bucket.flat.numel())
        seldom = [one.span for one in matrices] if self._unused else []
        layout = _Layout(list(bucket.parameters), matrices, seldom, index, rests)
        self._layouts[bucket.number] = layout
        return layout

    def counted(self) -> None:
        self._kept.counted()
        self._steps += self._passed
        self._factors.update(self._next)
        self._passed, self._next = 0, {}

    def void(self) -> None:
        self._kept.void()
        self._passed, self._next = 0, {}

    def follow(self, other: Method) -> None:
        if isinstance(other, PowerSgd):
            self.take_alike(other.alike())
            self._kept.follow(other._kept)

    def state(self) -> dict[str, Any]:
        return {"steps": self._steps, "factors": dict(self._factors), "rests": self._kept.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._layouts.clear()
        self._steps = state.get("steps", 0)
        self._factors = dict(state.get("factors", {}))
        self._kept.load_state(state.get("rests", {}))

    def alike(self) -> dict[str, Any]:
        return {"steps": self._steps, "factors": dict(self._factors)}

    def take_alike(self, state: dict[str, Any]) -> None:
        self._steps, self._factors = state.get("steps", 0), dict(state.get("factors", {}))
        self._passed, self._next = 0, {}  # that state has them

    def sent(self, elements: int, ranks: int) -> int:
        every = 2 * (ranks - 1) * elements / ranks
        layouts = [*self._layouts.values()]  # none as long as averages are exact
        known = [one for one in layouts if len(one.rests.now) == elements] or layouts
        if not known:
            return int(every * self._width)
        thin = sum(one.rank * (one.rows + one.columns) for each in known for one in each.matrices)
        said = thin + sum(len(one.rest) for one in known)
        return int(every * max(4.0, self._width) * said / sum(len(one.rests.now) for one in known))
