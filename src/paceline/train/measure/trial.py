"""A try of a training, after which everything is as it was before."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext

import torch

from paceline.train import parallel
from paceline.train.checkpoints.capture import generator_state, set_generator_state
from paceline.train.data.loader import Batch, Loader
from paceline.train.device import Precision
from paceline.train.models import UNNAMED, Models
from paceline.train.update import Updater


@contextmanager
def restored_afterwards(
    models: Models, device: torch.device, precision: Precision
) -> Iterator[Updater]:
    """Context in which the session's model may be updated and is restored afterwards.

    Weights, buffers, optimizer and generators come back, also after an error, and what codes have
    left to say; neither schedule nor average is touched. Needs memory for another copy of the
    weights.

    Raises:
        ValueError: There are several models.
    """
    updater = models[UNNAMED]
    parallel.reshard(updater.module)
    live = [*updater.module.parameters(), *updater.module.buffers()]
    saved = [parallel.local_tensor(tensor.detach()).clone() for tensor in live]
    optimizer = updater.optimizer
    state = copy.deepcopy(optimizer.state_dict()) if optimizer.state else None
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    drawn = generator_state(device)
    trial = Updater(updater.module, optimizer, None, precision.scaler(device), updater.clip_norm)
    trial.model = updater.model
    communication = updater.communication
    try:
        with nullcontext() if communication is None else communication.temporary_reducer():
            yield trial
    finally:
        optimizer.zero_grad()
        if state is None:
            optimizer.state.clear()
        else:
            optimizer.load_state_dict(state)
        for group, former in zip(optimizer.param_groups, groups, strict=True):
            group.update(former)
        parallel.reshard(updater.module)
        with torch.no_grad():
            for tensor, former_values in zip(live, saved, strict=True):
                parallel.local_tensor(tensor.detach()).copy_(former_values)
        set_generator_state(drawn, device)


def trial_batches(loader: Loader, steps: int) -> Generator[Batch]:
    """Yields the batches of so many global steps from the start of the data.

    Args:
        steps: Global steps; closing the iterator ends it earlier.
    """
    trial_loader = loader.rehearsal(steps)
    progress = trial_loader.progress
    while not progress.finished:
        for batch in trial_loader:
            yield batch
            if batch.last:
                progress.step, progress.offset = progress.step + 1, batch.stop
        if progress.offset >= trial_loader.order.size:
            progress.epoch, progress.offset = progress.epoch + 1, 0
