"""A stranger between two ranks is noticed where the kernel does not keep it away."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import ranks

SCRIPT = Path(__file__).with_name("strangers.py")
STRANGER = "127.0.0.2"


def results(what: str, folder: Path) -> dict[int, dict[str, Any]]:
    ended = ranks.run_script([str(SCRIPT), what], folder, timeout=140)
    told = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]
    assert len(told) == 2, ended.err
    return {one["rank"]: one for one in told}


def test_a_stranger_in_the_middle_is_named_before_anything_is_exchanged(tmp_path: Path) -> None:
    told = results("between", tmp_path).values()
    assert not any("sum" in rank for rank in told)
    named = [rank for rank in told if rank["found"]]  # the other may only see this one's end
    assert named
    for rank in named:
        assert rank["found"] == [STRANGER]
        assert f"connection with {STRANGER}, which is not one of this job's hosts" in rank["error"]


def test_a_stranger_that_called_first_is_taken_for_no_rank(tmp_path: Path) -> None:
    told = results("first", tmp_path)
    assert told[0]["found"] == [STRANGER]
    assert f"connection with {STRANGER}, which is not one of this job's hosts" in told[0]["error"]
    assert not any("sum" in one for one in told.values())


def test_a_stranger_that_called_first_and_says_nothing_is_hung_up_on(tmp_path: Path) -> None:
    told = results("silent", tmp_path)
    assert [told[rank].get("sum") for rank in (0, 1)] == [[2.0, 2.0]] * 2


def test_a_store_that_rank_0_holds_by_itself_serves_no_stranger(tmp_path: Path) -> None:
    told = results("own store", tmp_path)
    assert [told[rank]["found"] for rank in (0, 1)] == [[STRANGER], []]
    assert all(one["joined"] for one in told.values())
