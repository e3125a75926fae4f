"""One rank of the comparison over slow links: a model, a communication method, a loss curve.

Only the communication method differs. Initial weights, samples of every step, optimizer, schedule
and validation are the same. The clock stops during validation.
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

# -- the models -------------------------------------------------------------------------


class Bytes:
    """Windows of a text as bytes, for predicting the next byte."""

    def __init__(self, text: np.ndarray[Any, Any], starts: np.ndarray[Any, Any], width: int):
        self._text, self._starts, self._offsets = text, starts, np.arange(width + 1)

    def __len__(self) -> int:
        return len(self._starts)

    def batch(self, ids: np.ndarray[Any, Any], draws: object = None) -> tuple[Tensor, ...]:
        windows = torch.from_numpy(
            self._text[self._starts[ids][:, None] + self._offsets].astype(np.int64)
        )
        return windows[:, :-1], windows[:, 1:]


class Vowels(Bytes):
    """Windows of a text without their vowels as sources, and complete ones as targets."""

    def batch(self, ids: np.ndarray[Any, Any], draws: object = None) -> tuple[Tensor, ...]:
        windows = self._text[self._starts[ids][:, None] + self._offsets].astype(np.int64) + 2
        target = torch.from_numpy(windows[:, 1:])
        source = np.zeros_like(windows)  # padding
        for row, window in zip(source, windows, strict=True):
            consonants = window[~np.isin(window, _VOWELS)]
            row[: len(consonants)] = consonants
        decoder_input = torch.cat(
            (torch.ones(len(target), 1, dtype=torch.int64), target[:, :-1]), 1
        )
        return torch.from_numpy(source), decoder_input, target


_VOWELS = np.frombuffer(b"aeiouAEIOU", dtype=np.uint8).astype(np.int64) + 2


class Images:
    """Images of Fashion-MNIST."""

    def __init__(
        self, pixels: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], ids: np.ndarray[Any, Any]
    ):
        self._pixels, self._labels, self._ids = pixels, labels, ids

    def __len__(self) -> int:
        return len(self._ids)

    def batch(self, ids: np.ndarray[Any, Any], draws: object = None) -> tuple[Tensor, ...]:
        image_ids = self._ids[ids]
        pixels = torch.from_numpy(self._pixels[image_ids].astype(np.float32))
        return (pixels[:, None] - 73) / 90, torch.from_numpy(
            self._labels[image_ids].astype(np.int64)
        )


class Language(nn.Module):
    """A byte-level language model: a causal transformer."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
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

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.positions.weight
        scores: Tensor = self.out(self.layers(x, mask=self.mask, is_causal=True))
        return scores


