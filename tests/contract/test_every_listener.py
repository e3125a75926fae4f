"""Tests that on each listening socket that a job's hosts reach, both sides first prove a key.

Strangers are silent, send nonsense, or replay an honest peer's bytes. They get at most a random
number, their connections are closed, and honest peers are served in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.agent import caller, challenge
from paceline.agent.supervision import relay
from paceline.agent.supervision.tunnels import Tunnels
from paceline.agent.surveys import checks, probe
from paceline.rendezvous import listener as rendezvous
from paceline.rendezvous.certificate import make_certificate
from paceline.train.checkpoints import receiver
from paceline.train.reduce import direct

KEY = b"k" * 32
TIMEOUT_S = 30.0
PROOF_S = 1.5  # by default five seconds
MAX_REPLY_BYTES = 200  # sent to a stranger: a random number, or a TLS alert
MAX_TLS_REPLY_BYTES = 1000  # with TLS, also an anonymous certificate
NONSENSE = (b"GET / HTTP/1.1\r\n\r\n" * 20, b"\n" * 500, b"\0" * 4000, os.urandom(4000))

LISTENERS = {
    "agent/reconnection.py": "Unix socket: tests/contract/test_reconnection.py",
    "agent/ranks/forkserver.py": "the store, on loopback: tests/unit/test_agent_relay.py",
    "agent/ranks/gloo_peers.py": "a store of rank 0 by itself: tests/train/test_strangers.py",
    "agent/ranks/peer_filters.py": "closes every connection: tests/unit/test_agent_peer_filters.py",
    "agent/supervision/requests.py": "becomes the gateway; accepts nothing before",
    "agent/supervision/store.py": "the store, on loopback: tests/unit/test_agent_relay.py",
    "agent/supervision/relay.py": "gateway",
    "agent/supervision/socket_users.py": "one on loopback, whose owner it looks up and closes",
    "agent/supervision/tunnels.py": "tunnels; a Unix socket and loopback: test_agent_relay.py",
    "agent/surveys/checks.py": "sink; reachability",
    "agent/surveys/probe.py": "reachability",
    "agent/surveys/retransmissions.py": "reachability",
    "lab/switch.py": "Unix socket in a folder of the user",
    "launch/control.py": "Unix socket: tests/contract/test_control.py",
    "rendezvous/listener.py": "nodes",
    "setup/login.py": "Unix socket in a folder of the user",
    "train/checkpoints/receiver.py": "checkpoint copies",
    "train/elastic/job_group.py": "connects only",
    "train/reduce/direct.py": "gradients",
}


def test_listener_table_is_complete() -> None:
    """A new listener belongs in this list, in the test below, and on the page about security."""
    opening = re.compile(r"\.listen\(\S|create_server\(|start_(?:unix_)?server\(|TCPStore\(\n")
    root = Path(paceline.__file__).parent
    files = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if opening.search(path.read_text(encoding="utf-8"))
    }
    listening_for_messages = {"cli/supervise.py", "remote/channel.py"}
    assert files - listening_for_messages == set(LISTENERS)


class Service:
    """A listener under test.

    Attributes:
        address: Address for strangers.
        call: Connects to an address as an honest peer, and checks that it is served.
        num_served: Returns the number of connections that have passed the proof.
    """

    def __init__(self, address: Any, call: Callable[[Any], None],
                 num_served: Callable[[], int]) -> None:  # fmt: skip
        self.address, self.call, self.num_served = address, call, num_served


def gateway(closing: contextlib.ExitStack, _: Path) -> Service:
    store = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
    served: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                served.append(closing.enter_context(store.accept()[0]))
                served[-1].sendall(b"store")

    threading.Thread(target=serve, daemon=True).start()
    closing.callback(store.shutdown, socket.SHUT_RDWR)
    listener = closing.enter_context(probe.listen("127.0.0.1"))
    gateway = relay.Relay()
    gateway.listen(listener, relay.Route(store.getsockname(), KEY, is_gateway=True))
    closing.callback(gateway.close)

    def call(address: Any) -> None:
        with socket.create_connection(address, TIMEOUT_S) as connection:
            challenge.run(connection, challenge.caller_handshake(KEY))
            assert connection.recv(5) == b"store"

    return Service(listener.getsockname(), call, lambda: len(served))


def tunnels(closing: contextlib.ExitStack, _: Path) -> Service:
    """Starts the gateway to a host's ranks, as with ``--encrypt``."""
    rank = closing.enter_context(socket.create_server(("127.70.5.2", 0)))
    certificate, private_key = make_certificate()
    settings = {"address": "127.0.0.1", "loopback": "127.70.5.2", "key": KEY.hex(),
                "certificate": certificate, "private_key": private_key}  # fmt: skip
    opened = Tunnels(settings, "", lambda address: None)
    closing.callback(opened.close)
    request = f"7f4605017f460502{rank.getsockname()[1]:04x}"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    served: list[socket.socket] = []

    def call(address: Any) -> None:
        with (
            socket.create_connection(address, TIMEOUT_S) as connection,
            context.wrap_socket(connection) as tls,
        ):
            binding = hashlib.sha256(tls.getpeercert(binary_form=True) or b"").hexdigest()
            challenge.run(tls, challenge.caller_handshake(KEY, binding, request))
            served.append(closing.enter_context(rank.accept()[0]))

    _, address, port, _ = opened.description.split()
    return Service((address, int(port)), call, lambda: len(served))


