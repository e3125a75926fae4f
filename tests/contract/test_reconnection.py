"""A conversation that outlives its links, and who may take it over."""

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

from agents import ENDLESS, CutLine
from paceline.agent import reconnection as agents_half
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

KEY = b"k" * 32

# --- what is kept until it was heard


def test_what_was_not_heard_is_kept_in_order() -> None:
    unheard = UnackedFrames()
    for number in range(5):
        unheard.add(b"%d" % number)
    unheard.acknowledge(2)
    unheard.acknowledge(1)  # is no news
    assert (list(unheard), unheard.size, unheard.num_sent) == ([b"2", b"3", b"4"], 3, 5)
    for count in (6, -1, "3", None, 2.0):
        with pytest.raises(ValueError, match="never sent"):
            unheard.acknowledge(count)
    assert unheard.requeue() == [b"2", b"3", b"4"]
    assert unheard.num_sent == 2


@dataclass
class Pipe:
    """An outbox and who reads it."""

    ends: tuple[int, int] = field(default_factory=os.pipe)
    wake: tuple[int, int] = field(default_factory=os.pipe)

    def __post_init__(self) -> None:
        for fd in (*self.ends, *self.wake):
            os.set_blocking(fd, False)
        self.outbox = Outbox(self.ends[1], self.wake[1])

    def other(self) -> tuple[int, int]:
        """Another pair of ends to go on by."""
        ends = os.pipe()
        for fd in ends:
            os.set_blocking(fd, False)
        return ends

    def close(self, *more: int) -> None:
        for fd in (*self.ends, *self.wake, *more):
            with contextlib.suppress(OSError):
                os.close(fd)


def numbers(data: bytes) -> list[int]:
    return [message["n"] for message, _ in Decoder().feed(data)]


def test_an_outbox_goes_on_after_what_was_heard() -> None:
    pipe = Pipe()
    box = pipe.outbox
    box.retains = True
    for number in range(100):
        box.post({"n": number, "x": "x" * 3000})
    box.flush()  # stops in the middle of a frame: a pipe holds 64 KiB
    assert 0 < len(numbers(os.read(pipe.ends[0], 1 << 20))) < 100
    box.disconnect()
    box.post({"n": 100})
    read, write = pipe.other()
    box.resume(write, 7)
    said = b""
    while box.pending:
        box.flush()
        said += os.read(read, 1 << 20)
    assert numbers(said) == list(range(7, 101))
    pipe.close(read, write)


def test_an_outbox_that_keeps_nothing_drops_what_nobody_reads() -> None:
    pipe = Pipe()
    os.close(pipe.ends[0])
    pipe.outbox.post({"n": 1})
    pipe.outbox.flush()
    pipe.outbox.post({"n": 2})
    assert pipe.outbox.broken
    assert pipe.outbox.pending == 0
    pipe.close()


def test_what_is_not_heard_stops_the_reading_of_output() -> None:
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


# --- links that are cut


class Line(CutLine):
    """A link that ends after so many bytes both ways; what is written first says whom to meet."""

    def __init__(self, left: int, meets: Callable[[str, socket.socket], None] | None) -> None:
        self._ours, self._theirs = socket.socketpair()
        self.left, self._meets = left, meets

    async def opened(self) -> Line:
        try:
            streams = await asyncio.open_connection(sock=self._ours)
        except BaseException:  # whoever dialled does not want it any more
            self._ours.close()
            self._theirs.close()
            raise
        super().__init__(*streams, self.left)
        return self

    def handed_over(self) -> int:
        """The other end, for somebody who closes it."""
        fd = os.dup(self._theirs.fileno())
        self._theirs.close()
        return fd

    def write(self, data: bytes) -> None:
        if self._meets is not None:
            (name,) = re.findall(rb"attach\('([a-z0-9-]+)', False\)", data)
            meets, self._meets = self._meets, None
            with contextlib.suppress(OSError):
                meets(name.decode(), self._theirs)
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
    """Ends an agent whose channel is closed, and what hands connections over."""
    agent.on_sigterm()
    await asyncio.to_thread(serving.join)
    agent.stream.release()
    for fd in (agent._wake_read, agent._wake_write):
        os.close(fd)
    while HOLDERS:
        HOLDERS.pop().close()


