"""Tests ranks that come back after a loss, or join late, while the others train on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.spec.failure import NEWCOMER_DIVERGED

sys.path.insert(0, str(Path(__file__).parent))
import local_ranks

SCRIPT = str(Path(__file__).with_name("joining_worlds.py"))
KILLED_CASES = [
    "plain: killed before it joins",
    "plain: killed when it joins",
    "plain: without checkpoints",
    "plain: meets in each batch",
    "rich: first killed",
    "rich: killed in an evaluation",
    "duel: killed between two updates",
    "recipe: killed",
]
REJOIN_CASES = [*KILLED_CASES, "rich: grown"]
PAUSED_CASES = [
    "plain: without checkpoints",
    "plain: meets in each batch",
    "rich: killed in an evaluation",
]
PHASES = ["phases: killed in the second", "phases: killed at the end of the first"]
CASES_WITH_COUNTS = [name for name in REJOIN_CASES if not name.startswith(("duel", "recipe"))]
Record = dict[str, Any]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worlds")
    local_ranks.run_ok(1, [SCRIPT, str(folder)], folder)
    return folder


def job(worlds: Path, name: str) -> Record:
    result: Record = json.loads((worlds / name / "job.json").read_text())
    return result


def events(result: Record, name: str) -> list[tuple[float, int, Record]]:
    return [entry for entry in result["said"] if entry[2]["event"] == name]


def numbers(value: Any) -> list[torch.Tensor]:
    """Returns all tensors of a nested state in a fixed order."""
    if isinstance(value, torch.Tensor):
        return [value.double().flatten()]
    if isinstance(value, dict):
        return [entry for key in sorted(value, key=str) for entry in numbers(value[key])]
    return [torch.tensor([float(value)], dtype=torch.float64)]


def left(folder: Path) -> torch.Tensor:
    weights = folder / "model/model.safetensors"
    if weights.exists():
        return torch.cat(numbers(load_file(weights)))
    return torch.cat(numbers(torch.load(folder / "params.pt", map_location="cpu")))


def records(folder: Path, split: str) -> list[Record]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [entry for line in lines if (entry := json.loads(line))["split"] == split]


@pytest.mark.parametrize("name", REJOIN_CASES)
def test_final_state_matches_undisturbed_training(worlds: Path, name: str) -> None:
    """Compares parameters, moments and averages with those of two undisturbed ranks."""
    actual, expected = left(worlds / name), left(worlds / name.partition(":")[0])
    assert float((actual - expected).abs().max()) < 1e-10
    assert not any(job(worlds, name)["statuses"].values())


def test_newcomer_to_local_steps_starts_at_last_sync(worlds: Path) -> None:
    """In every fourth step and at the end, the ranks verify that their parameters are equal."""
    result = job(worlds, "local: killed")
    assert not any(result["statuses"].values())
    joined = [entry for entry in events(result, "regrouped") if entry[1] == 1]
    assert [slot for _, slot, _ in events(result, "newcomer ready")] == [1]
    assert len(joined) == 1
    last = [
        json.loads((worlds / "local: killed" / f"last.{slot}").read_text()) for slot in range(3)
    ]
    assert sorted(entry[1] for entry in last) == [3, 3, 3]
    accuracies = [
        records(worlds / name, "val")[-1]["accuracy"] for name in ("local", "local: killed")
    ]
    assert accuracies[1] > accuracies[0] - 0.05


def test_diverging_newcomer_does_not_affect_training(worlds: Path) -> None:
    """It uses another learning rate than the others, which only its parameters reveal."""
    result = job(worlds, "plain: astray")
    assert float((left(worlds / "plain: astray") - left(worlds / "plain")).abs().max()) < 1e-10
    assert [slot for _, slot, _ in events(result, "newcomer ready")] == [1]
    assert result["statuses"] == {"0": 0, "1": -9, "2": 0}
    assert NEWCOMER_DIVERGED in (worlds / "plain: astray" / "astray").read_text()


@pytest.mark.parametrize("name", PHASES)
def test_newcomers_cannot_join_second_training(worlds: Path, name: str) -> None:
    """A newcomer would start with the first training's data; the others continue without it."""
    result = job(worlds, name)
    assert float((left(worlds / name) - left(worlds / "phases")).abs().max()) < 1e-10
    lost = result["lost"][0][1]
    ended = {int(slot): status for slot, status in result["statuses"].items()}
    assert not any(status for slot, status in ended.items() if slot != lost)
    assert ended[lost] == -9
    closed = {slot for _, slot, _ in events(result, "door closed")}
    assert closed >= {0, 1, 2} - {lost}
    rejoined = [slot for _, slot, _ in events(result, "newcomer ready")]
    assert rejoined == ([lost] if "first" in name else [])


