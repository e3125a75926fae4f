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
        script_work: Context manager around each call, which counts its time as the script's.
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
                    remedy="mend it, or leave it out; the newest checkpoint can be resumed",
                ) from error
