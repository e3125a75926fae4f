"""The user's signals while a run is under way: once is a wish, twice is an order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import TracebackType
from typing import Any

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LEFT_IGNORED = (signal.SIGINT, signal.SIGHUP)


class Interrupts:
    """Collects SIGINT, SIGTERM and SIGHUP instead of dying of them.

    SIGINT or SIGHUP that was ignored when this process began stays so: that is how ``nohup``, and
    shells that start something in the background, say that it is to outlive the terminal.

    Attributes:
        received: Their numbers, in order.
    """

    def __init__(self, on_signal: Callable[[], None]) -> None:
        self.received: list[int] = []
        self._on_signal = on_signal
        self._changed = asyncio.Event()
        self._handled: list[signal.Signals] = []

    def __enter__(self) -> Interrupts:
        loop = asyncio.get_running_loop()
        ignored = [one for one in LEFT_IGNORED if signal.getsignal(one) == signal.SIG_IGN]
        self._handled = [one for one in HANDLED if one not in ignored]
        loop.set_exception_handler(self._heed)
        for signum in self._handled:
            loop.add_signal_handler(signum, self._take, signum)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:  # fmt: skip
        loop = asyncio.get_running_loop()
        for signum in self._handled:
            loop.remove_signal_handler(signum)
        loop.set_exception_handler(None)

    def _heed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What tasks that were given up still raise is no news to somebody who wants to stop."""
        if not self.received:
            loop.default_exception_handler(context)

    def _take(self, signum: int) -> None:
        self.received.append(signum)
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_signal()

    async def wait(self, count: int = 1) -> None:
        """Until that many have come."""
        while len(self.received) < count:
            await self._changed.wait()
