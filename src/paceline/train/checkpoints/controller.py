"""Connects a session to its checkpoint manager; without one, polls the other ranks."""

from __future__ import annotations

from typing import NoReturn

from paceline.spec import rundir
from paceline.train.callbacks import Callbacks
from paceline.train.checkpoints.capture import Training
from paceline.train.checkpoints.keeper import CheckpointManager, parse_policy
from paceline.train.checkpoints.store import Store
from paceline.train.elastic.membership import Membership
from paceline.train.elastic.recovery import Recovery
from paceline.train.elastic.stop import Poll
from paceline.train.journal import Journal
from paceline.train.member import Member
from paceline.train.metrics import Best


class CheckpointController:
    """Passes events of a training to its checkpoint manager; without one it polls the other ranks.

    Attributes:
        keeper: Makes checkpoints; ``None`` until :meth:`open`.
    """

    def __init__(
        self,
        member: Member,
        journal: Journal,
        training: Training,
        membership: Membership,
        callbacks: Callbacks,
    ) -> None:
        self._member, self._journal, self._training = member, journal, training
        self._membership, self._callbacks = membership, callbacks
        self.keeper: CheckpointManager | None = None
        self._best: Best | None = None
        self._poll: Poll | None = None

    def open(
        self,
        every: str,
        keep: int,
        resume: str,
        best: Best | None,
        stop_when_full: bool,
        copies: int | None,
    ) -> bool:
        """See :meth:`Session.checkpoints`."""
        member, membership, control = self._member, self._membership, self._membership.control
        self._best = best
        self.keeper = keeper = CheckpointManager(
            self._training,
            member.comms,
            Store(member.folder / rundir.CHECKPOINTS),
            parse_policy(every),
            keep,
            self._journal.report,
            stop_when_full=stop_when_full,
            callbacks=self._callbacks,
            copies=copies,
            membership=membership.recovery,
            save_request=lambda: 0 if control is None else control.save_asked,
        )
        if control is not None:
            member.event("keeps checkpoints", keep=keep)
        if member.comms.joining:  # what the others have will come from them
            keeper.join()
            self._journal.start(0)
            membership.mark("checkpoints")
            return True
        member.phase("load a checkpoint")
        with membership.without_newcomers():
            loaded = keeper.open(resume)
        membership.mark("checkpoints")
        self._journal.start(-1 if loaded is None else loaded.step)
        if loaded is None:
            return False
        if loaded.is_own:
            self._journal.resend_records()
        self._membership.verify()
        member.say(f"resumed after step {loaded.step} from {loaded.source}")
        for change in self._training.models.changed_settings:
            member.say(change)
        member.event("resumed", step=loaded.step, source=loaded.source)
        return True

    @property
    def blocked_s(self) -> float:
        """Seconds for which checkpoints have held this rank up."""
        return 0.0 if self.keeper is None else self.keeper.blocked_s

    def poll(self, gate: Recovery) -> None:
        """Starts polling for newcomers in a training that makes no checkpoints."""
        if self.keeper is None and self._poll is None:
            self._poll = Poll(self._member.comms, gate)

    def renew(self, gate: Recovery) -> None:
        """Continues in a new group of ranks, as ``keeper`` or the poll does; a collective."""
        if self.keeper is not None:
            self.keeper.renew()
        if self._poll is not None:
            self._poll = Poll(self._member.comms, gate)

    def after_step(self, *, before_pause: bool) -> None:
        """Saves, stops, or polls when it is time; called after each global step."""
        if self.keeper is not None:
            self.keeper.on_step_end(at_pause=before_pause)
        elif self._poll is not None and self._poll.is_due():
            self._poll.exchange()

    def after_evaluation(self, *, epoch_ended: bool) -> None:
        """Saves the checkpoints that are due after an evaluation."""
        if self.keeper is None:
            return
        progress = self._training.progress
        is_best = self._best is not None and self._best.step == progress.step
        self.keeper.on_evaluation_end(is_best, epoch_ended or progress.finished)
        if not progress.finished:
            self.keeper.poll(force=True)
        self.keeper.wait_for_copy()

    def during_evaluation(self) -> None:
        """Reports that this rank is alive, and saves or stops when asked to."""
        self._member.phase("evaluate")
        if self.keeper is not None:
            self.keeper.poll()

    def settle(self) -> None:
        """Waits until no checkpoint reads the weights any more."""
        if self.keeper is not None:
            self.keeper.wait_for_copy()

    def save_and_exit(self) -> NoReturn:
        """Saves this rank's state and ends it: the launcher and the other ranks are lost."""
        if self.keeper is None:
            raise RuntimeError("the launcher is gone, and other ranks with it")
        self.keeper.save_and_exit_alone()

    def joined(self) -> None:
        """Called when this newcomer has received the training of the other ranks."""
        if self.keeper is not None:
            self.keeper.on_state_received()

    def close(self, *, failed: bool) -> None:
        """Waits for checkpoints that are being written; after a failure without the other ranks."""
        if self.keeper is not None:
            self.keeper.close(failed=failed)