def make_cnn(width: int, hidden: int) -> nn.Module:
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
        make: Creates the network.
        batch_per_rank: Samples of a rank in a step.
        train: Returns the ordered samples of a training for a seed and a number of samples.
        held_out: Samples of the validation.
        optimizer: Creates the optimizer from parameters and a learning rate.
        rates: Learning rates to try.
    """

    make: Callable[[], nn.Module]
    batch_per_rank: int
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
    """The three tasks; ``tiny`` ones are for a trial of the script."""
    context, translation_context, num_held_out = (32, 24, 16) if tiny else (128, 48, 64)
    num_train_bytes = len(text) * 9 // 10

    def windows(kind: type[Bytes], width: int) -> Callable[[int, int], Bytes]:
        def make(seed: int, count: int) -> Bytes:
            rng = np.random.default_rng((seed, 1))
            return kind(text, rng.integers(0, num_train_bytes - width - 1, count), width)

        return make

    def evenly_spaced(kind: type[Bytes], width: int, count: int) -> Bytes:
        return kind(
            text, np.linspace(num_train_bytes, len(text) - width - 2, count).astype(np.int64), width
        )

    def shuffled(seed: int, count: int) -> Images:
        rng, size = np.random.default_rng((seed, 1)), len(pictures["labels"])
        order = np.concatenate([rng.permutation(size) for _ in range(-(-count // size))])
        return Images(pictures["pixels"], pictures["labels"], order[:count])

    held_out_ids = np.arange(len(pictures["held_labels"]))[: 64 if tiny else 1000]
    shape = Shape(258, 258, 32, 1, 2, 64) if tiny else Shape(258, 258, 128, 2, 4, 512)
    return {
        "lm": Task(
            lambda: Language(48, 1, context) if tiny else Language(192, 5, context),
            4,
            windows(Bytes, context),
            evenly_spaced(Bytes, context, num_held_out),
            adamw,
            (5e-4, 1e-3, 2e-3),
        ),
        "cnn": Task(
            lambda: make_cnn(4, 16) if tiny else make_cnn(32, 160),
            8 if tiny else 32,
            shuffled,
            Images(pictures["held_pixels"], pictures["held_labels"], held_out_ids),
            sgd,
            (0.01, 0.02, 0.04),
        ),
        "translation": Task(
            lambda: Transformer(shape),
            4 if tiny else 6,
            windows(Vowels, translation_context),
            evenly_spaced(Vowels, translation_context, 2 * num_held_out),
            adamw,
            (1e-3, 2e-3, 4e-3),
        ),
    }


# -- one job -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A training, or its first steps.

    Attributes:
        kind: ``curve`` and ``rate`` with validation, or ``pace`` without, for the time of steps.
        method: ``alone``, ``ddp``, ``fp16 hook``, ``diloco H OUTER-LR MOMENTUM``, or ``ours NAME``.
        horizon: Steps over which the learning rate decays.
        steps: Number of steps.
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
    """Learning rate factor: warm-up over a tenth of the horizon, then linear decay to a fifth."""
    warm_up_steps = max(1, horizon // 10)
    return min(
        (step + 1) / warm_up_steps,
        max(0.2, 1 - 0.8 * (step - warm_up_steps) / max(1, horizon - warm_up_steps)),
    )


class Recorder:
    """Records the times and losses of a rank. Its clock stops during validation."""

    def __init__(self, job: Job, task: Task, network: nn.Module, interface: str) -> None:
        self._job, self._task, self._network = job, task, network
        self._interface = interface
        self.steps: list[float] = []  # seconds of each step
        self.losses: list[str] = []  # of this rank's samples, to the last bit
        self.curve: list[tuple[int, float, float]] = []  # step, seconds, validation loss
        self._bytes = [bytes_sent(interface)]
        self._start = time.perf_counter()

    def start_clock(self) -> None:
        self._start = time.perf_counter()

    def record_step(self, loss: Tensor) -> None:
        """Record a step that began at the end of the last step or validation."""
        step_end = time.perf_counter()
        self.steps.append(step_end - self._start)
        self.losses.append(float(loss).hex())
        self._start = step_end
        num_steps = len(self.steps)
        if num_steps == self._job.steps:
            self._bytes.append(bytes_sent(self._interface))
        if self._job.kind != "pace" and num_steps % self._job.every == 0:
            if dist.is_initialized():
                dist.barrier()  # the slowest rank's time counts
                self.steps[-1] += time.perf_counter() - step_end
            self.curve.append((num_steps, sum(self.steps), self._validate()))
            self._start = time.perf_counter()

    @torch.no_grad()
    def _validate(self) -> float:
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        ids = np.array_split(np.arange(len(self._task.held_out)), size)[rank]
        if self._job.method.startswith("diloco"):  # the ranks have different batch statistics
            for buffer in self._network.buffers():
                if buffer.is_floating_point() and buffer.isfinite().all():
                    dist.all_reduce(buffer)
                    buffer /= size
        self._network.eval()
        total = torch.zeros(2, dtype=torch.float64)
        for part in np.array_split(ids, max(1, len(ids) // (2 * self._task.batch_per_rank))):
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
            "seconds": [round(step_s, 6) for step_s in self.steps],
            "losses": self.losses[:40],
            "curve": [
                (step, round(seconds, 4), round(loss, 6)) for step, seconds, loss in self.curve
            ],
            "sent": (self._bytes[-1] - self._bytes[0]) / max(1, len(self.steps)),
        }


def bytes_sent(interface: str) -> int:
    """Bytes that this network namespace has sent through an interface."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == interface:
            return int(figures.split()[8])
    return 0


def run(job: Job, task: Task, interface: str, folder: Path) -> dict[str, Any]:
    """Train as one rank of the job that the environment variables describe."""
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    network = task.make()
    if job.method.startswith("ours "):
        return train_with_paceline(job, task, network, interface, folder)
    return train_with_torch(job, task, network, interface)


def mean_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, -2), targets.flatten())


