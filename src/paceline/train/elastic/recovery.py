"""Recovery in place: what a rank does when another one is lost.

The ranks that are left keep their processes and all that is in their memory. They leave the old
process group, make a new one without the lost rank, settle who has come how far, and train on with
the same global batch, newly divided. Nothing is read from a disk.

**Events.** All that ranks do together is a sequence of events, the same on all of them: each
operation of :class:`paceline.train.comms.Comms`, and each whole exchange of gradients. Nobody is
through with one before everybody has come to it, so two ranks are never more than one event apart.
Each rank counts those that it has finished and keeps the result of the last. When they meet in a
new group, that number settles everything:

* An operation that somebody has finished: the others take its result. Nobody has: it is done again.
* An exchange that somebody has finished, so that its optimizer has stepped: the others take the
  models' state from there. Nobody has: the batch is void. Its gradients are dropped, and the loader
  gives the same samples again, divided among those who are there.
* A step that exchanges nothing (``local``) is no event: each rank has taken it, or takes it yet.

No vote before each optimizer step is needed for that: it would cost every step a round trip, and
settles no more than the number does.

**What begins anew.** Ranks may be at different lines of the program when they meet, one event
apart. So what must change alike on all (shares, buckets, looks at the pace) changes where all of
them pass with the same events and steps behind them: before the loader gives a batch
(:meth:`Recovery.renew`), the first at which all come to where the one that is furthest will be.
Until then the group is new and everything else is as it was.

**Being freed.** A rank that waits for a dead one has an error as soon as the kernel resets its
connections; one that waits for somebody who waits, or is frozen, has none before the collective's
timeout, and gloo's own ``abort`` does nothing. So the launcher tells all of them, and a thread that
is always there shuts gloo's connections down (:class:`Gloo`), which frees the computing thread in
some milliseconds. gloo forgets what waits for the rest of a message, though; those waits are given
up (``elastic/waits.py``) as soon as gloo has closed what was cut and sleeps.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.constants import default_pg_timeout

from paceline.spec import jobenv
from paceline.spec.errors import JobError
from paceline.spec.failure import SECONDARY_ERROR, unreachable_peer
from paceline.spec.schema import integer, list_of, optional, regex, tuple_of
from paceline.train.comms import TENSOR_TYPE, Comms, checked
from paceline.train.elastic import gloo, waits
from paceline.train.elastic.training_state import NoTraining, TrainingState
from paceline.train.reduce import direct
from paceline.train.stop import wait_for_idle_workers
from paceline.train.world import World

T = TypeVar("T")

_FORMING = timedelta(seconds=20)  # for connections of a new group among ranks that are all there
_CALLING = timedelta(seconds=0.5)  # for one try to reach the store of a new group
_RESTING = 60.0  # seconds after which no thread of a group that was left has anything to do
_NO_CONNECTION = (7, 10)  # states of TCP: closed, which a new socket is, too, and listening
_OFTEN, _SELDOM, _RARELY = 0.001, 0.02, 0.5  # seconds between two looks whether all are there
_LOOKS = 3  # at gloo asleep, with all its connections closed: what waits now waits for nothing
_MANY_LOOKS = 20  # in more than a second; a connection that is not closed even then is not gloo's
_AT_LAST_S = 10.0  # after which no look is needed: a thread of gloo's may never sleep (gloo.py)
_QUIET_LOOKS, _QUIET_S = 10, 0.1  # seconds between looks, after which what is left is quieted
_STUCK_S = 3.0  # idle in a collective whose connections are cut; cutting frees in milliseconds
_IDLE = 0.03  # share of a CPU below which a process does not compute, on a busy machine neither


def _any(value: object, where: str) -> None:
    """What the operation gave, which its caller looks at."""


# of a tensor its shape and type, else the result itself
_RESULT = tuple_of(optional(list_of(integer(), 64)), regex(f"({TENSOR_TYPE})?", "a type"), _any)


class At(IntEnum):
    """What a rank was in when it learned that another is lost."""

    OPERATION = 0
    EXCHANGE = 1
    FORWARD = 2
    RENEWAL = 3
    DOOR = 4  # it joins the others


class Exchanged(IntEnum):
    """What became of an exchange of gradients."""

    DONE = 0  # on this rank: it has the mean
    TAKEN = 1  # the models are those of a rank that had stepped already
    VOID = 2  # nobody has the mean


@dataclass(frozen=True, slots=True)
class Word:
    """What the launcher says: who trains on.

    Attributes:
        generation: Number of the new group.
        members: Slot, host, local rank and local size of each rank, in rank order.
        address, port: Of the store by which they meet.
        planned: Nobody is lost: somebody joins between two steps.
        holds: Too few nodes are there to train: no batch is begun in this group.
        addresses: From which the job's hosts connect; empty: not known.
    """

    generation: int
    members: tuple[tuple[int, str, int, int], ...]
    address: str
    port: int
    planned: bool
    holds: bool = False
    addresses: str = ""

    @property
    def alone(self) -> bool:
        """Nobody says who trains on: the launcher is gone, and other ranks with it."""
        return not self.members

    def place(self, slot: int) -> World | None:
        """That of a slot; ``None`` where it is no member."""
        for rank, (one, host, local_rank, local_size) in enumerate(self.members):
            if one == slot:
                return World(rank, len(self.members), local_rank, local_size, host, True)
        return None


@dataclass(frozen=True, slots=True)
class Alone:
    """The agent is about to end this rank, and the launcher says nothing any more."""


@dataclass(frozen=True, slots=True)
class Save:
    """The launcher wants a checkpoint.

    Attributes:
        number: Of this wish, from 1.
    """

    number: int


def understood(line: str) -> Word | Save | Alone | str:
    """A line of the launcher: a word, or why there is none, or another wish.

    Raises:
        ValueError: It is neither.
    """
    said = json.loads(line)
    if not isinstance(said, Mapping):
        raise ValueError(line)
    if said.get("control") == "end":
        return str(said.get("why", "")) or "the launcher ends the job"
    if said.get("control") == "alone":
        return Alone()
    try:
        if said.get("control") == "save":
            return Save(int(said["number"]))
        members = tuple(
            (int(one["slot"]), str(one["host"]), int(one["local_rank"]), int(one["local_size"]))
            for one in said["members"]
        )
        store = said["store"]
        return Word(
            int(said["generation"]),
            members,
            str(store["address"]),
            int(store["port"]),
            bool(said["planned"]),
            bool(said.get("holds")),
            str(said.get("addresses", "")),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(line) from error


class Gloo:
    """gloo's connections: the sockets that appear while a group is made.

    They are gloo's own: ``shutdown`` on them gives its threads the end of the connection, and
    every collective that waits, or begins, an error; gloo closes them. The store's connection is
    cut, too, for whoever waits there, but nobody closes that one: a group that was left keeps it.

    While a group is made, a rank may also wait for a connection that a lost rank was to make, or
    try to make one again and again. So sockets are cut to the end of that, and whoever waits gets
    connections that end at once.

    A connection that gloo has not closed a second later it never will: that wakes its thread
    all the time, and is quieted (:func:`paceline.train.elastic.gloo.quieten`).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, str] = {}  # descriptors, with what they are
        self._ended: dict[int, str] = {}  # those that were cut
        self._of_stores: dict[int, str] = {}  # those to stores, also of groups that were left
        self._before: dict[int, str] | None = None  # while a group is made
        self._ranks = 0  # of that group

    @contextlib.contextmanager
    def watched(self, ranks: int) -> Iterator[None]:
        """Within it connections of a group of so many ranks are made."""
        with self._lock:
            self._before, self._ranks = _sockets(), ranks
        try:
            yield
        finally:
            with self._lock:
                new = self._new()
                for fd in new:
                    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:
                        direct.come_back_soon(one)
                self._known |= new
                self._before = None

    def _new(self) -> dict[int, str]:
        if self._before is None:
            return {}
        return {fd: what for fd, what in _sockets().items() if self._before.get(fd) != what}

    def store_met(self) -> None:
        """What was made so far is the connection to the store of the group."""
        with self._lock:
            self._of_stores |= self._new()

    def cut(self, *, former: bool = False) -> None:
        """Frees whoever waits in a collective, from another thread; may be called again.

        Args:
            former: Only what was there before the group that is being made.
        """
        direct.cut()  # none is made before a group is whole
        with self._lock:
            known = {**self._known, **({} if former else self._new())}
            shut = {fd: what for fd, what in known.items() if _shut(fd, what)}
            self._ended |= shut
            # Not of the group that is being made: gloo may still add to its epoll.
            if whole := dict(shut.items() & self._known.items()):
                threading.Thread(target=self._quieten, args=(whole,), daemon=True).start()
            self._known.clear()
            if self._before is not None and not former:
                made = threading.Thread(target=self._cut_on, args=(self._before,), daemon=True)
                made.start()

    def ended(self) -> bool:
        """Whether all that was cut is closed: nothing comes any more, and nothing goes."""
        with self._lock:
            now = _sockets().items()
            self._of_stores = dict(self._of_stores.items() & now)
            self._ended = dict((self._ended.items() & now) - self._of_stores.items())
            return self._before is None and not self._ended

    def _quieten(self, shut: dict[int, str]) -> None:
        """Lets gloo's thread sleep that is woken for good by one of these.

        Looks are counted, not seconds: where the process was stopped, gloo's thread has had its
        turn between them, too. What it closes gives an error to whoever waits.
        """
        for _ in range(_QUIET_LOOKS):
            time.sleep(_QUIET_S)
            with self._lock:
                shut = dict(shut.items() & _sockets().items() - self._of_stores.items())
            if not shut:
                return
        with self._lock:
            for fd, what in shut.items():
                if gloo.quieten(fd, what) and self._ended.get(fd) == what:
                    del self._ended[fd]

    def _cut_on(self, forming: dict[int, str]) -> None:
        """Cuts what the making of this group still begins, until it is over."""
        while True:
            time.sleep(_SELDOM)
            with self._lock:
                if self._before is not forming:
                    return
                new = self._new()
                for fd, what in new.items():
                    _shut(fd, what)
            for fd in new:
                _knock(fd, self._ranks)


