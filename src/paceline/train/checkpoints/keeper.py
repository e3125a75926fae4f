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
from paceline.train.callbacks import Callback, Callbacks
from paceline.train.checkpoints.capture import PauseState, Snapshot, Training, capture
from paceline.train.checkpoints.copies import CopyCoordinator, CopyResult, num_copies
from paceline.train.checkpoints.resume import LoadedCheckpoint, check_identity, load, restore
from paceline.train.checkpoints.store import FENCED_REMEDY, Fenced, Store, WriterLock
from paceline.train.checkpoints.writer import PartialWrite, SaveOutcome, Writer
from paceline.train.comms import Comms, parse_texts
from paceline.train.data.disks import is_shared_by_all, visible_ranks
from paceline.train.elastic.membership import Membership
from paceline.train.elastic.recovery import Recovery
from paceline.train.elastic.stop import Poll, QuietExit, SignalNotice, Stopped
from paceline.train.journal import Journal
from paceline.train.member import Member
from paceline.train.metrics import Best

# the newest step that is saved; what went wrong
_SAVED_SCHEMA = tuple_of(optional(integer()), text(MAX_LONG_TEXT))
FINAL_COPY_S = 3.0  # for a copy, when the training was asked to stop


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """When checkpoints are made; any of these.

    Attributes:
        steps: After so many global steps; 0 not.
        seconds: After so much time, by the clock of rank 0; 0 not.
        epochs: After every epoch.
    """

    steps: int = 0
    seconds: float = 0.0
    epochs: bool = False

    def is_due_at_step(self, step: int) -> bool:
        return self.steps > 0 and step % self.steps == 0

    def is_due_after(self, elapsed: float) -> bool:
        return 0 < self.seconds <= elapsed


def parse_policy(text: str) -> SavePolicy:
    """Parses ``500`` (steps), ``10m`` or ``30s``, ``epoch``, several with commas, or ``never``.

    Raises SettingError for anything else.
    """
    steps, seconds, epochs = 0, 0.0, False
    for part in text.split(","):
        matched = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", part.strip())
        if matched:
            seconds = float(matched[1]) * {"s": 1, "m": 60, "h": 3600}[matched[2]]
        elif part.strip().isdecimal() and int(part) > 0:
            steps = int(part)
        elif part.strip() == "epoch":
            epochs = True
        elif text.strip() != "never":
            raise SettingError(
                f"every={text!r} (--checkpoint-every) is not valid",
                remedy="500 (steps), 10m (minutes), epoch, never, or several: epoch,10m",
            )
    return SavePolicy(steps, seconds, epochs)


