"""Tests compressed gradients: loss near that of exact averages, equal ranks, bit-exact resume."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import local_ranks

SCRIPT = str(Path(__file__).with_name("communication_worlds.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs all trainings in one forked process; returns the folder with their results."""
    folder = tmp_path_factory.mktemp("communicating")
    local_ranks.run_ok(1, [SCRIPT, str(folder)], folder)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "found.json").read_text()))


@pytest.fixture(scope="module")
def residuals(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "owing.json").read_text()))


def test_resume_is_bit_exact(results: Any) -> None:
    assert {name: outcome["equal"] for name, outcome in results.items()} == dict.fromkeys(
        results, True
    )


def test_loss_matches_exact_averages(results: Any) -> None:
    exact = results["exact"]["loss"]
    for name in ("fp16", "bf16", "int8", "int4"):
        assert results[name]["loss"] == pytest.approx(exact, abs=0.05), name
    assert results["local"]["loss"] == pytest.approx(exact, abs=0.5)  # less accurate


def test_lost_rank_loses_only_its_residual(residuals: Any) -> None:
    """The parameters received all computed gradients, except the residuals at the end."""
    for name, outcome in residuals.items():
        assert set(outcome["statuses"].values()) <= {0, -9}, name
        assert outcome["off"] < 0.1 * outcome["lost"], name  # half a percent is bfloat16's rounding
        assert outcome["owed"] > 0, name
        assert len(outcome["joined"]) == ("behind" not in name), name
