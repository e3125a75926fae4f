"""The session: one object through which a script trains as a member of its job."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.spec import rundir
from paceline.spec.errors import JobError, SettingError
from paceline.spec.failure import NEWCOMER_DIVERGED
from paceline.spec.training.balance import validate_limits
from paceline.spec.training.communication import validate, validate_overlap
from paceline.train import device as devices
from paceline.train import parallel, report, weights, world
from paceline.train.average import Average
from paceline.train.callbacks import Callback, Callbacks
from paceline.train.checkpoints.capture import Stateful, Training
from paceline.train.checkpoints.handover import give, give_models
from paceline.train.checkpoints.keeper import Keeper, policy
from paceline.train.checkpoints.store import Store
from paceline.train.comms import Comms
from paceline.train.data.division import LOOKS, Division, needs_two, wished
from paceline.train.data.fetch import Collate, Data, Fetch, allowed, loader_workers, order_of
from paceline.train.data.loader import Batch, Loader, Shard, check_limit
from paceline.train.data.order import Stated, by_length, stated
from paceline.train.data.shards import ShardedDataset
from paceline.train.data.worker_signals import protect_data_workers
from paceline.train.elastic.committed import Counted
from paceline.train.elastic.newcomer import (
    AFTER,
    LATER,
    SOURCES,
    Recording,
    Replay,
    line_of_script,
    source_of,
    sources,
)
from paceline.train.elastic.recovery import Control, Exchanged, Recovery
from paceline.train.elastic.replica_check import Proof
from paceline.train.measure.pace import Look, Pace, counted
from paceline.train.measure.probe import Probe, asked
from paceline.train.measure.straggler_reporter import Lookout
from paceline.train.measure.usage import Usage
from paceline.train.measure.watch import Watch
from paceline.train.member import Member
from paceline.train.metrics import Best
from paceline.train.models import ALONE, Models
from paceline.train.reduce import choice
from paceline.train.reduce.bucket_size import Overlap
from paceline.train.reduce.choice import Communication
from paceline.train.reduce.exchange import Exchange
from paceline.train.stop import Poll, Quietly, Stopped, leave
from paceline.train.update import Updater, each_loss, loss_of

T = TypeVar("T")
_ALIKE = 3  # steps in which a newcomer is compared with those to which it has come


class Session(Member):
    """A process's part in a training job. Made by :func:`join`.

    Attributes:
        models: What :meth:`prepare` was given.
        leaves_group: The process group was made by :func:`join` and ends with the session.
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
        self.leaves_group = True
        self._seed, self._log_every, self._check_every = seed, log_every, check_every
        self.models = Models()
        self._proof: Proof | None = None
        self._pace = Pace(self.comms, self.models.module, self.device)
        self._lookout = Lookout(self)
        self._recovery: Recovery | None = None
        self._control: Control | None = None
        self._start: Recording | Replay | None = None
        self._kept: Training | None = None  # what a checkpoint and a newcomer get
        self._poll: Poll | None = None  # where no checkpoints are made
        self._begun = 0  # calls of `epochs`
        self._within: dict[str, str] = {}  # the present one
        self._line = ""  # of the script, where it is
        self._sources: dict[str, str] = {}  # hashes of its files, by module
        self._aside = False  # the script has another loader beside that of `epochs`
        self._repeated = 0  # updates within the step, on this pass over its batch
        self._earlier: dict[str, Tensor] = {}  # what was measured in those that count
        self._overlap: Overlap | None = None
        self._extras: tuple[str, ...] = ()  # of the script, by name
        self._given: tuple[Counted, dict[str, Any], int, dict[str, list[str]]] | None = None
        self._newcomers: dict[int, int] = {}  # by slot, the step until which they are compared
        self._new_until = 0  # the same of this process, if it is one
        self._division = Division(self.comms, self._journal, self.progress)
        self._loader: Loader | None = None
        self._keeper: Keeper | None = None
        self._best: Best | None = None
        self._measured: dict[str, Tensor] = {}  # in the running step, by name
        self._callbacks = Callbacks(self, lambda: self._pace.own_work())
        self._watch = Watch(self._journal.record)
        wanted = asked(os.environ)
        self._probe = None if wanted is None else Probe(wanted, self, self.models)

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
        """Makes the model train as one over all ranks and proves that all start equal.

        To be called once for each of several models.

        Args:
            module: Already on :attr:`device` (see :meth:`place`), with the optimizer over its
                parameters.
            optimizer: Stepped by :meth:`step`.
            schedule: Advanced once for each global step.
            clip_norm: Largest norm of the whole gradient.
            compile: Compiles what is returned with ``torch.compile``.
            unused: Some steps leave parameters without gradient (branches, frozen parts that
                still require one); DDP then looks for them at every step, which costs time.
            communication: How gradients are averaged over the ranks: ``exact``, ``fp16``, ``bf16``,
                ``int8``, ``int4``, ``local``, or ``auto``, which measures and chooses. With
                ``local`` ranks have the same model at evaluations, checkpoints and ends of epochs,
                and different ones between.
            overlap: With ``auto`` two ranks on CPUs try some sizes of gradient buckets in their
                first steps, and keep the quickest. With ``backward`` the sizes stay.
            name: Of one of several models: in losses, records and checkpoints.

        Returns:
            What to call in the training loop. Evaluate and save with ``module`` itself.

        Raises:
            SettingError: There is no such way to communicate or to overlap, or not for this model;
                its gradients are sparse or complex.
        """
        self.phase("start")
        self._changes("prepare")
        if communication != "exact" and self.comms.mixed:
            raise SettingError(
                f"--communication {communication} needs ranks on one kind of device",
                found="some of this job's ranks have an accelerator and others have none",
                remedy="--communication exact, or --device cpu",
            )
        scaler = self.precision.scaler(self.device)
        choice.check(
            communication,
            sharded=parallel.is_sharded(module),
            name=name,
            scaled=scaler is not None,
        )
        validate_overlap(overlap)
        self._overlap = None
        self.models.leave(name)
        updater = Updater(module, optimizer, schedule, scaler, clip_norm)
        self.models.add(name, updater)
        if not self.comms.alone:
            if not parallel.is_sharded(module):
                parallel.check_dense(module)
                parallel.check_held(module, optimizer)
                replica = parallel.replicated(
                    module, self.device, self.comms, unused=unused, apart=bool(name)
                )
                replica.recovery = self._recovery
                updater.model, updater.exchange = replica, Exchange(replica, self.comms)
                updater.communication = Communication(
                    communication, updater.exchange, self.comms, optimizer
                )
            self._proof = Proof(self.comms, self.models.module)
        tries = overlap == "auto" and not (name or compile or self._probe)
        if updater.exchange is not None and tries:
            self._overlap = Overlap(updater.exchange, self.comms)
        self.verify()
        self._pace = Pace(self.comms, self.models.first.model, self.device)
        self._lookout = Lookout(self)
        devices.seed_all(self._seed + 1 + self.world.rank)
        about = {"model": name} if name else {}
        self.event("prepared", parameters=sum(p.numel() for p in module.parameters()), **about)
        self._mark("prepare")
        model = updater.model
        return torch.compile(model) if compile else model  # type: ignore[return-value]

    def average(self, decay: float = 0.999, *, start: int = 0, name: str = "") -> Average:
        """Keeps a moving average (EMA) of a model's weights from now on, as checkpoints do.

        To be called after :meth:`prepare` and before :meth:`checkpoints`. Evaluate with it inside
        ``with average.applied():``; :meth:`save_model` writes it where it is asked to.

        Args:
            decay: From 0 to below 1; 0.999 remembers about the last thousand updates.
            start: Updates of the model after which averaging begins.
            name: Of one of several models.

        Raises:
            SettingError: A value that cannot be.
        """
        updater = self.models[name]
        self._changes("average")
        if updater.communication is not None:
            validate(updater.communication.asked.name, averaged=True)
        updater.average = Average(updater.module, self.comms, decay, start, self._settle)
        return updater.average

    def averaged(self) -> AbstractContextManager[None]:
        """Within it every model that has an average has its averaged weights; on every rank."""
        return self.models.averaged()

    def add(self, callback: Callback) -> None:
        """Has the callback's methods called at their moments; on every rank alike."""
        self._callbacks.add(callback)

    def watch(self, every: int = 0, *, devices: bool = False) -> None:
        """Records more than losses, in ``metrics.jsonl`` and for the trackers.

        Args:
            every: Steps between two looks at the norms of gradients and weights and at the part
                of the weights that a step changes (split ``norms``); 0: none. Such a step needs
                memory for another copy of the parameters.
            devices: With each record of the training the load and memory of processes, hosts and
                accelerators (split ``usage``).
        """
        self._watch.every = every
        self._watch.usage = Usage(self.comms) if devices else None

    def _settle(self) -> None:
        if self._keeper is not None:
            self._keeper.settle()

    def loader(
        self,
        data: Data,
        global_batch: int,
        *,
        shuffle: bool = True,
        order: Stated | None = None,
        lengths: Sequence[int] | None = None,
        limit: int | Mapping[str, int] = 0,
        workers: int | None = None,
        collate: Collate | None = None,
        balance: str | Mapping[str, float] = "even",
        drop_slow: bool = False,
    ) -> Loader:
        """Batches for training: each rank's share of every global batch of ``global_batch``.

        Args:
            data: A data set that makes batches, a ``ShardedDataset``, a ``TensorDataset`` or any
                map-style data set.
            global_batch: Samples of one optimizer step over all ranks.
            shuffle: A new order for each epoch, from the seed.
            order: Gives the sample ids of an epoch, by its number, instead; the same on every
                rank. As many as there are samples; some may be repeated and others left out.
            lengths: Of each sample: batches are then made of samples of similar length.
            limit: Most samples that one rank computes at once, or that by host (ranks of other
                hosts have no limit); gradients of more are accumulated without communication.
                :func:`paceline.train.fit_batch` finds for each rank what fits into its memory.
            workers: Processes that make samples of a map-style data set; found out from the CPUs
                that are really free for it.
            collate: Makes a batch of a list of samples, as a ``DataLoader``'s ``collate_fn`` does.
            balance: How much of each batch a rank gets: ``"even"``; ``"auto"``, in proportion to
                what it manages, measured while training; or a weight for each host, which its
                ranks share, as a mapping or as ``--balance`` has it (``"n1=3,n2=1"``). Whatever it
                is, the order of samples and the gradient stay.
            drop_slow: With ``"auto"``, a rank without which steps would be faster gets nothing.

        Raises:
            DataError: There are more ranks than samples.
            SettingError: This is no data set with numbered samples; ``order`` gives no such ids;
                there is not one length for each sample; ``balance`` or ``limit`` name no hosts of
                the job.
            JobError: ``order`` is not the same on every rank.
        """
        if workers is None:
            workers = loader_workers(allowed(), self.world.local_size)
        if isinstance(data, ShardedDataset):
            self.agree("the data set", data.fingerprint)
        visited = order_of(data, self._seed, shuffle)
        if order is not None:
            visited = stated(visited, order)
            digest = hashlib.sha256(self.together(lambda: visited.epoch(0)).tobytes()).hexdigest()
            self.agree("the order of the samples", digest)
        elif lengths is not None:
            visited = by_length(visited, lengths, global_batch)
        check_limit(limit)
        wish = wished(balance)
        if self._probe is not None:  # hosts are tried alone, too
            wish, drop_slow = self._probe.shared_by(wish), False
        self._division.check(wish, drop_slow, global_batch)
        loader = (self._probe.loader if self._probe else Loader)(
            Fetch(data, self.device, workers, collate),
            visited,
            self._place,
            global_batch,
            limit if isinstance(limit, int) else self._own_limit(limit),
            self.progress,
            self.models.unsynced,
        )
        loader.same_limit = isinstance(limit, int)
        loader.balance, loader.drop_slow = wish, drop_slow
        loader.begun = self._iterates
        return loader

    def _own_limit(self, limits: Mapping[str, int]) -> int:
        """This rank's, of limits by host; a collective."""
        probes = self._probe is not None  # hosts are tried alone, too
        hosts = [*limits] if probes else self.world.hosts or self.comms.texts(self.world.host)
        validate_limits(limits, hosts)
        return limits.get(self.world.host, 0)

    def shard(self, data: Data, size: int = 512, *, collate: Collate | None = None) -> Shard:
        """This rank's share of every sample exactly once, for evaluation.

        In their stored order, every time anew: it may be made once and used in every epoch.

        Args:
            data: As for :meth:`loader`.
            size: Most samples of a batch.
            collate: Makes a batch of a list of samples.
        """
        fetch = Fetch(data, self.device, collate=collate)
        looks = self.progress, self._look_up, lambda: self._division.shares
        recovery = self._recovery
        if recovery is None:
            return Shard(fetch, len(data), self._place, size, *looks)
        meet = self._met if recovery.able or not recovery.told else None
        return Shard(fetch, len(data), self._place, size, *looks, slot=recovery.slot, meet=meet)

    def _met(self) -> Sequence[int]:
        """The slots of all ranks that are there, in rank order; a collective."""
        assert self._recovery is not None
        rows = self.comms.rows(torch.tensor([self._recovery.slot]))
        return [int(one) for one in rows[:, 0]]

    def _place(self) -> tuple[int, int]:
        """Rank and number of ranks among which data are divided: the same group on every rank."""
        place = self.world if self._recovery is None else self._recovery.place
        return place.rank, place.size

    def _look_up(self) -> None:
        """In an evaluation, too, ranks live and may be asked to save or to stop."""
        self.phase("evaluate")
        if self._keeper is not None:
            self._keeper.look_up()

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

        To be called after :meth:`prepare`. From then on SIGTERM and SIGUSR1 save and stop,
        SIGUSR2 saves and continues.

        Args:
            every: ``500`` steps, also as a number, ``10m``, ``epoch``, several with commas, or
                ``never``.
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
            copies: On how many other hosts each checkpoint is to be, besides rank 0's; by default
                on one where rank 0's folder is not seen by all, else on none. The variable
                PACELINE_CHECKPOINT_COPIES says it for a script that does not.

        Returns:
            True when the training was resumed from a checkpoint.

        Raises:
            SettingError: Another job writes to the run directory, or this is another training.
            DataError: The checkpoint that was asked for is not there or not intact.
        """
        if self._probe is not None:
            return False
        self._changes("checkpoints")
        extras = {**(extras or {}), **({"best": best} if best else {})}
        self._kept, self._extras = self._whole(extras), (*extras,)
        self._kept.identity = {name: str(value) for name, value in (identity or {}).items()}
        self._kept.describes = describes or {}
        keeper = Keeper(
            self._kept,
            self.comms,
            Store(self.folder / rundir.CHECKPOINTS),
            policy(str(every)),
            keep,
            self._journal.tell,
            stop_when_full=stop_when_full,
            callbacks=self._callbacks,
            copies=copies,
            door=self._recovery,
            asked_for=lambda: 0 if self._control is None else self._control.save_asked,
        )
        self._keeper, self._best = keeper, best
        if self._control is not None:
            self.event("keeps checkpoints", keep=keep)
        if self.comms.joining:  # what the others have will come from them
            keeper.join()
            self._journal.begin(0)
            self._mark("checkpoints")
            return True
        self.phase("load a checkpoint")
        with self._alone():
            loaded = keeper.open(resume)
        self._mark("checkpoints")
        self._journal.begin(-1 if loaded is None else loaded.step)
        if loaded is not None and loaded.own:
            self._journal.say_again()
        if loaded is not None:
            self.verify()
            self.say(f"resumed after step {loaded.step} from {loaded.source}")
            self.event("resumed", step=loaded.step, source=loaded.source)
        return loaded is not None

    def _whole(self, extras: Mapping[str, Stateful]) -> Training:
        """The whole training, with these states beside those of the session's own."""
        own: dict[str, Stateful] = {"metrics": self._journal, "shares": self._division}
        if self._overlap is not None:
            own["overlap"] = self._overlap
        return Training(
            self._prepared(), self.progress, self._seed, {**extras, **own}, proof=self._proof
        )

    def once(self, folder: Path, make: Callable[[Path], None]) -> None:
        """Makes ``folder`` where it is missing: once for each disk, while the others wait.

        In the training, too: when a rank is lost meanwhile, and it was to make the folder, another
        one of that disk does.

        Args:
            folder: What is to exist afterwards, on every rank.
            make: Fills the empty folder that it is given.
        """
        with self._alone():  # who comes to the others makes it by itself
            super().once(folder, make)

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

        Raises:
            SettingError: The first argument is no loader of :meth:`loader`.
        """
        if not isinstance(loader, Loader):
            raise SettingError(
                "session.epochs takes a loader first",
                found=f"it was given {loader!r}",
                remedy="session.epochs(loader, epochs), where loader = session.loader(…)",
            )
        done, self._loader, loader.every = self.progress, loader, every
        self._begun += 1
        self._line = line_of_script()
        self._within = {
            "calls of session.epochs": str(self._begun),
            "training samples": f"{loader.order.size:,} of {loader.kind}",
            "global batch": f"{loader.global_batch:,}",
        }
        if self._begun > 1:
            self._close_door(LATER)
        self._mark("epochs")
        self._recoverable(loader)
        if self._kept is not None:
            self._kept.within = self._within
        loader.arrived = lambda: self._pace.given()
        self._share(loader)
        done.steps = steps or epochs * len(loader)
        if self._probe is not None:
            done.steps = self._probe.begin(loader, epochs, steps)
        for said in self.models.begin(done.steps, done.step):
            self.say(said)
        self._journal.epochs = -(-done.steps // len(loader))
        self._log_every = self._log_every or _interval(len(loader))
        if self.comms.joining:
            self._join_others()
        begun = done.step
        if done.finished:
            self.say(
                f"nothing is left to train: step {done.step:,}, in epoch"
                f" {done.epoch + (done.offset > 0)}, is done"
                f" already, and {done.steps:,} steps ({counted(self._journal.epochs, 'epoch')})"
                " were asked for\nmore epochs or steps train it further; --resume never, or a run"
                " directory of its own, starts a new training"
            )
        while not done.finished:
            self._pace.restart(loader.waited, self._saved)
            if self._probe is not None:
                self._probe.restart(loader.waited)
            self._journal.begin_epoch()
            yield done.epoch
            done.evaluated = done.step
            self._journal.end_epoch()
            ended = done.offset >= loader.order.size
            if ended:
                self._callbacks.epoch_ended(done.epoch)
                done.epoch, done.offset = done.epoch + 1, 0
            if self._keeper is not None:
                best = self._best is not None and self._best.step == done.step
                self._keeper.after_evaluation(best, ended or done.finished)
                if not done.finished:
                    self._keeper.look_up(at_once=True)
                self._keeper.settle()
        self.verify()
        self._lookout.sum_up(self._pace, done.step - begun, loader.waited)

    def _recoverable(self, loader: Loader) -> None:
        """Says whether the training can go on without ranks that are lost, and is ready for it."""
        recovery = self._recovery
        if recovery is None:
            return
        if self._kept is None:
            self._kept, self._poll = self._whole({}), Poll(self.comms, recovery)
        loader.generation, loader.boundary = lambda: recovery.generation, recovery.renew
        loader.begins = self._begins
        if self.comms.joining:  # what the others have said of themselves holds for it, too
            return
        self._say_recoverable(recovery)

    def _say_recoverable(self, recovery: Recovery) -> None:
        why = self._lost_with_a_rank()
        if recovery.able == bool(why) or not recovery.told:
            recovery.told = True
            self.event("recoverable", able=not why, why=why)
        recovery.able = not why

    def _iterates(self, loader: Loader) -> None:
        """The script begins to take batches from a loader."""
        if loader is self._loader:
            self._go_back()
            if self.models.widen() and self._overlap is not None:
                self._overlap.again(self.progress.step)
        if loader is self._loader or self._aside or self.progress.finished:
            return
        self._aside = True
        if self._recovery is not None and self._recovery.able:
            self._say_recoverable(self._recovery)

    def _changes(self, what: str) -> None:
        """The training gets another part: late, nobody can join who starts without it."""
        if self._begun:
            self._close_door(AFTER.format(what))

    def _close_door(self, why: str) -> None:
        """Nobody can join from here on: newcomers join where the script is at its first epochs."""
        recovery = self._recovery
        if recovery is not None and not recovery.closed:
            recovery.closed = True
            self.event("door closed", why=why)

    def _begins(self) -> None:
        """A global batch begins, newly or again."""
        assert self._recovery is not None
        self._recovery.given()
        self._journal.mark()
        if self._recovery.able and not self.comms.alone:
            self.models.begin_batch()

    def _lost_with_a_rank(self) -> str:
        """What of the training no other rank has; empty where there is nothing."""
        if self._probe is not None:
            return "it is a few measured steps"
        if not self.leaves_group:
            return "the script has made the process group"
        on_cpus = self.device.type == "cpu" or self.comms.mixed
        if not on_cpus or (dist.is_initialized() and dist.get_backend() != "gloo"):
            return "only ranks that train on CPUs over gloo can go on without a lost one"
        if parallel.is_sharded(self.models.module):
            return "parameters are spread over the ranks (FSDP)"
        if self._aside:
            return "the script trains from two loaders at once, of which one would be divided anew"
        if any(isinstance(one, nn.SyncBatchNorm) for one in self.models.module.modules()):
            return "SyncBatchNorm has collectives of its own"
        return "" if self._start is None else self._start.why

    def heeds(self, control: Control) -> None:
        """Has this session do what the launcher tells its ranks."""
        self._control = control

    def recovers(self, recovery: Recovery, start: Recording | Replay) -> None:
        """Has this session go on without ranks that are lost."""
        self._sources = sources()
        self._recovery, self._start, self.comms.slot = recovery, start, recovery.slot
        self.comms.mender, self.comms.joining = start, isinstance(start, Replay)
        recovery.step, recovery.say = lambda: self.progress.step, self.event
        recovery.hand_over = lambda *to: give_models(self.models, *to)
        recovery.let_in, recovery.begin_anew = self._let_in, self._begin_anew
        recovery.leave_alone = self._leave_alone

    def _let_in(self, comms: Comms, source: int, takers: Sequence[int]) -> None:
        assert self._kept is not None
        give(self._kept, comms, source, takers, afresh=comms.world.rank in takers)

    def _leave_alone(self) -> NoReturn:
        """Saves what this rank has, and ends it: others are lost, and so is the launcher."""
        if self._keeper is None:
            raise RuntimeError("the launcher is gone, and other ranks with it")
        self._keeper.leave_alone()

    def _mark(self, name: str) -> None:
        """The start has come so far; of several models and trainings the first."""
        if self._start is not None:
            self._start.mark(name)

    def _alone(self) -> AbstractContextManager[object]:
        """What a newcomer does not do when it starts."""
        return nullcontext() if self._start is None else self._start.paused()

    def _join_others(self) -> None:
        """A newcomer has come to the door: it waits there until the others let it in."""
        assert self._recovery is not None
        self._check_alike()
        self.comms.mender = self._recovery
        self.event("newcomer ready")
        self._recovery.enter()
        self._new_until = self.progress.step + _ALIKE
        if self._keeper is not None:
            self._keeper.joined()
        self._note_given()
        self.comms.mender = self._start  # until its first batch the script is still at its start

    def _meet_newcomers(self) -> None:
        """All ranks of a new group learn who of them is new; a collective."""
        rows = self.comms.rows(torch.tensor([self.comms.slot, self._new_until])).tolist()
        self._newcomers = {slot: until for slot, until in rows if until > self.progress.step}

    def _compare_newcomers(self) -> None:
        """A newcomer that does another thing with its first gradients ends alone.

        The others are as they would be without it: no gradient of what it has made of its own was
        averaged yet.

        Raises:
            JobError: On that newcomer.
        """
        slot = self.comms.slot
        if slot is None or self._proof is None or self.comms.mixed or self.models.parted:
            return
        if wrong := self._proof.astray(slot, self._newcomers):
            raise JobError(
                NEWCOMER_DIVERGED,
                found=f"after step {self.progress.step} {wrong} is not what it is there",
                remedy="a counter of the script's own (of enumerate, of a warm-up) begins anew in"
                " the process that comes for a lost one: go by session.progress.step",
            )

    def _note_given(self) -> None:
        """A newcomer has the others' state, of which its script knows nothing yet.

        They have done what the script does before an epoch's first batch; it does that once more.
        """
        assert self._kept is not None
        models = Counted(self.models)
        models.note()
        kept = {name: self._kept.extras[name].state_dict() for name in self._extras}
        self._given = models, copy.deepcopy(kept), self.progress.steps, self.models.switches

    def _go_back(self) -> None:
        """The first batch begins: a newcomer has again what it was given."""
        if self._given is None:
            return
        assert self._kept is not None
        models, kept, self.progress.steps, self.models.switches = self._given
        self._given = None
        models.go_back()
        for name, state in kept.items():
            self._kept.extras[name].load_state_dict(state)

    def _check_alike(self) -> None:
        """A newcomer with another training ends alone."""
        assert isinstance(self._start, Replay)
        theirs, mine = {**self._start.about.get("training", {})}, self._about()
        files, own = (json.loads(one.pop(SOURCES, "{}")) for one in (theirs, mine))
        for name, file in files.items():
            # It may import it later; and each rank may have modules that others have not.
            found = own.get(name) or source_of(name)
            if found is not None:
                theirs[f"source of {name}"], mine[f"source of {name}"] = file, found
        wrong = [name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name)]
        if wrong:
            raise SettingError(
                "this process runs another training than the ranks that it comes to",
                found="\n".join(
                    f"{name}: {theirs.get(name, 'nothing')} there, {mine.get(name, 'nothing')} here"
                    for name in sorted(wrong)
                ),
                remedy="give every node the same files and the same options, and leave the script's"
                " files as they are while it runs",
            )

    def _about(self) -> dict[str, str]:
        """What must be the same for a process to join."""
        assert self._kept is not None
        shapes = [[name, str(p.dtype), [*p.shape]] for name, p in self._tensors()]
        digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]
        own = {"seed": str(self._seed), "model": digest, "session.epochs called in": self._line}
        files = {SOURCES: json.dumps({**sources(), **self._sources})}  # as each was at first
        return {**own, **files, **self._within, **self._kept.identity}

    def _tensors(self) -> list[tuple[str, Tensor]]:
        module = self.models.module
        return [*module.named_parameters(), *module.named_buffers()]

    def _started(self) -> None:
        """The start is over: what it was is left for newcomers, by one rank."""
        assert self._start is not None
        assert self._recovery is not None
        self.comms.mender, self.comms.joining = self._recovery, False
        recovery = self._recovery
        if self._start.why and recovery.able:
            self._close_door(self._start.why)
        if recovery.able and not recovery.closed and self.world.rank == 0:
            self._start.leave(recovery.store, training=self._about())

    def _begin_anew(self) -> None:
        """In a new group of ranks: whatever is made for as many as there were."""
        self._started()
        assert self._recovery is not None
        apart = self.models.at_stake if self._recovery.fewer else 0
        self.models.renew()
        self._meet_newcomers()
        if self._overlap is not None:
            self._overlap.again(self.progress.step)
        self._pace.renew()
        self._lookout.renew()
        self._division.renew(self.models)
        if self._proof is not None:
            self._proof.align()
        if self._keeper is not None:
            self._keeper.renew()
        if self._poll is not None:
            self._poll = Poll(self.comms, self._recovery)
        self._follow()
        if apart:
            self.say(
                "communication: what a lost rank had learnt since all last met is lost with it,"
                f" {counted(apart, 'step')} at most"
            )

    def _follow(self) -> None:
        """Has the rank that is first now speak for the job and keep its files; no collective."""
        self._journal.follow()
        self._keep_on()

    def _share(self, loader: Loader) -> None:
        """Has the loader's batches shared as it was asked to."""
        division, wish = self._division, loader.balance
        division.begin(wish, loader.drop_slow, loader.global_batch, self.models)
        if not self.comms.joining:  # who joins goes by what fits there
            limits = division.fitted(loader.fits)
            loader.limit = limits[self.world.rank] if limits else loader.limit
        loader.shares = lambda: division.shares
        sharded = parallel.is_sharded(self.models.module)
        if sharded and not loader.same_limit:
            raise SettingError(
                "a limit for each host does not go with a sharded model",
                found="its ranks meet in every layer, so all have as many passes as the others",
                remedy="--micro-batch N, the same on all hosts, or leave --shard out",
            )
        even = wish == "even" and loader.same_limit
        loader.alike = lambda: even or sharded
        loader.idle = self._idle if loader.drop_slow else None
        if isinstance(model := self.models.first.model, parallel.Replica):
            model.some_idle = lambda: division.some_idle
        loader.room = lambda: devices.room(self.device)
        loader.least = 2 if needs_two(self.models.module) else 1
        if division.follows:
            self._pace.most = LOOKS

    def stop(self, why: str) -> None:
        """Ends the training after this step; every rank must say so in the same step."""
        self.progress.steps = self.progress.step
        self.say(f"stopped after step {self.progress.step}: {why}")
        self.event("stopped early", step=self.progress.step, why=why)

    def step(self, losses: Tensor | Mapping[str, Tensor], **values: Tensor) -> bool:
        """Backward for the batch that the loader gave last; after its last part, the update.

        The gradient is that of the mean over the global batch, whatever the sizes of the
        ranks' shares.

        Args:
            losses: One loss for each sample (preferred), or the mean over the batch. Of several
                models each one's, by its name: all gradients are computed, then all are updated.
                A model that is left out stays as it is.
            values: Further per-sample values to be averaged in the log, shape ``[n]``.

        Returns:
            True when the optimizer has stepped. False also for a batch that does not count, as a
            rank was lost before all had its gradients: the loader gives the same samples again.

        Raises:
            ValueError: There is neither one loss nor one for each sample; no model has this name.
        """
        if self._loader is None:
            raise RuntimeError("session.step was called without a new batch from the loader")
        batch = self._loader.take()
        named = losses if isinstance(losses, Mapping) else {ALONE: losses}
        exchanged = self._backward(batch, named)
        measured, self._measured = self._measured, {}
        if exchanged is Exchanged.VOID:
            self._drop()
            return False
        self._pace.took(batch.count, batch.data)
        self._journal.measure(batch.count, **{**measured, **values})
        if len(missed := self._earlier.keys() - measured.keys()):
            self._journal.measure_others(**{name: self._earlier[name] for name in missed})
        if batch.last:
            if exchanged is Exchanged.TAKEN:
                self.models.drop(counted=True)
            else:
                for name in named:
                    self._update(name)
            self._count()
            self._advance(batch, self._loader)
        return batch.last

    def update(self, name: str, losses: Tensor, **values: Tensor) -> None:
        """Updates one of several models at once, within a step that :meth:`step` ends.

        So the next loss is computed with its new weights: a discriminator's update comes before
        the generator's loss. May be called several times in a step; the last values are recorded.

        Args:
            name: Of the model.
            losses: As for :meth:`step`.
            values: As for :meth:`step`.

        Raises:
            RuntimeError: The batch comes in pieces (``limit``): the other pieces would be computed
                with other weights.
        """
        if self._loader is None or not (batch := self._loader.given()).last:
            raise RuntimeError(
                "session.update needs a whole batch, and this one comes in pieces (limit=… of"
                " session.loader, or a share beyond this rank's memory): give session.step the"
                " losses of all models together"
            )
        self._repeated += 1
        figure, done = self._prepared().figures("loss")[name], self.progress
        if self._repeated <= done.updated:  # done when the same samples were given before
            for one in (figure, *values):  # a newcomer has measured nothing of it
                self._earlier.setdefault(one, torch.empty(0, device=self.device))
            self.models.skip()
            return
        exchanged = self._backward(batch, {name: losses})
        self._measured.update(values)
        if exchanged is Exchanged.DONE:
            self._update(name)
        if exchanged is Exchanged.TAKEN:
            self.models.drop(counted=True)
        if exchanged is not Exchanged.VOID:
            self._count()
            done.updated += 1
            real = 0 if done.stand_in else batch.count
            of_it = {one: self._measured[one] for one in (figure, *values)}
            self._earlier |= {one: value.detach()[:real] for one, value in of_it.items()}

    def _count(self) -> None:
        """The models are what this step made of them: what follows is done by each rank itself."""
        recovery = self._recovery
        if recovery is not None and recovery.able and not self.comms.alone:
            self.models.note()

    def _update(self, name: str) -> None:
        due = self._watch.due(self.progress.step + 1)
        self._watch.take(name, self.models[name].update(measured=due))
        if self._recovery is not None:
            self._recovery.updates += 1

    def _backward(self, batch: Batch, losses: Mapping[str, Tensor]) -> Exchanged:
        """Adds each model's gradient, and notes the losses."""
        said, recovery = self._prepared().figures("loss"), self._recovery
        for number, (name, given) in enumerate(losses.items(), 1):
            communication = self.models[name].communication  # an unknown one is refused
            parted = communication is not None and communication.parted
            # In a new group nothing is exchanged before all have begun anew in it. A rank that took
            # the models of another after the first of several updates has its batch still.
            if recovery is not None and (recovery.void or (recovery.stale and not parted)):
                return Exchanged.VOID
            each = each_loss(given, len(batch.ids))
            loss = loss_of(each, batch, self._place()[1])  # among whom it was divided
            if batch.last:
                self._pace.before_backward(loss, self.progress.step)
            try:
                with nullcontext() if recovery is None else recovery.talk:
                    self.models.backward(name, loss, last=batch.last, again=number < len(losses))
            except RuntimeError as error:
                if recovery is None:
                    raise
                if (found := recovery.failed(error)) is not Exchanged.DONE:
                    self._measured[said[name]] = each
                    return found
            else:
                if batch.last and recovery is not None and not parted:
                    recovery.exchanged()
            if communication is not None and parted and batch.last and self.comms.stale:
                communication.step_apart()
            self._pace.after_backward()
            self._measured[said[name]] = each
        return Exchanged.DONE

    def _drop(self) -> None:
        """The batch does not count: a rank was lost before all had its gradients."""
        assert self._loader is not None
        self._repeated = 0
        self.models.take_back()
        self._journal.take_back()
        self._loader.void()

    def _idle(self, batch: Batch) -> None:
        """This rank's part of a step in which it has nothing to compute: gradients of zero."""
        updater = self.models[ALONE]
        if self._loader is None or not isinstance(updater.model, parallel.Replica):
            raise RuntimeError("a rank can only be idle in the training of a single model")
        loss = updater.model.touched()
        exchanged = self._backward(replace(batch, ids=np.zeros(1, dtype=np.int64)), {ALONE: loss})
        self._measured = {}
        if exchanged is Exchanged.VOID:
            self._drop()
            return
        if exchanged is Exchanged.TAKEN:
            self.models.drop(counted=True)
        else:
            self._update(ALONE)
        self._count()
        self._advance(batch, self._loader)

    def _prepared(self) -> Models:
        """The models; RuntimeError before there is one."""
        _ = self.models.first
        return self.models

    def _advance(self, batch: Batch, loader: Loader) -> None:
        """After a global step: counts it, and does what is due."""
        done = self.progress
        done.step, done.offset = done.step + 1, batch.stop
        done.updated = self._repeated = 0
        self._earlier = {}
        if self._recovery is not None:
            self._recovery.finished()
        self.models.stepped(done.step)
        look = self._pace.step(batch.total, loader.waited, self._saved)
        if (only := self._prepared().first.communication) is not None:
            only.computed(self._pace.computed)
        if look is not None:
            self._lookout.take(look)
            self._journal.pace(look.told)
            self._hide(look)
            self._communicate(look)
            self._division.look(look, done.step)
        if self._probe is not None:
            self._probe.stepped(batch.total, loader.waited, self._pace.computed())
        if self._proof is not None:
            self._proof.stepped()
        if done.step <= max(self._newcomers.values(), default=-1):
            self._compare_newcomers()
        self._watch.stepped()
        self._callbacks.after_step(done.step)
        ended = done.finished or done.offset == loader.order.size
        if ended or done.step % self._log_every == 0:
            self._record()
        if done.step % self._check_every == 0:
            self.verify()
        self._journal.stepped(self._pace.rate.value)
        if self._start is not None and self.comms.mender is self._start:
            self._started()
        if self._keeper is not None:
            pauses = not done.finished and (ended or loader.pauses())
            self._keeper.after_step(before_pause=pauses)
        elif self._poll is not None and self._poll.due():
            self._poll.ask()
        self._pace.leave(self._saved)
        if ended or loader.pauses():  # the script may evaluate now, or change the model
            self.models.together()
            self._pace.rate.pause()
            if self._proof is not None:
                self._proof.align()
            if self._keeper is not None:
                self._keeper.settle()

    def _communicate(self, look: Look) -> None:
        """Has ways to send less thought of; of several models none is."""
        only = self.models.first.communication
        hiding, several = self._overlap, len([*self.models]) > 1
        if only is None or several or (hiding is not None and not hiding.done and only.settled):
            return  # what is exposed will be less
        if said := only.looked(look):
            self.say(said)
            self.event("communication", step=self.progress.step, text=said)
            if hiding is not None and only.since is not None:
                hiding.again(only.since)
                self._hide(look)

    def _hide(self, look: Look) -> None:
        """Has ways to hide the exchange of gradients tried."""
        only = self.models.first.communication
        if self._overlap is None or (only is not None and not only.settled):
            return
        first = 0 if only is None else only.first
        if self._overlap.looked(look, self.progress.step, first):
            self.event("overlap settled", step=self.progress.step, **self._overlap.about())

    @property
    def _saved(self) -> float:
        """Seconds in which checkpoints held this rank up."""
        return 0.0 if self._keeper is None else self._keeper.seconds

    def _record(self) -> None:
        """Records the training since the last record; one that has diverged ends on every rank."""
        models, speed = self._prepared(), round(self._pace.rate.measure(), 1)
        names = list(models.figures("loss").values())
        means = self._journal.record_training(names, **models.lrs, samples_per_s=speed)
        if figures := self._pace.figures():
            self._journal.record("pace", figures)
        self._watch.recorded()
        models.check(means, self.progress.step)

    # -- what is said and saved ----------------------------------------------------------

    def log(self, split: str, **values: Any) -> None:
        """Records values under the present step and shows them, once for the job.

        The first line in each epoch also has the means of the training since its last one.
        """
        self._journal.log(split, values)
        self._callbacks.evaluated(split, values)

    def verify(self) -> None:
        """Proves that parameters and buffers are bit-identical on all ranks.

        Also those of sharded models, as each rank puts them together. Batch statistics, which
        every rank gathers from its own share, are made those of rank 0.

        Raises:
            JobError: Names rank, host and the first tensor that differs.
        """
        if self.comms.joining:
            return
        self.models.together()
        if self._proof is not None:
            with self._alone():
                self._proof.verify()

    def save_model(self, config: dict[str, Any], *, name: str = "", average: bool = False) -> None:
        """Saves the trained weights and their description in the run directory, once.

        Args:
            config: What is needed to build the model again and to use it; JSON values.
            name: Only this one of several models; otherwise all, in one file, each tensor under
                the name of its model.
            average: The averaged weights, of models that have an average (:meth:`average`).
        """
        self.phase("save the model")
        self.verify()
        module = self.models[name].module if name else self.models.module
        with self.models.averaged([name] if name else []) if average else nullcontext():
            state = parallel.whole_state(module)
            warning = self.comms.by_first(lambda: self._write_model(state, config))
        if warning:
            self.say(warning)

    def _write_model(self, state: dict[str, Tensor], config: dict[str, Any]) -> str:
        """Saves the model as rank 0, and tells so; a warning where it is not in its place."""
        self._follow()
        kept, warning = weights.save_model(self.folder, state, config), ""
        about = {"step": self.progress.step, "sha256": weights.load_config(kept)["sha256"]}
        if kept != self.folder:
            about["folder"] = str(kept)
            self.event("model kept elsewhere", folder=str(kept))
            warning = (
                f"warning: the disk of {self.folder} on {self.world.host} is full: "
                f"the trained model is in {kept} there"
            )
        self.event("model saved", **about)
        return warning

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
        # Then all ranks end together. After a failure the others may be inside a collective.
        agreed = error is None or isinstance(error, (Stopped, Quietly))
        alone = self._recovery is not None and self._recovery.alone
        if agreed and not alone:  # the last evaluation may have lost the first rank
            self._follow()
        if self._keeper is not None:
            self._keeper.close(failed=not agreed)
        if agreed and self._recovery is not None:
            self.event("session closed")  # nobody can do in this rank's place what its script does
        self._journal.close(None if agreed else error)
        if agreed:
            self.models.close()
        if agreed and self.leaves_group:  # after a failure the process's end tells the others
            leave()


def _interval(steps: int) -> int:
    """Equal parts of an epoch of about 50 steps or less."""
    return -(-steps // -(-steps // 50))
