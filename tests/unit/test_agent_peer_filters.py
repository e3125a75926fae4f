"""Tests which hosts can connect to a job's listening sockets, and which rejections are reported."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
import socket
import threading
from collections.abc import Iterator

import pytest
from packet_filters import needs_packet_filters

from background import eventually
from paceline.agent.ranks import peer_filters
from paceline.agent.ranks.peer_filters import HostSet, PeerFilter, parse_hosts

ALLOWED_HOST, FOREIGN_HOST = "127.0.0.2", "127.0.0.3"
MAX_PROGRAM_BYTES = peer_filters.MAX_INSTRUCTIONS * 8  # bytes


def host_set(*networks: str) -> HostSet:
    return HostSet(map(ipaddress.ip_network, networks))


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)
        yield server


def connect(listener: socket.socket, source: str, wait_s: float = 5.0) -> socket.socket:
    return socket.create_connection(listener.getsockname()[:2], wait_s, (source, 0))


def wait_readable(reject_socket: socket.socket) -> None:
    assert select.select([reject_socket], [], [], 5)[0]


def test_parse_hosts_accepts_listed_hosts_and_loopback() -> None:
    hosts = parse_hosts("10.0.0.1, 2001:db8::7,10.9.0.0/16,nonsense")
    assert hosts is not None
    for address in ("10.0.0.1", "2001:db8::7", "10.9.8.7", "::ffff:10.0.0.1", "127.0.0.1", "::1"):
        assert address in hosts
    for address in ("10.0.0.2", "2001:db8::8", "::ffff:10.0.0.2", "fe80::1%eth0"):
        assert address not in hosts
    assert parse_hosts("") is None


def test_own_addresses_are_not_those_that_the_user_has_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(peer_filters.VARIABLE, "+10.9.0.0/16,10.0.0.1")
    hosts = peer_filters.job_hosts()
    assert hosts is not None
    assert "10.9.8.7" in hosts
    assert "10.9.8.7" not in peer_filters.own_addresses()
    assert "10.0.0.1" in peer_filters.own_addresses()
    monkeypatch.setenv(peer_filters.VARIABLE, "+10.9.0.0/16")
    assert "10.9.8.7" not in peer_filters.own_addresses()


@needs_packet_filters
def test_admits_peers_and_reports_stranger_once(listener: socket.socket) -> None:
    peer_filter = PeerFilter(listener, host_set(ALLOWED_HOST))
    assert peer_filter.is_attached
    assert peer_filter.reject_socket is not None
    with connect(listener, ALLOWED_HOST), listener.accept()[0] as accepted:
        assert accepted.getpeername()[0] == ALLOWED_HOST
    with connect(listener, FOREIGN_HOST) as client:
        wait_readable(peer_filter.reject_socket)
        assert peer_filter.accept_rejected() == FOREIGN_HOST
        with contextlib.suppress(ConnectionError):
            assert client.recv(1) == b""
    with pytest.raises(TimeoutError):  # the kernel drops further packets
        connect(listener, FOREIGN_HOST, 0.3)
    assert peer_filter.accept_rejected() == ""
    with connect(listener, ALLOWED_HOST), listener.accept()[0]:
        pass
    peer_filter.close()
    with pytest.raises(TimeoutError):
        connect(listener, FOREIGN_HOST, 0.3)


@needs_packet_filters
def test_admit_extends_filter_and_block_drops_all(listener: socket.socket) -> None:
    peer_filter = PeerFilter(listener, host_set(ALLOWED_HOST))
    peer_filter.admit(listener, host_set(ALLOWED_HOST, FOREIGN_HOST))
    with connect(listener, FOREIGN_HOST), listener.accept()[0] as accepted:
        peer_filter.block(listener)
        with pytest.raises(TimeoutError):  # dropped, not refused: ranks may connect too early
            connect(listener, ALLOWED_HOST, 0.3)
        accepted.sendall(b"x")  # accepted connections continue
        peer_filter.admit(listener, host_set(ALLOWED_HOST))
        with connect(listener, ALLOWED_HOST), listener.accept()[0]:
            pass
    peer_filter.close()


@pytest.mark.parametrize("has_filters", [True, False])
def test_filter_before_listen_rejects_strangers(
    has_filters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_filters:
        monkeypatch.setattr(peer_filters, "attach_filter", lambda *_: False)
    with socket.socket() as listener:
        listener.settimeout(5)
        listener.bind(("127.0.0.1", 0))
        peer_filter = PeerFilter(listener, host_set(ALLOWED_HOST))
        assert peer_filter.reject_socket is not None
        with connect(
            peer_filter.reject_socket, FOREIGN_HOST
        ):  # at first, only the reject socket listens
            wait_readable(peer_filter.reject_socket)
            assert peer_filter.accept_rejected() == FOREIGN_HOST
        listener.listen()
        with connect(listener, ALLOWED_HOST), listener.accept()[0] as accepted:
            assert accepted.getpeername()[0] == ALLOWED_HOST
        peer_filter.admit(listener, host_set(FOREIGN_HOST))
        with connect(peer_filter.reject_socket, ALLOWED_HOST):
            wait_readable(peer_filter.reject_socket)
        peer_filter.close()


def test_renew_resets_pending_connections(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_filters, "attach_filter", lambda *_: False)
    with connect(listener, FOREIGN_HOST) as early:
        peer_filter = PeerFilter(listener, host_set(ALLOWED_HOST))
        previous_inode = os.fstat(listener.fileno()).st_ino
        peer_filter.renew(listener)
        early.settimeout(5)
        with pytest.raises(ConnectionResetError):
            early.recv(1)
    assert os.fstat(listener.fileno()).st_ino != previous_inode
    assert peer_filter.reject_socket is not None
    with connect(listener, FOREIGN_HOST):
        wait_readable(peer_filter.reject_socket)
        assert peer_filter.accept_rejected() == FOREIGN_HOST
    with connect(listener, ALLOWED_HOST), listener.accept()[0] as accepted:
        assert accepted.getpeername()[0] == ALLOWED_HOST
    peer_filter.close()


@pytest.mark.parametrize("address", ["::1", "::"])
def test_ipv6_socket_filters_ipv6_and_ipv4_networks(address: str) -> None:
    with socket.create_server((address, 0), family=socket.AF_INET6) as listener:
        listener.settimeout(5)
        peer_filter = PeerFilter(listener, host_set(ALLOWED_HOST, "::1/128", "2001:db8::/32"))
        assert peer_filter.reject_socket is not None
        port = listener.getsockname()[1]
        with socket.create_connection(("::1", port), 5), listener.accept()[0]:
            pass
        peer_filter.admit(listener, host_set("2001:db8::1"))
        with socket.create_connection(("::1", port), 5):
            wait_readable(peer_filter.reject_socket)
            assert peer_filter.accept_rejected() == "::1"
        peer_filter.close()


def test_dual_stack_socket_filters_ipv4_callers() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        listener.settimeout(5)
        peer_filter = PeerFilter(listener, host_set(ALLOWED_HOST))
        assert peer_filter.reject_socket is not None
        server_address = ("127.0.0.1", listener.getsockname()[1])
        with socket.create_connection(server_address, 5, (ALLOWED_HOST, 0)), listener.accept()[0]:
            pass
        with socket.create_connection(server_address, 5, (FOREIGN_HOST, 0)):
            wait_readable(peer_filter.reject_socket)
            assert peer_filter.accept_rejected() == FOREIGN_HOST
        peer_filter.close()


def test_filtered_port_cannot_be_bound_twice(listener: socket.socket) -> None:
    peer_filter = PeerFilter(listener, host_set(ALLOWED_HOST))
    with socket.socket() as second_socket:
        second_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            second_socket.bind(listener.getsockname())
    peer_filter.close()


def test_filter_program_of_thousands_of_hosts_is_limited() -> None:
    ipv4_hosts = [str(ipaddress.ip_address("10.0.0.0") + 7 * number) for number in range(3000)]
    ipv6_hosts = [str(ipaddress.ip_address("2001:db8::") + (number << 70)) for number in range(500)]
    hosts = host_set(*ipv4_hosts, *ipv6_hosts)
    assert len(hosts.program(1, 0)) <= MAX_PROGRAM_BYTES
    assert ipv4_hosts[-1] in hosts
    assert "10.0.0.1" not in hosts


def test_falls_back_to_reject_socket_without_socket_filter(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach = peer_filters._attach

    def deny_socket_filter(listener: socket.socket, option: int, program: bytes) -> None:
        if option == peer_filters.SO_ATTACH_FILTER:
            raise PermissionError
        attach(listener, option, program)

    monkeypatch.setattr(peer_filters, "_attach", deny_socket_filter)
    peer_filter = PeerFilter(listener, host_set(ALLOWED_HOST))
    assert peer_filter.is_attached
    assert peer_filter.reject_socket is not None
    for reported in FOREIGN_HOST, "":
        with connect(listener, FOREIGN_HOST):
            wait_readable(peer_filter.reject_socket)
            assert peer_filter.accept_rejected() == reported
    peer_filter.block(listener)  # a rank that comes early is not rejected either
    with connect(listener, ALLOWED_HOST), listener.accept()[0]:
        pass
    peer_filter.admit(listener, host_set(FOREIGN_HOST))
    with connect(listener, FOREIGN_HOST), listener.accept()[0]:
        pass
    peer_filter.close()


def test_admits_everyone_if_no_filter_can_be_attached(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(peer_filters, "_attach", deny)
    peer_filter = PeerFilter(listener, host_set(ALLOWED_HOST))
    assert not peer_filter.is_attached
    assert peer_filter.reject_socket is None
    with connect(listener, FOREIGN_HOST), listener.accept()[0]:
        pass


def test_watcher_reports_address_once_per_period(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reports: list[str] = []
    watcher = peer_filters.RejectWatcher(reports.append)

    def flood() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            peer_filter = PeerFilter(listener, host_set(ALLOWED_HOST))
            watcher.watch(peer_filter, listener.fileno())
            with socket.socket() as client:
                client.setblocking(False)
                client.bind((FOREIGN_HOST, 0))
                client.connect_ex(listener.getsockname())
                assert eventually(lambda: bool(peer_filter._rejected))

    flood()
    flood()
    assert eventually(lambda: reports == [FOREIGN_HOST])
    monkeypatch.setattr(peer_filters, "REPORT_PERIOD_S", 0.0)
    flood()
    assert eventually(lambda: reports == [FOREIGN_HOST] * 2)
    watcher.end()


def test_watcher_reports_flood_once(listener: socket.socket) -> None:
    reports: list[str] = []
    has_report = threading.Event()

    def report(address: str) -> None:
        reports.append(address)
        has_report.set()

    peer_filter, watcher = (
        PeerFilter(listener, host_set(ALLOWED_HOST)),
        peer_filters.RejectWatcher(report),
    )
    watcher.watch(peer_filter, listener.fileno())
    client = [socket.socket() for _ in range(50)]
    for peer in client:
        peer.setblocking(False)
        peer.bind((FOREIGN_HOST, 0))
        peer.connect_ex(listener.getsockname())
    assert has_report.wait(30)
    with connect(listener, ALLOWED_HOST), listener.accept()[0]:  # ranks are still accepted
        pass
    for peer in client:
        peer.close()
    assert reports == [FOREIGN_HOST]
    listener.close()
    with socket.create_server(("127.0.0.1", 0)) as second_socket:
        watcher.watch(PeerFilter(second_socket, host_set(ALLOWED_HOST)), second_socket.fileno())
        assert peer_filter.reject_socket is None  # closed together with its listener
        watcher.end()