def test_newcomer_with_edited_script_cannot_join(worlds: Path) -> None:
    """A script that was edited during the training would compute something else on one rank."""
    result = job(worlds, "plain: edited")
    lost = result["lost"][0][1]
    assert [slot for slot, status in result["statuses"].items() if status] == [str(lost)]
    (failed,) = events(result, "failed")
    assert "source of __main__: " in failed[2]["error"]
    assert float((left(worlds / "plain: edited") - left(worlds / "plain")).abs().max()) < 1e-10


@pytest.mark.parametrize("name", REJOIN_CASES)
def test_newcomers_join_between_two_steps(worlds: Path, name: str) -> None:
    result = job(worlds, name)
    joined = {slot for _, slot, _ in events(result, "newcomer ready")}
    regroups = events(result, "regrouped")
    assert joined == ({2, 3} if "grown" in name else {slot for _, slot in result["lost"]})
    last = max(entry[2]["generation"] for entry in regroups)
    size = 4 if "grown" in name else 2 if "without" in name or "meets" in name else 3
    assert len([entry for entry in regroups if entry[2]["generation"] == last]) == size


@pytest.mark.parametrize("name", PAUSED_CASES)
def test_newcomers_get_state_before_next_step(worlds: Path, name: str) -> None:
    steps: dict[int, set[int]] = {}
    for _, _, details in events(job(worlds, name), "regrouped"):
        steps.setdefault(details["generation"], set()).add(details["step"])
    assert len(steps) == 3
    assert len({step for step_set in steps.values() for step in step_set}) == 1


@pytest.mark.parametrize("name", [name for name in CASES_WITH_COUNTS if name.startswith("plain")])
def test_samples_are_seen_exactly_once(worlds: Path, name: str) -> None:
    seen: dict[int, list[int]] = {}
    for file in (worlds / name).glob("ids.*"):
        for line in file.read_text().splitlines():
            step, ids, _ = json.loads(line)
            seen.setdefault(step, []).extend(ids)
    assert sorted(seen) == list(range(40))
    for epoch in range(5):
        steps = [seen[step] for step in range(8 * epoch, 8 * epoch + 8)]
        assert sorted(entry for ids in steps for entry in ids) == list(range(64))


@pytest.mark.parametrize("name", CASES_WITH_COUNTS)
def test_steps_are_recorded_once(worlds: Path, name: str) -> None:
    """Also if the lost rank was the one that reports for the job."""
    folder, plain = worlds / name, worlds / name.partition(":")[0]
    steps = [entry["step"] for entry in records(folder, "train")]
    assert steps == [entry["step"] for entry in records(plain, "train")] == list(range(4, 41, 4))
    for actual, expected in zip(records(folder, "val"), records(plain, "val"), strict=True):
        assert (actual["step"], actual["seen"]) == (expected["step"], 64)
        assert actual["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-12)


@pytest.mark.parametrize("name", CASES_WITH_COUNTS)
def test_discarded_batch_metrics_are_not_counted(worlds: Path, name: str) -> None:
    """What a lost rank had measured since the last record is lost, too."""
    counts = [entry["samples"] for entry in records(worlds / name, "train")]
    assert all(count <= 32 for count in counts)
    assert sum(count < 32 for count in counts) <= len(job(worlds, name)["lost"])


@pytest.mark.parametrize(
    "name", ["plain: killed before it joins", "rich: first killed", "rich: grown"]
)
def test_checkpoints_continue(worlds: Path, name: str) -> None:
    result = sorted((worlds / name / "checkpoints").iterdir())
    manifests = [json.loads(entry.read_text()) for entry in (worlds / name).rglob("manifest.json")]
    assert max(entry["step"] for entry in manifests) == 40, result
    assert not [entry for entry in result if "tmp" in entry.name]


def test_ranks_have_updated_rank_and_world_size(worlds: Path) -> None:
    last = [json.loads((worlds / "rich: grown" / f"last.{slot}").read_text()) for slot in range(4)]
    assert sorted(last) == [[rank, 4, str(rank)] for rank in range(4)]
