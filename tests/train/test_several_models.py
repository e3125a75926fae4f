"""A GAN: two models, an optimizer each, and an average of weights, at any world size."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import ranks

SCRIPT = str(Path(__file__).with_name("several.py"))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all scenarios found, in one process that forks."""
    folder = tmp_path_factory.mktemp("several")
    ranks.run_ok(1, [SCRIPT, str(folder)], folder)
    return dict(json.loads((folder / "found.json").read_text()))


def test_the_same_at_one_two_and_four_ranks(found: Any) -> None:
    assert max(found["worlds"].values()) < 1e-10


def test_killed_between_two_updates_bit_equal(found: Any) -> None:
    assert found["resumed"] == {"at 1": 0.0, "at 2": 0.0}


def test_pieces_and_shards_give_the_same(found: Any) -> None:
    assert max(found["together"].values()) < 1e-10


def test_shards_of_several_models_are_resumed_whole(found: Any) -> None:
    assert found["moved"] < 1e-10


def test_buffers_may_change_between_two_passes(found: Any) -> None:
    assert len(found["with_statistics"]) == 2


def test_the_pages_gan(found: Any) -> None:
    assert found["page"] == 48


def test_each_model_has_its_own_figures(found: Any) -> None:
    alone, two = (
        [one for one in found["records"][size] if one["split"] == "train"] for size in ("1", "2")
    )
    assert [one["step"] for one in alone] == [3, 5, 6, 9, 10]
    for one, other in zip(alone, two, strict=True):
        for name in ("generator", "discriminator"):
            assert one[f"{name}_loss"] == pytest.approx(other[f"{name}_loss"], rel=1e-12)
    norms = [
        [one for one in found["records"][size] if one["split"] == "norms"] for size in ("1", "2")
    ]
    assert [one["step"] for one in norms[0]] == [3, 6, 9]
    for one, other in zip(*norms, strict=True):
        for name in ("generator_grad_norm", "discriminator_update_ratio"):
            assert one[name] == pytest.approx(other[name], rel=1e-9)
    usage = [one for one in found["records"]["2"] if one["split"] == "usage"]
    assert all(one["memory_gib_max"] >= one["memory_gib"] for one in usage)
    assert len(usage) == 5
    assert alone[0]["generator_lr"] > alone[-1]["generator_lr"]
    assert alone[0]["discriminator_lr"] == alone[-1]["discriminator_lr"]
