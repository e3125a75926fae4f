"""Tests agents that call back: mutual proof of the key, unique places, nothing for strangers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.agent import caller
from paceline.remote import reconnection
from paceline.remote.channel import Channel
from paceline.rendezvous import listener as listeners
from paceline.rendezvous import unproven
from paceline.rendezvous.listener import (
    Connection,
    Listener,
    PeerLink,
    caller_command,
    caller_config,
    identity,
)
from paceline.rendezvous.peers import HostAdmission, Peers
from paceline.spec.errors import ConnectError
from paceline.spec.events import Event
from paceline.spec.hosts import Host

KEY = b"k" * 32
TIMEOUT_S = 60.0


@contextlib.asynccontextmanager
async def listening(on_connection: Any) -> AsyncIterator[Listener]:
    listener = Listener(KEY, on_connection)
    await listener.open(["127.0.0.1"])
    try:
        yield listener
    finally:
        await listener.close()


def dial(listener: Listener, key: bytes, **fields: Any) -> socket.socket:
    return caller.dial(list(listener.addresses), key, fields, time.monotonic())


def test_accepts_caller_with_key() -> None:
    async def scenario() -> None:
        calls: list[Connection] = []

        def on_connection(call: Connection) -> None:
            calls.append(call)
            call.accept()

        async with listening(on_connection) as listener:
            connection = await asyncio.to_thread(dial, listener, KEY, stream="frames", index=3)
            connection.sendall(b"hello")
            assert await calls[0].reader.readexactly(5) == b"hello"
            assert calls[0].info == {"stream": "frames", "index": 3}
            connection.close()
            calls[0].writer.close()

    asyncio.run(scenario())


def test_rejects_caller_with_wrong_key() -> None:
    async def scenario() -> None:
        calls: list[Connection] = []
        async with listening(calls.append) as listener:
            with pytest.raises(OSError, match="another key"):
                await asyncio.to_thread(dial, listener, b"x" * 32, stream="frames")
            assert listener.strangers == ["127.0.0.1"]
            assert not calls

    asyncio.run(scenario())


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
def test_closes_connection_on_noise(
    sent: bytes, encrypted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With and without TLS, nothing is sent to a stranger, and nothing is logged."""

    async def scenario() -> None:
        calls: list[Connection] = []
        async with listening(calls.append) as listener:
            tls = caller.unverified() if encrypted else None
            reader, writer = await asyncio.open_connection(*listener.addresses[0], ssl=tls)
            writer.write(sent)
            if not encrypted:
                writer.write_eof()
            received = b""
            with contextlib.suppress(OSError):
                received = await asyncio.wait_for(reader.read(), TIMEOUT_S)
            assert received == b"" or not encrypted  # without TLS, it may be a TLS alert
            writer.close()
            assert not calls

    asyncio.run(scenario(), debug=False)
    assert caplog.records == []


def test_closes_connection_on_endless_line(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())
    assert caplog.records == []


def test_wrong_proof_gets_fixed_reply() -> None:
    """The caller proves first; the answer to a wrong proof is a fixed word."""

    async def scenario() -> None:
        async with listening(lambda _: None) as listener:
            reader, writer = await asyncio.open_connection(
                *listener.addresses[0], ssl=caller.unverified()
            )
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.3)  # the listener waits for the caller
            writer.write(f"{caller.MAGIC} {'0' * 32} {'0' * 64} {{}}\n".encode())
            assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b"wrong-key\n"
            writer.close()

    asyncio.run(scenario())


