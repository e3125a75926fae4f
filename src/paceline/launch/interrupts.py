"""The user's signals while a run is under way: once is a wish, twice is an order.

Signals come to a process's main thread. A run that has another thread, because the main one has an
event loop of its own, is told by :func:`run`, which waits there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType, TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # USR1: of batch systems
LEFT_IGNORED = (signal.SIGINT, signal.SIGHUP)
WAKE_S = 0.5
ECHO_S = 0.25  # nobody types Ctrl-C twice as fast; a parent that passes it on is faster


class Echoes:
    """Tells a second wish from an echo of the first.

    Ctrl-C goes to all processes of a terminal, and what started this one (``timeout``, ``uv run``)
    passes it on. A closed terminal says so twice, by the shell and by the kernel; a service manager
    sends two signals at once.
    """

    def __init__(self) -> None:
        self._first: float | None = None

    def echoes(self, signum: int) -> bool:
        """Whether this signal says no more than an earlier one; called once for each signal."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            return False
        return signum == signal.SIGHUP or now - self._first < ECHO_S


class Interrupts:
    """Collects SIGINT, SIGTERM, SIGHUP and SIGUSR1 instead of dying of them.

    SIGINT or SIGHUP that was ignored when this process began stays so: that is how ``nohup``, and
    shells that start something in the background, say that it is to outlive the terminal.

    Attributes:
        received: Their numbers, in order.
    """

    def __init__(self, on_signal: Callable[[], None]) -> None:
        self.received: list[int] = []
        self._on_signal = on_signal
        self._echoes = Echoes()
        self._changed = asyncio.Event()
        self._before: dict[signal.Signals, Any] = {}  # the handlers of whoever called us

    def __enter__(self) -> Interrupts:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._heed)
        _told[loop] = self._signalled
        if threading.current_thread() is threading.main_thread():
            self._before = {one: signal.getsignal(one) for one in wanted()}
            for signum in self._before:
                loop.add_signal_handler(signum, self._signalled, signum)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:  # fmt: skip
        loop = asyncio.get_running_loop()
        _told.pop(loop, None)
        for signum, before in self._before.items():
            loop.remove_signal_handler(signum)
            if before is not None:  # else it was not set from Python
                signal.signal(signum, before)
        loop.set_exception_handler(None)

    def _heed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What tasks that were given up still raise is no news to somebody who wants to stop."""
        if not self.received:
            loop.default_exception_handler(context)

    def _signalled(self, signum: int) -> None:
        if not self._echoes.echoes(signum):
            self.take(signum)

    def take(self, signum: int) -> None:
        """Somebody asks for what a signal asks for."""
        self.received.append(signum)
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_signal()

    async def wait(self, count: int = 1) -> None:
        """Until that many have come."""
        while len(self.received) < count:
            await self._changed.wait()


def wanted() -> list[signal.Signals]:
    """The signals that are not to be ignored."""
    ignored = [signum for signum in LEFT_IGNORED if signal.getsignal(signum) == signal.SIG_IGN]
    return [signum for signum in HANDLED if signum not in ignored]


_told: dict[asyncio.AbstractEventLoop, Callable[[int], None]] = {}  # of runs that take signals


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, as ``asyncio.run`` does, also where an event loop runs already.

    It has a thread of its own then, and this one waits: a notebook's cell is over when the run is.
    The signals that come meanwhile go to the run. KeyboardInterrupt when it takes none yet.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main)
    running = _Elsewhere(main)
    with running.told_of_signals():
        return running.result()


class _Elsewhere(Generic[T]):
    """A coroutine that runs in a thread of its own."""

    def __init__(self, main: Coroutine[Any, Any, T]) -> None:
        self._main = main
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._signals: list[int] = []
        self._over: concurrent.futures.Future[T] = concurrent.futures.Future()

    def _work(self) -> None:
        try:
            self._over.set_result(asyncio.run(self._begin()))
        except BaseException as error:
            self._over.set_exception(error)

    async def _begin(self) -> T:
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        return await self._main

    def result(self) -> T:
        """Begins, and waits. KeyboardInterrupt when a signal came before the run took any."""
        threading.Thread(target=self._work, name="paceline", daemon=True).start()
        while not self._over.done():
            # a signal that another thread took is handled when this one wakes up
            concurrent.futures.wait([self._over], timeout=WAKE_S)
        try:
            return self._over.result()
        except (concurrent.futures.CancelledError, asyncio.CancelledError):
            if self._signals:
                raise KeyboardInterrupt from None
            raise

    @contextlib.contextmanager
    def told_of_signals(self) -> Iterator[None]:
        """The main thread's signals go to the run; another thread gets none."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {one: signal.signal(one, self._pass_on) for one in wanted()}
        try:
            yield
        finally:
            for signum, handler in before.items():
                if handler is not None:
                    signal.signal(signum, handler)

    def _pass_on(self, signum: int, _: FrameType | None) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has just ended
                self._loop.call_soon_threadsafe(self._deliver, signum)

    def _deliver(self, signum: int) -> None:
        self._signals.append(signum)
        assert self._loop is not None
        if take := _told.get(self._loop):
            take(signum)
        elif self._task is not None:
            self._task.cancel()
