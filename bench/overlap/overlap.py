"""Overlap of the gradient exchange with computing: a Paceline session against DDP's defaults.

``python bench/overlap/overlap.py`` prints Markdown. It needs root, ``ip`` and ``tc``, and creates
its own hosts (``bench/links.py``). In one run, on the same links, it measures:

* C: a step without an exchange, on all ranks at the same time;
* W: an all-reduce of as many bytes as the gradients have, without computing;
* T: a step of DDP with default settings, and a step of a session.

No step can be shorter than the longer of C and W. Real steps are those of a byte-level transformer;
"emulated" ones sleep instead of computing, layer by layer, and send real bytes.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "src")]

import links
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from paceline import train


class SleepFunction(torch.autograd.Function):
    """Emulates computing by sleeping."""

    @staticmethod
    def forward(ctx: Any, inputs: Any, weight: Any, seconds: float) -> Any:
        ctx.seconds = seconds
        ctx.save_for_backward(weight)
        time.sleep(seconds)
        return inputs * 1

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        time.sleep(2 * ctx.seconds)  # a backward pass takes about twice a forward pass
        return gradient, torch.ones_like(ctx.saved_tensors[0]), None


class SleepLayer(nn.Module):
    def __init__(self, elements: int, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(elements)), seconds

    def forward(self, inputs: Any) -> Any:
        return SleepFunction.apply(inputs, self.weight, self.seconds)


class Emulated(nn.Module):
    def __init__(self, megabytes: float, seconds: float, layers: int = 24) -> None:
        super().__init__()
        elements_per_layer = int(megabytes * 250_000 / layers)
        self.layers = nn.Sequential(
            *[SleepLayer(elements_per_layer, seconds / 3 / layers) for _ in range(layers)]
        )

    def forward(self, inputs: Any) -> Any:
        return self.layers(inputs.float().sum() * torch.ones(1, requires_grad=True))

    def loss(self, outputs: Any, inputs: Any) -> Any:
        return outputs.sum()


class ByteTransformer(nn.Module):
    """A transformer that predicts bytes."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(256, width)
        block = nn.TransformerEncoderLayer(
            width, width // 32, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, inputs: Any) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1] - 1)
        return self.head(self.blocks(self.table(inputs[:, :-1]), mask=mask, is_causal=True))

    def loss(self, outputs: Any, inputs: Any) -> Any:
        return cross_entropy(outputs.flatten(0, 1), inputs[:, 1:].flatten())


CASES = {
    # name: (computing, rate, model, samples per rank, ranks)
    "real-100": ("real", "100mbit", lambda: ByteTransformer(192, 4), 12, (2,)),
    "real-1000": ("real", "1gbit", lambda: ByteTransformer(384, 6), 12, (2,)),
    "emulated-100": ("emulated", "100mbit", lambda: Emulated(7.6, 0.16), 1, (2, 4, 8, 16)),
    "emulated-1000": ("emulated", "1gbit", lambda: Emulated(48, 0.287), 1, (2, 4, 8, 16)),
}


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    emulated = isinstance(module, Emulated)
    optimizer_class = torch.optim.SGD if emulated else torch.optim.AdamW
    return optimizer_class(module.parameters(), lr=1e-3)


def loop_seconds(model: nn.Module, module: Any, inputs: Any, steps: int) -> list[float]:
    """Seconds of each step of a plain loop."""
    optimizer, seconds = make_optimizer(module), []
    for _ in range(steps):
        start = time.perf_counter()
        module.loss(model(inputs), inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    return seconds


def session_seconds(
    make_model: Any, samples: int, steps: int
) -> tuple[list[float], dict[str, Any]]:
    """Seconds of each step of a session, and the summary of its bucket trial."""
    finished: list[float] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        session = train.join(run_dir=folder, check_every=10**9, log_every=10**9, device="cpu")
        module = make_model()
        model = session.prepare(module, make_optimizer(module), overlap="auto")
        num_samples = steps * samples * session.world.size
        data = TensorDataset(
            torch.randint(0, 256, (num_samples, 129), generator=torch.Generator().manual_seed(1))
        )
        loader = session.loader(data, samples * session.world.size, workers=0)
        for _ in session.epochs(loader, steps=steps):
            for (inputs,) in loader:
                session.step(module.loss(model(inputs), inputs))
                finished.append(time.perf_counter())
        session.leaves_group = False
        assert session._loop.bucket_trial is not None
        summary = session._loop.bucket_trial.summary()
        summary["all"] = session._loop.bucket_trial.seconds
        session.close()
    return [later - earlier for earlier, later in itertools.pairwise(finished)], summary


def rank(number: int, ranks: int, case: str, steps: int, threads: int) -> dict[str, Any]:
    """All measurements of one case on this rank."""
    _, _, make_model, samples, _ = CASES[case]
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    module = make_model()
    inputs = torch.randint(0, 256, (samples, 129))
    elements = sum(parameter.numel() for parameter in module.parameters())
    dist.barrier()
    measurements: dict[str, Any] = {
        "C": loop_seconds(module, module, inputs, 6)[2:],
        "MB": elements * 4e-6,
    }
    flat, all_reduce_s = torch.ones(elements), []
    for _ in range(4):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(flat)
        all_reduce_s.append(time.perf_counter() - start)
    measurements["W"] = all_reduce_s[1:]
    dist.barrier()
    ddp = nn.parallel.DistributedDataParallel(module)
    measurements["ddp"] = loop_seconds(ddp, module, inputs, 10)[3:]
    del ddp
    dist.barrier()
    torch.manual_seed(1)
    seconds, summary = session_seconds(make_model, samples, steps)
    measurements["ours"], measurements["about"] = seconds[-12:], summary
    return measurements


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--steps", type=int, default=55)
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    columns = [
        "case",
        "ranks",
        "MB",
        "C",
        "W",
        "DDP",
        "T/bound",
        "session",
        "T/bound",
        "bucket size",
    ]
    print(f"# Overlap of exchange and computing\n\n{links.machine()}, "
          f"{options.threads} threads per rank\n\n"
          "Medians, in ms, of the slowest rank; the bound is the longer of C and W.\n\n"
          f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)  # fmt: skip
    passed = True
    for case in options.case or CASES:
        computing, rate, _, _, sizes = CASES[case]
        for size in options.ranks or sizes:
            by_rank = links.on_hosts(size, rate, rank, case, options.steps, options.threads)
            medians = {
                name: max(statistics.median(report[name]) for report in by_rank)
                for name in ("C", "W", "ddp", "ours")
            }
            bound, summary = max(medians["C"], medians["W"]), by_rank[0]["about"]
            passed &= medians["ours"] <= 1.08 * bound
            bucket_bytes = summary["bucket_bytes"]
            bucket_size = f"{bucket_bytes / 1e6:.2f} MB" if bucket_bytes else "DDP's sizes"
            ms = {name: f"{1e3 * value:.0f}" for name, value in medians.items()}
            row = [
                f"{computing}, {rate}", str(size), f"{by_rank[0]['MB']:.1f}", ms["C"], ms["W"],
                ms["ddp"], f"{medians['ddp'] / bound:.2f}", ms["ours"],
                f"**{medians['ours'] / bound:.2f}**",
                bucket_size,
            ]  # fmt: skip
            print(f"| {' | '.join(row)} |", flush=True)
    if options.verbose:
        print(summary["all"])
    print(f"\nLoad at the end {os.getloadavg()[0]:.1f}.")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