class CheckpointManager:
    """Saves and resumes a training. Every rank has one and calls it in the same order.

    Args:
        comms: Of all ranks; rank 0 writes.
        keep: How many stay; 0 keeps all.
        report: Called with an event's name and its details, ``warning`` where it is to be shown.
        stop_when_full: Ends the training cleanly when a checkpoint could not be written.
        callbacks: Told on every rank of each checkpoint that is complete.
        copies: On how many other hosts each checkpoint is to be; ``None``: on one where they have
            disks of their own.
        membership: See :class:`paceline.train.elastic.stop.Poll`.
        save_request: Gives the number of the last checkpoint that the launcher asked this rank for.

    Attributes:
        blocked_s: For which checkpoints held this rank up.
    """

    def __init__(
        self,
        training: Training,
        comms: Comms,
        store: Store,
        policy: SavePolicy,
        keep: int,
        report: Callable[..., None],
        *,
        stop_when_full: bool,
        callbacks: Callbacks,
        copies: int | None,
        membership: Recovery | None,
        save_request: Callable[[], int],
    ) -> None:
        self._training, self._comms, self._store = training, comms, store
        self._policy, self._report, self._stop_when_full = policy, report, stop_when_full
        self._copies = CopyCoordinator(comms, store, keep, num_copies(copies))
        self._writer = Writer(store, keep, self._copies.on_published)
        self._lock = WriterLock(store.root, os.environ.get(jobenv.RUN_ID, ""))
        self._token = 0  # of whoever writes, the same on every rank
        self._notice, self._membership = SignalNotice(), membership
        self._save_request, self._answered_request = save_request, 0
        self._poll, self._is_evaluating = Poll(comms, membership), False
        self._pause: PauseState | None = None
        self._last_save_time, self._last_save_step = time.monotonic(), -1
        self._save_awaits_evaluation = False  # the last save
        self._save_problem = self._fenced_reason = ""
        self._complete_step, self._has_taken_over = 0, False
        self._copy_problem, self._is_closing = "", False  # why, as it was last told
        self._replaced_hosts: set[str] = set()  # others take copies instead, as last told
        self._callbacks, self._reported_step = callbacks, 0
        self._is_sharded = False
        self._is_writer = comms.world.rank == 0
        self._save_pending = False  # a checkpoint, at the end of the step
        self.blocked_s = 0.0
        for updater in training.models:
            updater.pre_step = self.wait_for_copy

    # -- the start -----------------------------------------------------------------------

    def open(self, selector: str) -> LoadedCheckpoint | None:
        """Locks the folder, resumes from the selected checkpoint, and listens for signals.

        Raises:
            SettingError: Another job writes there, or the run was another one.
            DataError: The wanted checkpoint is not there or not intact.
        """

        def lock() -> None:
            if self._comms.world.rank == 0:
                self._lock.acquire()

        self._comms.together(lock)
        try:
            known_token = self._newest_token()
            sharded = parallel.is_sharded(self._training.models.module)
            self._is_sharded = sharded and is_shared_by_all(self._comms, self._store.root)
            loaded = load(self._comms, selector, self._store, self._warn, sharded=sharded)
            if loaded is None:
                self._set_aside()
            else:
                self._comms.together(lambda: check_identity(loaded, self._training.identity))
                restore(loaded, self._training, self._comms)
                self._last_save_step = self._complete_step = self._reported_step = loaded.step
                self._save_awaits_evaluation = self._training.progress.awaits_evaluation
            self._claim_token(known_token)
            self._negotiate_copies()
        except BaseException:
            self._copies.close()
            self._lock.release()
            raise
        self._notice.open()
        return loaded

    def join(self) -> None:
        """Replaces :meth:`open` in a process that joins others and gets its state from them."""
        self._notice.open()

    def on_state_received(self) -> None:
        """Called when this process has the others' state."""
        self._reported_step = self._training.progress.step

    def _warn(self, text: str) -> None:
        self._report("checkpoint skipped", warning=text)

    def _set_aside(self) -> None:
        """Renames the folder of an earlier training before a new one starts in it.

        On every disk: what another rank has would be resumed from as soon as this run has less.
        """
        is_visible = visible_ranks(self._comms, self._store.root)[self._comms.world.rank]
        if self._comms.world.rank == 0 and self._store.scan()[0]:
            self._store.root.rename(rundir.backup_name(self._store.root))
            self._lock.release()
            self._lock.acquire()
        elif not is_visible and self._store.scan()[0]:
            with contextlib.suppress(OSError):  # another rank of this disk was quicker
                self._store.root.rename(rundir.backup_name(self._store.root))

    def _newest_token(self) -> int:
        """Returns the largest token that any rank knows of."""
        local_token = max(self._token, self._store.highest_token())
        return int(self._comms.rows(torch.tensor([local_token])).max())

    def _claim_token(self, known_token: int) -> None:
        """Makes rank 0 the writer and fences any former one."""

        def claim() -> None:
            if self._comms.world.rank == 0:
                try:
                    self._store.claim_token(known_token, self._lock.owner.describe())
                except OSError as error:  # it will be told of again when a checkpoint is due
                    self._store.token = known_token + 1
                    self._warn(f"{self._store.root} cannot be written to: {error.strerror}")

        self._comms.together(claim)
        self._token = int(self._comms.rows(torch.tensor([self._store.token]))[0])
        self._store.token = self._token

    def regrouped(self) -> None:
        """Makes rank 0 of a new group of ranks the writer; called by every member."""
        is_writer = self._comms.world.rank == 0
        local = [int(self._lock.is_held), int(self._save_pending), self._store.token]
        has_lock, is_pending, tokens = self._comms.rows(torch.tensor(local)).T
        self._save_pending = bool(is_pending.any())
        if has_lock[0]:
            self._token = self._store.token = int(tokens[0])  # some ranks are new
        else:
            known_token = self._newest_token()
            if is_writer:
                if not self._is_writer:
                    self._complete_step, self._has_taken_over = 0, True
                with contextlib.suppress(OSError):
                    self._lock.acquire(force=True)
            self._claim_token(known_token)
            self._save_pending = True  # what the former one was writing may not be there
        self._is_writer = is_writer
        self._negotiate_copies()

    def _negotiate_copies(self) -> None:
        """Negotiates who keeps copies, and copies what is there."""
        if problem := self._copies.negotiate():
            text = f"fewer copies of checkpoints than were asked for: {problem}"
            self._report("warning", warning=text)
        self._copies.on_published()

    # -- on the way ----------------------------------------------------------------------

    def on_step_end(self, *, at_pause: bool = False) -> None:
        """Saves when it is time, or saves and raises Stopped; called after every global step.

        Args:
            at_pause: The script's loop over batches ends here. Requests wait for an evaluation or
                the end of the pause: a run that resumes here repeats the pause without a batch, so
                that names which the loop defines would be missing.
        """
        self._pause = PauseState(self._training) if at_pause else None
        if self._save_pending or self._policy.is_due_at_step(self._training.progress.step):
            self.save()
        if not at_pause:
            self.poll()

    @property
    def stop_requested(self) -> bool:
        """Whether this rank was asked to stop, which the others may not know yet."""
        return bool(self._notice.stop)

    def poll(self, *, force: bool = False, evaluating: bool = False) -> None:
        """Polls for requests, about twice a second unless forced.

        Also called in evaluation, equally often on every rank.
        """
        if evaluating != self._is_evaluating:  # its batches may take far longer than steps
            self._is_evaluating = evaluating
            self._poll.restart()
        if not self._poll.is_due() and not force:
            return
        self.report_outcomes()
        self._report_saved()
        self._lock.refresh()
        is_full = self._save_problem and self._stop_when_full
        stop = bool(self._notice.stop or self._fenced_reason or is_full)
        is_late = self._policy.is_due_after(time.monotonic() - self._last_save_time)
        save = self._notice.save or (self._comms.world.rank == 0 and is_late)  # by rank 0's clock
        requests = self._poll.exchange(
            stop=stop,
            save=save,
            save_number=self._save_request(),
            answered_number=self._answered_request,
        )
        if self._membership is not None:
            if self._membership.alone:
                self.save_and_exit_alone()
            if requests.stop:
                self._membership.end_together()
        if requests.stop:
            self.regrouped()  # rank 0 may have been lost since the last batch
        if requests.save or requests.stop:
            self._notice.save, self._answered_request = False, requests.save_number
            self.save()
            if requests.is_new_request and self._comms.world.rank == 0:
                self._report("saving", step=self._last_save_step)
        if requests.stop:
            self._stop()

    @property
    def _newest_saved_step(self) -> int | None:
        """Step of the newest complete checkpoint, on rank 0; ``None`` if only a lost rank knew."""
        return None if self._has_taken_over and not self._complete_step else self._complete_step

    def _report_saved(self) -> None:
        """Tells every rank at the same moment which checkpoint is complete."""
        if not self._callbacks:
            return
        known_step = self._complete_step if self._comms.world.rank == 0 else 0
        step = int(self._comms.max(torch.tensor([known_step], dtype=torch.float64))[0])
        if step > self._reported_step:
            self._reported_step = step
            self._callbacks.call(Callback.checkpoint_saved, step)

    def on_evaluation_end(self, is_best: bool, epoch_ended: bool) -> None:
        """Saves after an evaluation or epoch if the policy says so."""
        self._pause = None
        progress = self._training.progress
        # a finished training must not repeat its last evaluation when it is resumed
        is_outdated = (
            progress.finished
            and self._last_save_step == progress.step
            and self._save_awaits_evaluation
        )
        if is_best or is_outdated or (epoch_ended and self._policy.epochs):
            self.save(is_best=is_best, replace=is_best or is_outdated)

    def wait_for_copy(self) -> None:
        """Waits until no copy of the model is in progress, so that it may be changed."""
        start = time.perf_counter()
        self._writer.copier.wait()
        self.blocked_s += time.perf_counter() - start

    def _stop(self) -> NoReturn:
        self._writer.wait()
        self._copies.hurry(FINAL_COPY_S)  # this host may be about to go
        self.report_outcomes()
        if fenced := self._comms.texts(self._fenced_reason)[0]:
            raise Fenced(
                f"stopped after step {self._training.progress.step}: this job is not the one that"
                " makes checkpoints any more",
                found=fenced,
                remedy=FENCED_REMEDY,
            )
        reasons = self._comms.texts(self._notice.stop or self._save_problem)
        origin_rank = next((rank for rank, text in enumerate(reasons) if text), None)
        reason = "request" if origin_rank is None else reasons[origin_rank]
        step = self._training.progress.step
        reports = self._comms.texts(json.dumps([self._newest_saved_step, self._save_problem]))
        saved_step, problem = parse_texts(reports, _SAVED_SCHEMA)[0]
        if self._last_save_step < 0:  # a rank was lost meanwhile, which may have been writing it
            self.save()
            self._stop()
        saved_text = _describe_saved(saved_step)
        if self._comms.world.rank == 0:
            if problem:
                text = f"{problem}: the state of step {step} is not saved, {saved_text}"
                self._report("checkpoint failed", step=step, warning=text)
            saved = {} if saved_step is None else {"saved": saved_step}
            self._report("stopped", step=step, reason=reason, **saved)
        launcher_folder = os.environ.get(jobenv.LAUNCHER_RUN_DIR)
        folder = launcher_folder or str(self._store.root.parent)
        state_text = f"checkpoint of step {saved_step} in {folder}"
        if problem:
            state_text = f"{problem}: {saved_text}"
        remedy = ""
        if saved_step != 0 and not launcher_folder:  # the launcher tells its own command, once
            remedy = f"{jobenv.RUN_DIR}={shlex.quote(folder)} before the same command resumes it"
        stopped = Stopped(f"stopped on {reason} after step {step}", found=state_text, remedy=remedy)
        stopped.origin_rank = origin_rank or 0
        if jobenv.EVENT_FD not in os.environ:  # nobody sorts what ranks say: one is enough
            if self._comms.world.rank == stopped.origin_rank:
                print(stopped.render(), file=sys.stderr, flush=True)
            raise QuietExit(Stopped.exit_code)
        raise stopped

    def save_and_exit_alone(self) -> NoReturn:
        """Saves this rank's state to its own disk and raises Stopped: no other rank is reachable.

        The token stays what it was, and so does a folder that rank 0 sees: the others may train on
        beside a launcher that only this host does not hear. What they save then is of a later step,
        or of a larger token where rank 0 was lost.
        """
        self._copies.close()
        step = self._training.progress.step
        can_save = self._is_writer or self._copies.has_own_disk
        if can_save and not self._training.progress.updated:  # else it is in the middle of a step
            self._is_writer, self._last_save_step = True, -1
            self.save()
            self._writer.wait()
            self.report_outcomes()
        state_text = "this rank has saved nothing"
        if can_save and self._complete_step == step:
            state_text = f"checkpoint of step {step} in {self._store.root.parent}"
        message = f"stopped after step {step}: the launcher is gone, and other ranks with it"
        raise Stopped(message, found=state_text)

    @torch.inference_mode(False)  # what is made in an evaluation must also serve the training
    def save(self, *, is_best: bool = False, replace: bool = False) -> None:
        """Saves the current state; the training waits for the copy only.

        Args:
            replace: Replaces a checkpoint of the same step.
        """
        if self._training.progress.step == self._last_save_step and not replace:
            return
        start = time.perf_counter()
        self._last_save_step, self._last_save_time = self._training.progress.step, time.monotonic()
        self._save_awaits_evaluation = self._training.progress.awaits_evaluation
        self._save_pending = False
        with self._comms.excluded_from_waited():  # as saving
            self._training.models.synchronize(moments=True)
            pause = self._pause
            with (
                self._training.models.without_averages() as was_averaged,
                pause.restored_settings() if pause else contextlib.nullcontext(),
            ):
                snapshot = capture(
                    self._training, self._comms, is_best=is_best, in_parts=self._is_sharded,
                    extras=pause.extras if pause else None,
                )  # fmt: skip
                if self._is_sharded:
                    self._write_together(snapshot)
                elif self._is_writer:
                    self._writer.start(snapshot)
                self.blocked_s += time.perf_counter() - start
                if was_averaged:  # the evaluation goes on with the averages
                    self.wait_for_copy()

    def _write_together(self, snapshot: Snapshot) -> None:
        """Makes every rank write its part into a folder of rank 0, if there is room."""
        self._writer.wait()
        local_bytes = torch.tensor([float(snapshot.bytes)], dtype=torch.float64)
        needed, world, folder_name = int(self._comms.rows(local_bytes).sum()), self._comms.world, ""
        if world.rank == 0:
            try:
                folder_name = str(self._writer.make_folder(snapshot.step, needed).resolve())
            except OSError as error:
                self._writer.outcomes.put(SaveOutcome(snapshot.step, 0.0, needed, str(error)))
        folder = Path(self._comms.texts(folder_name)[0])
        if folder.name:
            self._store.check_temporary(folder)
            self._writer.start(snapshot, PartialWrite(folder, world.rank, world.size))

    def report_outcomes(self) -> None:
        """Reports how saves and copies ended since the last call."""
        while not self._copies.outcomes.empty():
            self._report_copy(self._copies.outcomes.get())
        while not self._writer.outcomes.empty():
            outcome = self._writer.outcomes.get()
            if not outcome.problem:
                self._save_problem, self._complete_step = "", outcome.step
                size, seconds = round(outcome.bytes / 1e6, 3), round(outcome.seconds, 3)
                self._report("checkpoint", step=outcome.step, megabytes=size, seconds=seconds)
                continue
            if outcome.is_torn:  # the next ones can be made
                self._report("checkpoint failed", step=outcome.step, warning=outcome.problem)
                continue
            former_problem, self._save_problem = self._save_problem, outcome.problem
            if outcome.fenced:
                self._fenced_reason = outcome.problem
                self._report("checkpoint failed", step=outcome.step, warning=outcome.problem)
                continue
            saved_text = _describe_saved(self._newest_saved_step)
            text = f"{outcome.problem}: the training continues without checkpoints, {saved_text}"
            # shown once, until one can be made again
            details = {"problem": outcome.problem} if former_problem else {"warning": text}
            self._report("checkpoint failed", step=outcome.step, **details)

    def _report_copy(self, copied: CopyResult) -> None:
        if copied.hosts:
            size, seconds = round(copied.bytes / 1e6, 3), round(copied.seconds, 3)
            self._report(
                "checkpoint copied",
                step=copied.step,
                megabytes=size,
                seconds=seconds,
                hosts=[*copied.hosts],
            )
        if self._is_closing or self._training.progress.finished:
            return  # other ranks may have left
        for host in copied.replaced_hosts.keys() - self._replaced_hosts:
            host_names = ", ".join(copied.hosts)
            reason = copied.replaced_hosts[host]
            text = f"{host} takes no copies of checkpoints ({reason}): {host_names} does"
            self._report("warning", warning=text)
        self._replaced_hosts = set(copied.replaced_hosts)
        former_problem, self._copy_problem = self._copy_problem, copied.problem
        if copied.problem:
            location = f"only on {', '.join(copied.hosts)}" if copied.hosts else "on no other host"
            text = f"the copy of step {copied.step} is {location} ({copied.problem})"
            details = {"problem": copied.problem} if former_problem else {"warning": text}
            self._report("checkpoint copy failed", step=copied.step, **details)

    def renew(self) -> None:
        """Starts again in a new group of ranks, which may have another writer."""
        self._poll, self._is_evaluating = Poll(self._comms, self._membership), False
        self._last_save_step = -1  # what a lost rank was writing may not be there
        self.regrouped()

    # -- the end -------------------------------------------------------------------------

    def close(self, *, failed: bool = False) -> None:
        """Waits for writes in progress and releases the folder.

        After a failure other ranks may be gone; nothing is expected of them any more.
        """
        self._is_closing = True
        if failed:
            self._writer.abandon()
        self._writer.wait()
        self.report_outcomes()
        self._copies.close()
        try:
            if not failed:
                self._report_saved()
        finally:
            self._notice.close()
            self._lock.release()


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
            self.keeper.poll(evaluating=True)

    @property
    def stop_requested(self) -> bool:
        """Whether this rank was asked to stop, which the others may not know yet."""
        return self.keeper is not None and self.keeper.stop_requested

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


def _describe_saved(step: int | None) -> str:
    """Describes the newest checkpoint; ``None``: a former writer's, 0: there is none."""
    if step is None:
        return "none was made since rank 0 was lost"
    return f"the last good one is of step {step}" if step else "there is none yet"
