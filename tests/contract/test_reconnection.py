"""Tests a channel that survives broken connections, and who may take it over."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import random
import re
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from paceline.agent import reconnection as agent_reconnection
from paceline.agent.frames import HIGH_WATER_BYTES, Decoder, Outbox, UnackedFrames
from paceline.agent.multiplexing import TALK
from paceline.agent.reattach import connect_agent
from paceline.agent.reconnection import MARK, ReconnectListener, mac
from paceline.agent.server import Agent
from paceline.agent.stream import Stream
from paceline.remote import login, reconnection
from paceline.remote.agent_code import reconnect_source
from paceline.remote.channel import Channel, LoginError
from paceline.remote.link import ProcessLink
from paceline.remote.openssh import SshOptions, agent_command
from paceline.spec.events import Event
from paceline.spec.hosts import Host
from paceline.spec.schema import InvalidValue
from real_agents import ENDLESS, CutLine

KEY = b"k" * 32

# --- messages are kept until they are acknowledged


def test_retains_unacknowledged_frames_in_order() -> None:
    unacked = UnackedFrames()
    for number in range(5):
        unacked.add(b"%d" % number)
    unacked.acknowledge(2)
    unacked.acknowledge(1)  # ignored, as it is old
    assert (list(unacked), unacked.size, unacked.num_sent) == ([b"2", b"3", b"4"], 3, 5)
    for count in (6, -1, "3", None, 2.0):
        with pytest.raises(ValueError, match="never sent"):
            unacked.acknowledge(count)
    assert unacked.requeue() == [b"2", b"3", b"4"]
    assert unacked.num_sent == 2


@dataclass
class Pipe:
    """An outbox and its reader."""

    ends: tuple[int, int] = field(default_factory=os.pipe)
    wake: tuple[int, int] = field(default_factory=os.pipe)

    def __post_init__(self) -> None:
        for fd in (*self.ends, *self.wake):
            os.set_blocking(fd, False)
        self.outbox = Outbox(self.ends[1], self.wake[1])

    def other(self) -> tuple[int, int]:
        """Returns another pair of ends to continue with."""
        ends = os.pipe()
        for fd in ends:
            os.set_blocking(fd, False)
        return ends

    def close(self, *extra_fds: int) -> None:
        for fd in (*self.ends, *self.wake, *extra_fds):
            with contextlib.suppress(OSError):
                os.close(fd)


def numbers(data: bytes) -> list[int]:
    return [message["n"] for message, _ in Decoder().feed(data)]


def test_outbox_resumes_after_acknowledged_frames() -> None:
    pipe = Pipe()
    box = pipe.outbox
    box.retains = True
    for number in range(100):
        box.post({"n": number, "x": "x" * 3000})
    box.flush()  # stops within a frame, as a pipe holds 64 KiB
    assert 0 < len(numbers(os.read(pipe.ends[0], 1 << 20))) < 100
    box.disconnect()
    box.post({"n": 100})
    read, write = pipe.other()
    box.resume(write, 7)
    sent = b""
    while box.pending:
        box.flush()
        sent += os.read(read, 1 << 20)
    assert numbers(sent) == list(range(7, 101))
    pipe.close(read, write)


def test_broken_outbox_without_retention_drops_frames() -> None:
    pipe = Pipe()
    os.close(pipe.ends[0])
    pipe.outbox.post({"n": 1})
    pipe.outbox.flush()
    pipe.outbox.post({"n": 2})
    assert pipe.outbox.broken
    assert pipe.outbox.pending == 0
    pipe.close()


def test_unacknowledged_output_fills_outbox() -> None:
    pipe = Pipe()
    box = pipe.outbox
    box.retains = True
    while not box.full:
        box.post({"event": "output"}, bytes(1 << 16))
        box.flush()
        with contextlib.suppress(BlockingIOError):
            os.read(pipe.ends[0], 1 << 20)
    assert box._lanes.size(TALK) < HIGH_WATER_BYTES // 2
    while box.full:
        box.acknowledge(box._unacked.num_sent)
        box.flush()
        with contextlib.suppress(BlockingIOError):
            os.read(pipe.ends[0], 1 << 20)
    pipe.close()


# --- interrupted connections


class LimitedLink(CutLine):
    """A link that ends after ``left`` bytes in total; its first output names the agent to reach."""

    def __init__(self, left: int, on_attach: Callable[[str, socket.socket], None] | None) -> None:
        self._ours, self._theirs = socket.socketpair()
        self.left, self._meets = left, on_attach

    async def opened(self) -> LimitedLink:
        try:
            streams = await asyncio.open_connection(sock=self._ours)
        except BaseException:  # the caller has given up
            self._ours.close()
            self._theirs.close()
            raise
        super().__init__(*streams, self.left)
        return self

    def handed_over(self) -> int:
        """Returns the other end, which the receiver closes."""
        fd = os.dup(self._theirs.fileno())
        self._theirs.close()
        return fd

    def write(self, data: bytes) -> None:
        if self._meets is not None:
            (name,) = re.findall(rb"attach\('([a-z0-9-]+)', False\)", data)
            on_attach, self._meets = self._meets, None
            with contextlib.suppress(OSError):
                on_attach(name.decode(), self._theirs)
            self._theirs.close()
        elif self.left:
            self._writer.write(self._pass(data))

    async def has_exited(self) -> bool:
        return False

    async def drop(self) -> None:
        self.transport.abort()
        self._theirs.close()


HOLDERS: list[socket.socket] = []


async def end(agent: Agent, serving: threading.Thread) -> None:
    """Ends an agent whose channel is closed, and the processes that pass connections on."""
    agent.on_sigterm()
    await asyncio.to_thread(serving.join)
    agent.stream.release()
    for fd in (agent._wake_read, agent._wake_write):
        os.close(fd)
    while HOLDERS:
        HOLDERS.pop().close()


def attach_streams(name: str, remote_end: socket.socket) -> None:
    """Passes a connection to an agent, like ``agent/reattach.py``."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.connect("\0" + name)
    HOLDERS.append(client)
    socket.send_fds(client, [b"m"], [remote_end.fileno()] * 3)


