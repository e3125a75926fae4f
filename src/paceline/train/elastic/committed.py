"""Models as they were when a step was last counted, whatever was done to them since.

A rank that is one step behind takes the models of one that is ahead. That one may have gone on: a
callback or the script may have clipped weights after the step, or moved on a schedule of its own.
Who takes the models does the same afterwards, so it has to get them without that.

Settings of optimizers are noted after each step, and buffers. Copies of parameters cost memory and
time: they are made when a change was seen between two steps, from then on, and now and then to see
one.

A batch that does not count may have changed buffers in its forward pass already: running means, the
vectors of a spectral norm, a codebook. They go back to what they were when it began.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.train.update import Updater

_FIRST, _EVERY = 3, 100  # steps after which parameters are compared: at first, and now and then
_LARGE = 1 << 20  # bytes of a buffer of which no copy is kept where nothing writes to it

Settings = list[dict[str, Any]]


class Buffers:
    """What the buffers of modules are at a moment, to which they can go back.

    Only what was written since the last note is copied again. A large buffer that nothing has
    written in the first steps (a table of positions) costs no memory: it stays as it is.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parts = dict.fromkeys(part for module in modules for part in module.modules())
        self._places = [(part, name) for part in parts for name in part._buffers]
        self._notes: dict[int, _Note] = {}  # by number of the place
        self._moments = 0

    @torch.no_grad()
    def note(self) -> None:
        """Buffers will go back to what they are now."""
        self._moments += 1
        written: list[Tensor] = []
        copies: list[Tensor] = []
        for place, (part, name) in enumerate(self._places):
            now, note = part._buffers[name], self._notes.get(place)
            if now is None:
                self._notes.pop(place, None)
            elif note is None or note.is_past(part, now):
                kept = note.copy if note is not None and _alike(note.copy, now) else None
                kept = torch.empty_like(now) if kept is None else kept
                self._notes[place] = _Note(now, now._version, kept)
                written.append(now)
                copies.append(kept)
            elif self._moments > _FIRST and now.nbytes > _LARGE:
                note.copy = None
        if copies:
            torch._foreach_copy_(copies, written)

    @torch.no_grad()
    def back(self) -> None:
        """Buffers are again what they were when last noted."""
        for place, (part, name) in enumerate(self._places):
            now, note = part._buffers[name], self._notes.get(place)
            if note is None:
                part._buffers[name] = None
            elif note.copy is not None and (now is None or note.is_past(part, now)):
                if now is not None and _alike(note.copy, now):
                    now.copy_(note.copy)
                else:
                    now = part._buffers[name] = note.copy.clone()
                self._notes[place] = _Note(now, now._version, note.copy)


@dataclass(slots=True)
class _Note:
    """What a buffer was: the tensor, how often it had been written, and its content."""

    buffer: Tensor
    version: int
    copy: Tensor | None

    def is_past(self, part: nn.Module, now: Tensor) -> bool:
        """Whether the buffer may be another by now. Statistics are written without a trace."""
        return now is not self.buffer or now._version != self.version or isinstance(part, _SILENT)


_SILENT = nn.modules.batchnorm._NormBase  # of batches and of instances


def _alike(kept: Tensor | None, now: Tensor) -> bool:
    return (
        kept is not None
        and kept.shape == now.shape
        and (kept.dtype, kept.device) == (now.dtype, now.device)
    )


class Counted:
    """What some models were after the last step; all methods are called between passes.

    :meth:`note` comes first.

    Args:
        updaters: Of the models.

    Attributes:
        keeps: Something changes parameters between steps, so copies are made.
    """

    def __init__(self, updaters: Iterable[Updater]) -> None:
        self._updaters = [*updaters]
        self.keeps, self._notes = False, 0
        self._versions: list[int] = []
        self._settings: list[Settings] = []
        self._copies: list[Tensor] = []
        self._buffers = Buffers(one.module for one in self._updaters)

    def note(self) -> None:
        """A step has just been counted."""
        self._notes += 1
        self._buffers.note()
        self._versions = self._versions_now()
        self._settings = [_settings(one) for one in self._updaters]
        if self.keeps or self._notes <= _FIRST or self._notes % _EVERY == 0:
            with torch.no_grad():
                self._copies = [one.detach().clone() for one in self._parameters()]
        else:
            self._copies = []

    def look(self) -> None:
        """The next step begins: what came between has been done."""
        if not self.keeps:
            self.keeps = self._changed
            if not self.keeps:
                self._copies = []

    @property
    def _changed(self) -> bool:
        if self._copies:  # a change through ``.data`` leaves no other trace
            pairs = zip(self._parameters(), self._copies, strict=True)
            return any(not torch.equal(one, kept) for one, kept in pairs)
        return self._versions != self._versions_now()

    def go_back(self) -> None:
        """Undoes what was done since the note, for good; right after one of the first notes."""
        _set(self._updaters, self._settings)
        self._buffers.back()
        if self._changed:
            self._swap()
            self._copies = []

    def buffers_back(self) -> None:
        """Undoes what was done to buffers since the note."""
        self._buffers.back()

    @contextmanager
    def restored(self) -> Iterator[bool]:
        """Within it models and settings are as noted; False where parameters are not known."""
        changed = self._changed
        if changed and not self._copies:
            yield False
            return
        present = [[{**group} for group in one.optimizer.param_groups] for one in self._updaters]
        buffers = Buffers(one.module for one in self._updaters)
        buffers.note()
        _set(self._updaters, self._settings)
        self._buffers.back()
        if changed:
            self._swap()
        try:
            yield True
        finally:
            _set(self._updaters, present)
            buffers.back()
            if changed:
                self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for one, kept in zip(self._parameters(), self._copies, strict=True):
            now = one.detach().clone()
            one.copy_(kept)
            kept.copy_(now)

    def _parameters(self) -> Iterator[Tensor]:
        for one in self._updaters:
            yield from one.module.parameters()

    def _versions_now(self) -> list[int]:
        """How often parameters were written, but for the exchanges with averages of them."""
        return [
            parameter._version - (0 if one.average is None else one.average.exchanges)
            for one in self._updaters
            for parameter in one.module.parameters()
        ]


def _settings(updater: Updater) -> Settings:
    groups = updater.optimizer.param_groups
    return [
        {name: _own(one) for name, one in group.items() if name != "params"} for group in groups
    ]


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _set(updaters: Iterable[Updater], settings: Iterable[Settings]) -> None:
    for one, groups in zip(updaters, settings, strict=True):
        for group, noted in zip(one.optimizer.param_groups, groups, strict=True):
            group.update(noted)
