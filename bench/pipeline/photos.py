"""Rate of loading and decoding photos, against the rate at which networks train on them.

Creates photos of 500×400 pixels in class folders and in tar shards. Then it measures, in wall-clock
time and in CPU time (which other work on the machine hardly changes):

* decoding: images per second of one core for each decoder;
* the pipeline: from files or shards through the loader to the finished batch, without training;
* training: the same batch repeatedly on one core, without loading;
* the recipe: its time waiting for data.

    python bench/pipeline/photos.py [--networks resnet18 resnet50] [--rounds 5] [--photos 600]
                                    [--device cuda --batch 256]

With ``--device cuda`` the networks compute on the GPU; CPUs still decode the photos.
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


def photo(rng: np.random.Generator, width: int = 500, height: int = 400) -> bytes:
    """A JPEG of smooth areas with grain, about as large as a real photo (70 kB)."""
    coarse = rng.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    grain = rng.integers(-12, 13, (height, width, 3))
    pixels = (np.asarray(smooth).astype(int) + grain).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def write_photos(folder: Path, count: int) -> list[bytes]:
    """Write photos as files in class folders and as shards. Returns their contents."""
    rng = np.random.default_rng(0)
    contents = [photo(rng) for _ in range(count)]
    for number, content in enumerate(contents):
        path = folder / "files" / str(number % CLASSES) / f"{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    samples = ({"jpg": content, "cls": n % CLASSES} for n, content in enumerate(contents))
    train.write_shards(folder / "shards", samples, size=8 << 20)
    return contents


def decoders(contents: list[bytes]) -> dict[str, Callable[[int], object]]:
    """Decoders by title. Each decodes the photo with an index to a training image."""
    numbers = Draws(0, 0, np.arange(len(contents))).uniform(decoding.CROP_RANDOMS)

    def crop_with_draft(index: int) -> object:
        return decoding.random_crop(io.BytesIO(contents[index]), numbers[index], SIZE)

    def crop_without_draft(index: int) -> object:
        image = Image.open(io.BytesIO(contents[index]))
        box = decoding.crop_box(*image.size, numbers[index])
        return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box))

    def resize_to_256(index: int) -> object:
        return decoding.decode_resized(io.BytesIO(contents[index]), 3, (256, 256), crop=True)

    decoders_by_title: dict[str, Callable[[int], object]] = {
        "Pillow: cropped, with JPEG draft mode": crop_with_draft,
        "Pillow: cropped, without draft mode": crop_without_draft,
        "Pillow: resized to 256 (evaluation)": resize_to_256,
    }
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
        from torchvision.transforms.v2.functional import resized_crop
    except ImportError:
        return decoders_by_title

    def torchvision(index: int) -> object:
        content = torch.frombuffer(bytearray(contents[index]), dtype=torch.uint8)
        image = decode_jpeg(content, mode=ImageReadMode.RGB)
        left, top, right, bottom = decoding.crop_box(image.shape[2], image.shape[1], numbers[index])
        return resized_crop(image, top, left, bottom - top, right - left, [SIZE, SIZE])

    return {**decoders_by_title, "torchvision: cropped": torchvision}


def cpu_rate(decode: Callable[[int], object], count: int) -> float:
    """Images per second of CPU time."""
    start = time.process_time()
    for index in range(count):
        decode(index)
    return count / (time.process_time() - start)


def make_dataset(folder: Path) -> ImageTensors:
    data = load(ImageOptions(data=str(folder), image_size=256, augment=("resized-crop",)))
    return ImageTensors(
        data.splits["train"], NORMALISE, torch.float32, ("resized-crop", "flip"), SIZE
    )


def batch_requests(data: ImageTensors, batch: int) -> Iterator[BatchRequest[int]]:
    order = data.visiting_order(0, True)
    for epoch in range(10**6):
        for start in range(0, len(data) - batch, batch):
            positions = np.arange(start, start + batch)
            yield BatchRequest(order.at(epoch, positions), Draws(0, epoch, positions), 0)


def rates_of(operation: Callable[[], object], images: int) -> tuple[float, float]:
    """Images per second of this process's CPU time, and of wall-clock time."""
    wall_start, cpu_start = time.perf_counter(), time.process_time()
    operation()
    return images / (time.process_time() - cpu_start), images / (time.perf_counter() - wall_start)