def sink(closing: contextlib.ExitStack, _: Path) -> Service:
    listener = closing.enter_context(probe.listen("127.0.0.1"))
    threading.Thread(target=checks.serve_sink, args=(listener, KEY), daemon=True).start()
    closing.callback(listener.shutdown, socket.SHUT_RDWR)
    served = []

    def call(address: Any) -> None:
        sent = checks.send_to_sink({
            "address": address[0], "port": address[1], "key": KEY.hex(), "seconds": 0.01,
            "timeout_s": TIMEOUT_S,
        })  # fmt: skip
        assert sent["bytes"] > 0
        served.append(sent)

    return Service(listener.getsockname(), call, lambda: len(served))


def nodes(closing: contextlib.ExitStack, _: Path) -> Service:
    loop, served = asyncio.new_event_loop(), []

    def accept_connection(connection: rendezvous.Connection) -> None:
        served.append(connection)
        connection.accept()

    listener = rendezvous.Listener(KEY, accept_connection)
    loop.run_until_complete(listener.open(["127.0.0.1"]))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def stop() -> None:
        asyncio.run_coroutine_threadsafe(listener.close(), loop).result(TIMEOUT_S)
        for connection in served:
            loop.call_soon_threadsafe(connection.writer.transport.abort)
        loop.call_soon_threadsafe(loop.call_later, 0.1, loop.stop)
        thread.join(TIMEOUT_S)
        loop.close()

    closing.callback(stop)

    def call(address: Any) -> None:
        caller.call(*address, KEY, {"stream": "frames"}, TIMEOUT_S).close()

    return Service(listener.addresses[0], call, lambda: len(served))


def checkpoint_copies(closing: contextlib.ExitStack, folder: Path) -> Service:
    copy_receiver = receiver.Receiver(folder, KEY, "127.0.0.1", keep=2)
    closing.callback(copy_receiver.close)
    served = []

    def call(address: Any) -> None:
        with socket.create_connection(address, TIMEOUT_S) as connection:
            channel = receiver.CopyChannel.connect(connection, KEY)
            channel.send(name="0", manifest="{}", token=1)
            with pytest.raises(receiver.CopyRefused, match="damaged"):
                channel.receive()
            served.append(channel)

    return Service(copy_receiver.address, call, lambda: len(served))


def gradients(closing: contextlib.ExitStack, _: Path) -> Service:
    """Starts the listener of rank 0, to which three ranks connect."""
    listener = closing.enter_context(socket.create_server(("127.0.0.1", 0), backlog=256))
    endpoints = [("127.0.0.1", listener.getsockname()[1], KEY)] * 4
    served: dict[int, socket.socket] = {}

    def add(peer: int, connection: socket.socket) -> socket.socket:
        return served.setdefault(peer, connection)

    deadline = time.monotonic() + 4 * TIMEOUT_S
    arguments = (listener, endpoints, 0, deadline, add)
    accepting = threading.Thread(target=direct._accept_higher_ranks, args=arguments)
    accepting.start()

    def call(address: Any) -> None:
        def keep(_: int, connection: socket.socket) -> socket.socket:
            return closing.enter_context(connection)

        rank = len(served) + 1
        direct._call_lower_ranks([(*address, KEY)], rank, time.monotonic() + TIMEOUT_S, keep)

    def stop() -> None:
        while len(served) < 3:
            call(listener.getsockname())
        accepting.join(TIMEOUT_S)
        for connection in served.values():
            connection.close()

    closing.callback(stop)
    return Service(listener.getsockname(), call, lambda: len(served))


