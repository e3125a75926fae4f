"""The same command typed on each node: what a token is, where it comes from, what a name is not."""

from __future__ import annotations

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
from paceline.rendezvous.peers import CommandAdmission, Peers
from paceline.spec.errors import ConnectError, SettingError

KEY = "00112233445566778899aabbccddeeff"


def endpoint(file: Path | None = None, place: int = 0, name: str | None = None) -> Endpoint:
    return endpoints.endpoint("10.0.0.1:2", name, file, place, 2, 1.0)


def test_a_name_is_no_key() -> None:
    """Two first nodes with one name have nothing in common."""
    one, other = endpoint(name="456"), endpoint(name="456")
    assert one.key != other.key
    assert "456" not in one.token
    assert endpoints.derive_key(one.token) == one.key
    assert re.fullmatch(r"([0-9a-f]{4}-){7}[0-9a-f]{4}", one.token)


def test_a_key_is_shown_by_nothing_else() -> None:
    made = endpoint()
    assert made.token not in repr(made)
    assert made.key.hex() not in repr(made)


def test_a_key_from_the_environment_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_RDZV_KEY", KEY)
    made = endpoint(place=1)
    assert made.key == endpoints.derive_key(KEY)
    assert made.token == ""
    assert "PACELINE_RDZV_KEY" not in os.environ


def test_a_key_from_a_file(tmp_path: Path) -> None:
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
def test_what_could_be_guessed_is_no_key(text: str) -> None:
    with pytest.raises(SettingError, match="not a key for a rendezvous"):
        endpoints.derive_key(text)


def test_another_node_needs_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(SettingError) as caught:
        endpoint(place=1)
    assert "PACELINE_RDZV_KEY" in caught.value.remedy
    assert caught.value.exit_code == 2


def test_it_is_asked_for_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("getpass.getpass", lambda prompt: KEY)
    assert endpoint(place=1).key == endpoints.derive_key(KEY)


class Writer:
    def __init__(self) -> None:
        self.said = b""

    def write(self, data: bytes) -> None:
        self.said += data

    def close(self) -> None:
        """Nothing to close."""


def comes(peers: Peers, **about: Any) -> str:
    writer = Writer()
    base = {"stream": "frames", "nodes": 2, "command": "c", "rendezvous": "a", "name": "n2"}
    peers.admit(Connection({**base, **about}, None, writer, "10.0.0.2"))  # type: ignore[arg-type]
    return writer.said.decode()


def test_who_may_come() -> None:
    peers = Peers(CommandAdmission(2, "a", "c"))
    assert "is called 'a'" in comes(peers, rendezvous="b")
    assert "waits for 2 nodes" in comes(peers, nodes=None)
    assert "another script" in comes(peers, command="d")
    assert "--encrypt was given to this node" in comes(peers, encrypt=True)
    assert '"ok"' in comes(peers)


def test_nodes_agree_whether_the_job_is_encrypted() -> None:
    """Otherwise the job would run in clear although one node asks for encryption."""
    peers = Peers(CommandAdmission(2, "a", "c", encrypts=True))
    assert "--encrypt was given to the first node" in comes(peers)
    assert "--encrypt was given to the first node" in comes(peers, encrypt="yes")
    assert '"ok"' in comes(peers, encrypt=True)
    error = manual.rendezvous_error(endpoint(place=0), "--encrypt was given to this node")
    assert "on each node" in error.remedy


@pytest.mark.parametrize("name", ["../../x", "/etc", "", "a\nb", None, 7, "x" * 200, "\x1b[2J"])
def test_a_node_cannot_choose_a_path_for_a_name(name: object) -> None:
    peers = Peers(CommandAdmission(2, "a", "c"))
    assert '"ok"' in comes(peers, name=name)
    assert peers.by_place[1].host.name in ("node1", "7")


@pytest.mark.parametrize("place", [[1], {}, "1", 9, -1, 1.5])
def test_a_place_that_is_none_breaks_nothing(place: object) -> None:
    peers = Peers(CommandAdmission(2, "a", "c"))
    comes(peers)
    assert '"error"' in comes(peers, place=place)


def test_a_name_that_nobody_knows_yet_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a pod that is still to come: each try asks for it anew."""
    asked: list[object] = []

    def dial(addresses: list[tuple[str, int]], *_: object) -> None:
        asked.extend(addresses)
        raise OSError("Name or service not known")

    monkeypatch.setattr(manual.caller, "dial", dial)
    monkeypatch.setattr(manual, "resolve", lambda host: [])
    monkeypatch.setenv("PACELINE_RDZV_KEY", KEY)
    here = endpoints.endpoint("first.invalid:29400", None, None, 1, 2, 5.0)
    with pytest.raises(ConnectError, match="did not meet the first node") as caught:
        manual.serve(here, ("train.py",), "python3")
    assert asked == [("first.invalid", 29400)]
    assert "Name or service not known" in caught.value.found


def nobody() -> socket.socket:
    raise ConnectionRefusedError


def test_a_first_node_that_lost_its_power_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its connection stays open and silent; the agent, whose lease ran out, has ended."""
    monkeypatch.setattr(manual, "GOODBYE_S", 0.2)
    ours, theirs = socket.socketpair()
    argv = [sys.executable, "-c", "import sys; sys.exit('no launcher for 10 s')"]
    with ours, theirs, subprocess.Popen(argv, stderr=subprocess.PIPE) as agent:
        agent.wait(20)
        with pytest.raises(ConnectError, match="the first node went away"):
            manual._wait(ours, agent, nobody)
        ours.shutdown(socket.SHUT_RDWR)


def test_what_the_first_node_says_at_the_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, subprocess.Popen(["sleep", "60"], stderr=subprocess.PIPE) as agent:
        theirs.sendall(b'{"exit_code": 7}\n')
        assert manual._wait(ours, agent, nobody) == 7
        agent.kill()
