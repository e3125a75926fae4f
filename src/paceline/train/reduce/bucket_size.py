"""The size of gradient buckets, settled in the first steps.

How much of the exchange is hidden behind the backward pass depends on the size of buckets, and
which size is best depends on model, hosts and network: so some are tried for a few of the first
steps, and the quickest stays. This is done between two ranks only. With three and more the model
alone gives the sizes: where a gradient lies decides in which order the ranks' shares are added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.train.comms import Comms
from paceline.train.measure.pace import PARTS, Look
from paceline.train.reduce.exchange import Exchange

_PARTS = (8, 16, 32)  # of the gradients make a bucket
_FIRST = 4  # the first bucket is so much smaller
_LEAST = 1 << 16  # bytes of a bucket
_WARM = 2  # steps after a change that do not count: DDP lays its buckets out once more
_EXPOSED = 0.05  # part of a step that is worth the trouble
_BETTER = 0.98  # of the time of the way that needs nothing
_MOVING = PARTS.index("moving")
_STEP = [PARTS.index(one) for one in ("computing", "waiting", "moving")]


@dataclass(frozen=True, slots=True)
class Way:
    """Sizes of buckets.

    Attributes:
        size, first: Bytes of a bucket and of the first; 0: as they are without us.
    """

    size: int = 0
    first: int = 0


def ways(nbytes: int, ranks: int) -> list[Way]:
    """The sizes that are worth a trial for so many bytes of gradients."""
    if ranks != 2:  # the sizes stay: see above
        return []
    sizes = dict.fromkeys(max(_LEAST, nbytes // parts) for parts in _PARTS)
    return [Way(size, max(_LEAST, size // _FIRST)) for size in sizes if size < nbytes]


class Overlap:
    """Finds the best sizes of buckets for one model in its first steps. Every rank does the same.

    Args:
        exchange: Of the model's gradients.
        comms: Of all ranks.

    Attributes:
        seconds: Of a step, by way, as far as ways have been tried.
        way: In use.
        done: The trial has ended, or there is nothing to try.
    """

    seconds: dict[Way, float]

    def __init__(self, exchange: Exchange, comms: Comms) -> None:
        self._exchange, self._comms = exchange, comms
        self.again(0)

    def again(self, step: int) -> None:
        """Begins anew after so many steps: gradients are averaged in another way.

        Where they are coded, how they are divided belongs to the way.
        """
        comms, self._was_plain = self._comms, self._is_plain
        tries = not (comms.alone or comms.mixed) and comms.device.type == "cpu"
        self.done = not (self._is_plain and tries)
        self.way, self.seconds = Way(), {}
        self._left = ways(self._exchange.nbytes, comms.world.size)
        self._since = step

    @property
    def _is_plain(self) -> bool:
        return self._exchange.method is None

    def looked(self, look: Look, step: int, first: int = 0) -> bool:
        """Takes a look at the last steps, after ``step`` steps of this process.

        Of the first ones, that may have taken longer than later ones, none counts.

        Returns:
            True when this one has settled it.
        """
        if self.done:
            return False
        steps = torch.arange(look.seconds.shape[1]) * look.every + look.first_step
        counted = look.seconds[:, steps >= max(self._since, first) + _WARM]
        if counted.shape[1] < 2:
            return False
        whole = counted[:, :, _STEP].sum(2)
        seconds = float(whole.max(dim=0).values.median())
        self.seconds[self.way] = min(seconds, self.seconds.get(self.way, seconds))
        if self.way == Way():
            exposed = counted[:, :, _MOVING].sum(1) / counted.sum((1, 2)).clamp(min=1e-9)
            if float(exposed.min()) < _EXPOSED:
                self._left = []
        if self._left:
            self.use(self._left.pop(0))
        else:
            best = min(self.seconds, key=lambda one: self.seconds[one])
            self.use(best if self.seconds[best] <= _BETTER * self.seconds[Way()] else Way())
            self.done = True
        self._since = step
        return self.done

    def use(self, way: Way) -> None:
        """Exchanges so from now on; between two steps."""
        if way != self.way:
            if way.size:
                self._exchange.buckets(way.size, way.first)
            else:
                self._exchange.as_made()
        self.way = way

    def about(self) -> dict[str, Any]:
        """What was found, for the records."""
        seconds = self.seconds.get(self.way, 0.0)
        return {
            "bucket_bytes": self.way.size,
            "first_bytes": self.way.first,
            "seconds": round(seconds, 6),
            "before": round(self.seconds.get(Way(), seconds), 6),
            "tried": len(self.seconds),
        }

    # -- in checkpoints ------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was found; nothing while the trial goes on, and where gradients are coded."""
        if not (self.done and self._is_plain):
            return {}
        ranks = self._comms.world.size
        return {"ranks": ranks, "size": self.way.size, "first": self.way.first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Uses what was found before at once, if for as many ranks and plain averages.

        A checkpoint of an earlier version may hold late updates (``late``) or what was found for
        codes (``code``): then sizes are tried anew.
        """
        if self._was_plain != self._is_plain:
            self.again(0)
        if self.done or state.get("ranks") != self._comms.world.size:
            return
        if state.get("late") or state.get("code"):
            return
        self.use(Way(state["size"], state["first"]))
        self.done = True
