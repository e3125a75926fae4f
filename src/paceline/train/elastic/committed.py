"""Snapshots of models at the last committed step, to which they can be restored.

A rank that is one step behind takes the models of one that is ahead, without what a callback or the
script has changed there since: it does the same afterwards. Settings of optimizers and buffers are
noted after each step. Copies of parameters cost memory and time: they are made from when a change
was first seen between two steps, and now and then to see one. A void batch may have changed buffers
in its forward pass: they are restored to what they were when it began.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.train.update import Updater

_FIRST_STEPS, _INTERVAL = 3, 100  # in which parameters are compared: at first, and now and then
_LARGE_BYTES = 1 << 20  # of a buffer of which no copy is held while nothing writes to it

Settings = list[dict[str, Any]]


class BufferSnapshot:
    """Copy of the buffers of modules at one moment, to which they can be restored.

    Only what was written since the last snapshot is copied again. A large buffer that nothing has
    written in the first steps (a table of positions) costs no memory: it stays as it is.

    Args:
        keeps_all: Keeps a copy of every buffer and restores them all: an aborted broadcast by a
            device may write anything into any of them, and leaves no trace.
    """

    def __init__(self, modules: Iterable[nn.Module], *, keeps_all: bool = False) -> None:
        self._keeps_all = keeps_all
        parts = dict.fromkeys(part for module in modules for part in module.modules())
        self._places = [(part, name) for part in parts for name in part._buffers]
        self._notes: dict[int, _BufferNote] = {}  # by number of the place
        self._num_snapshots = 0

    @torch.no_grad()
    def take(self) -> None:
        """Copies the buffers that were written since the last snapshot."""
        self._num_snapshots += 1
        written: list[Tensor] = []
        copies: list[Tensor] = []
        for place, (part, name) in enumerate(self._places):
            buffer, note = part._buffers[name], self._notes.get(place)
            if buffer is None:
                self._notes.pop(place, None)
            elif note is None or note.may_be_outdated(part, buffer):
                copy = None if note is None else note.copy
                if copy is None or not _has_layout_of(copy, buffer):
                    copy = torch.empty_like(buffer)
                self._notes[place] = _BufferNote(buffer, buffer._version, copy)
                written.append(buffer)
                copies.append(copy)
            elif self._num_snapshots > _FIRST_STEPS and buffer.nbytes > _LARGE_BYTES:
                note.copy = note.copy if self._keeps_all else None
        if copies:
            torch._foreach_copy_(copies, written)

    @torch.no_grad()
    def restore(self) -> None:
        for place, (part, name) in enumerate(self._places):
            buffer, note = part._buffers[name], self._notes.get(place)
            if note is None:
                part._buffers[name] = None
                continue
            copy = note.copy
            is_same = buffer is not None and not note.may_be_outdated(part, buffer)
            if copy is None or (is_same and not self._keeps_all):
                continue
            if buffer is not None and _has_layout_of(copy, buffer):
                buffer.copy_(copy)
            else:
                buffer = part._buffers[name] = copy.clone()
            self._notes[place] = _BufferNote(buffer, buffer._version, copy)


@dataclass(slots=True)
class _BufferNote:
    """One buffer at a snapshot: the tensor, its version counter, and a copy of its content."""

    buffer: Tensor
    version: int
    copy: Tensor | None

    def may_be_outdated(self, part: nn.Module, buffer: Tensor) -> bool:
        """Whether the buffer may have changed. Statistics are written without a trace."""
        if buffer is not self.buffer or buffer._version != self.version:
            return True
        return isinstance(part, nn.modules.batchnorm._NormBase)  # of batches and of instances


def _has_layout_of(copy: Tensor, buffer: Tensor) -> bool:
    is_comparable = (copy.dtype, copy.device) == (buffer.dtype, buffer.device)
    return is_comparable and copy.shape == buffer.shape


class CommittedModels:
    """State of some models after the last step.

    Call :meth:`commit` first, and every method between passes.

    Attributes:
        buffers: Snapshot of their buffers.

    Args:
        keeps_all_buffers: See :class:`BufferSnapshot`.
    """

    def __init__(self, updaters: Iterable[Updater], *, keeps_all_buffers: bool = False) -> None:
        self._updaters = [*updaters]
        self._needs_copies = False  # something changes parameters between steps
        self._num_steps = 0
        self._versions: list[int] = []
        self._settings: list[Settings] = []
        self._copies: list[Tensor] = []
        modules = [updater.module for updater in self._updaters]
        self.buffers = BufferSnapshot(modules, keeps_all=keeps_all_buffers)

    def commit(self) -> None:
        """Takes the models as committed: a step has just been done."""
        self._num_steps += 1
        self.buffers.take()
        self._versions = self._parameter_versions()
        self._settings = [optimizer_settings(updater) for updater in self._updaters]
        is_compared = self._num_steps <= _FIRST_STEPS or self._num_steps % _INTERVAL == 0
        self._copies = []
        if self._needs_copies or is_compared:
            self._copies = [parameter.detach().clone() for parameter in self._parameters()]

    def start_step(self) -> None:
        """Looks, before the next step, whether anything changed parameters since the last one."""
        if not self._needs_copies:
            self._needs_copies = self._has_changed
            if not self._needs_copies:
                self._copies = []

    @property
    def _has_changed(self) -> bool:
        if self._copies:  # a change through ``.data`` leaves no other trace
            pairs = zip(self._parameters(), self._copies, strict=True)
            return any(not torch.equal(parameter, copy) for parameter, copy in pairs)
        return self._versions != self._parameter_versions()

    def restore(self) -> None:
        """Restores the committed models for good; only right after one of the first steps."""
        apply_settings(self._updaters, self._settings)
        self.buffers.restore()
        if self._has_changed:
            self._swap()
            self._copies = []

    @contextmanager
    def restored(self) -> Iterator[bool]:
        """Context in which the models are as committed; yields False if that is not known."""
        has_changed = self._has_changed
        if has_changed and not self._copies:
            yield False
            return
        present = [[{**g} for g in u.optimizer.param_groups] for u in self._updaters]
        buffers = BufferSnapshot(updater.module for updater in self._updaters)
        buffers.take()
        apply_settings(self._updaters, self._settings)
        self.buffers.restore()
        if has_changed:
            self._swap()
        try:
            yield True
        finally:
            apply_settings(self._updaters, present)
            buffers.restore()
            if has_changed:
                self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, copy in zip(self._parameters(), self._copies, strict=True):
            present = parameter.detach().clone()
            parameter.copy_(copy)
            copy.copy_(present)

    def _parameters(self) -> Iterator[Tensor]:
        for updater in self._updaters:
            yield from updater.module.parameters()

    def _parameter_versions(self) -> list[int]:
        """Returns version counters of parameters, without the writes by exchanges with averages."""
        return [
            parameter._version - (0 if updater.average is None else updater.average.exchanges)
            for updater in self._updaters
            for parameter in updater.module.parameters()
        ]


def optimizer_settings(updater: Updater) -> Settings:
    """Returns a copy of the settings in each parameter group, such as the learning rate."""
    return [
        {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in updater.optimizer.param_groups
    ]


def apply_settings(updaters: Iterable[Updater], settings: Iterable[Settings]) -> None:
    """Sets what :func:`optimizer_settings` gave for each of the optimizers."""
    for updater, groups in zip(updaters, settings, strict=True):
        for group, values in zip(updater.optimizer.param_groups, groups, strict=True):
            group.update(values)
