"""Tests how connections to the store are relayed between hosts, and which are rejected."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from packet_filters import needs_packet_filters

from background import eventually
from paceline.agent import challenge
from paceline.agent.ranks import peer_filters
from paceline.agent.ranks import tunnels as rank_tunnels
from paceline.agent.supervision import relay
from paceline.agent.supervision.encryption import Encryption
from paceline.agent.supervision.job import NodeJob
from paceline.agent.supervision.relay import MAX_UNPROVEN, Relay, Route
from paceline.agent.supervision.store import Store
from paceline.agent.supervision.tunnels import Tunnels
from paceline.agent.surveys import probe
from paceline.rendezvous.certificate import make_certificate

KEY, LOCAL = b"key of the job", "127.0.0.1"
TIMEOUT_S = 10.0


class Hosts:
    """Runs an echo server in place of the store, its gateway, and forwarders of other hosts."""

    def __init__(self, encryption: Encryption | None = None) -> None:
        self.encryption = encryption
        self.closing = contextlib.ExitStack()
        self._threads: list[threading.Thread] = []
        self.closing.callback(self._join)
        self.store = self.listen()
        self.gateway_listener = self.listen()
        self.gateway = self.relay(self.gateway_listener, self.store, KEY, is_gateway=True)
        self.num_served = 0
        self.store_callers: list[tuple[str, int]] = []
        self.spawn(self._serve)
        self.closing.callback(self.store.shutdown, socket.SHUT_RDWR)  # wakes its thread

    def spawn(self, work: Callable[..., None], *args: Any) -> None:
        self._threads.append(threading.Thread(target=work, args=args))
        self._threads[-1].start()

    def _join(self) -> None:
        for thread in self._threads:
            thread.join(TIMEOUT_S)

    def listen(self) -> socket.socket:
        return self.closing.enter_context(socket.create_server((LOCAL, 0)))

    def relay(self, listener: socket.socket, to: socket.socket, key: bytes, *,
              is_gateway: bool) -> Relay:  # fmt: skip
        relaying = Relay(self.encryption)
        self.closing.callback(relaying.close)
        relaying.listen(listener, Route(to.getsockname(), key, is_gateway))
        return relaying

    def forwarder(self, key: bytes = KEY, gateway: socket.socket | None = None) -> socket.socket:
        """Opens a forwarder; returns its listening socket."""
        listener = self.listen()
        self.relay(listener, gateway or self.gateway_listener, key, is_gateway=False)
        return listener

    def dial(self, listener: socket.socket) -> socket.socket:
        client_socket = socket.create_connection(listener.getsockname(), TIMEOUT_S)
        return self.closing.enter_context(client_socket)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.store.accept()
                self.num_served += 1
                self.spawn(self._echo, connection)

    def _echo(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                connection.sendall(data)
                if data.endswith(b"end"):
                    return


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    created = Hosts(Encryption(*make_certificate()) if getattr(request, "param", False) else None)
    with created.closing:
        yield created


clear_and_encrypted = pytest.mark.parametrize("hosts", [False, True], indirect=True)


def is_echoed(client_socket: socket.socket, text: bytes) -> bool:
    client_socket.sendall(text)
    return client_socket.recv(len(text)) == text


def is_closed(client_socket: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        return client_socket.recv(1) == b""
    return True


@clear_and_encrypted
def test_ranks_on_remote_host_reach_store(hosts: Hosts) -> None:
    forwarder = hosts.forwarder()
    first, second = hosts.dial(forwarder), hosts.dial(forwarder)
    assert is_echoed(first, b"one")
    assert is_echoed(second, b"two")
    assert is_echoed(first, b"three")
    first.close()
    assert is_echoed(second, b"four")
    second.sendall(b"end")
    assert second.recv(9) == b"end"
    assert is_closed(second)  # closed, like the store's connection


@clear_and_encrypted
def test_full_buffers_lose_no_data_and_block_no_connection(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = relay._prepare

    def prepare_small(sock: socket.socket) -> None:
        prepare(sock)
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, buffer, 1 << 16)

    monkeypatch.setattr(relay, "_prepare", prepare_small)
    forwarder, content = hosts.forwarder(), bytes(range(256)) * (3 << 15)  # 24 MiB
    busy, other = hosts.dial(forwarder), hosts.dial(forwarder)
    assert is_echoed(busy, b"begin")
    hosts.spawn(busy.sendall, content)
    time.sleep(0.2)  # the echo is not read yet
    assert is_echoed(other, b"meanwhile")
    received = bytearray()
    while len(received) < len(content):
        received += busy.recv(1 << 20)
    assert received == content


def test_gateway_rejects_callers_without_key(hosts: Hosts) -> None:
    stranger, replaying = hosts.dial(hosts.gateway_listener), hosts.dial(hosts.gateway_listener)
    handshake = challenge.caller_handshake(KEY)
    next(handshake)
    proof, _ = handshake.send(stranger.recv(32).decode())
    replaying.recv(32)
    replaying.sendall(proof.encode())  # the proof of another connection
    stranger.sendall(b"0" * len(proof))
    assert is_closed(stranger)
    assert is_closed(replaying)
    assert hosts.num_served == 0


def test_forwarder_sends_no_data_to_impostor_gateway(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "PROOF_TIMEOUT_S", 0.5)
    impostor = hosts.listen()
    client_socket = hosts.dial(hosts.forwarder(gateway=impostor))
    client_socket.sendall(b"secret")
    accepted, _ = impostor.accept()
    with accepted:
        accepted.settimeout(TIMEOUT_S)
        accepted.sendall(b"0" * 32)
        assert len(accepted.recv(200)) == 96
        accepted.sendall(b"0" * 64)
        assert is_closed(accepted)
    assert is_closed(client_socket)


def test_connections_without_proof_time_out(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "PROOF_TIMEOUT_S", 0.2)
    idle = hosts.dial(hosts.gateway_listener)
    assert len(idle.recv(200)) == 32
    assert is_closed(idle)


def test_flood_of_idle_connections_blocks_no_rank(hosts: Hosts) -> None:
    forwarder = hosts.forwarder()
    early = hosts.dial(forwarder)
    assert is_echoed(early, b"early")
    flood = [hosts.dial(hosts.gateway_listener) for _ in range(MAX_UNPROVEN + 50)]
    assert is_echoed(hosts.dial(forwarder), b"late")
    assert is_echoed(early, b"still here")
    assert len(flood[0].recv(200)) == 32
    assert is_closed(flood[0])


def test_connections_survive_descriptor_exhaustion(hosts: Hosts) -> None:
    client_socket = hosts.dial(hosts.forwarder())
    assert is_echoed(client_socket, b"before")
    waiting = hosts.closing.enter_context(socket.socket())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(waiting.fileno())
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        waiting.connect(hosts.gateway_listener.getsockname())
        start = time.monotonic()
        assert all(is_echoed(client_socket, b"meanwhile") for _ in range(50))
        elapsed_s = time.monotonic() - start
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert elapsed_s < 50 * relay.PAUSE_S / 2
    assert len(waiting.recv(200)) == 32


@pytest.mark.parametrize(("limit", "expected"), [(1 << 20, MAX_UNPROVEN), (400, 50), (-1, 512)])
def test_max_unproven_follows_descriptor_limit(
    limit: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert relay._max_unproven() == expected


def test_flood_does_not_close_outgoing_connections(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an encrypted job, one relay serves both a gateway and forwarders."""
    monkeypatch.setattr(relay, "MAX_UNPROVEN", 2)
    delayed_gateway, forwarder = hosts.listen(), hosts.listen()
    hosts.gateway.listen(forwarder, Route(delayed_gateway.getsockname(), KEY, is_gateway=False))
    client_socket = hosts.dial(forwarder)
    accepted = hosts.closing.enter_context(delayed_gateway.accept()[0])
    flood = [hosts.dial(hosts.gateway_listener) for _ in range(5)]
    flood[0].recv(32)
    assert is_closed(flood[0])
    challenge.run(accepted, challenge.listener_handshake(KEY))
    client_socket.sendall(b"hello")
    assert accepted.recv(5) == b"hello"


