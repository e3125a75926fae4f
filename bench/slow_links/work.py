"""One rank's work for the comparison over slow links: a model, a way of averaging, a loss curve.

Everything but the way of averaging is the same: initial weights, samples of every step, optimizer,
schedule, validation. Validation is not counted: the clock stands still while it runs.
"""

from __future__ import annotations

import math
import os
import sys
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.recipes.transformer import Shape, Transformer

# -- what is trained ---------------------------------------------------------------------


class Bytes:
    """Windows of a text, as bytes: what comes next."""

    def __init__(self, text: np.ndarray[Any, Any], starts: np.ndarray[Any, Any], width: int):
        self._text, self._starts, self._around = text, starts, np.arange(width + 1)

    def __len__(self) -> int:
        return len(self._starts)

    def batch(self, ids: np.ndarray[Any, Any], draws: object = None) -> tuple[Tensor, ...]:
        windows = torch.from_numpy(
            self._text[self._starts[ids][:, None] + self._around].astype(np.int64)
        )
        return windows[:, :-1], windows[:, 1:]


class Vowels(Bytes):
    """Windows of a text without their vowels, and what they were."""

    def batch(self, ids: np.ndarray[Any, Any], draws: object = None) -> tuple[Tensor, ...]:
        windows = self._text[self._starts[ids][:, None] + self._around].astype(np.int64) + 2
        target = torch.from_numpy(windows[:, 1:])
        source = np.zeros_like(windows)  # padding
        for row, window in zip(source, windows, strict=True):
            kept = window[~np.isin(window, _VOWELS)]
            row[: len(kept)] = kept
        begun = torch.cat((torch.ones(len(target), 1, dtype=torch.int64), target[:, :-1]), 1)
        return torch.from_numpy(source), begun, target


_VOWELS = np.frombuffer(b"aeiouAEIOU", dtype=np.uint8).astype(np.int64) + 2


class Pictures:
    """Fashion-MNIST."""

    def __init__(
        self, pixels: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], ids: np.ndarray[Any, Any]
    ):
        self._pixels, self._labels, self._ids = pixels, labels, ids

    def __len__(self) -> int:
        return len(self._ids)

    def batch(self, ids: np.ndarray[Any, Any], draws: object = None) -> tuple[Tensor, ...]:
        chosen = self._ids[ids]
        pixels = torch.from_numpy(self._pixels[chosen].astype(np.float32))
        return (pixels[:, None] - 73) / 90, torch.from_numpy(self._labels[chosen].astype(np.int64))


class Language(nn.Module):
    """A byte-level language model: a decoder of the usual form."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 48), 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), False)
        self.out = nn.Linear(width, 256)
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False
        )
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        for block in self.layers.layers:
            nn.init.normal_(block.self_attn.in_proj_weight, std=0.02)

    def forward(self, seen: Tensor) -> Tensor:
        x = self.bytes(seen) + self.places.weight
        scores: Tensor = self.out(self.layers(x, mask=self.mask, is_causal=True))
        return scores


def convolutions(width: int, hidden: int) -> nn.Module:
    """A CNN with batch normalisation for 28×28 pixels."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]

    return nn.Sequential(
        *block(1, width), nn.MaxPool2d(2), *block(width, 2 * width), nn.MaxPool2d(2),
        *block(2 * width, 4 * width), nn.Flatten(), nn.Linear(4 * width * 49, hidden), nn.ReLU(),
        nn.Linear(hidden, 10),
    )  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A model with its data.

    Attributes:
        make: The network.
        share: Samples of a rank in a step.
        train: All samples of a training, in their order, from a seed and a number.
        held_out: The samples of the validation.
        optimizer: Of parameters and learning rate.
        rates: Learning rates to try.
    """

    make: Callable[[], nn.Module]
    share: int
    train: Callable[[int, int], Any]
    held_out: Any
    optimizer: Callable[[Any, float], torch.optim.Optimizer]
    rates: tuple[float, ...]


def adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=5e-4)


MODELS = ("lm", "cnn", "translation")


def tasks(text: np.ndarray[Any, Any], pictures: Mapping[str, Any], tiny: bool) -> dict[str, Task]:
    """The three models; ``tiny`` ones only show that the script works."""
    context, around, held = (32, 24, 16) if tiny else (128, 48, 64)
    edge = len(text) * 9 // 10

    def windows(kind: type[Bytes], width: int) -> Callable[[int, int], Bytes]:
        def made(seed: int, count: int) -> Bytes:
            draw = np.random.default_rng((seed, 1))
            return kind(text, draw.integers(0, edge - width - 1, count), width)

        return made

    def fixed(kind: type[Bytes], width: int, count: int) -> Bytes:
        return kind(text, np.linspace(edge, len(text) - width - 2, count).astype(np.int64), width)

    def drawn(seed: int, count: int) -> Pictures:
        draw, size = np.random.default_rng((seed, 1)), len(pictures["labels"])
        order = np.concatenate([draw.permutation(size) for _ in range(-(-count // size))])
        return Pictures(pictures["pixels"], pictures["labels"], order[:count])

    held_pictures = np.arange(len(pictures["held_labels"]))[: 64 if tiny else 1000]
    shape = Shape(258, 258, 32, 1, 2, 64) if tiny else Shape(258, 258, 128, 2, 4, 512)
    return {
        "lm": Task(
            lambda: Language(48, 1, context) if tiny else Language(192, 5, context),
            4,
            windows(Bytes, context),
            fixed(Bytes, context, held),
            adamw,
            (5e-4, 1e-3, 2e-3),
        ),
        "cnn": Task(
            lambda: convolutions(4, 16) if tiny else convolutions(32, 160),
            8 if tiny else 32,
            drawn,
            Pictures(pictures["held_pixels"], pictures["held_labels"], held_pictures),
            sgd,
            (0.01, 0.02, 0.04),
        ),
        "translation": Task(
            lambda: Transformer(shape),
            4 if tiny else 6,
            windows(Vowels, around),
            fixed(Vowels, around, 2 * held),
            adamw,
            (1e-3, 2e-3, 4e-3),
        ),
    }


# -- one job -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A training, or its first steps.

    Attributes:
        kind: ``curve`` and ``rate`` (with validation), ``pace`` (without: how long steps take).
        method: ``alone``, ``ddp``, ``fp16 hook``, ``diloco H OUTER-LR MOMENTUM``, or ``ours NAME``.
        horizon: Steps over which the learning rate falls.
        steps: To make.
        every: Steps between two validations.
    """

    kind: str
    model: str
    method: str
    link: str
    lr: float
    seed: int
    horizon: int
    steps: int
    every: int


