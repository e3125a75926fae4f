"""Connections of our own among ranks."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import ranks

from paceline.explain import stacks
from paceline.spec.failure import SECONDARY_ERROR, unreachable_peer
from paceline.train.reduce import direct

SCRIPT = str(Path(__file__).with_name("directly.py"))


def found(folder: Path, what: str, *sizes: int) -> list[dict[str, Any]]:
    """What the ranks have noted, of all sizes of the world."""
    ranks.run_ok(1, [SCRIPT, str(folder), what, ",".join(map(str, sizes))], folder)
    return [json.loads(one.read_text()) for one in sorted(folder.rglob("*.json"))]


def test_they_carry_what_gloo_would(tmp_path: Path) -> None:
    found(tmp_path, "alike", 2, 3, 4)


def test_they_carry_what_is_large_or_shorter(tmp_path: Path) -> None:
    found(tmp_path, "large", 2, 3)


@pytest.mark.parametrize("what", ["apart", "named", "let_go", "out_of_reach", "strangers"])
def test_a_group_has_its_own_or_none(tmp_path: Path, what: str) -> None:
    found(tmp_path, what, 3)


def test_a_replaced_model_keeps_no_group(tmp_path: Path) -> None:
    found(tmp_path, "replaced", 3)


def test_who_waits_is_freed(tmp_path: Path) -> None:
    waiting = found(tmp_path, "freed", 2, 3)
    assert len(waiting) == 3
    for one in waiting:
        assert all("WaitCancelled: its connections were cut" in said for said in one["said"])


@pytest.mark.parametrize(("what", "says"), [("lost", "by peer"), ("late", "500ms for rank 0")])
def test_it_is_said_as_gloo_does(tmp_path: Path, what: str, says: str) -> None:
    for one in found(tmp_path, what, 2, 3):
        assert says in one["said"][0]


def test_ranks_that_differ_are_told(tmp_path: Path) -> None:
    for one in found(tmp_path, "unlike", 2):
        assert "bytes in operation" in one["said"][0]


def test_who_waits_there_is_seen_to_wait() -> None:
    stack = [
        'File "/x/site-packages/paceline/train/reduce/direct.py", line 180 in _sleep',
        'File "/x/site-packages/paceline/train/reduce/small_messages.py", line 60 in _all_gather',
        'File "/x/site-packages/paceline/train/comms.py", line 206 in barrier',
        'File "/home/me/train.py", line 40 in <module>',
    ]
    stand = stacks.RankStack("n1", 0, "S", stacks.parse_frames(stack))
    assert stacks.is_waiting(stand)
    assert stacks.describe_position(stand) == "barrier (train.py, line 40)"


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ECONNABORTED])
def test_an_end_is_known_for_what_it_is_and_whose_it_is(number: int) -> None:
    """The socket itself does not know its other end any more."""

    class Silent:
        def sendmsg(self, _: object) -> int:
            raise OSError(number, os.strerror(number))

    room = memoryview(bytearray(4))
    one = direct._Transfer(2, Silent(), "[10.0.0.2]:4567", 1, room, room)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError) as caught:
        one.move()
    assert SECONDARY_ERROR.search(str(caught.value))
    assert unreachable_peer(str(caught.value)) == (
        "" if number == errno.ECONNABORTED else "10.0.0.2"
    )
