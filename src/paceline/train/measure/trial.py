"""A try of a training, after which everything is as it was before."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager

import torch

from paceline.train import parallel
from paceline.train.checkpoints.capture import generators, set_generators
from paceline.train.data.loader import Batch, Loader
from paceline.train.device import Precision
from paceline.train.models import ALONE, Models
from paceline.train.update import Updater


@contextmanager
def untouched(models: Models, device: torch.device, precision: Precision) -> Iterator[Updater]:
    """Within it the session's model may be updated; afterwards it is the former one.

    Weights, buffers, optimizer and generators come back, also after an error, and what codes have
    left to say; neither schedule nor average is touched. Needs memory for another copy of the
    weights.

    Raises:
        ValueError: There are several models.
    """
    real = models[ALONE]
    with ExitStack() as within:
        if real.communication is not None:
            within.enter_context(real.communication.temporary_reducer())
        yield from _untouched(real, device, precision)


def _untouched(real: Updater, device: torch.device, precision: Precision) -> Generator[Updater]:
    parallel.put_back(real.module)
    live = [*real.module.parameters(), *real.module.buffers()]
    kept = [parallel.own_part(one.detach()).clone() for one in live]
    optimizer = real.optimizer
    state = copy.deepcopy(optimizer.state_dict()) if optimizer.state else None
    groups = [{k: v for k, v in one.items() if k != "params"} for one in optimizer.param_groups]
    drawn = generators(device)
    trial = Updater(real.module, optimizer, None, precision.scaler(device), real.clip_norm)
    trial.model = real.model
    try:
        yield trial
    finally:
        optimizer.zero_grad()
        if state is None:
            optimizer.state.clear()
        else:
            optimizer.load_state_dict(state)
        for group, former in zip(optimizer.param_groups, groups, strict=True):
            group.update(former)
        parallel.put_back(real.module)
        with torch.no_grad():
            for one, former_values in zip(live, kept, strict=True):
                parallel.own_part(one.detach()).copy_(former_values)
        set_generators(drawn, device)


def steps_of(loader: Loader, steps: int) -> Generator[Batch]:
    """The batches of so many global steps from the beginning of the data, over several epochs.

    Args:
        loader: Of the training; its position does not change.
        steps: Global steps; closing the iterator ends it earlier.
    """
    own = loader.rehearsal(steps)
    done = own.progress
    while not done.finished:
        for batch in own:
            yield batch
            if batch.last:
                done.step, done.offset = done.step + 1, batch.stop
        if done.offset >= own.order.size:
            done.epoch, done.offset = done.epoch + 1, 0
