"""Tests that unequal shares change only which rank computes what, not the results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import local_ranks

SCRIPT = str(Path(__file__).with_name("uneven_worlds.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uneven")
    local_ranks.run_ok(1, [SCRIPT, str(folder)], folder)
    return folder


@pytest.fixture(scope="module")
def worlds(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Returns what every rank of each world recorded, by world size."""
    return {
        size: [json.loads((folder / f"{size}/{rank}.json").read_text()) for rank in range(size)]
        for size in (1, 2, 3, 4)
    }


def max_difference(actual: list[float], expected: list[float]) -> float:
    return float(np.abs(np.array(actual) - np.array(expected)).max())


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("variant", ["trained", "accumulated", "sharded", "partly used"])
def test_host_weights_do_not_change_result(worlds: Any, variant: str, size: int) -> None:
    for result in worlds[size][
        : 1 if variant == "sharded" else size
    ]:  # only rank 0 has whole weights
        assert max_difference(result[variant], worlds[1][0][variant]) < 1e-10


def test_host_weights_do_not_change_result_of_two_models(worlds: Any) -> None:
    for result in worlds[2]:
        assert max_difference(result["two models"], worlds[1][0]["two models"]) < 1e-10


def test_sample_limit_per_host_does_not_change_result(worlds: Any) -> None:
    for result in worlds[2]:
        assert max_difference(result["by host"], worlds[1][0]["trained"]) < 1e-10


def test_ranks_split_shares_to_fit_memory(worlds: Any) -> None:
    """With real memory: rank 1 has room for only some samples of its share of 12."""
    roomy, tight = (result["fitted"] for result in worlds[2])
    assert max(roomy["counts"]) == 12
    max_count = max(tight["counts"])
    assert max_count < 12
    assert sum(tight["counts"] + roomy["counts"]) == 2 * 43
    assert roomy["said"] == (
        f"samples of a share that fit at once: n1 all 12; n2 {max_count} of 12"
    )
    assert max_difference(roomy["end"], worlds[1][0]["fitted"]["end"]) < 1e-10


@pytest.mark.parametrize("variant", ["auto", "twenty", "dropped", "even"])
def test_speed_based_shares_do_not_change_result(worlds: Any, variant: str) -> None:
    for result in worlds[2]:
        assert max_difference(result[variant]["end"], worlds[1][0]["auto"]["end"][:]) < 1e-10


@pytest.mark.parametrize("size", [2, 3, 4])
def test_slow_ranks_get_smaller_shares(worlds: Any, size: int) -> None:
    fast, *slow = (result["auto"]["shares"][-1] for result in worlds[size])
    assert fast > 1.5 * max(slow)  # other processes slow each rank down now and then
    assert fast + sum(slow) == 32
    assert "shares of the global batch: n1 " in worlds[size][0]["said"]


@pytest.mark.parametrize("size", [3, 4])
def test_speed_based_shares_match_on_3_and_4_ranks(worlds: Any, size: int) -> None:
    for result in worlds[size]:
        assert max_difference(result["auto"]["end"], worlds[1][0]["auto"]["end"]) < 1e-10


def test_very_slow_rank_gets_minimal_share(worlds: Any) -> None:
    # on a busy machine, the other rank is slow at times, too, and the share is larger for a while
    assert min(worlds[2][1]["twenty"]["shares"]) <= 3


def test_drop_slow_removes_rank_that_costs_time(worlds: Any) -> None:
    """The slow rank's loop gets no more batches.

    The others, which call the model twice in each step, do not wait for it.
    """
    fast, slow = (result["dropped"]["shares"] for result in worlds[2])
    assert fast[-1] == 32
    assert len(slow) < len(fast)
    assert "rank 1 on n2 makes the job slower" in worlds[2][0]["said"]


def test_even_shares_suggest_auto_balance_once(worlds: Any) -> None:
    assert set(worlds[2][1]["even"]["shares"]) == {16, 4}
    assert worlds[2][0]["said"].count('balance="auto"') == 1


def test_rejects_invalid_options(worlds: Any) -> None:
    for result in worlds[2]:
        assert [text.partition(": ")[2] or text for text in result["refused"]] == [
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


def test_mixed_devices_may_differ_only_by_rounding(folder: Path) -> None:
    first, second = (json.loads((folder / f"mixed-{rank}.json").read_text()) for rank in (0, 1))
    assert first["mixed"]
    assert first["1e-09"] == second["1e-09"]
    for result in (first, second):
        assert "weight differs by 0.5 of its size on rank 1" in result["0.5"]
        assert "different kinds of devices" in result["shard"]


def test_resumed_run_keeps_shares_and_is_bit_exact(folder: Path) -> None:
    for rank in (0, 1):
        result = json.loads((folder / f"resumed-{rank}.json").read_text())
        uninterrupted, resumed = result["whole"], result["rest"]
        assert resumed["steps"] == 4
        assert resumed["shares"] == uninterrupted["shares"]
        assert resumed["end"] == uninterrupted["end"]
        assert (resumed["shares"][0] > 16) == (rank == 0)
