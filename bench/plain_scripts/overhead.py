"""Overhead of Paceline in a step of about 20 ms of a plain DDP script.

``python bench/plain_scripts/overhead.py [--rounds 5] [--steps 200]`` runs the same script with two
ranks on this machine with torchrun, ``paceline run`` and ``paceline run --no-measure --no-verify``,
which take turns. It prints as Markdown:

* the CPU time of a step, as the median over all blocks of 10 steps of both ranks; CPU time, because
  other programs share the machine;
* the CPU time inside Paceline's own hooks around ``optimizer.step()``, which a timer around each
  hook measures. This is the time that Paceline uses in the training thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
WARM_UP, BLOCK = 20, 10  # steps
JOB = f"""
import json, os, sys, time
import torch, torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
width, steps = 512, int(sys.argv[1])
model = DistributedDataParallel(nn.Sequential(*(nn.Linear(width, width) for _ in range(4))))
optimizer = optim.AdamW(model.parameters())
inputs = torch.randn(192, width)
inside_ns = 0

def timed(hook):
    def call(*arguments):
        global inside_ns
        start = time.thread_time_ns()
        try:
            return hook(*arguments)
        finally:
            inside_ns += time.thread_time_ns() - start
    return call

module = sys.modules["torch.optim.optimizer"]
for hooks in (module._global_optimizer_pre_hooks,
              module._global_optimizer_post_hooks):
    for name in list(hooks):
        hooks[name] = timed(hooks[name])
blocks, inside = [], []
for step in range(steps):
    if step % {BLOCK} == 0:
        if step > {WARM_UP}:
            blocks.append((time.process_time() - start) / {BLOCK})
            inside.append(inside_ns / 1e9 / {BLOCK})
        start, inside_ns = time.process_time(), 0
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
with open(f"{{sys.argv[2]}}/{{dist.get_rank()}}.json", "w") as file:
    json.dump([blocks, inside], file)
dist.destroy_process_group()
"""
VARIANTS = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2"],
    "paceline run": ["-m", "paceline", "run", "-p", "2"],
    "paceline run --no-measure --no-verify": ["-m", "paceline", "run", "-p", "2", "--no-measure",
                                              "--no-verify"],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    blocks: dict[str, list[float]] = {name: [] for name in VARIANTS}
    inside: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.py"
        job.write_text(JOB)
        for _ in range(options.rounds):
            for name, launcher_arguments in VARIANTS.items():
                for rank, (block_times, hook_times) in enumerate(
                    run(launcher_arguments, job, options.steps)
                ):
                    assert rank < 2
                    blocks[name] += block_times
                    inside[name] += hook_times
    baseline = statistics.median(blocks["torchrun"])
    print("| started by | CPU ms of a step, median | to torchrun | in Paceline's hooks, µs/step |"
          " share of the step |\n|---|--:|--:|--:|--:|")  # fmt: skip
    for name, block_times in blocks.items():
        step, hook = statistics.median(block_times), statistics.mean(inside[name])
        print(f"| {name} | {step * 1e3:.2f} | {step / baseline:.3f} | {hook * 1e6:.1f} |"
              f" {hook / step:.2%} |")  # fmt: skip


def run(
    launcher_arguments: list[str], job: Path, steps: int
) -> list[tuple[list[float], list[float]]]:
    """Runs the script once; returns times of blocks and of hooks, by rank."""
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, *launcher_arguments, str(job), str(steps), str(job.parent)]
    completed = subprocess.run(
        argv, capture_output=True, text=True, env=env, cwd=job.parent, check=False
    )
    if completed.returncode:
        sys.exit(completed.stderr[-3000:])
    return [json.loads((job.parent / f"{rank}.json").read_text()) for rank in (0, 1)]


if __name__ == "__main__":
    main()
