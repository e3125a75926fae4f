"""Tests a channel over a slow connection with a large buffer, as in kernels.

The tests check bytes, not seconds: how much data is in the buffers ahead of each message.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.agent.files.safe_paths import IncomingFile
from paceline.agent.files.snapshot import BLOCK_BYTES, blob_path
from paceline.agent.multiplexing import FILES
from paceline.agent.server import Agent
from paceline.remote.channel import Channel
from paceline.spec.events import Event
from paceline.transfer.files import send_blocks
from paceline.transfer.results import fetch_file
from real_agents import agent_in_thread

RATE_BYTES_PER_S = 500_000  # bytes a second: 4 Mbit/s
FILE_BYTES = 2_000_000  # bytes: four seconds of it
MAX_BUFFERED_BYTES = 300_000  # bytes allowed ahead of it; without pacing, nearly all data is
TICK_S = 0.005


class SlowLink:
    """A link with a limited number of bytes per second in each direction, and unlimited buffers.

    Attributes:
        up, down: Bytes in the buffers to the agent and from it.
        max_hosts: Largest size of each buffer so far.
        stopped: Whether the link carries nothing.
    """

    def __init__(self, local_end: socket.socket) -> None:
        self._ours = local_end
        local_end.setblocking(False)
        self.up, self.down = bytearray(), bytearray()
        self.max_hosts = {"up": 0, "down": 0}
        self.stopped = False
        self.reader, self.errors = asyncio.StreamReader(), asyncio.StreamReader()
        self.errors.feed_eof()
        self.status = None
        self.writer = self.transport = self
        self._carrying = asyncio.create_task(self._carry())

    async def _carry(self) -> None:
        loop = asyncio.get_running_loop()
        previous = loop.time()
        while True:
            await asyncio.sleep(TICK_S)
            with contextlib.suppress(BlockingIOError):
                while data := self._ours.recv(1 << 20):
                    self.down += data
                self.reader.feed_eof()
                return
            self.max_hosts["down"] = max(self.max_hosts["down"], len(self.down))
            now = loop.time()
            count, previous = int((now - previous) * RATE_BYTES_PER_S), now
            if not self.stopped:
                self.reader.feed_data(self._pass(self.down, count))
                data = self._pass(self.up, count)
                while data:
                    with contextlib.suppress(BlockingIOError):
                        data = data[self._ours.send(data) :]
                    await asyncio.sleep(0)

    def _pass(self, buffer: bytearray, count: int) -> bytes:
        data = bytes(buffer[:count])
        del buffer[:count]
        return data

    def write(self, data: bytes) -> None:
        self.up += data
        self.max_hosts["up"] = max(self.max_hosts["up"], len(self.up))

    def is_closing(self) -> bool:
        return False

    async def drain(self) -> None:
        """Returns at once, as the buffer is unlimited."""

    def close(self) -> None:
        self._carrying.cancel()
        self._ours.close()

    abort = close

    async def has_exited(self) -> bool:
        return True

    async def drop(self) -> None:
        self.close()

    async def end(self, timeout_s: float) -> None:
        self.close()
        self.reader.feed_eof()


@dataclass
class SlowSession:
    channel: Channel
    agent: Agent
    line: SlowLink
    told: list[Event]

    async def words(self, work: asyncio.Task[Any]) -> int:
        """Requests the time repeatedly while a task runs; returns the number of answers."""
        answered = 0
        while not work.done():
            query = asyncio.ensure_future(self.channel.request("clock"))
            await asyncio.wait([query, work], return_when=asyncio.FIRST_COMPLETED)
            answered += query.done()
            await query
        await work
        return answered


@contextlib.asynccontextmanager
async def slow_session() -> AsyncIterator[SlowSession]:
    """Runs an agent in a thread at the other end of a slow link."""
    async with agent_in_thread(line=SlowLink) as served:
        channel = served.node.channel
        channel._conversation._greeted = True
        channel._hello.set_result(None)
        told: list[Event] = []
        channel.on_event = told.append
        try:
            yield SlowSession(channel, served.agent, served.line, told)
        finally:
            await channel.close()
            served.agent.on_sigterm()


@pytest.fixture
def large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "there" / "large"
    path.parent.mkdir()
    path.write_bytes(random.Random(3).randbytes(FILE_BYTES))
    return path


def test_requests_interleave_with_upload(large_file: Path) -> None:
    async def scenario() -> None:
        async with slow_session() as session:
            digest = hashlib.sha256(large_file.read_bytes()).hexdigest()
            sending = asyncio.create_task(
                send_blocks(session.channel, large_file, "put_blob", sha256=digest)
            )
            assert await session.words(sending) > 8  # at most four blocks are in transit
            assert session.line.max_hosts["up"] < MAX_BUFFERED_BYTES
            assert blob_path(digest)
            cached = [p for p in (large_file.parents[1] / "cache").rglob("*") if p.is_file()]
            assert large_file.read_bytes() in [path.read_bytes() for path in cached]

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_requests_interleave_with_download(large_file: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with slow_session() as session:
            (tmp_path / "here").mkdir()
            arriving = IncomingFile(str(tmp_path / "here"), "large")
            fetching = fetch_file(
                session.channel, str(large_file.parent), "large", FILE_BYTES, arriving
            )
            assert await session.words(asyncio.create_task(fetching)) > 8
            assert session.line.max_hosts["down"] < MAX_BUFFERED_BYTES
            assert (tmp_path / "here" / "large").read_bytes() == large_file.read_bytes()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_heavy_output_does_not_delay_events() -> None:
    """Output is read as fast as it can be sent; later events arrive soon."""

    async def scenario() -> None:
        async with slow_session() as session:
            session.channel._conversation._ranks = frozenset({0})
            finished = threading.Event()

            def write() -> None:
                header = {"event": "output", "rank": 0, "stream": "out"}
                while not finished.wait(0.001):
                    if not session.agent.outbox.full:
                        session.agent.outbox.post(header, random.randbytes(1 << 16))

            writing = threading.Thread(target=write)
            writing.start()
            delay = asyncio.create_task(asyncio.sleep(4))
            assert await session.words(delay) > 8
            finished.set()
            await asyncio.to_thread(writing.join)
            buffered = session.agent.outbox._lanes.size(1) + len(session.line.down)
            assert (
                buffered < 2 * MAX_BUFFERED_BYTES
            )  # one second of the link, not sixteen for 8 MiB
            session.agent.outbox.post({"event": "leftovers killed", "count": 7})
            while session.told[-1].kind == "output":
                await asyncio.sleep(0.01)
            assert session.told[-1]["count"] == 7
            assert sum(event.kind == "output" for event in session.told) > 4

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_file_block_renews_lease(large_file: Path) -> None:
    async def scenario() -> None:
        async with slow_session() as session:
            await session.channel.request("lease", seconds=50.0)
            previous = session.agent.lease._renewed
            sent = asyncio.ensure_future(session.channel.request(
                "put_file", key="a" * 16, path="x", offset=0, last=False, blob=bytes(BLOCK_BYTES)
            ))  # fmt: skip
            while session.agent.lease._renewed == previous:
                assert not sent.done()
                await asyncio.sleep(0.01)
            sent.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_stalled_link_buffers_bounded_data(large_file: Path) -> None:
    """The transfer continues where it was. If it is cancelled, no more of it is sent."""

    async def scenario() -> None:
        async with slow_session() as session:
            digest = hashlib.sha256(large_file.read_bytes()).hexdigest()
            sending = asyncio.create_task(
                send_blocks(session.channel, large_file, "put_blob", sha256=digest)
            )
            while session.line.max_hosts["up"] < 20_000:
                await asyncio.sleep(0.01)
            session.line.stopped = True
            query = asyncio.ensure_future(session.channel.request("clock"))
            await asyncio.sleep(0.5)
            assert not query.done()
            assert len(session.line.up) < MAX_BUFFERED_BYTES
            session.line.stopped = False
            await query
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            assert (
                session.channel._lanes.size(FILES) <= BLOCK_BYTES + 1000
            )  # only the current block
            while session.channel._lanes:
                await asyncio.sleep(0.01)
            assert await session.channel.request("clock")
            assert session.line.max_hosts["up"] < MAX_BUFFERED_BYTES

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_stalled_link_does_not_block_second_link(large_file: Path) -> None:
    async def scenario() -> None:
        async with slow_session() as session, slow_session() as blocked:
            digest = hashlib.sha256(large_file.read_bytes()).hexdigest()
            blocked.line.stopped = True
            waiting = asyncio.create_task(
                send_blocks(blocked.channel, large_file, "put_blob", sha256=digest)
            )
            await send_blocks(session.channel, large_file, "put_blob", sha256=digest)
            assert not waiting.done()
            assert len(blocked.line.up) < MAX_BUFFERED_BYTES
            blocked.line.stopped = False
            await waiting

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_exit_does_not_wait_for_files(large_file: Path, tmp_path: Path) -> None:
    """Covers files that are being fetched and files that are being sent."""

    async def scenario() -> None:
        async with slow_session() as session:
            (tmp_path / "here").mkdir()
            arriving = IncomingFile(str(tmp_path / "here"), "large")
            digest = hashlib.sha256(large_file.read_bytes()).hexdigest()
            work = [
                asyncio.create_task(
                    send_blocks(session.channel, large_file, "put_blob", sha256=digest)
                ),
                asyncio.create_task(
                    fetch_file(
                        session.channel, str(large_file.parent), "large", FILE_BYTES, arriving
                    )
                ),
            ]
            while not (session.channel._lanes and session.agent.outbox._lanes):
                await asyncio.sleep(0.01)
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            session.channel._dismiss()
            assert not session.channel._lanes
            while not any(event.kind == "leaving" for event in session.told):
                await asyncio.sleep(0.01)
            assert len(session.line.up) + len(session.line.down) < MAX_BUFFERED_BYTES
            assert session.agent.outbox.empty

    asyncio.run(asyncio.wait_for(scenario(), 60))
