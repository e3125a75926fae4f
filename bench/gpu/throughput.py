"""Training throughput of one device, as a share of its measured matrix rate.

    python bench/gpu/throughput.py [--device cuda] [--compile] [--out FILE]

ResNet-50 on 224×224 images and the base encoder-decoder transformer (width 512, 6 + 6 layers) on
64 tokens a side, in the settings that the recipes choose by themselves (bf16, channels last, their
optimizer), against those of the published examples: float32, channels first, torch's default
optimizer, no compilation. Both are bare loops without a session or a loader, on random data that
is on the device already: a bound for a recipe, not its rate. The matrix rate is that of products
of large square matrices in bf16; operations are counted by torch's own counter. ``--device cpu``
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
class Work:
    """Something to train.

    Attributes:
        name: Model and unit.
        network: Made anew for each way.
        inputs: Of one step, without the targets.
        targets: Of one step, as class numbers.
        units: Images or tokens of one step.
        optimizer: Name of the optimizer, and the learning rate.
    """

    name: str
    network: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    targets: Tensor
    units: int
    optimizer: tuple[str, float]


def works(device: torch.device, images: int, sentences: int) -> list[Work]:
    pixels = torch.randn(images, 3, 224, 224, device=device)
    classes = torch.randint(CLASSES, (images,), device=device)
    words = torch.randint(4, VOCABULARY, (3, sentences, TOKENS), device=device)
    return [
        Work(
            "ResNet-50, images/s",
            lambda: MODELS["resnet50"]((3, 224, 224), CLASSES),
            (pixels,),
            classes,
            images,
            ("sgd", 0.1),
        ),
        Work(
            "base transformer, target tokens/s",
            lambda: Transformer(Shape(VOCABULARY, VOCABULARY, 512, 6, 8, 2048)),
            (words[0], words[1]),
            words[2].flatten(),
            sentences * TOKENS,
            ("adamw", 1e-4),
        ),
    ]


def step_of(work: Work, device: torch.device, ours: bool, compiled: bool) -> Callable[[], None]:
    """One training step of a bare loop, in a recipe's settings or in an example's."""
    torch.manual_seed(0)
    network, inputs = work.network().to(device), work.inputs
    name, rate = work.optimizer
    if ours:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = tuple(one.contiguous(memory_format=layout(one)) for one in inputs)
        steps = make_optimizer(Options(optimizer=name, weight_decay=0.0), network, rate)
    elif name == "sgd":
        steps = torch.optim.SGD(network.parameters(), rate, momentum=0.9)
    else:
        steps = torch.optim.Adam(network.parameters(), rate)
    model = torch.compile(network) if ours and compiled else network

    def context() -> AbstractContextManager[object]:
        return torch.autocast(device.type, torch.bfloat16) if ours else nullcontext()

    def step() -> None:
        with context():
            outputs = model(*inputs)
            loss = cross_entropy(outputs.flatten(0, -2).float(), work.targets)
        loss.backward()
        steps.step()
        steps.zero_grad()

    return step


def layout(one: Tensor) -> torch.memory_format:
    return torch.channels_last if one.dim() == 4 else torch.contiguous_format


def seconds(act: Callable[[], None], device: torch.device, least: float = 3.0) -> float:
    """Seconds of one call, over at least so many, after three to warm up."""
    for _ in range(3):
        act()
    wait(device)
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < least:
        act()
        wait(device)
        count += 1
    return (time.perf_counter() - begun) / count


def wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def matrix_rate(device: torch.device, size: int) -> float:
    """Operations a second of a product of square matrices in bf16."""
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds(lambda: torch.mm(one, other), device)


def operations(step: Callable[[], None]) -> int:
    """Of one step, forward and backward."""
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
    for work in works(device, options.images, options.sentences):
        count = operations(step_of(work, device, True, False))
        ours = seconds(step_of(work, device, True, options.compile), device)
        plain = seconds(step_of(work, device, False, False), device)
        cells = [
            *(work.name, f"{work.units / ours:,.0f}", f"{count / ours / rate:.1%}"),
            *(f"{work.units / plain:,.0f}", f"{plain / ours:.2f}"),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    text = "\n".join(rows) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


def parser() -> argparse.ArgumentParser:
    form = argparse.RawTextHelpFormatter
    made = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    made.add_argument("--device", default="cuda")
    made.add_argument("--images", type=int, default=256)
    made.add_argument("--sentences", type=int, default=256)
    made.add_argument("--compile", action="store_true")
    made.add_argument("--out", type=Path)
    return made


if __name__ == "__main__":
    main()
