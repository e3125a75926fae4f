"""The collectives that methods are made of, on one line."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.train.elastic.waits import apart, wait
from paceline.train.reduce import small_messages
from paceline.train.reduce.direct import mesh_of
from paceline.train.reduce.exchange import Line

_SLOW = 2e-7
"""Seconds in which a byte passes, from which on codes are packed: that and the reverse take a tenth
of it on a processor, and save a quarter of the bytes."""
_MESSAGE = 1 << 16  # bytes; of shorter ones it cannot be seen how quick the line is
_LATELY = 16  # messages: the kernel takes some at once, and others then wait for them
_HEAD = 8  # bytes before a parcel: how long its packed codes are, 0 where they are as they were


@dataclass(frozen=True, slots=True)
class _Mean:
    """Of two ranks' tensors, made in the place of this rank's; divided first, as DDP divides.

    Both add in rank order: of two that are not numbers a sum is the first.
    """

    mine: Tensor
    other: Tensor
    rank: int

    def before(self, piece: slice) -> None:
        self.mine[self._elements(piece)] *= 0.5

    def after(self, piece: slice) -> None:
        mine, other = (one[self._elements(piece)] for one in (self.mine, self.other))
        torch.add(*((other, mine) if self.rank else (mine, other)), out=mine)

    def _elements(self, piece: slice) -> slice:
        size = self.mine.element_size()
        return slice(piece.start // size, piece.stop // size)


class Wire:
    """Messages between the ranks of a line; all must call the same in the same order."""

    def __init__(self, line: Line) -> None:
        self.rank, self.ranks, self._group = line.rank, line.ranks, line.group
        self._lately: deque[tuple[float, int]] = deque(maxlen=_LATELY)  # seconds, bytes
        self._spare = torch.empty(0, dtype=torch.uint8)

    def sum(self, tensor: Tensor) -> None:
        """The sum over all ranks, in place; the same bits on every rank."""
        if small_messages.fits(tensor, self.ranks, self._group):
            small_messages.add_up(tensor, self.ranks, self._group)
            return
        self.around(tensor)

    def around(self, tensor: Tensor) -> None:
        """The same by the backend's own all-reduce, however little it is."""
        wait(dist.all_reduce(tensor, group=self._group, async_op=True), tensor)

    def mean_of_two(self, tensor: Tensor) -> None:
        """The mean of two ranks' tensors on CPUs, in place, sent by this thread if it can be."""
        mesh = mesh_of(self._group, large=True)
        if mesh is None:
            tensor.mul_(1.0 / self.ranks)
            self.around(tensor)
            return
        if len(self._spare) < tensor.nbytes:
            self._spare = torch.empty(tensor.nbytes, dtype=torch.uint8)
        other = self._spare[: tensor.nbytes].view(tensor.dtype)
        mesh.carry([tensor] * 2, [other] * 2, work=_Mean(tensor, other, self.rank))

    def swap(self, messages: Tensor, codes: int = 0) -> Tensor:
        """Row r goes to rank r; what came, in rank order. uint8, shape ``[ranks, n]``.

        So many bytes at the beginning of each are packed where the line is slow.
        """
        came = torch.empty_like(messages)
        if self._over_gloo(messages):
            came[self.rank] = messages[self.rank]
            self._carry(list(messages), came, codes)
            return came
        work = dist.all_to_all_single(came, messages, group=self._group, async_op=True)
        wait(work, came)
        return came

    def share(self, message: Tensor, codes: int = 0) -> Tensor:
        """Every rank's message, in rank order. uint8, shape ``[n]`` each; see :meth:`swap`."""
        if self.ranks == 1:
            return message.clone()[None]
        every = message.new_empty(self.ranks, len(message))
        if self._over_gloo(message):
            every[self.rank] = message
            self._carry([message] * self.ranks, every, codes)
        else:
            wait(dist.all_gather(list(every), message, group=self._group, async_op=True), message)
        return every

    def _slow(self) -> bool:
        """Whether messages lately took long for their bytes: by the line, or by who is late."""
        return sum(one[0] for one in self._lately) > _SLOW * sum(one[1] for one in self._lately)

    def _over_gloo(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and "gloo" in dist.get_backend(self._group)

    def _carry(self, given: Sequence[Tensor], came: Tensor, codes: int) -> None:
        """Row r goes to rank r, and the others' come."""
        others = [(self.rank + number) % self.ranks for number in range(1, self.ranks)]
        length, parcels, rooms = came.shape[1], list(given), list(came)
        if codes:
            packed = codes if self._slow() else 0
            made = {id(given[one]): parcel(given[one], packed) for one in others}
            parcels = [made.get(id(one), one) for one in given]
            rooms = [came.new_empty(_HEAD + length) for _ in given]
        began = time.perf_counter()
        if (mesh := mesh_of(self._group, large=True)) is not None:
            mesh.carry(parcels, rooms, shorter=bool(codes))
        else:
            apart(lambda: self._both_ways(others, parcels, rooms))
        sent = sum(len(parcels[one]) for one in others)
        self._lately.append((time.perf_counter() - began, max(sent, _MESSAGE)))
        if codes:
            for one in others:
                unpack(rooms[one], codes, came[one])

    def _both_ways(
        self, others: Sequence[int], given: Sequence[Tensor], came: Sequence[Tensor]
    ) -> None:
        """All are asked for their messages, and then sent theirs.

        gloo tells a sender that there is room for a message on the connection on which the room's
        owner sends. Its all-to-all asks after it has sent: who comes later sends all it has at
        once, the other hears behind that that it may send, and on a slow line one message waits for
        the other. A message may be shorter than its room.
        """
        works = [dist.irecv(came[one], group=self._group, group_src=one) for one in others]
        works += [dist.isend(given[one], group=self._group, group_dst=one) for one in others]
        for work in works:
            assert work is not None  # this rank is in the group
            work.wait()

    def gather(self, message: Tensor) -> Tensor | None:
        """Every rank's message on rank 0, which alone gets them. uint8, shape ``[n]`` each."""
        first = self.rank == 0
        every = message.new_empty(self.ranks, len(message)) if first else None
        rows = None if every is None else list(every)
        wait(dist.gather(message, rows, 0, group=self._group, async_op=True), message)
        return every


def parcel(message: Tensor, codes: int) -> Tensor:
    """A message with what is needed to read it again; its first ``codes`` bytes are packed."""
    whole, packed = message.numpy(), b""
    if codes:
        # Where a byte is in a message says nothing about it, how often it comes does.
        press = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
        packed = press.compress(whole[:codes].data) + press.flush()
    if not codes or len(packed) >= codes:
        packed, codes = b"", 0
    made = torch.empty(_HEAD + len(packed) + len(whole) - codes, dtype=torch.uint8)
    room = made.numpy()
    room[:_HEAD].view(np.int64)[0] = len(packed)
    room[_HEAD : _HEAD + len(packed)] = np.frombuffer(packed, np.uint8)
    room[_HEAD + len(packed) :] = whole[codes:]
    return made


def unpack(came: Tensor, codes: int, message: Tensor) -> None:
    """Reads a parcel, of a message whose first ``codes`` bytes may be packed.

    Raises:
        RuntimeError: It is none.
    """
    room, whole = came.numpy(), message.numpy()
    packed = int(room[:_HEAD].view(np.int64)[0])
    if not packed:
        whole[:] = room[_HEAD : _HEAD + len(whole)]
        return
    try:
        # a byte more than belongs there, and no more, however much it stands for
        found = zlib.decompressobj(-15).decompress(room[_HEAD : _HEAD + packed].data, codes + 1)
    except zlib.error as error:
        raise RuntimeError(f"a rank's message cannot be read: {error}") from None
    if len(found) != codes:
        raise RuntimeError(f"a rank's message holds {len(found)} bytes of codes, not {codes}")
    whole[:codes] = np.frombuffer(found, np.uint8)
    whole[codes:] = room[_HEAD + packed :][: len(whole) - codes]
