"""Tests the token of a rendezvous of commands typed on each node: its sources, its secrecy."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.rendezvous import endpoint as endpoints
from paceline.rendezvous import manual
from paceline.rendezvous.endpoint import Endpoint
from paceline.rendezvous.listener import Connection
from paceline.rendezvous.peers import MAX_WAITING_PER_PLACE, CommandAdmission, Peers
from paceline.spec.errors import ConnectError, SettingError

KEY = "00112233445566778899aabbccddeeff"


def endpoint(file: Path | None = None, place: int = 0, name: str | None = None) -> Endpoint:
    return endpoints.endpoint("10.0.0.1:2", name, file, place, 2, 1.0)


def test_key_does_not_depend_on_name() -> None:
    """Two rendezvous with the same name have different keys."""
    first_endpoint, second_endpoint = endpoint(name="456"), endpoint(name="456")
    assert first_endpoint.key != second_endpoint.key
    assert "456" not in first_endpoint.token
    assert endpoints.derive_key(first_endpoint.token) == first_endpoint.key
    assert re.fullmatch(r"([0-9a-f]{4}-){7}[0-9a-f]{4}", first_endpoint.token)


def test_repr_hides_key() -> None:
    created = endpoint()
    assert created.token not in repr(created)
    assert created.key.hex() not in repr(created)


def test_removes_key_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_RDZV_KEY", KEY)
    created = endpoint(place=1)
    assert created.key == endpoints.derive_key(KEY)
    assert created.token == ""
    assert "PACELINE_RDZV_KEY" not in os.environ


def test_reads_key_from_private_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(endpoints.format_token(KEY).upper() + "\n")
    file.chmod(0o600)
    assert endpoint(file).key == endpoint(file, place=1).key == endpoints.derive_key(KEY)
    file.chmod(0o640)
    with pytest.raises(SettingError, match="can be read by others"):
        endpoint(file)
    with pytest.raises(SettingError, match="cannot be read"):
        endpoint(tmp_path / "none")


@pytest.mark.parametrize(
    "text", ["456", "", KEY[:-1], "g" * 32, "0" * 257, "replace this by a key"]
)
def test_rejects_weak_key(text: str) -> None:
    with pytest.raises(SettingError, match="not a key for a rendezvous"):
        endpoints.derive_key(text)


def test_joining_node_requires_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(SettingError) as caught:
        endpoint(place=1)
    assert "PACELINE_RDZV_KEY" in caught.value.remedy
    assert caught.value.exit_code == 2


def test_prompts_for_key_at_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("getpass.getpass", lambda prompt: KEY)
    assert endpoint(place=1).key == endpoints.derive_key(KEY)


class Writer:
    """A writer that is its own transport."""

    def __init__(self) -> None:
        self.said = b""
        self.is_open = True
        self.transport = self

    def write(self, data: bytes) -> None:
        self.said += data

    def abort(self) -> None:
        self.is_open = False

    def is_closing(self) -> bool:
        return not self.is_open

    close = abort


def connect(peers: Peers, address: str = "10.0.0.2", **overrides: Any) -> Writer:
    writer = Writer()
    base = {"stream": "frames", "nodes": 2, "command": "c", "rendezvous": "a", "name": "n2"}
    peers.admit(Connection({**base, **overrides}, None, writer, address))  # type: ignore[arg-type]
    return writer


def admission_reply(peers: Peers, **overrides: Any) -> str:
    return connect(peers, **overrides).said.decode()


def test_admission_checks() -> None:
    peers = Peers(CommandAdmission(2, "a", "c"))
    assert "is called 'a'" in admission_reply(peers, rendezvous="b")
    assert "waits for 2 nodes" in admission_reply(peers, nodes=None)
    assert "another script" in admission_reply(peers, command="d")
    assert "--encrypt was given to this node" in admission_reply(peers, encrypt=True)
    assert '"ok"' in admission_reply(peers)


def test_nodes_must_agree_on_encryption() -> None:
    """Otherwise the job would run without encryption although one node asks for it."""
    peers = Peers(CommandAdmission(2, "a", "c", encrypts=True))
    assert "--encrypt was given to the first node" in admission_reply(peers)
    assert "--encrypt was given to the first node" in admission_reply(peers, encrypt="yes")
    assert '"ok"' in admission_reply(peers, encrypt=True)
    error = manual.rendezvous_error(endpoint(place=0), "--encrypt was given to this node")
    assert "on each node" in error.remedy


@pytest.mark.parametrize("name", ["../../x", "/etc", "", "a\nb", None, 7, "x" * 200, "\x1b[2J"])
def test_node_name_cannot_be_path(name: object) -> None:
    peers = Peers(CommandAdmission(2, "a", "c"))
    assert '"ok"' in admission_reply(peers, name=name)
    assert peers.by_place[1].host.name in ("node1", "7")


@pytest.mark.parametrize("place", [[1], {}, "1", 9, -1, 1.5])
def test_rejects_invalid_place(place: object) -> None:
    peers = Peers(CommandAdmission(2, "a", "c"))
    admission_reply(peers)
    assert '"error"' in admission_reply(peers, place=place)


def test_limits_connections_that_wait_for_exit_status() -> None:
    """A host that opens more of them loses its own, not those of other hosts."""
    peers = Peers(CommandAdmission(3, "a", "c"))
    status = {"stream": "status", "nodes": 3}
    honest = connect(peers, "10.0.0.3", **status)
    flood = [connect(peers, "10.0.0.2", **status) for _ in range(50)]
    limit = MAX_WAITING_PER_PLACE * 2
    assert [writer.is_open for writer in flood] == [False] * (51 - limit) + [True] * (limit - 1)
    peers.dismiss(0)
    assert b"exit_code" in honest.said


def test_limits_connections_of_reconnecting_node() -> None:
    """Those that a newer one replaces are closed."""

    async def scenario() -> None:
        peers = Peers(CommandAdmission(2, "a", "c"))
        session = {"session": "s"}
        first = [connect(peers, stream=stream, **session) for stream in ("frames", "errors")]
        peers.channel(1).reconnect = lambda: None  # type: ignore[method-assign]
        frames = [connect(peers, again=True, **session) for _ in range(20)]
        assert [writer.is_open for writer in frames] == [False] * 19 + [True]
        pairs = [
            [
                connect(peers, stream=stream, again=True, **session)
                for stream in ("frames", "errors")
            ]
            for _ in range(20)
        ]
        assert [[w.is_open for w in pair] for pair in pairs] == [[False] * 2] * 19 + [[True] * 2]
        errors = [connect(peers, stream="errors", again=True, **session) for _ in range(20)]
        assert not any(writer.is_open for writer in errors)
        assert b"the first connection of this node is missing" in errors[0].said
        frames.append(connect(peers, again=True, **session))
        peers.hang_up()
        assert not any(writer.is_open for writer in [*first, *frames, *pairs[-1]])

    asyncio.run(scenario())


def test_dials_unresolved_name_of_first_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Example: the name of a pod that does not exist yet; each try resolves the name again."""
    dialed: list[object] = []

    def dial(addresses: list[tuple[str, int]], *_: object) -> None:
        dialed.extend(addresses)
        raise OSError("Name or service not known")

    monkeypatch.setattr(manual.caller, "dial", dial)
    monkeypatch.setattr(manual, "resolve", lambda host: [])
    monkeypatch.setenv("PACELINE_RDZV_KEY", KEY)
    joining = endpoints.endpoint("first.invalid:29400", None, None, 1, 2, 5.0)
    with pytest.raises(ConnectError, match="did not meet the first node") as caught:
        manual.serve(joining, ("train.py",), "python3")
    assert dialed == [("first.invalid", 29400)]
    assert "Name or service not known" in caught.value.found


def refuse_connection() -> socket.socket:
    raise ConnectionRefusedError


def test_does_not_wait_for_silent_first_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connection stays open but silent; the agent has ended because its lease ran out."""
    monkeypatch.setattr(manual, "GOODBYE_S", 0.2)
    local_socket, remote_socket = socket.socketpair()
    argv = [sys.executable, "-c", "import sys; sys.exit('no launcher for 10 s')"]
    with local_socket, remote_socket, subprocess.Popen(argv, stderr=subprocess.PIPE) as agent:
        agent.wait(20)
        with pytest.raises(ConnectError, match="the first node went away"):
            manual._wait(local_socket, agent, refuse_connection)
        local_socket.shutdown(socket.SHUT_RDWR)


def test_wait_returns_exit_code_of_first_node() -> None:
    local_socket, remote_socket = socket.socketpair()
    with (
        local_socket,
        remote_socket,
        subprocess.Popen(["sleep", "60"], stderr=subprocess.PIPE) as agent,
    ):
        remote_socket.sendall(b'{"exit_code": 7}\n')
        assert manual._wait(local_socket, agent, refuse_connection) == 7
        agent.kill()
