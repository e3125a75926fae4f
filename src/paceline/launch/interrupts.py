"""The user's signals during a run: the first asks it to stop, the second forces it to.

Signals arrive in a process's main thread. If a run has another thread because the main one already
runs an event loop, :func:`run` waits in the main thread and forwards them.
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
INHERITABLE_SIGNALS = (signal.SIGINT, signal.SIGHUP)
WAIT_PERIOD_S = 0.5
ECHO_S = 0.25  # faster than a person types Ctrl-C twice, slower than a parent forwards it


class EchoFilter:
    """Distinguishes a second request to stop from an echo of the first.

    Ctrl-C reaches all processes of a terminal, and a parent (``timeout``, ``uv run``) forwards it
    as well. A closed terminal sends SIGHUP twice, from the shell and from the kernel; a service
    manager sends two signals at once.
    """

    def __init__(self) -> None:
        self._first_at: float | None = None

    def is_echo(self, signum: int) -> bool:
        """Whether this signal repeats an earlier one. Call it once for each signal."""
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
            return False
        return signum == signal.SIGHUP or now - self._first_at < ECHO_S


class Interrupts:
    """Collects SIGINT, SIGTERM, SIGHUP and SIGUSR1 instead of dying of them.

    SIGINT and SIGHUP stay ignored if they were when this process started: ``nohup`` and shells
    ignore them for a job that is to outlive the terminal.

    Attributes:
        received: Their numbers, in order.
    """

    def __init__(self, on_signal: Callable[[], None]) -> None:
        self.received: list[int] = []
        self._on_signal = on_signal
        self._echoes = EchoFilter()
        self._changed = asyncio.Event()
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._handle_exception)
        _handlers[loop] = self._signalled
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {s: signal.getsignal(s) for s in handled_signals()}
            for signum in self._previous_handlers:
                loop.add_signal_handler(signum, self._signalled, signum)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:  # fmt: skip
        loop = asyncio.get_running_loop()
        _handlers.pop(loop, None)
        for signum, previous in self._previous_handlers.items():
            loop.remove_signal_handler(signum)
            if previous is not None:  # else it was not set from Python
                signal.signal(signum, previous)
        loop.set_exception_handler(None)

    def _handle_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Drops errors of abandoned tasks once the user has asked to stop."""
        if not self.received:
            loop.default_exception_handler(context)

    def _signalled(self, signum: int) -> None:
        if not self._echoes.is_echo(signum):
            self.receive(signum)

    def receive(self, signum: int) -> None:
        """Takes a signal, or a request that means the same."""
        self.received.append(signum)
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_signal()

    async def wait(self, count: int = 1) -> None:
        """Waits until that many signals have come."""
        while len(self.received) < count:
            await self._changed.wait()


def handled_signals() -> list[signal.Signals]:
    """Returns the signals to handle: those that are not ignored on purpose."""
    ignored = [s for s in INHERITABLE_SIGNALS if signal.getsignal(s) == signal.SIG_IGN]
    return [signum for signum in HANDLED if signum not in ignored]


_handlers: dict[asyncio.AbstractEventLoop, Callable[[int], None]] = {}  # by the event loop of a run


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine as ``asyncio.run`` does, also if this thread already runs an event loop.

    Then it runs in a thread of its own and this one waits, so that a notebook's cell ends with the
    run. Signals are forwarded to the run; KeyboardInterrupt if it handles none yet.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main)
    running = _BackgroundRun(main)
    with running.forward_signals():
        return running.result()


class _BackgroundRun(Generic[T]):
    """A coroutine in a thread of its own."""

    def __init__(self, main: Coroutine[Any, Any, T]) -> None:
        self._main = main
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._signals: list[int] = []
        self._outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def _run_thread(self) -> None:
        async def main() -> T:
            self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
            return await self._main

        try:
            self._outcome.set_result(asyncio.run(main()))
        except BaseException as error:
            self._outcome.set_exception(error)

    def result(self) -> T:
        """Runs it and returns its result; KeyboardInterrupt if it did not handle a signal."""
        threading.Thread(target=self._run_thread, name="paceline", daemon=True).start()
        while not self._outcome.done():
            # Python runs a signal's handler only when the main thread wakes up
            concurrent.futures.wait([self._outcome], timeout=WAIT_PERIOD_S)
        try:
            return self._outcome.result()
        except (concurrent.futures.CancelledError, asyncio.CancelledError):
            if self._signals:
                raise KeyboardInterrupt from None
            raise

    @contextlib.contextmanager
    def forward_signals(self) -> Iterator[None]:
        """Forwards signals to the run; does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {handled: signal.signal(handled, self._forward) for handled in handled_signals()}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                if handler is not None:
                    signal.signal(signum, handler)

    def _forward(self, signum: int, _: FrameType | None) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has just ended
                self._loop.call_soon_threadsafe(self._deliver, signum)

    def _deliver(self, signum: int) -> None:
        self._signals.append(signum)
        assert self._loop is not None
        if handler := _handlers.get(self._loop):
            handler(signum)
        elif self._task is not None:
            self._task.cancel()