def schedule(step: int, horizon: int) -> float:
    """Rises over a tenth, falls to a fifth, and stays there: later steps still learn."""
    rise = max(1, horizon // 10)
    return min((step + 1) / rise, max(0.2, 1 - 0.8 * (step - rise) / max(1, horizon - rise)))


class Notes:
    """What a rank notes while it trains; its clock stands still during validation."""

    def __init__(self, job: Job, task: Task, network: nn.Module, interface: str) -> None:
        self._job, self._task, self._network = job, task, network
        self._interface = interface
        self.steps: list[float] = []  # seconds of each step
        self.losses: list[str] = []  # of this rank's share, to the last bit
        self.curve: list[tuple[int, float, float]] = []  # step, seconds, validation loss
        self._bytes = [sent(interface)]
        self._begun = time.perf_counter()

    def begin(self) -> None:
        self._begun = time.perf_counter()

    def end(self, loss: Tensor) -> None:
        """After a step that began when the last one or the validation ended."""
        now = time.perf_counter()
        self.steps.append(now - self._begun)
        self.losses.append(float(loss).hex())
        self._begun = now
        done = len(self.steps)
        if done == self._job.steps:
            self._bytes.append(sent(self._interface))
        if self._job.kind != "pace" and done % self._job.every == 0:
            if dist.is_initialized():
                dist.barrier()  # the slowest rank's time counts
                self.steps[-1] += time.perf_counter() - now
            self.curve.append((done, sum(self.steps), self._validate()))
            self._begun = time.perf_counter()

    @torch.no_grad()
    def _validate(self) -> float:
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        ids = np.array_split(np.arange(len(self._task.held_out)), size)[rank]
        if self._job.method.startswith("diloco"):  # batch statistics: each rank has its own
            for buffer in self._network.buffers():
                if buffer.is_floating_point() and buffer.isfinite().all():
                    dist.all_reduce(buffer)
                    buffer /= size
        self._network.eval()
        total = torch.zeros(2, dtype=torch.float64)
        for part in np.array_split(ids, max(1, len(ids) // (2 * self._task.share))):
            *inputs, targets = self._task.held_out.batch(part)
            scores = self._network(*inputs)
            loss = cross_entropy(scores.flatten(0, -2), targets.flatten(), reduction="sum")
            total += torch.tensor([float(loss), targets.numel()], dtype=torch.float64)
        self._network.train()
        if size > 1:
            dist.all_reduce(total)
        return float(total[0] / total[1])

    def result(self) -> dict[str, Any]:
        return {
            "seconds": [round(one, 6) for one in self.steps],
            "losses": self.losses[:40],
            "curve": [(step, round(at, 4), round(loss, 6)) for step, at, loss in self.curve],
            "sent": (self._bytes[-1] - self._bytes[0]) / max(1, len(self.steps)),
        }


def sent(interface: str) -> int:
    """Bytes that this network namespace has sent."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == interface:
            return int(figures.split()[8])
    return 0


def run(job: Job, task: Task, interface: str, folder: Path) -> dict[str, Any]:
    """Trains as one rank of the job that the environment describes."""
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    network = task.make()
    if job.method.startswith("ours "):
        return ours(job, task, network, interface, folder)
    return peers(job, task, network, interface)


def mean_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, -2), targets.flatten())


def peers(job: Job, task: Task, network: nn.Module, interface: str) -> dict[str, Any]:
    """The loop by hand."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizer = task.optimizer(network.parameters(), job.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: schedule(s, job.horizon))
    model = network
    if job.method in ("ddp", "fp16 hook"):
        model = nn.parallel.DistributedDataParallel(network)
        if job.method == "fp16 hook":
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif job.method.startswith("diloco"):
        diloco(network, optimizer, job.method)
    elif job.method != "alone":
        raise ValueError(job.method)
    data = task.train(job.seed, job.steps * task.share * size)
    notes = Notes(job, task, network, interface)
    dist.barrier()
    notes.begin()
    for step in range(job.steps):
        first = (step * size + rank) * task.share
        *inputs, targets = data.batch(np.arange(first, first + task.share))
        loss = mean_loss(model(*inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        notes.end(loss.detach())
    dist.barrier()
    return notes.result()


def ours(job: Job, task: Task, network: nn.Module, interface: str, folder: Path) -> dict[str, Any]:
    """The same with this library."""
    from paceline import train

    session = train.join(seed=job.seed, device="cpu", run_dir=folder)
    optimizer = task.optimizer(network.parameters(), job.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: schedule(s, job.horizon))
    name = job.method.removeprefix("ours ")
    model = session.prepare(network, optimizer, scheduler, communication=name, overlap="auto")
    size = session.world.size
    data = task.train(job.seed, job.steps * task.share * size)
    loader = session.loader(data, task.share * size, shuffle=False)
    notes = Notes(job, task, network, interface)
    dist.barrier()
    notes.begin()
    for _ in session.epochs(loader, steps=job.steps):
        for *inputs, targets in loader:
            scores = model(*inputs)
            flat = cross_entropy(scores.flatten(0, -2), targets.flatten(), reduction="none")
            losses = flat.view(len(targets), -1).mean(1)
            session.step(losses)
            notes.end(losses.detach().mean())
    dist.barrier()
    found = notes.result()
    exchange = session.models.first.exchange
    found["method"] = getattr(exchange and exchange.reducer, "name", "DDP's own")
    session.close()
    return found


# -- torchft's DiLoCo --------------------------------------------------------------------


def diloco(network: nn.Module, inner: torch.optim.Optimizer, method: str) -> None:
    """torchft's own ``local_sgd.DiLoCo`` around the optimizer, with a stand-in for its manager.

    What torchft's manager does besides averaging (a quorum and a commit, each of them a call to
    its server) is one exchange of four bytes here, which is less.
    """
    _, every, lr, momentum = method.split()
    outer = torch.optim.SGD(
        network.parameters(), lr=float(lr), momentum=float(momentum), nesterov=True
    )
    made = diloco_class()(Manager(), [network], inner, outer, int(every), use_bucketization=True)
    made.__enter__()


def diloco_class() -> Any:
    """torchft's, from its own file."""
    stand_in = types.ModuleType("torchft.manager")
    stand_in.Manager = Manager  # type: ignore[attr-defined]
    package = types.ModuleType("torchft")
    package.__path__ = [str(torchft_folder())]
    sys.modules.update({"torchft": package, "torchft.manager": stand_in})
    from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found]

    return DiLoCo


def torchft_folder() -> Path:
    """Where torchft's Python files are; its package itself needs its compiled half."""
    if given := os.environ.get("BENCH_TORCHFT"):
        return Path(given)
    import importlib.util

    found = importlib.util.find_spec("torchft")
    if found is None or not found.origin:
        raise FileNotFoundError("torchft is not here: set BENCH_TORCHFT to its package's folder")
    return Path(found.origin).parent


class Manager:
    """What ``DiLoCo`` asks of torchft's manager, for ranks that never fail."""

    _use_async_quorum = False

    def __init__(self) -> None:
        self._step = 0

    def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> Done:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
        return Done(tensor)

    def start_quorum(self) -> None:
        dist.all_reduce(torch.ones(1))

    def should_commit(self) -> bool:
        dist.all_reduce(torch.ones(1))
        self._step += 1
        return True

    def current_step(self) -> int:
        return self._step

    def register_state_dict_fn(self, *_: object) -> None: ...
    def allow_state_dict_read(self) -> None: ...
    def disallow_state_dict_read(self) -> None: ...


class Done:
    """Work that is done."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensor)
        return future


# -- the line ----------------------------------------------------------------------------


def line(elements: int) -> dict[str, Any]:
    """Seconds of an all-reduce of so many float32, and of one of them alone."""
    dist.init_process_group("gloo")
    taken = {}
    for name, count, rounds in (("large", elements, 3), ("small", 1, 20)):
        given = torch.ones(count)
        times = []
        for _ in range(rounds):
            dist.barrier()
            begun = time.perf_counter()
            dist.all_reduce(given)
            times.append(time.perf_counter() - begun)
        taken[name] = sorted(times)[len(times) // 2]
    return {**taken, "mbit_s": elements * 32 / taken["large"] / 1e6 if elements else math.nan}
