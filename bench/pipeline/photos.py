"""How fast photos are made ready, against how fast networks take them.

Makes photos of 500×400 pixels, as class folders and packed into tar shards, then measures in turns,
so that a busy machine hurts all alike:

* images per second of one decoding core (CPU time), for each way to decode;
* the pipeline alone: files and shards, through the loader, whole machine;
* training alone: the same batch again and again;
* and the recipe itself: how long it waited for data.

    python bench/pipeline/photos.py [--networks resnet18 resnet50] [--rounds 5] [--photos 600]
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
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import cross_entropy

from paceline import train
from paceline.recipes.common import fast_dtype
from paceline.recipes.data import photos
from paceline.recipes.data.images import Request, load
from paceline.recipes.networks import MODELS
from paceline.recipes.pictures import Normalisation, Pictures
from paceline.train.data import Draws, Fetch, Wanted, allowed

CLASSES, SIZE, BATCH = 10, 224, 32
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
    numbers = Draws(0, 0, np.arange(len(contents))).uniform(photos.NUMBERS)

    def ours(one: int) -> object:
        return photos.cut_out(io.BytesIO(contents[one]), numbers[one], SIZE)

    def without_draft(one: int) -> object:
        image = Image.open(io.BytesIO(contents[one]))
        box = photos.window(*image.size, numbers[one])
        return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box))

    def shrunk(one: int) -> object:
        return photos.sized(io.BytesIO(contents[one]), 3, (256, 256), crop=True)

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
        left, top, right, bottom = photos.window(image.shape[2], image.shape[1], numbers[one])
        return resized_crop(image, top, left, bottom - top, right - left, [SIZE, SIZE])

    return {**found, "torchvision: cut out": torchvision}


def of_one_core(make: Callable[[int], object], count: int) -> float:
    """Images per second of CPU time."""
    before = time.process_time()
    for one in range(count):
        make(one)
    return count / (time.process_time() - before)


def pictures(folder: Path) -> Pictures:
    data = load("", Request(str(folder), image_size=256, crop=True))
    return Pictures(data.splits["train"], NORMALISE, torch.float32, ("resized-crop", "flip"), SIZE)


def orders(data: Pictures) -> Iterator[Wanted[int]]:
    order = data.visiting_order(0, True)
    for epoch in range(10**6):
        for start in range(0, len(data) - BATCH, BATCH):
            positions = np.arange(start, start + BATCH)
            yield Wanted(order.at(epoch, positions), Draws(0, epoch, positions), 0)


def of_pipeline(data: Pictures, workers: int, batches: int) -> float:
    """Images per second, of the whole machine; the first batches, for which all start, left out."""
    fetch = Fetch(data, torch.device("cpu"), workers)
    made = fetch(orders(data))
    for _ in islice(made, 2 * max(workers, 1)):
        pass
    before = time.perf_counter()
    for _ in islice(made, batches):
        pass
    seconds = time.perf_counter() - before
    made.close()
    fetch.close()
    return batches * BATCH / seconds


def of_network(name: str, batches: int) -> float:
    """Images per second of training on one batch, in the precision that the recipe would take."""
    torch.manual_seed(0)
    network = MODELS[name]((3, SIZE, SIZE), CLASSES).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    images = torch.randn(BATCH, 3, SIZE, SIZE).to(memory_format=torch.channels_last)
    labels = torch.arange(BATCH) % CLASSES
    halves = fast_dtype("cpu") == "bf16"

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=halves):
            loss = cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step()
    before = time.perf_counter()
    for _ in range(batches):
        step()
    return batches * BATCH / (time.perf_counter() - before)


def of_recipe(folder: Path, network: str, run: Path, steps: int) -> str:
    """What the recipe says at its end."""
    argv = [sys.executable, "-m", "paceline.recipes.image", f"--data={folder}"]
    flags = [f"--model={network}", f"--image-size={SIZE}", "--augment", "resized-crop", "flip"]
    more = [f"--global-batch={BATCH}", f"--steps={steps}", f"--run-dir={run}", "--device=cpu"]
    never = ["--checkpoint-every=never", "--test-fraction=0.1"]
    said = subprocess.run(
        [*argv, *flags, *more, *never], capture_output=True, text=True, check=True
    )
    return next(line for line in said.stdout.splitlines() if re.match(r"trained \d", line))


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="*", default=["resnet18", "resnet50"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--photos", type=int, default=600)
    parser.add_argument("--batches", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        folder = Path(name)
        contents = written(folder, options.photos)
        size = sum(map(len, contents)) / len(contents) / 1000
        print(
            f"{allowed()} cores, {options.photos} photos of 500×400, {size:.0f} kB each,"
            f" batch {BATCH}"
        )
        print(f"networks in {fast_dtype('cpu')}, load {os.getloadavg()[0]:.1f}\n", flush=True)

        print("| images/s of one core (CPU time) | median (least to most) |\n|---|---|")
        for title, make in ways(contents).items():
            rates = [of_one_core(make, min(100, len(contents))) for _ in range(options.rounds)]
            print(f"| {title} | {spread(rates)} |", flush=True)

        lines = {
            f"{kind}, {workers or 'no'} worker{'s' * (workers != 1)}": (kind, workers)
            for kind in ("files", "shards")
            for workers in dict.fromkeys((0, max(1, allowed() - 1), allowed()))
        }
        data = {kind: pictures(folder / kind) for kind in ("files", "shards")}
        pipeline: dict[str, list[float]] = {line: [] for line in lines}
        networks: dict[str, list[float]] = {network: [] for network in options.networks}
        for _ in range(options.rounds):
            for line, (kind, workers) in lines.items():
                pipeline[line].append(of_pipeline(data[kind], workers, options.batches))
            for network in networks:
                networks[network].append(of_network(network, 3))
        print("\n| pipeline alone, images/s | median (least to most) | " + " | ".join(
            f"against {network}" for network in networks) + " |")  # fmt: skip
        print("|---" * (2 + len(networks)) + "|")
        for line, rates in pipeline.items():
            ratios = [
                statistics.median([a / b for a, b in zip(rates, networks[network], strict=True)])
                for network in networks
            ]
            shown = " | ".join(f"{ratio:.1f} times" for ratio in ratios)
            print(f"| {line} | {spread(rates)} | {shown} |")
        print("\n| training alone, images/s | median (least to most) |\n|---|---|")
        for network, rates in networks.items():
            print(f"| {network} | {spread(rates)} |")
        print("\nThe recipe, whole:\n")
        for network in networks:
            for kind in ("files", "shards"):
                said = of_recipe(folder / kind, network, folder / network / kind, 12)
                print(f"* {network}, {kind}: {said}", flush=True)


if __name__ == "__main__":
    main()
