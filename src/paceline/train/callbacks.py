"""What a script has done at certain moments of its training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from paceline.spec.errors import JobError, PacelineError

if TYPE_CHECKING:
    from paceline.train.session import Session


class Callback:
    """Its methods are called at their moments; override those that you need.

    Every rank calls the same methods with the same values in the same order, so that they may
    communicate (``session.comms``). What one raises ends its rank, and so the job. Given to
    ``session.add``. A callback with a state that belongs into checkpoints is also one of the
    ``extras`` of ``session.checkpoints``.
    """

    def after_step(self, session: Session, step: int) -> None:
        """After the optimizers have stepped, before a checkpoint of this step.

        Parameters may be changed here, in the same way on every rank.
        """

    def epoch_ended(self, session: Session, epoch: int) -> None:
        """After all of an epoch and what the script does at its end, before its checkpoint.

        Not where ``session.epochs(every=…)`` gives control in mid-epoch.
        """

    def evaluated(self, session: Session, split: str, values: Mapping[str, Any]) -> None:
        """When the script has recorded figures with ``session.log``."""

    def checkpoint_saved(self, session: Session, step: int) -> None:
        """When a checkpoint is on the disk, up to a second later; or at the end of the session."""


class Callbacks:
    """Those of a session, in the order in which they were added.

    Args:
        session: Passed on.
        own_work: Gives what they are called within: their time is the script's, not the session's.
    """

    def __init__(
        self,
        session: Session,
        own_work: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._session, self._own_work = session, own_work
        self._every: list[Callback] = []

    def add(self, one: Callback) -> None:
        """Calls it from now on."""
        self._every.append(one)

    def __bool__(self) -> bool:
        return bool(self._every)

    def after_step(self, step: int) -> None:
        """See :class:`Callback`."""
        self._call("after_step", lambda one: one.after_step(self._session, step))

    def epoch_ended(self, epoch: int) -> None:
        """See :class:`Callback`."""
        self._call("epoch_ended", lambda one: one.epoch_ended(self._session, epoch))

    def evaluated(self, split: str, values: Mapping[str, Any]) -> None:
        """See :class:`Callback`."""
        self._call("evaluated", lambda one: one.evaluated(self._session, split, values))

    def checkpoint_saved(self, step: int) -> None:
        """See :class:`Callback`."""
        self._call("checkpoint_saved", lambda one: one.checkpoint_saved(self._session, step))

    def _call(self, moment: str, act: Callable[[Callback], None]) -> None:
        for one in self._every:
            try:
                with self._own_work():
                    act(one)
            except PacelineError:
                raise
            except Exception as error:
                raise JobError(
                    f"the callback {type(one).__name__}.{moment} failed"
                    f" after step {self._session.progress.step}",
                    found=f"{type(error).__name__}: {error}",
                    remedy="mend it, or leave it out; the newest checkpoint can be resumed",
                ) from error
