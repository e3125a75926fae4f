"""A small model trained from scratch on two hosts, against a plain script on one host.

    python bench/language/from_scratch.py --text kjv.txt [--tokens 400000] [--hosts 2] [--out FILE]

``--text`` is a text in UTF-8, such as the King James Bible of Debian's packages bible-kjv and
bible-kjv-text (``bible -f Ge1:1-Re22:21``); without it, the docstrings of the standard library.

Both train about two million parameters on the same tokens, rows and held-out text, with one core
per host: ``paceline train language`` on two hosts of a lab (no limit of the link), the script on
one. The script is a decoder like GPT-2 in the manner of nanoGPT: learned positions, LayerNorm,
GELU, tied embeddings, AdamW with warm-up and cosine. They run one after another. The table
adds the bits per byte of ``xz -9e`` and ``zstd -19`` on the held-out text, alone and after the
training text.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import two_hosts  # also puts src on the path

from paceline.lab import Lab, LabOptions

DEPTH, VOCABULARY, LENGTH, ROWS = 3, 3072, 256, 16
PEER_LR, PEER_WIDTH, PEER_LAYERS, PEER_HEADS = 1e-3, 192, 3, 6


@dataclass
class Result:
    """Parameters, bits per byte of the held-out text, seconds of all steps, and load before."""

    name: str
    parameters: int
    bits_per_byte: float
    seconds: float
    load: float


def train_paceline(folder: Path, text: Path, steps: int, hosts: int) -> Result:
    run, load = folder / f"run-{hosts}", os.getloadavg()[0]
    with Lab(LabOptions(hosts=hosts, share=(str(folder),))) as lab:
        argv = [
            sys.executable, "-m", "paceline", "train", "language", "-H", ",".join(lab.names),
            "--ssh-config", str(lab.ssh_config), "--run-dir", str(run), "--device=cpu",
            "--env", "OMP_NUM_THREADS=1", f"--data={text}", f"--depth={DEPTH}",
            f"--vocab-size={VOCABULARY}", f"--max-length={LENGTH}", f"--global-batch={ROWS}",
            f"--steps={steps}", f"--evaluate-every={steps}", "--log-every=1",
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(two_hosts.ROOT / "src")}
        completed = subprocess.run(argv, env=environment, cwd=folder, capture_output=True,
                                   text=True, check=False)  # fmt: skip
    if completed.returncode:
        raise SystemExit(completed.stdout[-1500:] + completed.stderr[-1500:])
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = [record["time"] for record in records if record["split"] == "train"]
    validation = next(record for record in reversed(records) if record["split"] == "val")
    seconds = (times[-1] - times[0]) * steps / (len(times) - 1)
    size = int(completed.stdout.split(" parameters;")[0].rsplit(" ", 1)[-1].replace(",", ""))
    return Result(f"paceline, {hosts} hosts", size, validation["bits_per_byte"], seconds, load)


def train_peer(folder: Path, steps: int) -> Result:
    """Runs the plain script on one host."""
    load, argv = os.getloadavg()[0], [sys.executable, __file__, "--peer", str(folder)]
    with Lab(LabOptions(hosts=1, share=(str(folder),))) as lab:
        completed = lab.exec("n1", [*argv, "--steps", str(steps)], env={"OMP_NUM_THREADS": "1"})
    if completed.returncode:
        raise SystemExit(completed.stderr[-1500:])
    content = json.loads((folder / "peer.json").read_text())
    return Result("script like nanoGPT, 1 host", **content, load=load)


def peer(folder: Path, steps: int) -> None:
    """The script: trains on train.bin, evaluates on val.bin."""
    import numpy as np
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F  # noqa: N812 - its usual name

    torch.set_num_threads(1)
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm, self.mlp_norm = nn.LayerNorm(PEER_WIDTH), nn.LayerNorm(PEER_WIDTH)
            self.attention = nn.Linear(PEER_WIDTH, 3 * PEER_WIDTH, bias=False)
            self.output = nn.Linear(PEER_WIDTH, PEER_WIDTH, bias=False)
            self.up = nn.Linear(PEER_WIDTH, 4 * PEER_WIDTH, bias=False)
            self.down = nn.Linear(4 * PEER_WIDTH, PEER_WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            rows, length, width = x.shape
            parts = self.attention(self.attention_norm(x)).view(rows, length, 3, PEER_HEADS, -1)
            q, k, v = parts.permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.output(mixed.transpose(1, 2).reshape(rows, length, width))
            return x + self.down(F.gelu(self.up(self.mlp_norm(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCABULARY, PEER_WIDTH)
            self.positions = nn.Embedding(LENGTH, PEER_WIDTH)
            self.blocks = nn.Sequential(*(Block() for _ in range(PEER_LAYERS)))
            self.norm = nn.LayerNorm(PEER_WIDTH)
            for name, parameter in self.named_parameters():
                if parameter.ndim == 2:
                    scale = (2 * PEER_LAYERS) ** -0.5 if "output" in name or "down" in name else 1
                    nn.init.normal_(parameter, std=0.02 * scale)

        def forward(self, tokens: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
            x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
            scores = F.linear(self.norm(self.blocks(x)), self.tokens.weight)
            return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction=reduction)

    model = Model()
    decayed = [p for p in model.parameters() if p.ndim == 2]
    not_decayed = [p for p in model.parameters() if p.ndim < 2]
    groups: list[Any] = [{"params": decayed, "weight_decay": 0.1},
                         {"params": not_decayed, "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, PEER_LR, betas=(0.9, 0.99), fused=True)
    warm_up = max(1, steps // 20)
    data = np.fromfile(folder / "train.bin", np.uint16).astype(np.int64)
    generator = np.random.default_rng(0)
    start = time.perf_counter()
    for step in range(steps):
        progress = (step - warm_up) / max(1, steps - warm_up)
        factor = 0.1 + 0.45 * (1 + math.cos(math.pi * max(0.0, progress)))
        for group in optimizer.param_groups:
            group["lr"] = PEER_LR * min((step + 1) / warm_up, factor)
        starts = generator.integers(0, len(data) - LENGTH - 1, ROWS)
        rows = torch.from_numpy(data[starts[:, None] + np.arange(LENGTH + 1)])
        optimizer.zero_grad()
        model(rows[:, :-1], rows[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    seconds, nats = time.perf_counter() - start, 0.0
    validation = torch.from_numpy(np.fromfile(folder / "val.bin", np.uint16).astype(np.int64))
    with torch.no_grad():
        for offset in range(0, len(validation) - 1, LENGTH):
            row = validation[None, offset : offset + LENGTH + 1]
            nats += float(model(row[:, :-1], row[:, 1:], "sum"))
    num_bytes = json.loads((folder / "sizes.json").read_text())["val"]
    result = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "bits_per_byte": nats / math.log(2) / num_bytes,
        "seconds": seconds,
    }
    (folder / "peer.json").write_text(json.dumps(result))


def make_tokens(text: Path, folder: Path) -> tuple[int, bytes, bytes]:
    """Writes the recipe's tokens; returns their number, and the texts of both parts."""
    from paceline.recipes.language.corpus import Corpus
    from paceline.recipes.language.options import LanguageOptions
    from paceline.recipes.language.token_files import write_tokens

    corpus = Corpus(LanguageOptions(data=str(text)))
    write_tokens(corpus, VOCABULARY, folder)
    parts = {part: "".join(corpus.texts(part)).encode() for part in ("train", "val")}
    (folder / "sizes.json").write_text(json.dumps({n: len(t) for n, t in parts.items()}))
    return (folder / "train.bin").stat().st_size // 2, parts["train"], parts["val"]


