"""Collectives among all ranks for everything but gradients. One rank needs no process group.

If ranks may be lost while the others train on, each operation is an event that all ranks count
(``elastic/recovery.py``). The remaining ranks repeat an operation that fails, or take its result
from a rank that has finished it.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.spec import errors
from paceline.spec.errors import JobError, PacelineError
from paceline.spec.schema import InvalidValue, Schema
from paceline.train.elastic import waits
from paceline.train.reduce import small_messages
from paceline.train.world import World

if TYPE_CHECKING:
    from paceline.train.elastic.job_group import JobGroup

T = TypeVar("T")

FIRST_MESSAGE_BYTES = 512
"""Size of the first message of a text: its length, and as many of its bytes as fit."""
_LENGTH_BYTES = 8
_MAX_PIECE_BYTES = 1 << 20  # of a message in a chain
_MIN_PIECES = 64  # in a chain: the last rank ends only a few pieces after the first
_MAX_IN_FLIGHT = 4  # messages of a chain
_MAX_MESSAGE_BYTES = 1 << 28  # of a broadcast by the backend
_MAX_TEXT_BYTES = 1 << 28
TENSOR_TYPE = r"bool|bfloat16|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)"


class FaultHandler(Protocol):
    """What operations use of the handler of lost ranks (``elastic.recovery.Recovery``)."""

    able: bool
    group: JobGroup

    @property
    def stale(self) -> bool: ...
    def event(self, act: Callable[[], T]) -> T: ...
    def watched(self) -> AbstractContextManager[None]: ...
    def patient(self, timeout: timedelta) -> AbstractContextManager[None]: ...


class StartRecord(Protocol):
    """What operations use of the results at the start (``elastic.newcomer.Recording``, ``Replay``).

    Attributes:
        is_replay: Whether the results are those of other ranks.
        obstacle: Why no process can join; empty as long as one can.
    """

    is_replay: bool
    obstacle: str

    def event(self, act: Callable[[], T]) -> T: ...
    def mark(self, name: str) -> None: ...
    def paused(self) -> AbstractContextManager[None]: ...
    def publish(self, store: Any, **info: Any) -> None: ...


@dataclass(slots=True)
class Comms:
    """Collectives that every rank must call in the same order.

    Attributes:
        world: Place of this process; changes when ranks are lost or join.
        device: Device whose tensors the backend moves.
        group: Group of these operations; ``None`` is the default group. If a device runs the
            default group's collectives and ranks may be lost, this is another one, over gloo.
        mixed: The ranks compute on different kinds of devices; ``device`` is the CPU then.
        fault_handler: Handles lost ranks; ``None``: a lost rank ends the others.
        start: Records the results of operations until the first step, or replays recorded ones.
        joining: This process has not joined the others yet: operations return recorded results.
        slot: Number of this rank in logs and messages; ``None``: its rank. It stays when ranks are
            renumbered after a loss.
        waited_s: Seconds that this rank has spent in these operations so far.
    """

    world: World
    device: torch.device
    group: dist.ProcessGroup | None = None
    mixed: bool = False
    fault_handler: FaultHandler | None = None
    start: StartRecord | None = None
    joining: bool = False
    slot: int | None = None
    waited_s: float = 0.0
    _is_counting: bool = False

    @property
    def rank_name(self) -> str:
        """Name of this rank for users: ``rank 1 on n2``."""
        number = self.world.rank if self.slot is None else self.slot
        return f"rank {number} on {self.world.host}"

    @property
    def is_alone(self) -> bool:
        return self.world.size == 1

    @property
    def has_device_group(self) -> bool:
        """Whether a device runs the default group's collectives, and ranks may be lost."""
        return self.group is not None

    @property
    def message_device(self) -> torch.device:
        """Device whose tensors these operations move."""
        return torch.device("cpu") if self.has_device_group else self.device

    @property
    def stale(self) -> bool:
        """Whether groups and buckets must still be made again in a new group."""
        return self._active_handler is not None and self._active_handler.stale

    @property
    def is_recoverable(self) -> bool:
        """Whether a rank that is lost now can be replaced."""
        return self._active_handler is not None and self._active_handler.able

    @property
    def _active_handler(self) -> FaultHandler | None:
        """The fault handler, unless this process replays how the others started."""
        is_replaying = self.start is not None and self.start.is_replay
        return None if is_replaying else self.fault_handler

    def new_group(self, **options: Any) -> dist.ProcessGroup:
        """Makes another group of all ranks; arguments as of ``dist.new_group``. A collective.

        If a rank is lost meanwhile, it returns the job's new group: everything that uses the other
        group will be renewed.
        """
        groups: list[dist.ProcessGroup] = []

        def make() -> None:
            groups.clear()
            if not self.stale:
                with nullcontext() if self.fault_handler is None else self.fault_handler.watched():
                    groups.append(dist.new_group(**options))

        self.collective(make)
        if not groups or self.stale:
            return dist.distributed_c10d._get_default_group()
        return groups[0]

    def event(self, act: Callable[[], T]) -> T:
        """Runs an operation that returns the same on each rank, or nothing.

        Args:
            act: Communicates with the other ranks, and can be repeated. No rank finishes it before
                every rank has started it.
        """
        with self._count_time():
            if self.fault_handler is None:
                return act()
            return (self.start or self.fault_handler).event(act)

    @contextmanager
    def _count_time(self) -> Iterator[None]:
        if self._is_counting:
            yield
            return
        self._is_counting, start = True, time.perf_counter()
        try:
            yield
        finally:
            self._is_counting, self.waited_s = False, self.waited_s + time.perf_counter() - start

    @contextmanager
    def excluded_from_waited(self) -> Iterator[None]:
        """Context whose time is not counted in :attr:`waited_s`."""
        waited_s = self.waited_s
        try:
            yield
        finally:
            self.waited_s = waited_s

    def collective(self, act: Callable[[], None]) -> None:
        """Runs a collective ``act`` that a rank may finish before others have started it."""

        def act_and_wait() -> None:
            act()
            self._wait_for_device()  # else others count what may still be aborted here
            self.wait_for_all()

        self.event(act if self.fault_handler is None else act_and_wait)

    def _wait_for_device(self) -> None:
        if self.has_device_group and self.fault_handler is not None:
            self.fault_handler.group.wait_for_device()

    def wait_for_all(self) -> None:
        """Within an operation, waits until every rank has reached it.

        Without a fault handler, operations are not counted and nothing is waited for.
        """
        if self.fault_handler is not None:
            self._rows(torch.zeros(1))

    def sum(self, vector: Tensor) -> Tensor:
        """Sums over all ranks element by element, in place; the same bits on every rank."""
        if self.fault_handler is None:
            return self.event(lambda: self._sum(vector))
        return vector.copy_(self.event(lambda: self._sum(vector.clone())))

    def _sum(self, vector: Tensor) -> Tensor:
        if self.is_alone:
            return vector
        is_moved = self.mixed or self.has_device_group
        summed = vector.to(self.message_device) if is_moved else vector
        if small_messages.fits(summed, self.world.size, self.group):
            small_messages.all_reduce(summed, self.world.size, self.group)
        else:
            waits.wait(dist.all_reduce(summed, group=self.group, async_op=True), summed)
        return vector if summed is vector else vector.copy_(summed)

    def max(self, vector: Tensor) -> list[float]:
        return self.event(lambda: self._max(vector))

    def _max(self, vector: Tensor) -> list[float]:
        if self.is_alone:
            return vector.cpu().double().tolist()
        largest = vector.to(self.message_device, copy=True)
        if small_messages.fits(largest, self.world.size, self.group):
            largest = small_messages.all_gather(largest, self.world.size, self.group).amax(0)
        else:
            operation = dist.ReduceOp.MAX
            work = dist.all_reduce(largest, operation, group=self.group, async_op=True)
            waits.wait(work, largest)
        return largest.cpu().double().tolist()

    def rows(self, vector: Tensor) -> Tensor:
        """Returns every rank's vector, on the CPU, shape ``[ranks, n]``."""
        return self.event(lambda: self._rows(vector))

    def _rows(self, vector: Tensor) -> Tensor:
        if self.is_alone:
            return vector.cpu()[None]
        local = vector.to(self.message_device)
        if small_messages.fits(local, self.world.size, self.group):
            return small_messages.all_gather(local, self.world.size, self.group)
        gathered = [torch.empty_like(local) for _ in range(self.world.size)]
        waits.wait(dist.all_gather(gathered, local, group=self.group, async_op=True), local)
        return torch.stack(gathered).cpu()

    def texts(self, text: str) -> list[str]:
        """Returns every rank's text in rank order: ``all_gather_object`` without pickle."""
        return self.event(lambda: self._texts(text))

    def _texts(self, text: str) -> list[str]:
        content = text.encode()
        firsts = self._rows(_first_message(content))
        texts = [_parse_first_message(row) for row in firsts]
        num_missing = max(length - len(first) for length, first in texts)
        if not num_missing:  # nearly always: that saves a round trip
            return [first.decode(errors="replace") for _, first in texts]
        tail = torch.zeros(num_missing, dtype=torch.uint8)
        content = content[FIRST_MESSAGE_BYTES - _LENGTH_BYTES :]
        tail[: len(content)] = _bytes(content)
        return [
            (first + bytes(row[: length - len(first)].tolist())).decode(errors="replace")
            for (length, first), row in zip(texts, self._rows(tail), strict=True)
        ]

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Gives every rank the content of these tensors on one rank, in place.

        Over gloo, large contents go along a chain in pieces: each rank passes a piece on while it
        receives the next. So all ranks finish about when one other rank would, and each host's
        network card carries the content once if the ranks of a host are neighbours. gloo's own
        broadcast is a tree, whose root sends everything several times.

        Args:
            tensors: Tensors of the same shapes and types on every rank, on any device.
        """
        filled = [tensor.detach() for tensor in tensors if tensor.numel()]
        if self.fault_handler is None or not filled:
            self.event(lambda: self._broadcast_flat(filled, source))
            return
        has_content, is_source = 0, int(self.world.rank == source)

        def act() -> None:
            """Sends from a rank that has all, else from the source, else from rank 0."""
            nonlocal has_content
            flags = self._rows(torch.tensor([2 * has_content + is_source]))[:, 0]
            self._broadcast_flat(filled, int(flags.argmax()))
            has_content = 1

        self.collective(act)

    def _broadcast_flat(self, filled: Sequence[Tensor], source: int) -> None:
        if self.is_alone or not filled:
            return
        # As bytes: backends do not know every type.
        flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in filled]
        size = sum(map(len, flat))
        on_device = all(tensor.device == self.device for tensor in flat)
        if self.has_device_group and on_device and size > _MAX_PIECE_BYTES and self.fault_handler:
            self._broadcast(_pieces(flat, _MAX_MESSAGE_BYTES), source, None, self.device)
        else:
            if self.mixed or self.has_device_group:
                flat = [tensor.to(self.message_device) for tensor in flat]
            self._broadcast_messages(flat, source)
        if self.world.rank == source:
            return
        for tensor, raw in zip(filled, flat, strict=True):
            if raw.data_ptr() != tensor.data_ptr():  # it had to be copied: channels last
                tensor.copy_(raw.view(tensor.dtype).reshape(tensor.shape))

    def _broadcast_messages(self, flat: Sequence[Tensor], source: int) -> None:
        size = sum(map(len, flat))
        if size > _MAX_PIECE_BYTES and _uses_gloo(self):
            piece_bytes = max(_MAX_PIECE_BYTES // 8, min(_MAX_PIECE_BYTES, size // _MIN_PIECES))
            pieces = _pieces(flat, piece_bytes)
            waits.wait_in_thread(lambda: self._send_along_chain(pieces, source))
        else:
            pieces = _pieces(flat, _MAX_MESSAGE_BYTES)
            self._broadcast(pieces, source, self.group, self.message_device)

    def _broadcast(
        self,
        pieces: Sequence[list[Tensor]],
        source: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        for parts in pieces:
            message = torch.cat(parts).to(device)
            work = dist.broadcast(message, source, group=group, async_op=True)
            waits.wait(work, message)
            if group is None:  # the default group
                self._wait_for_device()  # what an aborted broadcast leaves must reach no tensor
            if self.world.rank != source:
                _unpack(message, parts)

    def _send_along_chain(self, pieces: Sequence[list[Tensor]], source: int) -> None:
        rank, size = self.world.rank, self.world.size
        place = (rank - source) % size
        receiving: deque[tuple[Tensor, list[Tensor], dist.Work, int]] = deque()
        sending: deque[tuple[Tensor, dist.Work]] = deque()
        # A tag of its own for each message: nothing depends on how gloo matches several of one tag.
        unreceived, tags = iter(pieces), itertools.count(1)

        def expect(count: int) -> None:
            for parts in itertools.islice(unreceived, count):
                length = sum(map(len, parts))
                message = torch.empty(length, dtype=torch.uint8, device=self.message_device)
                tag = next(tags)
                work = dist.irecv(message, (rank - 1) % size, group=self.group, tag=tag)
                assert work is not None  # this rank is in the group
                receiving.append((message, parts, work, tag))

        def pass_on(message: Tensor, tag: int) -> None:
            if place == size - 1:
                return
            work = dist.isend(message, (rank + 1) % size, group=self.group, tag=tag)
            assert work is not None
            sending.append((message, work))
            if len(sending) > _MAX_IN_FLIGHT:
                sending.popleft()[1].wait()

        if place == 0:
            for tag, parts in enumerate(pieces, 1):
                pass_on(torch.cat(parts).to(self.message_device), tag)
        else:
            expect(_MAX_IN_FLIGHT)
        while receiving:
            message, parts, work, tag = receiving.popleft()
            work.wait()
            expect(1)
            pass_on(message, tag)
            _unpack(message, parts)
        for _, work in sending:
            work.wait()

    def text_of(self, source: int, text: str, first_bytes: int = FIRST_MESSAGE_BYTES) -> str:
        """Returns one rank's text on every rank.

        Args:
            text: This rank's text; used on the source only.
            first_bytes: Size of the first message; a longer text needs another one.
        """
        content = text.encode()
        first = _first_message(content, first_bytes)
        self.broadcast([first], source)
        length, start = _parse_first_message(first)
        if length == len(start):
            return start.decode()
        tail = torch.empty(length - len(start), dtype=torch.uint8)
        if self.world.rank == source:
            tail.copy_(_bytes(content[len(start) :]))
        self.broadcast([tail], source)
        return (start + bytes(tail.tolist())).decode()

    def barrier(self) -> None:
        self.rows(torch.zeros(1))

    def agree(self, subject: str, value: str, remedy: str = "") -> None:
        """Checks that ``value`` is the same on every rank.

        Raises:
            JobError: Names a rank that differs from rank 0, and both values.
        """
        values = self.texts(f"{self.rank_name}\0{value}")
        reference = values[0].split("\0", 1)
        for rank_name, rank_value in (text.split("\0", 1) for text in values):
            if rank_value != reference[1]:
                raise JobError(
                    f"{subject} must be the same on every rank",
                    found=f"{reference[0]}: {reference[1]}\n{rank_name}: {rank_value}",
                    remedy=remedy or "give every node the same files and the same options",
                )

    def together(self, act: Callable[[], T]) -> T:
        """Calls ``act`` on every rank; a :class:`PacelineError` of one is raised on every rank.

        So no rank waits for another that has already failed.
        """
        result: T | None = None
        problem = ""
        try:
            result = act()
        except PacelineError as error:
            problem = self._encode_error(error)
        for rank, text in enumerate(self.texts(problem)):
            if text:
                raise _rebuild_error(rank, *text.split("\0"))
        return result  # type: ignore[return-value]

    def by_first(self, act: Callable[[], str]) -> str:
        """Calls ``act`` on rank 0 and returns its result on every rank.

        If rank 0 is lost meanwhile, the new rank 0 calls it. A :class:`PacelineError` is raised on
        every rank.

        Args:
            act: Can be called by another rank after the lost one has done a part of it.
        """
        while True:
            message = ""
            if self.world.rank == 0:
                try:
                    message = f"did\0{act()}"
                except PacelineError as error:
                    message = f"failed\0{self._encode_error(error)}"
            # A rank that became rank 0 in this operation has not acted yet, and sent an empty text.
            outcome, _, content = self.texts(message)[0].partition("\0")
            if outcome == "failed":
                raise _rebuild_error(0, *content.split("\0"))
            if outcome:
                return content

    def _encode_error(self, error: PacelineError) -> str:
        kind = type(error).__name__
        return "\0".join((kind, error.message, error.found, error.remedy, self.rank_name))


def _bytes(content: bytes) -> Tensor:
    if not content:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _first_message(content: bytes, size: int = FIRST_MESSAGE_BYTES) -> Tensor:
    """Returns a message of this size: the length, and as many bytes as fit."""
    message = len(content).to_bytes(_LENGTH_BYTES, "little") + content[: size - _LENGTH_BYTES]
    return _bytes(message.ljust(size, b"\0"))


def _parse_first_message(message: Tensor) -> tuple[int, bytes]:
    content = bytes(message.tolist())
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    if length > _MAX_TEXT_BYTES:
        raise JobError(f"a rank announced a text of {length} bytes: more than any rank sends")
    return length, content[_LENGTH_BYTES : _LENGTH_BYTES + length]


def parse_texts(texts: Sequence[str], shape: Schema) -> list[Any]:
    """Returns the JSON values that ranks have sent, by rank; ``None`` for an empty text.

    Raises:
        JobError: Names the first rank whose value does not have this shape.
    """
    values = []
    for rank, text in enumerate(texts):
        try:
            value = json.loads(text) if text else None
            shape(value, "its message")
        except (ValueError, RecursionError, InvalidValue) as problem:
            raise JobError(
                f"rank {rank} sent what no rank of this program sends",
                found=f"{problem}"[:300],
                remedy="give every node the same files",
            ) from None
        values.append(value)
    return values


def _uses_gloo(comms: Comms) -> bool:
    return comms.message_device.type == "cpu" and "gloo" in dist.get_backend(comms.group)


def _pieces(flat: Sequence[Tensor], size: int) -> list[list[Tensor]]:
    pieces: list[list[Tensor]] = []
    free_bytes = 0
    for tensor in flat:
        start = 0
        while start < len(tensor):
            if not free_bytes:
                pieces.append([])
                free_bytes = size
            part = tensor[start : start + free_bytes]
            pieces[-1].append(part)
            start, free_bytes = start + len(part), free_bytes - len(part)
    return pieces


def _unpack(message: Tensor, parts: list[Tensor]) -> None:
    contents = torch.split(message, [len(part) for part in parts])
    for part, content in zip(parts, contents, strict=True):
        part.copy_(content)


def _rebuild_error(
    rank: int, kind: str, message: str, found: str, remedy: str, location: str
) -> PacelineError:
    error: type[PacelineError] = getattr(errors, kind, JobError)
    rebuilt = error(message, found=f"{found}\n({location})" if found else location, remedy=remedy)
    rebuilt.origin_rank = rank
    return rebuilt
