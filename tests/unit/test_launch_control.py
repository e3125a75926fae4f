"""Tests what a user can request from a running job: a checkpoint, stack dumps, a stop."""

from __future__ import annotations

import asyncio
import json
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.explain.stacks import RankStack
from paceline.explain.units import Frame
from paceline.launch.control import RunActions, format_stacks
from paceline.launch.health.hang_verdict import RankSnapshot
from paceline.spec.errors import NodeError, SettingError
from paceline.spec.events import Event
from paceline.train.comms import Comms
from paceline.train.elastic.control import Order, RegroupMessage, SaveRequest, parse_control
from paceline.train.elastic.stop import Poll
from paceline.train.world import World


class FakeRecorder:
    """Records events and files instead of writing them to a run directory."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.files: dict[str, str] = {}
        self.display_path = self.path = "runs/one"

    def event(self, kind: str, **details: Any) -> None:
        self.events.append((kind, details))

    def write(self, name: str, text: str) -> None:
        self.files[name] = text


class FakeAttempt:
    """Stands in for an attempt; records the messages to its ranks."""

    def __init__(self, snapshots: list[RankSnapshot] | None = None) -> None:
        self.lines: list[dict[str, Any]] = []
        self.plan = SimpleNamespace(attempt=0)
        self._snapshots = snapshots or []

    async def broadcast(self, message: dict[str, Any]) -> None:
        self.lines.append(message)

    async def snapshots(self) -> list[RankSnapshot]:
        return self._snapshots


def actions() -> tuple[Any, FakeRecorder, list[str]]:
    recorder, notes = FakeRecorder(), list[str]()
    return RunActions("abc", recorder, notes.append), recorder, notes  # type: ignore[arg-type]


def rank_event(kind: str, **fields: Any) -> Event:
    return Event(kind, "n1", 0, 0.0, fields)


async def run_pending_tasks() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_save_requests_checkpoint_and_awaits_completion() -> None:
    async def run() -> None:
        run_actions, recorder, notes = actions()
        ranks = FakeAttempt()
        run_actions.set_attempt(ranks)
        run_actions.on_event(rank_event("keeps checkpoints"))
        saving = asyncio.ensure_future(run_actions.save())
        await run_pending_tasks()
        assert ranks.lines == [{"control": "save", "number": 1}]
        run_actions.on_event(rank_event("checkpoint", step=30))  # an earlier checkpoint
        run_actions.on_event(rank_event("saving", step=40))
        await run_pending_tasks()
        assert not saving.done()
        run_actions.on_event(rank_event("checkpoint", step=40, megabytes=1.5))
        assert await saving == "checkpoint of step 40 is complete: 1.5 MB"
        assert recorder.events == [("asked", {"do": "save"})]
        assert notes == ["paceline: checkpoint of step 40 is complete: 1.5 MB"]

    asyncio.run(run())


def test_save_returns_if_checkpoint_is_complete() -> None:
    async def run() -> None:
        run_actions, _, _ = actions()
        run_actions.set_attempt(FakeAttempt())
        run_actions.on_event(rank_event("keeps checkpoints"))
        run_actions.on_event(rank_event("resumed", step=40))
        saving = asyncio.ensure_future(run_actions.save())
        await run_pending_tasks()
        run_actions.on_event(rank_event("saving", step=40))
        assert "step 40" in await saving

    asyncio.run(run())


def test_save_requires_checkpoints_in_script() -> None:
    async def run() -> None:
        run_actions, recorder, _ = actions()
        with pytest.raises(NodeError, match="no ranks run"):
            await run_actions.save()
        ranks = FakeAttempt()
        run_actions.set_attempt(ranks)
        with pytest.raises(SettingError, match=r"session\.checkpoints"):
            await run_actions.save()
        assert not ranks.lines
        assert not recorder.events
        run_actions.on_event(rank_event("keeps checkpoints"))
        run_actions.set_attempt(FakeAttempt())  # each attempt must announce it again
        with pytest.raises(SettingError):
            await run_actions.save()

    asyncio.run(run())


def test_save_reports_failure_and_end_of_ranks() -> None:
    async def run() -> None:
        run_actions, _, _ = actions()
        run_actions.set_attempt(FakeAttempt())
        run_actions.on_event(rank_event("keeps checkpoints"))
        failing = asyncio.ensure_future(run_actions.save())
        await run_pending_tasks()
        run_actions.on_event(rank_event("saving", step=7))
        run_actions.on_event(rank_event("checkpoint failed", step=7, problem="the disk is full"))
        with pytest.raises(NodeError, match="the disk is full"):
            await failing
        ending = asyncio.ensure_future(run_actions.save())
        await run_pending_tasks()
        run_actions.set_attempt(None)
        with pytest.raises(NodeError, match="ended before"):
            await ending

    asyncio.run(run())


def test_immediate_stop_sends_two_signals() -> None:
    run_actions, recorder, _ = actions()
    with pytest.raises(NodeError):
        run_actions.stop()
    signals: list[int] = []
    run_actions.interrupts = SimpleNamespace(receive=signals.append, received=signals)
    run_actions.stop()
    assert signals == [signal.SIGTERM]
    assert run_actions.state()["state"] == "stopping"
    run_actions.stop(immediately=True)
    assert signals == [signal.SIGTERM] * 3
    assert [kind for kind, _ in recorder.events] == ["asked", "asked"]


def test_stacks_are_written_into_run_directory() -> None:
    frames = (Frame("/lib/torch/x.py", 9, "wait"), Frame("train.py", 3, "main"))
    rank_snapshots = [
        RankSnapshot(RankStack("n2", 1, "S", ()), 0.0, 12),
        RankSnapshot(RankStack("n1", 0, "R", frames), 0.0, 11),
    ]

    async def run() -> None:
        run_actions, recorder, notes = actions()
        run_actions.set_attempt(FakeAttempt(rank_snapshots))
        text = await run_actions.stacks()
        assert list(recorder.files.values()) == [text + "\n"]
        assert recorder.events[0][1]["do"] == "stacks"
        assert "stacks of 2 ranks" in notes[0]

    asyncio.run(run())
    first, second = format_stacks(rank_snapshots).split("\n\n")
    assert first.splitlines() == [
        "rank 0 on n1 (process 11, running):",
        '  File "train.py", line 3 in main',
        '  File "/lib/torch/x.py", line 9 in wait',
    ]
    assert second.startswith("rank 1 on n2 (process 12, waiting):\n  no Python stack")
    assert format_stacks([]) == "no rank answered"


def test_parses_save_request() -> None:
    assert parse_control('{"control": "save", "number": 3}') == SaveRequest(3)
    for line in ('{"control": "save"}', '{"control": "save", "number": "x"}'):
        with pytest.raises(ValueError, match=r"save|invalid"):
            parse_control(line)


def test_save_request_is_answered_once() -> None:
    poll = Poll(Comms(World(), torch.device("cpu")))
    first = poll.exchange(save_number=2, answered_number=0)
    assert (first.save, first.is_new_request, first.save_number) == (True, True, 2)
    repeated = poll.exchange(save_number=2, answered_number=first.save_number)
    assert (repeated.save, repeated.is_new_request, repeated.save_number) == (False, False, 2)
    outdated = poll.exchange(save_number=1, answered_number=2)
    assert (outdated.save, outdated.save_number) == (False, 2)


def test_parses_regroup_and_exit_messages() -> None:
    members = [{"slot": 3, "host": "n2", "local_rank": 0, "local_size": 1}]
    store = {"address": "10.0.0.1", "port": 4567}
    line = {"control": "regroup", "generation": 2, "members": members, "store": store,
            "planned": False, "holds": True}  # fmt: skip
    message = parse_control(json.dumps(line))
    assert message == RegroupMessage(2, ((3, "n2", 0, 1),), "10.0.0.1", 4567, False, True)
    assert parse_control('{"control": "end", "why": "x"}') is Order.END
    assert parse_control('{"control": "alone"}') is Order.SAVE_AND_EXIT
