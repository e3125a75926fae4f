"""Tests that every event has a defined kind, and is equal after writing and reading."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.rundir.directory import RunDirectory
from paceline.rundir.records import read_records
from paceline.spec.events import (
    FIELDS,
    KINDS,
    Event,
    read_events,
    restore_local_paths,
    shipped_copies,
)
from paceline.spec.rundir import EVENTS
from paceline.transfer.tree import Tree

SOURCE = Path(paceline.__file__).parent
EVENT_LITERAL = re.compile(r"""(?:\.event\(|_tell\(|event=)\s*"([a-z ]+)"|"event": "([a-z ]+)\"""")


def emitted_events(folder: str) -> set[str]:
    texts = (file.read_text() for file in sorted((SOURCE / folder).rglob("*.py")))
    return {first or second for text in texts for first, second in EVENT_LITERAL.findall(text)}


def test_emitted_events_are_defined() -> None:
    by_rank = {name for name, kind in KINDS.items() if kind.sender == "rank"}
    by_launcher = {name for name, kind in KINDS.items() if kind.sender == "launcher"}
    assert emitted_events("train") <= by_rank
    assert emitted_events("launch") <= by_launcher
    assert emitted_events("launch") | {"connection ended", "connection restored"} == by_launcher


def test_fields_belong_to_event_kinds() -> None:
    names = {name for kind in KINDS.values() for name in (*kind.required, *kind.optional)}
    assert names == set(FIELDS)


def test_rank_ended_event_round_trip(tmp_path: Path) -> None:
    stack = {"state": "S", "stack": ['File "a.py", line 3 in f']}
    message = {"event": "rank ended", "rank": 1, "code": None, "signal": 9, "time": 5.0,
               "peak_bytes": 7, "seen": stack, "memory": {"kills": 1, "kernel": ["x"]}}  # fmt: skip
    event = Event.from_message("n2", message)
    assert (event.kind, event.where, event.time) == ("rank ended", "rank 1 on n2", 5.0)
    assert event.recorded_fields is not None
    directory = RunDirectory(tmp_path / "run")
    line = directory.event(event.kind, event.host, event.rank, **event.recorded_fields)
    directory.close()
    (loaded,) = read_events(read_records(tmp_path / "run" / EVENTS))
    assert (loaded,) == read_events([line])
    assert loaded.fields == {**event.recorded_fields} == {
        "code": None, "signal": 9, "peak_bytes": 7, "seen": stack,
        "memory": {"kills": 1, "kernel": ["x"]},
    }  # fmt: skip
    assert (loaded.host, loaded.rank) == ("n2", 1)


def test_recorded_fields_omit_traceback() -> None:
    data = {"kind": "exception", "type": "E", "message": "m", "traceback": "t", "time": 3.0}
    event = Event.from_message("n1", {"event": "said", "rank": 0, "data": data})
    assert event["traceback"] == "t"
    assert event.recorded_fields == {"type": "E", "message": "m"}


def test_records_events_of_program() -> None:
    data = {"kind": "event", "event": "halfway", "share": 0.5, "host": "x", "rank": 7, "time": 1}
    event = Event.from_message("n1", {"event": "said", "rank": 0, "data": data})
    assert (event.kind, event.where) == ("halfway", "rank 0 on n1")
    assert event.recorded_fields == {"share": 0.5}


@pytest.mark.parametrize("message", [
    {"event": "said", "rank": 0, "data": {
        "kind": "checkpoint", "event": "started", "host": "x", "rank": 7, "time": 1, "self": 1}},
    {"event": "rank thawed", "rank": 0, "kind": "started", "host": "x", "time": 1, "self": 1},
])  # fmt: skip
def test_hostile_message_does_not_replace_common_keys(tmp_path: Path, message: Any) -> None:
    event = Event.from_message("n2", message)
    assert event.recorded_fields == {"self": 1}
    directory = RunDirectory(tmp_path / "run")
    line = directory.event(event.kind, event.host, event.rank, **event.recorded_fields)
    directory.close()
    assert (line["event"], line["host"], line["rank"]) == (event.kind, "n2", 0)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"event": "rank ended", "code": "x", "signal": True, "memory": 5, "other": 1}, {}),
        ({"event": "rank ended", "code": 3, "seen": {"state": "S"}}, {"code": 3}),
        ({"event": "hang", "text": "t", "host": 5, "rank": "1", "time": "now"}, {"text": "t"}),
    ],
)
def test_reading_ignores_invalid_fields(line: dict[str, Any], expected: dict[str, Any]) -> None:
    event = Event.read(json.loads(json.dumps(line)))
    assert event is not None
    assert event.fields == expected
    assert (event.host, event.rank, event.time) == ("", None, 0.0)


def test_restores_paths_of_shipped_copies() -> None:
    copied = Event("copied", "n2", fields={"copy": "/tmp/c/code", "home": "/home/me/p"})
    root = Event("copied", "n2", fields={"copy": "/", "home": "/x"})
    copies = shipped_copies([copied, root, Event("copied", "n1")])
    assert restore_local_paths(copies, "n2", "/tmp/c/code/train.py") == "/home/me/p/train.py"
    assert restore_local_paths(copies, "n1", "/tmp/c/code/train.py") == "/tmp/c/code/train.py"


def test_restores_paths_of_gathered_data_files() -> None:
    """Data files are sent in a temporary folder of links, which users do not know."""
    outward = {"chat": "/home/me/chat", "chat.jsonl": "/home/me/data/chat.jsonl"}
    tree = Tree(Path("/tmp/paceline-data-1"), [], outward=outward)
    copies = [("n2", copy, source) for copy, source in tree.sources("/run/job/input0")]
    text = "/run/job/input0/chat.jsonl line 6, /run/job/input0/chat, /run/job/input0/x"
    assert restore_local_paths(copies, "n2", text) == (
        "/home/me/data/chat.jsonl line 6, /home/me/chat, /tmp/paceline-data-1/x"
    )
