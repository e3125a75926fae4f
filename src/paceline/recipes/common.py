"""What every recipe does in the same way with its options, around its own training loop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline import train
from paceline.program import guarded
from paceline.recipes import parse_options
from paceline.recipes.optimization import Batching, Curve, batching, optimizer
from paceline.recipes.options import Options, copies_of, limits_of
from paceline.spec.balance import weights_of
from paceline.train import Best
from paceline.train.data import Data
from paceline.train.device import choose_device, look

LOOKS, LEAST_STEPS = 16, 40
"""With ``--stop-at``: evaluations within an epoch, and the least number of steps between two."""

R = TypeVar("R", bound=Options)


def effective(options: R, large: bool) -> R:
    """The options with the precision that suits the machine.

    Args:
        options: Of the recipe; a ``dtype`` that is not the default stays.
        large: The model has products that are large enough to be faster in bf16.
    """
    if options.fast and large and options.dtype == "float32":
        return replace(options, dtype=fast_dtype(options.device))
    return options


def run(recipe: str, training: Callable[[Any], None], argv: Sequence[str] | None) -> int:
    """Runs a recipe in this process; returns the exit status.

    Args:
        recipe: Its name.
        training: Takes the recipe's options.
        argv: Flags; ``None`` for those of this process.
    """
    flags = sys.argv[1:] if argv is None else argv
    return guarded(lambda: training(parse_options(recipe, flags)))


def join(recipe: str, options: Options) -> train.Session:
    """Joins the job and keeps the effective settings."""
    session = train.join(
        recipe,
        seed=options.seed,
        device=options.device,
        backend=options.backend,
        dtype=options.dtype,
        run_dir=options.run_dir,
        log_every=options.log_every,
        check_every=options.check_every,
        deterministic=options.deterministic,
    )
    if not (options.find_lr or options.find_batch):  # these leave a run as it is
        session.save_config({"recipe": recipe, "options": asdict(options)})
    return session


def agree_format(session: train.Session, options: Options, channels_last: bool = False) -> None:
    """Raises where ranks would compute in different formats; says what is not the default."""
    dtypes = session.comms.texts(options.dtype) if session.comms.mixed else []
    if set(dtypes) == {"bf16", "float32"}:  # parameters and what is exchanged are float32 in both
        counts = " and ".join(f"{dtypes.count(one)} in {one}" for one in sorted(set(dtypes)))
        session.say(f"ranks on different devices compute as is best for each: {counts}")
        return
    session.agree("the precision (--no-fast keeps to --dtype)", options.dtype)
    if options.fast and (options.dtype == "bf16" or channels_last):
        layout = " with channels last" if channels_last else ""
        session.say(f"computing in {options.dtype}{layout} (--no-fast keeps to --dtype)")


def batch_of(session: train.Session, options: Options) -> Batching:
    """Batch and learning rate at this world size; said once."""
    limit = limits_of(options.micro_batch)
    batch = batching(
        session.world.size,
        global_batch=options.global_batch,
        lr=options.lr,
        per_rank=options.batch_per_process,
        limit=limit if isinstance(limit, int) else 0,
        rule=options.scale_lr,
    )
    session.say(batch.describe())
    return batch


def loader_of(
    session: train.Session,
    options: Options,
    samples: Data,
    batch: Batching,
    lengths: Sequence[int] | None = None,
    workers: int | None = None,
) -> train.Loader:
    """Batches for training, shared among the ranks as the options say."""
    limit = limits_of(options.micro_batch)
    return session.loader(
        samples,
        batch.global_batch,
        lengths=lengths,
        workers=workers,
        limit=0 if limit == "auto" else limit,
        balance=weights_of(options.balance),
        drop_slow=options.drop_slow,
    )


def curve_of(options: Options, loader: train.Loader) -> Curve:
    """The course of the learning rate over the whole training."""
    steps = options.steps or options.epochs * len(loader)
    return Curve(options.schedule, steps, options.warm_up, milestones=options.milestones)


def optimizer_of(options: Options, network: nn.Module, lr: float) -> Optimizer:
    """The optimizer that the options name, over what is not frozen."""
    return optimizer(
        options.optimizer,
        network,
        lr,
        momentum=options.momentum,
        nesterov=options.nesterov,
        weight_decay=options.weight_decay,
    )


def prepare(
    session: train.Session,
    options: Options,
    network: nn.Module,
    optimizer: Optimizer,
    schedule: LRScheduler,
) -> nn.Module:
    """What to call in the training loop."""
    model = session.prepare(
        network,
        optimizer,
        schedule,
        clip_norm=options.clip_norm or None,
        compile=options.compile,
        communication=options.communication,
        overlap=options.overlap,
    )
    if options.ema:
        session.average(options.ema, start=options.ema_start)
    session.watch(every=options.watch, devices=options.watch_devices)
    return model


Compute = Callable[[train.Batch], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""The forward pass of a batch: its losses, and further values of each sample."""


