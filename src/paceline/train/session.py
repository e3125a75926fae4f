"""The session: one object through which a training script takes part in a job."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.spec import rundir
from paceline.spec.errors import JobError
from paceline.train import disks, files, grouping, insync, trackers, weights, world, wrapping
from paceline.train.checkpoints.capture import Stateful, Training
from paceline.train.checkpoints.keeper import Keeper, policy
from paceline.train.checkpoints.store import FOLDER, Store
from paceline.train.comms import Comms
from paceline.train.cpus import allowed, loader_workers
from paceline.train.fetching import Collate, Data, Fetch
from paceline.train.grouping import Stated
from paceline.train.loader import Batch, Loader, Progress, Shard
from paceline.train.metrics import Carried, Means, Meter
from paceline.train.order import Order
from paceline.train.pace import Pace
from paceline.train.precision import Precision
from paceline.train.rate import Rate, counted, summary
from paceline.train.report import Reporter, figures
from paceline.train.seeding import seed_all
from paceline.train.stop import Quietly, Stopped, leave
from paceline.train.stopping import Best
from paceline.train.trackers import About, Tracker
from paceline.train.trackers.guard import Guard, Record, numbers
from paceline.train.update import Updater

T = TypeVar("T")


class Session:
    """A process's part in a training job. Made by :func:`join`.

    Attributes:
        world: Place of this process.
        device: Where the model and the batches live.
        precision: Of parameters and of what is computed.
        folder: The run directory; only rank 0 writes to it.
        progress: How far the training is.
        comms: Collectives for small things.
        leaves_group: The process group was made by :func:`join` and ends with the session.
    """

    def __init__(
        self,
        place: world.World,
        device: torch.device,
        numbers: Precision,
        folder: Path,
        seed: int,
        log_every: int,
        check_every: int,
        reporter: Reporter,
    ) -> None:
        self.world, self.device, self.precision, self.folder = place, device, numbers, folder
        self.leaves_group = True
        self.progress = Progress()
        self.comms = Comms(place, device)
        self._seed, self._log_every, self._check_every = seed, log_every, check_every
        self._reporter = reporter
        self._train = self.meter()
        self._module: nn.Module = nn.Module()
        self._model: nn.Module = self._module
        self._updater: Updater | None = None
        self._batch: Batch | None = None
        self._unsynced = ExitStack()
        self._training: Batch | None = None  # what was given out last, until the loop ends
        self._evaluating: Batch | None = None
        self._proof: insync.Proof | None = None
        self._pace = Pace(self.comms, self._module)
        self._waited = 0.0
        self._keeper: Keeper | None = None
        self._best: Best | None = None
        self._carried = Carried()
        self._trackers: list[Guard] = []
        self._resumed_at = -1
        self._epochs, self._epoch_size = 0, 0
        self._pauses: Callable[[], bool] = lambda: False
        self._loss = float("nan")
        self._passed, self._shown = Means(0, {}), False  # the training since the last line
        self._rate = Rate()

    # -- before the training -------------------------------------------------------------

    def prepare(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        schedule: LRScheduler | None = None,
        *,
        clip_norm: float | None = None,
        compile: bool = False,
        unused: bool = False,
    ) -> nn.Module:
        """Makes the model train as one over all ranks and proves that all start equal.

        Args:
            module: Already on :attr:`device` (see :meth:`place`), with the optimizer over its
                parameters.
            optimizer: Stepped by :meth:`step`.
            schedule: Advanced once for each global step.
            clip_norm: Largest norm of the whole gradient.
            compile: Compiles what is returned with ``torch.compile``.
            unused: Some steps leave parameters without gradient (branches, frozen parts that
                still require one); DDP then looks for them at every step, which costs time.

        Returns:
            What to call in the training loop. Evaluate and save with ``module`` itself.
        """
        self._module = module
        self._updater = Updater(
            module, optimizer, schedule, self.precision.scaler(self.device), clip_norm
        )
        replicate = not self.comms.alone and not wrapping.is_sharded(module)
        self._model = (
            wrapping.replicated(module, self.device, unused=unused) if replicate else module
        )
        if not self.comms.alone:
            self._proof = insync.Proof(self.comms, module)
        self.verify()
        self._pace = Pace(self.comms, self._model)
        seed_all(self._seed + 1 + self.world.rank)
        self._reporter.event("prepared", parameters=sum(p.numel() for p in module.parameters()))
        return torch.compile(self._model) if compile else self._model  # type: ignore[return-value]

    def place(self, module: nn.Module, *, shard: bool = False) -> nn.Module:
        """The module on this session's device, its parameters in this session's precision.

        A tensor of higher precision keeps it: a module in float64 stays in float64.

        Args:
            module: Changed in place.
            shard: Spreads parameters, gradients and optimizer state over the ranks (FSDP2). Make
                the optimizer afterwards.
        """
        placed = self.precision.widened(module.to(self.device))
        return wrapping.sharded(placed) if shard and not self.comms.alone else placed

    def loader(
        self,
        data: Data,
        global_batch: int,
        *,
        shuffle: bool = True,
        order: Stated | None = None,
        lengths: Sequence[int] | None = None,
        limit: int = 0,
        workers: int | None = None,
        collate: Collate | None = None,
    ) -> Loader:
        """Batches for training: each rank's share of every global batch of ``global_batch``.

        Args:
            data: A data set that makes batches, a ``TensorDataset`` or any map-style data set.
            global_batch: Samples of one optimizer step over all ranks.
            shuffle: A new order for each epoch, from the seed.
            order: Gives the sample ids of an epoch, by its number, instead; the same on every
                rank. As many as there are samples; some may be repeated and others left out.
            lengths: Of each sample: batches are then made of samples of similar length.
            limit: Most samples that one rank computes at once; gradients of more are
                accumulated without communication.
            workers: Processes that make samples of a map-style data set; found out from the CPUs
                that are really free for it.
            collate: Makes a batch of a list of samples, as a ``DataLoader``'s ``collate_fn`` does.

        Raises:
            DataError: There are more ranks than samples.
            SettingError: This is no data set with numbered samples; ``order`` gives no such ids;
                there is not one length for each sample.
            JobError: ``order`` is not the same on every rank.
        """
        if workers is None:
            workers = loader_workers(allowed(), self.world.local_size)
        fetch = Fetch(data, self.device, workers, collate)
        visited = Order(len(data), self._seed, shuffle)
        if order is not None:
            visited = self._agreed(grouping.stated(visited, order))
        elif lengths is not None:
            visited = grouping.by_length(visited, lengths, global_batch)
        return Loader(
            fetch,
            visited,
            self._place,
            global_batch,
            limit,
            self.progress,
            self._has_waited,
            self._hand_over,
        )

    def _agreed(self, order: Order) -> Order:
        """A script's own order where all ranks have the same; looked at in the first epoch."""
        digest = hashlib.sha256(self.together(lambda: order.epoch(0)).tobytes()).hexdigest()
        self.agree("the order of the samples", digest)
        return order

    def shard(self, data: Data, size: int = 512, *, collate: Collate | None = None) -> Shard:
        """This rank's share of every sample exactly once, for evaluation.

        In their stored order, every time anew: it may be made once and used in every epoch.

        Args:
            data: As for :meth:`loader`.
            size: Most samples of a batch.
            collate: Makes a batch of a list of samples.
        """
        fetch = Fetch(data, self.device, collate=collate)
        return Shard(fetch, len(data), self._place, size, self._hand_over_evaluated)

    def _hand_over_evaluated(self, batch: Batch | None) -> None:
        self._evaluating = batch
        if batch is not None:
            self._reporter.heartbeat(self.progress.step, "evaluate")
            if self._keeper is not None:
                self._keeper.look_up()

    def meter(self) -> Meter:
        """Collects per-sample values and reduces them exactly over all ranks."""
        return Meter(self.comms.sum, self.device, self._real)

    def _real(self, count: int) -> int:
        """How many samples of the batch that was given out last count: a stand-in does not."""
        given = self._evaluating or self._training
        return 0 if given is not None and not given.count else count

    @property
    def _place(self) -> tuple[int, int]:
        return self.world.rank, self.world.size

    def checkpoints(
        self,
        *,
        every: str = "epoch,10m",
        keep: int = 3,
        resume: str = "auto",
        best: Best | None = None,
        extras: Mapping[str, Stateful] | None = None,
        identity: Mapping[str, object] | None = None,
        describes: Mapping[str, Any] | None = None,
        stop_when_full: bool = False,
    ) -> bool:
        """Makes checkpoints from now on, and resumes from an earlier one.

        To be called after :meth:`prepare`. From then on SIGTERM and SIGUSR1 save and stop,
        SIGUSR2 saves and continues.

        Args:
            every: ``500`` steps, ``10m``, ``epoch``, several with commas, or ``never``.
            keep: How many of the newest stay; 0 keeps all. The best stays anyway.
            resume: ``auto`` (the newest, if there is one), ``never``, ``latest``, ``best``, a
                step, or the folder of a run or a checkpoint.
            best: Updated by the script in each epoch; a checkpoint is made of every best state.
            extras: Further states to keep, by name.
            identity: What must be the same for a run to resume, by name.
            describes: What :meth:`save_model` will be given, as far as it is known: with it a
                checkpoint can be used like a finished model.
            stop_when_full: Stops cleanly when a checkpoint cannot be written; otherwise the
                training continues with a warning.

        Returns:
            True when the training was resumed from a checkpoint.

        Raises:
            SettingError: Another job writes to the run directory, or this is another training.
            DataError: The checkpoint that was asked for is not there or not intact.
        """
        kept = {**(extras or {}), "metrics": self._carried, **({"best": best} if best else {})}
        same = {name: str(value) for name, value in (identity or {}).items()}
        training = Training(
            self._prepared(), self.progress, self._seed, kept, same, describes or {}
        )
        keeper = Keeper(
            training,
            self.comms,
            Store(self.folder / FOLDER),
            policy(every),
            keep,
            self._tell,
            self._before_save,
            stop_when_full=stop_when_full,
        )
        loaded = keeper.open(resume)
        self._keeper, self._best = keeper, best
        self._reporter.begin(resumed=loaded is not None)
        if loaded is not None:
            self._resumed_at = loaded.step
            self.verify()
            self.say(f"resumed after step {loaded.step} from {loaded.source}")
            self.event("resumed", step=loaded.step, source=loaded.source)
        return loaded is not None

    def _before_save(self) -> None:
        """A checkpoint holds what was measured, and never a model that ranks disagree on."""
        self._collect()
        self.verify()

    def _tell(self, name: str, **details: Any) -> None:
        """What the keeper has to say; warnings are shown as well as recorded."""
        self.event(name, **details)
        if "warning" in details:
            self.say(f"warning: {name}: {details['warning']}")

    # -- the training --------------------------------------------------------------------

    def epochs(
        self, loader: Loader, epochs: int = 1, steps: int = 0, *, every: int = 0
    ) -> Iterator[int]:
        """Epoch numbers from where the training stands until its end.

        Args:
            loader: The training loader; iterate over it once for each number.
            epochs: Passes over the data.
            steps: Ends after so many global steps instead, in however many epochs.
            every: Gives the number of the running epoch again after so many global steps, for
                an evaluation in between (0: not).
        """
        loader.every, self._pauses = every, loader.pauses
        self.progress.steps = steps or epochs * len(loader)
        self._epochs = -(-self.progress.steps // len(loader))
        self._log_every = self._log_every or _interval(len(loader))
        self._epoch_size = loader.order.size
        begun = self.progress.step
        if self.progress.finished:
            self._say_finished()
        while not self.progress.finished:
            self._rate.restart()
            self._pace.restart()
            self._passed, self._shown = Means(0, {}), False
            yield self.progress.epoch
            if not self._shown:
                self._show("", {})
            ended = self.progress.offset >= loader.order.size
            if ended:
                self.progress.epoch, self.progress.offset = self.progress.epoch + 1, 0
            self._evaluated(ended or self.progress.finished)
        self.verify()
        self._summarise(self.progress.step - begun)

    def _say_finished(self) -> None:
        done = self.progress
        self.say(
            f"nothing is left to train: step {done.step:,}, in epoch {done.epoch}, is done already,"
            f" and {done.steps:,} steps ({counted(self._epochs, 'epoch')}) were asked for\n"
            "more epochs or steps train it further; --resume never, or a run directory of its own,"
            " starts a new training"
        )

    def _summarise(self, steps: int) -> None:
        """Where the time went, over all ranks; they must have made the same steps."""
        if not steps:
            return
        shares = self._pace.shares()
        hosts = self.comms.texts(self.world.host) if shares and shares.slowest is not None else ()
        rate = self._rate
        self.say(summary(steps, rate.samples, rate.seconds, self._waited, shares, hosts))

    def _evaluated(self, ended: bool) -> None:
        if self._keeper is not None:
            best = self._best is not None and self._best.step == self.progress.step
            self._keeper.after_evaluation(best, ended)
            self._keeper.settle()

    def stop(self, why: str) -> None:
        """Ends the training after this step; every rank must say so in the same step."""
        self.progress.steps = self.progress.step
        self.say(f"stopped after step {self.progress.step}: {why}")
        self.event("stopped early", step=self.progress.step, why=why)

    def autocast(self) -> AbstractContextManager[object]:
        """The context for the forward pass and the loss."""
        return self.precision.autocast(self.device)

    def step(self, losses: Tensor, **values: Tensor) -> bool:
        """Backward for the batch that the loader gave last; after its last part, the update.

        The gradient is that of the mean over the global batch, whatever the sizes of the
        ranks' shares.

        Args:
            losses: One loss for each sample (preferred), or the mean over the batch.
            values: Further per-sample values to be averaged in the log, shape ``[n]``.

        Returns:
            True when the optimizer has stepped.

        Raises:
            ValueError: There is neither one loss nor one for each sample.
        """
        batch = self._taken()
        per_sample = _per_sample(losses, len(batch.ids))
        scale = self.world.size / batch.total
        loss = per_sample[: batch.count].sum() * scale if batch.count else per_sample.sum() * 0.0
        updater = self._prepared()
        if batch.last:
            self._pace.before_backward(loss, self.progress.step)
        updater.backward(loss)
        self._pace.after_backward()
        self._unsynced.close()
        self._train.add(batch.count, loss=per_sample, **values)
        if not batch.last:
            return False
        updater.update()
        self._advance(batch)
        return True

    def _hand_over(self, batch: Batch | None) -> None:
        self._batch = self._training = batch
        if batch is None:
            return
        if not self.progress.steps:
            raise RuntimeError(
                "the training loader is to be used within: for epoch in session.epochs(loader, N)"
            )
        if not batch.last:  # only the last part of a global batch exchanges gradients
            self._unsynced.enter_context(wrapping.unsynced(self._model))

    def _has_waited(self, seconds: float) -> None:
        self._waited += seconds
        self._pace.waited(seconds)

    def _taken(self) -> Batch:
        batch, self._batch = self._batch, None
        if batch is None:
            raise RuntimeError("session.step was called without a new batch from the loader")
        return batch

    def _prepared(self) -> Updater:
        if self._updater is None:
            raise RuntimeError("session.prepare comes before session.step and session.checkpoints")
        return self._updater

    def _advance(self, batch: Batch) -> None:
        progress = self.progress
        progress.step += 1
        progress.offset = batch.stop
        self._rate.add(batch.total)
        self._pace.step()
        if self._proof is not None:
            self._proof.stepped()
        ended = progress.finished or progress.offset == self._epoch_size
        if ended or progress.step % self._log_every == 0:
            self._flush()
        if progress.step % self._check_every == 0:
            self.verify()
        self._reporter.heartbeat(progress.step, "train")
        self._reporter.progress(
            step=progress.step,
            steps=progress.steps,
            epoch=progress.epoch,
            epochs=self._epochs,
            loss=self._loss,
            samples_per_s=self._rate.value or None,  # unknown until the first record
        )
        if self._keeper is not None:
            self._keeper.after_step()
        if ended or self._pauses():
            self._settle()

    def _settle(self) -> None:
        """The script may evaluate now, or change the model: all ranks hold the same one."""
        if self._proof is not None:
            self._proof.align()
        if self._keeper is not None:
            self._keeper.settle()

    def _collect(self) -> None:
        """Reduces what was measured since the last time, without recording it yet."""
        if not self._train.empty:
            self._carried.means += self._train.result()

    def _flush(self) -> None:
        """Records what was measured since the last record, on every rank."""
        self._collect()
        means = self._carried.take()
        self._loss = means["loss"]
        self._passed += means
        extra = {"lr": self._prepared().lr, "samples_per_s": round(self._rate.measure(), 1)}
        self._record("train", {"samples": means.count, **means.values(), **extra})
        if not math.isfinite(self._loss) and self._prepared().scaler is None:
            raise self._diverged()

    def _diverged(self) -> JobError:
        """The same on every rank, for the loss is the mean over all of them."""
        step = self.progress.step
        return JobError(
            f"the loss is not finite (loss {self._loss}): the training has diverged",
            found=f"at or before step {step}, with learning rate {self._prepared().lr:g}",
            remedy="lower --lr or lengthen the warm-up; clip gradients (--clip-norm 1.0)",
        )

    # -- what is said and kept -----------------------------------------------------------

    def log(self, split: str, **values: Any) -> None:
        """Records values under the present step and shows them, once for the job.

        The first line in each epoch also has the means of the training since its last one.
        """
        self._record(split, values)
        self._show(split, values)

    def _show(self, split: str, values: Mapping[str, Any]) -> None:
        done, passed = self.progress, self._passed.values()
        parts = [(name, some) for name, some in (("train", passed), (split, values)) if some]
        if parts:
            self.say(figures(self._epoch, done.step, done.steps, parts))
        self._passed, self._shown = Means(0, {}), True

    @property
    def _epoch(self) -> int:
        """The number that the loop over epochs has, also right after its end."""
        done = self.progress
        return done.epoch - 1 if done.finished and done.epoch and not done.offset else done.epoch

    def _record(self, split: str, values: Mapping[str, Any]) -> None:
        done = self.progress
        self._reporter.metrics(step=done.step, epoch=self._epoch, split=split, **values)
        for guard in self._trackers:
            guard.put(Record(split, done.step, numbers(values)))

    def track(
        self,
        names: Sequence[str],
        *,
        project: str = "paceline",
        config: Mapping[str, Any] | None = None,
        each_node: bool = False,
    ) -> None:
        """Sends every record also to these trackers; to be called after :meth:`checkpoints`.

        A tracker that fails or hangs costs a warning and nothing else.

        Args:
            names: Of ``paceline.train.trackers.TRACKERS``.
            project: Name under which runs are collected.
            config: Settings, as the tracker shows them.
            each_node: One run for each node, in a group, instead of one for all.
        """
        writes = self.world.local_rank == 0 if each_node else self.world.rank == 0
        if not writes:
            return
        run = self.folder.name
        about = About(
            folder=self.folder,
            project=project,
            name=f"{run}-{self.world.host}" if each_node else run,
            group=run if each_node else "",
            config=config or {},
            resumed_at=self._resumed_at,
        )
        self._trackers += [self._guard(name, about) for name in names]

    def _guard(self, name: str, about: About) -> Guard:
        suffix = f"-{self.world.host}" if about.group else ""
        notes = self.folder / "trackers" / f"{name}{suffix}.json"
        if notes.exists():  # then nothing is sent twice
            about = replace(about, resumed_at=-1)

        def opened(run_id: str) -> Tracker:
            return trackers.load(name, replace(about, run_id=run_id))

        return Guard(name, opened, notes, self._warn, resumed=self._resumed_at >= 0)

    def _warn(self, text: str) -> None:
        self.event("warning", warning=text)
        self.say(f"warning: {text}")

    def say(self, text: str) -> None:
        """One line for the user, once."""
        self._reporter.say(text)

    def event(self, name: str, **details: Any) -> None:
        """Records that something happened on this rank."""
        self._reporter.event(name, **details)

    def phase(self, name: str) -> None:
        """Tells the launcher what this rank is doing now."""
        self._reporter.heartbeat(self.progress.step, name)

    def agree(self, what: str, value: str) -> None:
        """Raises on every rank when ``value`` is not the same on all of them."""
        self.comms.agree(what, value)

    def together(self, act: Callable[[], T]) -> T:
        """Acts on every rank; what one rank raises, every rank raises."""
        return self.comms.together(act)

    def once(self, folder: Path, make: Callable[[Path], None]) -> None:
        """Makes ``folder`` where it is missing: once for each disk, while the others wait.

        Args:
            folder: What is to exist afterwards, on every rank.
            make: Fills the empty folder that it is given.
        """
        disks.once(self.comms, folder, make)

    def verify(self) -> None:
        """Proves that parameters and buffers are bit-identical on all ranks.

        Also those of sharded models, as each rank puts them together. Batch statistics, which
        every rank gathers from its own share, are made those of rank 0.

        Raises:
            JobError: Names rank, host and the first tensor that differs.
        """
        if self._proof is not None:
            self._proof.verify()

    def save_config(self, config: Mapping[str, Any]) -> None:
        """Keeps the effective settings in the run directory."""
        if self.world.rank == 0:
            files.write_json(self.folder / rundir.CONFIG, dict(config))

    def save_model(self, config: dict[str, Any]) -> None:
        """Keeps the trained weights and their description in the run directory, once."""
        self.verify()
        state = wrapping.whole_state(self._module)
        first = self.world.rank == 0
        kept = self.together(
            lambda: weights.save_model(self.folder, state, config) if first else self.folder
        )
        if kept != self.folder:
            self.event("model kept elsewhere", folder=str(kept))
            self.say(
                f"warning: the disk of {self.folder} on {self.world.host} is full: "
                f"the trained model is in {kept} there"
            )
        self.event("model saved", step=self.progress.step)

    # -- the end -------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the session: writes what is pending and leaves the process group."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        agreed = error is None or isinstance(
            error, (Stopped, Quietly)
        )  # then all ranks end together
        if self._keeper is not None:
            self._keeper.close(failed=not agreed)
        if not agreed:
            self._reporter.event("failed", error=f"{type(error).__name__}: {error}")
        for guard in self._trackers:
            guard.close()
        self._reporter.close()
        # After a failure the other ranks may be inside a collective; leaving tells them.
        if agreed and self.leaves_group:
            leave()


def _per_sample(losses: Tensor, samples: int) -> Tensor:
    if losses.dim() == 0:
        return losses.expand(samples)
    if losses.shape != (samples,):
        raise ValueError(
            f"session.step needs one loss for each of the {samples} samples, or their mean,"
            f" not a tensor of shape {list(losses.shape)}"
            ' (reduction="none", and a mean over what belongs to one sample)'
        )
    return losses


def _interval(steps: int) -> int:
    """Equal parts of an epoch of about 50 steps or less."""
    return -(-steps // -(-steps // 50))
