"""The checkpoints of a session, or the moments at which ranks agree when it makes none."""

from __future__ import annotations

from typing import NoReturn

from paceline.spec import rundir
from paceline.train.callbacks import Callbacks
from paceline.train.checkpoints.capture import Training
from paceline.train.checkpoints.keeper import Keeper, policy
from paceline.train.checkpoints.store import Store
from paceline.train.elastic.membership import Membership
from paceline.train.journal import Journal
from paceline.train.member import Member
from paceline.train.metrics import Best
from paceline.train.stop import Door, Poll


class CheckpointController:
    """Passes the moments of a training on to its keeper; without one it polls the other ranks.

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
        self.keeper: Keeper | None = None
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
        self.keeper = keeper = Keeper(
            self._training,
            member.comms,
            Store(member.folder / rundir.CHECKPOINTS),
            policy(every),
            keep,
            self._journal.tell,
            stop_when_full=stop_when_full,
            callbacks=self._callbacks,
            copies=copies,
            door=membership.recovery,
            asked_for=lambda: 0 if control is None else control.save_asked,
        )
        if control is not None:
            member.event("keeps checkpoints", keep=keep)
        if member.comms.joining:  # what the others have will come from them
            keeper.join()
            self._journal.begin(0)
            membership.mark("checkpoints")
            return True
        member.phase("load a checkpoint")
        with membership.without_newcomers():
            loaded = keeper.open(resume)
        membership.mark("checkpoints")
        self._journal.begin(-1 if loaded is None else loaded.step)
        if loaded is None:
            return False
        if loaded.own:
            self._journal.say_again()
        self._membership.verify()
        member.say(f"resumed after step {loaded.step} from {loaded.source}")
        member.event("resumed", step=loaded.step, source=loaded.source)
        return True

    @property
    def blocked_s(self) -> float:
        """Seconds for which checkpoints have held this rank up."""
        return 0.0 if self.keeper is None else self.keeper.seconds

    def poll(self, door: Door) -> None:
        """Has ranks agree on who may join, in a training that makes no checkpoints."""
        if self.keeper is None and self._poll is None:
            self._poll = Poll(self._member.comms, door)

    def renew(self, door: Door) -> None:
        """Begins anew in a new group of ranks; a collective."""
        if self.keeper is not None:
            self.keeper.renew()
        if self._poll is not None:
            self._poll = Poll(self._member.comms, door)

    def after_step(self, *, before_pause: bool) -> None:
        """Saves, stops, or polls when it is time; called after each global step."""
        if self.keeper is not None:
            self.keeper.after_step(before_pause=before_pause)
        elif self._poll is not None and self._poll.due():
            self._poll.ask()

    def after_evaluation(self, *, epoch_ended: bool) -> None:
        """Saves what is due when the script has evaluated."""
        if self.keeper is None:
            return
        progress = self._training.progress
        is_best = self._best is not None and self._best.step == progress.step
        self.keeper.after_evaluation(is_best, epoch_ended or progress.finished)
        if not progress.finished:
            self.keeper.look_up(at_once=True)
        self.keeper.settle()

    def during_evaluation(self) -> None:
        """Shows that this rank lives, and saves or stops when it is asked to."""
        self._member.phase("evaluate")
        if self.keeper is not None:
            self.keeper.look_up()

    def settle(self) -> None:
        """Returns when no checkpoint reads the weights any more."""
        if self.keeper is not None:
            self.keeper.settle()

    def save_and_exit(self) -> NoReturn:
        """Saves what this rank has, and ends it: the launcher and other ranks are lost."""
        if self.keeper is None:
            raise RuntimeError("the launcher is gone, and other ranks with it")
        self.keeper.leave_alone()

    def joined(self) -> None:
        """This process has got the training of the ranks that it joins."""
        if self.keeper is not None:
            self.keeper.joined()

    def close(self, *, failed: bool) -> None:
        """Waits for what is being written; after a failure without the other ranks."""
        if self.keeper is not None:
            self.keeper.close(failed=failed)
