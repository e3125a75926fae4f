"""Tests a GAN (two models, two optimizers, averaged weights) on any number of ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import local_ranks

SCRIPT = str(Path(__file__).with_name("gan_worlds.py"))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs all scenarios in one forked process; returns their results."""
    folder = tmp_path_factory.mktemp("several")
    local_ranks.run_ok(1, [SCRIPT, str(folder)], folder)
    return dict(json.loads((folder / "found.json").read_text()))


def test_results_do_not_depend_on_world_size(results: Any) -> None:
    assert max(results["worlds"].values()) < 1e-10


def test_kill_between_updates_resumes_bit_exact(results: Any) -> None:
    assert results["resumed"] == {"at 1": 0.0, "at 2": 0.0}


def test_microbatches_and_sharding_match_reference(results: Any) -> None:
    assert max(results["together"].values()) < 1e-10


def test_shards_of_several_models_resume(results: Any) -> None:
    assert results["moved"] < 1e-10


def test_buffers_may_change_between_passes(results: Any) -> None:
    assert len(results["with_statistics"]) == 2


def test_gan_example_of_page(results: Any) -> None:
    assert results["page"] == 48


def test_metrics_are_recorded_per_model(results: Any) -> None:
    single_rank, two_ranks = (
        [record for record in results["records"][size] if record["split"] == "train"]
        for size in ("1", "2")
    )
    assert [record["step"] for record in single_rank] == [3, 5, 6, 9, 10]
    for record, other_record in zip(single_rank, two_ranks, strict=True):
        for name in ("generator", "discriminator"):
            assert record[f"{name}_loss"] == pytest.approx(other_record[f"{name}_loss"], rel=1e-12)
    norms = [
        [record for record in results["records"][size] if record["split"] == "norms"]
        for size in ("1", "2")
    ]
    assert [record["step"] for record in norms[0]] == [3, 6, 9]
    for record, other_record in zip(*norms, strict=True):
        for name in ("generator_grad_norm", "discriminator_update_ratio"):
            assert record[name] == pytest.approx(other_record[name], rel=1e-9)
    usage = [record for record in results["records"]["2"] if record["split"] == "usage"]
    assert all(record["memory_gib_max"] >= record["memory_gib"] for record in usage)
    assert len(usage) == 5
    assert single_rank[0]["generator_lr"] > single_rank[-1]["generator_lr"]
    assert single_rank[0]["discriminator_lr"] == single_rank[-1]["discriminator_lr"]