def test_rejected_connection_is_closed_at_once() -> None:
    """A node that does not take part in the orderly end of TLS holds none open."""

    async def scenario() -> None:
        calls: list[Connection] = []

        def on_connection(call: Connection) -> None:
            calls.append(call)
            call.reject("no place is free")

        async with listening(on_connection) as listener:
            node = await asyncio.to_thread(socket.create_connection, listener.addresses[0])
            wire = await asyncio.to_thread(caller.unverified().wrap_socket, node)
            with wire:
                with pytest.raises(caller.CallRefused, match="no place is free"):
                    await asyncio.to_thread(caller.greet, wire, KEY, {}, TIMEOUT_S)
                await asyncio.wait_for(calls[0].writer.wait_closed(), 10.0)

    asyncio.run(scenario())


def test_connection_during_close_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        listener = Listener(KEY, lambda connection: None)
        await listener.open(["127.0.0.1"])
        await asyncio.sleep(0)
        with socket.create_connection(listener.addresses[0]):
            await asyncio.sleep(0)  # the loop sees the caller, and closes before it accepts
            await listener.close()
            await asyncio.sleep(0.05)

    asyncio.run(scenario())
    assert not caplog.records


def test_limits_idle_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number and duration are limited; a caller with the key is served in between."""

    async def scenario() -> None:
        calls: list[Connection] = []

        def on_connection(call: Connection) -> None:
            calls.append(call)
            call.accept()

        async with listening(on_connection) as listener:
            connections = []
            for _ in range(5 * unproven.MAX_UNPROVEN):
                connections.append(await asyncio.open_connection(*listener.addresses[0]))
            await asyncio.sleep(0.1)
            assert len(listener._unproven) <= unproven.MAX_UNPROVEN
            connection = await asyncio.to_thread(dial, listener, KEY, stream="frames", index=0)
            assert len(calls) == 1
            await asyncio.sleep(listeners.HANDSHAKE_S + 0.5)
            assert not listener._unproven
            for reader, writer in connections:
                with contextlib.suppress(OSError):
                    assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b""
                writer.close()
            connection.close()
            calls[0].writer.close()

    monkeypatch.setattr(listeners, "HANDSHAKE_S", 1.5)
    monkeypatch.setattr(unproven, "MAX_UNPROVEN", 64)  # this process holds both ends
    asyncio.run(scenario())


# --- encryption


SECRET = b"forwarded-secret-0123456789"


@contextlib.asynccontextmanager
async def sniffing(
    targets: Iterator[tuple[str, int]],
) -> AsyncIterator[tuple[tuple[str, int], bytearray]]:
    """A relay between caller and launcher that records all bytes in both directions.

    ``targets``: where each connection leads.
    """
    traffic = bytearray()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                traffic.extend(data)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection(*next(targets))
        await asyncio.gather(pump(reader, upstream_writer), pump(upstream_reader, writer))

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[:2], traffic
    finally:
        server.close()


@contextlib.asynccontextmanager
async def faulty_network(
    listener: Listener,
) -> AsyncIterator[tuple[tuple[str, int], set[str]]]:
    """A relay between nodes and the launcher, and the faults that happen to the next bytes.

    "to" and "from" change a byte that the launcher receives or has sent. "unanswered" is like
    "from", but the launcher does not receive what the node sends then. "closed" and "reset" end the
    connection when the node sends something.
    """
    faults: set[str] = set()

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = await asyncio.open_connection(*listener.addresses[0])
        is_cut = False

        async def pump(
            source: asyncio.StreamReader, target: asyncio.StreamWriter, possible: set[str]
        ) -> None:
            nonlocal is_cut
            with contextlib.suppress(OSError):
                while data := bytearray(await source.read(1 << 16)):
                    if possible == TO_LAUNCHER and is_cut:
                        continue
                    happening = faults & possible
                    faults.difference_update(happening)
                    if "reset" in happening:
                        for end in (writer, upstream[1]):
                            end.get_extra_info("socket").setsockopt(
                                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                            )
                    if happening & {"closed", "reset"}:
                        break
                    is_cut = is_cut or "unanswered" in happening
                    data[-1] ^= 2 if happening else 0
                    target.write(data)
                    await target.drain()
            writer.close()
            upstream[1].close()

        await asyncio.gather(
            pump(reader, upstream[1], TO_LAUNCHER),
            pump(upstream[0], writer, FROM_LAUNCHER),
        )

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[:2], faults
    finally:
        server.close()


TO_LAUNCHER = {"to", "closed", "reset"}
FROM_LAUNCHER = {"from", "unanswered"}


def node_config(listener: Listener, addresses: Sequence[tuple[str, int]] = ()) -> dict[str, Any]:
    """The configuration of a node that calls the listener back, perhaps over a relay."""
    return caller_config(
        addresses or listener.addresses, listener.certificate, [sys.executable], ["T_PLACE"], "X", 5
    )


def peer_link(peers: Peers) -> PeerLink:
    peer = peers.by_place[0]
    assert peer.errors is not None
    return PeerLink(peer.frames, peer.errors)


ECHO = "import sys; sys.stderr.write('said'); sys.stdout.buffer.write(sys.stdin.buffer.read())"


@pytest.mark.parametrize("size", [1, 3_000_000])
def test_agent_streams_are_encrypted(size: int) -> None:
    """The launcher closes the agent's input, all output returns, and none of it is readable."""

    async def scenario() -> None:
        peers = Peers(HostAdmission([Host("n1")]))
        async with (
            listening(peers.admit) as listener,
            sniffing(itertools.repeat(listener.addresses[0])) as (relay_address, traffic),
        ):
            config = node_config(listener, [relay_address])
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
            response = await asyncio.wait_for(link.errors.read(), TIMEOUT_S)
            assert response == b"said\n" + caller.AGENT_ENDED + b"\n"
            assert await asyncio.wait_for(child.wait(), TIMEOUT_S) == 0
            await link.end(1.0)
            assert len(traffic) > 2 * size
            for secret in (SECRET, b"said", KEY.hex().encode(), b"session", b"paceline-call"):
                assert secret not in traffic

    asyncio.run(scenario())


