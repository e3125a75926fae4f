"""The collectives that reducers are made of, over the ranks of one context."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.train.elastic.waits import wait, wait_in_thread
from paceline.train.reduce import small_messages
from paceline.train.reduce.direct import PairMean, mesh_of

_COMPRESS_S_PER_BYTE = 2e-7
"""Time per byte sent from which on codes are compressed. Compressing and decompressing take a tenth
of it on a CPU, and save a quarter of the bytes."""
_MIN_MESSAGE = 1 << 16  # bytes; shorter messages do not show how fast the network is
_RECENT = 16  # messages that are averaged: the kernel buffers some, and later ones wait
_HEADER = 8  # bytes before a message: size of its compressed codes, 0 when they are not


@dataclass(frozen=True, slots=True)
class ReduceContext:
    """The ranks and parameters that a reducer is made for.

    Attributes:
        group: Process group for the reducer alone; ``None`` is the whole job's.
        names: Name of each parameter, the key of its residual in a checkpoint.
        can_roll_back: Whether ranks may be lost in a pass, which then does not count.
        has_unused: Whether a pass may leave parameters without gradient on every rank; DDP drops
            their mean.
        element_bytes: Bytes of an element of the gradients, on average.
    """

    group: dist.ProcessGroup | None
    rank: int
    world_size: int
    names: Mapping[Tensor, str] = field(default_factory=dict)
    can_roll_back: bool = False
    has_unused: bool = False
    element_bytes: float = 4.0


class Collectives:
    """Collectives of the ranks of a context; all ranks must call the same in the same order."""

    def __init__(self, context: ReduceContext) -> None:
        self.rank, self.world_size = context.rank, context.world_size
        self._group = context.group
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT)  # seconds, bytes
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums over all ranks in place; the same bits on every rank."""
        if small_messages.fits(tensor, self.world_size, self._group):
            small_messages.all_reduce(tensor, self.world_size, self._group)
        else:
            self.ring_all_reduce(tensor)

    def ring_all_reduce(self, tensor: Tensor) -> None:
        """Sums over all ranks in place by the backend's all-reduce, also a small tensor."""
        wait(dist.all_reduce(tensor, group=self._group, async_op=True), tensor)

    def average_pair(self, tensor: Tensor) -> None:
        """Averages two ranks' tensors on CPUs in place, over direct connections if it has some."""
        mesh = mesh_of(self._group, large=True)
        if mesh is None:
            tensor.mul_(1.0 / self.world_size)
            self.ring_all_reduce(tensor)
            return
        if len(self._buffer) < tensor.nbytes:
            self._buffer = torch.empty(tensor.nbytes, dtype=torch.uint8)
        remote = self._buffer[: tensor.nbytes].view(tensor.dtype)
        mean = PairMean(tensor, remote, self.rank)
        mesh.exchange([tensor] * 2, [remote] * 2, pipeline=mean)

    def all_to_all(self, messages: Tensor, compressible: int = 0) -> Tensor:
        """Sends row r to rank r; returns the rows of all ranks, in rank order.

        Args:
            messages: uint8, shape ``[ranks, n]``.
            compressible: Number of leading bytes of each that are compressed on a slow network.
        """
        received = torch.empty_like(messages)
        if self._uses_gloo(messages):
            received[self.rank] = messages[self.rank]
            self._exchange(list(messages), received, compressible)
        else:
            work = dist.all_to_all_single(received, messages, group=self._group, async_op=True)
            wait(work, received)
        return received

    def all_gather(self, message: Tensor, compressible: int = 0) -> Tensor:
        """Returns every rank's message, uint8 of shape ``[n]``, by rank; see :meth:`all_to_all`."""
        if self.world_size == 1:
            return message.clone()[None]
        received = message.new_empty(self.world_size, len(message))
        if self._uses_gloo(message):
            received[self.rank] = message
            self._exchange([message] * self.world_size, received, compressible)
        else:
            rows = list(received)
            wait(dist.all_gather(rows, message, group=self._group, async_op=True), message)
        return received

    def gather(self, message: Tensor) -> Tensor | None:
        """Returns every rank's message on rank 0, ``None`` elsewhere; uint8, shape ``[n]`` each."""
        is_first = self.rank == 0
        received = message.new_empty(self.world_size, len(message)) if is_first else None
        rows = None if received is None else list(received)
        wait(dist.gather(message, rows, 0, group=self._group, async_op=True), message)
        return received

    def _is_slow(self) -> bool:
        """Whether recent messages took long for their size, by the network or by a late rank."""
        seconds = sum(duration for duration, _ in self._recent)
        return seconds > _COMPRESS_S_PER_BYTE * sum(sent for _, sent in self._recent)

    def _uses_gloo(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and "gloo" in dist.get_backend(self._group)

    def _exchange(self, messages: Sequence[Tensor], received: Tensor, compressible: int) -> None:
        peers = [(self.rank + offset) % self.world_size for offset in range(1, self.world_size)]
        outgoing, incoming = list(messages), list(received)
        if compressible:
            codes = compressible if self._is_slow() else 0
            packed = {id(messages[peer]): pack(messages[peer], codes) for peer in peers}
            outgoing = [packed.get(id(message), message) for message in messages]
            incoming = [received.new_empty(_HEADER + received.shape[1]) for _ in messages]
        start = time.perf_counter()
        if (mesh := mesh_of(self._group, large=True)) is not None:
            mesh.exchange(outgoing, incoming, is_variable=bool(compressible))
        else:
            wait_in_thread(lambda: self._exchange_by_gloo(peers, outgoing, incoming))
        sent = sum(len(outgoing[peer]) for peer in peers)
        self._recent.append((time.perf_counter() - start, max(sent, _MIN_MESSAGE)))
        if compressible:
            for peer in peers:
                unpack(incoming[peer], compressible, received[peer])

    def _exchange_by_gloo(
        self, peers: Sequence[int], outgoing: Sequence[Tensor], incoming: Sequence[Tensor]
    ) -> None:
        """Posts all receives, and then sends.

        gloo announces a receive buffer on the connection on which its owner sends. gloo's own
        all-to-all posts receives after its sends: the later rank sends everything at once, its
        announcement comes behind that, and on a slow network one message waits for the other. A
        message may be shorter than its buffer.
        """
        works = [dist.irecv(incoming[peer], group=self._group, group_src=peer) for peer in peers]
        works += [dist.isend(outgoing[peer], group=self._group, group_dst=peer) for peer in peers]
        for work in works:
            assert work is not None  # this rank is in the group
            work.wait()


def pack(message: Tensor, codes: int) -> Tensor:
    """Returns a message with a header; the first ``codes`` bytes are compressed if that helps."""
    content, compressed = message.numpy(), b""
    if codes:
        # Huffman coding only: the codes' frequencies are uneven, but repeated sequences are rare.
        coder = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
        compressed = coder.compress(content[:codes].data) + coder.flush()
    if not codes or len(compressed) >= codes:
        compressed, codes = b"", 0
    packed = torch.empty(_HEADER + len(compressed) + len(content) - codes, dtype=torch.uint8)
    buffer = packed.numpy()
    buffer[:_HEADER].view(np.int64)[0] = len(compressed)
    buffer[_HEADER : _HEADER + len(compressed)] = np.frombuffer(compressed, np.uint8)
    buffer[_HEADER + len(compressed) :] = content[codes:]
    return packed


def unpack(packed: Tensor, codes: int, message: Tensor) -> None:
    """Unpacks a message of :func:`pack` of which ``codes`` bytes are compressible.

    Raises:
        RuntimeError: It is no such message.
    """
    buffer, content = packed.numpy(), message.numpy()
    size = int(buffer[:_HEADER].view(np.int64)[0])
    if not size:
        content[:] = buffer[_HEADER : _HEADER + len(content)]
        return
    try:
        # at most one byte more than expected, however much the message would expand to
        coder = zlib.decompressobj(-15)
        plain = coder.decompress(buffer[_HEADER : _HEADER + size].data, codes + 1)
    except zlib.error as error:
        raise RuntimeError(f"a rank's message cannot be read: {error}") from None
    if len(plain) != codes:
        raise RuntimeError(f"a rank's message holds {len(plain)} bytes of codes, not {codes}")
    content[:codes] = np.frombuffer(plain, np.uint8)
    content[codes:] = buffer[_HEADER + size :][: len(content) - codes]
