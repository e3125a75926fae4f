"""The user's signals while a run is under way: once is a wish, twice is an order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import TracebackType

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Collects SIGINT, SIGTERM and SIGHUP instead of dying of them.

    Attributes:
        received: Their numbers, in order.
    """

    def __init__(self, on_signal: Callable[[], None]) -> None:
        self.received: list[int] = []
        self._on_signal = on_signal
        self._changed = asyncio.Event()

    def __enter__(self) -> Interrupts:
        loop = asyncio.get_running_loop()
        for signum in HANDLED:
            loop.add_signal_handler(signum, self._take, signum)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:  # fmt: skip
        loop = asyncio.get_running_loop()
        for signum in HANDLED:
            loop.remove_signal_handler(signum)

    def _take(self, signum: int) -> None:
        self.received.append(signum)
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_signal()

    async def wait(self, count: int = 1) -> None:
        """Until that many have come."""
        while len(self.received) < count:
            await self._changed.wait()
