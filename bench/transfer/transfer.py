"""Accuracy of transfer learning against training from scratch, at equal time, on real images.

A resnet18 is trained on the six animals of CIFAR-10. Then it is trained on few images to classify

* the four vehicles of CIFAR-10, with 250 images each, and
* the ten garments of Fashion-MNIST, with 100 images each (grey, of another size and source),

from random weights, with a frozen backbone (the default of `--weights RUN`) and with `--no-freeze`.
All get the same time: CPU seconds of the training process from its first batch to its last update,
without evaluations, with one thread. A short run measures first how many steps fit. CPU time hardly
depends on the load of the machine. All other options have the recipe's defaults.

    python bench/transfer/transfer.py prepare CIFAR FOLDER
    python bench/transfer/transfer.py pretrain FOLDER
    python bench/transfer/transfer.py compare FOLDER --seconds 10 40 --out results.md

CIFAR is a folder with CIFAR-10's files, which bench/originals/cifar10.py can create.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

ANIMALS = ("bird", "cat", "deer", "dog", "frog", "horse")
HELD_OUT = 1000
TARGETS = {"vehicles": 250, "garments": 100}
"""Training images of each class."""
SIZE = ("--model=resnet18", "--image-size=32")
# The better of two learning rates each, from scratch and for training all of a pretrained network.
VARIANTS = {
    "from scratch": ("--lr=4e-3",),
    "from scratch, a smaller rate": ("--lr=1e-3",),
    "pretrained, frozen backbone": ("--lr=4e-3", "--weights=PRETRAINED"),
    "pretrained, all of it trained": ("--lr=1e-3", "--weights=PRETRAINED", "--no-freeze"),
}
COMMON_FLAGS = ("--device=cpu", "--checkpoint-every=never", "--resume=never")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True, dest="verb")
    prepare_parser = verbs.add_parser("prepare")
    prepare_parser.add_argument("cifar", type=Path)
    for subparser in (
        prepare_parser,
        verbs.add_parser("pretrain"),
        compare_parser := verbs.add_parser("compare"),
    ):
        subparser.add_argument("folder", type=Path)
    compare_parser.add_argument("--seconds", type=float, nargs="+", default=[10.0, 40.0])
    compare_parser.add_argument("--out", type=Path)
    once_parser = verbs.add_parser("once", help="one training; used by compare")
    once_parser.add_argument("seconds", type=float)
    once_parser.add_argument("flags", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.verb == "prepare":
        prepare(options.cifar, options.folder)
    elif options.verb == "pretrain":
        pretrain(options.folder)
    elif options.verb == "once":
        print(json.dumps(train_with_clock(options.seconds, options.flags)))
    else:
        text = compare(options.folder, options.seconds)
        print(text)
        if options.out:
            options.out.write_text(text)


def prepare(cifar: Path, folder: Path) -> None:
    """Write three image folders with parts ``train`` and ``test`` and a folder for each class."""
    from paceline.recipes.data.images import load
    from paceline.recipes.options import ImageOptions

    photos = load(ImageOptions(data="cifar10", data_dir=str(cifar)))
    clothes = load(ImageOptions(data="fashion-mnist"))
    vehicles = tuple(name for name in photos.classes if name not in ANIMALS)
    for name, data, classes, max_per_class in (
        ("animals", photos, ANIMALS, 10**9),
        ("vehicles", photos, vehicles, TARGETS["vehicles"]),
        ("garments", clothes, clothes.classes, TARGETS["garments"]),
    ):
        for part, limit in (("train", max_per_class), ("test", HELD_OUT // len(classes))):
            split = data.splits[part]
            for label in classes:
                ids = np.flatnonzero(split.labels == data.classes.index(label))[:limit]
                write(split.pixels(ids), folder / name / part / label.replace("/", "-"))


def write(pixels: np.ndarray, folder: Path) -> None:
    from PIL import Image

    folder.mkdir(parents=True)
    for number, channels in enumerate(pixels):
        picture = channels[0] if len(channels) == 1 else channels.transpose(1, 2, 0)
        Image.fromarray(picture).save(folder / f"{number:05}.png")


def pretrain(folder: Path) -> None:
    flags = [
        *SIZE,
        *COMMON_FLAGS,
        f"--data={folder / 'animals'}",
        f"--run-dir={folder / 'pretrained'}",
    ]
    extra_flags = ["--epochs=2", "--global-batch=128", "--augment", "flip", "crop"]
    command = [sys.executable, "-m", "paceline.recipes.image", *flags, *extra_flags]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def compare(folder: Path, budgets: list[float]) -> str:
    metrics = json.loads((folder / "pretrained/model/config.json").read_text())["metrics"]["test"]
    lines = [
        f"# Transfer learning and training from scratch, {datetime.date.today().isoformat()}",
        "",
        "`bench/transfer/transfer.py`, resnet18 on images of 32×32 pixels, one thread; times are",
        "CPU seconds of the training. The pretrained network classifies the six animals of",
        f"CIFAR-10 with accuracy {metrics['accuracy']:.4f} (two epochs of 30,000 images).",
        "",
        "| images | | budget, CPU s | used | steps | accuracy |",
        "|---|---|---|---|---|---|",
    ]
    for target, seconds in ((t, s) for t in TARGETS for s in budgets):
        for name, flags in VARIANTS.items():
            result = train_for(folder, target, seconds, [*flags])
            cells = f"{result['seconds']:.1f} | {result['steps']} | {result['accuracy']:.3f} |"
            lines.append(f"| {target} | {name} | {seconds:g} | {cells}")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines) + "\n"


def train_for(folder: Path, target: str, seconds: float, flags: list[str]) -> dict[str, float]:
    """Train for as many steps as fit into ``seconds``."""
    own_flags = [flag.replace("PRETRAINED", str(folder / "pretrained")) for flag in flags]
    common = [*SIZE, *COMMON_FLAGS, f"--data={folder / target}", "--epochs=1000", *own_flags]
    trial = run_once(seconds, [*common, f"--run-dir={folder / 'short'}", "--steps=8"])
    steps = max(1, round(seconds / trial["step_seconds"]))
    return run_once(seconds, [*common, f"--run-dir={folder / 'run'}", f"--steps={steps}"])


def run_once(seconds: float, flags: list[str]) -> dict[str, float]:
    """Train once in a subprocess. Returns the measurements of :func:`train_with_clock`."""
    command = [sys.executable, __file__, "once", str(seconds), *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    completed = subprocess.run(command, check=True, env=env, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(completed.stdout.splitlines()[-1])
    return result


def train_with_clock(seconds: float, flags: list[str]) -> dict[str, float]:
    """Train in this process and measure the CPU time of its steps; stops 15 % after the budget."""
    import time

    from paceline import train
    from paceline.recipes import image

    step, evaluate, epochs = train.Session.step, image.evaluate, train.Session.epochs
    clock = {"last": 0.0, "spent": 0.0, "steps": 0.0}
    step_seconds: list[float] = []

    def timed_epochs(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        clock["last"] = time.process_time()
        yield from epochs(self, *args, **kwargs)

    def timed_step(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        result = step(self, *args, **kwargs)
        time_s = time.process_time()
        step_seconds.append(time_s - clock["last"])
        clock["last"] = time_s
        if sum(step_seconds) > 1.15 * seconds:
            self.stop("the time is up")
        return result

    def timed_evaluate(*args, **kwargs):  # type: ignore[no-untyped-def]
        metrics = evaluate(*args, **kwargs)
        clock["last"] = time.process_time()
        clock["accuracy"] = metrics["accuracy"]
        return metrics

    train.Session.step, train.Session.epochs, image.evaluate = (
        timed_step,
        timed_epochs,
        timed_evaluate,
    )  # type: ignore[method-assign]
    assert image.main(flags) == 0
    median_s = float(np.median(step_seconds[2:] or step_seconds))
    return {
        "seconds": sum(step_seconds),
        "steps": len(step_seconds),
        "step_seconds": median_s,
        "accuracy": clock["accuracy"],
    }


if __name__ == "__main__":
    main()
