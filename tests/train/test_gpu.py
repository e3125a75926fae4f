"""Tests what needs a GPU; skipped if torch sees none, as on CI machines."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import local_ranks
import pytest
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


def test_killed_run_resumes_bit_exact(tmp_path: Path) -> None:
    """Fused AdamW in bf16, channels last: its moments return in the parameters' layout."""
    flags = ["--model=resnet18", "--deterministic", "--steps=120", "--checkpoint-every=20"]
    argv = [sys.executable, "-m", "paceline.recipes.image", *flags, "--keep=0"]
    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([*argv, f"--run-dir={uninterrupted}"], check=True, timeout=200)
    with subprocess.Popen([*argv, f"--run-dir={killed}"]) as process:
        while process.poll() is None and not (killed / "checkpoints/40/manifest.json").exists():
            time.sleep(0.001)
        process.kill()
    subprocess.run([*argv, f"--run-dir={killed}"], check=True, timeout=200)
    one, other = (load_file(run / "model/model.safetensors") for run in (uninterrupted, killed))
    assert all(one[name].equal(other[name]) for name in one)


def test_prefetch_to_gpu_does_not_change_losses(tmp_path: Path) -> None:
    """Batches come from workers, through pinned memory, on a separate stream."""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", AHEAD, str(tmp_path / mode.replace(" ", "-")), mode],
            capture_output=True, text=True, check=True, timeout=200,
        ).stdout.splitlines()[-1]
        for mode in ("ahead", "at once")
    ]  # fmt: skip
    assert len(json.loads(outputs[0])) == 24
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("dies", [[1, "forward", 9], [0, "stepped", 9], [1, "evaluating 1", 12]])
def test_training_survives_loss_of_gpu_or_cpu_rank(tmp_path: Path, dies: list[int | str]) -> None:
    """Rank 0 computes on the GPU; if either rank dies, the other trains on."""
    ((result, reference, _),) = trials(tmp_path, "at", [["mixed", 2, [dies]]])
    check(result, reference)
    assert len(result["found"]) == 1


def test_lost_rank_rejoins_with_gpu(tmp_path: Path) -> None:
    """Also to the rank on the GPU: it gets its state from the remaining ranks."""
    jobs = kill_and_rejoin(tmp_path, "mixed")
    assert not any(status for job in jobs for status in job["statuses"].values())


def kill_and_rejoin(folder: Path, world: str) -> list[dict[str, Any]]:
    """Kills each rank in turn, which then joins again; returns the launchers' records."""
    worlds, jobs = [world, f"{world}: killed", f"{world}: first killed"], []
    local_ranks.run_ok(1, [JOINING, str(folder), *worlds], folder)
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


def test_nccl_ranks_survive_killed_rank(tmp_path: Path) -> None:
    for result, reference, _ in trials(tmp_path, "at", NCCL):
        check(result, reference)
        assert len(result["found"]) == 2
        print(f"no step for {result['gap']:.3f} s")


def test_nccl_ranks_are_freed_from_frozen_rank(tmp_path: Path) -> None:
    ((result, reference, _),) = trials(tmp_path, "frozen", [["nccl: plain", 3, 2, 0.2]])
    check(result, reference)
    assert len(result["found"]) == 2


def test_lost_rank_rejoins_over_nccl(tmp_path: Path) -> None:
    kill_and_rejoin(tmp_path, "nccl")
