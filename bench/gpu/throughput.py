"""Training throughput of one device as a share of its measured matrix rate.

    python bench/gpu/throughput.py [--device cuda] [--compile] [--out FILE]

ResNet-50 on 224×224 images and the base encoder-decoder transformer (width 512, 6 + 6 layers) on
64 tokens a side, with the recipes' default settings (bf16, channels last, their optimizer) against
those of published examples: float32, channels first, torch's default optimizer, no compilation.
Both are plain loops without a session or a loader, on random data that is already on the device, so
they give an upper bound of a recipe's rate. The matrix rate is that of products of large square
matrices in bf16. torch's counter counts the operations. ``--device cpu``
tries the script out.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from paceline.recipes.networks import MODELS
from paceline.recipes.optimization import make_optimizer
from paceline.recipes.options import Options
from paceline.recipes.transformer import Shape, Transformer

VOCABULARY, TOKENS, CLASSES = 32_000, 64, 1000


@dataclass(frozen=True)
class Workload:
    """A model with its data.

    Attributes:
        name: Model and unit of the rate.
        network: Creates the network.
        inputs: Inputs of one step.
        targets: Class numbers of one step.
        units: Images or tokens of one step.
        optimizer: Name of the optimizer, and the learning rate.
    """

    name: str
    network: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    targets: Tensor
    units: int
    optimizer: tuple[str, float]


def make_workloads(device: torch.device, images: int, sentences: int) -> list[Workload]:
    pixels = torch.randn(images, 3, 224, 224, device=device)
    classes = torch.randint(CLASSES, (images,), device=device)
    tokens = torch.randint(4, VOCABULARY, (3, sentences, TOKENS), device=device)
    return [
        Workload(
            "ResNet-50, images/s",
            lambda: MODELS["resnet50"]((3, 224, 224), CLASSES),
            (pixels,),
            classes,
            images,
            ("sgd", 0.1),
        ),
        Workload(
            "base transformer, target tokens/s",
            lambda: Transformer(Shape(VOCABULARY, VOCABULARY, 512, 6, 8, 2048)),
            (tokens[0], tokens[1]),
            tokens[2].flatten(),
            sentences * TOKENS,
            ("adamw", 1e-4),
        ),
    ]


def make_step(
    workload: Workload, device: torch.device, is_recipe: bool, compiled: bool
) -> Callable[[], None]:
    """One training step of a plain loop, with the settings of a recipe or of an example."""
    torch.manual_seed(0)
    network, inputs = workload.network().to(device), workload.inputs
    name, rate = workload.optimizer
    if is_recipe:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = tuple(tensor.contiguous(memory_format=memory_layout(tensor)) for tensor in inputs)
        optimizer = make_optimizer(Options(optimizer=name, weight_decay=0.0), network, rate)
    elif name == "sgd":
        optimizer = torch.optim.SGD(network.parameters(), rate, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(network.parameters(), rate)
    model = torch.compile(network) if is_recipe and compiled else network

    def context() -> AbstractContextManager[object]:
        return torch.autocast(device.type, torch.bfloat16) if is_recipe else nullcontext()

    def step() -> None:
        with context():
            outputs = model(*inputs)
            loss = cross_entropy(outputs.flatten(0, -2).float(), workload.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def memory_layout(tensor: Tensor) -> torch.memory_format:
    return torch.channels_last if tensor.dim() == 4 else torch.contiguous_format


def seconds_per_call(
    operation: Callable[[], None], device: torch.device, min_s: float = 3.0
) -> float:
    """Mean seconds of a call over at least ``min_s`` seconds, after three calls to warm up."""
    for _ in range(3):
        operation()
    synchronize(device)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < min_s:
        operation()
        synchronize(device)
        count += 1
    return (time.perf_counter() - start) / count


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def matrix_rate(device: torch.device, size: int) -> float:
    """Operations per second of a product of square matrices in bf16."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds_per_call(lambda: torch.mm(left, right), device)


def count_operations(step: Callable[[], None]) -> int:
    """Floating-point operations of one step, forward and backward."""
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def main() -> None:
    options = parser().parse_args()
    device = torch.device(options.device)
    rate = matrix_rate(device, 2048 if device.type == "cpu" else 8192)
    name = torch.cuda.get_device_name() if device.type == "cuda" else device.type
    rows = [
        f"# {name}, torch {torch.__version__}, {datetime.date.today().isoformat()}",
        "",
        f"bf16 matrix rate {rate / 1e12:.1f} Tflop/s; {'compiled' if options.compile else 'eager'}",
        "",
        "| | the recipe's settings | share of the matrix rate | plain loop | ratio |",
        "|---|---|---|---|---|",
    ]
    for workload in make_workloads(device, options.images, options.sentences):
        count = count_operations(make_step(workload, device, True, False))
        recipe_s = seconds_per_call(make_step(workload, device, True, options.compile), device)
        plain_s = seconds_per_call(make_step(workload, device, False, False), device)
        cells = [
            *(workload.name, f"{workload.units / recipe_s:,.0f}", f"{count / recipe_s / rate:.1%}"),
            *(f"{workload.units / plain_s:,.0f}", f"{plain_s / recipe_s:.2f}"),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    text = "\n".join(rows) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


def parser() -> argparse.ArgumentParser:
    formatter = argparse.RawTextHelpFormatter
    arguments_parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    arguments_parser.add_argument("--device", default="cuda")
    arguments_parser.add_argument("--images", type=int, default=256)
    arguments_parser.add_argument("--sentences", type=int, default=256)
    arguments_parser.add_argument("--compile", action="store_true")
    arguments_parser.add_argument("--out", type=Path)
    return arguments_parser


if __name__ == "__main__":
    main()
