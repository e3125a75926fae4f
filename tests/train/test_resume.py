"""Tests that an interrupted and resumed training equals an uninterrupted one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import local_ranks

SCRIPT = str(Path(__file__).with_name("resume_worlds.py"))
SEED = "11"
SCENARIOS = (
    "at_other_worlds",
    "killed_and_resumed",
    "terminated_and_resumed",
    "through_worlds",
    "streams",
    "private_disks",
    "sharded",
    "shards",
    "shards_on_private_disks",
    "records",
    "other_choices",
    "killed_in_saves",
    "full_disk",
    "diverging",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs all scenarios in one forked process; returns their results."""
    folder = tmp_path_factory.mktemp("resume")
    ended = local_ranks.run_ok(1, [SCRIPT, str(folder), SEED, *SCENARIOS], folder)
    outcome = dict(json.loads((folder / "found.json").read_text()))
    return {**outcome, "err": ended[0].err}


def test_results_do_not_depend_on_world_size_or_epochs(results: Any) -> None:
    for difference, same_ids in results["at_other_worlds"].values():
        assert difference < 1e-10
        assert same_ids


def test_killed_run_resumes_bit_exact(results: Any) -> None:
    assert results["killed_and_resumed"] == [0.0] * 4


def test_terminated_run_saves_and_resumes_bit_exact(results: Any) -> None:
    outcome = results["terminated_and_resumed"]
    assert outcome["statuses"] == [143] * 4
    assert outcome["steps"][0] >= 6
    assert outcome["difference"] == 0.0
    assert outcome["ids"]


def test_resumes_at_changing_world_sizes(results: Any) -> None:
    outcome = results["through_worlds"]
    assert outcome["difference"] < 1e-10
    assert outcome["ids"]
    assert outcome["sizes"] == [1, 2, 4]


def test_shard_stream_resumes_at_any_world_size(results: Any) -> None:
    outcome = results["streams"]
    assert (outcome["shards"], outcome["ids"], outcome["once"], outcome["resumed"]) == (
        6,
        True,
        True,
        0.0,
    )
    assert outcome["worlds"] < 1e-10


def test_resumes_from_checkpoint_of_other_rank(results: Any) -> None:
    outcome = results["private_disks"]
    assert outcome["difference"] < 1e-10
    assert outcome["resumed"][0] in (5, 6)  # the last save may be incomplete


def test_sharded_and_replicated_checkpoints_are_compatible(results: Any) -> None:
    assert results["sharded"]["difference"] < 1e-10


PARTS = [f"{kind}/0000{rank}.safetensors" for kind in ("optimizer", "weights") for rank in (0, 1)]


def test_ranks_save_separate_shards(results: Any) -> None:
    outcome = results["shards"]
    assert set(PARTS) < set(outcome["files"])
    assert "weights.safetensors" not in outcome["files"]
    assert outcome["by torch"] == 0.0


def test_shards_resume_at_any_world_size(results: Any) -> None:
    outcome = results["shards"]
    assert outcome["same"] == 0.0
    assert outcome["more"] < 1e-10
    assert outcome["steps"] == [6, 6, 5]


def test_skips_checkpoint_with_damaged_shard(results: Any) -> None:
    assert results["shards"]["damaged"] == 0.0
    assert results["shards"]["warnings"] == 1


def test_shards_are_sent_without_shared_disk(results: Any) -> None:
    outcome = results["shards_on_private_disks"]
    assert "weights.safetensors" in outcome["private"]
    assert set(PARTS) < set(outcome["moved"])
    assert outcome["step"] == 12
    assert outcome["difference"] == 0.0


def test_steps_are_recorded_once(results: Any) -> None:
    killed, uninterrupted = results["records"]["killed"], results["records"]["whole"]
    assert [row[:3] for row in killed] == [row[:3] for row in uninterrupted]
    for actual, expected in zip(killed, uninterrupted, strict=True):
        assert actual[3] == pytest.approx(expected[3], rel=1e-12)


def test_resumes_from_path_or_step_or_starts_anew(results: Any) -> None:
    outcome = results["other_choices"]
    assert outcome["path"] == 0.0
    assert outcome["step"] == 0.0
    assert outcome["missing"] == [1]
    assert outcome["held"] == [2]
    assert outcome["anew"] == 0.0
    assert outcome["aside"] == 1


def test_survives_repeated_kills_during_save(results: Any) -> None:
    outcome = results["killed_in_saves"]
    assert outcome["passed over"] == []
    assert len(outcome["steps"]) == 20
    assert outcome["steps"] == sorted(set(outcome["steps"]))


def test_full_disk_does_not_end_training(results: Any) -> None:
    outcome = results["full_disk"]
    assert outcome["status"] == [0]
    assert outcome["stopped"] == [143]
    assert outcome["steps"][0] in (5, 6)
    assert outcome["difference"] == 0.0


def test_diverged_ranks_stop_within_check_interval(results: Any) -> None:
    assert results["diverging"] == [1, 1]
    assert "first differing tensor: two.bias" in results["err"]
