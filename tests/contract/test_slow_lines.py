"""A conversation over a narrow line with an endless buffer in front of it, as kernels have it.

What is asserted are bytes, not seconds: how much lay in the buffers, before which every word waits.
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

from agents import agent_in_thread
from paceline.agent.files.safe_paths import IncomingFile
from paceline.agent.files.snapshot import BLOCK_BYTES, blob_path
from paceline.agent.multiplexing import FILES
from paceline.agent.server import Agent
from paceline.remote.channel import Channel
from paceline.spec.events import Event
from paceline.transfer.files import send_blocks
from paceline.transfer.results import fetch_file

RATE = 500_000  # bytes a second: 4 Mbit/s
LARGE = 2_000_000  # bytes: four seconds of it
SHORT = 300_000  # bytes that may lie before it; without pacing, nearly all does
TICK_S = 0.005


class SlowLine:
    """A link that carries so many bytes a second each way, however many are written.

    Attributes:
        up, down: Bytes on their way to the agent and from it.
        max_hosts: The most that lay there at any time, in both directions.
        stopped: Nothing passes.
    """

    def __init__(self, ours: socket.socket) -> None:
        self._ours = ours
        ours.setblocking(False)
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
        before = loop.time()
        while True:
            await asyncio.sleep(TICK_S)
            with contextlib.suppress(BlockingIOError):
                while data := self._ours.recv(1 << 20):
                    self.down += data
                self.reader.feed_eof()
                return
            self.max_hosts["down"] = max(self.max_hosts["down"], len(self.down))
            now = loop.time()
            count, before = int((now - before) * RATE), now
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

    async def drain(self) -> None:
        """It takes everything at once."""

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
class Slow:
    channel: Channel
    agent: Agent
    line: SlowLine
    told: list[Event]

    async def words(self, work: asyncio.Task[Any]) -> int:
        """Asks the time, again and again, while something is done; how often it was answered."""
        answered = 0
        while not work.done():
            asked = asyncio.ensure_future(self.channel.request("clock"))
            await asyncio.wait([asked, work], return_when=asyncio.FIRST_COMPLETED)
            answered += asked.done()
            await asked
        await work
        return answered


@contextlib.asynccontextmanager
async def slow() -> AsyncIterator[Slow]:
    """An agent in a thread, at the other end of a slow line."""
    async with agent_in_thread(line=SlowLine) as served:
        channel = served.node.channel
        channel._conversation._greeted = True
        channel._hello.set_result(None)
        told: list[Event] = []
        channel.on_event = told.append
        try:
            yield Slow(channel, served.agent, served.line, told)
        finally:
            await channel.close()
            served.agent.on_sigterm()


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "there" / "large"
    path.parent.mkdir()
    path.write_bytes(random.Random(3).randbytes(LARGE))
    return path


def test_words_go_between_the_pieces_of_what_is_sent(large: Path) -> None:
    async def go() -> None:
        async with slow() as one:
            digest = hashlib.sha256(large.read_bytes()).hexdigest()
            sending = asyncio.create_task(
                send_blocks(one.channel, large, "put_blob", sha256=digest)
            )
            assert await one.words(sending) > 8  # four blocks are under way at once
            assert one.line.max_hosts["up"] < SHORT
            assert blob_path(digest)
            cached = [p for p in (large.parents[1] / "cache").rglob("*") if p.is_file()]
            assert large.read_bytes() in [path.read_bytes() for path in cached]

    asyncio.run(asyncio.wait_for(go(), 60))


def test_words_go_between_the_pieces_of_what_is_fetched(large: Path, tmp_path: Path) -> None:
    async def go() -> None:
        async with slow() as one:
            (tmp_path / "here").mkdir()
            arriving = IncomingFile(str(tmp_path / "here"), "large")
            fetching = fetch_file(one.channel, str(large.parent), "large", LARGE, arriving)
            assert await one.words(asyncio.create_task(fetching)) > 8
            assert one.line.max_hosts["down"] < SHORT
            assert (tmp_path / "here" / "large").read_bytes() == large.read_bytes()

    asyncio.run(asyncio.wait_for(go(), 60))


def test_a_rank_that_writes_much_does_not_make_its_end_late() -> None:
    """Its output is read as fast as it can be told; what comes after it comes soon."""

    async def go() -> None:
        async with slow() as one:
            one.channel._conversation._ranks = frozenset({0})
            over = threading.Event()

            def write() -> None:
                about = {"event": "output", "rank": 0, "stream": "out"}
                while not over.wait(0.001):
                    if not one.agent.outbox.full:
                        one.agent.outbox.post(about, random.randbytes(1 << 16))

            writing = threading.Thread(target=write)
            writing.start()
            heard = asyncio.create_task(asyncio.sleep(4))
            assert await one.words(heard) > 8
            over.set()
            await asyncio.to_thread(writing.join)
            lies_before = one.agent.outbox._lanes.size(1) + len(one.line.down)
            assert lies_before < 2 * SHORT  # a second of the line, not the sixteen of 8 MiB
            one.agent.outbox.post({"event": "leftovers killed", "count": 7})
            while one.told[-1].kind == "output":
                await asyncio.sleep(0.01)
            assert one.told[-1]["count"] == 7
            assert sum(event.kind == "output" for event in one.told) > 4

    asyncio.run(asyncio.wait_for(go(), 60))


def test_a_piece_of_a_file_prolongs_the_lease(large: Path) -> None:
    async def go() -> None:
        async with slow() as one:
            await one.channel.request("lease", seconds=50.0)
            before = one.agent.lease._renewed
            sent = asyncio.ensure_future(one.channel.request(
                "put_file", key="a" * 16, path="x", offset=0, last=False, blob=bytes(BLOCK_BYTES)
            ))  # fmt: skip
            while one.agent.lease._renewed == before:
                assert not sent.done()
                await asyncio.sleep(0.01)
            sent.cancel()

    asyncio.run(asyncio.wait_for(go(), 60))


def test_a_line_that_stops_takes_no_more_than_it_had_carried(large: Path) -> None:
    """And goes on where it was. Who gives up meanwhile leaves nothing behind that is sent."""

    async def go() -> None:
        async with slow() as one:
            digest = hashlib.sha256(large.read_bytes()).hexdigest()
            sending = asyncio.create_task(
                send_blocks(one.channel, large, "put_blob", sha256=digest)
            )
            while one.line.max_hosts["up"] < 20_000:
                await asyncio.sleep(0.01)
            one.line.stopped = True
            asked = asyncio.ensure_future(one.channel.request("clock"))
            await asyncio.sleep(0.5)
            assert not asked.done()
            assert len(one.line.up) < SHORT
            one.line.stopped = False
            await asked
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            assert one.channel._lanes.size(FILES) <= BLOCK_BYTES + 1000  # what had begun
            while one.channel._lanes:
                await asyncio.sleep(0.01)
            assert await one.channel.request("clock")
            assert one.line.max_hosts["up"] < SHORT

    asyncio.run(asyncio.wait_for(go(), 60))


def test_a_line_that_stands_still_holds_up_no_other(large: Path) -> None:
    async def go() -> None:
        async with slow() as one, slow() as other:
            digest = hashlib.sha256(large.read_bytes()).hexdigest()
            other.line.stopped = True
            waiting = asyncio.create_task(
                send_blocks(other.channel, large, "put_blob", sha256=digest)
            )
            await send_blocks(one.channel, large, "put_blob", sha256=digest)
            assert not waiting.done()
            assert len(other.line.up) < SHORT
            other.line.stopped = False
            await waiting

    asyncio.run(asyncio.wait_for(go(), 60))


def test_who_leaves_waits_for_no_file(large: Path, tmp_path: Path) -> None:
    """Neither for what was asked for, nor for what was being sent."""

    async def go() -> None:
        async with slow() as one:
            (tmp_path / "here").mkdir()
            arriving = IncomingFile(str(tmp_path / "here"), "large")
            digest = hashlib.sha256(large.read_bytes()).hexdigest()
            work = [
                asyncio.create_task(send_blocks(one.channel, large, "put_blob", sha256=digest)),
                asyncio.create_task(
                    fetch_file(one.channel, str(large.parent), "large", LARGE, arriving)
                ),
            ]
            while not (one.channel._lanes and one.agent.outbox._lanes):
                await asyncio.sleep(0.01)
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            one.channel._dismiss()
            assert not one.channel._lanes
            while not any(event.kind == "leaving" for event in one.told):
                await asyncio.sleep(0.01)
            assert len(one.line.up) + len(one.line.down) < SHORT
            assert one.agent.outbox.empty

    asyncio.run(asyncio.wait_for(go(), 60))
