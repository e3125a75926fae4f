"""Tests the socket through which other processes of a user send requests to a run."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from paceline.agent import control as client
from paceline.agent.control import MAX_REQUEST_BYTES, address, request
from paceline.launch import control as server
from paceline.launch.control import ControlServer
from paceline.spec.errors import SettingError

RUN_ID = f"test{os.getpid()}"


class FakeLauncher:
    """Records the actions that a launcher would perform."""

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


def send_requests(*requests: Any) -> tuple[list[Any], FakeLauncher]:
    """Returns the answers to requests that are sent one after the other."""

    async def run() -> tuple[list[Any], FakeLauncher]:
        fake = FakeLauncher()
        async with ControlServer(fake):  # type: ignore[arg-type]
            return [await asyncio.to_thread(request, RUN_ID, message) for message in requests], fake

    return asyncio.run(run())


def test_answers_requests_and_reports_errors() -> None:
    answers, fake = send_requests({"do": "stop"}, {"do": "stop", "now": True}, {"do": "state"},
                          {"do": "save"}, {"do": "fly"}, ["stop"])  # fmt: skip
    assert fake.stopped == [False, True]
    assert answers[:3] == [{"text": "stopping"}] * 2 + [{"state": {"run_id": RUN_ID}}]
    assert answers[3] == {"error": "no checkpoint", "found": "why", "remedy": "what to type"}
    assert "save" in answers[4]["error"]
    assert "save" in answers[5]["error"]


def test_request_without_launcher_returns_none() -> None:
    assert request(f"{RUN_ID}x", {"do": "state"}) is None
    with pytest.raises(ValueError, match="not the id of a run"):
        request("../x", {"do": "state"})


def test_survives_oversized_and_invalid_requests() -> None:
    async def run() -> None:
        async with ControlServer(FakeLauncher()):  # type: ignore[arg-type]

            def send(data: bytes) -> bytes:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                    connection.settimeout(60)
                    connection.connect(address(RUN_ID))
                    try:
                        connection.sendall(data)
                        return connection.recv(1 << 16)
                    except ConnectionError:
                        return b""

            assert await asyncio.to_thread(send, b"x" * MAX_REQUEST_BYTES * 4) == b""
            assert b"not JSON" in await asyncio.to_thread(send, b"{nonsense\n")
            assert b"not JSON" in await asyncio.to_thread(send, b"\xff\xff\n")
            answer = await asyncio.to_thread(send, json.dumps({"do": "state"}).encode() + b"\n")
            assert json.loads(answer) == {"state": {"run_id": RUN_ID}}

    asyncio.run(run())


def test_exit_does_not_wait_for_requests() -> None:
    async def run() -> Any:
        async with ControlServer(FakeLauncher()):  # type: ignore[arg-type]
            client = asyncio.ensure_future(asyncio.to_thread(request, RUN_ID, {"do": "stacks"}))
            await asyncio.sleep(0.3)
        return await client

    assert asyncio.run(run()) is None


@pytest.mark.parametrize("side", [server, client], ids=["launch", "agent"])
def test_client_and_server_reject_foreign_user(
    side: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side, "peer_uid", lambda _: os.getuid() + 1)
    (answer,), fake = send_requests({"do": "stop"})
    assert answer is None
    assert not fake.stopped


def test_run_continues_if_address_is_in_use() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address(RUN_ID))

        async def run() -> str:
            async with ControlServer(SimpleNamespace(run_id=RUN_ID)):  # type: ignore[arg-type]
                return "ran"

        assert asyncio.run(run()) == "ran"
