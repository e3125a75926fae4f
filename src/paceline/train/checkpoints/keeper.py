"""A run's checkpoints: made when they are due, found again at the start."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from paceline.spec import jobenv
from paceline.spec.errors import JobError
from paceline.train import wrapping
from paceline.train.checkpoints import randomness
from paceline.train.checkpoints.exchange import Loaded, load
from paceline.train.checkpoints.lock import Lock
from paceline.train.checkpoints.parts import Part, folder_of_all
from paceline.train.checkpoints.policy import Policy
from paceline.train.checkpoints.shelf import Shelf
from paceline.train.checkpoints.state import Training, capture, check_identity, restore
from paceline.train.checkpoints.writer import Outcome, Snapshot, Writer
from paceline.train.comms import Comms
from paceline.train.pulse import Beat, Pulse
from paceline.train.signals import Notice


class Stopped(JobError):
    """The training was asked to stop, and its state is saved; raised on every rank."""

    exit_code = 143  # as a process that SIGTERM ended


class Quietly(SystemExit):
    """The same where no launcher of ours shows what a rank raises: one rank has said why."""


class Keeper:
    """Makes checkpoints of a training; every rank has one and calls it in the same order.

    Args:
        training: What to keep.
        comms: Of all ranks; rank 0 writes.
        shelf: Where to.
        policy: When.
        keep: How many stay; 0 keeps all.
        tell: Called on rank 0 with an event's name and its details.
        before_save: Called on every rank before a state is taken.
        stop_when_full: Ends the training cleanly when a checkpoint could not be written.
    """

    def __init__(
        self,
        training: Training,
        comms: Comms,
        shelf: Shelf,
        policy: Policy,
        keep: int,
        tell: Callable[..., None],
        before_save: Callable[[], None],
        *,
        stop_when_full: bool = False,
    ) -> None:
        self._training, self._comms, self._shelf = training, comms, shelf
        self._policy, self._tell, self._stop_when_full = policy, tell, stop_when_full
        self._before_save = before_save
        self._writer = Writer(shelf, keep)
        self._lock = Lock(shelf.root, os.environ.get(jobenv.RUN_ID, ""))
        self._notice, self._pulse = Notice(), Pulse(comms)
        self._saved_at, self._saved_step = time.monotonic(), -1
        self._full, self._good_step = "", 0
        self._in_parts = False
        training.updater.before_step = self._writer.staging.wait

    # -- the start -----------------------------------------------------------------------

    def open(self, want: str) -> Loaded | None:
        """Takes the folder, resumes from the wanted checkpoint, and listens for signals.

        Raises:
            SettingError: Another job writes there, or the run was another one.
            DataError: The wanted checkpoint is not there or not intact.
        """
        self._comms.together(self._lock.take if self._comms.world.rank == 0 else _nothing)
        try:
            sharded = wrapping.is_sharded(self._training.updater.module)
            self._in_parts = sharded and folder_of_all(self._comms, self._shelf.root)
            loaded = load(self._comms, want, self._shelf, self._warn, sharded=sharded)
            if loaded is None:
                self._set_aside()
            else:
                self._comms.together(lambda: check_identity(loaded, self._training.identity))
                restore(loaded, self._training, self._comms)
                self._saved_step = self._good_step = loaded.step
        except BaseException:
            self._lock.release()
            raise
        self._notice.open()
        return loaded

    def _warn(self, text: str) -> None:
        self._tell("checkpoint skipped", warning=text)

    def _set_aside(self) -> None:
        """A new beginning in an old folder leaves the old checkpoints, under another name."""
        if self._comms.world.rank == 0 and self._shelf.found()[0]:
            stamp = time.strftime("%Y%m%d-%H%M%S")
            aside = self._shelf.root.with_name(f"{self._shelf.root.name}-before-{stamp}")
            self._shelf.root.rename(aside)
            self._lock.release()
            self._lock.take()

    # -- on the way ----------------------------------------------------------------------

    def after_step(self) -> None:
        """To be called after every global step; saves and stops when it is time.

        Raises:
            Stopped: After the state was saved.
        """
        if self._policy.due_by_step(self._training.progress.step):
            self.save()
        self.look_up()

    def look_up(self) -> None:
        """To be called also in evaluation, as often on every rank."""
        if self._pulse.tick():
            self._obey(self._pulse.beat(stop=self._wants_stop(), save=self._wants_save()))

    def after_evaluation(self, best: bool, epoch_ended: bool) -> None:
        """To be called after each epoch and its evaluation, and after one in mid-epoch."""
        if best or (epoch_ended and self._policy.epochs):
            self.save(best=best)

    def settle(self) -> None:
        """Returns when the script may change the model: no copy of it is under way."""
        self._writer.staging.wait()

    def _wants_stop(self) -> bool:
        return bool(self._notice.stop or (self._full and self._stop_when_full))

    def _wants_save(self) -> bool:
        """By the clock of rank 0, which also gives its sign of life here."""
        self.report()
        self._lock.refresh()
        late = self._policy.due_by_time(time.monotonic() - self._saved_at)
        return self._notice.save or (self._comms.world.rank == 0 and late)

    def _obey(self, beat: Beat) -> None:
        if beat.save or beat.stop:
            self._notice.save = False
            self.save()
        if beat.stop:
            self._stop()

    def _stop(self) -> None:
        self._writer.wait()
        self.report()
        reasons = self._comms.texts(self._notice.stop or self._full)
        asked = next((rank for rank, text in enumerate(reasons) if text), None)
        why = "request" if asked is None else reasons[asked]
        step, home = self._training.progress.step, os.environ.get(jobenv.HOME_DIR)
        if self._comms.world.rank == 0:
            self._tell("stopped", step=step, why=why)
        where = home or str(self._shelf.root.parent)
        again = f"{jobenv.RUN_DIR}={shlex.quote(where)} before the same command resumes it"
        stopped = Stopped(
            f"stopped on {why} after step {step}",
            found=f"checkpoint of step {self._saved_step} in {where}",
            remedy="" if home else again,  # the launcher tells its own command, once
        )
        stopped.origin_rank = asked or 0
        if jobenv.EVENT_FD not in os.environ:  # nobody sorts what ranks say: one is enough
            if self._comms.world.rank == stopped.origin_rank:
                print(stopped.render(), file=sys.stderr, flush=True)
            raise Quietly(Stopped.exit_code)
        raise stopped

    def save(self, best: bool = False) -> None:
        """Makes a checkpoint of the present state; the training pays for the copy only."""
        if self._training.progress.step == self._saved_step and not best:
            return
        self._saved_step, self._saved_at = self._training.progress.step, time.monotonic()
        self._before_save()
        generators = self._comms.rows(randomness.capture(self._comms.device))
        snapshot = capture(self._training, self._comms, generators, best, self._in_parts)
        if self._in_parts:
            self._begin_part(snapshot)
        elif self._comms.world.rank == 0:
            self._writer.begin(snapshot)

    def _begin_part(self, snapshot: Snapshot) -> None:
        """Every rank begins to write into the folder that rank 0 has made."""
        self._writer.wait()
        mine = torch.tensor([float(snapshot.bytes)], dtype=torch.float64)
        needed = int(self._comms.rows(mine).sum())
        folder = self._comms.texts(self._prepared(snapshot.step, needed))[0]
        if folder:
            world = self._comms.world
            self._writer.begin(replace(snapshot, part=Part(Path(folder), world.rank, world.size)))

    def _prepared(self, step: int, needed: int) -> str:
        """Rank 0's folder for a checkpoint; empty when there can be none."""
        if self._comms.world.rank:
            return ""
        try:
            return str(self._writer.prepare(step, needed).resolve())
        except OSError as error:
            self._writer.outcomes.put(Outcome(step, 0.0, needed, str(error)))
            return ""

    def report(self) -> None:
        """Tells how the saves since the last time ended."""
        while not self._writer.outcomes.empty():
            self._told(self._writer.outcomes.get())

    def _told(self, outcome: Outcome) -> None:
        if outcome.problem:
            known, self._full = self._full, outcome.problem
            good = f"the last good one is of step {self._good_step}" if self._good_step else (
                "there is none yet")  # fmt: skip
            text = f"{outcome.problem}: the training continues without checkpoints, {good}"
            # shown once, until one can be made again
            about = {"problem": outcome.problem} if known else {"warning": text}
            self._tell("checkpoint failed", step=outcome.step, **about)
        else:
            self._full, self._good_step = "", outcome.step
            megabytes = round(outcome.bytes / 1e6, 3)
            seconds = round(outcome.seconds, 3)
            self._tell("checkpoint", step=outcome.step, megabytes=megabytes, seconds=seconds)

    # -- the end -------------------------------------------------------------------------

    def close(self, *, failed: bool = False) -> None:
        """Waits for what is being written and lets the folder go.

        Args:
            failed: Other ranks may be gone; nothing is expected of them any more.
        """
        if failed:
            self._writer.give_up()
        self._writer.wait()
        self.report()
        self._notice.close()
        self._lock.release()


def _nothing() -> None:
    pass
