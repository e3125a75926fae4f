"""Whose sockets are at the other ends of connections within this host."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.agent.supervision import socket_users


@pytest.fixture(params=["netlink", "/proc/net/tcp", "/proc/net/tcp without inet_diag"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What the kernel offers."""

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
def test_the_user_at_the_other_end_of_a_connection(caller: str) -> None:
    family = socket.AF_INET6 if ":" in caller else socket.AF_INET
    own = "::1" if caller == "::1" else "127.0.0.1"
    listening_family = socket.AF_INET6 if own == "::1" else socket.AF_INET
    with (
        socket.create_server((own, 0), family=listening_family) as listener,
        socket.socket(family) as calling,
    ):
        calling.connect((caller, listener.getsockname()[1]))
        accepted, _ = listener.accept()
        with accepted:
            assert socket_users.peer_user(accepted) == os.getuid()
            calling.close()
            assert socket_users.peer_user(accepted) == socket_users.NO_USER


@pytest.mark.usefixtures("source")
def test_who_listens_on_all_addresses_does_not_listen_at_one_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = "127.70.4.1"
    with socket.create_server((address, 0)) as rank, socket.create_server(("", 0)) as other:
        assert socket_users.listens(rank.getsockname())
        assert not socket_users.listens((address, other.getsockname()[1]))
        assert not socket_users.listens(("127.70.4.2", rank.getsockname()[1]))
        another_user = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: another_user)
        assert not socket_users.listens(rank.getsockname())


def test_a_kernel_that_says_nothing_does_not_keep_ranks_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket_users, "_query", lambda *_: None)
    monkeypatch.setattr(socket_users, "_tcp_table", lambda: "")
    for known in (socket_users._answers, socket_users._knows_users):
        known.cache_clear()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            with accepted:
                assert socket_users.peer_user(accepted) == socket_users.UNKNOWN_USER
        assert socket_users.listens(listener.getsockname())
    for known in (socket_users._answers, socket_users._knows_users):
        known.cache_clear()


def test_without_descriptors_nobody_is_taken_for_the_own_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Netlink and the table fail, and the test that asks whether there is a table does not."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
        monkeypatch.context() as patch,
    ):
        patch.setattr(socket_users, "_ask", refuse)
        patch.setattr(Path, "read_text", refuse)
        socket_users._knows_users.cache_clear()
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
            socket_users.peer_user(accepted)
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
            socket_users.listens(listener.getsockname())
    assert socket_users._knows_users()
