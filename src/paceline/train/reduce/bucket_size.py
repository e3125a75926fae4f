"""The size of gradient buckets, settled in the first steps.

How much of the exchange is hidden behind the backward pass depends on the size of buckets, and
which size is best depends on model, hosts and network: so some are tried for a few of the first
steps, and the fastest stays. This is done between two ranks only. With three and more the model
alone gives the sizes: where a gradient lies decides in which order the ranks' shares are added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.train.comms import Comms
from paceline.train.measure.pace import PARTS, StepTimings
from paceline.train.reduce.exchange import GradientExchange

_BUCKET_COUNTS = (8, 16, 32)
_FIRST_DIVISOR = 4  # the first bucket is so much smaller
_MIN_BYTES = 1 << 16  # of a bucket
_SKIPPED_STEPS = 2  # after a change: DDP lays its buckets out once more
_MIN_EXPOSED = 0.05  # share of a step that is worth a trial
_MAX_RATIO = 0.98  # of a trial's time to that of DDP's own sizes, for it to be used
_MOVING = PARTS.index("moving")
_STEP = [PARTS.index(part) for part in ("computing", "waiting", "moving")]


@dataclass(frozen=True, slots=True)
class BucketSizes:
    """Bytes of a bucket and of the first one; 0: DDP's own sizes."""

    size: int = 0
    first: int = 0


def candidates(nbytes: int, ranks: int) -> list[BucketSizes]:
    """Returns the sizes that are worth a trial for ``nbytes`` of gradients."""
    if ranks != 2:  # the sizes stay: see above
        return []
    sizes = dict.fromkeys(max(_MIN_BYTES, nbytes // count) for count in _BUCKET_COUNTS)
    return [BucketSizes(n, max(_MIN_BYTES, n // _FIRST_DIVISOR)) for n in sizes if n < nbytes]


class BucketTrial:
    """Finds the best sizes of buckets for one model in its first steps. Every rank does the same.

    Attributes:
        seconds: Seconds of a step by sizes, for those that were tried.
        is_finished: The trial has ended, or there is nothing to try.
    """

    seconds: dict[BucketSizes, float]

    def __init__(self, exchange: GradientExchange, comms: Comms) -> None:
        self._exchange, self._comms = exchange, comms
        self.restart(0)

    def restart(self, step: int) -> None:
        """Restarts the trial after ``step`` steps: gradients are averaged by another method.

        Coded gradients are not tried: their method sets the buckets.
        """
        comms, self._was_exact = self._comms, self._is_exact
        can_try = not (comms.is_alone or comms.mixed) and comms.device.type == "cpu"
        self.is_finished = not (self._is_exact and can_try)
        self.sizes, self.seconds = BucketSizes(), {}
        self._untried = candidates(self._exchange.nbytes, comms.world.size)
        self._change_step = step

    @property
    def _is_exact(self) -> bool:
        return self._exchange.reducer is None

    def consider(self, timings: StepTimings, step: int, skipped: int = 0) -> bool:
        """Continues the trial with the timings of the last steps, after ``step`` steps.

        Args:
            skipped: First steps of the training that count for nothing: they may take longer.

        Returns:
            Whether this call has finished the trial.
        """
        if self.is_finished:
            return False
        numbers = torch.arange(timings.seconds.shape[1]) * timings.stride + timings.first_step
        counted = timings.seconds[:, numbers >= max(self._change_step, skipped) + _SKIPPED_STEPS]
        if counted.shape[1] < 2:
            return False
        seconds = float(counted[:, :, _STEP].sum(2).max(dim=0).values.median())
        self.seconds[self.sizes] = min(seconds, self.seconds.get(self.sizes, seconds))
        if self.sizes == BucketSizes():
            exposed = counted[:, :, _MOVING].sum(1) / counted.sum((1, 2)).clamp(min=1e-9)
            if float(exposed.min()) < _MIN_EXPOSED:
                self._untried = []
        if self._untried:
            self.use(self._untried.pop(0))
        else:
            best = min(self.seconds, key=lambda sizes: self.seconds[sizes])
            is_better = self.seconds[best] <= _MAX_RATIO * self.seconds[BucketSizes()]
            self.use(best if is_better else BucketSizes())
            self.is_finished = True
        self._change_step = step
        return self.is_finished

    def use(self, sizes: BucketSizes) -> None:
        """Uses these sizes from now on; between two steps."""
        if sizes != self.sizes:
            if sizes.size:
                self._exchange.set_bucket_sizes(sizes.size, sizes.first)
            else:
                self._exchange.reset()
        self.sizes = sizes

    def summary(self) -> dict[str, Any]:
        seconds = self.seconds.get(self.sizes, 0.0)
        return {
            "bucket_bytes": self.sizes.size,
            "first_bytes": self.sizes.first,
            "seconds": round(seconds, 6),
            "before": round(self.seconds.get(BucketSizes(), seconds), 6),
            "tried": len(self.seconds),
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the result; empty while the trial goes on, and when gradients are coded."""
        if not (self.is_finished and self._is_exact):
            return {}
        ranks = self._comms.world.size
        return {"ranks": ranks, "size": self.sizes.size, "first": self.sizes.first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Uses what was found before at once, if for as many ranks and exact averages.

        A checkpoint of an earlier version may hold sizes for late updates (``late``) or coded
        gradients (``code``): then sizes are tried again.
        """
        if self._was_exact != self._is_exact:
            self.restart(0)
        if self.is_finished or state.get("ranks") != self._comms.world.size:
            return
        if state.get("late") or state.get("code"):
            return
        self.use(BucketSizes(state["size"], state["first"]))
        self.is_finished = True
