"""Which way a model's gradients are averaged: the one that was asked for."""

from __future__ import annotations

from typing import Any

from paceline.spec.errors import SettingError
from paceline.train.communication import METHODS
from paceline.train.exchange import Exchange

ASKED = (*METHODS,)
"""What ``communication`` may be."""


def check(asked: str, *, sharded: bool = False) -> None:
    """Refuses what cannot be.

    Args:
        asked: As it was given.
        sharded: The model's parameters are spread over the ranks.

    Raises:
        SettingError: Says what there is instead.
    """
    if asked not in ASKED:
        raise SettingError(
            f"--communication {asked}: there is no such way", remedy=f"one of {', '.join(ASKED)}"
        )
    if sharded and asked != "exact":
        raise SettingError(
            f"--communication {asked} does not go with a sharded model",
            found="FSDP exchanges parameters and gradients by itself, as they are",
            remedy="leave out --shard (session.place(…, shard=True)), or --communication exact",
        )


class Communication:
    """How the gradients of one model are averaged.

    Args:
        asked: One of :data:`ASKED`.
        exchange: Of the model's gradients.
    """

    def __init__(self, asked: str, exchange: Exchange) -> None:
        self.asked, self._exchange = asked, exchange
        if asked != "exact":
            self._take(asked)

    def _take(self, name: str) -> None:
        self._exchange.method = METHODS[name](self._exchange.line())

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; a collective. Nothing where averages are exact."""
        method = self._exchange.method
        if self.asked == "exact" or method is None:
            return {}
        return {"method": method.name, "rests": method.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`state` gave; of another method nothing is left to say."""
        method = self._exchange.method
        if method is not None:
            same = state.get("method") == method.name
            method.load_state(state["rests"] if same else {})
