"""What ranks tell each other, apart from gradients. A world of one needs no process group.

Where ranks may be lost while the others train on, each operation is an event that all ranks count
(``elastic/recovery.py``): one that fails is done again by those that are left, or they take
what one of them had got of it.
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
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.spec import errors
from paceline.spec.errors import JobError, PacelineError
from paceline.spec.schema import InvalidValue, Schema
from paceline.train.elastic import waits
from paceline.train.reduce import small_messages
from paceline.train.world import World

T = TypeVar("T")

FIRST = 512  # bytes of the message that says how long a text is, and begins it
_LENGTH = 8  # of them
_PIECE = 1 << 20  # bytes of a message of a chain, at most
_MANY = 64  # of them: the last rank has all when the first could, and a few pieces later
_UNDER_WAY = 4  # messages
_LARGEST = 1 << 28  # bytes of a message that is sent at once
_LONGEST = 1 << 28  # bytes of a text
TENSOR_TYPE = r"bool|bfloat16|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)"


class Mender(Protocol):
    """What makes good that a rank is lost in the middle of an operation of all ranks."""

    def event(self, act: Callable[[], T]) -> T:
        """What ``act`` gives; it is done again in a new group when a rank is lost."""

    @property
    def stale(self) -> bool:
        """There is a new group, and not everything has begun anew in it."""

    @property
    def able(self) -> bool:
        """A rank that is lost now is made good."""

    def watched(self) -> AbstractContextManager[None]:
        """Within it a group is made whose collectives are to end when a rank is lost."""

    def patient(self, longest: timedelta) -> AbstractContextManager[None]:
        """Within it an operation may wait so long for a rank that comes late."""


@dataclass(slots=True)
class Comms:
    """Collectives that every rank must call in the same order.

    Attributes:
        world: Place of this process; another one when ranks are lost or join.
        device: Device whose tensors the backend moves.
        group: Process group; ``None`` is that of the whole job.
        mixed: The ranks compute on different kinds of devices; they talk by their CPUs then, and
            ``device`` is that.
        mender: ``None`` where a lost rank is the end of the others.
        joining: This process is not with the others yet: its operations give what theirs gave.
        slot: The number by which people know this rank; ``None``: its rank. Ranks of a group are
            counted anew when one is lost, and the numbers in logs and messages stay.
        met: Seconds for which this rank stood in these operations so far.
    """

    world: World
    device: torch.device
    group: dist.ProcessGroup | None = None
    mixed: bool = False
    mender: Mender | None = None
    joining: bool = False
    slot: int | None = None
    met: float = 0.0
    _stands: bool = False

    @property
    def called(self) -> str:
        """This rank for people: ``rank 1 on n2``."""
        number = self.world.rank if self.slot is None else self.slot
        return f"rank {number} on {self.world.host}"

    @property
    def alone(self) -> bool:
        return self.world.size == 1

    @property
    def stale(self) -> bool:
        """There is a new group, in which groups and buckets have still to be made anew."""
        return self.mender is not None and self.mender.stale

    def new_group(self, **named: Any) -> dist.ProcessGroup:
        """A further group of all ranks; the arguments are torch's. A collective.

        Where a rank is lost meanwhile it is the job's new group itself: what the further one is for
        will be made anew.
        """
        made: list[dist.ProcessGroup] = []

        def make() -> None:
            made.clear()
            if not self.stale:
                with nullcontext() if self.mender is None else self.mender.watched():
                    made.append(dist.new_group(**named))

        self.meet(make)
        return made[0] if made and not self.stale else dist.distributed_c10d._get_default_group()

    def event(self, act: Callable[[], T]) -> T:
        """An operation of all ranks that gives each of them the same, or nothing.

        Args:
            act: Talks to the other ranks, and can be called again. No rank is through with it
                before every rank has come to it.
        """
        with self._standing():
            return act() if self.mender is None else self.mender.event(act)

    @contextmanager
    def _standing(self) -> Iterator[None]:
        """Counts the time within it, once."""
        if self._stands:
            yield
            return
        self._stands, began = True, time.perf_counter()
        try:
            yield
        finally:
            self._stands, self.met = False, self.met + time.perf_counter() - began

    @contextmanager
    def told_elsewhere(self) -> Iterator[None]:
        """What is done within it does not count for :attr:`met`: its time is told as another."""
        met = self.met
        try:
            yield
        finally:
            self.met = met

    def meet(self, act: Callable[[], None]) -> None:
        """Such an operation through which a rank may be before others have come to it."""

        def met() -> None:
            act()
            self.come()

        self.event(act if self.mender is None else met)

    def come(self) -> None:
        """As a part of an operation: returns when every rank has come to it.

        Without a mender nobody counts operations, and nothing is waited for.
        """
        if self.mender is not None:
            self._rows(torch.zeros(1))

    def sum(self, vector: Tensor) -> Tensor:
        """The element-wise sum over all ranks, in place; the same bits on every rank."""
        if self.mender is None:
            return self.event(lambda: self._sum(vector))
        return vector.copy_(self.event(lambda: self._sum(vector.clone())))

    def _sum(self, vector: Tensor) -> Tensor:
        if self.alone:
            return vector
        summed = vector.to(self.device) if self.mixed else vector
        if small_messages.fits(summed, self.world.size, self.group):
            small_messages.all_reduce(summed, self.world.size, self.group)
            return vector if summed is vector else vector.copy_(summed)
        waits.wait(dist.all_reduce(summed, group=self.group, async_op=True), summed)
        return vector if summed is vector else vector.copy_(summed)

    def most(self, vector: Tensor) -> list[float]:
        """The element-wise maximum over all ranks."""
        return self.event(lambda: self._most(vector))

    def _most(self, vector: Tensor) -> list[float]:
        if self.alone:
            return [float(one) for one in vector]
        mine = vector.to(self.device, copy=True)
        if small_messages.fits(mine, self.world.size, self.group):
            return [
                float(one)
                for one in small_messages.all_gather(mine, self.world.size, self.group).amax(0)
            ]
        most = dist.ReduceOp.MAX
        waits.wait(dist.all_reduce(mine, most, group=self.group, async_op=True), mine)
        return [float(one) for one in mine.cpu()]

    def rows(self, vector: Tensor) -> Tensor:
        """Every rank's vector, on the CPU, shape ``[ranks, n]``."""
        return self.event(lambda: self._rows(vector))

    def _rows(self, vector: Tensor) -> Tensor:
        if self.alone:
            return vector.cpu()[None]
        mine = vector.to(self.device)
        if small_messages.fits(mine, self.world.size, self.group):
            return small_messages.all_gather(mine, self.world.size, self.group)
        all_rows = [torch.empty_like(mine) for _ in range(self.world.size)]
        waits.wait(dist.all_gather(all_rows, mine, group=self.group, async_op=True), mine)
        return torch.stack(all_rows).cpu()

    def texts(self, text: str) -> list[str]:
        """Every rank's text, in rank order: torch's ``all_gather_object`` without its pickle."""
        return self.event(lambda: self._texts(text))

    def _texts(self, text: str) -> list[str]:
        content = text.encode()
        firsts = self._rows(_first_of(content))
        texts = [_length_and_first(row) for row in firsts]
        more = max(length - len(first) for length, first in texts)
        if not more:  # nearly always: that saves a round trip
            return [first.decode(errors="replace") for _, first in texts]
        rest = torch.zeros(more, dtype=torch.uint8)
        content = content[FIRST - _LENGTH :]
        rest[: len(content)] = _bytes(content)
        return [
            (first + bytes(row[: length - len(first)].tolist())).decode(errors="replace")
            for (length, first), row in zip(texts, self._rows(rest), strict=True)
        ]

    def spread(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Gives every rank the content that these tensors have on one rank, in place.

        Over gloo much goes along a chain, piece by piece: each rank passes on what it has while
        the next piece comes, so all is there about when it would be on one other rank, and crosses
        each host's card once where the ranks of a host are neighbours. gloo's own broadcast is a
        tree: its root sends everything several times.

        Args:
            tensors: Of the same shapes and types on every rank, anywhere.
            source: The rank whose content it is.
        """
        filled = [one.detach() for one in tensors if one.numel()]
        if self.mender is None or not filled:
            self.event(lambda: self._spread(filled, source))
            return
        has, gives = 0, int(self.world.rank == source)

        def act() -> None:
            """From a rank that has all, else from the source, else from who is first now."""
            nonlocal has
            known = self._rows(torch.tensor([2 * has + gives]))[:, 0]
            self._spread(filled, int(known.argmax()))
            has = 1

        self.meet(act)

    def _spread(self, filled: Sequence[Tensor], source: int) -> None:
        if self.alone or not filled:
            return
        # As bytes: backends do not know every type.
        flat = [one.contiguous().reshape(-1).view(torch.uint8) for one in filled]
        if self.mixed:
            flat = [one.to(self.device) for one in flat]
        size = sum(map(len, flat))
        if size > _PIECE and _over_gloo(self):
            pieces = _pieces(flat, max(_PIECE // 8, min(_PIECE, size // _MANY)))
            waits.wait_in_thread(lambda: self._along(pieces, source))
        else:
            self._at_once(_pieces(flat, _LARGEST), source)
        if self.world.rank == source:
            return
        for one, raw in zip(filled, flat, strict=True):
            if raw.data_ptr() != one.data_ptr():  # it had to be copied: channels last
                one.copy_(raw.view(one.dtype).reshape(one.shape))

    def _at_once(self, pieces: Sequence[list[Tensor]], source: int) -> None:
        """Each piece by the backend's own broadcast."""
        for parts in pieces:
            message = torch.cat(parts).to(self.device)
            work = dist.broadcast(message, source, group=self.group, async_op=True)
            waits.wait(work, message)
            if self.world.rank != source:
                _unpack(message, parts)

    def _along(self, pieces: Sequence[list[Tensor]], source: int) -> None:
        """The pieces along a chain of all ranks that begins at the source."""
        rank, size = self.world.rank, self.world.size
        place = (rank - source) % size
        coming: deque[tuple[Tensor, list[Tensor], dist.Work, int]] = deque()
        going: deque[tuple[Tensor, dist.Work]] = deque()
        # A tag of its own for each message: nothing depends on how gloo matches several of one tag.
        ahead, tags = iter(pieces), itertools.count(1)

        def expect(count: int) -> None:
            for parts in itertools.islice(ahead, count):
                length = sum(map(len, parts))
                message = torch.empty(length, dtype=torch.uint8, device=self.device)
                tag = next(tags)
                work = dist.irecv(message, (rank - 1) % size, group=self.group, tag=tag)
                coming.append((message, parts, _begun(work), tag))

        def pass_on(message: Tensor, tag: int) -> None:
            if place == size - 1:
                return
            work = dist.isend(message, (rank + 1) % size, group=self.group, tag=tag)
            going.append((message, _begun(work)))
            if len(going) > _UNDER_WAY:
                going.popleft()[1].wait()

        if place == 0:
            for tag, parts in enumerate(pieces, 1):
                pass_on(torch.cat(parts).to(self.device), tag)
        else:
            expect(_UNDER_WAY)
        while coming:
            message, parts, work, tag = coming.popleft()
            work.wait()
            expect(1)
            pass_on(message, tag)
            _unpack(message, parts)
        for _, work in going:
            work.wait()

    def text_of(self, source: int, text: str, usual: int = FIRST) -> str:
        """One rank's text, on every rank.

        Args:
            source: Whose.
            text: That of this rank; only the source's counts.
            usual: Bytes up to which it travels at once.
        """
        content = text.encode()
        first = _first_of(content, usual)
        self.spread([first], source)
        length, said = _length_and_first(first)
        if length == len(said):
            return said.decode()
        rest = torch.empty(length - len(said), dtype=torch.uint8)
        if self.world.rank == source:
            rest.copy_(_bytes(content[len(said) :]))
        self.spread([rest], source)
        return (said + bytes(rest.tolist())).decode()

    def barrier(self) -> None:
        """Waits until every rank is here."""
        self.rows(torch.zeros(1))

    def agree(self, what: str, value: str) -> None:
        """Raises on every rank when ``value`` is not the same everywhere.

        Raises:
            JobError: Names a rank that differs from rank 0, and both values.
        """
        values = self.texts(f"{self.called}\0{value}")
        first = values[0].split("\0", 1)
        for who, other in (one.split("\0", 1) for one in values):
            if other != first[1]:
                raise JobError(
                    f"{what} must be the same on every rank",
                    found=f"{first[0]}: {first[1]}\n{who}: {other}",
                    remedy="give every node the same files and the same options",
                )

    def together(self, act: Callable[[], T]) -> T:
        """Acts on every rank; when one fails with a handled error, every rank raises it.

        So no rank waits for another that has already given up.
        """
        result: T | None = None
        problem = ""
        try:
            result = act()
        except PacelineError as error:
            problem = self._told(error)
        for rank, text in enumerate(self.texts(problem)):
            if text:
                raise _rebuilt(rank, *text.split("\0"))
        return result  # type: ignore[return-value]

    def by_first(self, act: Callable[[], str]) -> str:
        """Has rank 0 act while the others wait, and gives its word to all.

        Where it is lost meanwhile, whoever is rank 0 then acts. A handled error of it is raised on
        every rank.

        Args:
            act: Can be begun again by another rank, whatever the lost one has left.
        """
        while True:
            said = ""
            if self.world.rank == 0:
                try:
                    said = f"did\0{act()}"
                except PacelineError as error:
                    said = f"failed\0{self._told(error)}"
            # Who has become rank 0 in this operation has not acted, and says nothing: to all alike.
            outcome, _, word = self.texts(said)[0].partition("\0")
            if outcome == "failed":
                raise _rebuilt(0, *word.split("\0"))
            if outcome:
                return word

    def _told(self, error: PacelineError) -> str:
        kind = type(error).__name__
        return "\0".join((kind, error.message, error.found, error.remedy, self.called))


def _bytes(content: bytes) -> Tensor:
    if not content:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _first_of(content: bytes, size: int = FIRST) -> Tensor:
    """A message of this size: how many bytes there are, and as many of them as fit."""
    said = len(content).to_bytes(_LENGTH, "little") + content[: size - _LENGTH]
    return _bytes(said.ljust(size, b"\0"))


def _length_and_first(message: Tensor) -> tuple[int, bytes]:
    said = bytes(message.tolist())
    length = int.from_bytes(said[:_LENGTH], "little")
    if length > _LONGEST:
        raise JobError(f"a rank announced a text of {length} bytes: more than any rank sends")
    return length, said[_LENGTH : _LENGTH + length]


def checked(texts: Sequence[str], shape: Schema) -> list[Any]:
    """The JSON values that ranks have sent, by rank; ``None`` for an empty text.

    JobError names the first rank whose value has not this shape.
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


def _over_gloo(comms: Comms) -> bool:
    return comms.device.type == "cpu" and "gloo" in dist.get_backend(comms.group)


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None  # this rank is in the group
    return work


def _pieces(flat: Sequence[Tensor], size: int) -> list[list[Tensor]]:
    """Messages of about the same size: parts of one tensor, or several small ones."""
    pieces: list[list[Tensor]] = []
    room = 0
    for one in flat:
        start = 0
        while start < len(one):
            if not room:
                pieces.append([])
                room = size
            part = one[start : start + room]
            pieces[-1].append(part)
            start, room = start + len(part), room - len(part)
    return pieces


def _unpack(message: Tensor, parts: list[Tensor]) -> None:
    for part, came in zip(parts, torch.split(message, [len(one) for one in parts]), strict=True):
        part.copy_(came)


def _rebuilt(
    rank: int, kind: str, message: str, found: str, remedy: str, where: str
) -> PacelineError:
    error: type[PacelineError] = getattr(errors, kind, JobError)
    rebuilt = error(message, found=f"{found}\n({where})" if found else where, remedy=remedy)
    rebuilt.origin_rank = rank
    return rebuilt