def train_with_torch(job: Job, task: Task, network: nn.Module, interface: str) -> dict[str, Any]:
    """Train with a plain loop and DDP, a hook of torch, DiLoCo, or without communication."""
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
    data = task.train(job.seed, job.steps * task.batch_per_rank * size)
    recorder = Recorder(job, task, network, interface)
    dist.barrier()
    recorder.start_clock()
    for step in range(job.steps):
        first_sample = (step * size + rank) * task.batch_per_rank
        *inputs, targets = data.batch(np.arange(first_sample, first_sample + task.batch_per_rank))
        loss = mean_loss(model(*inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        recorder.record_step(loss.detach())
    dist.barrier()
    return recorder.result()


def train_with_paceline(
    job: Job, task: Task, network: nn.Module, interface: str, folder: Path
) -> dict[str, Any]:
    """Train with Paceline."""
    from paceline import train

    session = train.join(seed=job.seed, device="cpu", run_dir=folder)
    optimizer = task.optimizer(network.parameters(), job.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: schedule(s, job.horizon))
    name = job.method.removeprefix("ours ")
    model = session.prepare(network, optimizer, scheduler, communication=name, overlap="auto")
    size = session.world.size
    data = task.train(job.seed, job.steps * task.batch_per_rank * size)
    loader = session.loader(data, task.batch_per_rank * size, shuffle=False)
    recorder = Recorder(job, task, network, interface)
    dist.barrier()
    recorder.start_clock()
    for _ in session.epochs(loader, steps=job.steps):
        for *inputs, targets in loader:
            scores = model(*inputs)
            flat = cross_entropy(scores.flatten(0, -2), targets.flatten(), reduction="none")
            losses = flat.view(len(targets), -1).mean(1)
            session.step(losses)
            recorder.record_step(losses.detach().mean())
    dist.barrier()
    result = recorder.result()
    exchange = session.models.first.exchange
    result["method"] = getattr(exchange and exchange.reducer, "name", "DDP's own")
    session.close()
    return result


# -- torchft's DiLoCo --------------------------------------------------------------------


def diloco(network: nn.Module, inner_optimizer: torch.optim.Optimizer, method: str) -> None:
    """Attach torchft's ``local_sgd.DiLoCo`` to the optimizer, with a substitute for its manager.

    For each quorum and each commit, torchft's manager calls its server. Here, each costs one
    all-reduce of four bytes, which is less.
    """
    _, every, lr, momentum = method.split()
    outer_optimizer = torch.optim.SGD(
        network.parameters(), lr=float(lr), momentum=float(momentum), nesterov=True
    )
    averager = diloco_class()(
        Manager(), [network], inner_optimizer, outer_optimizer, int(every), use_bucketization=True
    )
    averager.__enter__()


def diloco_class() -> Any:
    """torchft's DiLoCo class, imported without the compiled part of torchft."""
    manager_module = types.ModuleType("torchft.manager")
    manager_module.Manager = Manager  # type: ignore[attr-defined]
    package = types.ModuleType("torchft")
    package.__path__ = [str(torchft_folder())]
    sys.modules.update({"torchft": package, "torchft.manager": manager_module})
    from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found]

    return DiLoCo


def torchft_folder() -> Path:
    """Folder of torchft's Python files; importing the package would need its compiled part."""
    if folder_text := os.environ.get("BENCH_TORCHFT"):
        return Path(folder_text)
    import importlib.util

    spec = importlib.util.find_spec("torchft")
    if spec is None or not spec.origin:
        raise FileNotFoundError(
            "torchft is not installed: set BENCH_TORCHFT to its package's folder"
        )
    return Path(spec.origin).parent


class Manager:
    """The part of torchft's manager that ``DiLoCo`` uses, for ranks that never fail."""

    _use_async_quorum = False

    def __init__(self) -> None:
        self._step = 0

    def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> CompletedWork:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
        return CompletedWork(tensor)

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


class CompletedWork:
    """A completed collective."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensor)
        return future


# -- the link ----------------------------------------------------------------------------


def line(elements: int) -> dict[str, Any]:
    """Seconds of an all-reduce of ``elements`` float32 numbers, and of a single one."""
    dist.init_process_group("gloo")
    seconds_by_name = {}
    for name, count, rounds in (("large", elements, 3), ("small", 1, 20)):
        tensor = torch.ones(count)
        times = []
        for _ in range(rounds):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - start)
        seconds_by_name[name] = sorted(times)[len(times) // 2]
    return {
        **seconds_by_name,
        "mbit_s": elements * 32 / seconds_by_name["large"] / 1e6 if elements else math.nan,
    }