def test_lost_launcher_closes_agent_input() -> None:
    async def scenario() -> None:
        peers = Peers(HostAdmission([Host("n1")]))
        async with listening(peers.admit) as listener:
            config = node_config(listener)
            config["agent"] = ["@", "-c", "import sys; sys.stdin.buffer.read(); sys.exit(7)"]
            child = await asyncio.create_subprocess_exec(
                *caller_command(config),
                env={"PATH": os.environ["PATH"], caller.KEY_VARIABLE: KEY.hex(), "T_PLACE": "0"},
            )
            await asyncio.wait_for(peers.complete.wait(), TIMEOUT_S)
            peers.by_place[0].frames.writer.transport.abort()
            assert await asyncio.wait_for(child.wait(), TIMEOUT_S) == 7
            peers.hang_up()

    asyncio.run(scenario())


async def start_node(config: Mapping[str, Any]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *caller_command(config),
        env={**os.environ, caller.KEY_VARIABLE: KEY.hex(), "T_PLACE": "0"},
    )


async def connect_node(
    peers: Peers, config: Mapping[str, Any]
) -> tuple[asyncio.subprocess.Process, Channel]:
    """Starts a node that calls back; returns it and the channel, which survives interruptions."""

    child = await start_node(config)
    await asyncio.wait_for(peers.complete.wait(), TIMEOUT_S)
    (channel,) = await peers.channels()
    return child, channel


def test_killed_agent_is_reported_without_reconnect() -> None:
    """The launcher does not wait for another call, and the scheduler's command exits with 0."""

    async def scenario() -> None:
        peers = Peers(HostAdmission([Host("n1")]))
        async with listening(peers.admit) as listener:
            child, channel = await connect_node(peers, node_config(listener))
            reconnects = []
            channel.reconnect = lambda: reconnects.append(1)  # type: ignore[method-assign]
            os.kill(channel_agent(child.pid), signal.SIGKILL)
            await asyncio.wait_for(channel.lost.wait(), TIMEOUT_S)
            assert not reconnects
            assert await asyncio.wait_for(child.wait(), TIMEOUT_S) == 0
            await channel.close()

    asyncio.run(scenario())


