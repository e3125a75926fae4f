"""Accuracy of the image recipe on real images: lab hosts over SSH, one process, a baseline.

    python bench/image/accuracy.py --data fashion-mnist --model resnet18 --epochs 2 --hosts 2
    python bench/image/accuracy.py --data cifar10 --data-dir DIR --model resnet18 --epochs 2 \\
        --hosts 2 --baseline --augment flip crop
    python bench/image/accuracy.py --data fashion-mnist --epochs 3 --hosts 3 --alone

Fashion-MNIST comes with Debian's package dataset-fashion-mnist; CIFAR-10 in its binary form can be
made by ``bench/originals/cifar10.py``. ``--baseline`` is a linear classifier on the pixels,
trained here, that says what is easy.
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
    options, more = parser().parse_known_args()
    flags = recipe_flags(options, more)
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
        for name, where in places(options):
            with where as flags_of_place:
                lines.append(row(name, Path(folder, name[:2]), [*flags, *flags_of_place]))
    if options.baseline:
        lines.append(baseline(options.data, options.data_dir))
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("--data", required=True)
    made.add_argument("--data-dir", default="")
    made.add_argument("--model", default="cnn")
    made.add_argument("--epochs", default="2")
    made.add_argument("--hosts", type=int, default=0)
    made.add_argument("--alone", action="store_true", help="one process on this machine, too")
    made.add_argument("--baseline", action="store_true")
    made.add_argument("--out", type=Path)
    return made


def recipe_flags(options: argparse.Namespace, more: list[str]) -> list[str]:
    named = ["data", "model", "epochs", *(["data_dir"] if options.data_dir else [])]
    flags = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in named]
    return [*flags, *more]


def places(
    options: argparse.Namespace,
) -> Iterator[tuple[str, contextlib.AbstractContextManager[list[str]]]]:
    """Where to train, with the flags that say so."""
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


def row(name: str, run: Path, flags: list[str]) -> str:
    begun = time.monotonic()
    subprocess.run([*TRAIN, *flags, "--run-dir", str(run)], check=True, timeout=3600)
    metrics = json.loads((run / "result.json").read_text())["metrics"]
    seconds = time.monotonic() - begun
    return f"| {name} | {metrics['accuracy']:.4f} | {metrics['samples']:.0f} | {seconds:.0f} |"


def baseline(data: str, folder: str) -> str:
    """A linear classifier on standardised pixels, of the same splits, after five epochs."""
    import torch

    from paceline.recipes.data.images import load
    from paceline.recipes.options import ImageOptions

    begun = time.monotonic()
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
    seconds = time.monotonic() - begun
    return f"| linear classifier on the pixels | {score:.4f} | {len(held_out)} | {seconds:.0f} |"


def flat(part: Split) -> NDArray[np.float32]:
    """All pixels of each image in a row."""
    count = len(part.labels)
    return part.pixels(np.arange(count)).reshape(count, -1).astype(np.float32)


if __name__ == "__main__":
    main()
