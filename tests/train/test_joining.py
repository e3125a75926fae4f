"""Ranks that are lost and come back, or come late, while the others train on."""

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
import ranks

SCRIPT = str(Path(__file__).with_name("joining.py"))
LOST = [
    "plain: killed before it joins",
    "plain: killed when it joins",
    "plain: without checkpoints",
    "plain: meets in each batch",
    "rich: first killed",
    "rich: killed in an evaluation",
    "duel: killed between two updates",
    "recipe: killed",
]
CHANGED = [*LOST, "rich: grown"]
WHOLE = [
    "plain: without checkpoints",
    "plain: meets in each batch",
    "rich: killed in an evaluation",
]
PHASES = ["phases: killed in the second", "phases: killed at the end of the first"]
COUNTED = [name for name in CHANGED if not name.startswith(("duel", "recipe"))]
Record = dict[str, Any]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worlds")
    ranks.run_ok(1, [SCRIPT, str(folder)], folder)
    return folder


def job(worlds: Path, name: str) -> Record:
    found: Record = json.loads((worlds / name / "job.json").read_text())
    return found


def events(found: Record, name: str) -> list[tuple[float, int, Record]]:
    return [one for one in found["said"] if one[2]["event"] == name]


def numbers(value: Any) -> list[torch.Tensor]:
    """All tensors of a nested state, in one order."""
    if isinstance(value, torch.Tensor):
        return [value.double().flatten()]
    if isinstance(value, dict):
        return [one for key in sorted(value, key=str) for one in numbers(value[key])]
    return [torch.tensor([float(value)], dtype=torch.float64)]


def left(folder: Path) -> torch.Tensor:
    weights = folder / "model/model.safetensors"
    if weights.exists():
        return torch.cat(numbers(load_file(weights)))
    return torch.cat(numbers(torch.load(folder / "params.pt", map_location="cpu")))


def records(folder: Path, split: str) -> list[Record]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [one for line in lines if (one := json.loads(line))["split"] == split]


@pytest.mark.parametrize("name", CHANGED)
def test_nothing_changes_in_what_was_trained(worlds: Path, name: str) -> None:
    """Parameters, moments and averages, from those of two ranks that nobody disturbed."""
    ours, theirs = left(worlds / name), left(worlds / name.partition(":")[0])
    assert float((ours - theirs).abs().max()) < 1e-10
    assert not any(job(worlds, name)["statuses"].values())


def test_who_joins_ranks_that_step_apart_begins_where_they_last_met(worlds: Path) -> None:
    """They prove in every fourth step, and at the end, that they come to the same together."""
    found = job(worlds, "local: killed")
    assert not any(found["statuses"].values())
    joined = [one for one in events(found, "regrouped") if one[1] == 1]
    assert [slot for _, slot, _ in events(found, "newcomer ready")] == [1]
    assert len(joined) == 1
    last = [
        json.loads((worlds / "local: killed" / f"last.{slot}").read_text()) for slot in range(3)
    ]
    assert sorted(one[1] for one in last) == [3, 3, 3]
    accuracies = [
        records(worlds / name, "val")[-1]["accuracy"] for name in ("local", "local: killed")
    ]
    assert accuracies[1] > accuracies[0] - 0.05


def test_who_goes_by_a_counter_of_its_own_ends_before_it_does_harm(worlds: Path) -> None:
    """It learns at another rate than the others, which nothing but its parameters can tell."""
    found = job(worlds, "plain: astray")
    assert float((left(worlds / "plain: astray") - left(worlds / "plain")).abs().max()) < 1e-10
    assert [slot for _, slot, _ in events(found, "newcomer ready")] == [1]
    assert found["statuses"] == {"0": 0, "1": -9, "2": 0}
    assert NEWCOMER_DIVERGED in (worlds / "plain: astray" / "astray").read_text()


@pytest.mark.parametrize("name", PHASES)
def test_nobody_joins_in_a_second_training(worlds: Path, name: str) -> None:
    """Whoever came would begin with the data of the first; the others go on alone."""
    found = job(worlds, name)
    assert float((left(worlds / name) - left(worlds / "phases")).abs().max()) < 1e-10
    lost = found["lost"][0][1]
    ended = {int(slot): status for slot, status in found["statuses"].items()}
    assert not any(status for slot, status in ended.items() if slot != lost)
    assert ended[lost] == -9
    closed = {slot for _, slot, _ in events(found, "door closed")}
    assert closed >= {0, 1, 2} - {lost}
    late = [slot for _, slot, _ in events(found, "newcomer ready")]
    assert late == ([lost] if "first" in name else [])


