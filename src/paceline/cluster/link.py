"""What a connection to an agent is made of: three streams and an end."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol


class Link(Protocol):
    """Two streams to talk by, one for the agent's words, and an end.

    Attributes:
        reader: What the agent sends.
        writer: What is sent to it; closing it tells the agent to leave.
        errors: Standard error of the agent and of what leads to it.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    errors: asyncio.StreamReader

    @property
    def status(self) -> int | None:
        """Exit status of the process that leads there; ``None`` while it runs or without one."""

    async def end(self, patience_s: float) -> None:
        """Closes the link; the other side has ``patience_s`` seconds to end by itself."""


class ProcessLink:
    """A link through a child process: ssh, a container engine, or the agent itself."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.reader, self.writer, self.errors = process.stdout, process.stdin, process.stderr
        self._process = process

    @property
    def status(self) -> int | None:
        return self._process.returncode

    async def end(self, patience_s: float) -> None:
        """Waits for the child; then asks it to end; then makes it."""
        self.writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), patience_s or 0.001)
        except asyncio.TimeoutError:
            await self._insist()

    async def _insist(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._process.wait(), 2.0)
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
