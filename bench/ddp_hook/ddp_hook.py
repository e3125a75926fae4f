"""Fine-tuning with DDP over a slow link: Paceline's ``auto`` against torch's hooks.

    python bench/ddp_hook/ddp_hook.py                    # about a quarter of an hour
    python bench/ddp_hook/ddp_hook.py --steps 6 --seeds 1 --rate 1gbit   # a quick trial

A byte-level language model is trained on one part of a text (the standard library's source), then
all its parameters are fine-tuned on another part, by one rank on each of two hosts
(``bench/links.py``) with one thread each. ``auto`` is installed as by ``paceline run
--communication``; the script is the same. The script registers torch's hooks. PowerSGD has all
gradients in one bucket, because with two its hook fails over gloo with mismatched messages. The
time of a step is the median after the first 40, during which ``auto`` selects a method.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "slow_links"))

import links
import numpy as np
import torch
import torch.distributed as dist
import work
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

PACELINE_METHODS, TORCH_HOOKS = ("ddp", "auto"), ("fp16 hook", "PowerSGD hook")
CONTEXT, WIDTH, LAYERS = 64, 240, 4
BATCH_PER_RANK = 4  # samples of a rank in a step
WARM_UP = 40  # steps


def load_bytes() -> np.ndarray[Any, Any]:
    folder = Path(sysconfig.get_path("stdlib"))
    content = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return np.frombuffer(content, np.uint8)


def windows(part: np.ndarray[Any, Any], generator: np.random.Generator, count: int) -> torch.Tensor:
    starts = generator.integers(0, len(part) - CONTEXT - 1, count)
    rows = part[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int64)
    return torch.from_numpy(rows)


def mean_loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def pretrain(content: np.ndarray[Any, Any], steps: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = work.Language(WIDTH, LAYERS, CONTEXT)
    optimizer, generator = work.adamw(model.parameters(), 1e-3), np.random.default_rng(0)
    for _ in range(steps):
        loss = mean_loss(model, windows(content, generator, 2 * BATCH_PER_RANK))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def fine_tune(
    rank: int,
    size: int,
    method: str,
    seed: int,
    steps: int,
    pretrained_state: Any,
    content: Any,
    held_out: Any,
) -> dict[str, Any]:
    """Fine-tune as one rank, in its own process."""
    torch.set_num_threads(1)
    if method == "auto":
        from paceline.train.ddp import scripts

        scripts.install(method)
    torch.manual_seed(seed)
    network = work.Language(WIDTH, LAYERS, CONTEXT)
    network.load_state_dict(pretrained_state)
    if method == "PowerSGD hook":  # over gloo, the collectives of two buckets are mixed up
        dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 30
    megabytes = 1000 if method == "PowerSGD hook" else None
    model = DistributedDataParallel(network, bucket_cap_mb=megabytes) if size > 1 else network
    if method == "fp16 hook":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif method == "PowerSGD hook":
        power = powerSGD_hook.PowerSGDState(None, 4, start_powerSGD_iter=WARM_UP // 2)
        model.register_comm_hook(power, powerSGD_hook.powerSGD_hook)
    optimizer = work.adamw(model.parameters(), 3e-4)
    generator = np.random.default_rng((seed, rank))
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        mean_loss(model, windows(content, generator, BATCH_PER_RANK)).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    network.eval()
    with torch.no_grad():
        rows = windows(held_out, np.random.default_rng(9), 256)
        loss = statistics.mean(float(mean_loss(network, part)) for part in rows.split(32))
    return {
        "seconds": seconds,
        "loss": loss,
        "parameters": sum(p.numel() for p in network.parameters()),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", default="100mbit")
    options = parser.parse_args()
    content = load_bytes()
    pretraining, fine_tuning, held_out = np.split(
        content, [len(content) // 2, len(content) * 9 // 10]
    )
    print(links.machine(), flush=True)
    pretrained_state = links.on_hosts(
        1, "", lambda *_: pretrain(pretraining, 100 if options.steps > 20 else 5)
    )[0]
    results: dict[str, list[tuple[float, float, float]]] = {
        method: [] for method in (*PACELINE_METHODS, *TORCH_HOOKS)
    }
    for methods, seed in itertools.product((PACELINE_METHODS, TORCH_HOOKS), range(options.seeds)):
        for method in methods:
            reports = links.on_hosts(
                2,
                options.rate,
                fine_tune,
                method,
                seed,
                options.steps,
                pretrained_state,
                fine_tuning,
                held_out,
            )
            steps = max(reports[0]["seconds"], reports[1]["seconds"], key=sum)
            step_s = statistics.median(steps[min(WARM_UP, len(steps) // 2) :])
            results[method].append((step_s, sum(steps), reports[0]["loss"]))
            print(f"seed {seed} {method}: {step_s:.3f} s a step, {sum(steps):.1f} s, loss"
                  f" {reports[0]['loss']:.4f}", flush=True)  # fmt: skip
    single = links.on_hosts(
        1, "", fine_tune, "ddp", 0, 40, pretrained_state, fine_tuning, held_out
    )[0]
    single_step_s = statistics.median(single["seconds"])
    print(f"\n{single['parameters'] / 1e6:.2f} million parameters; one host alone:"
          f" {single_step_s:.3f} s a step of {BATCH_PER_RANK} samples\n")  # fmt: skip
    print("| method | s/step | samples/s | speed | total training, speed | loss | against DDP |")
    print("|---|---|---|---|---|---|---|")
    exact_s, exact_total_s, exact_loss = map(statistics.mean, zip(*results["ddp"], strict=True))
    for method, runs in results.items():
        step_s, total_s, loss = map(statistics.mean, zip(*runs, strict=True))
        speeds = f"{2 * BATCH_PER_RANK / step_s:.1f} | {exact_s / step_s:.2f}"
        speeds += f" | {exact_total_s / total_s:.2f}"
        print(f"| {method} | {step_s:.3f} | {speeds} | {loss:.4f} | {loss / exact_loss - 1:+.2%} |")


if __name__ == "__main__":
    main()
