"""Codecs: encode gradients in fewer bits, with the same result on every kind of machine.

A decoded number is one product of a code and a scale, which IEEE 754 defines to the last bit: hosts
with different processors decode the same. Codecs process chunks that fit a core's cache and stay
below the size from which torch uses further threads, which compute the next gradients meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256
"""Numbers that share a scale; messages hold whole blocks."""
_CHUNK_BLOCKS = 120  # on a CPU: torch uses several threads from 32,768 elements on
_ROUNDING = 1.5 * 2**23  # adding it rounds a float32; torch's round() uses threads from 2,048
_MIN_SCALE = 1e-30  # of blocks of zeros


def chunks(tensor: Tensor) -> Iterator[slice]:
    """Yields slices of a flat tensor, each of which is processed at once."""
    length = _chunk_blocks(tensor) * BLOCK
    return (slice(start, start + length) for start in range(0, len(tensor), length))


def _chunk_blocks(values: Tensor) -> int:
    if values.device.type == "cpu":
        return _CHUNK_BLOCKS
    return max(1, -(-values.numel() // BLOCK))


@dataclass(frozen=True, slots=True)
class ScaledCodec:
    """Scales each block so that its largest number becomes the largest code.

    Attributes:
        dtype: Type in which a code is stored; with ``is_4bit`` an int8 holds two.
    """

    dtype: torch.dtype
    largest: float
    is_4bit: bool = False

    def message_bytes(self, elements: int) -> int:
        """Returns the bytes of a message of so many numbers, whole blocks; a multiple of 8."""
        return self._code_bytes(elements) + -(-elements // (2 * BLOCK)) * 8

    def compressible_bytes(self, elements: int) -> int:
        """Returns the number of leading bytes that an entropy coder makes shorter."""
        return self._code_bytes(elements) if self.is_4bit else 0  # 8 bits would save a tenth

    def _code_bytes(self, elements: int) -> int:
        return elements * self.dtype.itemsize // (2 if self.is_4bit else 1)

    def _views(self, message: Tensor, elements: int) -> tuple[Tensor, Tensor]:
        """Returns views of codes and scales, a row for each block."""
        end = self._code_bytes(elements)
        codes = message[:end].view(self.dtype).view(elements // BLOCK, -1)
        return codes, message[end : end + elements // BLOCK * 4].view(torch.float32)[:, None]

    def encode(self, values: Tensor, message: Tensor, *, keep_error: bool) -> None:
        """Writes a message.

        Args:
            values: float32, one-dimensional, whole blocks.
            message: uint8, of the right size, aligned.
            keep_error: Leaves the quantisation error in ``values``, finite in any case.
        """
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
        if self.is_4bit:  # the sign is that of the second code: an arithmetic shift restores it
            half = BLOCK // 2
            codes.copy_(coded[:, half:].mul(16).add_(coded[:, :half]).add_(8))
        else:
            codes.copy_(coded)

    def decode(
        self, message: Tensor, out: Tensor, *, weight: float = 1.0, add: bool = False
    ) -> None:
        """Reads a message into float32 numbers; ``weight`` is a power of two.

        A block that was not finite becomes not finite as a whole.
        """
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
    """Clears the quantisation error of blocks that were not finite, as every rank decodes them."""
    if blocks.device.type != "cpu":  # without synchronising with the accelerator
        blocks.masked_fill_(mask, 0.0)
    elif bool(mask.any()):
        blocks[mask[:, 0]] = 0.0


@dataclass(frozen=True, slots=True)
class CastCodec:
    """Casts each number to a shorter floating point type, without a scale; as ScaledCodec."""

    dtype: torch.dtype  # with the range of float32

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


Codec = ScaledCodec | CastCodec
FP16: Codec = ScaledCodec(torch.float16, 2.0**15)
BF16: Codec = CastCodec(torch.bfloat16)
INT8: Codec = ScaledCodec(torch.int8, 127.0)
INT4: Codec = ScaledCodec(torch.int8, 7.0, is_4bit=True)
