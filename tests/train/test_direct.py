"""Tests Paceline's direct connections between ranks."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import local_ranks

from paceline.explain import stacks
from paceline.spec.failure import SECONDARY_ERROR, unreachable_peer
from paceline.train.reduce import direct

SCRIPT = str(Path(__file__).with_name("direct_connections.py"))


def run_scenario(folder: Path, scenario: str, *sizes: int) -> list[dict[str, Any]]:
    """Runs a check in worlds of several sizes; returns what their ranks recorded."""
    local_ranks.run_ok(1, [SCRIPT, str(folder), scenario, ",".join(map(str, sizes))], folder)
    return [json.loads(one.read_text()) for one in sorted(folder.rglob("*.json"))]


def test_results_match_gloo(tmp_path: Path) -> None:
    run_scenario(tmp_path, "alike", 2, 3, 4)


def test_large_and_short_messages(tmp_path: Path) -> None:
    run_scenario(tmp_path, "large", 2, 3)


@pytest.mark.parametrize("scenario", ["apart", "named", "let_go", "out_of_reach", "strangers"])
def test_group_has_separate_connections_or_none(tmp_path: Path, scenario: str) -> None:
    run_scenario(tmp_path, scenario, 3)


def test_replaced_model_releases_group(tmp_path: Path) -> None:
    run_scenario(tmp_path, "replaced", 3)


def test_cut_connections_free_waiting_ranks(tmp_path: Path) -> None:
    outcomes = run_scenario(tmp_path, "freed", 2, 3)
    assert len(outcomes) == 3
    for one in outcomes:
        assert all("WaitCancelled: its connections were cut" in text for text in one["said"])


@pytest.mark.parametrize(
    ("scenario", "message"), [("lost", "by peer"), ("late", "500ms for rank 0")]
)
def test_error_messages_match_gloo(tmp_path: Path, scenario: str, message: str) -> None:
    for one in run_scenario(tmp_path, scenario, 2, 3):
        assert message in one["said"][0]


def test_mismatched_operations_are_reported(tmp_path: Path) -> None:
    for one in run_scenario(tmp_path, "unlike", 2):
        assert "bytes in operation" in one["said"][0]


def test_stack_in_direct_barrier_counts_as_waiting() -> None:
    stack = [
        'File "/x/site-packages/paceline/train/reduce/direct.py", line 180 in _sleep',
        'File "/x/site-packages/paceline/train/reduce/small_messages.py", line 60 in _all_gather',
        'File "/x/site-packages/paceline/train/comms.py", line 206 in barrier',
        'File "/home/me/train.py", line 40 in <module>',
    ]
    rank_stack = stacks.RankStack("n1", 0, "S", stacks.parse_frames(stack))
    assert stacks.is_waiting(rank_stack)
    assert stacks.describe_position(rank_stack) == "barrier (train.py, line 40)"


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ECONNABORTED])
def test_socket_error_is_secondary_and_names_peer(number: int) -> None:
    """The error names the peer, although the socket does not know its peer's address any more."""

    class FailingSocket:
        def sendmsg(self, _: object) -> int:
            raise OSError(number, os.strerror(number))

    buffer = memoryview(bytearray(4))
    one = direct._Transfer(2, FailingSocket(), "[10.0.0.2]:4567", 1, buffer, buffer)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError) as caught:
        one.move()
    assert SECONDARY_ERROR.search(str(caught.value))
    assert unreachable_peer(str(caught.value)) == (
        "" if number == errno.ECONNABORTED else "10.0.0.2"
    )
