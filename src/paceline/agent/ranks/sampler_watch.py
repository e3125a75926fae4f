"""Reports a DistributedSampler that gives the same order in every epoch, without ``set_epoch``."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Callable, Dict, Iterator

SAME_ORDER = "same order"
NUM_EPOCHS = 3  # with one epoch number

Report = Callable[[Dict[str, Any]], None]


class SamplerWatch:
    """Counts the passes over each shuffling sampler during which an optimizer steps, on rank 0.

    In other passes, such as evaluations, the order does not matter.
    """

    def __init__(self, report: Report) -> None:
        self._report, self._is_reported = report, False
        self._open: Any = weakref.WeakSet()  # passes without a step so far
        self._epochs: Any = weakref.WeakKeyDictionary()  # by sampler: its order, and its passes

    def install(self, module: Any) -> None:
        """Wraps the sampler of ``module``, ``torch.utils.data.distributed``."""
        original = module.DistributedSampler.__iter__

        @functools.wraps(original)
        def iterate(sampler: Any) -> Any:
            indices = original(sampler)
            try:
                is_watched = sampler.shuffle and sampler.num_replicas > 1 and sampler.rank == 0
                order = sampler.seed, sampler.epoch
            except AttributeError:  # of a subclass
                return indices
            if self._is_reported or not is_watched:
                return indices
            return self._watch(_Pass(sampler, order), indices)

        module.DistributedSampler.__iter__ = iterate

    def _watch(self, current: "_Pass", indices: Iterator[Any]) -> Iterator[Any]:
        self._open.add(current)
        yield from indices
        self._open.discard(current)

    def on_step(self) -> None:
        """Handles a step of an optimizer."""
        if not self._open:
            return
        for current in self._open.copy():
            order, number = self._epochs.get(current.sampler, (current.order, 0))
            number = number + 1 if order == current.order else 1
            self._epochs[current.sampler] = current.order, number
            if number == NUM_EPOCHS and not self._is_reported:
                self._is_reported = True
                self._report({"kind": "event", "event": SAME_ORDER})
        self._open.clear()


class _Pass:
    """One pass over a sampler; it ends with the iterator, too, if a loop is left early."""

    def __init__(self, sampler: Any, order: Any) -> None:
        self.sampler, self.order = sampler, order