@dataclass
class AgentSession:
    """A channel, the agent at its other end, and its events."""

    channel: Channel
    agent: Agent
    told: list[Event]
    lefts: list[int]  # bytes for each of the next links

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(2000):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it never came true")


@contextlib.asynccontextmanager
async def agent_session(*lefts: int) -> AsyncIterator[AgentSession]:
    """Runs an agent in a thread that accepts reconnection; each link lasts for the given bytes."""
    left = list(lefts)

    async def dial() -> Any:
        return await LimitedLink(left.pop(0) if left else ENDLESS, attach_streams).opened()

    line = await LimitedLink(ENDLESS, None).opened()
    remote_end = line.handed_over()
    agent = Agent(remote_end, os.dup(remote_end), "/nowhere/agent/package")
    agent._send_hello = lambda: None  # type: ignore[method-assign]
    channel = Channel(Host("n1"), line, dial)  # type: ignore[arg-type]
    serving = threading.Thread(target=agent.run)
    serving.start()
    channel._conversation._greeted = True
    channel._hello.set_result(None)
    told: list[Event] = []
    channel.on_event = told.append
    channel._tasks.append(asyncio.create_task(channel._read_stderr()))
    channel.listen()
    await channel._register()
    try:
        yield AgentSession(channel, agent, told, left)
    finally:
        if not channel.lost.is_set():
            with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
                await asyncio.wait_for(channel.request("bye"), 5)  # like the launcher
        agent.on_sigterm()
        await channel.close()
        await end(agent, serving)


