"""Reports a DistributedSampler that gives the same order in every epoch, without ``set_epoch``."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any, Callable, Dict

SAME_ORDER = "same order"
NUM_PASSES = 3  # with one epoch number; scripts may begin one pass to look at a batch

Report = Callable[[Dict[str, Any]], None]


def watch_samplers(report: Report, module: Any) -> None:
    """Reports once, on rank 0, if a shuffling sampler begins several passes with one epoch number.

    Passes without gradients are evaluations, where the order does not matter.

    Args:
        module: ``torch.utils.data.distributed``.
    """
    passes: Any = weakref.WeakKeyDictionary()  # by sampler: the epoch number, and its passes
    original = module.DistributedSampler.__iter__
    is_reported = False

    @functools.wraps(original)
    def iterate(sampler: Any) -> Any:
        nonlocal is_reported
        shuffles = sampler.shuffle and sampler.num_replicas > 1
        if shuffles and not is_reported and sys.modules["torch"].is_grad_enabled():
            epoch, number = passes.get(sampler, (sampler.epoch, 0))
            number = number + 1 if epoch == sampler.epoch else 1
            passes[sampler] = sampler.epoch, number
            if number == NUM_PASSES and sampler.rank == 0:
                is_reported = True
                report({"kind": "event", "event": SAME_ORDER})
        return original(sampler)

    module.DistributedSampler.__iter__ = iterate
