"""A run's checkpoints: saved when they are due or asked for, resumed from at the start."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from paceline.spec import jobenv, rundir
from paceline.spec.errors import SettingError
from paceline.spec.schema import MAX_LONG_TEXT, integer, optional, text, tuple_of
from paceline.train import parallel
from paceline.train.callbacks import Callbacks
from paceline.train.checkpoints.capture import Snapshot, Training, capture
from paceline.train.checkpoints.copies import Copied, Copies, asked, figures
from paceline.train.checkpoints.resume import Loaded, check_identity, load, restore
from paceline.train.checkpoints.store import Fenced, Lock, Store
from paceline.train.checkpoints.writer import Outcome, Part, Writer
from paceline.train.comms import Comms, checked
from paceline.train.data.disks import folder_of_all, who_sees
from paceline.train.stop import Door, Notice, Poll, Quietly, Stopped

_KNOWN = tuple_of(
    optional(integer()), text(MAX_LONG_TEXT)
)  # the newest step that is saved; what went wrong
HURRY_SECONDS = 3.0  # for a copy, when the training was asked to stop


@dataclass(frozen=True, slots=True)
class Policy:
    """When checkpoints are made; any of these.

    Attributes:
        steps: After so many global steps; 0 not.
        seconds: After so much time, by the clock of rank 0; 0 not.
        epochs: After every epoch.
    """

    steps: int = 0
    seconds: float = 0.0
    epochs: bool = False

    def due_by_step(self, step: int) -> bool:
        return self.steps > 0 and step % self.steps == 0

    def due_by_time(self, elapsed: float) -> bool:
        return 0 < self.seconds <= elapsed


def policy(text: str) -> Policy:
    """From ``500`` (steps), ``10m`` or ``30s`` (time), ``epoch``, several with commas, ``never``.

    Raises:
        SettingError: Anything else.
    """
    steps, seconds, epochs = 0, 0.0, False
    for word in text.split(","):
        matched = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", word.strip())
        if matched:
            seconds = float(matched[1]) * {"s": 1, "m": 60, "h": 3600}[matched[2]]
        elif word.strip().isdecimal() and int(word) > 0:
            steps = int(word)
        elif word.strip() == "epoch":
            epochs = True
        elif text.strip() != "never":
            raise SettingError(
                f"--checkpoint-every, or every=, {text}: cannot be understood",
                remedy="500 (steps), 10m (minutes), epoch, never, or several: epoch,10m",
            )
    return Policy(steps, seconds, epochs)


class Keeper:
    """Makes checkpoints of a training; every rank has one and calls it in the same order.

    Args:
        training: What to save.
        comms: Of all ranks; rank 0 writes.
        store: Where to.
        policy: When.
        keep: How many stay; 0 keeps all.
        tell: Called with an event's name and its details, ``warning`` where it is to be shown.
        stop_when_full: Ends the training cleanly when a checkpoint could not be written.
        callbacks: Told on every rank of each checkpoint that is complete.
        copies: On how many other hosts each checkpoint is to be; ``None``: on one where they have
            disks of their own.
        door: See :class:`paceline.train.stop.Poll`.
        asked_for: Gives the number of the last checkpoint that the launcher asked this rank for.

    Attributes:
        seconds: For which checkpoints held this rank up.
    """

    def __init__(
        self,
        training: Training,
        comms: Comms,
        store: Store,
        policy: Policy,
        keep: int,
        tell: Callable[..., None],
        *,
        stop_when_full: bool = False,
        callbacks: Callbacks | None = None,
        copies: int | None = None,
        door: Door | None = None,
        asked_for: Callable[[], int] = lambda: 0,
    ) -> None:
        self._training, self._comms, self._store = training, comms, store
        self._policy, self._tell, self._stop_when_full = policy, tell, stop_when_full
        self._copies = Copies(comms, store, keep, asked(copies))
        self._writer = Writer(store, keep, self._copies.published)
        self._lock = Lock(store.root, os.environ.get(jobenv.RUN_ID, ""))
        self._token = 0  # of whoever writes, the same on every rank
        self._notice, self._door = Notice(), door
        self._asked_for, self._answered = asked_for, 0
        self._poll = Poll(comms, door)
        self._saved_at, self._saved_step = time.monotonic(), -1
        self._full, self._fenced, self._good_step, self._took_over = "", "", 0, False
        self._uncopied, self._ending = "", False  # why, as it was last told
        self._stood_in: set[str] = set()  # hosts in whose place others take copies, as last told
        self._callbacks, self._told_step = callbacks, 0
        self._in_parts = False
        self._writes = comms.world.rank == 0
        self._owed = False  # a checkpoint, at the end of the step
        self.seconds = 0.0
        training.models.wait_with(self.settle)

    # -- the start -----------------------------------------------------------------------

    def open(self, want: str) -> Loaded | None:
        """Takes the folder, resumes from the wanted checkpoint, and listens for signals.

        Raises:
            SettingError: Another job writes there, or the run was another one.
            DataError: The wanted checkpoint is not there or not intact.
        """

        def take() -> None:
            if self._comms.world.rank == 0:
                self._lock.take()

        self._comms.together(take)
        try:
            known = self._known_token()
            sharded = parallel.is_sharded(self._training.models.module)
            self._in_parts = sharded and folder_of_all(self._comms, self._store.root)
            loaded = load(self._comms, want, self._store, self._warn, sharded=sharded)
            if loaded is None:
                self._set_aside()
            else:
                self._comms.together(lambda: check_identity(loaded, self._training.identity))
                restore(loaded, self._training, self._comms)
                self._saved_step = self._good_step = self._told_step = loaded.step
            self._claim(known)
            self._meet()
        except BaseException:
            self._copies.close()
            self._lock.release()
            raise
        self._notice.open()
        return loaded

    def join(self) -> None:
        """In place of :meth:`open`, in a process that joins others: they have all that it needs."""
        self._notice.open()

    def joined(self) -> None:
        """It has the others' state."""
        self._told_step = self._training.progress.step

    def _warn(self, text: str) -> None:
        self._tell("checkpoint skipped", warning=text)

    def _set_aside(self) -> None:
        """A new beginning in an old folder leaves the old checkpoints, under another name.

        On every disk: what another rank has would be resumed from as soon as this run has less.
        """
        sees = who_sees(self._comms, self._store.root)[self._comms.world.rank]
        if self._comms.world.rank == 0 and self._store.found()[0]:
            self._store.root.rename(rundir.backup_name(self._store.root))
            self._lock.release()
            self._lock.take()
        elif not sees and self._store.found()[0]:
            with contextlib.suppress(OSError):  # another rank of this disk was quicker
                self._store.root.rename(rundir.backup_name(self._store.root))

    def _known_token(self) -> int:
        """The largest that any rank has heard of, or has on its disk."""
        mine = max(self._token, self._store.newest_token())
        return int(self._comms.rows(torch.tensor([mine])).max())

    def _claim(self, known: int) -> None:
        """Makes rank 0 the one that writes: a former writer publishes nothing from now on."""

        def claim() -> None:
            if self._comms.world.rank == 0:
                try:
                    self._store.claim(known, self._lock.owner.describe())
                except OSError as error:  # it will be told of again when a checkpoint is due
                    self._store.token = known + 1
                    self._warn(f"{self._store.root} cannot be written to: {error.strerror}")

        self._comms.together(claim)
        self._token = int(self._comms.rows(torch.tensor([self._store.token]))[0])
        self._store.token = self._token

    def regrouped(self) -> None:
        """To be called by every member of a new group of ranks: its rank 0 writes from now on."""
        writes = self._comms.world.rank == 0
        mine = torch.tensor([int(self._lock.held), int(self._owed)])
        held, owed = self._comms.rows(mine).bool().T
        self._owed = bool(owed.any())  # some are new
        if not held[0]:
            known = self._known_token()
            if writes:
                if not self._writes:
                    self._good_step, self._took_over = 0, True
                with contextlib.suppress(OSError):
                    self._lock.take(over=True)
            self._claim(known)
            self._owed = True  # what the former one was writing may not be there
        self._writes = writes
        self._meet()

    def _meet(self) -> None:
        """Finds out who keeps copies, and has them made of what is there."""
        if problem := self._copies.meet():
            text = f"fewer copies of checkpoints than were asked for: {problem}"
            self._tell("warning", warning=text)
        self._copies.published()

    # -- on the way ----------------------------------------------------------------------

    def after_step(self, *, before_pause: bool = False) -> None:
        """To be called after every global step; saves and stops when it is time.

        Args:
            before_pause: The script has control next, and may do for long what it likes.

        Raises:
            Stopped: After the state was saved.
        """
        if self._owed or self._policy.due_by_step(self._training.progress.step):
            self.save()
        self.look_up(at_once=before_pause)

    def look_up(self, *, at_once: bool = False) -> None:
        """To be called also in evaluation, as often on every rank.

        Args:
            at_once: Asks all ranks now, and not only about twice a second.
        """
        if not self._poll.due() and not at_once:
            return
        self.report()
        self._tell_saved()
        self._lock.refresh()
        stop = bool(self._notice.stop or self._fenced or (self._full and self._stop_when_full))
        late = self._policy.due_by_time(time.monotonic() - self._saved_at)
        save = self._notice.save or (self._comms.world.rank == 0 and late)  # by rank 0's clock
        asked = {"asked": self._asked_for(), "answered": self._answered}
        wishes = self._poll.ask(stop=stop, save=save, **asked)
        if self._door is not None:
            if self._door.alone:
                self.leave_alone()
            if wishes.stop:
                self._door.parts()
        if wishes.stop:
            self.regrouped()  # rank 0 may have been lost since the last batch
        if wishes.save or wishes.stop:
            self._notice.save, self._answered = False, wishes.asked
            self.save()
            if wishes.fresh and self._comms.world.rank == 0:
                self._tell("saving", step=self._saved_step)
        if wishes.stop:
            self._stop()

    @property
    def _good(self) -> int | None:
        """On rank 0, the step of the newest whole checkpoint; ``None`` where only another knew."""
        return None if self._took_over and not self._good_step else self._good_step

    def _tell_saved(self) -> None:
        """Rank 0 knows which checkpoint is complete; every rank is told at the same moment."""
        if not self._callbacks:
            return
        known = self._good_step if self._comms.world.rank == 0 else 0
        step = int(self._comms.most(torch.tensor([known], dtype=torch.float64))[0])
        if step > self._told_step:
            self._told_step = step
            self._callbacks.checkpoint_saved(step)

    def after_evaluation(self, best: bool, epoch_ended: bool) -> None:
        """To be called after each epoch and its evaluation, and after one in mid-epoch."""
        if best or (epoch_ended and self._policy.epochs):
            self.save(best=best)

    def settle(self) -> None:
        """Returns when the model may be changed: no copy of it is under way."""
        before = time.perf_counter()
        self._writer.copier.wait()
        self.seconds += time.perf_counter() - before

    def _stop(self) -> NoReturn:
        self._writer.wait()
        self._copies.hurry(HURRY_SECONDS)  # this host may be about to go
        self.report()
        if fenced := self._comms.texts(self._fenced)[0]:
            raise Fenced(
                f"stopped after step {self._training.progress.step}: this job is not the one that"
                " makes checkpoints any more",
                found=fenced,
                remedy="nothing, if this is what is left of an earlier start; else give each job"
                " a --run-dir of its own",
            )
        reasons = self._comms.texts(self._notice.stop or self._full)
        asked = next((rank for rank, text in enumerate(reasons) if text), None)
        why = "request" if asked is None else reasons[asked]
        step, home = self._training.progress.step, os.environ.get(jobenv.LAUNCHER_RUN_DIR)
        known = self._comms.texts(json.dumps([self._good, self._full]))
        good, problem = checked(known, _KNOWN)[0]
        if self._saved_step < 0:  # a rank was lost meanwhile, which may have been writing it
            self.save()
            self._stop()
        if self._comms.world.rank == 0:
            if problem:
                text = f"{problem}: the state of step {step} is not saved, {_words_of(good)}"
                self._tell("checkpoint failed", step=step, warning=text)
            self._tell("stopped", step=step, why=why, **({} if good is None else {"saved": good}))
        where = home or str(self._store.root.parent)
        again = f"{jobenv.RUN_DIR}={shlex.quote(where)} before the same command resumes it"
        stopped = Stopped(
            f"stopped on {why} after step {step}",
            found=f"{problem}: {_words_of(good)}"
            if problem
            else f"checkpoint of step {good} in {where}",
            remedy="" if home or good == 0 else again,  # the launcher tells its own command, once
        )
        stopped.origin_rank = asked or 0
        if jobenv.EVENT_FD not in os.environ:  # nobody sorts what ranks say: one is enough
            if self._comms.world.rank == stopped.origin_rank:
                print(stopped.render(), file=sys.stderr, flush=True)
            raise Quietly(Stopped.exit_code)
        raise stopped

    def leave_alone(self) -> NoReturn:
        """Saves this rank's state to its host's disk, and ends it; nobody else is there.

        The token stays what it was, and so does a folder that rank 0 sees: the others may train on
        beside a launcher that only this host does not hear. What they save then is of a later step,
        or of a larger token where rank 0 was lost.

        Raises:
            Stopped: Always.
        """
        self._copies.close()
        step = self._training.progress.step
        own = self._writes or self._copies.own_disk
        if own and not self._training.progress.updated:  # else it is in the middle of a step
            self._writes, self._saved_step = True, -1
            self.save()
            self._writer.wait()
            self.report()
        where = f"checkpoint of step {self._good_step} in {self._store.root.parent}"
        raise Stopped(
            f"stopped after step {step}: the launcher is gone, and other ranks with it",
            found=where if own and self._good_step == step else "this rank has saved nothing",
        )

    def save(self, best: bool = False) -> None:
        """Makes a checkpoint of the present state; the training pays for the copy only."""
        if self._training.progress.step == self._saved_step and not best:
            return
        before = time.perf_counter()
        self._saved_step, self._saved_at = self._training.progress.step, time.monotonic()
        self._owed = False
        with self._comms.told_elsewhere():  # as saving
            self._training.models.together(moments=True)
            with self._training.models.own_weights() as exchanged:
                snapshot = capture(self._training, self._comms, best=best, in_parts=self._in_parts)
                if self._in_parts:
                    self._write_together(snapshot)
                elif self._writes:
                    self._writer.begin(snapshot)
                self.seconds += time.perf_counter() - before
                if exchanged:  # the evaluation goes on with the averages
                    self.settle()

    def _write_together(self, snapshot: Snapshot) -> None:
        """Every rank begins to write into the folder that rank 0 makes, where there is room."""
        self._writer.wait()
        mine = torch.tensor([float(snapshot.bytes)], dtype=torch.float64)
        needed, world, made = int(self._comms.rows(mine).sum()), self._comms.world, ""
        if world.rank == 0:
            try:
                made = str(self._writer.prepare(snapshot.step, needed).resolve())
            except OSError as error:
                self._writer.outcomes.put(Outcome(snapshot.step, 0.0, needed, str(error)))
        folder = Path(self._comms.texts(made)[0])
        if folder.name:
            self._store.demand_own(folder)
            self._writer.begin(snapshot, Part(folder, world.rank, world.size))

    def report(self) -> None:
        """Tells how the saves, and the copies, since the last time ended."""
        while not self._copies.outcomes.empty():
            self._report_copy(self._copies.outcomes.get())
        while not self._writer.outcomes.empty():
            outcome = self._writer.outcomes.get()
            if not outcome.problem:
                self._full, self._good_step = "", outcome.step
                size, seconds = round(outcome.bytes / 1e6, 3), round(outcome.seconds, 3)
                self._tell("checkpoint", step=outcome.step, megabytes=size, seconds=seconds)
                continue
            known, self._full = self._full, outcome.problem
            if outcome.fenced:
                self._fenced = outcome.problem
                self._tell("checkpoint failed", step=outcome.step, warning=outcome.problem)
                continue
            good = _words_of(self._good)
            text = f"{outcome.problem}: the training continues without checkpoints, {good}"
            # shown once, until one can be made again
            about = {"problem": outcome.problem} if known else {"warning": text}
            self._tell("checkpoint failed", step=outcome.step, **about)

    def _report_copy(self, copied: Copied) -> None:
        if copied.hosts:
            self._tell("checkpoint copied", **figures(copied))
        if self._ending or self._training.progress.finished:
            return  # other ranks may have left
        for host in copied.stood_in.keys() - self._stood_in:
            others = ", ".join(copied.hosts)
            text = f"{host} takes no copies of checkpoints ({copied.stood_in[host]}): {others} does"
            self._tell("warning", warning=text)
        self._stood_in = set(copied.stood_in)
        known, self._uncopied = self._uncopied, copied.problem
        if copied.problem:
            where = f"only on {', '.join(copied.hosts)}" if copied.hosts else "on no other host"
            text = f"the copy of step {copied.step} is {where} ({copied.problem})"
            about = {"problem": copied.problem} if known else {"warning": text}
            self._tell("checkpoint copy failed", step=copied.step, **about)

    def renew(self) -> None:
        """Begins anew in a new group of ranks: another one may be first, and write."""
        self._poll = Poll(self._comms, self._door)
        self._saved_step = -1  # what a lost rank was writing may not be there
        self.regrouped()

    # -- the end -------------------------------------------------------------------------

    def close(self, *, failed: bool = False) -> None:
        """Waits for what is being written and lets the folder go.

        Args:
            failed: Other ranks may be gone; nothing is expected of them any more.
        """
        self._ending = True
        if failed:
            self._writer.give_up()
        self._writer.wait()
        self.report()
        self._copies.close()
        try:
            if not failed:
                self._tell_saved()
        finally:
            self._notice.close()
            self._lock.release()


def _words_of(good: int | None) -> str:
    """Of which step the newest checkpoint is; ``None``: a former writer's, 0: there is none."""
    if good is None:
        return "none was made since rank 0 was lost"
    return f"the last good one is of step {good}" if good else "there is none yet"
