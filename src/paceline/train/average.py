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

WaitForCopies = Callable[[], None]
"""Returns when nothing reads the weights any more."""


class Average:
    """Averages parameters and floating point buffers of a module after each of its updates.

    ``average = decay * average + (1 - decay) * weights``, computed by torch. Every rank computes
    the same; of a sharded module each averages its own shards. Made by ``session.average``.

    Args:
        module: Module that was given to ``session.prepare``.
        comms: Collectives of all ranks.
        decay: From 0 to below 1; 0.999 remembers about the last thousand updates.
        start: Updates after which averaging begins; until then the average is the weights.
        wait_for_copies: Called before weights are exchanged.

    Attributes:
        module: Module whose weights are averaged.
        updates: Updates of the module so far.
        exchanges: How often averages and weights were swapped.

    Raises:
        SettingError: A value is out of range.
    """

    def __init__(
        self,
        module: nn.Module,
        comms: Comms,
        decay: float,
        start: int = 0,
        wait_for_copies: WaitForCopies = lambda: None,
    ) -> None:
        if not 0 <= decay < 1 or start < 0:
            raise SettingError(
                f"an average of weights with decay {decay} and start {start} cannot be",
                found="the decay lies between 0 and 1, the start is a number of updates",
                remedy="decay=0.999, start=0",
            )
        self.module, self.updates = module, 0
        self._comms, self._start, self._wait_for_copies = comms, start, wait_for_copies
        self._mix = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        parallel.reshard(module)
        self._live = _averaged(module)
        self._averages = {name: tensor.detach().clone() for name, tensor in self._live.items()}
        self._buffers = [name for name, _ in module.named_buffers() if name in self._live]
        self._applied = False
        self.exchanges = 0

    @torch.no_grad()
    def update(self) -> None:
        """Adds the module's current weights; called after each of its optimizer's steps."""
        self.updates += 1
        averages, live = _local(self._averages), _local(self._live)
        if self.updates <= self._start:
            torch._foreach_copy_(averages, live)
            return
        # torch's fast path needs tensors of one dtype
        for dtype in dict.fromkeys(average.dtype for average in averages):
            indexes = [number for number, average in enumerate(averages) if average.dtype == dtype]
            self._mix([averages[n] for n in indexes], [live[n] for n in indexes], None)

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Context in which the module has the averaged weights; enter it on every rank.

        Enter it between iterations only: after ``session.step`` of the last batch of an epoch, or
        when ``session.epochs(every=…)`` yields.
        """
        self._wait_for_copies()
        self._exchange()
        self._applied = True
        try:
            if not self._comms.is_alone:
                self._comms.broadcast([self._live[name] for name in self._buffers])
            yield self.module
        finally:
            self._applied = False
            self._exchange()

    @contextmanager
    def suspended(self) -> Iterator[bool]:
        """Context with the module's own weights; yields whether it had averaged ones."""
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
        """Swaps averages and weights in place, so that FSDP and DDP keep their references."""
        self.exchanges += 1
        parallel.reshard(self.module)
        for average, live in zip(_local(self._averages), _local(self._live), strict=True):
            former = live.clone()
            live.copy_(average)
            average.copy_(former)

    def state(self, *, assemble: bool = True) -> dict[str, Any]:
        """Returns the state for a checkpoint; ``assemble`` gathers shards, a collective."""
        tensors = self._averages
        if assemble:
            tensors = {name: parallel.full_tensor(tensor) for name, tensor in tensors.items()}
        return {"updates": self.updates, "tensors": dict(tensors)}

    @torch.no_grad()
    def load_state(self, state: dict[str, Any] | None) -> None:
        """Loads a state of :meth:`state`; ``None`` starts with the current weights."""
        if state is None:
            torch._foreach_copy_(_local(self._averages), _local(self._live))
            self.updates = 0
            return
        self.updates = state["updates"]
        for name, average in self._averages.items():
            parallel.fill_local(average, state["tensors"][name])


def _averaged(module: nn.Module) -> dict[str, Tensor]:
    """Returns floating point parameters and persistent buffers, by name."""
    state = parallel.local_state(module)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {
        name: tensor for name, tensor in tensors if name in state and tensor.is_floating_point()
    }


def _local(tensors: dict[str, Tensor]) -> list[Tensor]:
    """Returns this rank's parts of the tensors, without gradients."""
    return [parallel.local_tensor(tensor.detach()) for tensor in tensors.values()]
