"""Waiting for other ranks in a way that can be given up.

When a connection ends, gloo tells the operations that it has not begun. A message of which a part
is sent, or a part has come, is forgotten: whoever waits for it is not woken before the timeout of
half an hour. Of gradients of some megabytes one is nearly always under way. So where a lost rank is
made good nobody waits in gloo itself: it is asked again and again (:func:`wait`), or a further
thread waits there (:func:`apart`), or DDP waits for a promise that can be broken
(:func:`promised`). :func:`give_up` ends all of them with an error, as a connection's end should.

What is given up stays where it is, with a thread of gloo's that sleeps. Its group must outlive it
(:func:`unfinished`), for the destructor would wait for that thread. Where a collective has failed
in the middle of a message it does not sleep before it is made to (``elastic/gloo.py``).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from paceline.spec.failure import CONNECTIONS_CUT
from paceline.train.elastic import gloo

T = TypeVar("T")

_LOOK_S = 0.05  # seconds between two looks whether a wait was given up


class GivenUp(RuntimeError):
    """Nobody waits for this operation any more: its connections were cut."""


class _Waits:
    """What this process waits for; it has one job."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.may_end = False
        self.ends = 0
        self.promises: set[_Promise] = set()
        self.threads: set[int] = set()  # that wait in gloo, as the system numbers them
        self.left: list[dist.Work] = []
        self.left_apart = False


class _Promise:
    """A bucket's mean, in time or not at all."""

    def __init__(self, work: dist.Work, mean: Tensor) -> None:
        self._work, self._mean = work, mean
        self._gate: Future[object] = Future()
        self.future: Future[Tensor] = self._gate.then(_opened)

    def kept(self, done: Future[object]) -> None:
        try:
            done.wait()
        except Exception as error:  # whoever waits raises it
            self._open(error)
        else:
            self._open(self._mean)

    def broken(self) -> None:
        if self._open(GivenUp(CONNECTIONS_CUT)):
            leave(self._work)

    def _open(self, what: object) -> bool:
        with _waits.lock:
            if self not in _waits.promises:
                return False
            _waits.promises.remove(self)
        self._gate.set_result(what)
        return True


def _opened(gate: Future[object]) -> Tensor:
    what = gate.value()
    if isinstance(what, Exception):
        raise what
    assert isinstance(what, Tensor)
    return what


_waits = _Waits()


def arm() -> None:
    """From now on waits may be given up; until then all of them are torch's own."""
    _waits.may_end = True


def heeded() -> bool:
    """Whether waits may be given up: a lost rank is made good here."""
    return _waits.may_end


def wait(work: dist.Work | None, moved: Tensor) -> None:
    """Waits until a collective that was begun is over.

    Args:
        work: It; ``None`` where this rank has no part in it.
        moved: One of its tensors: only those on a CPU go over gloo.

    Raises:
        GivenUp: By another thread.
    """
    if work is None:
        return
    if _waits.may_end and moved.device.type == "cpu":
        ends = _waits.ends
        while not work.is_completed():
            if _waits.ends != ends:
                leave(work)
                raise GivenUp(CONNECTIONS_CUT)
            with contextlib.suppress(RuntimeError):  # it has to wait on, or its error comes below
                work.wait(timedelta(seconds=_LOOK_S))
    work.wait()


def apart(act: Callable[[], T]) -> T:
    """What this gives, which waits for other ranks where nobody can ask, in a thread of its own.

    Raises:
        GivenUp: By another thread.
    """
    if not _waits.may_end:
        return act()
    gave: list[T] = []
    failed: list[BaseException] = []
    over, ends = threading.Event(), _waits.ends

    def run() -> None:
        mine = threading.get_native_id()
        _waits.threads.add(mine)
        try:
            gave.append(act())
        except BaseException as error:  # for whoever waits
            failed.append(error)
        finally:
            _waits.threads.discard(mine)
            over.set()

    threading.Thread(target=run, name="paceline-waits", daemon=True).start()
    while not over.wait(_LOOK_S):
        if _waits.ends != ends:
            _waits.left_apart = True
            raise GivenUp(CONNECTIONS_CUT)
    if failed:
        raise failed[0]
    return gave[0]


def promised(work: dist.Work | None, mean: Tensor) -> Future[Tensor]:
    """What DDP waits for, in the place of a bucket's collective; it gives ``mean``."""
    assert work is not None  # this rank is in the group
    promise = _Promise(work, mean)
    with _waits.lock:
        _waits.promises.add(promise)
    work.get_future().add_done_callback(promise.kept)
    return promise.future


def give_up() -> None:
    """Ends all waits that are under way."""
    with _waits.lock:
        _waits.ends += 1
        promises = [*_waits.promises]
    for one in promises:
        one.broken()


def leave(work: dist.Work) -> None:
    """It may be that nobody waits for this."""
    with _waits.lock:
        _waits.left = [one for one in _waits.left if not one.is_completed()]
        _waits.left.append(work)


def unfinished() -> bool:
    """Whether something was left in gloo since this was asked last; nobody waits any more."""
    give_up()
    with _waits.lock:
        left, apart_too = _waits.left, _waits.left_apart
        _waits.left, _waits.left_apart = [], False
    return apart_too or not all(one.is_completed() for one in left)


def asleep() -> bool:
    """Whether gloo's threads, and those that wait in it, do nothing and want nothing."""
    return all(one.state not in "RD" for one in _of_gloo())


def spent_s() -> float:
    """CPU time that gloo's threads, and those that wait in it, have used so far, in seconds."""
    return sum(one.cpu_s for one in _of_gloo())


def _of_gloo() -> Iterator[gloo.Task]:
    return (one for one in gloo.tasks() if one.of_gloo or one.number in _waits.threads)
