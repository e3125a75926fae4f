"""Models as they were when a step was last counted, whatever was done to them since.

A rank that is one step behind takes the models of one that is ahead. That one may have gone on: a
callback or the script may have clipped weights after the step, or moved on a schedule of its own.
Who takes the models does the same afterwards, so it has to get them without that.

Settings of optimizers are noted after each step. Copies of parameters cost memory and time: they
are made when a change was seen between two steps, from then on, and now and then to see one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.train.update import Updater

_FIRST, _EVERY = 3, 100  # steps after which parameters are compared: at first, and now and then

Settings = list[dict[str, Any]]


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

    def note(self) -> None:
        """A step has just been counted."""
        self._notes += 1
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
        if self._changed:
            self._swap()
            self._copies = []

    @contextmanager
    def restored(self) -> Iterator[bool]:
        """Within it models and settings are as noted; False where parameters are not known."""
        changed = self._changed
        if changed and not self._copies:
            yield False
            return
        present = [[{**group} for group in one.optimizer.param_groups] for one in self._updaters]
        _set(self._updaters, self._settings)
        if changed:
            self._swap()
        try:
            yield True
        finally:
            _set(self._updaters, present)
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
