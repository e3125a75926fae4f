"""What each way to communicate costs in loss: a language model of bytes, at equal steps.

    python bench/communication/losses.py [--steps 300] [--seeds 1] [--ranks 2] [--rates 3e-3,6e-3]

Real sessions of forked ranks on this machine; nothing here is about seconds. Each way is trained at
every learning rate and compared at its own best. Prints a line for each training, then a table in
Markdown. The text is that of this project's pages, or of the files that ``--text`` names.
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
WAYS = ("exact", "fp16", "bf16", "int8", "int4", "local:10")
LENGTH = 64


class Model(nn.Module):
    """A causal transformer over bytes; 0.15 million parameters."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
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
        found = self.bytes(text) + self.places.weight[:count]
        for layer in self.layers:
            found = layer(found, src_mask=mask, is_causal=True)
        return self.out(self.norm(found))


def read(files: list[Path]) -> tuple[Tensor, Tensor]:
    """Pieces for training and for validation, shape ``[n, LENGTH + 1]``, uint8."""
    raw = bytearray(b"\n".join(one.read_bytes() for one in sorted(files)))
    text = torch.frombuffer(raw, dtype=torch.uint8)
    pieces = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    held = torch.arange(len(pieces)) % 10 == 0
    return pieces[~held], pieces[held][:256]


def trained(folder: Path, way: str, rate: float, seed: int, steps: int, text: Any) -> None:
    """One rank of one training; the last loss goes to ``folder``."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    pieces, held = text
    with train.join(run_dir=folder / "run", seed=seed, quiet=True, check_every=steps) as session:
        network = session.place(Model())
        optimizer = torch.optim.AdamW(network.parameters(), rate, weight_decay=0.01)
        schedule = LambdaLR(optimizer, Curve("cosine", steps, 0.1))
        model = session.prepare(network, optimizer, schedule, clip_norm=1.0, communication=way)
        loader = session.loader(TensorDataset(pieces), 16)
        for _ in session.epochs(loader, steps=steps):
            for (batch,) in loader:
                session.step(losses(model, batch))
        session.verify()
        with torch.inference_mode():
            network.eval()
            loss = float(losses(network, held).mean())
        if session.world.rank == 0:
            (folder / "loss.json").write_text(json.dumps(loss))


def losses(model: nn.Module, batch: Tensor) -> Tensor:
    batch = batch.long()
    outputs = model(batch[:, :-1]).transpose(1, 2)
    return cross_entropy(outputs, batch[:, 1:], reduction="none").mean(1)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--steps", type=int, default=300)
    asked.add_argument("--seeds", type=int, default=1)
    asked.add_argument("--ranks", type=int, default=2)
    asked.add_argument("--rates", default="2e-3,4e-3,8e-3")
    asked.add_argument("--ways", default=",".join(WAYS))
    asked.add_argument("--text", nargs="*", default=[])
    given = asked.parse_args()
    sys.path.insert(0, str(ROOT / "tests" / "train"))
    import forking

    files = [Path(one) for one in given.text] or [*ROOT.glob("docs/*.md"), ROOT / "README.md"]
    text = read(files)
    rates = [float(one) for one in given.rates.split(",")]
    found: dict[tuple[str, float], list[float]] = {}
    for seed in range(given.seeds):
        for rate in rates:
            for way in given.ways.split(","):
                with tempfile.TemporaryDirectory() as made:
                    folder = Path(made)
                    begun = forking.start(
                        given.ranks,
                        lambda: trained(folder, way, rate, seed, given.steps, text),  # noqa: B023
                    )
                    statuses = forking.finish(begun, timeout=3600)
                    assert not any(statuses), statuses
                    loss = json.loads((folder / "loss.json").read_text())
                found.setdefault((way, rate), []).append(loss)
                print(f"{way:12} rate {rate:g} seed {seed}: {loss:.4f} nats", flush=True)
    print(table(found, rates))


def table(found: dict[tuple[str, float], list[float]], rates: list[float]) -> str:
    """Means over the seeds, in Markdown; the best of each way, and what it costs."""
    mean = {key: statistics.fmean(one) for key, one in found.items()}
    ways = list(dict.fromkeys(way for way, _ in found))
    best = {way: min((mean[way, rate], rate) for rate in rates) for way in ways}
    lines = [
        f"| way | {' | '.join(f'{rate:g}' for rate in rates)} | best | against exact |",
        f"|---|{'---|' * len(rates)}---|---|",
    ]
    for way in ways:
        each = " | ".join(f"{mean[way, rate]:.4f}" for rate in rates)
        loss = best[way][0]
        lines.append(f"| {way} | {each} | {loss:.4f} | {loss - best[ways[0]][0]:+.4f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
