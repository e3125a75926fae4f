"""Tests that recipes give the same result on several ranks as on one, also after being killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
import local_ranks
from recipe_tools import hub_variables, one_thread, parameters, records  # noqa: F401 - fixtures
from test_recipe_golden import FLAGS, GOLDEN, run

from background import eventually


@pytest.mark.parametrize("recipe", ["text", "translation"])
def test_killed_on_two_ranks_resumes_on_single_rank(recipe: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = [*FLAGS[recipe], f"--run-dir={folder}", "--checkpoint-every=4"]
    args = ["-m", f"paceline.recipes.{recipe}", *flags]
    started = local_ranks.start(2, args, tmp_path / "logs")
    eventually(lambda: bool(list(folder.glob("checkpoints/*/manifest.json"))))
    for process in started:
        os.kill(process.pid, signal.SIGKILL)
    local_ranks.finish(started, tmp_path / "logs", 10)

    run(recipe, folder, "--checkpoint-every=4")
    expected = json.loads((GOLDEN / f"{recipe}.json").read_text())["losses"]
    by_step = {record["step"]: record["loss"] for record in records(folder, "train")}
    assert [by_step[step] for step in sorted(by_step)] == pytest.approx(expected, rel=1e-8)
    run(recipe, tmp_path / "whole")
    assert (parameters(folder) - parameters(tmp_path / "whole")).abs().max() < 1e-10
