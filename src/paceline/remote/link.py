"""What a connection to an agent is made of: three streams and an end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import Protocol

from paceline.remote.openssh import SSH_FAILED

LAST_WORDS_S = 0.5  # after the child's end
_LOOK_S = 0.01


async def ended(process: asyncio.subprocess.Process) -> None:
    """Waits for the end of a child, whoever still holds its pipes.

    asyncio's own ``wait`` waits for those, too, in some versions of Python (3.11 is one): a
    child's child may keep them.
    """
    while process.returncode is None:
        await asyncio.sleep(_LOOK_S)


class Writer(Protocol):
    """What is written to: a ``StreamWriter``, or something in front of one."""

    @property
    def transport(self) -> asyncio.WriteTransport:
        """Whose ``abort`` gives up without waiting."""

    def write(self, data: bytes) -> None:
        """Sends without waiting."""

    async def drain(self) -> None:
        """Waits until more can be sent."""

    def close(self) -> None:
        """Nothing more is sent."""


class Link(Protocol):
    """Two streams to talk by, one for the agent's words, and an end.

    Attributes:
        reader: What the agent sends.
        errors: Standard error of the agent and of what leads to it.
    """

    reader: asyncio.StreamReader
    errors: asyncio.StreamReader

    @property
    def writer(self) -> Writer:
        """What is sent to it; closing it tells the agent to leave."""

    @property
    def status(self) -> int | None:
        """Exit status of the process that leads there; ``None`` while it runs or without one."""

    async def over(self) -> bool:
        """Asked when its streams have ended: whether what it led to has ended by itself.

        False where only the way to it may have broken.
        """

    async def cut(self) -> None:
        """Gives the link up at once, as if the network had: the agent is not told to leave."""

    async def release(self) -> None:
        """Gives the link up; what it led to has let go of it already, and lives on."""

    async def end(self, patience_s: float) -> None:
        """Closes the link; the other side has ``patience_s`` seconds to end by itself."""


class ProcessLink:
    """A link through a child process: ssh, a container engine, or the agent itself.

    Args:
        process: With its three pipes, and leader of a process group of its own.
        is_agent: It is no way to the agent, but the agent itself.
    """

    def __init__(self, process: asyncio.subprocess.Process, is_agent: bool = False) -> None:
        self._is_agent = is_agent
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.reader, self.writer, self.errors = process.stdout, process.stdin, process.stderr
        self._process = process

    @property
    def status(self) -> int | None:
        return self._process.returncode

    async def over(self) -> bool:
        """By the child's exit status: ssh passes that of the remote command on."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ended(self._process), LAST_WORDS_S)
        status = self._process.returncode
        return status is not None and 0 <= status < SSH_FAILED

    async def cut(self) -> None:
        """Kills the child, which so cannot pass on that its input has ended."""
        self._signal(signal.SIGKILL)
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(ended(self._process), LAST_WORDS_S)
        finally:
            self._let_go()

    async def release(self) -> None:
        """Ends what only leads to the agent; an agent itself is not our child any more."""
        if not self._is_agent:
            await self.cut()
            return
        transport = getattr(self._process, "_transport", None)
        if transport is not None:
            transport._proc = None  # whose end asyncio would else see to when it closes the pipes
        if sys.version_info < (3, 12):
            asyncio.get_child_watcher().remove_child_handler(self._process.pid)
        self._let_go()

    async def end(self, patience_s: float) -> None:
        """Waits for the child; then asks it to end; then makes it."""
        self.writer.close()
        try:
            try:
                await asyncio.wait_for(ended(self._process), patience_s or 0.001)
            except asyncio.TimeoutError:
                await self._insist()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._last_words(), LAST_WORDS_S)
        finally:
            self._let_go()

    async def _insist(self) -> None:
        self._signal(signal.SIGTERM)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ended(self._process), 2.0)
        if self._process.returncode is None:
            self._signal(signal.SIGKILL)
            await ended(self._process)

    def _let_go(self) -> None:
        """Closes the pipes, which a grandchild may hold open, before the event loop goes."""
        transport = getattr(self._process, "_transport", None)  # asyncio offers no other way
        if transport is not None:
            transport.close()

    async def _last_words(self) -> None:
        while not (self.reader.at_eof() and self.errors.at_eof()):
            await asyncio.sleep(0.005)  # the channel's own tasks do the reading

    def _signal(self, signum: int) -> None:
        """To the child's whole group: a ProxyCommand would go on, with our pipes in its hands."""
        # macOS says "not permitted" of a group that has just ended
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signum)
