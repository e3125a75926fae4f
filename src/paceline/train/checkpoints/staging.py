"""Copying a state off the training's back.

Parameters and optimizer states change only when the optimizer steps. So a thread copies them
while the next forward and backward passes run, and the next optimizer step waits for the copy
if it has to. Everything else may change as soon as the script goes on (batch statistics in the
forward pass, a moving average whenever it likes) and is copied at once. On an accelerator the
copies are queued on its stream, before everything that comes later.

A script that changes parameters between its steps is found out by torch's version counters: the
copy that it spoiled is given up, and from then on all copies are made at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Files = dict[str, dict[str, Tensor]]
"""Tensors by file name and by their name in the file."""


class Torn(Exception):
    """The state changed while it was copied."""


class Staging:
    """Host memory for one copy of the state, used again for every checkpoint."""

    def __init__(self) -> None:
        self._cautious = False
        self._kept: dict[tuple[str, str], Tensor] = {}
        self._copied = threading.Event()
        self._copied.set()

    def wait(self) -> None:
        """Returns when the last copy is complete and the originals may change."""
        self._copied.wait()

    def begin(self, live: Files, later: frozenset[str]) -> Callable[[], Files]:
        """Begins a copy; what is returned ends it, in whichever thread calls it.

        Args:
            live: The state.
            later: Names, in any file, of tensors that do not change before :meth:`wait` returns.
                All others are copied before this method returns.

        Raises:
            Torn: By what is returned: one of these changed all the same.
        """
        late = frozenset[str]() if self._cautious else later
        early = {
            (file, name): self._copy(file, name, tensor)
            for file, tensors in live.items()
            for name, tensor in tensors.items()
            if name not in late or tensor.device.type != "cpu"
        }
        watched = {
            name: (tensor, _version(tensor))
            for file, tensors in live.items()
            for name, tensor in tensors.items()
            if (file, name) not in early
        }
        marks = _marks(live)
        self._copied.clear()

        def finish() -> Files:
            try:
                for mark in marks:
                    mark.synchronize()
                copied = {file: self._rest(file, tensors, early) for file, tensors in live.items()}
                self._check(watched)
                return copied
            finally:
                self._copied.set()

        return finish

    def _check(self, watched: Mapping[str, tuple[Tensor, int]]) -> None:
        changed = [name for name, (one, version) in watched.items() if _version(one) != version]
        if changed:
            self._cautious = True
            raise Torn(
                f"{changed[0]} changed outside session.step while it was copied;"
                " the next checkpoints are copied at once"
            )

    def _rest(
        self, file: str, tensors: Mapping[str, Tensor], early: Mapping[tuple[str, str], Tensor]
    ) -> dict[str, Tensor]:
        return {
            name: early[file, name] if (file, name) in early else self._copy(file, name, tensor)
            for name, tensor in tensors.items()
        }

    @torch.no_grad()
    def _copy(self, file: str, name: str, tensor: Tensor) -> Tensor:
        key = (file, name)
        kept = self._kept.get(key)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            pinned = tensor.device.type != "cpu"
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._kept[key] = kept
        kept.copy_(tensor, non_blocking=True)
        return kept


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _marks(live: Files) -> list[torch.Event]:
    """Events after which the accelerators' copies are complete."""
    devices = {
        tensor.device
        for tensors in live.values()
        for tensor in tensors.values()
        if tensor.device.type != "cpu"
    }
    marks = []
    for device in devices:
        mark = torch.Event(device.type)
        mark.record()
        marks.append(mark)
    return marks
