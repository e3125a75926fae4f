"""Transfer learning against training from scratch, at equal time, on real pictures.

A resnet18 is trained on the six animals of CIFAR-10. Then, with few pictures, it learns to tell

* the four vehicles of CIFAR-10, 250 pictures of each, and
* the ten garments of Fashion-MNIST, 100 pictures of each (grey, of another size and source),

from random weights, with a frozen backbone (what `--weights RUN` does by itself) and with
`--no-freeze`. All get the same time: CPU seconds of the training process between its first batch
and its last update, evaluations not counted, one thread; a run of a few steps measures first how
many steps fit. What neighbours do on the machine does not count. The rest is the recipe.

    python bench/transfer/transfer.py prepare CIFAR FOLDER
    python bench/transfer/transfer.py pretrain FOLDER
    python bench/transfer/transfer.py compare FOLDER --seconds 10 40 --out results.md

CIFAR is a folder with CIFAR-10's files, which bench/originals/cifar10.py can make.
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
"""Training pictures of each class."""
SIZE = ("--model=resnet18", "--image-size=32")
# The better of two rates each: from scratch, and for all of a pretrained network.
MANNERS = {
    "from scratch": ("--lr=4e-3",),
    "from scratch, a smaller rate": ("--lr=1e-3",),
    "pretrained, frozen backbone": ("--lr=4e-3", "--weights=PRETRAINED"),
    "pretrained, all of it trained": ("--lr=1e-3", "--weights=PRETRAINED", "--no-freeze"),
}
QUIET = ("--device=cpu", "--checkpoint-every=never", "--resume=never")


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = made.add_subparsers(required=True, dest="verb")
    first = verbs.add_parser("prepare")
    first.add_argument("cifar", type=Path)
    for parser in (first, verbs.add_parser("pretrain"), last := verbs.add_parser("compare")):
        parser.add_argument("folder", type=Path)
    last.add_argument("--seconds", type=float, nargs="+", default=[10.0, 40.0])
    last.add_argument("--out", type=Path)
    once = verbs.add_parser("once", help="one training, used by compare")
    once.add_argument("seconds", type=float)
    once.add_argument("flags", nargs=argparse.REMAINDER)
    options = made.parse_args()
    if options.verb == "prepare":
        prepare(options.cifar, options.folder)
    elif options.verb == "pretrain":
        pretrain(options.folder)
    elif options.verb == "once":
        print(json.dumps(timed(options.seconds, options.flags)))
    else:
        text = compare(options.folder, options.seconds)
        print(text)
        if options.out:
            options.out.write_text(text)


def prepare(cifar: Path, folder: Path) -> None:
    """Three sets of pictures, each a folder with ``train`` and ``test``, and classes in them."""
    from paceline.recipes.data.images import load
    from paceline.recipes.options import ImageOptions

    photos = load(ImageOptions(data="cifar10", data_dir=str(cifar)))
    clothes = load(ImageOptions(data="fashion-mnist"))
    vehicles = tuple(name for name in photos.classes if name not in ANIMALS)
    for name, data, classes, most in (
        ("animals", photos, ANIMALS, 10**9),
        ("vehicles", photos, vehicles, TARGETS["vehicles"]),
        ("garments", clothes, clothes.classes, TARGETS["garments"]),
    ):
        for part, limit in (("train", most), ("test", HELD_OUT // len(classes))):
            split = data.splits[part]
            for label in classes:
                ids = np.flatnonzero(split.labels == data.classes.index(label))[:limit]
                write(split.pixels(ids), folder / name / part / label.replace("/", "-"))


def write(pixels: np.ndarray, folder: Path) -> None:
    from PIL import Image

    folder.mkdir(parents=True)
    for number, one in enumerate(pixels):
        picture = one[0] if len(one) == 1 else one.transpose(1, 2, 0)
        Image.fromarray(picture).save(folder / f"{number:05}.png")


def pretrain(folder: Path) -> None:
    flags = [*SIZE, *QUIET, f"--data={folder / 'animals'}", f"--run-dir={folder / 'pretrained'}"]
    more = ["--epochs=2", "--global-batch=128", "--augment", "flip", "crop"]
    command = [sys.executable, "-m", "paceline.recipes.image", *flags, *more]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def compare(folder: Path, budgets: list[float]) -> str:
    found = json.loads((folder / "pretrained/model/config.json").read_text())["metrics"]["test"]
    lines = [
        f"# Transfer learning and training from scratch, {datetime.date.today().isoformat()}",
        "",
        "`bench/transfer/transfer.py`, resnet18 on pictures of 32×32 pixels, one thread; times are",
        "CPU seconds of the training. The pretrained network tells the six animals of CIFAR-10",
        f"with accuracy {found['accuracy']:.4f} (two epochs of 30,000 pictures).",
        "",
        "| pictures | | budget, CPU s | used | steps | accuracy |",
        "|---|---|---|---|---|---|",
    ]
    for target, seconds in ((t, s) for t in TARGETS for s in budgets):
        for name, flags in MANNERS.items():
            one = at_equal_time(folder, target, seconds, [*flags])
            used = f"{one['seconds']:.1f} | {one['steps']} | {one['accuracy']:.3f} |"
            lines.append(f"| {target} | {name} | {seconds:g} | {used}")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines) + "\n"


def at_equal_time(folder: Path, target: str, seconds: float, flags: list[str]) -> dict[str, float]:
    """A training of as many steps as fit into so many seconds."""
    given = [one.replace("PRETRAINED", str(folder / "pretrained")) for one in flags]
    common = [*SIZE, *QUIET, f"--data={folder / target}", "--epochs=1000", *given]
    short = once(seconds, [*common, f"--run-dir={folder / 'short'}", "--steps=8"])
    steps = max(1, round(seconds / short["step_seconds"]))
    return once(seconds, [*common, f"--run-dir={folder / 'run'}", f"--steps={steps}"])


def once(seconds: float, flags: list[str]) -> dict[str, float]:
    command = [sys.executable, __file__, "once", str(seconds), *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, env=env, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def timed(seconds: float, flags: list[str]) -> dict[str, float]:
    """One training in this process, with a clock around its steps; late ones end it."""
    import time

    from paceline import train
    from paceline.recipes import image

    step, evaluate, begin = train.Session.step, image.evaluate, train.Session.epochs
    clock = {"last": 0.0, "spent": 0.0, "steps": 0.0}
    each: list[float] = []

    def begun(self, *args, **more):  # type: ignore[no-untyped-def]
        clock["last"] = time.process_time()
        yield from begin(self, *args, **more)

    def stepped(self, *args, **more):  # type: ignore[no-untyped-def]
        whole = step(self, *args, **more)
        now = time.process_time()
        each.append(now - clock["last"])
        clock["last"] = now
        if sum(each) > 1.15 * seconds:
            self.stop("the time is up")
        return whole

    def evaluated(*args, **more):  # type: ignore[no-untyped-def]
        found = evaluate(*args, **more)
        clock["last"] = time.process_time()
        clock["accuracy"] = found["accuracy"]
        return found

    train.Session.step, train.Session.epochs, image.evaluate = stepped, begun, evaluated  # type: ignore[method-assign]
    assert image.main(flags) == 0
    usual = float(np.median(each[2:] or each))
    return {
        "seconds": sum(each),
        "steps": len(each),
        "step_seconds": usual,
        "accuracy": clock["accuracy"],
    }


if __name__ == "__main__":
    main()
