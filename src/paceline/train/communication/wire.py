"""The collectives that methods are made of, on one line."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.train.exchange import Line
from paceline.train.waits import wait


class Wire:
    """Messages between the ranks of a line; all must call the same in the same order."""

    def __init__(self, line: Line) -> None:
        self.rank, self.ranks, self._group = line.rank, line.ranks, line.group

    def sum(self, tensor: Tensor) -> None:
        """The sum over all ranks, in place; the same bits on every rank."""
        wait(dist.all_reduce(tensor, group=self._group, async_op=True), tensor)

    def swap(self, messages: Tensor) -> Tensor:
        """Row r goes to rank r; what came, in rank order. uint8, shape ``[ranks, n]``."""
        came = torch.empty_like(messages)
        work = dist.all_to_all_single(came, messages, group=self._group, async_op=True)
        wait(work, came)
        return came

    def share(self, message: Tensor) -> Tensor:
        """Every rank's message, in rank order. uint8, shape ``[n]`` each."""
        if self.ranks == 1:
            return message.clone()[None]
        every = message.new_empty(self.ranks, len(message))
        if message.device.type == "cpu":
            self._exchange(message, every)
        else:
            wait(dist.all_gather(list(every), message, group=self._group, async_op=True), message)
        return every

    def _exchange(self, message: Tensor, every: Tensor) -> None:
        """By an all-to-all: over gloo much faster than its all-gather of a few ranks."""
        others = self.ranks - 1
        sizes = [0 if rank == self.rank else len(message) for rank in range(self.ranks)]
        came = message.new_empty(others * len(message))
        given = message if others == 1 else message.repeat(others)
        group = self._group
        wait(dist.all_to_all_single(came, given, sizes, sizes, group=group, async_op=True), came)
        every[self.rank] = message
        rows = came.view(others, -1)
        every[: self.rank], every[self.rank + 1 :] = rows[: self.rank], rows[self.rank :]

    def at_first(self, tensor: Tensor) -> None:
        """The sum over all ranks, on rank 0 only, in place."""
        wait(dist.reduce(tensor, 0, group=self._group, async_op=True), tensor)

    def from_first(self, tensor: Tensor) -> None:
        """What rank 0 has, on every rank, in place."""
        wait(dist.broadcast(tensor, 0, group=self._group, async_op=True), tensor)

    def gather(self, message: Tensor) -> Tensor | None:
        """Every rank's message on rank 0, which alone gets them. uint8, shape ``[n]`` each."""
        first = self.rank == 0
        every = message.new_empty(self.ranks, len(message)) if first else None
        rows = None if every is None else list(every)
        wait(dist.gather(message, rows, 0, group=self._group, async_op=True), message)
        return every
