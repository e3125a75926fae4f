"""Agents that call back: both sides prove the key, places are given once, strangers get nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from paceline.agent import caller
from paceline.remote import reconnection
from paceline.remote.channel import Channel
from paceline.rendezvous import listener as listeners
from paceline.rendezvous.listener import (
    Connection,
    Listener,
    PeerLink,
    caller_command,
    caller_config,
    identity,
)
from paceline.rendezvous.peers import HostAdmission, Peers
from paceline.spec.hosts import Host

KEY = b"k" * 32
TIMEOUT_S = 60.0


@contextlib.asynccontextmanager
async def listening(take: Any) -> AsyncIterator[Listener]:
    listener = Listener(KEY, take)
    await listener.open(["127.0.0.1"])
    try:
        yield listener
    finally:
        await listener.close()


def dial(listener: Listener, key: bytes, **about: Any) -> socket.socket:
    return caller.dial(list(listener.addresses), key, about, time.monotonic())


def test_the_key_opens() -> None:
    async def go() -> None:
        calls: list[Connection] = []

        def take(call: Connection) -> None:
            calls.append(call)
            call.accept()

        async with listening(take) as listener:
            connection = await asyncio.to_thread(dial, listener, KEY, stream="frames", index=3)
            connection.sendall(b"hello")
            assert await calls[0].reader.readexactly(5) == b"hello"
            assert calls[0].info == {"stream": "frames", "index": 3}
            connection.close()
            calls[0].writer.close()

    asyncio.run(go())


def test_another_key_does_not() -> None:
    async def go() -> None:
        calls: list[Connection] = []
        async with listening(calls.append) as listener:
            with pytest.raises(OSError, match="another key"):
                await asyncio.to_thread(dial, listener, b"x" * 32, stream="frames")
            assert listener.strangers == ["127.0.0.1"]
            assert not calls

    asyncio.run(go())


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        b"paceline-call\n",
        b"\xff\xfe\n",
        b"",
        b"\x16\x03\x01\x00\x05hello",
    ],
)
@pytest.mark.parametrize("encrypted", [False, True])
def test_noise_is_hung_up_on(
    sent: bytes, encrypted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """In the clear and within TLS: nothing is said to a stranger, and nothing is logged."""

    async def go() -> None:
        calls: list[Connection] = []
        async with listening(calls.append) as listener:
            tls = caller.unverified() if encrypted else None
            reader, writer = await asyncio.open_connection(*listener.addresses[0], ssl=tls)
            writer.write(sent)
            if not encrypted:
                writer.write_eof()
            heard = b""
            with contextlib.suppress(OSError):
                heard = await asyncio.wait_for(reader.read(), TIMEOUT_S)
            assert heard == b"" or not encrypted  # in the clear it may be an alert of TLS
            writer.close()
            assert not calls

    asyncio.run(go(), debug=False)
    assert caplog.records == []


def test_a_line_without_an_end_is_hung_up_on(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        async with listening(lambda _: None) as listener:
            tls = caller.unverified()
            reader, writer = await asyncio.open_connection(*listener.addresses[0], ssl=tls)
            with contextlib.suppress(OSError):
                for _ in range(64):
                    writer.write(b"x" * 65536)
                    await writer.drain()
            with contextlib.suppress(OSError):
                assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b""
            writer.close()

    asyncio.run(go())
    assert caplog.records == []


def test_a_stranger_with_another_key_learns_nothing() -> None:
    """The caller proves first; to a wrong proof the answer is one fixed word."""

    async def go() -> None:
        async with listening(lambda _: None) as listener:
            reader, writer = await asyncio.open_connection(
                *listener.addresses[0], ssl=caller.unverified()
            )
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.3)  # it does not speak first
            writer.write(f"{caller.MAGIC} {'0' * 32} {'0' * 64} {{}}\n".encode())
            assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b"wrong-key\n"
            writer.close()

    asyncio.run(go())


def test_a_caller_that_comes_while_it_closes_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        listener = Listener(KEY, lambda connection: None)
        await listener.open(["127.0.0.1"])
        await asyncio.sleep(0)
        with socket.create_connection(listener.addresses[0]):
            await asyncio.sleep(0)  # the event loop sees the caller, and closes before it accepts
            await listener.close()
            await asyncio.sleep(0.05)

    asyncio.run(go())
    assert not caplog.records


def test_silent_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In number and in time; a caller with the key gets through between them."""

    async def go() -> None:
        calls: list[Connection] = []

        def take(call: Connection) -> None:
            calls.append(call)
            call.accept()

        async with listening(take) as listener:
            silent = []
            for _ in range(5 * listeners.MAX_UNPROVEN):
                silent.append(await asyncio.open_connection(*listener.addresses[0]))
            await asyncio.sleep(0.1)
            assert len(listener._unproven) <= listeners.MAX_UNPROVEN
            connection = await asyncio.to_thread(dial, listener, KEY, stream="frames", index=0)
            assert len(calls) == 1
            await asyncio.sleep(listeners.HANDSHAKE_S + 0.5)
            assert not listener._unproven
            for reader, writer in silent:
                with contextlib.suppress(OSError):
                    assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b""
                writer.close()
            connection.close()
            calls[0].writer.close()

    monkeypatch.setattr(listeners, "HANDSHAKE_S", 1.5)
    asyncio.run(go())


