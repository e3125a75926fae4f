"""How fast photos are made ready, against how fast networks take them.

Makes photos of 500×400 pixels, as class folders and packed into tar shards, then measures in turns,
by the wall clock and in CPU time, which other work on the machine hardly changes:

* images per second of one decoding core, for each way to decode;
* the pipeline alone: files and shards, through the loader, to the finished batch;
* training alone: the same batch again and again, on one core;
* and the recipe itself: how long it waited for data.

    python bench/pipeline/photos.py [--networks resnet18 resnet50] [--rounds 5] [--photos 600]
                                    [--device cuda --batch 256]

With ``--device cuda`` the networks compute there; the photos are still made ready by CPUs.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import cross_entropy

from paceline import train
from paceline.recipes.common import fast_dtype
from paceline.recipes.data import decoding
from paceline.recipes.data.images import load
from paceline.recipes.networks import MODELS
from paceline.recipes.options import ImageOptions
from paceline.recipes.preprocessing import ImageTensors, Normalisation
from paceline.train.data.fetch import BatchRequest, Draws, Fetch, usable_cpus

CLASSES, SIZE = 10, 224
NORMALISE = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def photo(draw: np.random.Generator, width: int = 500, height: int = 400) -> bytes:
    """Smooth areas with grain, as large as a photo of its kind (about 70 kB)."""
    rough = draw.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
    smooth = Image.fromarray(rough).resize((width, height), Image.Resampling.BICUBIC)
    grain = draw.integers(-12, 13, (height, width, 3))
    pixels = (np.asarray(smooth).astype(int) + grain).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def written(folder: Path, count: int) -> list[bytes]:
    draw = np.random.default_rng(0)
    made = [photo(draw) for _ in range(count)]
    for number, content in enumerate(made):
        path = folder / "files" / str(number % CLASSES) / f"{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    samples = ({"jpg": one, "cls": n % CLASSES} for n, one in enumerate(made))
    train.write_shards(folder / "shards", samples, size=8 << 20)
    return made


def ways(contents: list[bytes]) -> dict[str, Callable[[int], object]]:
    """Each makes one training image of a photo."""
    numbers = Draws(0, 0, np.arange(len(contents))).uniform(decoding.CROP_RANDOMS)

    def ours(one: int) -> object:
        return decoding.random_crop(io.BytesIO(contents[one]), numbers[one], SIZE)

    def without_draft(one: int) -> object:
        image = Image.open(io.BytesIO(contents[one]))
        box = decoding.crop_box(*image.size, numbers[one])
        return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box))

    def shrunk(one: int) -> object:
        return decoding.decode_resized(io.BytesIO(contents[one]), 3, (256, 256), crop=True)

    found: dict[str, Callable[[int], object]] = {
        "Pillow: cut out, reduced where it can be": ours,
        "Pillow: cut out, always whole": without_draft,
        "Pillow: shrunk to 256 (evaluation)": shrunk,
    }
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
        from torchvision.transforms.v2.functional import resized_crop
    except ImportError:
        return found

    def torchvision(one: int) -> object:
        content = torch.frombuffer(bytearray(contents[one]), dtype=torch.uint8)
        image = decode_jpeg(content, mode=ImageReadMode.RGB)
        left, top, right, bottom = decoding.crop_box(image.shape[2], image.shape[1], numbers[one])
        return resized_crop(image, top, left, bottom - top, right - left, [SIZE, SIZE])

    return {**found, "torchvision: cut out": torchvision}


def of_one_core(make: Callable[[int], object], count: int) -> float:
    """Images per second of CPU time."""
    before = time.process_time()
    for one in range(count):
        make(one)
    return count / (time.process_time() - before)


def pictures(folder: Path) -> ImageTensors:
    data = load(ImageOptions(data=str(folder), image_size=256, augment=("resized-crop",)))
    return ImageTensors(
        data.splits["train"], NORMALISE, torch.float32, ("resized-crop", "flip"), SIZE
    )


def orders(data: ImageTensors, batch: int) -> Iterator[BatchRequest[int]]:
    order = data.visiting_order(0, True)
    for epoch in range(10**6):
        for start in range(0, len(data) - batch, batch):
            positions = np.arange(start, start + batch)
            yield BatchRequest(order.at(epoch, positions), Draws(0, epoch, positions), 0)


def timed(act: Callable[[], object], images: int) -> tuple[float, float]:
    """Images per second: of CPU time of this process, and by the wall clock."""
    wall, cpu = time.perf_counter(), time.process_time()
    act()
    return images / (time.process_time() - cpu), images / (time.perf_counter() - wall)


def of_pipeline(data: ImageTensors, workers: int, batches: int, batch: int) -> tuple[float, float]:
    """The first batches, for which all start, are left out. Workers have CPU time of their own."""
    fetch = Fetch(data, torch.device("cpu"), workers)
    made = fetch(orders(data, batch))
    for _ in islice(made, 2 * max(workers, 1)):
        pass
    rates = timed(lambda: [*islice(made, batches)], batches * batch)
    made.close()
    fetch.close()
    return rates


def of_network(name: str, batches: int, device: str, batch: int) -> tuple[float, float]:
    """Training on one batch with one thread, in the precision that the recipe would take."""
    torch.manual_seed(0)
    network = MODELS[name]((3, SIZE, SIZE), CLASSES).to(device)
    network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    images = torch.randn(batch, 3, SIZE, SIZE, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.arange(batch, device=device) % CLASSES
    halves = fast_dtype(device) == "bf16"

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=halves):
            loss = cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def steps(count: int) -> None:
        for _ in range(count):
            step()
        if device != "cpu":
            torch.accelerator.synchronize()

    steps(1 if device == "cpu" else 5)
    return timed(lambda: steps(batches), batches * batch)


def of_recipe(folder: Path, network: str, run: Path, steps: int, device: str, batch: int) -> str:
    """What the recipe says at its end."""
    argv = [sys.executable, "-m", "paceline.recipes.image", f"--data={folder}"]
    flags = [f"--model={network}", f"--image-size={SIZE}", "--augment", "resized-crop", "flip"]
    more = [f"--global-batch={batch}", f"--steps={steps}", f"--run-dir={run}"]
    never = ["--checkpoint-every=never", "--test-fraction=0.1", f"--device={device}"]
    said = subprocess.run(
        [*argv, *flags, *more, *never], capture_output=True, text=True, check=True
    )
    return next(line for line in said.stdout.splitlines() if re.match(r"trained \d", line))


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="*", default=["resnet18", "resnet50"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--photos", type=int, default=600)
    parser.add_argument("--batches", type=int, default=8, help="of the pipeline, each time")
    parser.add_argument("--steps", type=int, default=3, help="of training alone, each time")
    parser.add_argument("--recipe-steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", default="cpu", help="of the networks")
    options = parser.parse_args()
    device, batch = options.device, options.batch
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        folder = Path(name)
        contents = written(folder, options.photos)
        size = sum(map(len, contents)) / len(contents) / 1000
        print(
            f"{usable_cpus()} cores, {options.photos} photos of 500×400, {size:.0f} kB each,"
            f" batch {batch}"
        )
        print(
            f"networks in {fast_dtype(device)} on {device}, load {os.getloadavg()[0]:.1f}\n",
            flush=True,
        )

        print("| images/s of one core (CPU time) | median (least to most) |\n|---|---|")
        for title, make in ways(contents).items():
            rates = [of_one_core(make, min(100, len(contents))) for _ in range(options.rounds)]
            print(f"| {title} | {spread(rates)} |", flush=True)

        torch.set_num_threads(1)
        networks = {
            network: [
                of_network(network, options.steps, device, batch) for _ in range(options.rounds)
            ]
            for network in options.networks
        }
        print("\n| training alone, one core | images/s of CPU time | by the wall clock |")
        print("|---|---|---|")
        for network, rates in networks.items():
            print(f"| {network} | {' | '.join(map(spread, zip(*rates)))} |", flush=True)  # noqa: B905

        print("\n| pipeline alone | images/s of CPU time | by the wall clock |", end="")
        print("".join(f" CPU time against {network} |" for network in networks))
        print("|---" * (3 + len(networks)) + "|")
        for kind in ("files", "shards"):
            data = pictures(folder / kind)
            for workers in dict.fromkeys((0, max(1, usable_cpus() - 1), usable_cpus())):
                rates = [
                    of_pipeline(data, workers, options.batches, batch)
                    for _ in range(options.rounds)
                ]
                cpu, wall = zip(*rates)  # noqa: B905
                shown = [f"{kind}, {workers or 'no'} worker{'s' * (workers != 1)}"]
                shown += ["" if workers else spread(cpu), spread(wall)]
                for own in networks.values():
                    ratio = statistics.median(cpu) / statistics.median(one for one, _ in own)
                    shown.append("" if workers else f"{ratio:.1f} times")
                print(f"| {' | '.join(shown)} |", flush=True)
        print("\nThe recipe, whole:\n")
        for network in networks:
            for kind in ("files", "shards"):
                run = folder / network / kind
                said = of_recipe(folder / kind, network, run, options.recipe_steps, device, batch)
                print(f"* {network}, {kind}: {said}", flush=True)


if __name__ == "__main__":
    main()
