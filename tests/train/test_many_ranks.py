"""Tests that results do not depend on the world size."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import local_ranks

SCRIPT = str(Path(__file__).with_name("world_size_checks.py"))


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """Returns the results of every rank in worlds of 1, 2 and 3 ranks."""
    folder = tmp_path_factory.mktemp("worlds")
    local_ranks.run_ok(1, [SCRIPT, str(folder)], folder)
    return {
        size: [json.loads((folder / f"{size}/{rank}.json").read_text()) for rank in range(size)]
        for size in (1, 2, 3)
    }


@pytest.mark.parametrize("variant", ["trained", "accumulated", "sharded"])
def test_parameters_do_not_depend_on_world_size(worlds: Any, variant: str) -> None:
    check_equal(worlds, variant, worlds[1][0]["trained"])


def test_parameters_may_be_unused(worlds: Any) -> None:
    check_equal(worlds, "partly used", worlds[1][0]["partly used"])


@pytest.mark.parametrize("variant", ["clipped", "sharded and accumulated"])
def test_clipping_uses_full_gradient(worlds: Any, variant: str) -> None:
    check_equal(worlds, variant, worlds[1][0]["clipped"])
    assert worlds[1][0]["clipped"] != worlds[1][0]["trained"]


def check_equal(worlds: Any, variant: str, reference: list[float]) -> None:
    for results in worlds.values():
        for entry in results:
            if entry[variant]:  # of a sharded model, only rank 0 gets the whole state
                assert np.abs(np.array(entry[variant]) - np.array(reference)).max() < 1e-12
        assert results[0][variant]


def test_gradient_exchange_is_bit_identical_to_ddp(worlds: Any) -> None:
    for size in (2, 3):
        for results in (entry["exchanged"] for entry in worlds[size]):
            assert results == worlds[size][0]["exchanged"]
            assert results["hook"] == results["by ddp"]
            assert results["laid out, hook"] == results["laid out"]
            assert results["unused, hook"] == results["unused"]
            assert results["as made"] == results["by ddp"]
            assert results["unused, as made"] == results["unused"]
            # For three and more ranks, the order of additions matters.
            assert np.allclose(results["laid out"], results["by ddp"], rtol=0, atol=1e-7)
            assert size > 2 or results["laid out"] == results["unused"] == results["by ddp"]


def test_gradients_lie_in_the_same_places_in_each_step(worlds: Any) -> None:
    """Rounding depends on the place. Gradients arrive in the order of the parameters."""
    for size in (2, 3):
        for method, places in worlds[size][0]["places"].items():
            assert places[:3] == [places[0]] * 3, (size, method)
            assert places[3:] == [places[3]] * 3, (size, method)
            assert [len(places[0]), len(places[3])] == [8, 12]
            assert places[0] == sorted(places[0], reverse=True)


def test_small_model_gradients_are_averaged_in_any_layout(worlds: Any) -> None:
    """Three ranks average the gradients directly, in the order of the ranks."""
    for entry in worlds[3]:
        results = entry["exchanged directly"]
        assert results == worlds[3][0]["exchanged directly"]
        assert all(weights == results["by ddp"] for weights in results.values())
        assert np.allclose(results["by ddp"], entry["exchanged"]["by ddp"], rtol=0, atol=1e-7)


def test_metrics_count_samples_once(worlds: Any) -> None:
    expected = worlds[1][0]["odd"]
    assert [count for count, _ in expected] == [1, 2, 3, 7, 11]
    for results in worlds.values():
        for entry in results:
            assert [count for count, _ in entry["odd"]] == [1, 2, 3, 7, 11]
            means = [mean for _, mean in entry["odd"]]
            assert np.allclose(means, [mean for _, mean in expected], rtol=0, atol=1e-12)


def test_padding_samples_are_not_counted(worlds: Any) -> None:
    assert all(entry["counted"] == [3, 1.0] for results in worlds.values() for entry in results)


def test_replica_check_covers_buffers(worlds: Any) -> None:
    for size in (2, 3):
        results = [entry["in step"] for entry in worlds[size]]
        assert all(entry["statistics"] == results[0]["statistics"] for entry in results)
        for entry in results:
            assert "first differing tensor: table" in entry["buffer"]
            assert "first differing tensor: table" in entry["beside"]


def test_replica_check_covers_sharded_models(worlds: Any) -> None:
    for entry in worlds[3]:
        assert "first differing tensor: weight; rank 1 on" in entry["in step"]["replica"]


@pytest.mark.parametrize("phase", ["held up", "held up before"])
def test_names_slow_rank(worlds: Any, phase: str) -> None:
    """It sleeps, and no rank communicates in that time."""
    for size in (2, 3):
        first, second = worlds[size][0][phase]
        shares = {
            name: int(part)
            for name, part in re.findall(r"(slower ranks|communication) (\d+)%", first)
        }
        assert shares["slower ranks"] > 50
        assert shares["communication"] < 30
        assert second.startswith("slowest: rank 1 on ")


def test_networks_with_buffers_train(worlds: Any) -> None:
    assert all(entry["with buffers"] == [1] for results in worlds.values() for entry in results)


def test_given_sample_order_is_split_among_ranks(worlds: Any) -> None:
    reference = worlds[1][0]["order"]
    assert reference[0] == [8] * 9 + [7] * 9
    assert sorted(reference[1][:9]) == sorted(reference[1][9:]) == list(range(9))
    for results in worlds.values():
        for variant in (0, 1):
            combined = [number for entry in results for number in entry["order"][variant]]
            assert sorted(combined) == sorted(reference[variant])


def test_rejects_different_sample_orders(worlds: Any) -> None:
    assert worlds[1][0]["orders"] == ""
    assert all("the order of the samples" in entry["orders"] for entry in worlds[2])


def test_rejects_different_splits(worlds: Any) -> None:
    assert worlds[1][0]["split"] == ""
    for entry in worlds[3]:
        assert "the data set must be the same on every rank" in entry["split"]
        assert "split the data before session.prepare" in entry["split"]


def test_rejects_different_data_in_evaluation(worlds: Any) -> None:
    assert worlds[1][0]["evaluation split"] == ""
    for entry in worlds[3]:
        assert "the data set of session.shard must be the same" in entry["evaluation split"]


def test_ranks_get_rows_of_peers(worlds: Any) -> None:
    assert worlds[3][1]["sums"] == [0, 1, 2]


def test_ranks_report_disagreement(worlds: Any) -> None:
    assert all(entry["agree"] == "" for entry in worlds[2])
    assert all("rank 2 on" in entry["agree"] for entry in worlds[3])


def test_error_of_single_rank_is_raised_on_peers(worlds: Any) -> None:
    for size, results in worlds.items():
        for entry in results:
            assert entry["together"].startswith("DataError: this rank cannot read it")
            assert f"(rank {size - 1} on" in entry["together"]


def test_file_is_made_once_on_shared_disk(worlds: Any) -> None:
    assert all(entry["once"] == 1 for results in worlds.values() for entry in results)


def test_rejects_more_ranks_than_samples(worlds: Any) -> None:
    assert all("1 sample, 3 ranks" in entry["few"] for entry in worlds[3])


def test_names_diverged_rank_and_tensor(worlds: Any) -> None:
    for entry in worlds[3]:
        assert "first differing tensor: bias; rank 1 on" in entry["diverged"]
    for entry in worlds[2]:
        assert "first differing tensor: bias; no majority" in entry["diverged"]
