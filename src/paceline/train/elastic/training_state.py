"""What a recovery sees of the training whose ranks it keeps together."""

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


class NoTraining:
    """A process that is in a group of ranks and does not train yet."""

    step = 0

    def event(self, name: str, **details: Any) -> None:
        """Reports nothing."""

    def send_models(self, comms: Comms, source: int, receivers: Sequence[int]) -> None:
        raise RuntimeError("there are no models to be sent")

    send_training = send_models

    def renew(self) -> None:
        """Has nothing to rebuild."""

    def save_and_exit(self) -> NoReturn:
        raise RuntimeError("the launcher is gone, and other ranks with it")
