"""Averages in messages of fewer bits.

Two ranks send each other all they have. More of them send each one a piece of the bucket, of which
it is the owner: it adds up what came, and sends the mean to all. So a rank sends 2(n - 1)/n of a
bucket as an all-reduce does, and adds in one order: what all decode is the same, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paceline.train.reduce.codecs import BLOCK, Code, parts
from paceline.train.reduce.collectives import Wire
from paceline.train.reduce.error_feedback import Kept, Rests, hold_back, same, used
from paceline.train.reduce.exchange import Bucket, Line, Method

SMALL = 1024
"""Parameters with fewer elements (biases, norms) are sent as they are, in the same messages."""
LEAST = 4096
"""A bucket with fewer elements is sent as it is: its messages cost more than its bytes."""


@dataclass(slots=True)
class _Layout:
    """Of one bucket.

    Attributes:
        parameters: In it.
        length: Elements of a piece, whole blocks.
        small: Where the elements of small parameters are.
        seldom: Parts of the others, where a step may leave some unused on every rank.
        share: How many elements of small parameters, and of the news whether the others are used,
            belong to a piece.
        rests: What is left to say, as long as all pieces.
    """

    parameters: list[nn.Parameter]
    length: int
    small: Tensor
    seldom: list[slice]
    share: int
    rests: Rests | None


class Coded:
    """Averages by codes; its subclasses say by which.

    Attributes:
        up: Code of what a rank sends of its own gradients.
        down: Code of the means that owners send.
        feedback: What codes do not say is kept and said later.
    """

    name: ClassVar[str]
    up: ClassVar[Code]
    down: ClassVar[Code]
    feedback: ClassVar[bool] = True

    def __init__(self, line: Line, wire: Wire | None = None) -> None:
        self._wire = wire or Wire(line)
        self._kept, self._unused = Kept(self._wire, line), line.unused
        self._layouts: dict[int, _Layout] = {}
        self._spare: dict[str, Tensor] = {}

    def average(self, bucket: Bucket) -> None:
        flat, wire = bucket.flat, self._wire
        if flat.numel() < LEAST:
            flat.mul_(1 / wire.ranks)
            wire.sum(flat)
            return
        layout = self._layout(bucket)
        if wire.ranks == 1:  # the others were lost, who would be told in codes
            self._all_at_once(flat, layout)
            return
        small = torch.cat([flat[layout.small], used(flat, layout.seldom)])
        work = self._work(flat, layout)
        if wire.ranks <= 2:
            small = self._directly(work, small, layout)
        else:
            small = self._by_owners(work, small, layout)
        for span, one in zip(layout.seldom, small[len(layout.small) :], strict=True):
            work[span] *= one > 0
        for part in parts(flat):
            flat[part].copy_(work[: flat.numel()][part])
        flat[layout.small] = small[: len(layout.small)]

    def _layout(self, bucket: Bucket) -> _Layout:
        known = self._layouts.get(bucket.number)
        if known is not None and same(known.parameters, bucket.parameters):
            return known
        pieces = self._wire.ranks if self._wire.ranks > 2 else 1
        length = -(-bucket.flat.numel() // (pieces * BLOCK)) * BLOCK
        small = _small(bucket)
        rests = self._kept.of(bucket, pieces * length) if self.feedback else None
        seldom = _large(bucket) if self._unused and self.feedback else []
        share = -(-(len(small) + len(seldom)) // (pieces * 8)) * 8  # so that messages stay aligned
        layout = _Layout(list(bucket.parameters), length, small, seldom, share, rests)
        self._layouts[bucket.number] = layout
        return layout

    def _work(self, flat: Tensor, layout: _Layout) -> Tensor:
        """What this rank has to say, with nothing where small parameters are."""
        pieces = self._wire.ranks if self._wire.ranks > 2 else 1
        work = self._buffer("work", pieces * layout.length, torch.float32, flat.device)
        work[flat.numel() :] = 0
        for part in parts(flat):
            work[: flat.numel()][part].copy_(flat[part])
        work[layout.small] = 0
        if layout.rests is not None:
            for part in parts(work):
                work[part].add_(layout.rests.now[part])
        return work

    def _all_at_once(self, flat: Tensor, layout: _Layout) -> None:
        """Says what is left as it is."""
        if layout.rests is not None:
            rests, left = layout.rests, torch.zeros_like(layout.rests.now)
            hold_back(left, rests, layout.seldom, used(flat, layout.seldom))
            flat += (rests.now - left)[: flat.numel()]
            rests.then.copy_(left)
            self._kept.left(rests)

    def _directly(self, work: Tensor, small: Tensor, layout: _Layout) -> Tensor:
        """Both say all they have, and compute the mean of what was said."""
        size = self.up.size(len(work))
        message = self._message("message", size, small, layout)
        self.up.encode(work, message[:size], keep=self.feedback)
        message[size:].view(small.dtype)[: len(small)] = small
        rows = self._wire.share(message, self.up.uneven(len(work)))
        mean = _mean(rows[:, size:], small)[: len(small)]
        self._keep(work, mean, layout)
        for number, row in enumerate(rows):
            self.up.decode(row[:size], work, weight=1 / len(rows), add=number > 0)
        return mean

    def _by_owners(self, work: Tensor, small: Tensor, layout: _Layout) -> Tensor:
        """Each rank gets all others' messages of one piece, and sends the mean to all."""
        wire, pieces = self._wire, work.view(self._wire.ranks, layout.length)
        tail = small.new_zeros(wire.ranks, layout.share)
        tail.view(-1)[: len(small)] = small
        size = self.up.size(layout.length)
        messages = self._message("messages", size, small, layout, wire.ranks)
        for rank, piece in enumerate(pieces):
            if rank != wire.rank:
                self.up.encode(piece, messages[rank, :size], keep=self.feedback)
        messages[:, size:].view(small.dtype).copy_(tail)
        rows = wire.swap(messages.view(wire.ranks, -1), self.up.uneven(layout.length))
        own = pieces[wire.rank]
        for rank, row in enumerate(rows):
            if rank != wire.rank:
                self.up.decode(row[:size], own, add=True)
        own.mul_(1 / wire.ranks)
        small_mean = _mean(rows[:, size:], small)

        down = self.down.size(layout.length)
        message = self._message("message", down, small, layout)
        self.down.encode(own, message[:down], keep=self.feedback)
        own.mul_(wire.ranks)  # an owner's rest is one of the mean
        message[down:].view(small.dtype).copy_(small_mean)
        rows = wire.share(message, self.down.uneven(layout.length))
        mean = rows[:, down:].contiguous().view(small.dtype).reshape(-1)[: len(small)]
        self._keep(work, mean, layout)
        for piece, row in zip(pieces, rows, strict=True):
            self.down.decode(row[:down], piece)
        return mean

    def _keep(self, work: Tensor, small: Tensor, layout: _Layout) -> None:
        """Keeps what codes did not say; small parameters' means tell what was used."""
        if layout.rests is not None:
            hold_back(work, layout.rests, layout.seldom, small[len(layout.small) :])
            for part in parts(work):
                layout.rests.then[part].copy_(work[part])
            self._kept.left(layout.rests)

    def _message(
        self, use: str, size: int, small: Tensor, layout: _Layout, rows: int = 0
    ) -> Tensor:
        """Room for codes and the elements of small parameters behind them."""
        length = size + layout.share * small.element_size()
        room = self._buffer(use, max(rows, 1) * length, torch.uint8, small.device)
        return room.view(rows, length) if rows else room

    def _buffer(self, use: str, length: int, kind: torch.dtype, device: torch.device) -> Tensor:
        """Memory for all buckets, one after the other."""
        room = self._spare.get(use)
        if room is None or len(room) < length:
            room = self._spare[use] = torch.zeros(length, dtype=kind, device=device)
        return room[:length]

    def counted(self) -> None:
        self._kept.counted()

    def void(self) -> None:
        self._kept.void()

    def follow(self, other: Method) -> None:
        """Says what another one has left to say; without :attr:`feedback` that is dropped."""
        if self.feedback and isinstance(other, Coded):
            self._kept.follow(other._kept)

    def state(self) -> dict[str, Any]:
        return self._kept.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self._layouts.clear()
        self._kept.load_state(state)

    def alike(self) -> dict[str, Any]:
        return {}  # rests only, of which each rank has its own

    def take_alike(self, state: dict[str, Any]) -> None:
        pass

    def sent(self, elements: int, ranks: int) -> int:
        whole = -(-elements // BLOCK) * BLOCK
        if ranks <= 2:
            return (ranks - 1) * self.up.size(whole)
        return (ranks - 1) * (self.up.size(whole) + self.down.size(whole)) // ranks


def _small(bucket: Bucket) -> Tensor:
    """Places of the elements of small parameters, shape ``[n]``."""
    start, device = bucket.flat.storage_offset(), bucket.flat.device
    spans = [
        torch.arange(one.numel(), device=device) + int(one.storage_offset() - start)
        for one in bucket.gradients
        if one.numel() < SMALL
    ]
    return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.long, device=device)


def _large(bucket: Bucket) -> list[slice]:
    """Parts of those that are coded."""
    start = int(bucket.flat.storage_offset())
    places = [(int(one.storage_offset()) - start, one.numel()) for one in bucket.gradients]
    return [slice(at, at + size) for at, size in places if size >= SMALL]


def _mean(rows: Tensor, like: Tensor) -> Tensor:
    """The mean of numbers that were sent as they are, added in rank order."""
    every = rows.contiguous().view(like.dtype)
    exact = torch.float64 if like.dtype == torch.float64 else torch.float32
    total = torch.zeros_like(every[0], dtype=exact)
    for row in every:
        total += row
    return (total / len(every)).to(like.dtype)
