"""How connections to the store get from one host to another, and who does not get through."""

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
    """A store that sends back what it gets, a gateway to it, and forwarders of other hosts."""

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
        self.closing.callback(self.store.shutdown, socket.SHUT_RDWR)  # wakes it

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
        calling = socket.create_connection(listener.getsockname(), TIMEOUT_S)
        return self.closing.enter_context(calling)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                served, _ = self.store.accept()
                self.num_served += 1
                self.spawn(self._echo, served)

    def _echo(self, served: socket.socket) -> None:
        with served, contextlib.suppress(OSError):
            while data := served.recv(1 << 16):
                served.sendall(data)
                if data.endswith(b"end"):
                    return


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    made = Hosts(Encryption(*make_certificate()) if getattr(request, "param", False) else None)
    with made.closing:
        yield made


clear_and_encrypted = pytest.mark.parametrize("hosts", [False, True], indirect=True)


def answered(calling: socket.socket, text: bytes) -> bool:
    calling.sendall(text)
    return calling.recv(len(text)) == text


def is_closed(calling: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        return calling.recv(1) == b""
    return True


@clear_and_encrypted
def test_ranks_of_another_host_reach_the_store(hosts: Hosts) -> None:
    forwarder = hosts.forwarder()
    first, second = hosts.dial(forwarder), hosts.dial(forwarder)
    assert answered(first, b"one")
    assert answered(second, b"two")
    assert answered(first, b"three")
    first.close()
    assert answered(second, b"four")
    second.sendall(b"end")
    assert second.recv(9) == b"end"
    assert is_closed(second)  # as the store did


@clear_and_encrypted
def test_more_than_all_buffers_hold_arrives_whole_and_holds_up_nobody(
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
    assert answered(busy, b"begin")
    hosts.spawn(busy.sendall, content)
    time.sleep(0.2)  # nobody reads the answer
    assert answered(other, b"meanwhile")
    received = bytearray()
    while len(received) < len(content):
        received += busy.recv(1 << 20)
    assert received == content


def test_who_does_not_know_the_key_reaches_nothing(hosts: Hosts) -> None:
    stranger, replaying = hosts.dial(hosts.gateway_listener), hosts.dial(hosts.gateway_listener)
    handshake = challenge.caller_handshake(KEY)
    next(handshake)
    proof, _ = handshake.send(stranger.recv(32).decode())
    replaying.recv(32)
    replaying.sendall(proof.encode())  # of another connection
    stranger.sendall(b"0" * len(proof))
    assert is_closed(stranger)
    assert is_closed(replaying)
    assert hosts.num_served == 0


def test_a_gateway_that_does_not_know_the_key_is_told_nothing(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "PROOF_TIMEOUT_S", 0.5)
    impostor = hosts.listen()
    calling = hosts.dial(hosts.forwarder(gateway=impostor))
    calling.sendall(b"secret")
    accepted, _ = impostor.accept()
    with accepted:
        accepted.settimeout(TIMEOUT_S)
        accepted.sendall(b"0" * 32)
        assert len(accepted.recv(200)) == 96
        accepted.sendall(b"0" * 64)
        assert is_closed(accepted)
    assert is_closed(calling)


def test_silent_connections_end_soon(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "PROOF_TIMEOUT_S", 0.2)
    silent = hosts.dial(hosts.gateway_listener)
    assert len(silent.recv(200)) == 32
    assert is_closed(silent)


def test_a_flood_of_silent_connections_keeps_nobody_out(hosts: Hosts) -> None:
    forwarder = hosts.forwarder()
    early = hosts.dial(forwarder)
    assert answered(early, b"early")
    flood = [hosts.dial(hosts.gateway_listener) for _ in range(MAX_UNPROVEN + 50)]
    assert answered(hosts.dial(forwarder), b"late")
    assert answered(early, b"still here")
    assert len(flood[0].recv(200)) == 32
    assert is_closed(flood[0])


def test_connections_go_on_while_no_more_descriptors_can_be_opened(hosts: Hosts) -> None:
    calling = hosts.dial(hosts.forwarder())
    assert answered(calling, b"before")
    waiting = hosts.closing.enter_context(socket.socket())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(waiting.fileno())
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        waiting.connect(hosts.gateway_listener.getsockname())
        start = time.monotonic()
        assert all(answered(calling, b"meanwhile") for _ in range(50))
        took_s = time.monotonic() - start
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert took_s < 50 * relay.PAUSE_S / 2
    assert len(waiting.recv(200)) == 32


@pytest.mark.parametrize(("limit", "expected"), [(1 << 20, MAX_UNPROVEN), (400, 50), (-1, 512)])
def test_unproven_connections_leave_most_descriptors_to_others(
    limit: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert relay._max_unproven() == expected


def test_a_flood_does_not_end_connections_that_this_host_makes(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay of an encrypted job has a gateway and forwarders."""
    monkeypatch.setattr(relay, "MAX_UNPROVEN", 2)
    slow, forwarder = hosts.listen(), hosts.listen()
    hosts.gateway.listen(forwarder, Route(slow.getsockname(), KEY, is_gateway=False))
    calling = hosts.dial(forwarder)
    accepted = hosts.closing.enter_context(slow.accept()[0])
    flood = [hosts.dial(hosts.gateway_listener) for _ in range(5)]
    flood[0].recv(32)
    assert is_closed(flood[0])
    challenge.run(accepted, challenge.listener_handshake(KEY))
    calling.sendall(b"hello")
    assert accepted.recv(5) == b"hello"


def test_an_unexpected_error_ends_one_connection(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = hosts.dial(hosts.forwarder())
    assert answered(early, b"early")

    def fail(*_: Any) -> None:
        raise OverflowError

    with monkeypatch.context() as patch:
        patch.setattr(relay, "_requested", fail)
        assert is_closed(hosts.dial(hosts.forwarder()))
    assert answered(early, b"still here")
    assert answered(hosts.dial(hosts.forwarder()), b"late")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_relay_that_fails_ends_all_connections(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = hosts.dial(hosts.forwarder())
    assert answered(early, b"early")

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Relay, "_accept", fail)
    hosts.dial(hosts.gateway_listener)
    assert is_closed(early)


@clear_and_encrypted
def test_a_forwarder_waits_for_a_gateway_that_opens_later(hosts: Hosts) -> None:
    with socket.create_server((LOCAL, 0)) as former:
        place = former.getsockname()
        forwarder = hosts.forwarder(gateway=former)
    calling = hosts.dial(forwarder)
    calling.sendall(b"hello")
    time.sleep(3 * relay.REDIAL_S)
    with probe.listen(*place) as listener:
        hosts.relay(listener, hosts.store, KEY, is_gateway=True)
        assert calling.recv(5) == b"hello"


@clear_and_encrypted
def test_a_forwarder_that_reaches_no_gateway_ends_the_connection(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "PROOF_TIMEOUT_S", 0.3)
    with socket.create_server((LOCAL, 0)) as nowhere:
        forwarder = hosts.forwarder(gateway=nowhere)
    assert is_closed(hosts.dial(forwarder))


def test_closing_ends_all_connections(hosts: Hosts) -> None:
    forwarder = hosts.listen()
    relaying = hosts.relay(forwarder, hosts.gateway_listener, KEY, is_gateway=False)
    calling, silent = hosts.dial(forwarder), hosts.dial(hosts.gateway_listener)
    assert answered(calling, b"here")
    relaying.close()
    assert is_closed(calling)
    hosts.gateway.close()
    silent.recv(32)
    assert is_closed(silent)


# --- encrypted connections ------------------------------------------------------------------------


class Wire:
    """Between a forwarder and a gateway: records what passes, and changes what it is told to."""

    def __init__(self, hosts: Hosts) -> None:
        self.listener, self._gateway = hosts.listen(), hosts.gateway_listener.getsockname()
        self._hosts, self.seen, self.changes_next = hosts, bytearray(), False
        hosts.spawn(self._accept)
        hosts.closing.callback(self.listener.shutdown, socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self.listener.accept()
                called = socket.create_connection(self._gateway, TIMEOUT_S)
                for ends in ((caller, called), (called, caller)):
                    self._hosts.spawn(self._copy, *ends)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                self.seen += data
                if self.changes_next:
                    data[-1] ^= 1
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


encrypted = pytest.mark.parametrize("hosts", [True], indirect=True)


@encrypted
def test_nothing_of_the_content_is_on_the_wire(hosts: Hosts) -> None:
    wire = Wire(hosts)
    calling = hosts.dial(hosts.forwarder(gateway=wire.listener))
    assert answered(calling, b"weights and gradients")
    assert len(wire.seen) > 500
    assert b"weights" not in wire.seen
    calling.shutdown(socket.SHUT_RDWR)


@encrypted
def test_a_changed_byte_ends_the_connection_and_is_reported(hosts: Hosts) -> None:
    altered: list[str] = []
    hosts.gateway.close()
    gateway = Relay(Encryption(*make_certificate(), altered.append))
    hosts.closing.callback(gateway.close)
    gateway.listen(hosts.gateway_listener, Route(hosts.store.getsockname(), KEY, is_gateway=True))
    wire = Wire(hosts)
    calling = hosts.dial(hosts.forwarder(gateway=wire.listener))
    assert answered(calling, b"as it was sent")
    wire.changes_next = True
    calling.sendall(b"changed")
    assert is_closed(calling)
    assert eventually(lambda: altered == [LOCAL], TIMEOUT_S)


@pytest.mark.parametrize(
    ("error", "is_change"),
    [
        (ssl.SSLError(1, "[SSL: DECRYPTION_FAILED_OR_BAD_RECORD_MAC]"), True),
        (ssl.SSLError(1, "[SSL: INVALID_SESSION_ID]"), True),  # while they agree on keys
        (ssl.SSLError(1, "[SSL: SSLV3_ALERT_ILLEGAL_PARAMETER]"), True),  # the other side saw it
        (ssl.SSLEOFError(8, "[SSL: UNEXPECTED_EOF_WHILE_READING]"), False),
        (ConnectionResetError(), False),
    ],
)
def test_whatever_makes_tls_fail_is_a_change(error: OSError, is_change: bool) -> None:
    assert Encryption.shows_change(error) is is_change


@encrypted
def test_nobody_in_between_can_pass_the_proofs_on(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each side talks TLS to somebody who has a certificate of their own."""
    monkeypatch.setattr(relay, "PROOF_TIMEOUT_S", 1.0)
    certificate, key = make_certificate()
    middle = hosts.listen()
    calling = hosts.dial(hosts.forwarder(gateway=middle))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(certificate + key)
        file.flush()
        context.load_cert_chain(file.name)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    caller = context.wrap_socket(middle.accept()[0], server_side=True)
    called = client.wrap_socket(
        socket.create_connection(hosts.gateway_listener.getsockname(), TIMEOUT_S)
    )
    with caller, called:
        caller.sendall(called.recv(32))  # the nonce
        called.sendall(caller.recv(96))
        assert called.recv(64) == b""
    assert is_closed(calling)
    assert hosts.num_served == 0


@encrypted
def test_a_stranger_without_tls_gets_nothing(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    altered: list[str] = []
    monkeypatch.setattr(hosts.encryption, "on_altered", altered.append)
    stranger = hosts.dial(hosts.gateway_listener)
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    with contextlib.suppress(ConnectionError):
        assert len(stranger.recv(100)) < 10  # an alert
    assert answered(hosts.dial(hosts.forwarder()), b"others get through")
    assert altered == []


@pytest.fixture
def tunnels(hosts: Hosts) -> Tunnels:
    """Of a host whose ranks are at 127.70.3.2."""
    certificate, private_key = make_certificate()
    settings = {"address": LOCAL, "loopback": "127.70.3.2", "key": KEY.hex(),
                "certificate": certificate, "private_key": private_key}  # fmt: skip
    made = Tunnels(settings, "", lambda address: None)
    hosts.closing.callback(made.close)
    return made


def test_the_gateway_of_a_host_leads_to_its_ranks_only(hosts: Hosts, tunnels: Tunnels) -> None:
    loopback, gateway, port, _ = tunnels.description.split()
    rank = hosts.closing.enter_context(socket.create_server((loopback, 0)))
    forwarder, relaying = hosts.listen(), Relay(tunnels.encryption)
    hosts.closing.callback(relaying.close)
    request = f"7f4603017f460302{rank.getsockname()[1]:04x}"
    route = Route((gateway, int(port)), KEY, is_gateway=False, request=request)
    relaying.listen(forwarder, route)
    calling = hosts.dial(forwarder)
    calling.sendall(b"hello")
    rank.settimeout(TIMEOUT_S)
    accepted, (address, _) = rank.accept()
    with accepted:
        assert accepted.recv(5) == b"hello"
        assert address == "127.70.3.1"  # as the other host's ranks are known
        accepted.sendall(b"all of this" * 10000)
    received = bytearray()
    while data := calling.recv(1 << 16):
        received += data
    assert received == b"all of this" * 10000  # also what came before the end
    nobody = "7f4603017f4603020001"
    led_here_by_somebody = request.replace("7f460302", "7f460303")
    for refused in (nobody, led_here_by_somebody):
        route = Route((gateway, int(port)), KEY, is_gateway=False, request=refused)
        with hosts.listen() as asking:
            relaying.listen(asking, route)
            assert is_closed(hosts.dial(asking))


@pytest.mark.parametrize("source", ["127.70.3.1", LOCAL])
def test_other_hosts_do_not_reach_other_programs_from_loopback(
    hosts: Hosts, tunnels: Tunnels, source: str
) -> None:
    """From an address of the job: one on all addresses. From any other address: even ranks."""
    _, gateway, port, _ = tunnels.description.split()
    listening = "" if source != LOCAL else "127.70.3.2"
    program = hosts.closing.enter_context(socket.create_server((listening, 0)))
    request = f"{socket.inet_aton(source).hex()}7f460302{program.getsockname()[1]:04x}"
    relaying, forwarder = Relay(tunnels.encryption), hosts.listen()
    hosts.closing.callback(relaying.close)
    relaying.listen(forwarder, Route((gateway, int(port)), KEY, is_gateway=False, request=request))
    assert is_closed(hosts.dial(forwarder))


@pytest.mark.parametrize("address", ["0.0.0.0", LOCAL, "127.71.3.1", "10.0.0.1", "n1"])
def test_agents_listen_at_addresses_of_ranks_only(tunnels: Tunnels, address: str) -> None:
    """Other hosts say where."""
    with pytest.raises((ValueError, OSError)):
        tunnels.open_way((address, 5000), ("10.0.0.2", 6000))
    with pytest.raises(ValueError, match=r"127\.70\.3\.1"):
        tunnels.open_way(("127.70.3.1", 70000), ("10.0.0.2", 6000))


def test_ranks_listen_elsewhere_if_a_program_of_another_host_has_the_port(
    tunnels: Tunnels,
) -> None:
    """The agent of rank 0 would have to listen where a program of its host does."""
    torch_distributed = pytest.importorskip("torch.distributed")
    loopback, gateway, gateway_port, agent = tunnels.description.split()
    places = [rank_tunnels.Tunnels(loopback, gateway, int(gateway_port), agent),
              rank_tunnels.Tunnels("127.70.3.1", "10.0.0.2", 6000, agent)]  # fmt: skip
    store = torch_distributed.HashStore()

    def meet(ports: Sequence[int], attempt: int) -> list[bool]:
        def one(rank: int) -> bool:
            return rank_tunnels.meet(places[rank], store, rank, 2, ports[rank], attempt)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, (0, 1)))

    with socket.create_server(("", 0)) as program:
        taken = program.getsockname()[1]
        assert meet((taken, taken), 0) == [False, False]
        with pytest.raises(OSError, match=rf"rank 0: port {taken}, .* is in use here"):
            meet((taken, taken), rank_tunnels.MAX_ATTEMPTS - 1)
        with socket.create_server(("127.70.3.1", 0)) as listener:
            free = listener.getsockname()[1]
        assert meet((taken, free), 1) == [True, True]


# --- the store of a node --------------------------------------------------------------------------


def closed_store(gateway: socket.socket) -> dict[str, Any]:
    address, port = gateway.getsockname()
    return {"address": address, "port": port, "key": KEY.hex()}


def test_a_node_leads_its_ranks_to_the_store_of_each_group(hosts: Hosts) -> None:
    node = Store()
    hosts.closing.callback(node.end)
    store = closed_store(
        hosts.gateway_listener
    )  # the gateway has this port here: another one is taken
    line = node.localize({"control": "regroup", "store": store})
    endpoint = line["store"]
    assert endpoint.pop("host") == store["address"]
    assert set(endpoint) == {"address", "port"}
    assert endpoint["port"] != store["port"]
    place = endpoint["address"], endpoint["port"]
    with socket.create_connection(place, TIMEOUT_S) as calling:
        assert answered(calling, b"one")
        assert node.localize({"store": store})["store"]["port"] == endpoint["port"]
        assert answered(calling, b"two")
        newer = node.localize(line | {"store": {**store, "key": "00"}})["store"]
        assert newer != store
        assert is_closed(calling)
    assert node.localize({"control": "end"}) == {"control": "end"}
    plain = {"store": {"address": "10.0.0.1", "port": 5}}
    assert node.localize(plain) == plain


def test_ranks_get_the_place_of_the_store_here_and_never_its_key(
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
    with socket.create_connection((LOCAL, int(place["MASTER_PORT"])), TIMEOUT_S) as calling:
        assert answered(calling, b"here")


def test_processes_that_ranks_start_stay_within_the_host(
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

_TRY = """
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
    """The local gateway in a job on one host, and the socket of the store, which echoes.

    Also on a kernel that lets no user filter packets.
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
                served, caller = inner.accept()
                hosts.store_callers.append(caller)
                hosts.spawn(hosts._echo, served)

    hosts.spawn(serve)
    return local, inner


def test_ranks_reach_the_store_through_the_local_gateway_only(
    hosts: Hosts, guarded: tuple[socket.socket, socket.socket]
) -> None:
    local, inner = guarded
    assert inner.getsockname() == ("127.0.0.2", local.getsockname()[1])
    assert answered(hosts.dial(local), b"one")
    mapped = hosts.closing.enter_context(socket.socket(socket.AF_INET6))  # as torch's clients
    mapped.settimeout(TIMEOUT_S)
    mapped.connect((f"::ffff:{LOCAL}", local.getsockname()[1]))
    assert answered(mapped, b"two")
    assert answered(hosts.dial(local), b"three")


def test_who_takes_the_stores_port_first_does_not_open_the_store(hosts: Hosts) -> None:
    node, local = Store(), hosts.closing.enter_context(probe.listen(LOCAL))
    hosts.closing.callback(node.end)
    port = local.getsockname()[1]
    with probe.listen("127.0.0.2", port):
        inner = hosts.closing.enter_context(node.open_gateway(closed_store(local), local))
    address = inner.getsockname()
    assert address[0] not in (LOCAL, "127.0.0.2")
    assert address[1] == port


def test_who_came_before_the_store_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """No filter could keep a stranger from a port that was held for the store."""
    monkeypatch.setattr(peer_filters, "attach_filter", lambda *_: False)
    node = Store()
    with socket.create_server((LOCAL, 0)) as held:
        with socket.create_connection(held.getsockname(), TIMEOUT_S, ("127.0.0.3", 0)) as early:
            node.restrict(held, "10.77.0.11")
            assert is_closed(early)
        with socket.create_connection(held.getsockname(), TIMEOUT_S), held.accept()[0] as served:
            assert served.getpeername()[0] == LOCAL
        node.end()


@needs_packet_filters
@pytest.mark.parametrize("guarded", ["filter"], indirect=True)
def test_the_store_takes_no_connections_but_the_gateways(
    guarded: tuple[socket.socket, socket.socket],
) -> None:
    """Not even of this user: without a filter, they lead to the gateway."""
    with pytest.raises(TimeoutError):
        socket.create_connection(guarded[1].getsockname(), 0.3)


def test_a_local_gateway_is_closed_to_other_users(
    hosts: Hosts, guarded: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert is_closed(hosts.dial(guarded[0]))
    assert is_closed(hosts.dial(hosts.forwarder()))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_gets_nothing_from_the_store(
    hosts: Hosts, guarded: tuple[socket.socket, socket.socket]
) -> None:
    """Nor from the number of a gateway's port, at another address or after its end."""
    local, inner = guarded

    def is_closed_to_others(target: socket.socket, *source: object) -> bool:
        argv = [sys.executable, "-I", "-c", _TRY, *map(str, (*target.getsockname(), *source))]
        result = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
        return result in ("0", "ConnectionResetError", "BrokenPipeError", "TimeoutError")

    calling = hosts.dial(local)
    assert answered(calling, b"one")
    ((address, port),) = hosts.store_callers
    for source in (), (LOCAL, port):
        assert is_closed_to_others(local, *source)
        assert is_closed_to_others(inner, *source)
    assert answered(calling, b"end")
    assert is_closed(calling)
    assert is_closed_to_others(inner, address, port)
