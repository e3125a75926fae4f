"""The same numbers at any world size."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import ranks

SCRIPT = str(Path(__file__).with_name("many.py"))


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What every rank of worlds of 1, 2 and 3 found."""
    folder = tmp_path_factory.mktemp("worlds")
    ranks.run_ok(1, [SCRIPT, str(folder)], folder)
    return {
        size: [json.loads((folder / f"{size}/{rank}.json").read_text()) for rank in range(size)]
        for size in (1, 2, 3)
    }


@pytest.mark.parametrize("way", ["trained", "accumulated", "sharded"])
def test_parameters_do_not_depend_on_the_world(worlds: Any, way: str) -> None:
    check_equal(worlds, way, worlds[1][0]["trained"])


def test_parameters_may_be_unused(worlds: Any) -> None:
    check_equal(worlds, "partly used", worlds[1][0]["partly used"])


@pytest.mark.parametrize("way", ["clipped", "sharded and accumulated"])
def test_clipping_sees_the_whole_gradient(worlds: Any, way: str) -> None:
    check_equal(worlds, way, worlds[1][0]["clipped"])
    assert worlds[1][0]["clipped"] != worlds[1][0]["trained"]


def check_equal(worlds: Any, way: str, alone: list[float]) -> None:
    for found in worlds.values():
        for one in found:
            if one[way]:  # of a sharded model only rank 0 gets the whole state
                assert np.abs(np.array(one[way]) - np.array(alone)).max() < 1e-12
        assert found[0][way]


def test_an_exchange_of_ours_gives_the_bits_of_ddp(worlds: Any) -> None:
    for size in (2, 3):
        for found in (one["exchanged"] for one in worlds[size]):
            assert found == worlds[size][0]["exchanged"]
            assert found["hook"] == found["by ddp"]
            assert found["laid out, hook"] == found["laid out"]
            assert found["unused, hook"] == found["unused"]
            assert found["as made"] == found["by ddp"]
            assert found["unused, as made"] == found["unused"]
            # The order of additions matters from three ranks on.
            assert np.allclose(found["laid out"], found["by ddp"], rtol=0, atol=1e-7)
            assert size > 2 or found["laid out"] == found["unused"] == found["by ddp"]


def test_a_little_models_gradients_are_averaged_wherever_they_lie(worlds: Any) -> None:
    """Three ranks average them directly, in rank order."""
    for one in worlds[3]:
        found = one["exchanged directly"]
        assert found == worlds[3][0]["exchanged directly"]
        assert all(weights == found["by ddp"] for weights in found.values())
        assert np.allclose(found["by ddp"], one["exchanged"]["by ddp"], rtol=0, atol=1e-7)


def test_metrics_count_every_sample_once(worlds: Any) -> None:
    expected = worlds[1][0]["odd"]
    assert [count for count, _ in expected] == [1, 2, 3, 7, 11]
    for found in worlds.values():
        for one in found:
            assert [count for count, _ in one["odd"]] == [1, 2, 3, 7, 11]
            means = [mean for _, mean in one["odd"]]
            assert np.allclose(means, [mean for _, mean in expected], rtol=0, atol=1e-12)


def test_stand_ins_are_left_out_of_any_count(worlds: Any) -> None:
    assert all(one["counted"] == [3, 1.0] for found in worlds.values() for one in found)


def test_buffers_are_in_step(worlds: Any) -> None:
    for size in (2, 3):
        found = [one["in step"] for one in worlds[size]]
        assert all(one["statistics"] == found[0]["statistics"] for one in found)
        for one in found:
            assert "first differing tensor: table" in one["buffer"]
            assert "first differing tensor: table" in one["beside"]


def test_sharded_models_are_in_step(worlds: Any) -> None:
    for one in worlds[3]:
        assert "first differing tensor: weight; rank 1 on" in one["in step"]["replica"]


@pytest.mark.parametrize("where", ["held up", "held up before"])
def test_the_slow_rank_is_named(worlds: Any, where: str) -> None:
    """It sleeps: nobody communicates in that time."""
    for size in (2, 3):
        first, second = worlds[size][0][where]
        shares = {
            name: int(part)
            for name, part in re.findall(r"(slower ranks|communication) (\d+)%", first)
        }
        assert shares["slower ranks"] > 50
        assert shares["communication"] < 30
        assert second.startswith("slowest: rank 1 on ")


def test_networks_with_buffers_train(worlds: Any) -> None:
    assert all(one["with buffers"] == [1] for found in worlds.values() for one in found)


def test_a_stated_order_is_shared_among_the_ranks(worlds: Any) -> None:
    alone = worlds[1][0]["order"]
    assert alone[0] == [8] * 9 + [7] * 9
    assert sorted(alone[1][:9]) == sorted(alone[1][9:]) == list(range(9))
    for found in worlds.values():
        for way in (0, 1):
            together = [number for one in found for number in one["order"][way]]
            assert sorted(together) == sorted(alone[way])


def test_orders_that_differ_are_refused(worlds: Any) -> None:
    assert worlds[1][0]["orders"] == ""
    assert all("the order of the samples" in one["orders"] for one in worlds[2])


def test_every_rank_gets_every_row(worlds: Any) -> None:
    assert worlds[3][1]["sums"] == [0, 1, 2]


def test_disagreement_is_said_on_every_rank(worlds: Any) -> None:
    assert all(one["agree"] == "" for one in worlds[2])
    assert all("rank 2 on" in one["agree"] for one in worlds[3])


def test_one_rank_fails_all_know(worlds: Any) -> None:
    for size, found in worlds.items():
        for one in found:
            assert one["together"].startswith("DataError: this rank cannot read it")
            assert f"(rank {size - 1} on" in one["together"]


def test_made_once_on_a_shared_disk(worlds: Any) -> None:
    assert all(one["once"] == 1 for found in worlds.values() for one in found)


def test_more_ranks_than_samples(worlds: Any) -> None:
    assert all("1 sample, 3 ranks" in one["few"] for one in worlds[3])


def test_divergence_is_named(worlds: Any) -> None:
    for one in worlds[3]:
        assert "first differing tensor: bias; rank 1 on" in one["diverged"]
    for one in worlds[2]:
        assert "first differing tensor: bias; no majority" in one["diverged"]