def _knock(fd: int, ranks: int) -> None:
    """Where this is gloo's listening socket: gives each connection that is waited for, and ends it.

    A rank says at first by a number which connection it is.
    """
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:
        if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return
        for number in range(ranks):
            with socket.socket(one.family) as call:
                call.settimeout(_SELDOM * 10)
                call.connect(one.getsockname())
                call.sendall(struct.pack("=q", number))


def _sockets() -> dict[int, str]:
    """Descriptors of this process that are sockets, each with its inode."""
    found = {}
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            what = str(one.readlink())
            if what.startswith("socket:"):
                found[int(one.name)] = what
    return found


def _shut(fd: int, what: str) -> bool:
    """Ends this connection, if the number is still its own: gloo closes what has ended.

    Whether there was one.
    """
    with contextlib.suppress(OSError):
        held = os.dup(fd)  # from here on it stays what it is
        if f"socket:[{os.fstat(held).st_ino}]" != what:
            os.close(held)
            return False
        with socket.socket(fileno=held) as one:
            if _is_connection(one):
                one.shutdown(socket.SHUT_RDWR)
                return True
    return False


def _is_connection(one: socket.socket) -> bool:
    """Whether it is one, or is about to be.

    A socket that is neither may be listening in the next moment, and gloo's thread takes the whole
    process with it (SIGABRT) when it cannot accept any more.
    """
    try:
        state = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except OSError:  # no TCP
        one.getpeername()  # OSError where there is none
        return True
    return state not in _NO_CONNECTION


