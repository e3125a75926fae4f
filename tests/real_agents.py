"""Runs a real agent in a thread, with a channel to it over a connection that can be interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from paceline.agent.server import Agent
from paceline.launch.nodes.fleet import Node
from paceline.remote.channel import Channel
from paceline.spec.hosts import Host

ENDLESS = 1 << 60


class CutLine:
    """Two streams over a socket that end after ``left`` bytes in both directions together."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
                 left: int) -> None:  # fmt: skip
        self.reader, self.writer, self.errors = self, self, asyncio.StreamReader()
        self.errors.feed_eof()
        self.left = left
        self.passed = 0
        self.status = None
        self._reader, self._writer = reader, writer
        self.transport = writer.transport

    def _pass(self, data: bytes) -> bytes:
        data = data[: self.left]
        self.left -= len(data)
        self.passed += len(data)
        return data

    def exception(self) -> Exception | None:
        return self._reader.exception()

    async def read(self, count: int) -> bytes:
        data = self._pass(await self._reader.read(count)) if self.left else b""
        if not self.left:
            self.transport.abort()
        return data

    def write(self, data: bytes) -> None:
        if self.left:
            self._writer.write(self._pass(data))
        if not self.left:
            self._writer.close()

    async def drain(self) -> None:
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    def close(self) -> None:
        self._writer.close()

    async def end(self, timeout_s: float) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


@dataclass
class Served:
    """A node, its agent and the connection between them."""

    node: Node
    agent: Agent
    line: Any

    def ask(self, op: str, **fields: Any) -> Any:
        return self.node.channel.request(op, **fields)


@contextlib.asynccontextmanager
async def agent_in_thread(left: int = ENDLESS, name: str = "n1",
                          line: Any = None) -> AsyncIterator[Served]:  # fmt: skip
    """Runs an agent in a thread of this process until the connection ends.

    Args:
        left: Bytes after which the connection is closed.
        name: Name of the host.
        line: Creates another kind of connection from our end of a socket pair.
    """
    ours, theirs = socket.socketpair()
    agent = Agent(os.dup(theirs.fileno()), os.dup(theirs.fileno()), "/nowhere/agent/package")
    theirs.close()
    agent._send_hello = lambda: None  # type: ignore[method-assign]
    serving = threading.Thread(target=agent.run)
    serving.start()
    line = line(ours) if line else CutLine(*await asyncio.open_connection(sock=ours), left)
    channel = Channel(Host(name), line)  # type: ignore[arg-type]
    channel._tasks.append(asyncio.create_task(channel._read_stderr()))
    channel.listen()
    try:
        yield Served(Node(channel.host, channel), agent, line)
    finally:
        await channel.close()
        await asyncio.to_thread(serving.join)
        for fd in (agent.stream._input, agent.outbox.fd, agent._wake_read, agent._wake_write):
            os.close(fd)
