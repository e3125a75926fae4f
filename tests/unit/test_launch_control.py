"""What a person asks of a run on the way: a checkpoint now, stacks, the end."""

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


class Recorded:
    """What the run directory would get."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.files: dict[str, str] = {}
        self.display_path = self.path = "runs/one"

    def event(self, kind: str, **details: Any) -> None:
        self.events.append((kind, details))

    def write(self, name: str, text: str) -> None:
        self.files[name] = text


class Ranks:
    """An attempt whose ranks are told something."""

    def __init__(self, snapshots: list[RankSnapshot] | None = None) -> None:
        self.lines: list[dict[str, Any]] = []
        self.plan = SimpleNamespace(attempt=0)
        self._snapshots = snapshots or []

    async def broadcast(self, message: dict[str, Any]) -> None:
        self.lines.append(message)

    async def snapshots(self) -> list[RankSnapshot]:
        return self._snapshots


def actions() -> tuple[Any, Recorded, list[str]]:
    recorder, notes = Recorded(), list[str]()
    return RunActions("abc", recorder, notes.append), recorder, notes  # type: ignore[arg-type]


def said(kind: str, **fields: Any) -> Event:
    return Event(kind, "n1", 0, 0.0, fields)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_checkpoint_is_asked_for_once_and_told_when_it_is_whole() -> None:
    async def run() -> None:
        asked, recorder, notes = actions()
        ranks = Ranks()
        asked.set_attempt(ranks)
        asked.on_event(said("keeps checkpoints"))
        saving = asyncio.ensure_future(asked.save())
        await turns()
        assert ranks.lines == [{"control": "save", "number": 1}]
        asked.on_event(said("checkpoint", step=30))  # an earlier one
        asked.on_event(said("saving", step=40))
        await turns()
        assert not saving.done()
        asked.on_event(said("checkpoint", step=40, megabytes=1.5))
        assert await saving == "checkpoint of step 40 is complete: 1.5 MB"
        assert recorder.events == [("asked", {"do": "save"})]
        assert notes == ["paceline: checkpoint of step 40 is complete: 1.5 MB"]

    asyncio.run(run())


def test_a_checkpoint_that_was_whole_already_is_not_waited_for() -> None:
    async def run() -> None:
        asked, _, _ = actions()
        asked.set_attempt(Ranks())
        asked.on_event(said("keeps checkpoints"))
        asked.on_event(said("resumed", step=40))
        saving = asyncio.ensure_future(asked.save())
        await turns()
        asked.on_event(said("saving", step=40))
        assert "step 40" in await saving

    asyncio.run(run())


def test_a_checkpoint_is_refused_where_none_are_made() -> None:
    async def run() -> None:
        asked, recorder, _ = actions()
        with pytest.raises(NodeError, match="no ranks run"):
            await asked.save()
        ranks = Ranks()
        asked.set_attempt(ranks)
        with pytest.raises(SettingError, match=r"session\.checkpoints"):
            await asked.save()
        assert not ranks.lines
        assert not recorder.events
        asked.on_event(said("keeps checkpoints"))
        asked.set_attempt(Ranks())  # a further attempt has to say it again
        with pytest.raises(SettingError):
            await asked.save()

    asyncio.run(run())


def test_a_checkpoint_that_fails_and_ranks_that_end_are_told() -> None:
    async def run() -> None:
        asked, _, _ = actions()
        asked.set_attempt(Ranks())
        asked.on_event(said("keeps checkpoints"))
        failing = asyncio.ensure_future(asked.save())
        await turns()
        asked.on_event(said("saving", step=7))
        asked.on_event(said("checkpoint failed", step=7, problem="the disk is full"))
        with pytest.raises(NodeError, match="the disk is full"):
            await failing
        ending = asyncio.ensure_future(asked.save())
        await turns()
        asked.set_attempt(None)
        with pytest.raises(NodeError, match="ended before"):
            await ending

    asyncio.run(run())


def test_a_stop_is_a_signal_and_a_stop_at_once_two() -> None:
    asked, recorder, _ = actions()
    with pytest.raises(NodeError):
        asked.stop()
    taken: list[int] = []
    asked.interrupts = SimpleNamespace(receive=taken.append, received=taken)
    asked.stop()
    assert taken == [signal.SIGTERM]
    assert asked.state()["state"] == "stopping"
    asked.stop(immediately=True)
    assert taken == [signal.SIGTERM] * 3
    assert [kind for kind, _ in recorder.events] == ["asked", "asked"]


def test_stacks_are_written_into_the_run_directory() -> None:
    frames = (Frame("/lib/torch/x.py", 9, "wait"), Frame("train.py", 3, "main"))
    looks = [
        RankSnapshot(RankStack("n2", 1, "S", ()), 0.0, 12),
        RankSnapshot(RankStack("n1", 0, "R", frames), 0.0, 11),
    ]

    async def run() -> None:
        asked, recorder, notes = actions()
        asked.set_attempt(Ranks(looks))
        text = await asked.stacks()
        assert list(recorder.files.values()) == [text + "\n"]
        assert recorder.events[0][1]["do"] == "stacks"
        assert "stacks of 2 ranks" in notes[0]

    asyncio.run(run())
    first, second = format_stacks(looks).split("\n\n")
    assert first.splitlines() == [
        "rank 0 on n1 (process 11, running):",
        '  File "train.py", line 3 in main',
        '  File "/lib/torch/x.py", line 9 in wait',
    ]
    assert second.startswith("rank 1 on n2 (process 12, waiting):\n  no Python stack")
    assert format_stacks([]) == "no rank answered"


def test_a_rank_understands_the_wish_for_a_checkpoint() -> None:
    assert parse_control('{"control": "save", "number": 3}') == SaveRequest(3)
    for line in ('{"control": "save"}', '{"control": "save", "number": "x"}'):
        with pytest.raises(ValueError, match=r"save|invalid"):
            parse_control(line)


def test_a_wish_is_answered_once_however_late_others_hear_of_it() -> None:
    poll = Poll(Comms(World(), torch.device("cpu")))
    first = poll.exchange(save_number=2, answered_number=0)
    assert (first.save, first.is_new_request, first.save_number) == (True, True, 2)
    again = poll.exchange(save_number=2, answered_number=first.save_number)
    assert (again.save, again.is_new_request, again.save_number) == (False, False, 2)
    late = poll.exchange(save_number=1, answered_number=2)
    assert (late.save, late.save_number) == (False, 2)


def test_a_rank_understands_who_trains_on() -> None:
    members = [{"slot": 3, "host": "n2", "local_rank": 0, "local_size": 1}]
    store = {"address": "10.0.0.1", "port": 4567}
    line = {"control": "regroup", "generation": 2, "members": members, "store": store,
            "planned": False, "holds": True}  # fmt: skip
    message = parse_control(json.dumps(line))
    assert message == RegroupMessage(2, ((3, "n2", 0, 1),), "10.0.0.1", 4567, False, True)
    assert parse_control('{"control": "end", "why": "x"}') is Order.END
    assert parse_control('{"control": "alone"}') is Order.SAVE_AND_EXIT
