"""The socket by which other processes of a user ask something of a run."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from paceline.agent import control as asking
from paceline.agent.control import MAX_REQUEST_BYTES, address, request
from paceline.launch import control as asked_side
from paceline.launch.control import ControlServer
from paceline.spec.errors import SettingError

RUN_ID = f"test{os.getpid()}"


class Fake:
    """A launcher's actions."""

    run_id = RUN_ID

    def __init__(self) -> None:
        self.stopped: list[bool] = []

    def stop(self, *, immediately: bool = False) -> str:
        self.stopped.append(immediately)
        return "stopping"

    async def save(self) -> str:
        raise SettingError("no checkpoint", found="why", remedy="what to type")

    async def stacks(self) -> str:
        await asyncio.sleep(60)
        return ""

    def state(self) -> dict[str, Any]:
        return {"run_id": self.run_id}


def asked(*wishes: Any) -> tuple[list[Any], Fake]:
    """What is answered to wishes, one after the other."""

    async def run() -> tuple[list[Any], Fake]:
        fake = Fake()
        async with ControlServer(fake):  # type: ignore[arg-type]
            return [await asyncio.to_thread(request, RUN_ID, wish) for wish in wishes], fake

    return asyncio.run(run())


def test_wishes_are_answered_and_refusals_have_their_remedy() -> None:
    answers, fake = asked({"do": "stop"}, {"do": "stop", "now": True}, {"do": "state"},
                          {"do": "save"}, {"do": "fly"}, ["stop"])  # fmt: skip
    assert fake.stopped == [False, True]
    assert answers[:3] == [{"text": "stopping"}] * 2 + [{"state": {"run_id": RUN_ID}}]
    assert answers[3] == {"error": "no checkpoint", "found": "why", "remedy": "what to type"}
    assert "save" in answers[4]["error"]
    assert "save" in answers[5]["error"]


def test_where_no_launcher_listens_there_is_no_answer() -> None:
    assert request(f"{RUN_ID}x", {"do": "state"}) is None
    with pytest.raises(ValueError, match="not the id of a run"):
        request("../x", {"do": "state"})


def test_too_long_and_broken_wishes_harm_nobody() -> None:
    async def run() -> None:
        async with ControlServer(Fake()):  # type: ignore[arg-type]

            def send(data: bytes) -> bytes:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
                    line.settimeout(60)
                    line.connect(address(RUN_ID))
                    try:
                        line.sendall(data)
                        return line.recv(1 << 16)
                    except ConnectionError:
                        return b""

            assert await asyncio.to_thread(send, b"x" * MAX_REQUEST_BYTES * 4) == b""
            assert b"not JSON" in await asyncio.to_thread(send, b"{nonsense\n")
            assert b"not JSON" in await asyncio.to_thread(send, b"\xff\xff\n")
            answer = await asyncio.to_thread(send, json.dumps({"do": "state"}).encode() + b"\n")
            assert json.loads(answer) == {"state": {"run_id": RUN_ID}}

    asyncio.run(run())


def test_an_end_waits_for_nobody_who_still_asks() -> None:
    async def run() -> Any:
        async with ControlServer(Fake()):  # type: ignore[arg-type]
            asking = asyncio.ensure_future(asyncio.to_thread(request, RUN_ID, {"do": "stacks"}))
            await asyncio.sleep(0.3)
        return await asking

    assert asyncio.run(run()) is None


@pytest.mark.parametrize("side", [asked_side, asking], ids=["launch", "agent"])
def test_another_user_is_hung_up_on_by_either_side(
    side: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side, "peer_uid", lambda _: os.getuid() + 1)
    (answer,), fake = asked({"do": "stop"})
    assert answer is None
    assert not fake.stopped


def test_a_name_that_is_taken_does_not_stop_a_run() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(address(RUN_ID))

        async def run() -> str:
            async with ControlServer(SimpleNamespace(run_id=RUN_ID)):  # type: ignore[arg-type]
                return "ran"

        assert asyncio.run(run()) == "ran"
