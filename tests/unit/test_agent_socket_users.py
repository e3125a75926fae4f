"""Tests the lookup of the user who owns the other end of a connection within this host."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.agent.supervision import socket_users


@pytest.fixture(params=["netlink", "/proc/net/tcp", "/proc/net/tcp without inet_diag"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Simulates kernels that offer different sources of information about sockets."""

    def fail(*_: Any) -> None:
        raise OSError(errno.EPROTONOSUPPORT, "not supported")

    if request.param != "netlink":
        lacks_diag = request.param.endswith("diag")
        monkeypatch.setattr(socket_users, "_query", (lambda *_: None) if lacks_diag else fail)
    socket_users._answers.cache_clear()
    yield request.param
    socket_users._answers.cache_clear()


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("caller", ["127.0.0.1", "::ffff:127.0.0.1", "::1"])
def test_peer_user_identifies_connection_owner(caller: str) -> None:
    family = socket.AF_INET6 if ":" in caller else socket.AF_INET
    listen_address = "::1" if caller == "::1" else "127.0.0.1"
    listening_family = socket.AF_INET6 if listen_address == "::1" else socket.AF_INET
    with (
        socket.create_server((listen_address, 0), family=listening_family) as listener,
        socket.socket(family) as client_socket,
    ):
        client_socket.connect((caller, listener.getsockname()[1]))
        accepted, _ = listener.accept()
        with accepted:
            assert socket_users.peer_user(accepted) == os.getuid()
            client_socket.close()
            assert socket_users.peer_user(accepted) == socket_users.NO_USER


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("everywhere", ["", "::"])
def test_listener_on_all_addresses_is_not_the_other_end(everywhere: str) -> None:
    """The kernel takes it for the end of a connection with another host, on the same port."""
    family, host = (socket.AF_INET6, "fd00::") if everywhere else (socket.AF_INET, "10.0.0.")
    with socket.create_server((everywhere, 0), family=family) as listener:
        ends: Any = SimpleNamespace(
            getsockname=lambda: (f"{host}1", 50000),
            getpeername=lambda: (f"{host}2", listener.getsockname()[1]),
        )
        assert socket_users.peer_user(ends) == socket_users.NO_USER


@pytest.mark.usefixtures("source")
def test_listens_matches_exact_address_and_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = "127.70.4.1"
    with socket.create_server((address, 0)) as rank, socket.create_server(("", 0)) as wildcard:
        assert socket_users.listens(rank.getsockname())
        assert not socket_users.listens((address, wildcard.getsockname()[1]))
        assert not socket_users.listens(("127.70.4.2", rank.getsockname()[1]))
        another_user = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: another_user)
        assert not socket_users.listens(rank.getsockname())


def test_unknown_socket_owner_is_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket_users, "_query", lambda *_: None)
    monkeypatch.setattr(socket_users, "_tcp_table", lambda: "")
    for cached in (socket_users._answers, socket_users._knows_users):
        cached.cache_clear()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            with accepted:
                assert socket_users.peer_user(accepted) == socket_users.UNKNOWN_USER
        assert socket_users.listens(listener.getsockname())
    for cached in (socket_users._answers, socket_users._knows_users):
        cached.cache_clear()


def test_owner_lookup_raises_without_file_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading netlink and the table fails, although the check for the table succeeds."""

    def raise_emfile(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
        monkeypatch.context() as patch,
    ):
        patch.setattr(socket_users, "_ask", raise_emfile)
        patch.setattr(Path, "read_text", raise_emfile)
        socket_users._knows_users.cache_clear()
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
            socket_users.peer_user(accepted)
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
            socket_users.listens(listener.getsockname())
    assert socket_users._knows_users()