# --- on the wire


SECRET = b"forwarded-secret-0123456789"


@contextlib.asynccontextmanager
async def sniffing(target: tuple[str, int]) -> AsyncIterator[tuple[tuple[str, int], bytearray]]:
    """A relay between caller and launcher that writes down all that passes, both ways."""
    seen = bytearray()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                seen.extend(data)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection(*target)
        await asyncio.gather(pump(reader, ours), pump(theirs, writer))

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[:2], seen
    finally:
        server.close()


def peer_link(peers: Peers) -> PeerLink:
    peer = peers.by_place[0]
    assert peer.errors is not None
    return PeerLink(peer.frames, peer.errors)


ECHO = "import sys; sys.stderr.write('said'); sys.stdout.buffer.write(sys.stdin.buffer.read())"


@pytest.mark.parametrize("size", [1, 3_000_000])
def test_the_streams_of_an_agent_cross_encrypted(size: int) -> None:
    """Its input ends where the launcher says so; all comes back whole, and nobody can read it."""

    async def go() -> None:
        peers = Peers(HostAdmission([Host("n1")]))
        async with (
            listening(peers.admit) as listener,
            sniffing(listener.addresses[0]) as (at, seen),
        ):
            config = caller_config([at], ["python3"], ["T_PLACE"], "X", 5)
            config["agent"] = ["@", "-c", ECHO]
            child = await asyncio.create_subprocess_exec(
                *caller_command(config),
                env={"PATH": os.environ["PATH"], caller.KEY_VARIABLE: KEY.hex(), "T_PLACE": "0"},
            )
            await asyncio.wait_for(peers.complete.wait(), TIMEOUT_S)
            link = peer_link(peers)
            sent = SECRET + b"x" * size
            link.writer.write(sent)
            link.writer.write_eof()
            assert await asyncio.wait_for(link.reader.read(), TIMEOUT_S) == sent
            said = await asyncio.wait_for(link.errors.read(), TIMEOUT_S)
            assert said == b"said\n" + caller.AGENT_ENDED + b"\n"
            assert await asyncio.wait_for(child.wait(), TIMEOUT_S) == 0
            await link.end(1.0)
            assert len(seen) > 2 * size
            for word in (SECRET, b"said", KEY.hex().encode(), b"session", b"paceline-call"):
                assert word not in seen

    asyncio.run(go())


def test_a_lost_launcher_ends_an_agents_input() -> None:
    async def go() -> None:
        peers = Peers(HostAdmission([Host("n1")]))
        async with listening(peers.admit) as listener:
            config = caller_config(listener.addresses, ["python3"], ["T_PLACE"], "X", 5)
            config["agent"] = ["@", "-c", "import sys; sys.stdin.buffer.read(); sys.exit(7)"]
            child = await asyncio.create_subprocess_exec(
                *caller_command(config),
                env={"PATH": os.environ["PATH"], caller.KEY_VARIABLE: KEY.hex(), "T_PLACE": "0"},
            )
            await asyncio.wait_for(peers.complete.wait(), TIMEOUT_S)
            peers.by_place[0].frames.writer.transport.abort()
            assert await asyncio.wait_for(child.wait(), TIMEOUT_S) == 7
            peers.hang_up()

    asyncio.run(go())