def test_who_has_other_files_does_not_join(worlds: Path) -> None:
    """Edited while the others train, a script would compute something else on one rank."""
    found = job(worlds, "plain: edited")
    lost = found["lost"][0][1]
    assert [slot for slot, status in found["statuses"].items() if status] == [str(lost)]
    (failed,) = events(found, "failed")
    assert "source of __main__: " in failed[2]["error"]
    assert float((left(worlds / "plain: edited") - left(worlds / "plain")).abs().max()) < 1e-10


@pytest.mark.parametrize("name", CHANGED)
def test_newcomers_join_between_two_steps(worlds: Path, name: str) -> None:
    found = job(worlds, name)
    joined = {slot for _, slot, _ in events(found, "newcomer ready")}
    settled = events(found, "regrouped")
    assert joined == ({2, 3} if "grown" in name else {slot for _, slot in found["lost"]})
    last = max(one[2]["generation"] for one in settled)
    size = 4 if "grown" in name else 2 if "without" in name or "meets" in name else 3
    assert len([one for one in settled if one[2]["generation"] == last]) == size


@pytest.mark.parametrize("name", WHOLE)
def test_where_too_few_are_there_who_comes_is_given_the_state_and_no_step_is_made(
    worlds: Path, name: str
) -> None:
    steps: dict[int, set[int]] = {}
    for _, _, told in events(job(worlds, name), "regrouped"):
        steps.setdefault(told["generation"], set()).add(told["step"])
    assert len(steps) == 3
    assert len({step for some in steps.values() for step in some}) == 1


@pytest.mark.parametrize("name", [name for name in COUNTED if name.startswith("plain")])
def test_no_sample_is_seen_twice_or_never(worlds: Path, name: str) -> None:
    seen: dict[int, list[int]] = {}
    for file in (worlds / name).glob("ids.*"):
        for line in file.read_text().splitlines():
            step, ids, _ = json.loads(line)
            seen.setdefault(step, []).extend(ids)
    assert sorted(seen) == list(range(40))
    for epoch in range(5):
        steps = [seen[step] for step in range(8 * epoch, 8 * epoch + 8)]
        assert sorted(one for ids in steps for one in ids) == list(range(64))


@pytest.mark.parametrize("name", COUNTED)
def test_every_step_is_recorded_once(worlds: Path, name: str) -> None:
    """Also where the rank was lost that speaks for the job."""
    folder, plain = worlds / name, worlds / name.partition(":")[0]
    steps = [one["step"] for one in records(folder, "train")]
    assert steps == [one["step"] for one in records(plain, "train")] == list(range(4, 41, 4))
    for ours, theirs in zip(records(folder, "val"), records(plain, "val"), strict=True):
        assert (ours["step"], ours["seen"]) == (theirs["step"], 64)
        assert ours["accuracy"] == pytest.approx(theirs["accuracy"], abs=1e-12)


@pytest.mark.parametrize("name", COUNTED)
def test_what_was_measured_of_a_void_batch_does_not_count(worlds: Path, name: str) -> None:
    """And what a lost rank had measured since the last record is lost with it."""
    counts = [one["samples"] for one in records(worlds / name, "train")]
    assert all(count <= 32 for count in counts)
    assert sum(count < 32 for count in counts) <= len(job(worlds, name)["lost"])


@pytest.mark.parametrize(
    "name", ["plain: killed before it joins", "rich: first killed", "rich: grown"]
)
def test_checkpoints_go_on(worlds: Path, name: str) -> None:
    found = sorted((worlds / name / "checkpoints").iterdir())
    manifests = [json.loads(one.read_text()) for one in (worlds / name).rglob("manifest.json")]
    assert max(one["step"] for one in manifests) == 40, found
    assert not [one for one in found if "tmp" in one.name]


def test_each_rank_knows_its_new_place(worlds: Path) -> None:
    last = [json.loads((worlds / "rich: grown" / f"last.{slot}").read_text()) for slot in range(4)]
    assert sorted(last) == [[rank, 4, str(rank)] for rank in range(4)]