class Talk:
    """Whether the computing thread is in something that may talk to other ranks."""

    def __init__(self) -> None:
        self._began, self._depth = 0, 0

    def __enter__(self) -> None:
        self._began += not self._depth
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1

    @property
    def number(self) -> int:
        """Of the present one, from 1; 0: it is in none."""
        return self._began if self._depth else 0

    def idle_for(self, seconds: float, over: Callable[[], bool]) -> bool:
        """Whether this process stays in one of them and computes nothing for so long.

        Watches until then, or until ``over``; for a thread of its own. What gloo's threads use of a
        CPU is no computing.
        """
        number, spent, since = self.number, _computed_s(), time.monotonic()
        while not over():
            time.sleep(seconds / 12)
            now, used = time.monotonic(), _computed_s()
            if not self.number or self.number != number or used - spent > _IDLE * seconds:
                number, spent, since = self.number, used, now
            elif now - since >= seconds:
                return True
        return False


def _computed_s() -> float:
    """CPU time that this process has used, without what gloo's threads have, in seconds."""
    return time.process_time() - waits.spent_s()


class Control:
    """Listens to the launcher in a thread of its own.

    Args:
        descriptor: From which its lines are read.
        links: Cut as soon as somebody is lost.

    Attributes:
        save_asked: Number of the last checkpoint that the launcher asked for; 0: none.
        parting: All ranks save and end together: none is to do so alone.
        freed: Called when connections were cut for this generation.
    """

    def __init__(self, descriptor: int, links: Gloo) -> None:
        self._descriptor, self._links = descriptor, links
        self._changed = threading.Condition()
        self._word: Word | None = None
        self._end = ""
        self._ended = False
        self.save_asked = 0
        self.parting = False
        self.freed: Callable[[int], None] = lambda generation: None
        with contextlib.suppress(OSError):
            os.set_inheritable(descriptor, False)
        threading.Thread(target=self._listen, name="paceline-control", daemon=True).start()

    def _listen(self) -> None:
        rest = b""
        while True:
            try:
                came = os.read(self._descriptor, 1 << 16)
            except OSError:
                came = b""
            if not came:
                break
            *lines, rest = (rest + came).split(b"\n")
            for line in filter(None, lines):
                with contextlib.suppress(ValueError):
                    self._take(understood(line.decode()))
        with self._changed:
            self._end, self._ended = self._end or "the launcher is gone", True
            self._changed.notify_all()

    def _take(self, said: Word | Save | Alone | str) -> None:
        with self._changed:
            if isinstance(said, Alone):
                if self.parting:
                    return
                latest = 0 if self._word is None else self._word.generation
                said = Word(latest + 1, (), "", 0, False)
            if isinstance(said, Save):
                self.save_asked = max(self.save_asked, said.number)
            elif isinstance(said, str):
                self._end, self._ended = said, True
            elif self._word is None or said.generation > self._word.generation:
                self._word, self._ended = said, False
                if not said.planned:
                    self._links.cut()
                    self.freed(said.generation)
            self._changed.notify_all()

    def newer(self, generation: int) -> Word | None:
        """The newest word, if it is of a later generation; connections have been cut by then."""
        with self._changed:
            word = self._word
        return word if word is not None and word.generation > generation else None

    def wait(self, generation: int, *, planned: bool | None = False) -> Word | None:
        """Waits for word of a later generation; ``None``: there will be none.

        Args:
            generation: Later than this.
            planned: Somebody is to join, rather than somebody is gone; ``None``: either.
        """

        def there() -> Word | None:
            word = self.newer(generation)
            return word if word is not None and planned in (None, word.planned) else None

        with self._changed:
            self._changed.wait_for(lambda: self._ended or there() is not None)
            return there()