async def joined(peers: Peers, listener: Listener) -> tuple[asyncio.subprocess.Process, Channel]:
    """A node that has called, and the channel to its agent, which stays after a break."""
    config = caller_config(listener.addresses, [sys.executable], ["T_PLACE"], "X", 5)
    child = await asyncio.create_subprocess_exec(
        *caller_command(config),
        env={**os.environ, caller.KEY_VARIABLE: KEY.hex(), "T_PLACE": "0"},
    )
    await asyncio.wait_for(peers.complete.wait(), TIMEOUT_S)
    (channel,) = await peers.channels()
    return child, channel


def test_a_killed_agent_is_known_at_once_and_ends_nobody_elses_agent() -> None:
    """Nobody waits until it calls again, and the scheduler's command sees no failure in it."""

    async def go() -> None:
        peers = Peers(HostAdmission([Host("n1")]))
        async with listening(peers.admit) as listener:
            child, channel = await joined(peers, listener)
            looked = []
            channel.reconnect = lambda: looked.append(1)  # type: ignore[method-assign]
            os.kill(channel_agent(child.pid), signal.SIGKILL)
            await asyncio.wait_for(channel.lost.wait(), TIMEOUT_S)
            assert not looked
            assert await asyncio.wait_for(child.wait(), TIMEOUT_S) == 0
            await channel.close()

    asyncio.run(go())


def channel_agent(caller_pid: int) -> int:
    """The agent: a child of its guard, which is one of who called."""
    guard = Path(f"/proc/{caller_pid}/task/{caller_pid}/children").read_text().split()[0]
    return int(Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0])


def test_what_is_said_to_a_closed_connection_is_lost_and_no_error() -> None:
    async def go() -> None:
        peers = Peers(HostAdmission([Host("n1")]))
        async with listening(peers.admit) as listener:
            child, channel = await joined(peers, listener)
            link: Any = channel._link
            for _ in range(2):
                link.writer.close()
            link.writer.write(b"anybody?")
            link.writer.write_eof()
            await channel.close()
            await asyncio.wait_for(child.wait(), TIMEOUT_S)

    asyncio.run(go())


def test_a_node_that_was_cut_off_calls_again() -> None:
    async def go() -> None:
        peers = Peers(HostAdmission([Host("n1")]))
        async with listening(peers.admit) as listener:
            child, channel = await joined(peers, listener)
            told: list[str] = []
            channel.on_event = lambda event: told.append(event.kind)
            for times, wire in enumerate((0, 1, 0), 1):
                link: Any = channel._link
                writers = (link.writer, link._errors_writer)
                writers[wire].transport.abort()
                for _ in range(6000):
                    if len(told) >= times:
                        break
                    await asyncio.sleep(0.01)
                assert (await asyncio.wait_for(channel.request("clock"), TIMEOUT_S))["time"] > 0
            assert told == ["connection restored"] * 3

            stranger = {"session": "ab", "stream": "frames", "again": True}
            where = list(listener.addresses)
            with pytest.raises(caller.CallRefused, match="no node with this session id"):
                await asyncio.to_thread(caller.dial, where, KEY, stranger, time.monotonic())

            await channel.request("bye")
            await channel.close(5)
            assert await asyncio.wait_for(child.wait(), TIMEOUT_S) == 0
            stranger["session"] = peers.by_place[0].session
            with pytest.raises(caller.CallRefused, match="given up"):
                await asyncio.to_thread(caller.dial, where, KEY, stranger, time.monotonic())

    asyncio.run(go())


def test_a_node_calls_again_when_a_meeting_came_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    true_line, lines = reconnection.reconnect_source, [b"raise SystemExit(1)\n"] * 2
    monkeypatch.setattr(
        reconnection, "reconnect_source", lambda *place: lines.pop() if lines else true_line(*place)
    )

    async def go() -> None:
        peers = Peers(HostAdmission([Host("n1")]))
        async with listening(peers.admit) as listener:
            child, channel = await joined(peers, listener)
            peers.by_place[0].frames.writer.transport.abort()
            assert (await asyncio.wait_for(channel.request("clock"), TIMEOUT_S))["time"] > 0
            assert not lines
            await channel.request("bye")
            await channel.close(5)
            assert await asyncio.wait_for(child.wait(), TIMEOUT_S) == 0

    asyncio.run(go())


def test_a_node_whose_launcher_has_ended_ends() -> None:
    async def go() -> None:
        peers = Peers(HostAdmission([Host("n1")]))
        async with listening(peers.admit) as listener:
            child, channel = await joined(peers, listener)
            channel._dial = None  # as if this process had been killed
        peers.by_place[0].frames.writer.transport.abort()
        await asyncio.wait_for(child.wait(), TIMEOUT_S)
        await channel.close()

    asyncio.run(go())