@pytest.mark.parametrize("seed", range(4))
def test_exactly_once_delivery_over_broken_links(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(reconnection, "PAUSE_S", 0.0)
    monkeypatch.setattr("paceline.remote.channel.STDERR_GRACE_S", 0.0)
    num_events = 400
    lefts = [rng.randrange(1, 6000) for _ in range(25)]

    async def scenario() -> None:
        async with agent_session(*lefts) as session:

            def post_events() -> None:
                for number in range(num_events):
                    fields = {"event": "leftovers killed", "count": number}
                    session.agent.outbox.post(fields)

            posting = threading.Thread(target=post_events)
            session.channel._link.left = rng.randrange(1000)  # type: ignore[attr-defined]
            posting.start()
            questions = [
                session.channel.request("look", paths=[f"/{number}" + "x" * rng.randrange(200)])
                for number in range(60)
            ]
            answers = await asyncio.gather(*questions)
            await session.until(
                lambda: sum(e.kind == "leftovers killed" for e in session.told) >= num_events
            )
            posting.join()
            counts = [e["count"] for e in session.told if e.kind == "leftovers killed"]
            assert counts == list(range(num_events))
            assert [a["paths"][0]["path"].rstrip("x") for a in answers] == [
                f"/{number}" for number in range(60)
            ]
            assert sum(e.kind == "connection restored" for e in session.told) >= 3
            assert "connection ended" not in {e.kind for e in session.told}

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize("seed", range(3))
def test_large_messages_survive_broken_links(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(reconnection, "PAUSE_S", 0.0)
    monkeypatch.setattr("paceline.remote.channel.STDERR_GRACE_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lefts = [rng.randrange(2000, 90_000) for _ in range(8)]
    paths = [f"{number}/{'x' * 200}" for number in range(1500)]  # in a frame of 300 KB

    async def scenario() -> None:
        async with agent_session(*lefts) as session:
            content = rng.randbytes(150_000)
            fields = {"key": "a" * 24, "path": "x", "offset": 0, "last": True}
            upload = session.channel.request(
                "put_file", sha256=hashlib.sha256(content).hexdigest(), blob=content, **fields
            )
            session.channel._link.left = rng.randrange(50_000)  # type: ignore[attr-defined]
            _, answer = await asyncio.gather(upload, session.channel.request("look", paths=paths))
            assert [found["path"] for found in answer["paths"]] == paths
            (file,) = tmp_path.rglob("x")
            assert file.read_bytes() == content
            assert sum(event.kind == "connection restored" for event in session.told) >= 3

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_missing_agent_is_reported_immediately() -> None:
    async def scenario() -> None:
        async with agent_session() as session:
            session.channel._address = reconnection.AgentAddress("paceline-" + "0" * 32, KEY)

            async def dial() -> Any:
                argv = agent_command(sys.executable)
                pipe = subprocess.PIPE
                process = await asyncio.create_subprocess_exec(
                    *argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
                )
                return ProcessLink(process)

            session.channel._dial = dial
            session.channel._link.transport.abort()  # type: ignore[attr-defined]
            with pytest.raises(ConnectionError):
                await asyncio.wait_for(session.channel.request("clock"), 60)
            assert session.channel.lost.is_set()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_half_closed_input_means_launcher_exited() -> None:
    async def scenario() -> None:
        async with agent_session() as session:
            line: Any = session.channel._link
            line.transport.get_extra_info("socket").shutdown(socket.SHUT_WR)
            await session.until(lambda: any(event.kind == "leaving" for event in session.told))
            (left,) = (event for event in session.told if event.kind == "leaving")
            assert left["reason"] == "launcher"

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_agent_rejects_launcher_with_impossible_count(tmp_path: Path) -> None:
    """It is another launcher, even with the right key; the real one may still connect."""
    with contextlib.ExitStack() as opened:
        fds = [opened.enter_context((tmp_path / str(n)).open("wb+")).fileno() for n in range(3)]
        stream = Stream(*fds)
        new_fds = [os.dup(fd) for fd in fds]
        accepted = agent_reconnection.Visit(
            agent_reconnection.Streams(*new_fds), 7, socket.socket()
        )
        stream._place = Mock(readers=lambda: [99], readable=lambda *_: accepted)
        assert stream.readable(99) == []
        assert (stream._input, stream.outbox.fd) == (fds[0], fds[1])
        for fd in new_fds:
            with pytest.raises(OSError, match="Bad file"):
                os.fstat(fd)
        assert accepted.holder.fileno() == -1


def test_dropping_link_marks_channel_broken() -> None:
    """An agent was there to reconnect: the node is not lost because of that silence."""

    async def scenario() -> None:
        channel = Channel(Host("n1"), Mock(drop=AsyncMock()))
        channel.received_at = 5.0
        await channel._drop_link()
        assert channel.is_broken
        assert channel._broken_at == 5.0  # the break began then

    asyncio.run(scenario())


def test_agent_exits_if_facts_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    local_end, remote_end = socket.socketpair()

    def fail_to_gather() -> None:
        raise OSError("no facts")

    monkeypatch.setattr("paceline.agent.surveys.facts.gather", fail_to_gather)
    agent = Agent(remote_end.detach(), os.open(os.devnull, os.O_WRONLY), "/nowhere/agent/package")
    serving = threading.Thread(target=agent.run)
    serving.start()
    serving.join(60)
    assert not serving.is_alive()
    local_end.close()
    agent.stream.release()
    for fd in (agent._wake_read, agent._wake_write):
        os.close(fd)


def test_channel_survives_break_right_after_open() -> None:
    """It is either refused and retried, or it survives broken links from the start."""

    async def opened(left: int) -> bool:
        line = await LimitedLink(left, None).opened()
        remote_end = line.handed_over()
        agent = Agent(remote_end, os.dup(remote_end), "/nowhere/agent/package")
        serving = threading.Thread(target=agent.run)
        serving.start()

        async def dial() -> Any:
            return await LimitedLink(ENDLESS, attach_streams).opened()

        channel = Channel(Host("n1"), line, dial)  # type: ignore[arg-type]
        try:
            await channel.open(early_data=b"")
        except LoginError:
            return False
        else:
            line.left = 0
            line.transport.abort()
            await channel.request("clock")
            return True
        finally:
            await channel.close(1.0)
            await end(agent, serving)

    async def scenario() -> None:
        assert not await opened(0)
        for left in (50, 150, 500, 1000, 4000):  # bytes: before, within and after its first message
            await opened(left)
        assert await opened(ENDLESS)

    asyncio.run(asyncio.wait_for(scenario(), 120))


@pytest.mark.parametrize("sent", [True, False])
def test_resends_unanswered_bye(sent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent ends because of the goodbye, not because of a timeout."""
    reasons: list[str] = []
    real_start_exit = Agent.start_exit

    def record_exit(agent: Agent, reason: str, why: str) -> None:
        reasons.append(reason)
        real_start_exit(agent, reason, why)

    monkeypatch.setattr(Agent, "start_exit", record_exit)

    async def scenario() -> None:
        async with agent_session() as session:
            line: Any = session.channel._link
            if sent:  # on a link that breaks during the request
                line.left = 0
            else:  # during reconnection
                dial = session.channel._dial
                assert dial is not None

                async def dial_when_dismissed() -> Any:
                    if not session.channel._is_dismissed:
                        raise OSError("no way yet")
                    return await dial()

                session.channel._dial = dial_when_dismissed
                line.transport.abort()
                await session.until(lambda: session.channel.is_broken)
            await session.channel.close(60.0)
            await session.until(lambda: bool(reasons))
            assert reasons == ["bye"]

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_recovered_link_stops_reconnecting() -> None:
    async def scenario() -> None:
        async with agent_session() as session:

            async def hang() -> Any:
                await asyncio.sleep(60)

            session.channel._dial = hang
            link = session.channel._link
            session.channel.reconnect()
            await asyncio.sleep(0.05)
            assert await session.channel.request("clock")
            assert session.channel._link is link
            assert session.channel._reconnecting is None

    asyncio.run(asyncio.wait_for(scenario(), 60))


# --- who may reconnect


def connect_client(place: ReconnectListener) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(60)
    client.connect("\0" + place.name)
    place.readable(place.readers()[0], 0)
    return client


@dataclass
class Visit:
    """A connection to a reconnect listener, with its own streams."""

    place: ReconnectListener

    def __post_init__(self) -> None:
        self.holder = connect_client(self.place)
        self.ours, remote_end = socket.socketpair()
        self.ours.settimeout(60)
        fds = [remote_end.fileno()] * 3
        socket.send_fds(self.holder, [b"m"], fds)
        remote_end.close()
        self.place.readable(self.place.readers()[-1], 0)
        self.nonce = self.hear().split()[2].decode()

    def hear(self) -> bytes:
        return self.ours.recv(4096)

    def say(self, line: bytes) -> Any:
        self.ours.sendall(line)
        return self.place.readable(self.place.readers()[-1], 4)

    def line(self, key: bytes = KEY, count: str = "3") -> bytes:
        return f"ab {count} {mac(key, 'launcher', self.nonce, 'ab', count)}\n".encode()

    def close(self) -> None:
        self.holder.close()
        self.ours.close()


@pytest.fixture
def place() -> Any:
    num_fds = len(list(Path("/proc/self/fd").iterdir()))
    place = ReconnectListener(KEY)
    yield place
    place.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == num_fds


def test_listener_accepts_proof_of_key(place: ReconnectListener) -> None:
    visit = Visit(place)
    accepted = visit.say(visit.line())
    assert accepted.num_received == 3
    assert visit.hear() == MARK + f"again 4 {mac(KEY, 'agent', 'ab', visit.nonce, '4')}\n".encode()
    accepted.streams.close()
    accepted.holder.close()
    visit.close()


LINES: dict[str, Callable[[Visit], bytes]] = {
    "another key": lambda visit: visit.line(b"j" * 32),
    "the proof of another reconnection": lambda visit: Visit.line(
        type("Other", (), {"nonce": "00" * 16})()  # type: ignore[arg-type]
    ),
    "its own words": lambda visit: f"ab 3 {mac(KEY, 'agent', visit.nonce, 'ab', '3')}\n".encode(),
    "another count": lambda visit: visit.line().replace(b" 3 ", b" 2 "),
    "no count": lambda visit: visit.line(count="x"),
    "an endless count": lambda visit: visit.line(count="9" * 100),
    "two words": lambda visit: b"ab 3\n",
    "bytes": lambda visit: bytes(range(128, 256)) + b"\n",
    "an endless line": lambda visit: b"x" * 4096,
}


@pytest.mark.parametrize("line", LINES)
def test_listener_rejects_invalid_proof(place: ReconnectListener, line: str) -> None:
    visit = Visit(place)
    assert visit.say(LINES[line](visit)) is None
    assert place.readers()[1:] == []
    with contextlib.suppress(ConnectionResetError):
        assert visit.hear() in (b"", MARK + b"stranger\n")
    with contextlib.suppress(ConnectionResetError):
        assert visit.holder.recv(1) == b""
    visit.close()


def test_listener_rejects_foreign_user(
    place: ReconnectListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_reconnection, "peer_uid", lambda connection: os.getuid() + 1)
    client = connect_client(place)
    assert place.readers()[1:] == []
    assert client.recv(1) == b""
    client.close()


def test_listener_rejects_visitor_without_streams(place: ReconnectListener) -> None:
    client = connect_client(place)
    client.sendall(b"hello")
    place.readable(place.readers()[-1], 0)
    assert place.readers()[1:] == []
    client.close()


def test_idle_visitors_do_not_block_listener(
    place: ReconnectListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle_clients = [connect_client(place) for _ in range(50)]
    assert len(place.readers()) == 1 + agent_reconnection.MAX_VISITORS
    visit = Visit(place)
    accepted = visit.say(visit.line())
    assert accepted is not None
    accepted.streams.close()
    accepted.holder.close()
    visit.close()
    monkeypatch.setattr(agent_reconnection, "PROOF_TIMEOUT_S", -1.0)
    assert place.readers()[1:] == []
    for session in idle_clients:
        session.close()


@pytest.mark.parametrize(
    "connect", [lambda name: agent_reconnection.connect(name, 60), connect_agent]
)
def test_connect_waits_if_backlog_is_full(
    connect: Callable[[str], socket.socket],
) -> None:
    name = f"paceline-test-{os.urandom(8).hex()}"
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(f"\0{name}")
        listener.listen(0)
        full = False
        while not full:
            other = stack.enter_context(socket.socket(socket.AF_UNIX))
            other.setblocking(False)
            full = other.connect_ex(f"\0{name}") == errno.EAGAIN
        accepting = threading.Timer(0.1, lambda: listener.accept()[0].close())
        accepting.start()
        stack.enter_context(connect(name))
        accepting.join()


def test_reports_missing_agent() -> None:
    place = ReconnectListener(KEY)
    place.close()
    result = subprocess.run(
        agent_command(sys.executable), input=reconnect_source(place.name), capture_output=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (3, MARK + b"gone\n")


def test_command_line_reveals_no_reconnection_secret() -> None:
    """The whole source is sent: the remote command is the same that starts an agent."""
    assert "paceline-" not in " ".join(agent_command("python3")).replace("paceline-boot", "")
    assert KEY not in reconnect_source("paceline-ab")


class HostileLink:
    """A link to a hostile node that sends arbitrary data."""

    def __init__(self, sent: bytes) -> None:
        self.reader = asyncio.StreamReader()
        self.reader.feed_data(sent)
        self.reader.feed_eof()
        self.writer = self
        self.written = b""
        self.was_cut = False

    def write(self, data: bytes) -> None:
        self.written += data

    async def drain(self) -> None: ...

    async def drop(self) -> None:
        self.was_cut = True


@pytest.mark.parametrize("sent", [
    MARK + b"again 5 " + b"0" * 64 + b"\n", MARK + b"stranger\n", MARK + b"again x y\n",
    MARK + b"again " + b"9" * 90 + b" x\n", MARK + b"again\n", b"", MARK + b"\xff\xff\n",
    b"x" * (5 << 20),
])  # fmt: skip
def test_launcher_rejects_unauthenticated_agent(sent: bytes) -> None:
    async def scenario() -> None:
        found = reconnection.PendingLink(HostileLink(sent), "ab" * 16, b"")  # type: ignore[arg-type]
        with pytest.raises((reconnection.AgentNotFound, EOFError, InvalidValue)):
            await reconnection.authenticate(found, reconnection.AgentAddress("paceline-x", KEY), 3)

    asyncio.run(scenario())


def test_cancelled_reconnect_drops_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnection, "ATTEMPT_INTERVAL_S", 0.01)
    monkeypatch.setattr(reconnection, "PAUSE_S", 0.0)

    class BlockingLink(HostileLink):
        """Sends nothing, and is slow to close."""

        def __init__(self) -> None:
            super().__init__(b"")
            self.reader = asyncio.StreamReader()
            self.cutting = asyncio.Event()

        async def drop(self) -> None:
            self.cutting.set()
            await asyncio.sleep(0.2)
            self.was_cut = True

    async def scenario() -> None:
        blocking_link, agent = BlockingLink(), HostileLink(MARK + b"meet " + b"ab" * 16 + b"\n")
        links: list[Any] = [blocking_link, agent]

        async def dial() -> Any:
            return links.pop(0) if links else await asyncio.Event().wait()

        reconnect_task = asyncio.create_task(
            reconnection.reconnect(dial, reconnection.AgentAddress("x", KEY))
        )
        await asyncio.wait_for(blocking_link.cutting.wait(), 60)
        reconnect_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reconnect_task
        assert agent.was_cut

    asyncio.run(scenario())


def test_launcher_rejects_agent_with_impossible_count() -> None:
    async def scenario() -> None:
        async with agent_session() as session:
            session.agent.outbox.num_received = 10**6
            with pytest.raises(ConnectionError):
                await session.channel.request("clock")
            assert "never sent" in session.channel.violation

    with pytest.raises(Exception, match="never sent"):
        asyncio.run(asyncio.wait_for(scenario(), 60))


def test_abandons_host_with_closed_pipe() -> None:
    """Example: all nodes ended while this process was stopped."""

    async def run_scenario() -> bool:
        pipe = subprocess.PIPE
        child = await asyncio.create_subprocess_exec("true", stdin=pipe, stdout=pipe, stderr=pipe)
        channel = Channel(Host("n1"), ProcessLink(child))
        await child.wait()
        transport: Any = channel._link.writer.transport
        while transport._loop is not None:
            await asyncio.sleep(0.01)
        channel.abandon()
        return channel.lost.is_set()

    assert asyncio.run(asyncio.wait_for(run_scenario(), 10))


def open_through(shell: str) -> None:
    """Opens a channel through a shell command in the place of ssh."""

    async def run_scenario() -> None:
        pipe = subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            "sh", "-c", shell, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        await Channel(Host("n1"), ProcessLink(child)).open()

    asyncio.run(asyncio.wait_for(run_scenario(), 30))


def test_error_names_foreign_shell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.remote.channel.HELLO_TIMEOUT_S", 0.2)
    with pytest.raises(LoginError, match="another shell"):
        open_through("cat >/dev/null; sleep 0.2; echo 'fish: Missing end to balance this' >&2")


def test_error_names_exit_status_that_follows_end_of_output() -> None:
    """The remote command's exit status arrives after the end of its output."""
    with pytest.raises(LoginError) as error:
        open_through("echo No commands; exec >&-; sleep 0.3; exit 3")
    found = "ssh ended with status 3 before our command ran, and printed: No commands"
    assert error.value.refusal.details == found


def test_error_for_unresponsive_host_names_proxy_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("paceline.remote.channel.HELLO_TIMEOUT_S", 0.5)
    monkeypatch.setattr("paceline.remote.channel.END_OF_INPUT_S", 0.1)
    config = tmp_path / "config"
    config.write_text("Host n1\n  ProxyCommand sleep 20\n")
    with pytest.raises(LoginError) as error:
        asyncio.run(asyncio.wait_for(login.connect(Host("n1"), "python3", SshOptions(config)), 30))
    refusal = error.value.refusal
    assert refusal.details == "nothing came from the host within 0 s"
    assert refusal.remedy.startswith("The connection itself may hang, or a shell start-up file of")
    assert refusal.remedy.endswith("It goes through this ProxyCommand: sleep 20")
