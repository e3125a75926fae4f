"""Averages gradients in messages of fewer bits.

Two ranks send each other all they have. Of more ranks each one owns a piece of the bucket: it adds
up what the others send of that piece, and sends the mean to all. So a rank sends 2(n - 1)/n of a
bucket as an all-reduce does, and adds in one order: all ranks decode the same, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paceline.train.reduce import codecs
from paceline.train.reduce.codecs import BLOCK, Codec, chunks
from paceline.train.reduce.collectives import Collectives, ReduceContext
from paceline.train.reduce.error_feedback import ErrorFeedback, Residual
from paceline.train.reduce.reducer import Bucket, GradientReducer

SMALL_PARAMETER = 1024
"""Parameters with fewer elements (biases, norms) are sent uncoded, in the same messages."""
MIN_BUCKET = 4096
"""A bucket with fewer elements is sent uncoded: its messages cost more than its bytes."""


@dataclass(slots=True)
class _Layout:
    """How one bucket is divided into messages.

    Attributes:
        length: Elements of a piece, whole blocks.
        small: Positions of the elements of small parameters.
        optional: Spans of the others, when a step may leave some unused on every rank.
        tail: How many elements of small parameters, and flags whether the others are used, go with
            each piece.
        residual: Quantisation error, as long as all pieces; ``None`` without error feedback.
    """

    parameters: list[nn.Parameter]
    length: int
    small: Tensor
    optional: list[slice]
    tail: int
    residual: Residual | None


class CodedReducer(GradientReducer):
    """Averages gradients by codecs, which its subclasses name.

    Attributes:
        up: Codec of what a rank sends of its own gradients.
        down: Codec of the means that owners send.
        has_feedback: Quantisation errors are kept and added to the next gradients.
    """

    up: ClassVar[Codec]
    down: ClassVar[Codec]
    has_feedback: ClassVar[bool] = True

    def __init__(self, context: ReduceContext, collectives: Collectives | None = None) -> None:
        self._collectives = collectives or Collectives(context)
        self._feedback = ErrorFeedback(self._collectives, context)
        self._has_unused = context.has_unused
        self._layouts: dict[int, _Layout] = {}
        self._buffers: dict[str, Tensor] = {}
        self._pieces = self._collectives.world_size if self._collectives.world_size > 2 else 1

    def all_reduce(self, bucket: Bucket) -> None:
        flat, world_size = bucket.flat, self._collectives.world_size
        if flat.numel() < MIN_BUCKET:
            flat.mul_(1 / world_size)
            self._collectives.all_reduce(flat)
            return
        layout = self._layout(bucket)
        if world_size == 1:  # the ranks were lost to which codes would be sent
            self._apply_residual(flat, layout)
            return
        small = torch.cat([flat[layout.small], _used_parameters(flat, layout.optional)])
        values = self._coded_values(flat, layout)
        exchange = self._exchange_all if world_size == 2 else self._exchange_pieces
        small = exchange(values, small, layout)
        for span, used in zip(layout.optional, small[len(layout.small) :], strict=True):
            values[span] *= used > 0
        for chunk in chunks(flat):
            flat[chunk].copy_(values[: flat.numel()][chunk])
        flat[layout.small] = small[: len(layout.small)]

    def _layout(self, bucket: Bucket) -> _Layout:
        existing, ids = self._layouts.get(bucket.number), [*map(id, bucket.parameters)]
        if existing is not None and [*map(id, existing.parameters)] == ids:
            return existing
        length = -(-bucket.flat.numel() // (self._pieces * BLOCK)) * BLOCK
        small, residual = _small_positions(bucket), None
        if self.has_feedback:
            residual = self._feedback.residual_of(bucket, self._pieces * length)
        optional = _large_spans(bucket) if self._has_unused and self.has_feedback else []
        # so that messages stay aligned
        tail = -(-(len(small) + len(optional)) // (self._pieces * 8)) * 8
        layout = _Layout(list(bucket.parameters), length, small, optional, tail, residual)
        self._layouts[bucket.number] = layout
        return layout

    def _coded_values(self, flat: Tensor, layout: _Layout) -> Tensor:
        """Gradients plus residual, with zeros in place of small parameters. float32."""
        length = self._pieces * layout.length
        values = self._buffer("values", length, torch.float32, flat.device)
        values[flat.numel() :] = 0
        for chunk in chunks(flat):
            values[: flat.numel()][chunk].copy_(flat[chunk])
        values[layout.small] = 0
        if layout.residual is not None:
            for chunk in chunks(values):
                values[chunk].add_(layout.residual.committed[chunk])
        return values

    def _apply_residual(self, flat: Tensor, layout: _Layout) -> None:
        """Adds the residual uncoded: this rank is the only one."""
        if (residual := layout.residual) is not None:
            errors = torch.zeros_like(residual.committed)
            used = _used_parameters(flat, layout.optional)
            residual.keep_unused(errors, layout.optional, used)
            flat += (residual.committed - errors)[: flat.numel()]
            residual.pending.copy_(errors)
            self._feedback.mark_written(residual)

    def _exchange_all(self, values: Tensor, small: Tensor, layout: _Layout) -> Tensor:
        """Makes ``values`` the mean of what two ranks send; returns the mean of ``small``."""
        size = self.up.message_bytes(len(values))
        message = self._message("message", size, small, layout)
        self.up.encode(values, message[:size], keep_error=self.has_feedback)
        message[size:].view(small.dtype)[: len(small)] = small
        rows = self._collectives.all_gather(message, self.up.compressible_bytes(len(values)))
        mean = _mean(rows[:, size:], small)[: len(small)]
        self._keep_errors(values, mean, layout)
        for number, row in enumerate(rows):
            self.up.decode(row[:size], values, weight=1 / len(rows), add=number > 0)
        return mean

    def _exchange_pieces(self, values: Tensor, small: Tensor, layout: _Layout) -> Tensor:
        """Makes ``values`` the mean that owners of pieces send; returns the mean of ``small``."""
        collectives, this_rank = self._collectives, self._collectives.rank
        world_size = collectives.world_size
        pieces = values.view(world_size, layout.length)
        tails = small.new_zeros(world_size, layout.tail)
        tails.view(-1)[: len(small)] = small
        size = self.up.message_bytes(layout.length)
        messages = self._message("messages", size, small, layout, world_size)
        for rank, piece in enumerate(pieces):
            if rank != this_rank:
                self.up.encode(piece, messages[rank, :size], keep_error=self.has_feedback)
        messages[:, size:].view(small.dtype).copy_(tails)
        compressible = self.up.compressible_bytes(layout.length)
        rows = collectives.all_to_all(messages.view(world_size, -1), compressible)
        owned = pieces[this_rank]
        for rank, row in enumerate(rows):
            if rank != this_rank:
                self.up.decode(row[:size], owned, add=True)
        owned.mul_(1 / world_size)
        small_mean = _mean(rows[:, size:], small)

        size = self.down.message_bytes(layout.length)
        message = self._message("message", size, small, layout)
        self.down.encode(owned, message[:size], keep_error=self.has_feedback)
        owned.mul_(world_size)  # an owner's error is one of the mean
        message[size:].view(small.dtype).copy_(small_mean)
        rows = collectives.all_gather(message, self.down.compressible_bytes(layout.length))
        mean = rows[:, size:].contiguous().view(small.dtype).reshape(-1)[: len(small)]
        self._keep_errors(values, mean, layout)
        for piece, row in zip(pieces, rows, strict=True):
            self.down.decode(row[:size], piece)
        return mean

    def _keep_errors(self, errors: Tensor, small: Tensor, layout: _Layout) -> None:
        """Keeps quantisation errors; the mean of ``small`` tells which parameters were used."""
        if layout.residual is not None:
            layout.residual.keep_unused(errors, layout.optional, small[len(layout.small) :])
            for chunk in chunks(errors):
                layout.residual.pending[chunk].copy_(errors[chunk])
            self._feedback.mark_written(layout.residual)

    def _message(
        self, use: str, size: int, small: Tensor, layout: _Layout, rows: int = 0
    ) -> Tensor:
        length = size + layout.tail * small.element_size()
        buffer = self._buffer(use, max(rows, 1) * length, torch.uint8, small.device)
        return buffer.view(rows, length) if rows else buffer

    def _buffer(self, use: str, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = self._buffers.get(use)
        if buffer is None or len(buffer) < length:
            buffer = self._buffers[use] = torch.zeros(length, dtype=dtype, device=device)
        return buffer[:length]

    def commit(self) -> None:
        self._feedback.commit()

    def rollback(self) -> None:
        self._feedback.rollback()

    def adopt(self, other: GradientReducer) -> None:
        """Goes on with another one's errors; without :attr:`has_feedback` they are dropped."""
        if self.has_feedback and isinstance(other, CodedReducer):
            self._feedback.adopt(other._feedback)

    def state(self) -> dict[str, Any]:
        return self._feedback.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self._layouts.clear()
        self._feedback.load_state(state)

    def bytes_sent(self, elements: int, ranks: int) -> int:
        padded = -(-elements // BLOCK) * BLOCK
        if ranks <= 2:
            return (ranks - 1) * self.up.message_bytes(padded)
        both_ways = self.up.message_bytes(padded) + self.down.message_bytes(padded)
        return (ranks - 1) * both_ways // ranks


class Fp16(CodedReducer):
    """Half the bytes: float16 with a scale for each block, eleven bits of every number."""

    name: ClassVar[str] = "fp16"
    up: ClassVar[Codec] = codecs.FP16
    down: ClassVar[Codec] = codecs.FP16
    has_feedback: ClassVar[bool] = False


class Bf16(CodedReducer):
    """Half the bytes: bfloat16 with error feedback, eight bits of every number."""

    name: ClassVar[str] = "bf16"
    up: ClassVar[Codec] = codecs.BF16
    down: ClassVar[Codec] = codecs.BF16


class Int8(CodedReducer):
    """A quarter of the bytes: 8 bits both ways, a scale for each block and error feedback."""

    name: ClassVar[str] = "int8"
    up: ClassVar[Codec] = codecs.INT8
    down: ClassVar[Codec] = codecs.INT8


class Int4(CodedReducer):
    """A fifth of the bytes: 4 bits of gradients and 8 of their means, with error feedback.

    Between two ranks it sends an eighth.
    """

    name: ClassVar[str] = "int4"
    up: ClassVar[Codec] = codecs.INT4
    down: ClassVar[Codec] = codecs.INT8


def _small_positions(bucket: Bucket) -> Tensor:
    """Positions of the elements of small parameters, shape ``[n]``."""
    start, device = bucket.flat.storage_offset(), bucket.flat.device
    positions = [
        torch.arange(gradient.numel(), device=device) + int(gradient.storage_offset() - start)
        for gradient in bucket.gradients
        if gradient.numel() < SMALL_PARAMETER
    ]
    return torch.cat(positions) if positions else torch.zeros(0, dtype=torch.long, device=device)


def _large_spans(bucket: Bucket) -> list[slice]:
    start = int(bucket.flat.storage_offset())
    places = [(int(g.storage_offset()) - start, g.numel()) for g in bucket.gradients]
    return [slice(at, at + size) for at, size in places if size >= SMALL_PARAMETER]


def _used_parameters(flat: Tensor, spans: Sequence[slice]) -> Tensor:
    """Whether this rank has a gradient of each of these parameters: 1, or 0; shape ``[n]``."""
    if not spans:
        return flat[:0]
    return torch.stack([flat[span].any() for span in spans]).to(flat.dtype)


def _mean(rows: Tensor, like: Tensor) -> Tensor:
    """The mean of numbers that were sent uncoded, added in rank order."""
    values = rows.contiguous().view(like.dtype)
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    total = torch.zeros_like(values[0], dtype=dtype)
    for row in values:
        total += row
    return (total / len(values)).to(like.dtype)
