"""Which way a model's gradients are averaged: the one that was asked for."""

from __future__ import annotations

from typing import Any

from paceline.spec import communication
from paceline.train.communication import METHODS
from paceline.train.exchange import Exchange


def check(text: str, *, sharded: bool) -> None:
    """Refuses what cannot be.

    Raises:
        SettingError: There is no such way, or not for a sharded model.
    """
    communication.asked(text)
    if sharded:
        communication.refuse_sharded(text)


class Communication:
    """How the gradients of one model are averaged.

    Args:
        text: What was asked for.
        exchange: Of the model's gradients.
    """

    def __init__(self, text: str, exchange: Exchange) -> None:
        self.asked, self._exchange = communication.asked(text), exchange
        if self.asked.name != "exact":
            self._take(self.asked.name)

    def _take(self, name: str) -> None:
        method = METHODS[name](self._exchange.line())
        if self.asked.number:
            method.number = self.asked.number  # type: ignore[attr-defined]
        self._exchange.method = method

    def begin(self, steps: int) -> None:
        """Says how many steps the training has."""
        begin = getattr(self._exchange.method, "begin", None)
        if begin is not None:
            begin(steps)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; a collective. Nothing where averages are exact."""
        method = self._exchange.method
        if self.asked.name == "exact" or method is None:
            return {}
        return {"method": method.name, "rests": method.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`state` gave; of another method nothing is left to say."""
        method = self._exchange.method
        if method is not None:
            same = state.get("method") == method.name
            method.load_state(state["rests"] if same else {})
