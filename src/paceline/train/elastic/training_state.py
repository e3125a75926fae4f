"""The interface through which a recovery uses the training of its rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from paceline.train.comms import Comms


class TrainingState(Protocol):
    """This rank's training, as :class:`paceline.train.elastic.recovery.Recovery` uses it."""

    @property
    def step(self) -> int:
        """Global steps done."""

    def event(self, name: str, **details: Any) -> None:
        """Reports an event to the launcher."""

    def send_models(self, comms: Comms, source: int, receivers: Sequence[int]) -> None:
        """Gives the models of one rank to others; a collective of all ranks."""

    def send_training(self, comms: Comms, source: int, receivers: Sequence[int]) -> None:
        """Gives the whole training of one rank to newcomers; a collective of all ranks."""

    def renew(self) -> None:
        """Rebuilds what depends on the number of ranks; a collective that may be repeated."""

    def save_and_exit(self) -> NoReturn:
        """Saves this rank's state and ends it: the other ranks and the launcher are gone."""
