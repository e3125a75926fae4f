"""How numbers are said in fewer bits: pure arithmetic, the same on every kind of machine.

What is decoded is one multiplication of a code and a scale, exact to the last bit by IEEE 754: so
hosts with different processors understand the same. A code works through parts of a tensor that
fit a core's cache, and below the size from which torch would ask other threads for help: they are
computing the gradients that come next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

BLOCK = 256
"""Numbers that share a scale; messages hold whole blocks."""
_ROWS = 120  # blocks at once on a CPU: torch divides 32,768 elements among threads
_WHOLE = 1.5 * 2**23  # float32 has no fractions there; torch's round() divides 2,048 elements
_LEAST = 1e-30  # a scale, so that blocks of zeros divide by something


class Code(Protocol):
    """How messages hold numbers."""

    def size(self, elements: int) -> int:
        """Bytes of so many numbers, whole blocks; a multiple of 8."""

    def uneven(self, elements: int) -> int:
        """Bytes at a message's beginning of which some come much oftener than others."""

    def encode(self, values: Tensor, message: Tensor, *, keep: bool) -> None:
        """Writes a message.

        Args:
            values: float32, one-dimensional, whole blocks.
            message: uint8, of the right size, aligned.
            keep: Leaves in ``values`` what the message does not say, finite in any case.
        """

    def decode(
        self, message: Tensor, out: Tensor, *, weight: float = 1.0, add: bool = False
    ) -> None:
        """Reads a message into float32 numbers; ``weight`` is a power of two.

        What was not finite makes its whole block not finite.
        """


def parts(tensor: Tensor) -> Iterator[slice]:
    """Pieces of a flat tensor that are worked on at once."""
    step = _at_once(tensor) * BLOCK
    return (slice(start, start + step) for start in range(0, len(tensor), step))


def _at_once(values: Tensor) -> int:
    """Blocks to be worked on together."""
    return _ROWS if values.device.type == "cpu" else max(1, -(-values.numel() // BLOCK))


@dataclass(frozen=True, slots=True)
class Scaled:
    """Each block has a scale, by which its largest number is the code's largest.

    Attributes:
        kind: What a code is stored as; two are stored in one int8 where ``halves``.
        top: The largest code.
        halves: Codes of 4 bits.
    """

    kind: torch.dtype
    top: float
    halves: bool = False

    def size(self, elements: int) -> int:
        return self._codes(elements) + -(-elements // (2 * BLOCK)) * 8

    def uneven(self, elements: int) -> int:
        return self._codes(elements) if self.halves else 0  # of 8 bits a tenth could be saved

    def _codes(self, elements: int) -> int:
        return elements * self.kind.itemsize // (2 if self.halves else 1)

    def _parts(self, message: Tensor, elements: int) -> tuple[Tensor, Tensor]:
        """Codes and scales, a row for each block."""
        end = self._codes(elements)
        codes = message[:end].view(self.kind).view(elements // BLOCK, -1)
        return codes, message[end : end + elements // BLOCK * 4].view(torch.float32)[:, None]

    def encode(self, values: Tensor, message: Tensor, *, keep: bool) -> None:
        blocks, step = values.view(-1, BLOCK), _at_once(values)
        codes, scales = self._parts(message, values.numel())
        spare = torch.empty_like(blocks[:step])
        for start in range(0, len(blocks), step):
            part = blocks[start : start + step]
            said = spare[: len(part)]
            scale = torch.abs(part, out=said).amax(1, keepdim=True)
            scale = scale.clamp_(min=_LEAST).div_(self.top)
            torch.mul(part, scale.reciprocal(), out=said)
            if self.kind == torch.int8:
                said.add_(_WHOLE).sub_(_WHOLE)
            scales[start : start + step] = scale
            self._store(said, codes[start : start + step])
            if keep:
                if self.kind != torch.int8:
                    self._load(codes[start : start + step], said)
                part.addcmul_(said, scale, value=-1)
        if keep:
            _forget(blocks, ~torch.isfinite(scales))

    def _store(self, said: Tensor, codes: Tensor) -> None:
        if self.halves:  # the sign belongs to the second: an arithmetic shift gives it back
            half = BLOCK // 2
            codes.copy_(said[:, half:].mul(16).add_(said[:, :half]).add_(8))
        else:
            codes.copy_(said)

    def decode(
        self, message: Tensor, out: Tensor, *, weight: float = 1.0, add: bool = False
    ) -> None:
        blocks, step = out.view(-1, BLOCK), _at_once(out)
        codes, scales = self._parts(message, out.numel())
        spare = torch.empty_like(blocks[:step])
        for start in range(0, len(blocks), step):
            part, scale = blocks[start : start + step], scales[start : start + step] * weight
            said = spare[: len(part)]
            self._load(codes[start : start + step], said)
            if add:
                part.add_(said.mul_(scale))
            else:
                torch.mul(said, scale, out=part)

    def _load(self, codes: Tensor, said: Tensor) -> None:
        if self.halves:
            half = BLOCK // 2
            said[:, :half].copy_((codes & 15).sub_(8))
            said[:, half:].copy_(codes >> 4)
        else:
            said.copy_(codes)


def _forget(blocks: Tensor, bad: Tensor) -> None:
    """Keeps nothing of blocks that were not finite; they were said to all."""
    if blocks.device.type != "cpu":  # nobody waits for an accelerator to know
        blocks.masked_fill_(bad, 0.0)
    elif bool(bad.any()):
        blocks[bad[:, 0]] = 0.0


@dataclass(frozen=True, slots=True)
class Plain:
    """Each number as a shorter floating point number, without a scale.

    Attributes:
        kind: With the range of float32.
    """

    kind: torch.dtype

    def size(self, elements: int) -> int:
        return elements * self.kind.itemsize

    def uneven(self, elements: int) -> int:
        return 0

    def encode(self, values: Tensor, message: Tensor, *, keep: bool) -> None:
        codes = message.view(self.kind)
        for part in parts(values):
            codes[part].copy_(values[part])
            if keep:
                values[part].sub_(codes[part]).nan_to_num_(0.0, 0.0, 0.0)

    def decode(
        self, message: Tensor, out: Tensor, *, weight: float = 1.0, add: bool = False
    ) -> None:
        codes = message[: self.size(out.numel())].view(self.kind)
        for part in parts(out):
            if add:
                out[part].add_(codes[part].float().mul_(weight))
            else:
                torch.mul(codes[part], weight, out=out[part])


FP16: Code = Scaled(torch.float16, 2.0**15)
BF16: Code = Plain(torch.bfloat16)
INT8: Code = Scaled(torch.int8, 127.0)
INT4: Code = Scaled(torch.int8, 7.0, halves=True)