def test_unexpected_error_closes_only_its_connection(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = hosts.dial(hosts.forwarder())
    assert is_echoed(early, b"early")

    def fail(*_: Any) -> None:
        raise OverflowError

    with monkeypatch.context() as patch:
        patch.setattr(relay, "_requested", fail)
        assert is_closed(hosts.dial(hosts.forwarder()))
    assert is_echoed(early, b"still here")
    assert is_echoed(hosts.dial(hosts.forwarder()), b"late")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_relay_failure_closes_all_connections(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = hosts.dial(hosts.forwarder())
    assert is_echoed(early, b"early")

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Relay, "_accept", fail)
    hosts.dial(hosts.gateway_listener)
    assert is_closed(early)


@clear_and_encrypted
def test_forwarder_redials_until_gateway_opens(hosts: Hosts) -> None:
    with socket.create_server((LOCAL, 0)) as former:
        place = former.getsockname()
        forwarder = hosts.forwarder(gateway=former)
    client_socket = hosts.dial(forwarder)
    client_socket.sendall(b"hello")
    time.sleep(3 * relay.REDIAL_S)
    with probe.listen(*place) as listener:
        hosts.relay(listener, hosts.store, KEY, is_gateway=True)
        assert client_socket.recv(5) == b"hello"


@clear_and_encrypted
def test_forwarder_without_gateway_closes_connection(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "PROOF_TIMEOUT_S", 0.3)
    with socket.create_server((LOCAL, 0)) as nowhere:
        forwarder = hosts.forwarder(gateway=nowhere)
    assert is_closed(hosts.dial(forwarder))


def test_relay_close_closes_all_connections(hosts: Hosts) -> None:
    forwarder = hosts.listen()
    relaying = hosts.relay(forwarder, hosts.gateway_listener, KEY, is_gateway=False)
    client_socket, idle = hosts.dial(forwarder), hosts.dial(hosts.gateway_listener)
    assert is_echoed(client_socket, b"here")
    relaying.close()
    assert is_closed(client_socket)
    hosts.gateway.close()
    idle.recv(32)
    assert is_closed(idle)


# --- encrypted connections ------------------------------------------------------------------------


class Wire:
    """Sits between a forwarder and a gateway: records the traffic, and can change bits of it."""

    def __init__(self, hosts: Hosts) -> None:
        self.listener, self._gateway = hosts.listen(), hosts.gateway_listener.getsockname()
        self._hosts, self.seen, self.flip_at, self.direction = hosts, bytearray(), -1, ""
        hosts.spawn(self._accept)
        hosts.closing.callback(self.listener.shutdown, socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self.listener.accept()
                callee = socket.create_connection(self._gateway, TIMEOUT_S)
                self._hosts.spawn(self._copy, caller, callee, "to gateway")
                self._hosts.spawn(self._copy, callee, caller, "from gateway")

    def _copy(self, source: socket.socket, target: socket.socket, direction: str) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                self.seen += data
                if direction == self.direction:
                    data[self.flip_at] ^= 2
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


encrypted = pytest.mark.parametrize("hosts", [True], indirect=True)


@encrypted
def test_wire_carries_no_plaintext(hosts: Hosts) -> None:
    wire = Wire(hosts)
    client_socket = hosts.dial(hosts.forwarder(gateway=wire.listener))
    assert is_echoed(client_socket, b"weights and gradients")
    assert len(wire.seen) > 500
    assert b"weights" not in wire.seen
    client_socket.shutdown(socket.SHUT_RDWR)


def alterations(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the addresses that will be reported; limits are short."""
    altered: list[str] = []
    monkeypatch.setattr(hosts.encryption, "on_altered", altered.append)
    monkeypatch.setattr(relay, "PARTIAL_TIMEOUT_S", 0.5)
    monkeypatch.setattr(relay, "PROOF_TIMEOUT_S", 1.0)
    return altered


@encrypted
@pytest.mark.parametrize("flip_at", [3, -1])  # of the record's length; of its content
def test_altered_byte_closes_connection_and_is_reported(
    hosts: Hosts, flip_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    altered = alterations(hosts, monkeypatch)
    wire = Wire(hosts)
    wire.flip_at = flip_at
    client_socket = hosts.dial(hosts.forwarder(gateway=wire.listener))
    assert is_echoed(client_socket, b"as it was sent")
    wire.direction = "to gateway"
    client_socket.sendall(b"changed")
    assert is_closed(client_socket)
    assert eventually(lambda: set(altered) == {LOCAL}, TIMEOUT_S)


@encrypted
@pytest.mark.parametrize("flip_at", [3, 4, 9, -1])
def test_altered_byte_before_proof_is_reported(
    hosts: Hosts, flip_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    altered = alterations(hosts, monkeypatch)
    wire = Wire(hosts)
    wire.flip_at, wire.direction = flip_at, "from gateway"
    forwarder = hosts.forwarder(gateway=wire.listener)
    for _ in range(relay.MIN_STALLS):
        assert is_closed(hosts.dial(forwarder))
    assert eventually(lambda: LOCAL in altered, TIMEOUT_S)


def tls_error(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, f"[SSL: {reason}]")
    error.reason = reason
    return error


@pytest.mark.parametrize(
    ("error", "is_change"),
    [
        (ssl.SSLError(1, "[SSL: DECRYPTION_FAILED_OR_BAD_RECORD_MAC]"), True),
        (ssl.SSLError(1, "[SSL: INVALID_SESSION_ID]"), True),  # during the handshake
        (ssl.SSLError(1, "[SSL: SSLV3_ALERT_ILLEGAL_PARAMETER]"), True),  # other side noticed it
        (ssl.SSLEOFError(8, "[SSL: UNEXPECTED_EOF_WHILE_READING]"), False),
        (tls_error("APPLICATION_DATA_AFTER_CLOSE_NOTIFY"), False),  # this side was closing it
        (ConnectionResetError(), False),
    ],
)
def test_classifies_tls_errors_as_alteration(error: OSError, is_change: bool) -> None:
    assert Encryption.shows_change(error) is is_change


@encrypted
def test_man_in_the_middle_cannot_relay_proofs(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attacker has a certificate of its own and talks TLS to each side."""
    altered = alterations(hosts, monkeypatch)
    certificate, key = make_certificate()
    middle = hosts.listen()
    client_socket = hosts.dial(hosts.forwarder(gateway=middle))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(certificate + key)
        file.flush()
        context.load_cert_chain(file.name)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    caller = context.wrap_socket(middle.accept()[0], server_side=True)
    callee = client.wrap_socket(
        socket.create_connection(hosts.gateway_listener.getsockname(), TIMEOUT_S)
    )
    with caller, callee:
        callee.recv(32)  # the nonce
        callee.sendall(b"f" * 96)
        assert callee.recv(64) == b""
    assert is_closed(client_socket)
    assert altered == [LOCAL]
    assert hosts.num_served == 0


@encrypted
def test_caller_without_tls_is_closed_without_report(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    altered: list[str] = []
    monkeypatch.setattr(hosts.encryption, "on_altered", altered.append)
    stranger = hosts.dial(hosts.gateway_listener)
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    with contextlib.suppress(ConnectionError):
        assert len(stranger.recv(100)) < 10  # a TLS alert at most
    assert is_echoed(hosts.dial(hosts.forwarder()), b"others get through")
    assert altered == []


@pytest.fixture
def tunnels(hosts: Hosts) -> Tunnels:
    """Returns the tunnels of a host whose ranks are at 127.70.3.2."""
    certificate, private_key = make_certificate()
    settings = {"address": LOCAL, "loopback": "127.70.3.2", "key": KEY.hex(),
                "certificate": certificate, "private_key": private_key}  # fmt: skip
    created = Tunnels(settings, "", lambda address: None)
    hosts.closing.callback(created.close)
    return created


def test_host_gateway_connects_only_to_its_ranks(hosts: Hosts, tunnels: Tunnels) -> None:
    loopback, gateway, port, _ = tunnels.description.split()
    rank = hosts.closing.enter_context(socket.create_server((loopback, 0)))
    forwarder, relaying = hosts.listen(), Relay(tunnels.encryption)
    hosts.closing.callback(relaying.close)
    request = f"7f4603017f460302{rank.getsockname()[1]:04x}"
    route = Route((gateway, int(port)), KEY, is_gateway=False, request=request)
    relaying.listen(forwarder, route)
    client_socket = hosts.dial(forwarder)
    client_socket.sendall(b"hello")
    rank.settimeout(TIMEOUT_S)
    accepted, (address, _) = rank.accept()
    with accepted:
        assert accepted.recv(5) == b"hello"
        assert address == "127.70.3.1"  # the address of the other host's ranks
        accepted.sendall(b"all of this" * 10000)
    received = bytearray()
    while data := client_socket.recv(1 << 16):
        received += data
    assert received == b"all of this" * 10000  # including the data before the end of the stream
    closed_port_request = "7f4603017f4603020001"
    wrong_address_request = request.replace("7f460302", "7f460303")
    for rejected_request in (closed_port_request, wrong_address_request):
        route = Route((gateway, int(port)), KEY, is_gateway=False, request=rejected_request)
        with hosts.listen() as forwarder_socket:
            relaying.listen(forwarder_socket, route)
            assert is_closed(hosts.dial(forwarder_socket))


@pytest.mark.parametrize("source", ["127.70.3.1", LOCAL])
def test_gateway_does_not_expose_loopback_programs(
    hosts: Hosts, tunnels: Tunnels, source: str
) -> None:
    """Hosts of the job reach no program that listens on all addresses; other hosts, no rank."""
    _, gateway, port, _ = tunnels.description.split()
    listening = "" if source != LOCAL else "127.70.3.2"
    program = hosts.closing.enter_context(socket.create_server((listening, 0)))
    request = f"{socket.inet_aton(source).hex()}7f460302{program.getsockname()[1]:04x}"
    relaying, forwarder = Relay(tunnels.encryption), hosts.listen()
    hosts.closing.callback(relaying.close)
    relaying.listen(forwarder, Route((gateway, int(port)), KEY, is_gateway=False, request=request))
    assert is_closed(hosts.dial(forwarder))


@pytest.mark.parametrize("address", ["0.0.0.0", LOCAL, "127.71.3.1", "10.0.0.1", "n1"])
def test_agents_listen_only_at_rank_addresses(tunnels: Tunnels, address: str) -> None:
    """Other hosts choose the address, so it must be checked."""
    with pytest.raises((ValueError, OSError)):
        tunnels.open_way((address, 5000), ("10.0.0.2", 6000))
    with pytest.raises(ValueError, match=r"127\.70\.3\.1"):
        tunnels.open_way(("127.70.3.1", 70000), ("10.0.0.2", 6000))


def test_ranks_retry_if_port_is_in_use_on_remote_host(
    tunnels: Tunnels,
) -> None:
    """The agent of rank 0 cannot listen on a port that a program of its host uses."""
    torch_distributed = pytest.importorskip("torch.distributed")
    loopback, gateway, gateway_port, agent = tunnels.description.split()
    tunnels_by_rank = [rank_tunnels.Tunnels(loopback, gateway, int(gateway_port), agent),
              rank_tunnels.Tunnels("127.70.3.1", "10.0.0.2", 6000, agent)]  # fmt: skip
    store = torch_distributed.HashStore()

    def connect_ranks(ports: Sequence[int], attempt: int) -> list[bool]:
        def meet_rank(rank: int) -> bool:
            return rank_tunnels.meet(tunnels_by_rank[rank], store, rank, 2, ports[rank], attempt)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(meet_rank, (0, 1)))

    with socket.create_server(("", 0)) as program:
        occupied_port = program.getsockname()[1]
        assert connect_ranks((occupied_port, occupied_port), 0) == [False, False]
        with pytest.raises(OSError, match=rf"rank 0: port {occupied_port}, .* is in use here"):
            connect_ranks((occupied_port, occupied_port), rank_tunnels.MAX_ATTEMPTS - 1)
        with socket.create_server(("127.70.3.1", 0)) as listener:
            free_port = listener.getsockname()[1]
        assert connect_ranks((occupied_port, free_port), 1) == [True, True]


# --- the store of a node --------------------------------------------------------------------------


def closed_store(gateway: socket.socket) -> dict[str, Any]:
    address, port = gateway.getsockname()
    return {"address": address, "port": port, "key": KEY.hex()}


def test_node_forwards_ranks_to_store_of_each_group(hosts: Hosts) -> None:
    node = Store()
    hosts.closing.callback(node.end)
    store = closed_store(
        hosts.gateway_listener
    )  # the gateway has this port here: the node takes another
    localized = node.localize({"control": "regroup", "store": store})
    endpoint = localized["store"]
    assert endpoint.pop("host") == store["address"]
    assert set(endpoint) == {"address", "port"}
    assert endpoint["port"] != store["port"]
    place = endpoint["address"], endpoint["port"]
    with socket.create_connection(place, TIMEOUT_S) as client_socket:
        assert is_echoed(client_socket, b"one")
        assert node.localize({"store": store})["store"]["port"] == endpoint["port"]
        assert is_echoed(client_socket, b"two")
        next_endpoint = node.localize(localized | {"store": {**store, "key": "00"}})["store"]
        assert next_endpoint != store
        assert is_closed(client_socket)
    assert node.localize({"control": "end"}) == {"control": "end"}
    unencrypted_order = {"store": {"address": "10.0.0.1", "port": 5}}
    assert node.localize(unencrypted_order) == unencrypted_order


def test_ranks_get_local_store_address_but_not_key(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[Any] = []
    job = NodeJob(lambda *_: None, "")
    hosts.closing.callback(job.store.end)
    monkeypatch.setattr(job, "_require_server", lambda: None)
    monkeypatch.setattr(job, "_send_order", lambda order, fds=(): orders.append(order))
    rank = {"rank": 1, "local_rank": 0, "env": {"MASTER_ADDR": "x", "MASTER_PORT": "1"}}
    store = closed_store(hosts.gateway_listener)
    job.start({"ranks": [rank], "store": store, "env": {}, "entry": {"kind": "script"}}, None)
    for fd in job.ranks[0].fds:
        os.close(fd)
    job.ranks[0].close_control()
    assert KEY.hex() not in str(orders)
    place = orders[-1]["rank"]["env"]
    assert place["MASTER_ADDR"] == LOCAL
    with socket.create_connection((LOCAL, int(place["MASTER_PORT"])), TIMEOUT_S) as client_socket:
        assert is_echoed(client_socket, b"here")


def test_encrypted_ranks_default_to_loopback_interface(
    hosts: Hosts, tunnels: Tunnels, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[Any] = []
    job = NodeJob(lambda *_: None, "")
    hosts.closing.callback(job.store.end)
    monkeypatch.setattr(job, "_tunnels", tunnels)
    monkeypatch.setattr(job, "_require_server", lambda: None)
    monkeypatch.setattr(job, "_send_order", lambda order, fds=(): orders.append(order))
    rank = {"rank": 1, "local_rank": 0, "env": {"GLOO_SOCKET_IFNAME": "eth0"}}
    job.start({"ranks": [rank], "store": closed_store(hosts.gateway_listener), "env": {},
               "encryption": tunnels.settings, "entry": {"kind": "script"}}, None)  # fmt: skip
    for fd in job.ranks[0].fds:
        os.close(fd)
    job.ranks[0].close_control()
    environment = orders[-1]["rank"]["env"]
    assert environment["PACELINE_TUNNELS"] == tunnels.description
    assert environment["GLOO_SOCKET_IFNAME"] == environment["TP_SOCKET_IFNAME"] == "lo"


# --- other users of the store's host --------------------------------------------------------------

_CONNECT_SCRIPT = """
import encodings.idna, os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
address, port, *source = sys.argv[1:]
try:
    source = (source[0], int(source[1])) if source else None
    with socket.create_connection((address, int(port)), 1, source) as calling:
        calling.sendall(b"hello")
        print(len(calling.recv(5)))
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture(params=["filter", "no filter"])
def guarded(
    hosts: Hosts, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[socket.socket, socket.socket]:
    """Returns the local gateway of a job on one host, and the socket of an echoing store.

    Also runs as on a kernel that lets no user filter packets.
    """
    if request.param == "no filter":
        monkeypatch.setattr(peer_filters, "attach_filter", lambda *_: False)
    node, local = Store(), hosts.closing.enter_context(probe.listen(LOCAL))
    hosts.closing.callback(node.end)
    inner = node.open_gateway(closed_store(local), local)
    hosts.closing.enter_context(inner)
    inner.setblocking(True)
    hosts.closing.callback(inner.shutdown, socket.SHUT_RDWR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, caller = inner.accept()
                hosts.store_callers.append(caller)
                hosts.spawn(hosts._echo, connection)

    hosts.spawn(serve)
    return local, inner


def test_local_gateway_forwards_ranks_to_inner_store(
    hosts: Hosts, guarded: tuple[socket.socket, socket.socket]
) -> None:
    local, inner = guarded
    assert inner.getsockname() == ("127.0.0.2", local.getsockname()[1])
    assert is_echoed(hosts.dial(local), b"one")
    mapped = hosts.closing.enter_context(socket.socket(socket.AF_INET6))  # like torch's clients
    mapped.settimeout(TIMEOUT_S)
    mapped.connect((f"::ffff:{LOCAL}", local.getsockname()[1]))
    assert is_echoed(mapped, b"two")
    assert is_echoed(hosts.dial(local), b"three")


def test_inner_store_avoids_occupied_loopback_address(hosts: Hosts) -> None:
    node, local = Store(), hosts.closing.enter_context(probe.listen(LOCAL))
    hosts.closing.callback(node.end)
    port = local.getsockname()[1]
    with probe.listen("127.0.0.2", port):
        inner = hosts.closing.enter_context(node.open_gateway(closed_store(local), local))
    address = inner.getsockname()
    assert address[0] not in (LOCAL, "127.0.0.2")
    assert address[1] == port


@pytest.mark.parametrize("has_packet_filters", [True, False])
def test_inner_store_is_filtered_before_it_listens(
    has_packet_filters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user could connect in between, and would stay connected."""
    if not has_packet_filters:
        monkeypatch.setattr(peer_filters, "attach_filter", lambda *_: False)
    listening = []
    make = peer_filters.PortFilter

    def record(listener: socket.socket) -> peer_filters.PortFilter:
        listening.append(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        return make(listener)

    monkeypatch.setattr(peer_filters, "PortFilter", record)
    node, local = Store(), probe.listen(LOCAL)
    with local, node.open_gateway(closed_store(local), local):
        node.end()
    assert listening == [0]


def test_store_does_not_open_if_another_user_blocks_its_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A socket that is bound, but does not listen, can do that once the gateway listens."""
    monkeypatch.setattr(peer_filters, "attach_filter", lambda *_: False)
    node = Store()
    with socket.socket() as blocking, contextlib.ExitStack() as closing:
        blocking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        blocking.bind(("", 0))
        local = closing.enter_context(probe.listen(LOCAL, blocking.getsockname()[1]))
        blocking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        with pytest.raises(OSError, match="in use"):
            node.open_gateway(closed_store(local), local)
        node.end()


def test_restrict_closes_pending_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a filter, anybody could connect before the store started."""
    monkeypatch.setattr(peer_filters, "attach_filter", lambda *_: False)
    node = Store()
    with socket.create_server((LOCAL, 0)) as reserved:
        with socket.create_connection(reserved.getsockname(), TIMEOUT_S, ("127.0.0.3", 0)) as early:
            node.restrict(reserved, "10.77.0.11")
            assert is_closed(early)
        with (
            socket.create_connection(reserved.getsockname(), TIMEOUT_S),
            reserved.accept()[0] as connection,
        ):
            assert connection.getpeername()[0] == LOCAL
        node.end()


@needs_packet_filters
@pytest.mark.parametrize("guarded", ["filter"], indirect=True)
def test_inner_store_accepts_only_gateway_connections(
    guarded: tuple[socket.socket, socket.socket],
) -> None:
    """Direct connections of the same user fail, too; without a filter, they reach the gateway."""
    with pytest.raises(TimeoutError):
        socket.create_connection(guarded[1].getsockname(), 0.3)


def test_local_gateway_rejects_foreign_users(
    hosts: Hosts, guarded: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert is_closed(hosts.dial(guarded[0]))
    assert is_closed(hosts.dial(hosts.forwarder()))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_foreign_user_cannot_reach_store(
    hosts: Hosts, guarded: tuple[socket.socket, socket.socket]
) -> None:
    """Using the gateway's port number at another address, or after its end, does not help."""
    local, inner = guarded

    def is_closed_to_foreign_user(target: socket.socket, *source: object) -> bool:
        argv = [
            sys.executable,
            "-I",
            "-c",
            _CONNECT_SCRIPT,
            *map(str, (*target.getsockname(), *source)),
        ]
        result = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
        return result in ("0", "ConnectionResetError", "BrokenPipeError", "TimeoutError")

    client_socket = hosts.dial(local)
    assert is_echoed(client_socket, b"one")
    ((address, port),) = hosts.store_callers
    for source in (), (LOCAL, port):
        assert is_closed_to_foreign_user(local, *source)
        assert is_closed_to_foreign_user(inner, *source)
    assert is_echoed(client_socket, b"end")
    assert is_closed(client_socket)
    assert is_closed_to_foreign_user(inner, address, port)
