"""Parts that all recipes share, around their own training loops."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from paceline import train
from paceline.program import guarded
from paceline.recipes import parse_options
from paceline.recipes.data import local_path
from paceline.recipes.optimization import Batching, Curve, compute_batching
from paceline.recipes.options import Options, parse_copies, parse_micro_batch
from paceline.spec.training.balance import parse_weights
from paceline.train import Best
from paceline.train.data.fetch import Data
from paceline.train.device import available_devices, choose_device
from paceline.train.hyperparameters import set_rates

EVALUATIONS_PER_EPOCH, MIN_EVALUATION_STEPS = 16, 40
"""With ``--stop-at``: evaluations within an epoch, and the minimum number of steps between two."""

R = TypeVar("R", bound=Options)


def with_fast_dtype(options: R, large: bool) -> R:
    """Returns the options with bf16 where that is faster, unless ``dtype`` was changed.

    ``large`` tells whether the model's matrix products are large enough to be faster in bf16.
    """
    if options.fast and large and options.dtype == "float32":
        return replace(options, dtype=fast_dtype(options.device))
    return options


def run(recipe: str, training: Callable[[Any], None], argv: Sequence[str] | None = None) -> int:
    """Runs a recipe in this process, by default with its flags; returns the exit status."""
    os.umask(os.umask(0o077) | 0o002)  # data are read before the session tightens it
    flags = sys.argv[1:] if argv is None else argv
    return guarded(lambda: training(parse_options(recipe, flags)))


def join(recipe: str, options: Options) -> train.Session:
    """Joins the job and saves the effective settings."""
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
    if not (options.find_lr or options.find_batch):  # trials do not change the run
        session.save_config({"recipe": recipe, "options": asdict(options)})
    return session


def agree_on_precision(
    session: train.Session, options: Options, channels_last: bool = False
) -> None:
    """Checks that all ranks use the same precision, and reports one that is not the default."""
    dtypes = session.comms.texts(options.dtype) if session.comms.mixed else []
    if set(dtypes) == {"bf16", "float32"}:  # both keep float32 parameters and gradients
        summary = " and ".join(f"{dtypes.count(dtype)} in {dtype}" for dtype in sorted(set(dtypes)))
        session.say(f"ranks on different devices compute as is best for each: {summary}")
        return
    session.agree("the precision (--no-fast keeps to --dtype)", options.dtype)
    if options.fast and (options.dtype == "bf16" or channels_last):
        layout = " with channels last" if channels_last else ""
        session.say(f"computing in {options.dtype}{layout} (--no-fast keeps to --dtype)")


def make_batching(session: train.Session, options: Options) -> Batching:
    """Computes and reports batch and learning rate at this world size."""
    batch = compute_batching(session.world.size, options)
    session.say(batch.describe())
    return batch


def make_loader(
    session: train.Session,
    options: Options,
    samples: Data,
    batching: Batching,
    lengths: Sequence[int] | None = None,
    workers: int | None = None,
) -> train.Loader:
    """Creates the loader of training batches, shared among the ranks."""
    limit = parse_micro_batch(options.micro_batch)
    return session.loader(
        samples,
        batching.global_batch,
        lengths=lengths,
        workers=workers,
        limit=0 if limit == "auto" else limit,
        balance=parse_weights(options.balance),
        drop_slow=options.drop_slow,
    )


def make_curve(options: Options, loader: train.Loader) -> Curve:
    """Creates the learning-rate curve of the whole training."""
    steps = options.steps or options.epochs * len(loader)
    return Curve(
        options.schedule,
        steps,
        options.warm_up,
        milestones=options.milestones,
        cool_down=options.cool_down,
    )


def prepare(
    session: train.Session,
    options: Options,
    network: nn.Module,
    optimizer: Optimizer,
    schedule: LRScheduler,
) -> nn.Module:
    """Prepares the training and returns the module to call in the training loop."""
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
"""Forward pass of a batch: loss of each sample, and further values of each sample by name."""


def run_trials(
    session: train.Session,
    options: Options,
    loader: train.Loader,
    compute: Compute,
    lengths: Sequence[int] | None = None,
) -> bool:
    """Runs --find-lr, --find-batch and --micro-batch auto; returns whether to stop after them."""

    def losses(batch: train.Batch) -> torch.Tensor:
        return compute(batch)[0]

    if (options.find_batch or options.find_lr) and (unused := unused_flags(options)):
        session.say(f"nothing is trained or saved, so without meaning here: {', '.join(unused)}")
    if parse_micro_batch(options.micro_batch) == "auto" and not options.find_batch:
        session.say(train.fit_batch(session, loader, losses, lengths=lengths))
    if options.find_batch:
        session.say(str(train.find_batch(session, loader, losses, lengths=lengths)))
    if options.find_lr:
        steps = options.steps or train.LrRange.STEPS
        session.say(str(train.find_lr(session, loader, losses, steps=steps)))
    return options.find_batch or options.find_lr


_TRAINING_FIELDS = (
    *(
        "epochs",
        "lr",
        "schedule",
        "milestones",
        "cool_down",
        "warm_up",
        "unfreeze_every",
        "ema",
        "ema_start",
    ),
    *("evaluate_every", "patience", "stop_at", "beam", "score_every", "samples"),
    *("checkpoint_every", "keep", "resume", "checkpoint_copies", "when_full", "check_every"),
    *("log_every", "watch"),
    *("watch_devices", "track", "track_project", "track_each_node"),
)
_BATCH_FIELDS = ("steps", "global_batch", "batch_per_process", "micro_batch", "scale_lr")


def unused_flags(options: Options) -> list[str]:
    """Lists the changed flags that have no effect with --find-lr or --find-batch."""
    names = _TRAINING_FIELDS if options.find_lr else (*_TRAINING_FIELDS, *_BATCH_FIELDS)
    defaults = {field.name: field.default for field in fields(options)}
    unused = [
        name for name in names if name in defaults and getattr(options, name) != defaults[name]
    ]
    return ["--" + name.replace("_", "-") for name in unused]


def epochs(
    session: train.Session,
    loader: train.Loader,
    options: Options,
    curve: Curve,
    schedule: LambdaLR,
    best: Best,
) -> Iterator[int]:
    """Iterates over epoch numbers, yielding once for each evaluation; aligns the curve.

    A resumed training that ended by --stop-at or --patience, and whose options are still the same,
    has no epochs left.
    """
    if session.progress.step:
        stop_early(session, options, best, "value", best.compared)
    interval = options.evaluate_every
    if options.stop_at and not (interval or options.patience):
        # A long epoch would delay the stop.
        interval = max(-(-len(loader) // EVALUATIONS_PER_EPOCH), MIN_EVALUATION_STEPS)
    for epoch in session.epochs(loader, options.epochs, options.steps, every=interval):
        if not options.steps:
            position = curve.steps - loader.steps_left(options.epochs)
            curve.step_offset = position - session.progress.step
        if curve.name != "plateau":  # the checkpoint's rates may be those of another curve
            set_rates(schedule)
        yield epoch


def stop_early(
    session: train.Session, options: Options, best: Best, metric: str, value: float | None
) -> None:
    """Stops the training once the metric reaches --stop-at or stops improving (--patience)."""
    best.compared = value
    if (
        options.stop_at
        and value is not None
        and (value >= options.stop_at if best.higher else value <= options.stop_at)
    ):
        relation = "at least" if best.higher else "at most"
        session.stop(f"{metric} {value:.4f} is {relation} --stop-at {options.stop_at:g}")
    elif best.stop:
        change = "better" if best.higher else "lower"
        session.stop(f"no {change} {metric} in {best.stale} evaluations")


def configure_checkpoints(
    session: train.Session,
    options: Options,
    best: Best,
    data: str,
    metadata: dict[str, Any],
    **identity: Any,
) -> None:
    """Configures checkpoints and trackers, and resumes from an earlier checkpoint.

    Args:
        session: Session after :func:`prepare`.
        data: Fingerprint of the data.
        identity: Further values that must be equal to resume a run.
    """
    dtype = session.comms.texts(options.dtype)[0]  # ranks on different devices may differ
    model_identity = {"model": options.model, "data": data, "seed": options.seed, "dtype": dtype}
    session.checkpoints(
        every=options.checkpoint_every,
        keep=options.keep,
        resume=str(local_path(Path(options.resume).expanduser())),
        best=best,
        identity={**model_identity, **identity},
        describes=metadata,
        stop_when_full=options.when_full == "stop",
        copies=parse_copies(options.checkpoint_copies),
    )
    session.track(
        options.track,
        project=options.track_project,
        config=asdict(options),
        each_node=options.track_each_node,
    )


def fast_dtype(device: str) -> Literal["bf16", "float32"]:
    """Returns ``bf16`` if the device computes faster in it than in float32."""
    target = choose_device(device, available_devices(), 0)
    if target.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    if target.type == "xpu":
        return "bf16"
    return "bf16" if {"avx512_bf16", "amx_bf16"} & cpu_flags() else "float32"


def cpu_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Returns the CPU's features, as Linux names them; empty on other systems."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    lines = (line for line in text.splitlines() if line.startswith("flags"))
    return frozenset(next(lines, "").partition(":")[2].split())