def channel_agent(caller_pid: int) -> int:
    """Returns the process id of the agent, a child of the guard, which is a child of the caller."""
    guard = Path(f"/proc/{caller_pid}/task/{caller_pid}/children").read_text().split()[0]
    return int(Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0])


def test_writing_to_closed_connection_is_no_error() -> None:
    async def scenario() -> None:
        peers = Peers(HostAdmission([Host("n1")]))
        async with listening(peers.admit) as listener:
            child, channel = await connect_node(peers, node_config(listener))
            link: Any = channel._link
            for _ in range(2):
                link.writer.close()
            link.writer.write(b"anybody?")
            link.writer.write_eof()
            await channel.close()
            await asyncio.wait_for(child.wait(), TIMEOUT_S)

    asyncio.run(scenario())


def test_node_returns_to_no_other_launcher() -> None:
    """Each node knows the key, so one that takes over an address could pass for the launcher."""

    async def scenario() -> None:
        peers = Peers(HostAdmission([Host("n1")]))
        impostors: list[Connection] = []
        async with listening(peers.admit) as launcher:
            identity.cache_clear()
            async with listening(impostors.append) as other:
                targets = itertools.chain(
                    [launcher.addresses[0]] * 2, [other.addresses[0]] * 3,
                    itertools.repeat(launcher.addresses[0]),
                )  # fmt: skip
                async with sniffing(targets) as (relay_address, _):
                    config = node_config(launcher, [relay_address])
                    child, channel = await connect_node(peers, config)
                    restored = asyncio.Event()
                    channel.on_event = lambda event: restored.set()
                    link: Any = channel._link
                    link.writer.transport.abort()
                    await asyncio.wait_for(restored.wait(), TIMEOUT_S)
                    assert next(targets) == launcher.addresses[0]
                    assert not impostors
                    await channel.request("bye")
                    await channel.close(5)
                    await asyncio.wait_for(child.wait(), TIMEOUT_S)

    asyncio.run(scenario())


def test_disconnected_node_reconnects() -> None:
    async def scenario() -> None:
        peers = Peers(HostAdmission([Host("n1")]))
        async with listening(peers.admit) as listener:
            child, channel = await connect_node(peers, node_config(listener))
            event_kinds: list[str] = []
            channel.on_event = lambda event: event_kinds.append(event.kind)
            for times, wire in enumerate((0, 1, 0), 1):
                link: Any = channel._link
                writers = (link.writer, link._errors_writer)
                writers[wire].transport.abort()
                for _ in range(6000):
                    if len(event_kinds) >= times:
                        break
                    await asyncio.sleep(0.01)
                assert (await asyncio.wait_for(channel.request("clock"), TIMEOUT_S))["time"] > 0
            assert event_kinds == ["connection restored"] * 3

            stranger = {"session": "ab", "stream": "frames", "again": True}
            destination = list(listener.addresses)
            with pytest.raises(caller.CallRefused, match="no node with this session id"):
                await asyncio.to_thread(caller.dial, destination, KEY, stranger, time.monotonic())

            await channel.request("bye")
            await channel.close(5)
            assert await asyncio.wait_for(child.wait(), TIMEOUT_S) == 0
            stranger["session"] = peers.by_place[0].session
            with pytest.raises(caller.CallRefused, match="given up"):
                await asyncio.to_thread(caller.dial, destination, KEY, stranger, time.monotonic())

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fault", "is_altered"),
    [("to", True), ("from", True), ("unanswered", True), ("closed", False), ("reset", False)],
)
def test_altered_byte_is_reported(fault: str, is_altered: bool) -> None:
    """The connection is restored after every fault, and only a change is reported, once."""

    async def scenario() -> None:
        peers = Peers(HostAdmission([Host("n1")]))
        async with listening(peers.admit) as listener, faulty_network(listener) as (relay, faults):
            child, channel = await connect_node(peers, node_config(listener, [relay]))
            events: list[Event] = []
            restored = asyncio.Event()

            def on_event(event: Event) -> None:
                events.append(event)
                if event.kind == "connection restored":
                    restored.set()

            channel.on_event = on_event
            for _ in range(2):
                faults.add(fault)
                assert (await asyncio.wait_for(channel.request("clock"), TIMEOUT_S))["time"] > 0
                await asyncio.wait_for(restored.wait(), TIMEOUT_S)
                restored.clear()
                assert not faults
            kinds = ["connection altered"] * is_altered + ["connection restored"]
            assert [event.kind for event in events] == kinds * 2
            if is_altered:
                assert events[0].fields == {"address": "127.0.0.1", "to_launcher": True}
            await channel.request("bye")
            await channel.close(5)
            assert await asyncio.wait_for(child.wait(), TIMEOUT_S) == 0
            assert sum(event.kind == "connection altered" for event in events) == 2 * is_altered

    asyncio.run(scenario())


