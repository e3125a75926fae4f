"""The exponential moving average of a model's weights (EMA), which often generalise better."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from paceline.spec.errors import SettingError
from paceline.train import parallel
from paceline.train.comms import Comms

Settle = Callable[[], None]
"""Returns when nothing reads the weights any more."""


class Average:
    """Averages parameters and floating point buffers of a module after each of its updates.

    ``average = decay * average + (1 - decay) * weights``, computed by torch. Every rank computes
    the same; of a sharded module each averages its own shards. Made by ``session.average``.

    Args:
        module: As it was given to ``session.prepare``.
        comms: Of all ranks.
        decay: From 0 to below 1; 0.999 remembers about the last thousand updates.
        start: Updates after which averaging begins; until then the average is the weights.
        settle: Called before weights are exchanged.

    Attributes:
        module: Whose weights these are.
        updates: Of the module, seen so far.

    Raises:
        SettingError: A value that cannot be.
    """

    def __init__(
        self,
        module: nn.Module,
        comms: Comms,
        decay: float,
        start: int = 0,
        settle: Settle = lambda: None,
    ) -> None:
        if not 0 <= decay < 1 or start < 0:
            raise SettingError(
                f"an average of weights with decay {decay} and start {start} cannot be",
                found="the decay lies between 0 and 1, the start is a number of updates",
                remedy="decay=0.999, start=0",
            )
        self.module, self.updates = module, 0
        self._comms, self._start, self._settle = comms, start, settle
        self._mix = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        parallel.put_back(module)
        self._live = _averaged(module)
        self._kept = {name: one.detach().clone() for name, one in self._live.items()}
        self._buffers = [name for name, _ in module.named_buffers() if name in self._live]
        self._applied = False
        self.exchanges = 0

    @torch.no_grad()
    def update(self) -> None:
        """Takes the module's present weights; called after each of its optimizer's steps."""
        self.updates += 1
        kept, live = _local(self._kept), _local(self._live)
        if self.updates <= self._start:
            torch._foreach_copy_(kept, live)
            return
        for dtype in dict.fromkeys(one.dtype for one in kept):  # its fast path wants one of them
            same = [number for number, one in enumerate(kept) if one.dtype == dtype]
            self._mix([kept[n] for n in same], [live[n] for n in same], None)

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Within it the module has the averaged weights; every rank must do this together.

        Not while an iteration computes: after ``session.step`` of the last batch of an epoch, or
        where ``session.epochs(every=…)`` gives control.
        """
        self._settle()
        self._exchange()
        self._applied = True
        try:
            if not self._comms.alone:
                self._comms.spread([self._live[name] for name in self._buffers])
            yield self.module
        finally:
            self._applied = False
            self._exchange()

    @contextmanager
    def suspended(self) -> Iterator[bool]:
        """Within it the module has its own weights; True when it did not have them before."""
        if not self._applied:
            yield False
            return
        self._exchange()
        try:
            yield True
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """In place: whoever holds the parameters holds them afterwards, FSDP and DDP included."""
        self.exchanges += 1
        parallel.put_back(self.module)
        for kept, live in zip(_local(self._kept), _local(self._live), strict=True):
            before = live.clone()
            live.copy_(kept)
            kept.copy_(before)

    def state(self, *, whole: bool = True) -> dict[str, Any]:
        """What a checkpoint keeps; ``whole`` puts shards together, a collective."""
        tensors = self._kept
        if whole:
            tensors = {name: parallel.whole_tensor(one) for name, one in tensors.items()}
        return {"updates": self.updates, "tensors": dict(tensors)}

    @torch.no_grad()
    def load_state(self, state: dict[str, Any] | None) -> None:
        """Takes what :meth:`state` gave; ``None`` begins with the module's present weights."""
        if state is None:
            torch._foreach_copy_(_local(self._kept), _local(self._live))
            self.updates = 0
            return
        self.updates = state["updates"]
        for name, one in self._kept.items():
            parallel.fill_own(one, state["tensors"][name])


def _averaged(module: nn.Module) -> dict[str, Tensor]:
    """Parameters, and buffers that a checkpoint holds, by name; numbers that count are left out."""
    state = parallel.own_state(module)
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: one for name, one in named if name in state and one.is_floating_point()}


def _local(tensors: dict[str, Tensor]) -> list[Tensor]:
    """What this rank holds of them."""
    return [parallel.own_part(one.detach()) for one in tensors.values()]
