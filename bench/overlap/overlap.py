"""How much of the exchange of gradients is hidden, beside DDP as it is.

``python bench/overlap/overlap.py`` prints Markdown. It needs root, ``ip`` and ``tc``, and makes its
own hosts (``bench/links.py``). In one run, on the same links, it measures

* C: a step without any exchange, on all ranks at once;
* W: an all-reduce of as many bytes as the gradients have, alone;
* T: a step of DDP with default settings, and one of a session.

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


class Slept(torch.autograd.Function):
    """Computing, as far as the clock sees it."""

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


class Sleeper(nn.Module):
    def __init__(self, elements: int, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(elements)), seconds

    def forward(self, inputs: Any) -> Any:
        return Slept.apply(inputs, self.weight, self.seconds)


class Emulated(nn.Module):
    def __init__(self, megabytes: float, seconds: float, layers: int = 24) -> None:
        super().__init__()
        each = int(megabytes * 250_000 / layers)
        self.layers = nn.Sequential(*[Sleeper(each, seconds / 3 / layers) for _ in range(layers)])

    def forward(self, inputs: Any) -> Any:
        return self.layers(inputs.float().sum() * torch.ones(1, requires_grad=True))

    def loss(self, made: Any, inputs: Any) -> Any:
        return made.sum()


class Text(nn.Module):
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

    def loss(self, made: Any, inputs: Any) -> Any:
        return cross_entropy(made.flatten(0, 1), inputs[:, 1:].flatten())


CASES = {
    # name: (what, rate, model, samples of a rank, ranks)
    "real-100": ("real", "100mbit", lambda: Text(192, 4), 12, (2,)),
    "real-1000": ("real", "1gbit", lambda: Text(384, 6), 12, (2,)),
    "emulated-100": ("emulated", "100mbit", lambda: Emulated(7.6, 0.16), 1, (2, 4, 8, 16)),
    "emulated-1000": ("emulated", "1gbit", lambda: Emulated(48, 0.287), 1, (2, 4, 8, 16)),
}


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    emulated = isinstance(module, Emulated)
    made = torch.optim.SGD if emulated else torch.optim.AdamW
    return made(module.parameters(), lr=1e-3)


def plain(model: nn.Module, module: Any, inputs: Any, steps: int) -> list[float]:
    """Seconds of steps of an ordinary loop."""
    optimizer, taken = optimizer_of(module), []
    for _ in range(steps):
        began = time.perf_counter()
        module.loss(model(inputs), inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.perf_counter() - began)
    return taken


def by_session(make: Any, samples: int, steps: int) -> tuple[list[float], dict[str, Any]]:
    """Seconds of steps of a session, and what it found out."""
    moments: list[float] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        session = train.join(run_dir=folder, check_every=10**9, log_every=10**9, device="cpu")
        module = make()
        model = session.prepare(module, optimizer_of(module), overlap="auto")
        samples_in_all = steps * samples * session.world.size
        data = TensorDataset(torch.randint(0, 256, (samples_in_all, 129)))
        loader = session.loader(data, samples * session.world.size, workers=0)
        for _ in session.epochs(loader, steps=steps):
            for (inputs,) in loader:
                session.step(module.loss(model(inputs), inputs))
                moments.append(time.perf_counter())
        session.leaves_group = False
        assert session._loop.bucket_trial is not None
        about = session._loop.bucket_trial.summary()
        about["all"] = session._loop.bucket_trial.seconds
        session.close()
    return [after - before for before, after in itertools.pairwise(moments)], about


def rank(number: int, ranks: int, case: str, steps: int, threads: int) -> dict[str, Any]:
    """All measurements of one case, as this rank sees them."""
    _, _, make, samples, _ = CASES[case]
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    module = make()
    inputs = torch.randint(0, 256, (samples, 129))
    elements = sum(one.numel() for one in module.parameters())
    dist.barrier()
    found: dict[str, Any] = {"C": plain(module, module, inputs, 6)[2:], "MB": elements * 4e-6}
    flat, alone = torch.ones(elements), []
    for _ in range(4):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(flat)
        alone.append(time.perf_counter() - began)
    found["W"] = alone[1:]
    dist.barrier()
    ddp = nn.parallel.DistributedDataParallel(module)
    found["ddp"] = plain(ddp, module, inputs, 10)[3:]
    del ddp
    dist.barrier()
    torch.manual_seed(1)
    taken, about = by_session(make, samples, steps)
    found["ours"], found["about"] = taken[-12:], about
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--steps", type=int, default=55)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    columns = ["case", "ranks", "MB", "C", "W", "DDP", "T/bound", "session", "T/bound", "chosen"]
    print(f"# Exchange beside computing\n\n{links.machine()}, {options.threads} threads a rank\n\n"
          "Medians, in ms, of the slowest rank; the bound is the longer of C and W.\n\n"
          f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)  # fmt: skip
    well = True
    for case in options.case or CASES:
        what, rate, _, _, sizes = CASES[case]
        for size in options.ranks or sizes:
            every = links.on_hosts(size, rate, rank, case, options.steps, options.threads)
            found = {
                name: max(statistics.median(one[name]) for one in every)
                for name in ("C", "W", "ddp", "ours")
            }
            bound, about = max(found["C"], found["W"]), every[0]["about"]
            well &= found["ours"] <= 1.08 * bound
            size_of = about["bucket_bytes"]
            chosen = f"{size_of / 1e6:.2f} MB" if size_of else "sizes as they are"
            ms = {name: f"{1e3 * one:.0f}" for name, one in found.items()}
            row = [
                f"{what}, {rate}", str(size), f"{every[0]['MB']:.1f}", ms["C"], ms["W"], ms["ddp"],
                f"{found['ddp'] / bound:.2f}", ms["ours"], f"**{found['ours'] / bound:.2f}**",
                chosen,
            ]  # fmt: skip
            print(f"| {' | '.join(row)} |", flush=True)
    if options.verbose:
        print(about["all"])
    print(f"\nLoad at the end {os.getloadavg()[0]:.1f}.")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
