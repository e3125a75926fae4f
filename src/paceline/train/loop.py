"""The training loop: epochs, the work that is due after each global step, and after a recovery."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, distributed

from paceline.spec.errors import SettingError
from paceline.spec.formatting import pluralize
from paceline.train.callbacks import Callback, Callbacks
from paceline.train.checkpoints.capture import Training
from paceline.train.checkpoints.handover import send_models, send_training
from paceline.train.checkpoints.keeper import CheckpointController
from paceline.train.comms import Comms
from paceline.train.data.division import MAX_TIMING_STEPS, BatchDivision
from paceline.train.data.loader import Batch, Loader, Progress
from paceline.train.data.loader_factory import LoaderFactory
from paceline.train.elastic.membership import Membership
from paceline.train.journal import Journal
from paceline.train.measure.pace import StepTimer, StepTimings
from paceline.train.measure.probe import Probe
from paceline.train.measure.straggler_reporter import StragglerMonitor
from paceline.train.measure.watch import NormAndLoadWatch
from paceline.train.member import Member
from paceline.train.reduce.bucket_size import BucketTrial
from paceline.train.step import StepRunner

_RECORD_STEPS = 50
"""Steps between two records at most, when the script names no number."""


@dataclass(eq=False)
class TrainingLoop:
    """Runs epochs and the work that is due after each global step.

    :class:`paceline.train.elastic.recovery.Recovery` calls it to send, renew and save the training.

    Args:
        probe: Measures a few steps instead of a training; ``None`` for a normal training.
        log_every: Global steps between two records; 0 chooses by the length of an epoch.
        check_every: Global steps between two proofs that ranks hold the same models.

    Attributes:
        bucket_trial: Tries sizes of gradient buckets; ``None``: they stay.
    """

    _member: Member
    _journal: Journal
    _training: Training
    _membership: Membership
    _checkpoints: CheckpointController
    _division: BatchDivision
    _loaders: LoaderFactory
    _callbacks: Callbacks
    _probe: Probe | None
    _log_every: int
    _check_every: int
    bucket_trial: BucketTrial | None = None

    def __post_init__(self) -> None:
        member, journal, models = self._member, self._journal, self._training.models
        self._has_begun_batches = False  # in this iteration of session.epochs, or all are over
        self._resumes_final_pause = False
        self.stragglers = StragglerMonitor(member)
        self.watch = NormAndLoadWatch(journal.record)
        self.pace = StepTimer(member.comms, models.module, member.device)
        self.steps = StepRunner(member, journal, models, self._membership, self.pace, self.watch)

    def measure(self, bucket_trial: BucketTrial | None) -> None:
        """Starts measuring the models that were prepared so far, from their first step on."""
        self.bucket_trial = bucket_trial
        self.pace.follow(self._training.models.first.model)
        self.stragglers.regroup()

    def start_iteration(self, loader: Loader) -> None:
        """Called when the script begins to take batches from a loader.

        Raises:
            SettingError: It is a second loader whose batches do not match those of the training.
        """
        if loader is not self.steps.loader:
            self._check_side_loader(loader)
            self._membership.start_side_loader()
            return
        if self._has_begun_batches and loader.is_at_end:
            self._member.say(
                "warning: a loop over the training loader gave no batch: those of this epoch were"
                " given before; to evaluate, iterate over session.shard(data)"
            )
        self._has_begun_batches = True
        self._membership.restore_received()
        if self._training.models.include_thawed() and self.bucket_trial is not None:
            self.bucket_trial.restart(self.step)

    def _check_side_loader(self, loader: Loader) -> None:
        """Refuses a loader that cannot share the position of the training in its data."""
        training = self.steps.loader
        if training is None:
            return
        if loader.global_batch != training.global_batch:
            batches = f"{loader.global_batch:,} and {training.global_batch:,}"
            found = f"their global batches have {batches} samples"
        elif loader.order.size < training.order.size:
            found = (
                f"its data have {pluralize(loader.order.size, 'sample')},"
                f" fewer than the {training.order.size:,} of that loader"
            )
        # A resumed run may begin at a pause, before the evaluation: then a second loader that comes
        # first in a zip begins here, and the batch loop ends when zip asks the other one.
        elif self._has_begun_batches and training.is_at_end:
            found = "that loader has no batch left here"
        else:
            return
        raise SettingError(
            "the script takes batches from another loader than the one given to session.epochs",
            found=found,
            remedy="to evaluate, iterate over session.shard(data);\n"
            "to train with two data sets at once, give session.loader one data set whose samples"
            " hold one of the first and one or more of the second",
        )

    def begin(self, loader: Loader, epochs: int, steps: int) -> None:
        """Prepares the training with this loader; waits for the others in a process that joins."""
        progress, membership = self._training.progress, self._membership
        is_stopped = self.steps.loader is None and progress.finished  # the script called stop
        self.steps.loader = loader
        membership.start_training(loader)
        self._member.write_deferred_files()
        self._allow_losses(loader)
        loader.on_arrival = self.pace.mark_batch
        self._loaders.divide(loader)
        loader.compute_idle = self._run_idle if loader.drop_slow else None
        if self._division.is_adaptive:
            self.pace.max_interval = MAX_TIMING_STEPS
        if not is_stopped:
            # at least 1 in a training that is past its end, as 0 means unknown
            progress.steps = steps or max(
                progress.step + loader.steps_left(epochs), min(progress.step, 1)
            )
        self._resumes_final_pause = (
            progress.awaits_evaluation and progress.step == progress.steps and not is_stopped
        )
        self._journal.epochs = -(-steps // len(loader)) or epochs
        if not progress.finished:
            if text := _describe_change(progress, loader):
                self._member.say(text)
            progress.global_batch, progress.samples = loader.global_batch, loader.order.size
        if self._probe is not None:
            progress.steps = self._probe.start(loader, epochs, steps)
            self._journal.epochs = -(-progress.steps // len(loader))
        for text in self._training.models.start(progress.steps, progress.step):
            self._member.say(text)
        self._log_every = self._log_every or _equal_parts(len(loader), _RECORD_STEPS)
        if self._member.comms.joining:
            membership.join()
            self._checkpoints.joined()
            membership.keep_received()
        progress.order_batch = (progress.offset and progress.order_batch) or loader.global_batch
        if progress.order_batch != loader.global_batch:
            loader.order.keep_epoch(progress.epoch, progress.order_batch)
        if self._resumes_final_pause or (
            progress.awaits_evaluation and not progress.finished and loader.is_at_end
        ):
            self._member.say(
                f"resuming after the loop over batches that ended with step {progress.step:,}: it"
                " gives no batch now, and the code after it runs first"
            )
        elif progress.finished and not is_stopped:
            self._member.say(
                f"nothing is left to train: step {progress.step:,}, in epoch"
                f" {progress.epoch + (progress.offset > 0)}, is done already, and"
                f" {progress.steps:,} steps ({pluralize(self._journal.epochs, 'epoch')})"
                " were asked for\nmore epochs or steps train it further; --resume never, or a run"
                " directory of its own, starts a new training"
            )

    def epochs(self, loader: Loader) -> Iterator[int]:
        progress = self._training.progress
        first_step = progress.step
        while self._resumes_final_pause or not progress.finished:
            self._resumes_final_pause = False
            self.pace.restart(loader.waited_s, self._checkpoints.blocked_s)
            if self._probe is not None:
                self._probe.restart(loader.waited_s)
            self._journal.start_epoch()
            begin, num_repeated = progress.step, loader.num_repeated
            self._has_begun_batches = False
            yield progress.epoch
            # a script that counts batches has also counted those that were given in vain
            has_whole_batches = loader.num_repeated == num_repeated and self._probe is None
            if has_whole_batches and not loader.is_at_end:
                raise _unfinished_loop_error(loader, is_empty=progress.step == begin)
            progress.evaluated = progress.step
            self._journal.end_epoch()
            epoch_ended = progress.offset >= loader.order.size
            if epoch_ended:
                self._callbacks.call(Callback.epoch_ended, progress.epoch)
                progress.epoch, progress.offset = progress.epoch + 1, 0
                progress.order_batch = loader.global_batch
            self._checkpoints.after_evaluation(epoch_ended=epoch_ended)
        self._has_begun_batches = True
        self._membership.verify()
        self.stragglers.summarize(self.pace, progress.step - first_step, loader.waited_s)

    def _allow_losses(self, loader: Loader) -> None:
        """Lets the loader divide batches again when ranks are lost."""
        recovery = self._membership.recovery
        if recovery is None:
            return
        self._checkpoints.poll(recovery)
        loader.generation, loader.on_boundary = lambda: recovery.generation, recovery.renew
        loader.on_global_batch = self.steps.start_batch
        if not self._member.comms.joining:  # what the others have said holds for a newcomer, too
            self._membership.report_recoverable(recovery)

    def run_step(self, losses: Tensor | Mapping[str, Tensor], values: Mapping[str, Tensor]) -> bool:
        batch = self.steps.run(losses, values)
        if batch is not None:
            self._end_step(batch)
        return batch is not None

    def _run_idle(self, batch: Batch) -> None:
        if self.steps.run_idle(batch):
            self._end_step(batch)

    def _end_step(self, batch: Batch) -> None:
        """Counts a global step, and does what is due after it."""
        progress, models, loader = self._training.progress, self._training.models, self.steps.loader
        assert loader is not None
        progress.step, progress.offset = progress.step + 1, batch.stop
        self.steps.end_step()
        models.stepped(progress.step)
        self._measure_pace(batch, loader)
        if self._training.checksum is not None:
            self._training.checksum.stepped()
        self._membership.compare_newcomers()
        self.watch.stepped()
        self._callbacks.call(Callback.after_step, progress.step)
        ended = progress.finished or progress.offset == loader.order.size
        if ended or progress.step % self._log_every == 0:
            self._record()
        if progress.step % self._check_every == 0:
            self._membership.verify()
        self._journal.stepped(self.pace.rate.samples_per_s)
        if self._member.comms.start is not None:  # the first step ends the start
            # if a rank is lost just now, the store is cut off, and that of the next group gets it
            with contextlib.suppress(distributed.DistError):
                self._membership.publish_start()
        pauses = loader.pauses_now()
        self._checkpoints.after_step(before_pause=ended or pauses)
        self.pace.end_session_work(self._checkpoints.blocked_s)
        if ended or pauses:  # the script may evaluate now, or change the model
            models.synchronize()
            self.pace.rate.pause()
            if self._training.checksum is not None:
                self._training.checksum.align()
            self._checkpoints.settle()

    def _measure_pace(self, batch: Batch, loader: Loader) -> None:
        step = self.step
        timings = self.pace.step(batch.total, loader.waited_s, self._checkpoints.blocked_s)
        if (communication := self._training.models.first.communication) is not None:
            communication.computed(self.pace.last_computing_s)
        if timings is not None:
            self.stragglers.update(timings)
            self._journal.report_timings(timings.summary)
            self._try_bucket_sizes(timings)
            self._choose_communication(timings)
            self._division.update(timings, step)
        if self._probe is not None:
            self._probe.stepped(batch.total, loader.waited_s, self.pace.last_computing_s())

    def _choose_communication(self, timings: StepTimings) -> None:
        """Reconsiders how a single model's gradients are averaged."""
        models, bucket_trial = self._training.models, self.bucket_trial
        communication, step = models.first.communication, self.step
        if communication is None or len([*models]) > 1:
            return
        if bucket_trial is not None and not bucket_trial.is_finished and communication.is_final:
            return  # what is exposed will be less
        if text := communication.consider(timings):
            self._member.say(text)
            self._member.event("communication", step=step, text=text)
            if bucket_trial is not None and communication.final_step is not None:
                bucket_trial.restart(communication.final_step)
                self._try_bucket_sizes(timings)

    def _try_bucket_sizes(self, timings: StepTimings) -> None:
        """Tries sizes of gradient buckets, once the method of averaging is final."""
        communication = self._training.models.first.communication
        step = self.step
        if self.bucket_trial is None or (communication is not None and not communication.is_final):
            return
        first = 0 if communication is None else communication.warmup_steps
        if self.bucket_trial.consider(timings, step, first):
            self._member.event("overlap settled", step=step, **self.bucket_trial.summary())

    def _record(self) -> None:
        """Records the training since the last record; one that has diverged ends on every rank."""
        models = self._training.models
        speed = round(self.pace.rate.measure(), 1)
        names = list(models.metric_names("loss").values())
        means = self._journal.record_training(names, **models.learning_rates, samples_per_s=speed)
        if figures := self.pace.figures():
            self._journal.record("pace", figures)
        self.watch.recorded()
        models.check_finite(means, self.step)

    # -- for recoveries ------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Global steps done."""
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
        if self.bucket_trial is not None:
            self.bucket_trial.restart(self.step)
        self.pace.regroup()
        self.stragglers.regroup()
        self._division.regroup(models)
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