def compressed_size(program: list[str], content: bytes) -> int:
    return len(subprocess.run(program, input=content, capture_output=True, check=True).stdout)


def compare_compressors(training: bytes, validation: bytes) -> list[str]:
    """Returns rows of bits per byte of the held-out text, alone and after the training text."""
    rows = []
    for program in (["xz", "-9e", "-c"], ["zstd", "-19", "--long=27", "-c"]):
        single_size = compressed_size(program, validation)
        additional_size = compressed_size(program, training + validation) - compressed_size(
            program, training
        )
        name, bits = (
            " ".join(program[:2]),
            [8 * size / len(validation) for size in (single_size, additional_size)],
        )
        rows.append(f"| {name}, held-out text alone | | {bits[0]:.3f} | |")
        rows.append(f"| {name}, after the training text | | {bits[1]:.3f} | |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=400_000)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--peer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.peer:
        peer(options.peer, options.steps)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "text.txt"
        if options.text:
            text.write_bytes(options.text.read_bytes())
        else:
            text.write_text("\n\n".join(answer for _, answer in two_hosts.conversations()))
        count, training, validation = make_tokens(text, folder)
        steps = options.tokens // (ROWS * LENGTH)
        results = [train_peer(folder, steps)]
        print(results[0], flush=True)  # hours may pass before the table is complete
        for hosts in options.hosts:
            results.append(train_paceline(folder, text, steps, hosts))
            print(results[-1], flush=True)
        seconds = results[0].seconds
        lines = [
            two_hosts.machine(["torch", "tokenizers"]), "",
            f"{len(training):,} bytes of training text ({count:,} tokens), {len(validation):,} held"
            f" out; {steps} steps of {ROWS} × {LENGTH} tokens.", "",
            "| | parameters | bits per byte | seconds of the steps | to the script | load before |",
            "|---|--:|--:|--:|--:|--:|",
            *(f"| {r.name} | {r.parameters:,} | {r.bits_per_byte:.3f} | {r.seconds:.0f} |"
              f" {r.seconds / seconds:.2f} | {r.load:.1f} |" for r in results),
            *(f"{row} | |" for row in compare_compressors(training, validation)),
        ]  # fmt: skip
    page = "\n".join(lines) + "\n"
    print(page)
    if options.out:
        options.out.write_text(page)


if __name__ == "__main__":
    main()