def hands_over(name: str, theirs: socket.socket) -> None:
    """As ``agent/reattach.py`` does."""
    there = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    there.connect("\0" + name)
    HOLDERS.append(there)
    socket.send_fds(there, [b"m"], [theirs.fileno()] * 3)


@dataclass
class Talk:
    """A channel, the agent at its other end, and what it told."""

    channel: Channel
    agent: Agent
    told: list[Event]
    lefts: list[int]  # bytes of the next links

    async def until(self, true: Callable[[], bool]) -> None:
        for _ in range(2000):
            if true():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it never came true")


@contextlib.asynccontextmanager
async def talk(*lefts: int) -> AsyncIterator[Talk]:
    """An agent in a thread that can be met again; each link lasts for so many bytes."""
    left = list(lefts)

    async def dial() -> Any:
        return await Line(left.pop(0) if left else ENDLESS, hands_over).opened()

    line = await Line(ENDLESS, None).opened()
    theirs = line.handed_over()
    agent = Agent(theirs, os.dup(theirs), "/nowhere/agent/package")
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
        yield Talk(channel, agent, told, left)
    finally:
        if not channel.lost.is_set():
            with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
                await asyncio.wait_for(channel.request("bye"), 5)  # as the launcher does
        agent.on_sigterm()
        await channel.close()
        await end(agent, serving)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_and_nothing_comes_twice(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(reconnection, "PAUSE_S", 0.0)
    monkeypatch.setattr("paceline.remote.channel.STDERR_GRACE_S", 0.0)
    many = 400
    lefts = [chance.randrange(1, 6000) for _ in range(25)]

    async def go() -> None:
        async with talk(*lefts) as one:

            def tell() -> None:
                for number in range(many):
                    about = {"event": "leftovers killed", "count": number}
                    one.agent.outbox.post(about)

            telling = threading.Thread(target=tell)
            one.channel._link.left = chance.randrange(1000)  # type: ignore[attr-defined]
            telling.start()
            questions = [
                one.channel.request("look", paths=[f"/{number}" + "x" * chance.randrange(200)])
                for number in range(60)
            ]
            answers = await asyncio.gather(*questions)
            await one.until(lambda: sum(e.kind == "leftovers killed" for e in one.told) >= many)
            telling.join()
            counts = [e["count"] for e in one.told if e.kind == "leftovers killed"]
            assert counts == list(range(many))
            assert [a["paths"][0]["path"].rstrip("x") for a in answers] == [
                f"/{number}" for number in range(60)
            ]
            assert sum(e.kind == "connection restored" for e in one.told) >= 3
            assert "connection ended" not in {e.kind for e in one.told}

    asyncio.run(asyncio.wait_for(go(), 60))


@pytest.mark.parametrize("seed", range(3))
def test_what_goes_in_pieces_goes_on_over_other_links(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(reconnection, "PAUSE_S", 0.0)
    monkeypatch.setattr("paceline.remote.channel.STDERR_GRACE_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lefts = [chance.randrange(2000, 90_000) for _ in range(8)]
    paths = [f"{number}/{'x' * 200}" for number in range(1500)]  # in a frame of 300 KB

    async def go() -> None:
        async with talk(*lefts) as one:
            content = chance.randbytes(150_000)
            about = {"key": "a" * 24, "path": "x", "offset": 0, "last": True}
            put = one.channel.request(
                "put_file", sha256=hashlib.sha256(content).hexdigest(), blob=content, **about
            )
            one.channel._link.left = chance.randrange(50_000)  # type: ignore[attr-defined]
            _, answer = await asyncio.gather(put, one.channel.request("look", paths=paths))
            assert [found["path"] for found in answer["paths"]] == paths
            (file,) = tmp_path.rglob("x")
            assert file.read_bytes() == content
            assert sum(event.kind == "connection restored" for event in one.told) >= 3

    asyncio.run(asyncio.wait_for(go(), 60))


def test_the_launcher_hears_at_once_that_nobody_is_there() -> None:
    async def go() -> None:
        async with talk() as one:
            one.channel._address = reconnection.AgentAddress("paceline-" + "0" * 32, KEY)

            async def dial() -> Any:
                argv = agent_command(sys.executable)
                pipe = subprocess.PIPE
                process = await asyncio.create_subprocess_exec(
                    *argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
                )
                return ProcessLink(process)

            one.channel._dial = dial
            one.channel._link.transport.abort()  # type: ignore[attr-defined]
            with pytest.raises(ConnectionError):
                await asyncio.wait_for(one.channel.request("clock"), 60)
            assert one.channel.lost.is_set()

    asyncio.run(asyncio.wait_for(go(), 60))


def test_an_input_that_ends_beside_an_output_that_is_read_is_the_launchers_end() -> None:
    async def go() -> None:
        async with talk() as one:
            line: Any = one.channel._link
            line.transport.get_extra_info("socket").shutdown(socket.SHUT_WR)
            await one.until(lambda: any(event.kind == "leaving" for event in one.told))
            (left,) = (event for event in one.told if event.kind == "leaving")
            assert left["reason"] == "launcher"

    asyncio.run(asyncio.wait_for(go(), 60))


def test_a_launcher_that_heard_what_was_never_said_is_hung_up_on(tmp_path: Path) -> None:
    """It is not ours, whatever key it has; ours may still come."""
    with contextlib.ExitStack() as opened:
        fds = [opened.enter_context((tmp_path / str(n)).open("wb+")).fileno() for n in range(3)]
        stream = Stream(*fds)
        new = [os.dup(fd) for fd in fds]
        met = agents_half.Visit(agents_half.Streams(*new), 7, socket.socket())
        stream._place = Mock(readers=lambda: [99], readable=lambda *_: met)
        assert stream.readable(99) == []
        assert (stream._input, stream.outbox.fd) == (fds[0], fds[1])
        for fd in new:
            with pytest.raises(OSError, match="Bad file"):
                os.fstat(fd)
        assert met.holder.fileno() == -1


def test_a_link_that_is_dropped_for_another_is_a_break() -> None:
    """Somebody was there to be met again: a node is not lost for that silence."""

    async def go() -> None:
        channel = Channel(Host("n1"), Mock(drop=AsyncMock()))
        channel.received_at = 5.0
        await channel._drop_link()
        assert channel.is_broken
        assert channel._broken_at == 5.0  # so long it took until it goes on

    asyncio.run(go())


def test_an_agent_that_cannot_greet_leaves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()

    def broken() -> None:
        raise OSError("no facts")

    monkeypatch.setattr("paceline.agent.surveys.facts.gather", broken)
    agent = Agent(theirs.detach(), os.open(os.devnull, os.O_WRONLY), "/nowhere/agent/package")
    serving = threading.Thread(target=agent.run)
    serving.start()
    serving.join(60)
    assert not serving.is_alive()
    ours.close()
    agent.stream.release()
    for fd in (agent._wake_read, agent._wake_write):
        os.close(fd)


def test_a_connection_that_was_opened_is_never_too_young_to_break() -> None:
    """It is refused, which is tried again, or it outlives its link from the first moment."""

    async def opened(left: int) -> bool:
        line = await Line(left, None).opened()
        theirs = line.handed_over()
        agent = Agent(theirs, os.dup(theirs), "/nowhere/agent/package")
        serving = threading.Thread(target=agent.run)
        serving.start()

        async def dial() -> Any:
            return await Line(ENDLESS, hands_over).opened()

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

    async def go() -> None:
        assert not await opened(0)
        for left in (50, 150, 500, 1000, 4000):  # bytes: before, in and after its first words
            await opened(left)
        assert await opened(ENDLESS)

    asyncio.run(asyncio.wait_for(go(), 120))


@pytest.mark.parametrize("said", [True, False])
def test_a_goodbye_that_is_not_answered_is_said_again(
    said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent leaves for the goodbye, and not when it has waited in vain."""
    reasons: list[str] = []
    leave = Agent.start_exit

    def noted(agent: Agent, reason: str, why: str) -> None:
        reasons.append(reason)
        leave(agent, reason, why)

    monkeypatch.setattr(Agent, "start_exit", noted)

    async def go() -> None:
        async with talk() as one:
            line: Any = one.channel._link
            if said:  # on a link that breaks under it
                line.left = 0
            else:  # while another one is looked for
                dial = one.channel._dial
                assert dial is not None

                async def later() -> Any:
                    if not one.channel._is_dismissed:
                        raise OSError("no way yet")
                    return await dial()

                one.channel._dial = later
                line.transport.abort()
                await one.until(lambda: one.channel.is_broken)
            await one.channel.close(60.0)
            await one.until(lambda: bool(reasons))
            assert reasons == ["bye"]

    asyncio.run(asyncio.wait_for(go(), 60))


def test_a_silent_link_that_speaks_again_is_kept() -> None:
    async def go() -> None:
        async with talk() as one:

            async def nobody() -> Any:
                await asyncio.sleep(60)

            one.channel._dial = nobody
            link = one.channel._link
            one.channel.reconnect()
            await asyncio.sleep(0.05)
            assert await one.channel.request("clock")
            assert one.channel._link is link
            assert one.channel._reconnecting is None

    asyncio.run(asyncio.wait_for(go(), 60))


# --- who is let in


def connected(place: ReconnectListener) -> socket.socket:
    there = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    there.settimeout(60)
    there.connect("\0" + place.name)
    place.readable(place.readers()[0], 0)
    return there


@dataclass
class Visit:
    """Somebody at a place, with streams of its own."""

    place: ReconnectListener

    def __post_init__(self) -> None:
        self.holder = connected(self.place)
        self.ours, theirs = socket.socketpair()
        self.ours.settimeout(60)
        fds = [theirs.fileno()] * 3
        socket.send_fds(self.holder, [b"m"], fds)
        theirs.close()
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
    before = len(list(Path("/proc/self/fd").iterdir()))
    place = ReconnectListener(KEY)
    yield place
    place.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_who_proves_the_key_is_met(place: ReconnectListener) -> None:
    visit = Visit(place)
    met = visit.say(visit.line())
    assert met.num_received == 3
    assert visit.hear() == MARK + f"again 4 {mac(KEY, 'agent', 'ab', visit.nonce, '4')}\n".encode()
    met.streams.close()
    met.holder.close()
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
def test_who_proves_nothing_is_hung_up_on(place: ReconnectListener, line: str) -> None:
    visit = Visit(place)
    assert visit.say(LINES[line](visit)) is None
    assert place.readers()[1:] == []
    with contextlib.suppress(ConnectionResetError):
        assert visit.hear() in (b"", MARK + b"stranger\n")
    with contextlib.suppress(ConnectionResetError):
        assert visit.holder.recv(1) == b""
    visit.close()


def test_another_user_is_hung_up_on_before_anything_else(
    place: ReconnectListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents_half, "peer_uid", lambda connection: os.getuid() + 1)
    there = connected(place)
    assert place.readers()[1:] == []
    assert there.recv(1) == b""
    there.close()


def test_who_brings_no_streams_is_hung_up_on(place: ReconnectListener) -> None:
    there = connected(place)
    there.sendall(b"hello")
    place.readable(place.readers()[-1], 0)
    assert place.readers()[1:] == []
    there.close()


def test_many_who_say_nothing_keep_nobody_out(
    place: ReconnectListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = [connected(place) for _ in range(50)]
    assert len(place.readers()) == 1 + agents_half.MAX_VISITORS
    visit = Visit(place)
    met = visit.say(visit.line())
    assert met is not None
    met.streams.close()
    met.holder.close()
    visit.close()
    monkeypatch.setattr(agents_half, "PROOF_TIMEOUT_S", -1.0)
    assert place.readers()[1:] == []
    for one in silent:
        one.close()


@pytest.mark.parametrize("connect", [lambda name: agents_half.connect(name, 60), connect_agent])
def test_who_finds_the_queue_full_of_others_waits(
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


def test_a_place_without_an_agent_is_said_to_be_gone() -> None:
    place = ReconnectListener(KEY)
    place.close()
    done = subprocess.run(
        agent_command(sys.executable), input=reconnect_source(place.name), capture_output=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (3, MARK + b"gone\n")


def test_the_command_line_tells_nothing_of_the_reconnection() -> None:
    """All of it is sent: the remote command is the one that starts an agent."""
    assert "paceline-" not in " ".join(agent_command("python3")).replace("paceline-boot", "")
    assert KEY not in reconnect_source("paceline-ab")


class Liar:
    """A link on which a hostile node says what it likes."""

    def __init__(self, said: bytes) -> None:
        self.reader = asyncio.StreamReader()
        self.reader.feed_data(said)
        self.reader.feed_eof()
        self.writer = self
        self.written = b""
        self.was_cut = False

    def write(self, data: bytes) -> None:
        self.written += data

    async def drain(self) -> None: ...

    async def drop(self) -> None:
        self.was_cut = True


@pytest.mark.parametrize("said", [
    MARK + b"again 5 " + b"0" * 64 + b"\n", MARK + b"stranger\n", MARK + b"again x y\n",
    MARK + b"again " + b"9" * 90 + b" x\n", MARK + b"again\n", b"", MARK + b"\xff\xff\n",
    b"x" * (5 << 20),
])  # fmt: skip
def test_who_cannot_prove_to_be_the_agent_is_not_listened_to(said: bytes) -> None:
    async def go() -> None:
        found = reconnection.PendingLink(Liar(said), "ab" * 16, b"")  # type: ignore[arg-type]
        with pytest.raises((reconnection.AgentNotFound, EOFError, InvalidValue)):
            await reconnection.authenticate(found, reconnection.AgentAddress("paceline-x", KEY), 3)

    asyncio.run(go())


def test_who_gives_the_search_up_leaves_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnection, "ATTEMPT_INTERVAL_S", 0.01)
    monkeypatch.setattr(reconnection, "PAUSE_S", 0.0)

    class Slow(Liar):
        """Says nothing, and takes its time to be cut."""

        def __init__(self) -> None:
            super().__init__(b"")
            self.reader = asyncio.StreamReader()
            self.cutting = asyncio.Event()

        async def drop(self) -> None:
            self.cutting.set()
            await asyncio.sleep(0.2)
            self.was_cut = True

    async def go() -> None:
        slow, agent = Slow(), Liar(MARK + b"meet " + b"ab" * 16 + b"\n")
        links: list[Any] = [slow, agent]

        async def dial() -> Any:
            return links.pop(0) if links else await asyncio.Event().wait()

        looking = asyncio.create_task(
            reconnection.reconnect(dial, reconnection.AgentAddress("x", KEY))
        )
        await asyncio.wait_for(slow.cutting.wait(), 60)
        looking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking
        assert agent.was_cut

    asyncio.run(go())


def test_an_agent_that_heard_more_than_was_said_is_not_believed() -> None:
    async def go() -> None:
        async with talk() as one:
            one.agent.outbox.num_received = 10**6
            with pytest.raises(ConnectionError):
                await one.channel.request("clock")
            assert "never sent" in one.channel.violation

    with pytest.raises(Exception, match="never sent"):
        asyncio.run(asyncio.wait_for(go(), 60))


def test_a_host_is_given_up_whose_pipe_has_closed_by_itself() -> None:
    """As when all nodes have ended while this process was stopped."""

    async def scene() -> bool:
        pipe = subprocess.PIPE
        child = await asyncio.create_subprocess_exec("true", stdin=pipe, stdout=pipe, stderr=pipe)
        channel = Channel(Host("n1"), ProcessLink(child))
        await child.wait()
        transport: Any = channel._link.writer.transport
        while transport._loop is not None:
            await asyncio.sleep(0.01)
        channel.abandon()
        return channel.lost.is_set()

    assert asyncio.run(asyncio.wait_for(scene(), 10))


def test_a_shell_that_reads_all_its_input_may_say_what_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.remote.channel.HELLO_TIMEOUT_S", 0.2)
    shell = "cat >/dev/null; sleep 0.2; echo 'fish: Missing end to balance this' >&2"

    async def scene() -> None:
        pipe = subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            "sh", "-c", shell, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        await Channel(Host("n1"), ProcessLink(child)).open()

    with pytest.raises(LoginError, match="another shell"):
        asyncio.run(asyncio.wait_for(scene(), 30))


def test_a_host_that_sends_nothing_may_not_be_reached_at_all(
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
