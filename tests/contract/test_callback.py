"""Agents that call back: both sides prove the key, places are given once, strangers get nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from paceline.agent import caller
from paceline.cluster.callback import Call, Switchboard, caller_command, caller_config
from paceline.launch.schedulers.calling import Gathering
from paceline.spec.hosts import Host

KEY = b"k" * 32


@contextlib.asynccontextmanager
async def listening(take: Any) -> AsyncIterator[Switchboard]:
    board = Switchboard(KEY, take)
    await board.open(["127.0.0.1"])
    try:
        yield board
    finally:
        await board.close()


def dial(board: Switchboard, key: bytes, **about: Any) -> socket.socket:
    return caller.dial(list(board.addresses), key, about, time.monotonic())


def test_the_key_opens() -> None:
    async def go() -> None:
        calls: list[Call] = []

        def take(call: Call) -> None:
            calls.append(call)
            call.accept()

        async with listening(take) as board:
            connection = await asyncio.to_thread(dial, board, KEY, stream="frames", index=3)
            connection.sendall(b"hello")
            assert await calls[0].reader.readexactly(5) == b"hello"
            assert calls[0].about == {"stream": "frames", "index": 3}
            connection.close()
            calls[0].writer.close()

    asyncio.run(go())


def test_another_key_does_not() -> None:
    async def go() -> None:
        calls: list[Call] = []
        async with listening(calls.append) as board:
            with pytest.raises(OSError, match="another key"):
                await asyncio.to_thread(dial, board, b"x" * 32, stream="frames")
            await asyncio.sleep(0.05)
            assert board.strangers == ["127.0.0.1"]
            assert not calls

    asyncio.run(go())


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.0\r\n\r\n", b"paceline-call\n", b"\xff\xfe\n", b""]
)
def test_noise_is_hung_up_on(sent: bytes) -> None:
    async def go() -> None:
        calls: list[Call] = []
        async with listening(calls.append) as board:
            reader, writer = await asyncio.open_connection(*board.addresses[0])
            writer.write(sent)
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
            assert not calls

    asyncio.run(go())


def test_something_else_that_listens_is_left_alone() -> None:
    """The node gives its proof to nobody who has not proven the key first."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        child = subprocess.Popen(
            caller_command(caller_config([other.getsockname()], ["python3"], ["T_PLACE"], "X", 0)),
            env={"PATH": os.environ["PATH"], caller.KEY: KEY.hex(), "T_PLACE": "0"},
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        with child, other.accept()[0] as connection:
            heard = connection.recv(4096)
            connection.sendall(b"220 mail.example.org ESMTP\n")
            heard += connection.recv(4096)
            _, err = child.communicate(timeout=20)
    assert heard.startswith(b"paceline-call ")
    assert heard.count(b"\n") == 1
    assert KEY.hex().encode() not in heard
    assert "paceline-call" in err
    assert child.returncode == 1


def test_the_command_holds_no_secret_and_survives() -> None:
    config = caller_config([("10.0.0.1", 4)], ["/a b/python", "/c/python"], ["PMI_RANK"], "X|Y", 30)
    words = caller_command(config)
    assert json.loads(words[5]) == config
    assert config["pythons"] == ["/a b/python", "/c/python"]
    assert caller_config([], ["p", "p"], [], "", 1)["pythons"] == ["p"]


def test_places_are_given_once() -> None:
    class Writer:
        def __init__(self) -> None:
            self.said = b""
            self.closed = False

        def write(self, data: bytes) -> None:
            self.said += data

        def close(self) -> None:
            self.closed = True

    def call(**about: Any) -> tuple[Call, Writer]:
        writer = Writer()
        return Call(about, None, writer, "10.0.0.2"), writer  # type: ignore[arg-type]

    async def go() -> None:
        gathering = Gathering([Host("n1"), Host("n2")])

        def said(**about: Any) -> dict[str, Any]:
            made, writer = call(**about)
            gathering.take(made)
            answer: dict[str, Any] = json.loads(writer.said)
            return answer

        assert said(stream="frames", index=0, session="a") == {"ok": True}
        assert "two processes" in said(stream="frames", index=0, session="b")["error"]
        assert "cannot be" in said(stream="frames", index=2, session="c")["error"]
        assert "cannot be" in said(stream="frames", session="d")["error"]
        assert "no first connection" in said(stream="errors", index=0, session="b")["error"]
        assert said(stream="errors", index=0, session="a") == {"ok": True}
        assert [host.name for host in gathering.missing()] == ["n2"]
        assert said(stream="frames", node="n2", index=0, session="e") == {"ok": True}
        assert said(stream="errors", node="n2", index=0, session="e") == {"ok": True}
        assert gathering.done.is_set()
        assert gathering.names() == ["None", "None"]

    asyncio.run(go())
