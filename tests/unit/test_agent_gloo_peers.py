"""Tests on which addresses gloo and torch's stores listen, and whose connections they accept."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.agent.ranks import gloo_peers, peer_filters
from paceline.agent.surveys import netlink


def entry(address: str, family: int, scope: str = "global", usable: bool = True) -> netlink.Address:
    return {"interface": "eth0", "address": address, "prefix": 64, "family": family,
            "scope": scope, "usable": usable}  # fmt: skip


ADDRESSES = [entry("10.78.0.11", 4), entry("fe80::1", 6, "link"), entry("fd77::9", 6, usable=False),
        entry("fd77::11", 6)]  # fmt: skip


@pytest.mark.parametrize(
    ("master", "interface", "expected"),
    [
        ("fd77::12", "eth0", "fd77::11"),
        ("fd77::12", "eth1", ""),
        ("10.78.0.12", "eth0", ""),
        ("n1", "eth0", ""),
    ],
)
def test_job_address_is_ipv6_if_master_is(
    master: str, interface: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(netlink, "addresses", lambda: ADDRESSES)
    monkeypatch.setenv("MASTER_ADDR", master)
    assert gloo_peers.job_address(interface) == expected


def test_blocked_device_delays_connections_without_filter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_filters, "attach_filter", lambda listener, hosts: False)
    with socket.create_server(("127.0.0.1", 0)) as listener, select.epoll() as epoll:
        epoll.register(listener, select.EPOLLIN)
        inode = os.fstat(listener.fileno()).st_ino
        device = gloo_peers._Device(epoll.fileno(), listener.fileno(), inode)
        device.peer_filter = peer_filters.PeerFilter(listener, peer_filters.LOOPBACK)
        registered = gloo_peers._registrations(epoll.fileno())
        device.block()
        with socket.create_connection(listener.getsockname()):
            assert epoll.poll(0.1) == []
            assert gloo_peers._registrations(epoll.fileno()) == registered
            device.admit(peer_filters.LOOPBACK)
            assert epoll.poll(10) == [(listener.fileno(), select.EPOLLIN)]
        device.peer_filter.close()


@pytest.mark.parametrize("sent", [b"", b"rank 1"])
def test_rejects_other_user_of_host(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    reported: list[str] = []
    gloo_filter = gloo_peers.GlooFilter(None, reported.append, reported.append)
    with socket.create_server(("127.0.0.1", 0)) as listener, select.epoll() as epoll:
        epoll.register(listener, select.EPOLLIN)
        inode = os.fstat(listener.fileno()).st_ino
        device = gloo_peers._Device(epoll.fileno(), listener.fileno(), inode)
        with socket.create_connection(listener.getsockname()) as caller:
            caller.sendall(sent)
            with listener.accept()[0] as accepted:
                epoll.register(accepted, select.EPOLLIN)
                expected = (
                    pytest.raises(gloo_peers.StrangerError) if sent else contextlib.nullcontext()
                )
                with expected:
                    gloo_filter.verify([device], peer_filters.LOOPBACK, 2)
                caller.settimeout(10)
                assert caller.recv(1) == b""
    assert reported == (["127.0.0.1"] if sent else [])


class FakeGloo:
    """Listens like gloo's devices; the first devices get a connection at once."""

    def __init__(self, num_called: int) -> None:
        self._num_called = num_called
        self.ports: list[int] = []
        self.closing = contextlib.ExitStack()

    def _Options(self) -> Any:
        return SimpleNamespace(_devices=[])

    def create_device(self, hostname: str) -> int:
        listener = self.closing.enter_context(socket.create_server((hostname, 0)))
        epoll = self.closing.enter_context(select.epoll())
        epoll.register(listener, select.EPOLLIN)
        self.ports.append(listener.getsockname()[1])
        if len(self.ports) <= self._num_called:
            self.closing.enter_context(socket.create_connection(listener.getsockname()))
        return self.ports[-1]


@pytest.mark.parametrize(("num_called", "num_made"), [(0, 1), (2, 3), (999, 100)])
def test_device_contacted_before_filtering_is_not_used(num_called: int, num_made: int) -> None:
    gloo = FakeGloo(num_called)
    gloo_filter = gloo_peers.GlooFilter(gloo, lambda address: None, lambda address: None)
    with gloo.closing:
        options, (device,) = gloo_filter.make_options(
            timedelta(1), peer_filters.LOOPBACK, "127.0.0.1"
        )
        assert len(gloo.ports) == num_made
        assert options._devices == [device.port] == [gloo.ports[-1]]
        gloo_filter.rejects.end()


def test_store_listens_on_filtered_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_ADDRESSES", "10.0.0.1")
    monkeypatch.setattr(peer_filters, "LOOPBACK", peer_filters.NO_HOSTS)
    peer_filters.parse_hosts.cache_clear()
    rejects = peer_filters.RejectWatcher(lambda address: None)
    store_calls: list[dict[str, Any]] = []
    guarded = gloo_peers._guard_stores(lambda _, **kwargs: store_calls.append(kwargs), rejects)
    make_store = functools.partial(guarded, None)
    with socket.create_server(("127.0.0.1", 0)) as occupant:
        port = occupant.getsockname()[1]
        server_options = {"host_name": "n1", "port": port, "is_master": True}
        client_options = {"host_name": "n1", "port": port, "is_master": False}
        make_store(**server_options)
        make_store(**client_options)
    assert store_calls == [server_options, client_options]
    make_store("n1", port, None, True)
    with socket.socket(fileno=store_calls[-1]["master_listen_fd"]) as listener:
        listener.settimeout(0.1)
        with contextlib.ExitStack() as closing:
            with contextlib.suppress(TimeoutError, ConnectionResetError):  # dropped or rejected
                closing.enter_context(socket.create_connection(("127.0.0.1", port), 0.1))
            with pytest.raises(TimeoutError):
                listener.accept()
    make_store(**server_options)  # a later store on the same port
    with socket.socket(fileno=store_calls[-1]["master_listen_fd"]):
        pass
    make_store("n1", 0, None, True)
    with socket.socket(fileno=store_calls[-1]["master_listen_fd"]) as listener:
        assert listener.getsockname()[1] == store_calls[-1]["port"] > 0
        rejects.end()
    peer_filters.parse_hosts.cache_clear()
