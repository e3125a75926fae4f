"""Who is let in at a job's listening sockets, and who is named."""

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

OURS, OTHER = "127.0.0.2", "127.0.0.3"
MOST = peer_filters.MAX_INSTRUCTIONS * 8  # bytes


def of(*networks: str) -> HostSet:
    return HostSet(map(ipaddress.ip_network, networks))


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(5)
        yield made


def call(listener: socket.socket, source: str, wait_s: float = 5.0) -> socket.socket:
    return socket.create_connection(listener.getsockname()[:2], wait_s, (source, 0))


def wait_at(reject_socket: socket.socket) -> None:
    assert select.select([reject_socket], [], [], 5)[0]


def test_hosts_are_those_of_the_list_and_this_one() -> None:
    hosts = parse_hosts("10.0.0.1, 2001:db8::7,10.9.0.0/16,nonsense")
    assert hosts is not None
    for address in ("10.0.0.1", "2001:db8::7", "10.9.8.7", "::ffff:10.0.0.1", "127.0.0.1", "::1"):
        assert address in hosts
    for address in ("10.0.0.2", "2001:db8::8", "::ffff:10.0.0.2", "fe80::1%eth0"):
        assert address not in hosts
    assert parse_hosts("") is None


@needs_packet_filters
def test_ours_come_in_and_a_stranger_is_named_once(listener: socket.socket) -> None:
    peer_filter = PeerFilter(listener, of(OURS))
    assert peer_filter.is_attached
    assert peer_filter.reject_socket is not None
    with call(listener, OURS), listener.accept()[0] as taken:
        assert taken.getpeername()[0] == OURS
    with call(listener, OTHER) as calling:
        wait_at(peer_filter.reject_socket)
        assert peer_filter.accept_rejected() == OTHER
        with contextlib.suppress(ConnectionError):
            assert calling.recv(1) == b""
    with pytest.raises(TimeoutError):  # the kernel drops what else it sends
        call(listener, OTHER, 0.3)
    assert peer_filter.accept_rejected() == ""
    with call(listener, OURS), listener.accept()[0]:
        pass
    peer_filter.close()
    with pytest.raises(TimeoutError):
        call(listener, OTHER, 0.3)


@needs_packet_filters
def test_others_are_admitted_and_in_the_end_nobody(listener: socket.socket) -> None:
    peer_filter = PeerFilter(listener, of(OURS))
    peer_filter.admit(listener, of(OURS, OTHER))
    with call(listener, OTHER), listener.accept()[0] as taken:
        peer_filter.block(listener)
        with pytest.raises(TimeoutError):  # and not refused: who splits a group may come early
            call(listener, OURS, 0.3)
        taken.sendall(b"x")  # what was accepted goes on
        peer_filter.admit(listener, of(OURS))
        with call(listener, OURS), listener.accept()[0]:
            pass
    peer_filter.close()


