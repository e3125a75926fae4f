"""Every event is of a kind that is defined, and what is written is what is read."""

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
TOLD = re.compile(r"""(?:\.event\(|_tell\(|event=)\s*"([a-z ]+)"|"event": "([a-z ]+)\"""")


def told_in(folder: str) -> set[str]:
    texts = (file.read_text() for file in sorted((SOURCE / folder).rglob("*.py")))
    return {one or other for text in texts for one, other in TOLD.findall(text)}


def test_what_is_told_anywhere_is_defined() -> None:
    by_rank = {name for name, kind in KINDS.items() if kind.sender == "rank"}
    by_launcher = {name for name, kind in KINDS.items() if kind.sender == "launcher"}
    assert told_in("train") <= by_rank
    assert told_in("launch") <= by_launcher
    assert told_in("launch") | {"connection ended", "connection restored"} == by_launcher


def test_every_field_is_of_some_kind() -> None:
    names = {name for kind in KINDS.values() for name in (*kind.required, *kind.optional)}
    assert names == set(FIELDS)


def test_a_rank_ended_is_the_same_in_memory_and_in_the_file(tmp_path: Path) -> None:
    stack = {"state": "S", "stack": ['File "a.py", line 3 in f']}
    message = {"event": "rank ended", "rank": 1, "code": None, "signal": 9, "time": 5.0,
               "peak_bytes": 7, "seen": stack, "memory": {"kills": 1, "kernel": ["x"]}}  # fmt: skip
    event = Event.from_message("n2", message)
    assert (event.kind, event.where, event.time) == ("rank ended", "rank 1 on n2", 5.0)
    assert event.recorded_fields is not None
    directory = RunDirectory(tmp_path / "run")
    line = directory.event(event.kind, event.host, event.rank, **event.recorded_fields)
    directory.close()
    (read,) = read_events(read_records(tmp_path / "run" / EVENTS))
    assert (read,) == read_events([line])
    assert read.fields == {**event.recorded_fields} == {
        "code": None, "signal": 9, "peak_bytes": 7, "seen": stack,
        "memory": {"kills": 1, "kernel": ["x"]},
    }  # fmt: skip
    assert (read.host, read.rank) == ("n2", 1)


def test_a_traceback_stands_in_the_result_alone() -> None:
    data = {"kind": "exception", "type": "E", "message": "m", "traceback": "t", "time": 3.0}
    event = Event.from_message("n1", {"event": "said", "rank": 0, "data": data})
    assert event["traceback"] == "t"
    assert event.recorded_fields == {"type": "E", "message": "m"}


def test_what_a_program_tells_of_itself_is_kept() -> None:
    data = {"kind": "event", "event": "halfway", "share": 0.5, "host": "x", "rank": 7, "time": 1}
    event = Event.from_message("n1", {"event": "said", "rank": 0, "data": data})
    assert (event.kind, event.where) == ("halfway", "rank 0 on n1")
    assert event.recorded_fields == {"share": 0.5}


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ({"event": "rank ended", "code": "x", "signal": True, "memory": 5, "other": 1}, {}),
        ({"event": "rank ended", "code": 3, "seen": {"state": "S"}}, {"code": 3}),
        ({"event": "hang", "text": "t", "host": 5, "rank": "1", "time": "now"}, {"text": "t"}),
    ],
)
def test_fields_of_a_foreign_file_that_are_wrong_count_as_absent(
    line: dict[str, Any], kept: dict[str, Any]
) -> None:
    event = Event.read(json.loads(json.dumps(line)))
    assert event is not None
    assert event.fields == kept
    assert (event.host, event.rank, event.time) == ("", None, 0.0)


def test_paths_of_shipped_copies_are_the_users_own() -> None:
    copied = Event("copied", "n2", fields={"copy": "/tmp/c/code", "home": "/home/me/p"})
    root = Event("copied", "n2", fields={"copy": "/", "home": "/x"})
    known = shipped_copies([copied, root, Event("copied", "n1")])
    assert restore_local_paths(known, "n2", "/tmp/c/code/train.py") == "/home/me/p/train.py"
    assert restore_local_paths(known, "n1", "/tmp/c/code/train.py") == "/tmp/c/code/train.py"


def test_errors_in_gathered_data_files_name_the_users_own_files() -> None:
    """Data files travel in a folder of links, which nobody but Paceline knows."""
    outward = {"chat": "/home/me/chat", "chat.jsonl": "/home/me/data/chat.jsonl"}
    tree = Tree(Path("/tmp/paceline-data-1"), [], outward=outward)
    known = [("n2", copy, source) for copy, source in tree.sources("/run/job/input0")]
    text = "/run/job/input0/chat.jsonl line 6, /run/job/input0/chat, /run/job/input0/x"
    assert restore_local_paths(known, "n2", text) == (
        "/home/me/data/chat.jsonl line 6, /home/me/chat, /tmp/paceline-data-1/x"
    )
