"""What only a GPU can show; left out where torch sees none, as on CI's machines."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from safetensors.torch import load_file
from test_joining import SCRIPT as JOINING
from test_joining import left
from test_recovery import check, trials

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU"),
]

AHEAD = """
import json, sys
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from paceline import train
from paceline.train.data import fetch

class Images:
    def __init__(self):
        drawn = torch.Generator().manual_seed(0)
        self.pixels = torch.randn(1024, 3, 32, 32, generator=drawn)
    def __len__(self):
        return len(self.pixels)
    def __getitem__(self, one):
        pixels = self.pixels[one] + 0.01 * torch.randn(3, 32, 32)
        return pixels, (pixels[0, 0, 0] > 0).long()

if sys.argv[2] == "at once":
    fetch._copied_ahead = lambda made, device: fetch._copied(made, device, False)
found = []
with train.join(run_dir=sys.argv[1], deterministic=True, quiet=True) as session:
    network = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(28800, 2))
    network = session.place(network)
    model = session.prepare(network, torch.optim.AdamW(network.parameters(), 0.001))
    loader = session.loader(Images(), 128, workers=2)
    for _ in session.epochs(loader, 3):
        for pixels, classes in loader:
            assert pixels.is_cuda
            losses = cross_entropy(model(pixels), classes, reduction="none")
            session.step(losses)
            found.append(losses.sum().item())
print(json.dumps(found))
"""


def test_killed_and_resumed_bit_equal(tmp_path: Path) -> None:
    """Fused AdamW in bf16 with channels last: the moments come back in its parameters' layout."""
    how = ["--model=resnet18", "--deterministic", "--steps=120", "--checkpoint-every=20"]
    argv = [sys.executable, "-m", "paceline.recipes.image", *how, "--keep=0"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([*argv, f"--run-dir={whole}"], check=True, timeout=200)
    with subprocess.Popen([*argv, f"--run-dir={killed}"]) as process:
        while process.poll() is None and not (killed / "checkpoints/40/manifest.json").exists():
            time.sleep(0.001)
        process.kill()
    subprocess.run([*argv, f"--run-dir={killed}"], check=True, timeout=200)
    one, other = (load_file(run / "model/model.safetensors") for run in (whole, killed))
    assert all(one[name].equal(other[name]) for name in one)


def test_copies_ahead_change_nothing(tmp_path: Path) -> None:
    """Batches from workers, through pinned memory, on a stream of their own."""
    said = [
        subprocess.run(
            [sys.executable, "-c", AHEAD, str(tmp_path / way.replace(" ", "-")), way],
            capture_output=True, text=True, check=True, timeout=200,
        ).stdout.splitlines()[-1]
        for way in ("ahead", "at once")
    ]  # fmt: skip
    assert len(json.loads(said[0])) == 24
    assert said[0] == said[1]


@pytest.mark.parametrize("dies", [[1, "forward", 9], [0, "stepped", 9], [1, "evaluating 1", 12]])
def test_a_gpu_and_a_cpu_outlive_each_other(tmp_path: Path, dies: list[int | str]) -> None:
    """Rank 0 computes on the GPU; whichever dies, the other trains on."""
    ((result, alone, _),) = trials(tmp_path, "at", [["mixed", 2, [dies]]])
    check(result, alone)
    assert len(result["found"]) == 1


def test_a_lost_rank_comes_back_beside_a_gpu(tmp_path: Path) -> None:
    """Also to the GPU: it gets its state from those that are left."""
    jobs = come_back(tmp_path, "mixed")
    assert not any(status for job in jobs for status in job["statuses"].values())


def come_back(folder: Path, world: str) -> list[dict[str, Any]]:
    """Each rank is killed in turn and joins again; the jobs as their launcher saw them."""
    worlds, jobs = [world, f"{world}: killed", f"{world}: first killed"], []
    ranks.run_ok(1, [JOINING, str(folder), *worlds], folder)
    undisturbed = left(folder / world)
    for name in worlds[1:]:
        job = json.loads((folder / name / "job.json").read_text())
        joined = [slot for _, slot, one in job["said"] if one["event"] == "newcomer ready"]
        assert joined == [slot for _, slot in job["lost"]]
        assert float((left(folder / name) - undisturbed).abs().max()) < 1e-10
        jobs.append(job)
    return jobs


NCCL = [
    ["nccl: plain", 3, [[1, "forward", 9]]],
    ["nccl: buffers", 3, [[0, "given", 13]]],
    ["nccl: coded", 3, [[2, "forward", 7]]],
]


def test_ranks_over_nccl_outlive_one_that_is_killed(tmp_path: Path) -> None:
    for result, alone, _ in trials(tmp_path, "at", NCCL):
        check(result, alone)
        assert len(result["found"]) == 2
        print(f"no step for {result['gap']:.3f} s")


def test_ranks_over_nccl_are_freed_of_a_frozen_one(tmp_path: Path) -> None:
    ((result, alone, _),) = trials(tmp_path, "frozen", [["nccl: plain", 3, 2, 0.2]])
    check(result, alone)
    assert len(result["found"]) == 2


def test_a_lost_rank_comes_back_over_nccl(tmp_path: Path) -> None:
    come_back(tmp_path, "nccl")
