"""Tests which messages a client accepts from the supervisor that it starts on another host."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.launch import leave
from paceline.launch.leave import MARK, Login, SupervisorMessages
from paceline.remote.agent_code import detach_source
from paceline.remote.openssh import agent_command
from paceline.spec.errors import NodeError
from paceline.spec.hosts import Host
from paceline.spec.schema import InvalidValue

LISTENING = {
    "listening": [["10.0.0.1", 4000]],
    "certificate": "a" * 64,
    "folder": "/h/detached/abc",
    "run": "/h/run",
}
RUNNING, LEFT, OVER = {"running": True}, {"left": True}, {"over": 0}
TEXT, STARTING = {"text": "hello\n", "err": False}, {"starting": "sending", "done": 1, "of": 2}
FAILED = {"over": 2, "error": {"message": "m", "found": "", "remedy": ""}}


@pytest.mark.parametrize(
    "messages",
    [[TEXT, STARTING, STARTING, LISTENING, TEXT, RUNNING, TEXT, LEFT], [LISTENING, OVER],
     [FAILED], [{"refused": "no Python", "found": "3.6", "remedy": "x"}],
     [LISTENING, RUNNING, OVER]],
)  # fmt: skip
def test_accepts_valid_supervisor_messages(messages: list[dict[str, Any]]) -> None:
    received = SupervisorMessages()
    for message in messages:
        received.check(message)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [([LISTENING, LISTENING], "the message listening twice"),
     ([RUNNING], "running before listening"), ([LISTENING, LEFT], "left before running"),
     ([LISTENING, RUNNING, RUNNING], "running twice"), ([{}], "no known kind"),
     ([{**LISTENING, "listening": [["10.0.0.1", "x"]]}], "whole number"),
     ([{**LISTENING, "listening": 3}], "a list"), ([{"listening": []}], "lacks folder"),
     ([{**LISTENING, "folder": "a"}], "absolute path"),
     ([{**LISTENING, "certificate": "a"}], "SHA"),
     ([{"text": 3, "err": False}], "text"),
     ([{"starting": "x"}], "lacks done"), ([{"over": "0"}], "whole number"),
     ([{"over": 1, "error": "x"}], "a table"), ([{"over": 1, "error": {}}], "lacks message")],
)  # fmt: skip
def test_rejects_invalid_supervisor_messages(messages: list[dict[str, Any]], problem: str) -> None:
    received = SupervisorMessages()
    for message in messages[:-1]:
        received.check(message)
    with pytest.raises(InvalidValue, match=problem):
        received.check(messages[-1])


@pytest.mark.parametrize("line", [b"{", b"[" * 100_000, b"3", b"\xff", b"{}"])
def test_hostile_supervisor_cannot_start_callers_twice(
    line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(
        leave._DetachedStart,
        "_start_callers",
        lambda self, login, addresses, certificate: started.append(addresses),
    )
    start = leave._DetachedStart.__new__(leave._DetachedStart)
    start._host, start._caller_tasks = Host("n1"), []

    async def follow() -> None:
        reader = asyncio.StreamReader(limit=1 << 20)
        message = json.dumps(LISTENING).encode()
        reader.feed_data(b"banner\n" + MARK + message + b"\n" + MARK + line + b"\n")
        reader.feed_eof()
        login = Login(Host("n1"), cast(Any, SimpleNamespace(reader=reader)))
        await start._follow_start(login, None, None)

    with pytest.raises(NodeError, match="n1 sent what no supervisor of this version sends"):
        asyncio.run(follow())
    assert started == [[("10.0.0.1", 4000)]]


def test_supervisor_arguments_hide_run_id(tmp_path: Path) -> None:
    """The socket has the run's name, which other users could otherwise claim first."""
    python, run_id = tmp_path / "python", "0123456789ab"
    python.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\nenv > {tmp_path}/environ\n')
    python.chmod(0o700)
    order = json.dumps({"python": str(python), "run_id": run_id, "trees": {}}).encode()
    source = detach_source("supervisor") + b"%010d" % len(order) + order
    subprocess.run(
        agent_command(sys.executable), input=source, timeout=60, check=True,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
    )  # fmt: skip
    arguments, environ = ((tmp_path / name).read_text() for name in ("arguments", "environ"))
    assert run_id not in arguments
    assert f"PACELINE_SUPERVISED={tmp_path}/paceline/detached/{run_id}\n" in environ
