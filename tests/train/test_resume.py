"""Interrupted and resumed: the same training as if nothing had happened."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import ranks

SCRIPT = str(Path(__file__).with_name("resuming.py"))
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
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all scenarios found, in one process that forks."""
    folder = tmp_path_factory.mktemp("resume")
    ended = ranks.run_ok(1, [SCRIPT, str(folder), SEED, *SCENARIOS], folder)
    said = dict(json.loads((folder / "found.json").read_text()))
    return {**said, "err": ended[0].err}


def test_one_epoch_or_many_at_any_world_size(found: Any) -> None:
    for difference, same_ids in found["at_other_worlds"].values():
        assert difference < 1e-10
        assert same_ids


def test_killed_and_resumed_bit_equal(found: Any) -> None:
    assert found["killed_and_resumed"] == [0.0] * 4


def test_terminated_saves_and_goes_on_bit_equal(found: Any) -> None:
    said = found["terminated_and_resumed"]
    assert said["statuses"] == [143] * 4
    assert said["steps"][0] >= 6
    assert said["difference"] == 0.0
    assert said["ids"]


def test_through_four_two_one_four_ranks(found: Any) -> None:
    said = found["through_worlds"]
    assert said["difference"] < 1e-10
    assert said["ids"]
    assert said["sizes"] == [1, 2, 4]


def test_a_stream_of_shards_at_any_world_size_and_resumed(found: Any) -> None:
    said = found["streams"]
    assert (said["shards"], said["ids"], said["once"], said["resumed"]) == (6, True, True, 0.0)
    assert said["worlds"] < 1e-10


def test_only_another_rank_has_the_checkpoint(found: Any) -> None:
    said = found["private_disks"]
    assert said["difference"] < 1e-10
    assert said["resumed"][0] in (5, 6)  # the last save may not have been complete


def test_sharded_and_replicated_understand_each_other(found: Any) -> None:
    assert found["sharded"]["difference"] < 1e-10


PARTS = [f"{kind}/0000{rank}.safetensors" for kind in ("optimizer", "weights") for rank in (0, 1)]


def test_every_rank_keeps_its_own_shards(found: Any) -> None:
    said = found["shards"]
    assert set(PARTS) < set(said["files"])
    assert "weights.safetensors" not in said["files"]
    assert said["by torch"] == 0.0


def test_shards_go_on_at_any_size(found: Any) -> None:
    said = found["shards"]
    assert said["same"] == 0.0
    assert said["more"] < 1e-10
    assert said["steps"] == [6, 6, 5]


def test_a_damaged_shard_is_passed_over(found: Any) -> None:
    assert found["shards"]["damaged"] == 0.0
    assert found["shards"]["warnings"] == 1


def test_without_a_shared_disk_shards_are_sent(found: Any) -> None:
    said = found["shards_on_private_disks"]
    assert "weights.safetensors" in said["private"]
    assert set(PARTS) < set(said["moved"])
    assert said["step"] == 12
    assert said["difference"] == 0.0


def test_every_step_is_recorded_once(found: Any) -> None:
    killed, whole = found["records"]["killed"], found["records"]["whole"]
    assert [one[:3] for one in killed] == [one[:3] for one in whole]
    for ours, theirs in zip(killed, whole, strict=True):
        assert ours[3] == pytest.approx(theirs[3], rel=1e-12)


def test_other_choices_of_a_checkpoint(found: Any) -> None:
    said = found["other_choices"]
    assert said["path"] == 0.0
    assert said["step"] == 0.0
    assert said["missing"] == [1]
    assert said["held"] == [2]
    assert said["anew"] == 0.0
    assert said["aside"] == 1


def test_killed_while_saving_again_and_again(found: Any) -> None:
    said = found["killed_in_saves"]
    assert said["passed over"] == []
    assert len(said["steps"]) == 20
    assert said["steps"] == sorted(set(said["steps"]))


def test_a_full_disk_ends_no_training(found: Any) -> None:
    said = found["full_disk"]
    assert said["status"] == [0]
    assert said["stopped"] == [143]
    assert said["steps"][0] in (5, 6)
    assert said["difference"] == 0.0


def test_diverged_ranks_are_stopped_within_one_interval(found: Any) -> None:
    assert found["diverging"] == [1, 1]
    assert "first differing tensor: two.bias" in found["err"]