def test_a_man_in_the_middle_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """He ends TLS with a certificate of his own and passes on what he hears inside."""

    async def go() -> None:
        calls: list[Connection] = []
        heard = bytearray()
        async with listening(calls.append) as listener:
            identity.cache_clear()
            his, _ = identity()

            async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                theirs, ours = await asyncio.open_connection(
                    *listener.addresses[0], ssl=caller.unverified()
                )
                line = await reader.readline()
                heard.extend(line)
                ours.write(line)
                writer.write(await theirs.read())
                writer.close()
                ours.close()

            server = await asyncio.start_server(take, "127.0.0.1", 0, ssl=his)
            where = server.sockets[0].getsockname()[:2]
            with pytest.raises(OSError, match="another key"):
                await asyncio.to_thread(caller.dial, [where], KEY, {}, time.monotonic())
            server.close()
            assert heard.startswith(b"paceline-call ")
            assert not calls

    asyncio.run(go())


def test_a_launcher_that_does_not_know_the_key_is_refused() -> None:
    """It says yes to everybody, to be sent the secrets."""

    async def go() -> None:
        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(b"0" * 64 + b' {"ok": true}\n')
            writer.close()

        server = await asyncio.start_server(take, "127.0.0.1", 0, ssl=identity()[0])
        where = server.sockets[0].getsockname()[:2]
        with pytest.raises(OSError, match="something else answers"):
            await asyncio.to_thread(caller.dial, [where], KEY, {}, time.monotonic())
        server.close()

    asyncio.run(go())


def test_something_else_that_listens_is_left_alone() -> None:
    """A mail server: it hears the beginning of TLS, and the node says what it found."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        child = subprocess.Popen(
            caller_command(caller_config([other.getsockname()], ["python3"], ["T_PLACE"], "X", 0)),
            env={"PATH": os.environ["PATH"], caller.KEY_VARIABLE: KEY.hex(), "T_PLACE": "0"},
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        with child, other.accept()[0] as connection:
            heard = connection.recv(4096)
            connection.sendall(b"220 mail.example.org ESMTP\n")
            _, err = child.communicate(timeout=TIMEOUT_S)
    assert heard.startswith(b"\x16\x03")
    assert KEY.hex().encode() not in heard
    assert "something else answers there" in err
    assert "Traceback" not in err
    assert child.returncode == 1


def test_the_command_holds_no_secret_and_survives() -> None:
    config = caller_config([("10.0.0.1", 4)], ["/a b/python", "/c/python"], ["PMI_RANK"], "X|Y", 30)
    words = caller_command(config)
    assert json.loads(words[5]) == config
    assert config["pythons"] == ["/a b/python", "/c/python"]
    assert caller_config([], ["p", "p"], [], "", 1)["pythons"] == ["p"]


def test_places_are_given_once() -> None:
    class Writer:
        def __init__(self) -> None:
            self.said = b""
            self.closed = False

        def write(self, data: bytes) -> None:
            self.said += data

        def close(self) -> None:
            self.closed = True

    def call(**about: Any) -> tuple[Connection, Writer]:
        writer = Writer()
        return Connection(about, None, writer, "10.0.0.2"), writer  # type: ignore[arg-type]

    async def go() -> None:
        peers = Peers(HostAdmission([Host("n1"), Host("n2")]))

        def said(**about: Any) -> dict[str, Any]:
            made, writer = call(**about)
            peers.admit(made)
            answer: dict[str, Any] = json.loads(writer.said)
            return answer

        assert said(stream="frames", index=0, session="a") == {"ok": True}
        assert "two processes" in said(stream="frames", index=0, session="b")["error"]
        assert "is not in 0 to 1" in said(stream="frames", index=2, session="c")["error"]
        assert "is not in 0 to 1" in said(stream="frames", session="d")["error"]
        assert (
            "first connection of this node" in said(stream="errors", index=0, session="b")["error"]
        )
        assert said(stream="errors", index=0, session="a") == {"ok": True}
        assert peers.missing() == [1]
        assert said(stream="frames", node="n2", index=0, session="e") == {"ok": True}
        assert said(stream="errors", node="n2", index=0, session="e") == {"ok": True}
        assert peers.complete.is_set()
        assert [peer.host.name for _, peer in sorted(peers.by_place.items())] == ["n1", "n2"]

    asyncio.run(go())
