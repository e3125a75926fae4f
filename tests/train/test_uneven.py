"""Unequal shares change who computes what, and nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import ranks

SCRIPT = str(Path(__file__).with_name("uneven.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uneven")
    ranks.run_ok(1, [SCRIPT, str(folder)], folder)
    return folder


@pytest.fixture(scope="module")
def worlds(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """What every rank of each world found, by the number of its ranks."""
    return {
        size: [json.loads((folder / f"{size}/{rank}.json").read_text()) for rank in range(size)]
        for size in (1, 2, 3, 4)
    }


def apart(one: list[float], other: list[float]) -> float:
    return float(np.abs(np.array(one) - np.array(other)).max())


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("way", ["trained", "accumulated", "sharded", "partly used"])
def test_weights_of_hosts_change_no_result(worlds: Any, way: str, size: int) -> None:
    for found in worlds[size][: 1 if way == "sharded" else size]:  # only rank 0 has whole weights
        assert apart(found[way], worlds[1][0][way]) < 1e-10


def test_weights_of_hosts_change_no_result_of_two_models(worlds: Any) -> None:
    for found in worlds[2]:
        assert apart(found["two models"], worlds[1][0]["two models"]) < 1e-10


def test_a_limit_of_one_host_changes_no_result(worlds: Any) -> None:
    for found in worlds[2]:
        assert apart(found["by host"], worlds[1][0]["trained"]) < 1e-10


def test_each_rank_computes_at_once_what_fits(worlds: Any) -> None:
    """Real memory: on rank 1 there is room for a few samples of its share of 12."""
    roomy, tight = (found["fitted"] for found in worlds[2])
    assert max(roomy["counts"]) == 12
    most = max(tight["counts"])
    assert most < 12
    assert sum(tight["counts"] + roomy["counts"]) == 2 * 43
    assert roomy["said"] == (f"samples of a share that fit at once: n1 all 12; n2 {most} of 12")
    assert apart(roomy["end"], worlds[1][0]["fitted"]["end"]) < 1e-10


@pytest.mark.parametrize("way", ["auto", "twenty", "dropped", "even"])
def test_shares_by_speed_change_no_result(worlds: Any, way: str) -> None:
    for found in worlds[2]:
        assert apart(found[way]["end"], worlds[1][0]["auto"]["end"][:]) < 1e-10


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_that_are_three_times_as_slow_get_less(worlds: Any, size: int) -> None:
    fast, *slow = (found["auto"]["shares"][-1] for found in worlds[size])
    assert fast > 1.5 * max(slow)  # other processes make each of them slower now and then
    assert fast + sum(slow) == 32
    assert "shares of the global batch: n1 " in worlds[size][0]["said"]


@pytest.mark.parametrize("size", [3, 4])
def test_shares_by_speed_of_more_ranks_change_no_result(worlds: Any, size: int) -> None:
    for found in worlds[size]:
        assert apart(found["auto"]["end"], worlds[1][0]["auto"]["end"]) < 1e-10


def test_a_rank_that_is_twenty_times_as_slow_gets_hardly_anything(worlds: Any) -> None:
    assert worlds[2][1]["twenty"]["shares"][-1] <= 3


def test_a_rank_that_only_costs_time_is_dropped_where_allowed(worlds: Any) -> None:
    """Its loop gets no batch any more, and the others, who call the model twice in each step, do
    not wait for it."""
    fast, slow = (found["dropped"]["shares"] for found in worlds[2])
    assert fast[-1] == 32
    assert len(slow) < len(fast)
    assert "rank 1 on n2 makes the job slower" in worlds[2][0]["said"]


def test_even_shares_stay_and_better_ones_are_told_once(worlds: Any) -> None:
    assert set(worlds[2][1]["even"]["shares"]) == {16, 4}
    assert worlds[2][0]["said"].count('balance="auto"') == 1


def test_what_cannot_be_is_refused(worlds: Any) -> None:
    for found in worlds[2]:
        assert [text.partition(": ")[2] or text for text in found["refused"]] == [
            "no host of this job is called n9",
            "there is no weight for n2",
            "--global-batch 1 cannot be shared unevenly among 2 processes",
            "--drop-slow needs --balance auto",
            "balance='quick' is not valid",
            "--balance auto cannot be combined with --shard",
            "a limit for each host cannot be combined with a sharded model",
            "no host of this job is called n9",
            "a host computes at least 1 sample at once",
        ]


def test_different_devices_may_round_differently_and_no_more(folder: Path) -> None:
    first, second = (json.loads((folder / f"mixed-{rank}.json").read_text()) for rank in (0, 1))
    assert first["mixed"]
    assert first["1e-09"] == second["1e-09"]
    for found in (first, second):
        assert "weight differs by 0.5 of its size on rank 1" in found["0.5"]
        assert "different kinds of devices" in found["shard"]


def test_a_resumed_run_goes_on_with_its_shares_to_the_same_bits(folder: Path) -> None:
    for rank in (0, 1):
        found = json.loads((folder / f"resumed-{rank}.json").read_text())
        whole, rest = found["whole"], found["rest"]
        assert rest["steps"] == 4
        assert rest["shares"] == whole["shares"]
        assert rest["end"] == whole["end"]
        assert (rest["shares"][0] > 16) == (rank == 0)