def test_altered_byte_before_agent_is_named() -> None:
    async def scenario() -> None:
        peers = Peers(HostAdmission([Host("n1")]))
        async with listening(peers.admit) as listener, faulty_network(listener) as (relay, faults):
            child = await start_node(node_config(listener, [relay]))
            await asyncio.wait_for(peers.complete.wait(), TIMEOUT_S)
            faults.add("to")
            with pytest.raises(ConnectError, match="no agent on n1") as caught:
                await peers.channels()
            assert "bytes were changed on the way between this machine and n1" in caught.value.found
            child.kill()
            await child.wait()

    asyncio.run(scenario())


def test_node_retries_failed_reconnection(monkeypatch: pytest.MonkeyPatch) -> None:
    original_source, lines = reconnection.reconnect_source, [b"raise SystemExit(1)\n"] * 2
    monkeypatch.setattr(
        reconnection,
        "reconnect_source",
        lambda *place: lines.pop() if lines else original_source(*place),
    )

    async def scenario() -> None:
        peers = Peers(HostAdmission([Host("n1")]))
        async with listening(peers.admit) as listener:
            child, channel = await connect_node(peers, node_config(listener))
            peers.by_place[0].frames.writer.transport.abort()
            assert (await asyncio.wait_for(channel.request("clock"), TIMEOUT_S))["time"] > 0
            assert not lines
            await channel.request("bye")
            await channel.close(5)
            assert await asyncio.wait_for(child.wait(), TIMEOUT_S) == 0

    asyncio.run(scenario())


def test_node_exits_after_launcher_exits() -> None:
    async def scenario() -> None:
        peers = Peers(HostAdmission([Host("n1")]))
        async with listening(peers.admit) as listener:
            child, channel = await connect_node(peers, node_config(listener))
            channel._dial = None  # as if this process had been killed
        peers.by_place[0].frames.writer.transport.abort()
        await asyncio.wait_for(child.wait(), TIMEOUT_S)
        await channel.close()

    asyncio.run(scenario())