def _describe_change(progress: Progress, loader: Loader) -> str:
    """Returns how a resumed training's batch or data size differs; empty if neither does."""
    changes = []
    if progress.global_batch not in (0, loader.global_batch):
        changes.append(
            f"a global batch of {loader.global_batch:,} instead of {progress.global_batch:,}"
        )
    if progress.samples not in (0, loader.order.size):
        changes.append(f"{loader.order.size:,} training samples instead of {progress.samples:,}")
    if not changes:
        return ""
    left = pluralize(progress.steps - progress.step, "step")
    return f"continuing with {' and '.join(changes)}: {left} left"


def _unfinished_loop_error(loader: Loader, *, is_empty: bool) -> SettingError:
    """Returns the error for an iteration of ``session.epochs`` that ends in mid-epoch.

    Args:
        loader: The loader of the training.
        is_empty: The iteration has done no step.
    """
    epoch, total = loader.progress.epoch + 1, len(loader)
    done = f"{total - loader.steps_left(epoch):,} of {total:,} steps"
    message = f"the batch loop of epoch {epoch} was left after {done}"
    found = "the next iteration of session.epochs would begin in the middle of the epoch"
    if is_empty:
        message = "an iteration of session.epochs ended without a step"
        found = f"{done} of epoch {epoch} are done"
    return SettingError(
        message,
        found=found,
        remedy="iterate over the whole loader in each iteration of session.epochs:\n"
        "for shorter epochs, give session.loader a Subset of the data;\n"
        "for evaluations within an epoch, use session.epochs(…, every=STEPS);\n"
        "for fewer steps in all, use session.epochs(…, steps=STEPS);\n"
        "to end the training early, call session.stop, or leave both loops",
    )


def _equal_parts(length: int, limit: int) -> int:
    """Returns the length of the fewest equal parts that are not longer than ``limit``."""
    return -(-length // -(-length // limit))
