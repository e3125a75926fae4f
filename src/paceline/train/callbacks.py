"""Callbacks of a script: methods that a session calls at certain events of the training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from paceline.spec.errors import JobError, PacelineError

Session = Any  # paceline.train.Session, whose module imports this one


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


@dataclass(eq=False)
class Callbacks:
    """The callbacks of a session, called in the order in which they were added."""

    _session: Session
    _script_work: Callable[[], AbstractContextManager[None]]  # counts its time as the script's
    _callbacks: list[Callback] = field(default_factory=list)

    def add(self, callback: Callback) -> None:
        self._callbacks.append(callback)

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def call(self, moment: Callable[..., None], *values: Any) -> None:
        """Calls this method of :class:`Callback` of each callback.

        Args:
            moment: The base class's method, such as ``Callback.after_step``.
            values: Its arguments after the session.

        Raises:
            JobError: A callback failed.
        """
        name = moment.__name__
        for callback in self._callbacks:
            try:
                with self._script_work():
                    getattr(callback, name)(self._session, *values)
            except PacelineError:
                raise
            except Exception as error:
                raise JobError(
                    f"the callback {type(callback).__name__}.{name} failed"
                    f" after step {self._session.progress.step}",
                    found=f"{type(error).__name__}: {error}",
                    remedy="fix it, or leave it out; the newest checkpoint can be resumed",
                ) from error
