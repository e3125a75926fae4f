"""Waiting for other ranks in a way that can be cancelled.

gloo does not wake a thread that waits for the rest of a message when a connection ends. So when a
lost rank can be replaced no thread waits in gloo itself: it polls (:func:`wait`), another thread
waits there (:func:`wait_in_thread`), or DDP waits for a future (:func:`cancellable_future`).
:func:`release_waits` ends all of them with an error when cut connections do not. What is cancelled
stays with a sleeping thread of gloo's, so its group must outlive it (:func:`has_abandoned`). See
``docs/explanation/decisions/0012-gloo-is-freed-by-closing-its-sockets.md``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from paceline.spec.failure import CONNECTIONS_CUT
from paceline.train.elastic import gloo

T = TypeVar("T")

_POLL_S = 0.05  # between two looks whether a wait was cancelled
STUCK_S = 3.0
"""Idle in a collective whose connections are cut, after which a rank is reported as stuck."""
_IDLE_SHARE = 0.03  # of a CPU, below which a process does not compute, on a busy machine neither
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.02, 0.5  # between two looks
_CHECKS = 3  # at gloo asleep, with all its connections closed: what waits now waits for nothing
_MAX_CHECKS = 20  # in more than a second; a connection that is not closed even then is not gloo's
_MAX_WAIT_S = 10.0  # after which no look is needed: a thread of gloo's may never sleep (gloo.py)


class WaitCancelled(RuntimeError):
    """A wait for an operation whose connections were cut was cancelled."""


class _State:
    """The pending waits of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_enabled = False
        self.cancellations = 0
        self.means: set[_CancellableMean] = set()
        self.thread_ids: set[int] = set()  # that wait in gloo, as the system numbers them
        self.abandoned: list[dist.Work] = []
        self.has_abandoned_thread = False


class _CancellableMean:
    """Future of a bucket's mean that can be cancelled."""

    def __init__(self, work: dist.Work, mean: Tensor) -> None:
        self._work, self._mean = work, mean
        self._outcome: Future[object] = Future()
        self.future: Future[Tensor] = self._outcome.then(_mean_or_error)

    def finish(self, work_future: Future[object]) -> None:
        try:
            work_future.wait()
        except Exception as error:  # raised by who waits for it
            self._set(error)
        else:
            self._set(self._mean)

    def cancel(self) -> None:
        if self._set(WaitCancelled(CONNECTIONS_CUT)):
            abandon(self._work)

    def _set(self, outcome: object) -> bool:
        with _state.lock:
            if self not in _state.means:
                return False
            _state.means.remove(self)
        self._outcome.set_result(outcome)
        return True


def _mean_or_error(outcome: Future[object]) -> Tensor:
    value = outcome.value()
    if isinstance(value, Exception):
        raise value
    assert isinstance(value, Tensor)
    return value


_state = _State()


def enable() -> None:
    """Lets waits be cancelled from now on; until then all of them are torch's own."""
    _state.is_enabled = True


def is_enabled() -> bool:
    """Whether waits may be cancelled: a lost rank can be replaced here."""
    return _state.is_enabled


def wait(work: dist.Work | None, moved: Tensor) -> None:
    """Waits until a collective is over.

    Args:
        work: The collective; ``None`` on a rank that has no part in it.
        moved: One of its tensors: only those on a CPU go over gloo.

    Raises:
        WaitCancelled: By another thread.
    """
    if work is None:
        return
    if _state.is_enabled and moved.device.type == "cpu":
        cancellations = _state.cancellations
        while not work.is_completed():
            if _state.cancellations != cancellations:
                abandon(work)
                raise WaitCancelled(CONNECTIONS_CUT)
            with contextlib.suppress(RuntimeError):  # it has to wait on, or its error comes below
                work.wait(timedelta(seconds=_POLL_S))
    work.wait()


def wait_in_thread(act: Callable[[], T]) -> T:
    """Calls ``act``, which waits for other ranks, in a thread; returns its result.

    For operations that cannot be polled.

    Raises:
        WaitCancelled: By another thread.
    """
    if not _state.is_enabled:
        return act()
    results: list[T] = []
    errors: list[BaseException] = []
    is_finished, cancellations = threading.Event(), _state.cancellations

    def run() -> None:
        thread_id = threading.get_native_id()
        _state.thread_ids.add(thread_id)
        try:
            results.append(act())
        except BaseException as error:  # raised by who waits for it
            errors.append(error)
        finally:
            _state.thread_ids.discard(thread_id)
            is_finished.set()

    threading.Thread(target=run, name="paceline-waits", daemon=True).start()
    while not is_finished.wait(_POLL_S):
        if _state.cancellations != cancellations:
            _state.has_abandoned_thread = True
            raise WaitCancelled(CONNECTIONS_CUT)
    if errors:
        raise errors[0]
    return results[0]


