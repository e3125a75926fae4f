"""Fine-tuning by a script's own DistributedDataParallel over a slow link, with several hooks.

    python bench/ddp_hook/ddp_hook.py                    # about a quarter of an hour
    python bench/ddp_hook/ddp_hook.py --steps 6 --seeds 1 --rate 1gbit   # shows that it works

A byte-level language model (the standard library's source) is trained on one part of a text, and
then fine-tuned on another with all its parameters, by one rank on each of two hosts
(``bench/links.py``) with one thread each. ``auto`` is installed as ``paceline run
--communication`` does; the script is the same. The hooks of torch are registered by the script.
PowerSGD has all gradients in one bucket: with two, its hook ends with a mismatch of messages over
gloo. Seconds of a step are the median after the first 40, in which ``auto`` chooses.
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

OURS, PEERS = ("ddp", "auto"), ("fp16 hook", "PowerSGD hook")
CONTEXT, WIDTH, LAYERS = 64, 240, 4
SHARE = 4  # samples of a rank in a step
WARM_UP = 40  # steps


def text() -> np.ndarray[Any, Any]:
    folder = Path(sysconfig.get_path("stdlib"))
    content = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return np.frombuffer(content, np.uint8)


def windows(part: np.ndarray[Any, Any], generator: np.random.Generator, count: int) -> torch.Tensor:
    starts = generator.integers(0, len(part) - CONTEXT - 1, count)
    rows = part[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int64)
    return torch.from_numpy(rows)


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def pretrained(content: np.ndarray[Any, Any], steps: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = work.Language(WIDTH, LAYERS, CONTEXT)
    optimizer, generator = work.adamw(model.parameters(), 1e-3), np.random.default_rng(0)
    for _ in range(steps):
        loss = loss_of(model, windows(content, generator, 2 * SHARE))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def fine_tune(
    rank: int, size: int, method: str, seed: int, steps: int, state: Any, content: Any, held: Any
) -> dict[str, Any]:
    """The script of one rank, in a process of its own."""
    torch.set_num_threads(1)
    if method == "auto":
        from paceline.train.ddp import scripts

        scripts.install(method)
    torch.manual_seed(seed)
    network = work.Language(WIDTH, LAYERS, CONTEXT)
    network.load_state_dict(state)
    if method == "PowerSGD hook":  # over gloo, its collectives of two buckets get mixed up
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
        loss_of(model, windows(content, generator, SHARE)).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    network.eval()
    with torch.no_grad():
        rows = windows(held, np.random.default_rng(9), 256)
        loss = statistics.mean(float(loss_of(network, part)) for part in rows.split(32))
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
    content = text()
    old, new, held = np.split(content, [len(content) // 2, len(content) * 9 // 10])
    print(links.machine(), flush=True)
    state = links.on_hosts(1, "", lambda *_: pretrained(old, 100 if options.steps > 20 else 5))[0]
    found: dict[str, list[tuple[float, float, float]]] = {method: [] for method in (*OURS, *PEERS)}
    for methods, seed in itertools.product((OURS, PEERS), range(options.seeds)):
        for method in methods:
            ranks = links.on_hosts(
                2, options.rate, fine_tune, method, seed, options.steps, state, new, held
            )
            steps = max(ranks[0]["seconds"], ranks[1]["seconds"], key=sum)
            step_s = statistics.median(steps[min(WARM_UP, len(steps) // 2) :])
            found[method].append((step_s, sum(steps), ranks[0]["loss"]))
            print(f"seed {seed} {method}: {step_s:.3f} s a step, {sum(steps):.1f} s, loss"
                  f" {ranks[0]['loss']:.4f}", flush=True)  # fmt: skip
    alone = links.on_hosts(1, "", fine_tune, "ddp", 0, 40, state, new, held)[0]
    alone_s = statistics.median(alone["seconds"])
    print(f"\n{alone['parameters'] / 1e6:.2f} million parameters; one host alone: {alone_s:.3f} s a"
          f" step of {SHARE} samples\n")  # fmt: skip
    print("| method | s/step | samples/s | speed | whole training, speed | loss | beside DDP |")
    print("|---|---|---|---|---|---|---|")
    exact_s, exact_all_s, exact_loss = map(statistics.mean, zip(*found["ddp"], strict=True))
    for method, runs in found.items():
        step_s, all_s, loss = map(statistics.mean, zip(*runs, strict=True))
        speeds = f"{2 * SHARE / step_s:.1f} | {exact_s / step_s:.2f} | {exact_all_s / all_s:.2f}"
        print(f"| {method} | {step_s:.3f} | {speeds} | {loss:.4f} | {loss / exact_loss - 1:+.2%} |")


if __name__ == "__main__":
    main()
