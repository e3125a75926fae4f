"""What every recipe does in the same way with its options, around its own training loop."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline import train
from paceline.recipes.options import Options
from paceline.train.batching import Batching, batching
from paceline.train.optimizers import optimizer
from paceline.train.stopping import Best


def join(recipe: str, options: Options, dtype: str = "") -> train.Session:
    """Joins the job and keeps the effective settings; ``dtype`` stands in for the option."""
    session = train.join(
        recipe,
        seed=options.seed,
        device=options.device,
        backend=options.backend,
        dtype=dtype or options.dtype,
        run_dir=options.run_dir,
        log_every=options.log_every,
        check_every=options.check_every,
    )
    session.save_config({"recipe": recipe, "options": asdict(options)})
    return session


def batch_of(session: train.Session, options: Options) -> Batching:
    """Batch and learning rate at this world size; said once."""
    batch = batching(
        session.world.size,
        global_batch=options.global_batch,
        lr=options.lr,
        per_rank=options.batch_per_process,
        limit=options.micro_batch,
        rule=options.scale_lr,
    )
    session.say(batch.describe())
    return batch


def optimizer_of(options: Options, network: nn.Module, lr: float) -> Optimizer:
    """The optimizer that the options name, over what is not frozen."""
    return optimizer(
        options.optimizer,
        network,
        lr,
        momentum=options.momentum,
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
    return session.prepare(
        network,
        optimizer,
        schedule,
        clip_norm=options.clip_norm or None,
        compile=options.compile,
    )


def keep_checkpoints(
    session: train.Session, options: Options, best: Best, data: str, **identity: Any
) -> None:
    """Keeps the state as the options say, goes on from an earlier one, and feeds the trackers.

    Args:
        session: After :func:`prepare`.
        options: Of the recipe.
        best: Updated in each epoch.
        data: Fingerprint of the data.
        identity: What else must be the same for a run to go on.
    """
    same = {"model": options.model, "data": data, "seed": options.seed, "dtype": options.dtype}
    session.checkpoints(
        every=options.checkpoint_every,
        keep=options.keep,
        resume=options.resume,
        best=best,
        identity={**same, **identity},
        stop_when_full=options.when_full == "stop",
    )
    session.track(
        options.track,
        project=options.track_project,
        config=asdict(options),
        each_node=options.track_each_node,
    )
