"""The session: one object through which a script trains as a member of its job."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.spec.errors import SettingError
from paceline.spec.training.communication import validate, validate_overlap
from paceline.train import device as devices
from paceline.train import parallel, report, weights, world
from paceline.train.callbacks import Callback, Callbacks
from paceline.train.checkpoints.capture import Stateful, Training
from paceline.train.checkpoints.keeper import CheckpointController
from paceline.train.data.division import BatchDivision
from paceline.train.data.fetch import Collate, Data
from paceline.train.data.loader import Loader, Shard
from paceline.train.data.loader_factory import LoaderFactory
from paceline.train.data.order import EpochOrder
from paceline.train.data.worker_signals import protect_data_workers
from paceline.train.elastic.control import Control
from paceline.train.elastic.membership import Membership
from paceline.train.elastic.newcomer import Recording, Replay
from paceline.train.elastic.recovery import Recovery
from paceline.train.elastic.replica_check import ReplicaChecksum
from paceline.train.elastic.stop import QuietExit, Stopped, destroy_process_group
from paceline.train.loop import TrainingLoop
from paceline.train.measure.probe import Probe, probe_request
from paceline.train.measure.watch import Usage
from paceline.train.member import Member
from paceline.train.metrics import Best
from paceline.train.models import Models
from paceline.train.reduce.bucket_size import BucketTrial
from paceline.train.update import Average, Updater


class Session(Member):
    """One process of a training job. Made by :func:`paceline.train.join`.

    Attributes:
        models: Models that :meth:`prepare` was given.
    """

    def __init__(
        self,
        place: world.World,
        device: torch.device,
        precision: devices.Precision,
        folder: Path,
        seed: int,
        log_every: int,
        check_every: int,
        reporter: report.Reporter,
        *,
        mixed: bool = False,
    ) -> None:
        super().__init__(place, device, precision, folder, reporter, mixed=mixed)
        protect_data_workers()
        self.models = models = Models()
        request = probe_request(os.environ)
        self._probe = None if request is None else Probe(request, self, models)
        self._callbacks = Callbacks(self, lambda: self._loop.pace.script_work())
        self._training = Training(models, self.progress, seed)
        self._membership = Membership(self, self._training, is_forecast=self._probe is not None)
        self._checkpoints = CheckpointController(
            self, self._journal, self._training, self._membership, self._callbacks
        )
        self._division = BatchDivision(self.comms, self._journal, self.progress)
        self._loaders = LoaderFactory(
            self, models, seed, self._division, self._membership, self._probe
        )
        self._loop = TrainingLoop(
            self,
            self._journal,
            self._training,
            self._membership,
            self._checkpoints,
            self._division,
            self._loaders,
            self._callbacks,
            self._probe,
            log_every,
            check_every,
        )

    def attach_control(self, control: Control) -> None:
        """Lets this session obey messages of the launcher."""
        self._membership.control = control

    def attach_recovery(self, recovery: Recovery, start: Recording | Replay) -> None:
        """Lets this session go on without ranks that are lost."""
        self._membership.attach(recovery, start)
        recovery.training = self._loop

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
        communication: str = "exact",
        overlap: str = "auto",
        name: str = "",
    ) -> nn.Module:
        """Prepares a model to train on all ranks, and checks that all ranks start with the same.

        Call it once for each of several models.

        Args:
            module: Already on :attr:`device` (see :meth:`place`), with the optimizer over its
                parameters.
            optimizer: Stepped by :meth:`step`.
            schedule: Advanced once for each global step.
            clip_norm: Largest norm of the whole gradient.
            compile: Compiles the returned model with ``torch.compile``.
            unused: Some steps leave parameters without gradient (branches, frozen parts that
                still require one); DDP then looks for them at every step, which costs time.
            communication: How gradients are averaged over the ranks: ``exact``, ``fp16``, ``bf16``,
                ``int8``, ``int4``, ``local``, or ``auto``, which measures and chooses. With
                ``local`` ranks have the same model at evaluations, checkpoints and ends of epochs,
                and different ones between.
            overlap: With ``auto`` two ranks on CPUs try some sizes of gradient buckets in their
                first steps, and keep the quickest. With ``backward`` the sizes stay.
            name: Name of one of several models, in losses, records and checkpoints.

        Returns:
            The model to call in the training loop. Evaluate and save with ``module`` itself.

        Raises:
            SettingError: ``communication`` or ``overlap`` is unknown or not possible with this
                model, or its gradients are sparse or complex.
        """
        self.phase("start")
        self._membership.note_change("prepare")
        if communication != "exact" and self.comms.mixed:
            raise SettingError(
                f"--communication {communication} needs ranks on one kind of device",
                found="some of this job's ranks have an accelerator and others have none",
                remedy="--communication exact, or --device cpu",
            )
        scaler = self.precision.scaler(self.device)
        is_sharded = parallel.is_sharded(module)
        is_scaled = scaler is not None
        validate(communication, sharded=is_sharded, several=bool(name), scaled=is_scaled)
        validate_overlap(overlap)
        self.models.close_exchange(name)
        updater = Updater(module, optimizer, schedule, scaler, clip_norm)
        self.models.add(name, updater)
        if not self.comms.is_alone:
            if not is_sharded:
                updater.replicate(
                    communication,
                    self.comms,
                    self.device,
                    unused=unused,
                    manual=bool(name),
                    recovery=self._membership.recovery,
                )
            self._training.checksum = ReplicaChecksum(self.comms, self.models.module)
        tries_sizes = overlap == "auto" and not (name or compile or self._probe)
        bucket_trial = None
        if updater.exchange is not None and tries_sizes:
            bucket_trial = BucketTrial(updater.exchange, self.comms)
        self.verify()
        self._loop.measure(bucket_trial)
        devices.seed_all(self._training.seed + 1 + self.world.rank)
        details = {"model": name} if name else {}
        self.event("prepared", parameters=sum(p.numel() for p in module.parameters()), **details)
        self._membership.mark("prepare")
        model = updater.model
        return torch.compile(model) if compile else model  # type: ignore[return-value]

    def average(self, decay: float = 0.999, *, start: int = 0, name: str = "") -> Average:
        """Keeps a moving average (EMA) of a model's weights from now on, as checkpoints do.

        Call it after :meth:`prepare` and before :meth:`checkpoints`. Evaluate with it inside
        ``with average.applied():``; :meth:`save_model` saves it with ``average=True``.

        Args:
            decay: From 0 to below 1; 0.999 remembers about the last thousand updates.
            start: Updates of the model after which averaging begins.
            name: Name of one of several models.

        Raises:
            SettingError: A value is out of range.
        """
        updater = self.models[name]
        self._membership.note_change("average")
        if updater.communication is not None:
            validate(updater.communication.requested.name, averaged=True)
        updater.average = Average(
            updater.module, self.comms, decay, start, self._checkpoints.settle
        )
        return updater.average

    def averaged(self) -> AbstractContextManager[None]:
        """Context in which models that have an average use it; enter it on every rank."""
        return self.models.averaged()

    def add(self, callback: Callback) -> None:
        """Adds a callback; on every rank, in the same order."""
        self._callbacks.add(callback)

    def watch(self, every: int = 0, *, devices: bool = False) -> None:
        """Records more than losses, in ``metrics.jsonl`` and for the trackers.

        Args:
            every: Steps between two records of the norms of gradients and weights, and of the part
                of the weights that a step changes (split ``norms``); 0: none. Such a step needs
                memory for another copy of the parameters.
            devices: Also records load and memory of processes, hosts and accelerators, with each
                record of the training (split ``usage``).
        """
        self._loop.watch.norm_interval = every
        self._loop.watch.usage = Usage(self.comms) if devices else None

    def loader(
        self,
        data: Data,
        global_batch: int,
        *,
        shuffle: bool = True,
        order: EpochOrder | None = None,
        lengths: Sequence[int] | None = None,
        limit: int | Mapping[str, int] | None = 0,
        workers: int | None = None,
        collate: Collate | None = None,
        balance: str | Mapping[str, float] = "even",
        drop_slow: bool = False,
    ) -> Loader:
        """Makes a loader of training batches: each rank gets its share of every global batch.

        A loop over :meth:`epochs` trains with one loader. To evaluate, use :meth:`shard`. All
        loaders share the position of the training in its data: a second one may only be combined
        with the first (``zip``), with the same global batch and at least as many samples.

        Args:
            data: A data set that makes batches, a ``ShardedDataset``, a ``TensorDataset`` or any
                map-style data set.
            global_batch: Samples of one optimizer step over all ranks.
            shuffle: A new order for each epoch, from the seed.
            order: Instead returns the sample ids of an epoch, by its number; the same on every
                rank. As many as there are samples; some may be repeated and others left out.
            lengths: Length of each sample; batches are then made of samples of similar length.
            limit: Most samples that one rank computes at once (0 or ``None``: no limit), or such
                limits by host (ranks of other hosts have none). Gradients of larger shares are
                accumulated without communication. :func:`paceline.train.fit_batch` finds what fits
                into memory.
            workers: Processes that make samples of a map-style data set; by default as many as
                there are free CPUs.
            collate: Makes a batch of a list of samples, as a ``DataLoader``'s ``collate_fn`` does.
            balance: How much of each batch a rank gets: ``"even"``; ``"auto"``, in proportion to
                its measured speed; or a weight for each host, which its ranks share, as a mapping
                or in the form of ``--balance`` (``"n1=3,n2=1"``). The order of samples and the
                gradient are the same in each case.
            drop_slow: With ``"auto"``, a rank without which steps would be faster gets nothing.

        Raises:
            DataError: There are more ranks than samples.
            SettingError: This is no data set with numbered samples; ``order`` gives no such ids;
                there is not one length for each sample; ``balance`` or ``limit`` name no hosts of
                the job.
            JobError: ``order`` is not the same on every rank, or the data are not, as far as their
                number, the indices of a ``Subset`` and some rows of a ``TensorDataset`` show it.
        """
        limit = 0 if limit is None else limit
        loader = self._loaders.loader(
            data, global_batch, shuffle, order, lengths, limit, workers, collate, balance, drop_slow
        )
        loader.on_iteration = self._loop.start_iteration
        return loader

    def shard(self, data: Data, size: int = 512, *, collate: Collate | None = None) -> Shard:
        """Makes a loader for evaluation: all ranks together get every sample exactly once.

        Samples come in their stored order. Make it once, and iterate over it in every epoch, on all
        ranks: an iteration begins with the check that they have the same data, as in
        :meth:`loader`. If they have not, it raises JobError.

        Args:
            data: Data set as for :meth:`loader`.
            size: Most samples of a batch.
            collate: Makes a batch of a list of samples.
        """
        return self._loaders.shard(data, size, collate, self._checkpoints.during_evaluation)

    def checkpoints(
        self,
        *,
        every: str | int = "epoch,10m",
        keep: int = 3,
        resume: str = "auto",
        best: Best | None = None,
        extras: Mapping[str, Stateful] | None = None,
        identity: Mapping[str, object] | None = None,
        describes: Mapping[str, Any] | None = None,
        stop_when_full: bool = False,
        copies: int | None = None,
    ) -> bool:
        """Makes checkpoints from now on, and resumes from an earlier one.

        Call it after :meth:`prepare`. From then on SIGTERM and SIGUSR1 save and stop,
        SIGUSR2 saves and continues.

        Args:
            every: ``500`` steps, also as a number, ``10m``, ``epoch``, several with commas, or
                ``never``.
            keep: How many of the newest are kept; 0 keeps all. The best is always kept.
            resume: ``auto`` (the newest, if there is one), ``never``, ``latest``, ``best``, a
                step, or the folder of a run or a checkpoint.
            best: Updated by the script in each epoch; a checkpoint is made of every best state.
            extras: Further objects whose state is saved, by name.
            identity: Values that must be the same for a run to resume, by name.
            describes: The ``config`` of :meth:`save_model`, as far as it is known: with it a
                checkpoint can be used like a finished model.
            stop_when_full: Stops cleanly when a checkpoint cannot be written; otherwise the
                training continues with a warning.
            copies: Number of other hosts to which each checkpoint is copied. By default one if some
                hosts do not see rank 0's folder, else none; ``PACELINE_CHECKPOINT_COPIES`` sets
                another default.

        Returns:
            True when the training was resumed from a checkpoint.

        Raises:
            SettingError: Another job writes to the run directory, or this is another training.
            DataError: The requested checkpoint is missing or damaged.
        """
        if self._probe is not None:
            return False
        _ = self.models.first  # RuntimeError before there is a model
        self._membership.note_change("checkpoints")
        extras = {**(extras or {}), **({"best": best} if best else {})}
        self._membership.script_extras = (*extras,)
        self._training.extras = {**extras, **self._session_states()}
        self._training.identity = {name: str(value) for name, value in (identity or {}).items()}
        self._training.model_config = describes or {}
        return self._checkpoints.open(str(every), keep, resume, best, stop_when_full, copies)

    def _session_states(self) -> dict[str, Stateful]:
        trial = self._loop.bucket_trial
        states: dict[str, Stateful] = {"metrics": self._journal, "shares": self._division}
        return states if trial is None else {**states, "overlap": trial}

    def once(self, folder: Path, make: Callable[[Path], None]) -> None:
        """Makes ``folder`` if it is missing: once for each disk, while the other ranks wait.

        It may be called during training: if the rank that makes the folder is lost, another one
        with the same disk makes it.

        Args:
            folder: Folder that exists afterwards on every rank.
            make: Fills the empty folder that it is given.
        """
        with self._membership.without_newcomers():  # a newcomer makes it by itself
            super().once(folder, make)

    # -- the training --------------------------------------------------------------------

    def epochs(
        self, loader: Loader, epochs: int = 1, steps: int = 0, *, every: int = 0
    ) -> Iterator[int]:
        """Yields the numbers of the epochs that remain.

        Args:
            loader: The training loader; iterate over it to its end once for each number. Leaving
                both loops ends the training early.
            epochs: Passes over the data.
            steps: Global steps after which the training ends instead.
            every: Global steps after which the number of the running epoch is yielded again, for
                an evaluation in between; 0: never.

        Raises:
            SettingError: The first argument is not a loader of :meth:`loader`; or the loop over its
                batches was left (``break``) or skipped in the middle of an epoch, and the loop over
                the epochs continues.
        """
        if not isinstance(loader, Loader):
            raise SettingError(
                "session.epochs takes a loader first",
                found=f"it was given {loader!r}",
                remedy="session.epochs(loader, epochs), where loader = session.loader(…)",
            )
        loader.pause_interval = every
        if not self._training.extras:
            self._training.extras = self._session_states()
        self._loop.begin(loader, epochs, steps)
        yield from self._loop.epochs(loader)

    def stop(self, why: str) -> None:
        """Ends the training after this step; call it on every rank in the same step."""
        self.progress.steps = self.progress.step
        self.say(f"stopped after step {self.progress.step}: {why}")
        self.event("stopped early", step=self.progress.step, why=why)

    def step(self, losses: Tensor | Mapping[str, Tensor], **values: Tensor) -> bool:
        """Runs the backward pass of the last batch, and the update after the batch's last part.

        The gradient is that of the mean over the global batch, whatever the sizes of the
        ranks' shares.

        Args:
            losses: One loss for each sample (preferred), or the mean over the batch, but not the
                sum. For several models, their losses by name: all gradients are computed, then all
                are updated. A model that is left out stays as it is.
            values: Further per-sample values to average in the log, shape ``[n]``.

        Returns:
            True when the optimizer has stepped. False for other parts of a batch, and for a batch
            that does not count because a rank was lost: the loader gives its samples again.

        Raises:
            ValueError: The losses are neither a mean nor one for each sample, or no model has this
                name.
        """
        return self._loop.run_step(losses, values)

    def update(self, name: str, losses: Tensor, **values: Tensor) -> None:
        """Updates one of several models immediately, within a step that :meth:`step` ends.

        The next loss is then computed with the new weights, as for a discriminator that is updated
        before the generator. It may be called several times in a step; the last values are
        recorded.

        Args:
            name: Name of the model.
            losses: Losses as for :meth:`step`.
            values: Further values as for :meth:`step`.

        Raises:
            RuntimeError: The batch comes in parts (``limit``), and the next part would be computed
                with other weights.
        """
        self._loop.steps.update(name, losses, values)

    @property
    def stop_requested(self) -> bool:
        """Whether this rank was asked to stop, as by Ctrl-C; other ranks may not know it yet.

        Then end work that takes long, in an evaluation for example: the session saves and stops
        at the next batch or step. Needs :meth:`checkpoints`.
        """
        return self._checkpoints.stop_requested

    # -- records and the trained model ---------------------------------------------------

    def log(self, split: str, **values: Any) -> None:
        """Records values for the present step and prints them, once for the job.

        The first line in each epoch also shows the means of the training since the last such line.
        """
        self._journal.log(split, values)
        self._callbacks.call(Callback.evaluated, split, values)

    def verify(self) -> None:
        """Checks that parameters and buffers, also sharded ones, are bit-identical on all ranks.

        Batch statistics, which every rank collects from its own share, are set to those of rank 0.

        Raises:
            JobError: Names rank, host and the first tensor that differs.
        """
        self._membership.verify()

    def save_model(self, config: dict[str, Any], *, name: str = "", average: bool = False) -> None:
        """Saves the trained weights and their description in the run directory, once.

        Args:
            config: JSON values that are needed to build the model again and to use it.
            name: Saves only this one of several models; otherwise all in one file, each tensor
                under the name of its model.
            average: Saves averaged weights of models that have an average (:meth:`average`).
        """
        self.phase("save the model")
        self.verify()
        module = self.models[name].module if name else self.models.module
        with self.models.averaged([name] if name else []) if average else nullcontext():
            state = parallel.full_state(module)
            warning = self.comms.by_first(lambda: self._write_model(state, config))
        if warning:
            self.say(warning)

    def _write_model(self, state: dict[str, Tensor], config: dict[str, Any]) -> str:
        """Saves the model as rank 0; returns a warning if it had to use another folder."""
        self.follow()
        folder, warning = weights.save_model(self.folder, state, config), ""
        details = {"step": self.progress.step, "sha256": weights.load_config(folder)["sha256"]}
        if folder != self.folder:
            details["folder"] = str(folder)
            self.event("model kept elsewhere", folder=str(folder))
            warning = (
                f"warning: the disk of {self.folder} on {self.world.host} is full: "
                f"the trained model is in {folder} there"
            )
        self.event("model saved", **details)
        return warning

    # -- the end -------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the session: writes what is pending and destroys the process group."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After a failure the other ranks may be inside a collective.
        is_orderly = error is None or isinstance(error, (Stopped, QuietExit))
        recovery = self._membership.recovery
        if is_orderly and not (recovery is not None and recovery.alone):
            self.follow()  # the last evaluation may have lost the first rank
        self._checkpoints.close(failed=not is_orderly)
        if is_orderly and recovery is not None:
            self.event("session closed")  # no rank can replace this one from here on
        self._journal.close(None if is_orderly else error)
        if is_orderly:
            self.models.close()
        if is_orderly and self.leaves_group:  # after a failure the process's end tells the others
            destroy_process_group()
