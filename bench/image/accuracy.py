"""Accuracy of the image recipe on real images: lab hosts over SSH, one process, and a baseline.

    python bench/image/accuracy.py --data fashion-mnist --model resnet18 --epochs 2 --hosts 2
    python bench/image/accuracy.py --data cifar10 --data-dir DIR --model resnet18 --epochs 2 \\
        --hosts 2 --baseline --augment flip crop
    python bench/image/accuracy.py --data fashion-mnist --epochs 3 --hosts 3 --alone

Fashion-MNIST comes with Debian's package dataset-fashion-mnist; CIFAR-10 in its binary form can be
made by ``bench/originals/cifar10.py``. ``--baseline`` adds a
linear classifier on the pixels, which shows how difficult the data are.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.lab import Lab, LabOptions
from paceline.recipes.data.images import Split

TRAIN = [sys.executable, "-m", "paceline", "train", "image"]


def main() -> None:
    options, recipe_arguments = parser().parse_known_args()
    flags = recipe_flags(options, recipe_arguments)
    lines = [
        f"# {options.data}, {datetime.date.today().isoformat()}",
        "",
        f"{platform.machine()}, {os.cpu_count()} CPUs for all processes together;",
        f"`paceline train image {' '.join(flags)}`, all held-out images.",
        "",
        "| | accuracy | held-out images | seconds |",
        "|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name, context in placements(options):
            with context as placement_flags:
                lines.append(train_row(name, Path(folder, name[:2]), [*flags, *placement_flags]))
    if options.baseline:
        lines.append(baseline_row(options.data, options.data_dir))
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


def parser() -> argparse.ArgumentParser:
    arguments_parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    arguments_parser.add_argument("--data", required=True)
    arguments_parser.add_argument("--data-dir", default="")
    arguments_parser.add_argument("--model", default="cnn")
    arguments_parser.add_argument("--epochs", default="2")
    arguments_parser.add_argument("--hosts", type=int, default=0)
    arguments_parser.add_argument(
        "--alone", action="store_true", help="one process on this machine, too"
    )
    arguments_parser.add_argument("--baseline", action="store_true")
    arguments_parser.add_argument("--out", type=Path)
    return arguments_parser


def recipe_flags(options: argparse.Namespace, recipe_arguments: list[str]) -> list[str]:
    option_names = ["data", "model", "epochs", *(["data_dir"] if options.data_dir else [])]
    flags = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in option_names]
    return [*flags, *recipe_arguments]


def placements(
    options: argparse.Namespace,
) -> Iterator[tuple[str, contextlib.AbstractContextManager[list[str]]]]:
    """Name and context of each placement; the context yields the flags of the recipe."""
    if options.hosts:
        yield f"{options.hosts} hosts × 1 process, SSH", on_hosts(options.hosts)
    if options.alone or not options.hosts:
        yield "1 process", contextlib.nullcontext([])


@contextlib.contextmanager
def on_hosts(count: int) -> Iterator[list[str]]:
    # Every host of a lab counts all CPUs of the machine as its own.
    threads = f"--env=OMP_NUM_THREADS={max(1, (os.cpu_count() or 1) // count)}"
    with Lab(LabOptions(hosts=count)) as lab:
        yield [threads, "--hosts", str(lab.hostfile), "--ssh-config", str(lab.ssh_config)]


def train_row(name: str, run: Path, flags: list[str]) -> str:
    start = time.monotonic()
    subprocess.run([*TRAIN, *flags, "--run-dir", str(run)], check=True, timeout=3600)
    metrics = json.loads((run / "result.json").read_text())["metrics"]
    seconds = time.monotonic() - start
    return f"| {name} | {metrics['accuracy']:.4f} | {metrics['samples']:.0f} | {seconds:.0f} |"


def baseline_row(data: str, folder: str) -> str:
    """Row of a linear classifier on standardised pixels of the same splits, after five epochs."""
    import torch

    from paceline.recipes.data.images import load
    from paceline.recipes.options import ImageOptions

    start = time.monotonic()
    torch.manual_seed(0)
    splits = load(ImageOptions(data=data, data_dir=folder)).splits
    train, test = (flat(splits[name]) for name in ("train", "test"))
    mean, deviation = train.mean(0), train.std(0) + 1e-3
    pixels, held_out = (torch.from_numpy((part - mean) / deviation) for part in (train, test))
    labels = [torch.from_numpy(splits[name].labels) for name in ("train", "test")]
    linear = torch.nn.Linear(pixels.shape[1], int(labels[0].max()) + 1)
    optimizer = torch.optim.AdamW(linear.parameters(), 1e-4, weight_decay=0.1)
    for order in (torch.randperm(len(pixels)) for _ in range(5)):
        for ids in order.split(64):
            torch.nn.functional.cross_entropy(linear(pixels[ids]), labels[0][ids]).backward()
            optimizer.step()
            optimizer.zero_grad()
    score = (linear(held_out).argmax(1) == labels[1]).float().mean().item()
    seconds = time.monotonic() - start
    return f"| linear classifier on the pixels | {score:.4f} | {len(held_out)} | {seconds:.0f} |"


def flat(part: Split) -> NDArray[np.float32]:
    """All pixels of each image in a row."""
    count = len(part.labels)
    return part.pixels(np.arange(count)).reshape(count, -1).astype(np.float32)


if __name__ == "__main__":
    main()