@pytest.mark.parametrize("has_filters", [True, False])
def test_a_socket_that_begins_to_listen_later_never_takes_a_stranger(
    has_filters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_filters:
        monkeypatch.setattr(peer_filters, "attach_filter", lambda *_: False)
    with socket.socket() as listener:
        listener.settimeout(5)
        listener.bind(("127.0.0.1", 0))
        peer_filter = PeerFilter(listener, of(OURS))
        assert peer_filter.reject_socket is not None
        with call(peer_filter.reject_socket, OTHER):  # at first, only this one listens
            wait_at(peer_filter.reject_socket)
            assert peer_filter.accept_rejected() == OTHER
        listener.listen()
        with call(listener, OURS), listener.accept()[0] as taken:
            assert taken.getpeername()[0] == OURS
        peer_filter.admit(listener, of(OTHER))
        with call(peer_filter.reject_socket, OURS):
            wait_at(peer_filter.reject_socket)
        peer_filter.close()


def test_who_called_before_is_gone_with_the_former_socket(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_filters, "attach_filter", lambda *_: False)
    with call(listener, OTHER) as early:
        peer_filter = PeerFilter(listener, of(OURS))
        former = os.fstat(listener.fileno()).st_ino
        peer_filter.renew(listener)
        early.settimeout(5)
        with pytest.raises(ConnectionResetError):
            early.recv(1)
    assert os.fstat(listener.fileno()).st_ino != former
    assert peer_filter.reject_socket is not None
    with call(listener, OTHER):
        wait_at(peer_filter.reject_socket)
        assert peer_filter.accept_rejected() == OTHER
    with call(listener, OURS), listener.accept()[0] as taken:
        assert taken.getpeername()[0] == OURS
    peer_filter.close()


@pytest.mark.parametrize("address", ["::1", "::"])
def test_both_families_go_by_one_filter(address: str) -> None:
    with socket.create_server((address, 0), family=socket.AF_INET6) as listener:
        listener.settimeout(5)
        peer_filter = PeerFilter(listener, of(OURS, "::1/128", "2001:db8::/32"))
        assert peer_filter.reject_socket is not None
        port = listener.getsockname()[1]
        with socket.create_connection(("::1", port), 5), listener.accept()[0]:
            pass
        peer_filter.admit(listener, of("2001:db8::1"))
        with socket.create_connection(("::1", port), 5):
            wait_at(peer_filter.reject_socket)
            assert peer_filter.accept_rejected() == "::1"
        peer_filter.close()


def test_ipv4_callers_of_an_ipv6_socket_are_known_by_their_own_address() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        listener.settimeout(5)
        peer_filter = PeerFilter(listener, of(OURS))
        assert peer_filter.reject_socket is not None
        there = ("127.0.0.1", listener.getsockname()[1])
        with socket.create_connection(there, 5, (OURS, 0)), listener.accept()[0]:
            pass
        with socket.create_connection(there, 5, (OTHER, 0)):
            wait_at(peer_filter.reject_socket)
            assert peer_filter.accept_rejected() == OTHER
        peer_filter.close()


def test_no_other_socket_gets_the_port_of_a_guarded_one(listener: socket.socket) -> None:
    peer_filter = PeerFilter(listener, of(OURS))
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(listener.getsockname())
    peer_filter.close()


def test_a_filter_of_very_many_hosts_stays_small_and_lets_all_of_them_in() -> None:
    four = [str(ipaddress.ip_address("10.0.0.0") + 7 * number) for number in range(3000)]
    six = [str(ipaddress.ip_address("2001:db8::") + (number << 70)) for number in range(500)]
    hosts = of(*four, *six)
    assert len(hosts.program(1, 0)) <= MOST
    assert four[-1] in hosts
    assert "10.0.0.1" not in hosts


def test_a_second_socket_is_enough_where_only_root_may_filter_packets(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach = peer_filters._attach

    def refuse_filters(listener: socket.socket, option: int, program: bytes) -> None:
        if option == peer_filters.SO_ATTACH_FILTER:
            raise PermissionError
        attach(listener, option, program)

    monkeypatch.setattr(peer_filters, "_attach", refuse_filters)
    peer_filter = PeerFilter(listener, of(OURS))
    assert peer_filter.is_attached
    assert peer_filter.reject_socket is not None
    for reported in OTHER, "":
        with call(listener, OTHER):
            wait_at(peer_filter.reject_socket)
            assert peer_filter.accept_rejected() == reported
    peer_filter.block(listener)  # then, too, a rank that comes early is not rejected
    with call(listener, OURS), listener.accept()[0]:
        pass
    peer_filter.admit(listener, of(OTHER))
    with call(listener, OTHER), listener.accept()[0]:
        pass
    peer_filter.close()


def test_a_sandbox_that_takes_no_filter_is_no_obstacle(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(peer_filters, "_attach", refuse)
    peer_filter = PeerFilter(listener, of(OURS))
    assert not peer_filter.is_attached
    assert peer_filter.reject_socket is None
    with call(listener, OTHER), listener.accept()[0]:
        pass


def test_a_watcher_tells_of_an_address_once_for_all_sockets_of_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    watcher = peer_filters.RejectWatcher(told.append)

    def flood() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            peer_filter = PeerFilter(listener, of(OURS))
            watcher.watch(peer_filter, listener.fileno())
            with socket.socket() as calling:
                calling.setblocking(False)
                calling.bind((OTHER, 0))
                calling.connect_ex(listener.getsockname())
                assert eventually(lambda: bool(peer_filter._rejected))

    flood()
    flood()
    assert eventually(lambda: told == [OTHER])
    monkeypatch.setattr(peer_filters, "REPORT_PERIOD_S", 0.0)
    flood()
    assert eventually(lambda: told == [OTHER] * 2)
    watcher.end()


def test_a_watcher_tells_of_a_flood_once(listener: socket.socket) -> None:
    told: list[str] = []
    came = threading.Event()

    def tell(address: str) -> None:
        told.append(address)
        came.set()

    peer_filter, watcher = PeerFilter(listener, of(OURS)), peer_filters.RejectWatcher(tell)
    watcher.watch(peer_filter, listener.fileno())
    calling = [socket.socket() for _ in range(50)]
    for one in calling:
        one.setblocking(False)
        one.bind((OTHER, 0))
        one.connect_ex(listener.getsockname())
    assert came.wait(30)
    with call(listener, OURS), listener.accept()[0]:  # and ours still come in
        pass
    for one in calling:
        one.close()
    assert told == [OTHER]
    listener.close()
    with socket.create_server(("127.0.0.1", 0)) as other:
        watcher.watch(PeerFilter(other, of(OURS)), other.fileno())
        assert peer_filter.reject_socket is None  # that of a socket which is closed is closed, too
        watcher.end()
