"""A session's training, as a recovery uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from paceline.spec.formatting import pluralize
from paceline.train.checkpoints.capture import Training
from paceline.train.checkpoints.controller import CheckpointController
from paceline.train.checkpoints.handover import send_models, send_training
from paceline.train.comms import Comms
from paceline.train.elastic.membership import Membership
from paceline.train.loop import TrainingLoop
from paceline.train.member import Member


@dataclass(eq=False)
class SessionState:
    """This rank's training, as :class:`paceline.train.elastic.recovery.Recovery` uses it."""

    _member: Member
    _training: Training
    _membership: Membership
    _checkpoints: CheckpointController
    _loop: TrainingLoop

    @property
    def step(self) -> int:
        return self._training.progress.step

    def event(self, name: str, **details: Any) -> None:
        self._member.event(name, **details)

    def send_models(self, comms: Comms, source: int, receivers: Sequence[int]) -> None:
        """Gives the models of one rank to others; a collective of all ranks."""
        send_models(self._training.models, comms, source, receivers)

    def send_training(self, comms: Comms, source: int, receivers: Sequence[int]) -> None:
        """Gives the whole training of one rank to newcomers; a collective of all ranks."""
        is_new = comms.world.rank in receivers
        send_training(self._training, comms, source, receivers, is_new=is_new)

    def renew(self) -> None:
        """Rebuilds what depends on the number of ranks; a collective that may be repeated."""
        recovery, models = self._membership.recovery, self._training.models
        assert recovery is not None
        self._membership.publish_start()
        lost_steps = models.max_unsynced_steps if recovery.has_lost_ranks else 0
        models.renew()
        self._membership.meet_newcomers()
        self._loop.renew()
        if self._training.checksum is not None:
            self._training.checksum.align()
        self._checkpoints.renew(recovery)
        self._member.follow()
        if lost_steps:
            self._member.say(
                "communication: what a lost rank had learnt since all last met is lost with it,"
                f" {pluralize(lost_steps, 'step')} at most"
            )

    def save_and_exit(self) -> NoReturn:
        """Saves this rank's state and ends it: the other ranks and the launcher are gone."""
        self._checkpoints.save_and_exit()