def pipeline_rates(
    data: ImageTensors, workers: int, batches: int, batch: int
) -> tuple[float, float]:
    """Rates without the first batches. The CPU time does not include that of workers."""
    fetch = Fetch(data, torch.device("cpu"), workers)
    prefetched = fetch(batch_requests(data, batch))
    for _ in islice(prefetched, 2 * max(workers, 1)):
        pass
    rates = rates_of(lambda: [*islice(prefetched, batches)], batches * batch)
    prefetched.close()
    fetch.close()
    return rates


def network_rates(name: str, batches: int, device: str, batch: int) -> tuple[float, float]:
    """Rates of training on one batch with one thread, in the recipe's default precision."""
    torch.manual_seed(0)
    network = MODELS[name]((3, SIZE, SIZE), CLASSES).to(device)
    network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    images = torch.randn(batch, 3, SIZE, SIZE, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.arange(batch, device=device) % CLASSES
    uses_bf16 = fast_dtype(device) == "bf16"

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=uses_bf16):
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
    return rates_of(lambda: steps(batches), batches * batch)


def recipe_summary(
    folder: Path, network: str, run: Path, steps: int, device: str, batch: int
) -> str:
    """Last line of the recipe's output, with its waiting time."""
    argv = [sys.executable, "-m", "paceline.recipes.image", f"--data={folder}"]
    flags = [f"--model={network}", f"--image-size={SIZE}", "--augment", "resized-crop", "flip"]
    size_flags = [f"--global-batch={batch}", f"--steps={steps}", f"--run-dir={run}"]
    other_flags = ["--checkpoint-every=never", "--test-fraction=0.1", f"--device={device}"]
    completed = subprocess.run(
        [*argv, *flags, *size_flags, *other_flags], capture_output=True, text=True, check=True
    )
    return next(line for line in completed.stdout.splitlines() if re.match(r"trained \d", line))


def format_range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="*", default=["resnet18", "resnet50"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--photos", type=int, default=600)
    parser.add_argument("--batches", type=int, default=8, help="of the pipeline, per round")
    parser.add_argument("--steps", type=int, default=3, help="of training, per round")
    parser.add_argument("--recipe-steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", default="cpu", help="of the networks")
    options = parser.parse_args()
    device, batch = options.device, options.batch
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        folder = Path(name)
        contents = write_photos(folder, options.photos)
        size = sum(map(len, contents)) / len(contents) / 1000
        print(
            f"{usable_cpus()} cores, {options.photos} photos of 500×400, {size:.0f} kB each,"
            f" batch {batch}"
        )
        print(
            f"networks in {fast_dtype(device)} on {device}, load {os.getloadavg()[0]:.1f}\n",
            flush=True,
        )

        print("| images/s of one core (CPU time) | median (min to max) |\n|---|---|")
        for title, decode in decoders(contents).items():
            rates = [cpu_rate(decode, min(100, len(contents))) for _ in range(options.rounds)]
            print(f"| {title} | {format_range(rates)} |", flush=True)

        torch.set_num_threads(1)
        networks = {
            network: [
                network_rates(network, options.steps, device, batch) for _ in range(options.rounds)
            ]
            for network in options.networks
        }
        print("\n| training only, one core | images/s of CPU time | of wall-clock time |")
        print("|---|---|---|")
        for network, rates in networks.items():
            print(f"| {network} | {' | '.join(map(format_range, zip(*rates)))} |", flush=True)  # noqa: B905

        print("\n| pipeline only | images/s of CPU time | of wall-clock time |", end="")
        print("".join(f" CPU time against {network} |" for network in networks))
        print("|---" * (3 + len(networks)) + "|")
        for kind in ("files", "shards"):
            data = make_dataset(folder / kind)
            for workers in dict.fromkeys((0, max(1, usable_cpus() - 1), usable_cpus())):
                rates = [
                    pipeline_rates(data, workers, options.batches, batch)
                    for _ in range(options.rounds)
                ]
                cpu_rates, wall_rates = zip(*rates)  # noqa: B905
                cells = [f"{kind}, {workers or 'no'} worker{'s' * (workers != 1)}"]
                cells += ["" if workers else format_range(cpu_rates), format_range(wall_rates)]
                for network_samples in networks.values():
                    ratio = statistics.median(cpu_rates) / statistics.median(
                        rate for rate, _ in network_samples
                    )
                    cells.append("" if workers else f"{ratio:.1f} times")
                print(f"| {' | '.join(cells)} |", flush=True)
        print("\nThe complete recipe:\n")
        for network in networks:
            for kind in ("files", "shards"):
                run = folder / network / kind
                summary = recipe_summary(
                    folder / kind, network, run, options.recipe_steps, device, batch
                )
                print(f"* {network}, {kind}: {summary}", flush=True)


if __name__ == "__main__":
    main()