def test_caller_rejects_man_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends TLS with its own certificate and forwards what it decrypts."""

    async def scenario() -> None:
        calls: list[Connection] = []
        received = bytearray()
        async with listening(calls.append) as listener:
            identity.cache_clear()
            context, _ = identity()

            async def on_connection(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter
            ) -> None:
                upstream_reader, upstream_writer = await asyncio.open_connection(
                    *listener.addresses[0], ssl=caller.unverified()
                )
                line = await reader.readline()
                received.extend(line)
                upstream_writer.write(line)
                writer.write(await upstream_reader.read())
                writer.close()
                upstream_writer.close()

            server = await asyncio.start_server(on_connection, "127.0.0.1", 0, ssl=context)
            destination = server.sockets[0].getsockname()[:2]
            with pytest.raises(OSError, match="another key"):
                await asyncio.to_thread(caller.dial, [destination], KEY, {}, time.monotonic())
            server.close()
            assert received.startswith(b"paceline-call ")
            assert not calls

    asyncio.run(scenario())


def test_caller_rejects_launcher_without_key() -> None:
    """It accepts everyone, in order to receive secrets."""

    async def scenario() -> None:
        async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(b"0" * 64 + b' {"ok": true}\n')
            writer.close()

        server = await asyncio.start_server(on_connection, "127.0.0.1", 0, ssl=identity()[0])
        destination = server.sockets[0].getsockname()[:2]
        with pytest.raises(OSError, match="something else answers"):
            await asyncio.to_thread(caller.dial, [destination], KEY, {}, time.monotonic())
        server.close()

    asyncio.run(scenario())


def test_caller_reports_foreign_server() -> None:
    """A mail server gets the start of TLS, and the node reports its answer."""
    with socket.create_server(("127.0.0.1", 0)) as mailer:
        child = subprocess.Popen(
            caller_command(
                caller_config([mailer.getsockname()], "ab", ["python3"], ["T_PLACE"], "X", 0)
            ),
            env={"PATH": os.environ["PATH"], caller.KEY_VARIABLE: KEY.hex(), "T_PLACE": "0"},
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        with child, mailer.accept()[0] as connection:
            received = connection.recv(4096)
            connection.sendall(b"220 mail.example.org ESMTP\n")
            _, err = child.communicate(timeout=TIMEOUT_S)
    assert received.startswith(b"\x16\x03")
    assert KEY.hex().encode() not in received
    assert "something else answers there" in err
    assert "Traceback" not in err
    assert child.returncode == 1


def test_caller_command_round_trip() -> None:
    config = caller_config(
        [("10.0.0.1", 4)], "ab", ["/a b/python", "/c/python"], ["PMI_RANK"], "X|Y", 30
    )
    command = caller_command(config)
    assert json.loads(command[5]) == config
    assert config["pythons"] == ["/a b/python", "/c/python"]
    assert caller_config([], "", ["p", "p"], [], "", 1)["pythons"] == ["p"]


def test_node_index_is_assigned_once() -> None:
    class Writer:
        def __init__(self) -> None:
            self.said = b""
            self.closed = False
            self.transport = self

        def write(self, data: bytes) -> None:
            self.said += data

        def close(self) -> None:
            self.closed = True

        abort = close

    def call(**fields: Any) -> tuple[Connection, Writer]:
        writer = Writer()
        return Connection(fields, None, writer, "10.0.0.2"), writer  # type: ignore[arg-type]

    async def scenario() -> None:
        peers = Peers(HostAdmission([Host("n1"), Host("n2")]))

        def response(**fields: Any) -> dict[str, Any]:
            new_connection, writer = call(**fields)
            peers.admit(new_connection)
            answer: dict[str, Any] = json.loads(writer.said)
            return answer

        assert response(stream="frames", index=0, session="a") == {"ok": True}
        assert "two processes" in response(stream="frames", index=0, session="b")["error"]
        assert "is not in 0 to 1" in response(stream="frames", index=2, session="c")["error"]
        assert "is not in 0 to 1" in response(stream="frames", session="d")["error"]
        assert (
            "first connection of this node"
            in response(stream="errors", index=0, session="b")["error"]
        )
        assert response(stream="errors", index=0, session="a") == {"ok": True}
        assert peers.missing() == [1]
        assert response(stream="frames", node="n2", index=0, session="e") == {"ok": True}
        assert response(stream="errors", node="n2", index=0, session="e") == {"ok": True}
        assert peers.complete.is_set()
        assert [peer.host.name for _, peer in sorted(peers.by_place.items())] == ["n1", "n2"]

    asyncio.run(scenario())