def tried(
    session: train.Session,
    options: Options,
    loader: train.Loader,
    compute: Compute,
    lengths: Sequence[int] | None = None,
) -> bool:
    """Tries learning rates or batches where that was asked for; True: then nothing is trained.

    What fits into each process's memory is tried here, too.
    """

    def losses(batch: train.Batch) -> torch.Tensor:
        return compute(batch)[0]

    if (options.find_batch or options.find_lr) and (idle := without_meaning(options)):
        session.say(f"nothing is trained or saved, so without meaning here: {', '.join(idle)}")
    if limits_of(options.micro_batch) == "auto" and not options.find_batch:
        session.say(train.fit_batch(session, loader, losses, lengths=lengths))
    if options.find_batch:
        session.say(str(train.find_batch(session, loader, losses, lengths=lengths)))
    if options.find_lr:
        steps = options.steps or train.LrRange.STEPS
        session.say(str(train.find_lr(session, loader, losses, steps=steps)))
    return options.find_batch or options.find_lr


_OF_TRAINING = (
    *("epochs", "lr", "schedule", "milestones", "warm_up", "unfreeze_every", "ema", "ema_start"),
    *("evaluate_every", "patience", "stop_at", "beam", "score_every", "samples"),
    *("checkpoint_every", "keep", "resume", "checkpoint_copies", "when_full", "check_every"),
    *("log_every", "watch"),
    *("watch_devices", "track", "track_project", "track_each_node"),
)
_OF_BATCHES = ("steps", "global_batch", "batch_per_process", "micro_batch", "scale_lr")


def without_meaning(options: Options) -> list[str]:
    """The flags at another value than usual that do nothing beside --find-lr or --find-batch."""
    names = _OF_TRAINING if options.find_lr else (*_OF_TRAINING, *_OF_BATCHES)
    usual = {field.name: field.default for field in fields(options)}
    idle = [name for name in names if name in usual and getattr(options, name) != usual[name]]
    return ["--" + name.replace("_", "-") for name in idle]


def epochs(session: train.Session, loader: train.Loader, options: Options) -> Iterator[int]:
    """Epoch numbers, once for each evaluation."""
    every = options.evaluate_every
    if options.stop_at and not (every or options.patience):
        # or a long epoch hides that it is reached
        every = max(-(-len(loader) // LOOKS), LEAST_STEPS)
    return session.epochs(loader, options.epochs, options.steps, every=every)


def end_early(
    session: train.Session, options: Options, best: Best, name: str, figure: float
) -> None:
    """Ends the training where an evaluation is good enough, or none has been better for long."""
    if 0 < options.stop_at <= figure:
        session.stop(f"{name} {figure:.4f} is at least --stop-at {options.stop_at:g}")
    elif best.stop:
        session.stop(f"no better {name} in {best.stale} evaluations")


def keep_checkpoints(
    session: train.Session,
    options: Options,
    best: Best,
    data: str,
    describes: dict[str, Any],
    **identity: Any,
) -> None:
    """Makes checkpoints as the options say, resumes from an earlier one, and feeds the trackers.

    Args:
        session: After :func:`prepare`.
        options: Of the recipe.
        best: Updated in each epoch.
        data: Fingerprint of the data.
        describes: What is needed to use the model of a checkpoint.
        identity: What else must be the same for a run to be resumed.
    """
    dtype = session.comms.texts(options.dtype)[0]  # ranks on different devices may differ
    same = {"model": options.model, "data": data, "seed": options.seed, "dtype": dtype}
    session.checkpoints(
        every=options.checkpoint_every,
        keep=options.keep,
        resume=options.resume,
        best=best,
        identity={**same, **identity},
        describes=describes,
        stop_when_full=options.when_full == "stop",
        copies=copies_of(options.checkpoint_copies),
    )
    session.track(
        options.track,
        project=options.track_project,
        config=asdict(options),
        each_node=options.track_each_node,
    )


def fast_dtype(device: str) -> Literal["bf16", "float32"]:
    """``bf16`` where the device computes in it faster than in float32, else ``float32``."""
    target = choose_device(device, look(), 0)
    if target.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    if target.type == "xpu":
        return "bf16"
    return "bf16" if {"avx512_bf16", "amx_bf16"} & cpu_flags() else "float32"


def cpu_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What the CPU can do, as Linux names it; empty elsewhere."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    lines = (line for line in text.splitlines() if line.startswith("flags"))
    return frozenset(next(lines, "").partition(":")[2].split())