SERVICES = (gateway, tunnels, sink, nodes, checkpoint_copies, gradients)


@pytest.fixture
def closing(monkeypatch: pytest.MonkeyPatch) -> Iterator[contextlib.ExitStack]:
    for module, name in [
        (challenge, "PROOF_TIMEOUT_S"), (relay, "PROOF_TIMEOUT_S"),
        (rendezvous, "HANDSHAKE_S"), (receiver, "_GREETING_TIMEOUT_S"),
        (direct, "_CONNECT_TIMEOUT_S"),
    ]:  # fmt: skip
        monkeypatch.setattr(module, name, PROOF_S)
    with contextlib.ExitStack() as opened:
        yield opened


def record_call(service: Service) -> bytes:
    """Connects through a relay; returns all bytes that the honest peer has sent."""
    sent = bytearray()

    def pump(source: socket.socket, target: socket.socket, record: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                record += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def serve(listener: socket.socket) -> None:
        inner = listener.accept()[0]
        with inner, socket.create_connection(service.address, TIMEOUT_S) as outer:
            backward = threading.Thread(target=pump, args=(outer, inner, bytearray()))
            backward.start()
            pump(inner, outer, sent)
            backward.join(TIMEOUT_S)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        service.call(listener.getsockname())
    return bytes(sent)


def read_to_end(connection: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(1 << 12):
            received += data
    return received


@pytest.mark.parametrize("open_service", SERVICES, ids=lambda service: service.__name__)
def test_rejects_strangers_and_serves_peers(
    open_service: Callable[..., Service], closing: contextlib.ExitStack, tmp_path: Path
) -> None:
    service = open_service(closing, tmp_path / "taker")
    recorded = record_call(service)
    assert len(recorded) > 40
    assert service.num_served() == 1

    def stranger(sent: bytes) -> socket.socket:
        connection = closing.enter_context(socket.create_connection(service.address, TIMEOUT_S))
        with contextlib.suppress(ConnectionError):  # may be closed during the sending
            connection.sendall(sent)
        return connection

    idle = [stranger(b"") for _ in range(80)]
    partial = [stranger(recorded[:10]) for _ in range(20)]
    start = time.monotonic()
    service.call(service.address)
    assert time.monotonic() - start < 10 * PROOF_S  # silent connections are not awaited in turn
    noisy = [stranger(sent) for sent in (*NONSENSE, recorded)]
    limit = MAX_TLS_REPLY_BYTES if open_service is tunnels else MAX_REPLY_BYTES
    for connection in (*idle, *partial, *noisy):
        assert len(read_to_end(connection)) <= limit
    assert service.num_served() == 2


@pytest.mark.parametrize("open_service", SERVICES, ids=lambda service: service.__name__)
def test_peer_reveals_nothing_to_impostor(
    open_service: Callable[..., Service], closing: contextlib.ExitStack, tmp_path: Path
) -> None:
    """An impostor on the port gets a proof that is useless elsewhere."""
    service = open_service(closing, tmp_path / "taker")
    received = bytearray()
    impostor = closing.enter_context(socket.create_server(("127.0.0.1", 0)))

    def serve() -> None:
        with impostor.accept()[0] as connection, contextlib.suppress(OSError):
            connection.settimeout(TIMEOUT_S)
            connection.sendall(b"0" * 32)
            time.sleep(0.3)
            received.extend(connection.recv(1 << 16))
            connection.sendall(b"0" * 200)

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises((OSError, ValueError)):
        service.call(impostor.getsockname())
    thread.join(TIMEOUT_S)
    is_tls = open_service in (nodes, tunnels)
    assert 0 < len(received) < (2000 if is_tls else 120)
    assert service.num_served() == 0


def test_reachability_listener_ignores_input() -> None:
    """It sends the agent's identity and closes the connection."""
    with probe.listen("127.0.0.1") as listener:
        for sent in (b"", *NONSENSE):
            with socket.create_connection(listener.getsockname(), TIMEOUT_S) as connection:
                connection.sendall(sent)
                probe.answer(listener, b"i" * probe.IDENTITY_BYTES)
                assert read_to_end(connection) in (b"i" * probe.IDENTITY_BYTES, b"")
