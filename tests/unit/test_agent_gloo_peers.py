"""Which address gloo listens on."""

from __future__ import annotations

import os
import select
import socket
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from paceline.agent.ranks import gloo_peers, peer_filters
from paceline.agent.surveys import netlink


def entry(address: str, family: int, scope: str = "global", usable: bool = True) -> netlink.Address:
    return {"interface": "eth0", "address": address, "prefix": 64, "family": family,
            "scope": scope, "usable": usable}  # fmt: skip


BOTH = [entry("10.78.0.11", 4), entry("fe80::1", 6, "link"), entry("fd77::9", 6, usable=False),
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
def test_in_a_job_that_talks_ipv6_it_is_not_the_ipv4_address(
    master: str, interface: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(netlink, "addresses", lambda: BOTH)
    monkeypatch.setenv("MASTER_ADDR", master)
    assert gloo_peers.job_address(interface) == expected


def test_looking_for_a_store_that_never_listens_leaves_no_descriptors_behind() -> None:
    def opened() -> int:
        return len([*Path("/proc/self/fd").iterdir()])

    over, rejects = threading.Event(), peer_filters.RejectWatcher(lambda address: None)
    with Path(os.devnull).open(), socket.create_server(("127.0.0.1", 0)) as other:
        before, port = opened(), other.getsockname()[1] ^ 1
        looking = threading.Thread(
            target=gloo_peers._filter_port, args=(port, peer_filters.ALL_HOSTS, rejects, over)
        )
        looking.start()
        over.wait(5 * gloo_peers._POLL_S)
        over.set()
        looking.join()
        assert opened() == before


def test_who_connects_to_a_blocked_device_waits_even_without_packet_filters(
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
def test_another_user_of_the_host_is_no_rank(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    found: list[str] = []
    gloo_filter = gloo_peers.GlooFilter(None, found.append, found.append)
    with socket.create_server(("127.0.0.1", 0)) as listener, select.epoll() as epoll:
        epoll.register(listener, select.EPOLLIN)
        inode = os.fstat(listener.fileno()).st_ino
        device = gloo_peers._Device(epoll.fileno(), listener.fileno(), inode)
        with socket.create_connection(listener.getsockname()) as caller:
            caller.sendall(sent)
            with listener.accept()[0] as accepted:
                epoll.register(accepted, select.EPOLLIN)
                expected = pytest.raises(gloo_peers.StrangerError) if sent else nullcontext()
                with expected:
                    gloo_filter.verify([device], peer_filters.LOOPBACK, 2)
                caller.settimeout(10)
                assert caller.recv(1) == b""
    assert found == (["127.0.0.1"] if sent else [])
