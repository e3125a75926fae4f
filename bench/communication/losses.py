"""Validation loss of each communication method at equal steps, with a byte-level language model.

    python bench/communication/losses.py [--steps 300] [--seeds 1] [--ranks 2] [--rates 3e-3,6e-3]

Trains real sessions of forked ranks on this machine and does not measure time. Each method is
trained at every learning rate and compared at its best one. Prints a line for each training, then a
table in Markdown. The text is that of this project's documentation, or of the files given by
``--text``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from paceline import train
from paceline.recipes.optimization import Curve

ROOT = Path(__file__).parents[2]
METHODS = ("exact", "fp16", "bf16", "int8", "int4", "local:10")
LENGTH = 64


class Model(nn.Module):
    """A causal transformer over bytes; 0.15 million parameters."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        count = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(count)
        hidden = self.bytes(text) + self.positions.weight[:count]
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.out(self.norm(hidden))


def load_text(files: list[Path]) -> tuple[Tensor, Tensor]:
    """Sequences for training and for validation, shape ``[n, LENGTH + 1]``, uint8."""
    raw = bytearray(b"\n".join(file.read_bytes() for file in sorted(files)))
    text = torch.frombuffer(raw, dtype=torch.uint8)
    pieces = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    held_out = torch.arange(len(pieces)) % 10 == 0
    return pieces[~held_out], pieces[held_out][:256]


def train_rank(folder: Path, method: str, rate: float, seed: int, steps: int, text: Any) -> None:
    """Train one rank; rank 0 writes the validation loss to ``folder``."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    pieces, held_out = text
    with train.join(run_dir=folder / "run", seed=seed, quiet=True, check_every=steps) as session:
        network = session.place(Model())
        optimizer = torch.optim.AdamW(network.parameters(), rate, weight_decay=0.01)
        schedule = LambdaLR(optimizer, Curve("cosine", steps, 0.1))
        model = session.prepare(network, optimizer, schedule, clip_norm=1.0, communication=method)
        loader = session.loader(TensorDataset(pieces), 16)
        for _ in session.epochs(loader, steps=steps):
            for (batch,) in loader:
                session.step(losses(model, batch))
        session.verify()
        with torch.inference_mode():
            network.eval()
            loss = float(losses(network, held_out).mean())
        if session.world.rank == 0:
            (folder / "loss.json").write_text(json.dumps(loss))


def losses(model: nn.Module, batch: Tensor) -> Tensor:
    batch = batch.long()
    outputs = model(batch[:, :-1]).transpose(1, 2)
    return cross_entropy(outputs, batch[:, 1:], reduction="none").mean(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rates", default="2e-3,4e-3,8e-3")
    parser.add_argument("--ways", default=",".join(METHODS))
    parser.add_argument("--text", nargs="*", default=[])
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests" / "train"))
    import forked_worlds

    files = [Path(item) for item in options.text] or [*ROOT.glob("docs/*.md"), ROOT / "README.md"]
    text = load_text(files)
    rates = [float(item) for item in options.rates.split(",")]
    losses_by_case: dict[tuple[str, float], list[float]] = {}
    for seed in range(options.seeds):
        for rate in rates:
            for method in options.ways.split(","):
                with tempfile.TemporaryDirectory() as temporary:
                    folder = Path(temporary)
                    processes = forked_worlds.start(
                        options.ranks,
                        lambda: train_rank(folder, method, rate, seed, options.steps, text),  # noqa: B023
                    )
                    statuses = forked_worlds.finish(processes, timeout=3600)
                    assert not any(statuses), statuses
                    loss = json.loads((folder / "loss.json").read_text())
                losses_by_case.setdefault((method, rate), []).append(loss)
                print(f"{method:12} rate {rate:g} seed {seed}: {loss:.4f} nats", flush=True)
    print(table(losses_by_case, rates))


def table(losses_by_case: dict[tuple[str, float], list[float]], rates: list[float]) -> str:
    """Table of mean losses over the seeds, with each method's best and its difference to exact."""
    mean = {key: statistics.fmean(values) for key, values in losses_by_case.items()}
    methods = list(dict.fromkeys(method for method, _ in losses_by_case))
    lowest = {method: min((mean[method, rate], rate) for rate in rates) for method in methods}
    lines = [
        f"| method | {' | '.join(f'{rate:g}' for rate in rates)} | best | against exact |",
        f"|---|{'---|' * len(rates)}---|---|",
    ]
    for method in methods:
        cells = " | ".join(f"{mean[method, rate]:.4f}" for rate in rates)
        loss = lowest[method][0]
        lines.append(f"| {method} | {cells} | {loss:.4f} | {loss - lowest[methods[0]][0]:+.4f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
