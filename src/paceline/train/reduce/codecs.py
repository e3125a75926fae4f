"""Encodes gradients in fewer bits: pure arithmetic, the same on every kind of machine.

A decoded number is one multiplication of a code and a scale, exact to the last bit by IEEE 754: so
hosts with different processors decode the same. Codecs work through chunks of a tensor that fit a
core's cache, and below the size from which torch would ask other threads for help: they are
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
_CHUNK_BLOCKS = 120  # on a CPU: torch divides 32,768 elements among threads
_ROUNDING = 1.5 * 2**23  # float32 has no fractions there; torch's round() divides 2,048 elements
_MIN_SCALE = 1e-30  # so that blocks of zeros divide by something


class Codec(Protocol):
    """How messages hold numbers."""

    def message_bytes(self, elements: int) -> int:
        """Bytes of so many numbers, whole blocks; a multiple of 8."""

    def compressible_bytes(self, elements: int) -> int:
        """Bytes at a message's beginning that an entropy coder makes shorter."""

    def encode(self, values: Tensor, message: Tensor, *, keep_error: bool) -> None:
        """Writes a message.

        Args:
            values: float32, one-dimensional, whole blocks.
            message: uint8, of the right size, aligned.
            keep_error: Leaves the quantisation error in ``values``, finite in any case.
        """

    def decode(
        self, message: Tensor, out: Tensor, *, weight: float = 1.0, add: bool = False
    ) -> None:
        """Reads a message into float32 numbers; ``weight`` is a power of two.

        A block that was not finite becomes not finite as a whole.
        """


def chunks(tensor: Tensor) -> Iterator[slice]:
    """Slices of a flat tensor that are worked on at once."""
    length = _chunk_blocks(tensor) * BLOCK
    return (slice(start, start + length) for start in range(0, len(tensor), length))


def _chunk_blocks(values: Tensor) -> int:
    if values.device.type == "cpu":
        return _CHUNK_BLOCKS
    return max(1, -(-values.numel() // BLOCK))


@dataclass(frozen=True, slots=True)
class ScaledCodec:
    """Each block has a scale, by which its largest number is the largest code.

    Attributes:
        dtype: What a code is stored as; two are stored in one int8 when ``is_4bit``.
        largest: The largest code.
        is_4bit: Codes have 4 bits.
    """

    dtype: torch.dtype
    largest: float
    is_4bit: bool = False

    def message_bytes(self, elements: int) -> int:
        return self._code_bytes(elements) + -(-elements // (2 * BLOCK)) * 8

    def compressible_bytes(self, elements: int) -> int:
        return self._code_bytes(elements) if self.is_4bit else 0  # 8 bits would save a tenth

    def _code_bytes(self, elements: int) -> int:
        return elements * self.dtype.itemsize // (2 if self.is_4bit else 1)

    def _views(self, message: Tensor, elements: int) -> tuple[Tensor, Tensor]:
        """Codes and scales, a row for each block."""
        end = self._code_bytes(elements)
        codes = message[:end].view(self.dtype).view(elements // BLOCK, -1)
        return codes, message[end : end + elements // BLOCK * 4].view(torch.float32)[:, None]

    def encode(self, values: Tensor, message: Tensor, *, keep_error: bool) -> None:
        blocks, step = values.view(-1, BLOCK), _chunk_blocks(values)
        codes, scales = self._views(message, values.numel())
        buffer = torch.empty_like(blocks[:step])
        for start in range(0, len(blocks), step):
            chunk = blocks[start : start + step]
            coded = buffer[: len(chunk)]
            scale = torch.abs(chunk, out=coded).amax(1, keepdim=True)
            scale = scale.clamp_(min=_MIN_SCALE).div_(self.largest)
            torch.mul(chunk, scale.reciprocal(), out=coded)
            if self.dtype == torch.int8:
                coded.add_(_ROUNDING).sub_(_ROUNDING)
            scales[start : start + step] = scale
            self._store(coded, codes[start : start + step])
            if keep_error:
                if self.dtype != torch.int8:
                    self._load(codes[start : start + step], coded)
                chunk.addcmul_(coded, scale, value=-1)
        if keep_error:
            _clear_blocks(blocks, ~torch.isfinite(scales))

    def _store(self, coded: Tensor, codes: Tensor) -> None:
        if self.is_4bit:  # the sign belongs to the second: an arithmetic shift gives it back
            half = BLOCK // 2
            codes.copy_(coded[:, half:].mul(16).add_(coded[:, :half]).add_(8))
        else:
            codes.copy_(coded)

    def decode(
        self, message: Tensor, out: Tensor, *, weight: float = 1.0, add: bool = False
    ) -> None:
        blocks, step = out.view(-1, BLOCK), _chunk_blocks(out)
        codes, scales = self._views(message, out.numel())
        buffer = torch.empty_like(blocks[:step])
        for start in range(0, len(blocks), step):
            chunk, scale = blocks[start : start + step], scales[start : start + step] * weight
            coded = buffer[: len(chunk)]
            self._load(codes[start : start + step], coded)
            if add:
                chunk.add_(coded.mul_(scale))
            else:
                torch.mul(coded, scale, out=chunk)

    def _load(self, codes: Tensor, coded: Tensor) -> None:
        if self.is_4bit:
            half = BLOCK // 2
            coded[:, :half].copy_((codes & 15).sub_(8))
            coded[:, half:].copy_(codes >> 4)
        else:
            coded.copy_(codes)


def _clear_blocks(blocks: Tensor, mask: Tensor) -> None:
    """Keeps no error of blocks that were not finite; all ranks have got them."""
    if blocks.device.type != "cpu":  # nothing waits for an accelerator to know
        blocks.masked_fill_(mask, 0.0)
    elif bool(mask.any()):
        blocks[mask[:, 0]] = 0.0


@dataclass(frozen=True, slots=True)
class CastCodec:
    """Each number as a shorter floating point number, without a scale.

    Attributes:
        dtype: With the range of float32.
    """

    dtype: torch.dtype

    def message_bytes(self, elements: int) -> int:
        return elements * self.dtype.itemsize

    def compressible_bytes(self, elements: int) -> int:
        return 0

    def encode(self, values: Tensor, message: Tensor, *, keep_error: bool) -> None:
        codes = message.view(self.dtype)
        for chunk in chunks(values):
            codes[chunk].copy_(values[chunk])
            if keep_error:
                values[chunk].sub_(codes[chunk]).nan_to_num_(0.0, 0.0, 0.0)

    def decode(
        self, message: Tensor, out: Tensor, *, weight: float = 1.0, add: bool = False
    ) -> None:
        codes = message[: self.message_bytes(out.numel())].view(self.dtype)
        for chunk in chunks(out):
            if add:
                out[chunk].add_(codes[chunk].float().mul_(weight))
            else:
                torch.mul(codes[chunk], weight, out=out[chunk])


FP16: Codec = ScaledCodec(torch.float16, 2.0**15)
BF16: Codec = CastCodec(torch.bfloat16)
INT8: Codec = ScaledCodec(torch.int8, 127.0)
INT4: Codec = ScaledCodec(torch.int8, 7.0, is_4bit=True)