def cancellable_future(work: dist.Work | None, mean: Tensor) -> Future[Tensor]:
    """Returns a future of ``mean`` for DDP, in place of the future of a bucket's collective."""
    assert work is not None  # this rank is in the group
    cancellable = _CancellableMean(work, mean)
    with _state.lock:
        _state.means.add(cancellable)
    work.get_future().add_done_callback(cancellable.finish)
    return cancellable.future


def _cancel_all() -> None:
    with _state.lock:
        _state.cancellations += 1
        means = [*_state.means]
    for mean in means:
        mean.cancel()


def abandon(work: dist.Work) -> None:
    """Records a collective that may never end, and for which no thread waits."""
    with _state.lock:
        _state.abandoned = [pending for pending in _state.abandoned if not pending.is_completed()]
        _state.abandoned.append(work)


def has_abandoned() -> bool:
    """Cancels all waits; returns whether any was left in gloo since the last call."""
    _cancel_all()
    with _state.lock:
        works, has_thread = _state.abandoned, _state.has_abandoned_thread
        _state.abandoned, _state.has_abandoned_thread = [], False
    return has_thread or not all(work.is_completed() for work in works)


class CollectiveSpan:
    """Context of code that may wait for other ranks; another thread sees whether it is entered."""

    def __init__(self) -> None:
        self._entries, self._depth = 0, 0

    def __enter__(self) -> None:
        self._entries += not self._depth
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1

    @property
    def number(self) -> int:
        """Number of the span that is entered now, from 1; 0: none is."""
        return self._entries if self._depth else 0

    def is_idle_for(self, seconds: float, is_finished: Callable[[], bool]) -> bool:
        """Whether this process stays in one span and computes nothing for so long.

        Watches until then, or until ``is_finished``; call it in a thread of its own. CPU time of
        gloo's threads does not count as computing.
        """
        number, cpu_s, idle_from = self.number, _computing_s(), time.monotonic()
        while not is_finished():
            time.sleep(seconds / 12)
            current, used_s = time.monotonic(), _computing_s()
            is_busy = used_s - cpu_s > _IDLE_SHARE * seconds
            if not self.number or self.number != number or is_busy:
                number, cpu_s, idle_from = self.number, used_s, current
            elif current - idle_from >= seconds:
                return True
        return False


def _computing_s() -> float:
    """Returns the CPU seconds that this process has used, without those of gloo's threads.

    A thread that waits in gloo counts as one of these.
    """
    return time.process_time() - sum(thread.cpu_s for thread in _gloo_threads())


def release_waits(
    is_finished: Callable[[], bool], all_closed: Callable[[], bool], forming: threading.Lock
) -> None:
    """Cancels waits whenever gloo has closed the cut connections and sleeps, until finished.

    Args:
        is_finished: Whether the next group is there, or is superseded.
        all_closed: Whether gloo has closed all cut connections.
        forming: Held while a group becomes the present one, so that waits in the next group are not
            cancelled.
    """
    checks, interval_s = 0, _MIN_INTERVAL_S
    deadline = time.monotonic() + _MAX_WAIT_S
    while not is_finished():
        time.sleep(interval_s)
        interval_s = min(_MAX_INTERVAL_S, 1.1 * interval_s)  # looking must not pass for computing
        checks = checks + 1 if _is_gloo_asleep() else 0
        is_ready = checks >= (_CHECKS if all_closed() else _MAX_CHECKS)
        if not is_ready and time.monotonic() < deadline:
            continue
        with forming:
            if not is_finished():
                _cancel_all()
        checks = 0


def _is_gloo_asleep() -> bool:
    return all(thread.state not in "RD" for thread in _gloo_threads())


def _gloo_threads() -> Iterator[gloo.Task]:
    return (t for t in gloo.tasks() if t.is_gloo or t.number in _state.thread_ids)
