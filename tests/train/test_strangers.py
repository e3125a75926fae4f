"""Tests that a foreign process between two ranks is detected if the kernel does not block it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import local_ranks

SCRIPT = Path(__file__).with_name("stranger_worlds.py")
INTRUDER = "127.0.0.2"


def results(scenario: str, folder: Path) -> dict[int, dict[str, Any]]:
    ended = local_ranks.run_script([str(SCRIPT), scenario], folder, timeout=140)
    reports = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]
    assert len(reports) == 2, ended.err
    return {report["rank"]: report for report in reports}


def test_names_intruder_between_ranks_before_exchange(tmp_path: Path) -> None:
    reports = results("between", tmp_path).values()
    assert not any("sum" in rank for rank in reports)
    reporting_ranks = [
        rank for rank in reports if rank["found"]
    ]  # the other may only see that this one ended
    assert reporting_ranks
    for rank in reporting_ranks:
        assert rank["found"] == [INTRUDER]
        assert f"connection with {INTRUDER}, which is not one of this job's hosts" in rank["error"]


def test_rejects_intruder_that_connects_first(tmp_path: Path) -> None:
    reports = results("first", tmp_path)
    assert reports[0]["found"] == [INTRUDER]
    assert (
        f"connection with {INTRUDER}, which is not one of this job's hosts" in reports[0]["error"]
    )
    assert not any("sum" in report for report in reports.values())


def test_drops_silent_intruder_that_connects_first(tmp_path: Path) -> None:
    reports = results("silent", tmp_path)
    assert [reports[rank].get("sum") for rank in (0, 1)] == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("scenario", ["own store", "called store"])
def test_store_of_rank_0_rejects_intruder(scenario: str, tmp_path: Path) -> None:
    reports = results(scenario, tmp_path)
    assert [reports[rank]["found"] for rank in (0, 1)] == [[INTRUDER], []]
    assert all(report["joined"] for report in reports.values())