Make = Callable[[Any, World, timedelta], None]
"""Makes the job's process group by a store, for a place, with a timeout."""


class Recovery:
    """A rank's part in recoveries. Every rank of a job has one.

    Args:
        slot: Number of this process in the plan, which never changes.
        comms: Of all ranks; its world changes with the group.
        control: Where word comes from.
        links: Of the group.
        make: Makes another one.
        timeout: Longest wait in a collective.

    Attributes:
        able: A lost rank is made good; until then its loss is an error as any other.
        told: The launcher knows whether.
        closed: Nobody can join any more; set at the same place of the script on all ranks.
        store: By which the group was made.
        generation: Number of the group, from 0.
        place: This process's place when everything last began anew: by it data are divided.
        training: Of this rank, as soon as there is one.
        alone: This rank is to save it and end before its next batch.
        updates: Steps of optimizers done.
        fewer: Ranks were lost since everything last began anew.
        talk: Entered around what may talk to the other ranks, apart from events.
    """

    def __init__(
        self,
        slot: int,
        comms: Comms,
        control: Control,
        links: Gloo,
        store: Any,
        make: Make,
        timeout: timedelta | None = None,
    ) -> None:
        self.slot, self.store, self._links, self._make = slot, store, links, make
        self._comms, self._control = comms, control
        self._timeout = self._longest = timeout or default_pg_timeout
        self.able = self.told = self.closed = False
        self.generation = self._renewed = 0
        self.place = comms.world
        self.training: TrainingState = NoTraining()
        self._left: list[tuple[float, list[Any]]] = []  # groups, and when they were left
        self._forming = threading.Lock()  # held while a group becomes the present one
        self._opened = 0  # generation in which others join before the next batch
        self._holds_group = False  # no batch is begun in the present one
        self.alone = False
        self.updates, self.fewer = 0, False
        self._done = 0  # events
        self._last: Any = None  # what the last of them gave
        self._furthest = 0, 0  # events and steps behind whoever is, when the next batch is given
        self._plain = False  # within a renewal operations are no events
        self._of, self._passes = -1, 0  # how often the batch of which step was given
        self._holds, self._eventful = False, False  # a batch; with operations since it was given
        self._void = -1, 0  # of a step, as many passes
        self.talk = Talk()
        waits.arm()
        control.freed = self._see_freed

    def attach(self, training: TrainingState) -> None:
        """Keeps this training together from now on."""
        self.training = training

    # -- events --------------------------------------------------------------------------

    def event(self, act: Callable[[], T]) -> T:
        """See :class:`paceline.train.comms.Mender`."""
        if self._plain:
            with self.talk:
                return act()
        if self._holds:
            self._eventful = True
        try:
            with self.talk:
                result = act()
        except RuntimeError as error:
            result = self._again(act, error)
        self._done += 1
        self._last = result
        return result

    def _again(self, act: Callable[[], T], error: RuntimeError) -> T:
        while True:
            met = self.regroup(error, At.OPERATION)
            if self.alone and not self._holds:  # what this rank has is no result of all
                self.training.save_and_exit()
            if met.finished:
                return met.result  # type: ignore[no-any-return]
            try:
                with self.talk:
                    return act()
            except RuntimeError as another:
                error = another

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """See :class:`paceline.train.comms.Mender`."""
        return self._links.watched(self._comms.world.size)

    @contextlib.contextmanager
    def patient(self, longest: timedelta) -> Iterator[None]:
        """See :class:`paceline.train.comms.Mender`."""
        self._longest = longest
        dist.distributed_c10d._set_pg_timeout(longest)
        try:
            yield
        finally:
            self._longest = self._timeout
            if dist.is_initialized():  # else there is no group any more
                dist.distributed_c10d._set_pg_timeout(self._timeout)

    def exchanged(self) -> None:
        """An exchange of gradients is over, on this rank."""
        self._done, self._last = self._done + 1, None

    def failed(self, error: RuntimeError) -> Exchanged:
        """What becomes of an exchange that ended in this error.

        Raises:
            RuntimeError: The error, where no lost rank is the cause, or there is no recovery.
        """
        if not self.regroup(error, At.EXCHANGE).finished:
            return Exchanged.VOID
        self.exchanged()
        return Exchanged.TAKEN

    def passed_over(self, error: RuntimeError) -> None:
        """A forward pass could not begin; its batch is void.

        Raises:
            RuntimeError: As :meth:`failed`.
        """
        self.regroup(error, At.FORWARD)

    # -- batches -------------------------------------------------------------------------

    def given(self) -> None:
        """A global batch is given to the script, newly or again."""
        step = self.training.step
        self._forget()
        self._passes = self._passes + 1 if self._of == step else 1
        self._of, self._holds, self._eventful = step, True, False

    def finished(self) -> None:
        """The batch that the script has is done."""
        self._holds = False

    @property
    def void(self) -> bool:
        """The batch that the script has does not count: it was divided for a former group."""
        step, passes = self._void
        return self._of == step and self._passes <= passes

    @property
    def stale(self) -> bool:
        """There is a new group, and nothing has begun anew in it."""
        return self._renewed != self.generation and not self._plain

    # -- others that come ------------------------------------------------------------------

    def knocked(self) -> int:
        """Number of the group in which others are to join; 0: nobody has come."""
        word = self._control.newer(self.generation)
        comes = word is not None and word.planned and self.able and not self.closed
        return word.generation if word is not None and comes else 0

    def agreed(self, least: int, most: int) -> None:
        """Takes what all ranks know: with one group before all their eyes they open it together."""
        if least == most > self.generation:
            self._opened = least

    def parts(self) -> None:
        """See :class:`paceline.train.stop.Door`."""
        self._control.parting = True

    @property
    def opens(self) -> bool:
        """Others are to be let in before the next batch."""
        return self._opened > self.generation and not self.closed

    def enter(self) -> None:
        """Joins the others, of whom one gives this process its training: a newcomer's first event.

        SystemExit when they have no need of it any more.
        """
        self._done, tried = -1, 0
        while (word := self._control.wait(tried, planned=True)) is not None:
            tried = word.generation
            if word.place(self.slot) is None:
                continue  # of others, that were quicker
            try:
                self._join(word, At.DOOR)
            except RuntimeError as error:
                if not self._lost(error):
                    raise
                continue
            self.able = True
            return
        raise SystemExit(0)

    def _open(self) -> None:
        """Lets others in; between two batches."""
        word = self._control.newer(self.generation)
        self._opened = 0
        if word is None or not word.planned:
            return  # somebody is lost: whoever talks to the others next will see it
        try:
            self._join(word, At.RENEWAL)
        except RuntimeError as error:
            self.regroup(error, At.RENEWAL, word.generation)

    def _join(self, word: Word, at: At) -> None:
        """Makes the group of a planned word."""
        began, self._plain = time.monotonic(), True
        try:
            self._form(word)
            self._settle(at)
        finally:
            self._plain = False
        self._say_regrouped(began)

    def _say_regrouped(self, began: float) -> None:
        self.training.event(
            "regrouped",
            generation=self.generation,
            step=self.training.step,
            seconds=round(time.monotonic() - began, 4),
        )

    def renew(self) -> None:
        """Lets others in, and has everything begin anew in a new group; between two batches.

        Where too few are there to train, in one after the other, until they are.
        """
        self._renew()
        if self.alone:
            self.training.save_and_exit()
        while self._holds_group and not self.stale:
            self._stay()
            if self.alone:
                self.training.save_and_exit()
            self._renew()

    def _stay(self) -> None:
        """Waits at this line, as all ranks do, for the next group; it has the state in memory.

        RuntimeError where there will be none.
        """
        word = self._control.wait(self.generation, planned=None)
        if word is None:
            raise RuntimeError("the job ends, for too few nodes are there to train")
        if word.planned:
            self._open()
        else:
            self.regroup(RuntimeError("more nodes are there, or others"), At.RENEWAL)

    def _renew(self) -> None:
        while not self.alone and (self.opens or (self.stale and self._all_come_here)):
            if self.opens:
                self._open()
                continue
            # How often each rank was given the batch that comes differs; from here on it is alike.
            self._of, self._passes, self._void, self._holds = -1, 0, (-1, 0), False
            generation, place, self._plain = self.generation, self._comms.world, True
            try:
                self.training.renew()
                self._comms.barrier()
            except RuntimeError as error:
                self._plain = False
                if not self.regroup(error, At.RENEWAL).finished:
                    continue
            finally:
                self._plain = False
            self._done, self._last = self._done + 1, None
            self._renewed, self.place = generation, place
            self.fewer = self.stale and self.fewer

    @property
    def _all_come_here(self) -> bool:
        """No rank is, or will be when it gets its next batch, further than this one."""
        events, steps = self._furthest
        return self._done >= events and self.training.step >= steps

    # -- a new group ---------------------------------------------------------------------

    def regroup(self, error: RuntimeError, at: At, tried: int = 0) -> Met:
        """Makes a new group and settles with its members who has come how far.

        Args:
            error: Out of which this rank has come.
            at: What it was in.
            tried: The newest group that did not come about.

        Raises:
            RuntimeError: The error, where no lost rank is the cause, or there is no recovery.
        """
        if not self.able or not self._lost(error):
            raise error
        began = time.monotonic()
        tried = max(tried, self.generation)
        while True:
            word = self._control.newer(tried)
            if word is None or word.planned:
                said = str(error).partition("\n")[0][:300]
                self.training.event(
                    "interrupted", step=self.training.step, error=said, generation=tried
                )
                word = self._control.wait(tried)
            if word is None:
                raise error
            tried = word.generation
            if word.alone:
                return self._go_alone(word)
            try:
                self._form(word)
                met = self._settle(at)
            except RuntimeError as another:
                if not self._lost(another):
                    raise
                if unreachable_peer(str(another)):  # the launcher leaves out one end of that line
                    error = another
                continue
            break
        self._say_regrouped(began)
        return met

    def _go_alone(self, word: Word) -> Met:
        """Nobody else is there any more, as far as this rank knows, and its batch is void."""
        before, self.alone = self._comms.world, True
        self._comms.world = World(0, 1, 0, 1, before.host, True, before.hosts)
        with self._forming:
            self.generation = word.generation
        return Met(False)

    def _see_freed(self, generation: int) -> None:
        """Frees the computing thread where cut connections do not; says so if that is in vain."""

        def over() -> bool:
            return self.generation >= generation or self._control.newer(generation) is not None

        def give_up() -> None:
            looks, pause, at_last = 0, _SELDOM, time.monotonic() + _AT_LAST_S
            while not over():
                time.sleep(pause)
                pause = min(_RARELY, 1.1 * pause)  # looking must not pass for computing
                looks = looks + 1 if waits.asleep() else 0
                enough = looks >= (_LOOKS if self._links.ended() else _MANY_LOOKS)
                if not enough and time.monotonic() < at_last:
                    continue
                with self._forming:  # what is waited for in the next group is not to be given up
                    if not over():
                        waits.give_up()
                looks = 0

        def watch() -> None:
            if self.able and self.talk.idle_for(_STUCK_S, over):
                self.training.event("stuck", step=self.training.step, seconds=_STUCK_S)

        threading.Thread(target=give_up, name="paceline-give-up", daemon=True).start()
        threading.Thread(target=watch, name="paceline-freed", daemon=True).start()

    def _lost(self, error: RuntimeError) -> bool:
        """Whether this is what a rank sees of another one's end."""
        if isinstance(error, (dist.DistError, Overtaken)) or SECONDARY_ERROR.search(str(error)):
            return True
        word = self._control.newer(self.generation)
        return word is not None and not word.planned  # whatever is said of connections that are cut

    def _form(self, word: Word) -> None:
        """Leaves the old group and makes the one that word is of.

        Raises:
            RuntimeError: It does not come about.
        """
        place = word.place(self.slot)
        if place is None:
            raise JobError(
                "the others train on without this process",
                found=f"it is not in generation {word.generation} of the job",
                remedy="look at the launcher's output for why it was taken for lost",
            )
        if not word.planned:
            self._cut_loose()
        os.environ.update({
            jobenv.RANK: str(place.rank), jobenv.WORLD_SIZE: str(place.size),
            jobenv.LOCAL_RANK: str(place.local_rank),
            jobenv.LOCAL_WORLD_SIZE: str(place.local_size), jobenv.ADDRESSES: word.addresses,
        })  # fmt: skip
        if jobenv.PLANNED_WORLD in os.environ:
            os.environ[jobenv.PLANNED_WORLD] = str(place.size)
        with self._links.watched(place.size):
            if self._control.newer(word.generation):
                raise Overtaken  # that came before there was anything to be cut
            client = self._meet(word)
            self._links.store_met()
            store = PrefixStore(f"generation/{word.generation}", client)
            self._all_here(store, word)
            self.training.event("gathered", generation=word.generation)
            if word.planned:
                # Not before: what this rank has sent in the last operation of the former group
                # may not have been read yet, and a connection that ends may swallow it. gloo wakes
                # nobody who waits for the rest of a message, and in a planned group nobody does.
                self._cut_loose()
            self._make(PrefixStore("default_pg", store), place, _FORMING)
        if self._control.newer(word.generation):
            raise Overtaken
        dist.distributed_c10d._set_pg_timeout(self._longest)
        client.set_timeout(self._timeout)
        self.fewer = self.fewer or place.size < self._comms.world.size
        self.store = client
        self._comms.world = replace(place, hosts=self._comms.world.hosts)
        self._holds_group = word.holds
        with self._forming:
            self.generation = word.generation

    def _cut_loose(self) -> None:
        """Ends all connections of the present group, and leaves it."""
        self._links.cut(former=True)
        wait_for_idle_workers()
        self._leave_group()

    def _meet(self, word: Word) -> TCPStore:
        """The store of a word; its own host may be lost with it, which later word says.

        Raises:
            RuntimeError: It cannot be had.
        """
        until = time.monotonic() + _FORMING.total_seconds()
        while True:
            try:
                client = TCPStore(
                    word.address, word.port, None, False, _CALLING, wait_for_workers=False
                )
            except RuntimeError:
                if self._control.newer(word.generation):
                    raise Overtaken from None
                if time.monotonic() > until:
                    raise
            else:
                client.set_timeout(_FORMING)
                return client

    def _leave_group(self) -> None:
        """Leaves the present group, and keeps what it is made of for a while.

        Its destructor joins gloo's threads and holds the interpreter's lock meanwhile, for which a
        thread waits that lets go of a tensor. Connections are cut, but on a busy host a thread may
        learn of that later; the last reference may also be a replica's, dropped at any time. Where
        something was given up, it never learns of it, and the group stays.
        """
        self._forget()
        if dist.is_initialized():
            groups = [*dist.distributed_c10d._world.pg_map]
            self._left.append((time.monotonic(), groups))
            if waits.unfinished():  # the groups stay for good
                for one in groups:
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        # Groups are numbered, and meet under their number: one that did not come about on this
        # rank alone has been counted, and the next would wait for the others where they are not.
        dist.distributed_c10d._world.group_count = 0

    def _forget(self) -> None:
        """Lets go of groups that were left long ago, their threads and descriptors."""
        if self._left and time.monotonic() - self._left[0][0] >= _RESTING:
            now = time.monotonic()
            self._left = [one for one in self._left if now - one[0] < _RESTING]

    def _all_here(self, store: Any, word: Word) -> None:
        """Waits until every member has come, or somebody else is lost."""
        pause = _OFTEN
        here = store.add("here", 1)
        while here < len(word.members):
            if self._control.newer(word.generation):
                raise Overtaken
            time.sleep(pause)
            pause = min(_SELDOM, 1.2 * pause)
            here = store.add("here", 0)

    def _settle(self, at: At) -> Met:
        """What becomes of the event that this rank was in."""
        with self.talk:
            return self._settled(at)

    def _settled(self, at: At) -> Met:
        comms = replace(self._comms, mender=None)
        mine = torch.tensor([
            self._done, at, self.updates, self._of if self._holds else -1,
            self._passes, self._eventful and self._holds, self.training.step,
        ])  # fmt: skip
        rows = comms.rows(mine).tolist()
        done, ats, updates, steps, passes, eventful, come = map(list, zip(*rows, strict=True))
        most, rank = max(done), comms.world.rank
        # An operation is done to its end: by who begins it again, or by its result.
        events = (n + (where == At.OPERATION) for n, where in zip(done, ats, strict=True))
        self._furthest = max(events), max(come)
        behind = [one for one, n in enumerate(done) if n < most and ats[one] != At.DOOR]
        ahead = done.index(most)
        if any(done[one] < most - 1 for one in behind):
            raise JobError(
                "the ranks that are left are too far apart to train on together",
                found=f"events that they have finished: {', '.join(map(str, done))}",
            )
        takers = [
            one for one in behind if ats[one] == At.EXCHANGE and updates[one] < updates[ahead]
        ]
        doors = [one for one, where in enumerate(ats) if where == At.DOOR]
        if len(doors) == len(ats):
            raise JobError(
                "a process that comes for a lost one has nobody to join",
                found="none of this group's ranks has the training's state",
            )
        result: Any = None
        if doors:
            self.training.send_training(comms, ahead, doors)
        if takers:
            self.training.send_models(comms, ahead, takers)
        elif any(ats[one] == At.OPERATION for one in behind):
            result = _passed_on(comms, ahead, self._last)
        held = [s for s in steps if s >= 0]
        void = -1, 0
        for one, step in enumerate(steps):
            if held and step == max(held) and one not in takers and (eventful[one] or one == rank):
                void = step, max(void[1], passes[one])
        if void > self._void:
            self._void = void
        if rank in takers or rank in doors:
            self.updates = updates[ahead]
        # Who is through with a renewal has waited there for all, and may have gone on.
        ends = at in (At.OPERATION, At.RENEWAL)
        finished = rank in takers or (rank in behind and ends)
        if not finished:
            self._done = most
        return Met(finished, result)


@dataclass(frozen=True, slots=True)
class Met:
    """What ranks have settled in a new group.

    Attributes:
        finished: The event that this rank was in was finished by another one.
        result: What it gave.
    """

    finished: bool
    result: Any = None


class Overtaken(RuntimeError):
    """Another rank was lost while a group was made."""


def _passed_on(comms: Comms, source: int, result: Any) -> Any:
    """One rank's result of an operation, on all ranks."""
    mine = comms.world.rank == source
    shape, kind = None, ""
    if isinstance(result, Tensor):
        shape, kind = list(result.shape), str(result.dtype).removeprefix("torch.")
    plain = None if isinstance(result, Tensor) else result
    texts = comms.texts(json.dumps([shape, kind, plain]) if mine else "")
    shape, kind, plain = checked(texts, optional(_RESULT))[source] or (None, "", None)
    if shape is None:
        return plain
    tensor = result if mine else torch.empty(shape, dtype=getattr(torch, kind))
    comms.spread([tensor], source)
    return tensor
