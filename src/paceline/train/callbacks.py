"""Callbacks of a script: methods that a session calls at certain events of the training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from paceline.spec.errors import JobError, PacelineError

if TYPE_CHECKING:
    from paceline.train.session import Session


class Callback:
    """Base class of callbacks, which are added with ``session.add``; override what you need.

    Every rank calls the same methods with the same values in the same order, so that they may
    communicate (``session.comms``). An exception ends the rank, and so the job. If a callback has
    state that belongs into checkpoints, pass it to ``session.checkpoints`` in ``extras``, too.
    """

    def after_step(self, session: Session, step: int) -> None:
        """Called after the optimizers have stepped, before a checkpoint of this step.

        It may change parameters, in the same way on every rank.
        """

    def epoch_ended(self, session: Session, epoch: int) -> None:
        """Called when the script has done an epoch and its evaluation, before its checkpoint.

        It is not called when ``session.epochs(every=…)`` yields within an epoch.
        """

    def evaluated(self, session: Session, split: str, values: Mapping[str, Any]) -> None:
        """Called when the script has recorded values with ``session.log``."""

    def checkpoint_saved(self, session: Session, step: int) -> None:
        """Called up to a second after a checkpoint is on the disk, or at the session's end."""


class Callbacks:
    """The callbacks of a session, called in the order in which they were added.

    Args:
        session: Session that the callbacks are given.
        script_work: Returns a context for each call, which counts its time as the script's.
    """

    def __init__(
        self,
        session: Session,
        script_work: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._session, self._script_work = session, script_work
        self._callbacks: list[Callback] = []

    def add(self, callback: Callback) -> None:
        """Adds a callback."""
        self._callbacks.append(callback)

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def after_step(self, step: int) -> None:
        """See :class:`Callback`."""
        self._call("after_step", lambda callback: callback.after_step(self._session, step))

    def epoch_ended(self, epoch: int) -> None:
        """See :class:`Callback`."""
        self._call("epoch_ended", lambda callback: callback.epoch_ended(self._session, epoch))

    def evaluated(self, split: str, values: Mapping[str, Any]) -> None:
        """See :class:`Callback`."""
        self._call("evaluated", lambda callback: callback.evaluated(self._session, split, values))

    def checkpoint_saved(self, step: int) -> None:
        """See :class:`Callback`."""
        self._call(
            "checkpoint_saved", lambda callback: callback.checkpoint_saved(self._session, step)
        )

    def _call(self, moment: str, act: Callable[[Callback], None]) -> None:
        for callback in self._callbacks:
            try:
                with self._script_work():
                    act(callback)
            except PacelineError:
                raise
            except Exception as error:
                raise JobError(
                    f"the callback {type(callback).__name__}.{moment} failed"
                    f" after step {self._session.progress.step}",
                    found=f"{type(error).__name__}: {error}",
                    remedy="fix it, or leave it out; the newest checkpoint can be resumed",
                ) from error
