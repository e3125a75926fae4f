"""One rank's membership in the job: whether ranks may be lost, and how newcomers join."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.spec.errors import JobError, SettingError
from paceline.spec.failure import NEWCOMER_DIVERGED
from paceline.train import parallel
from paceline.train.checkpoints.capture import Training
from paceline.train.data.loader import Loader
from paceline.train.elastic import newcomer
from paceline.train.elastic.committed import CommittedModels
from paceline.train.elastic.control import Control
from paceline.train.elastic.newcomer import SOURCES, Recording, Replay
from paceline.train.elastic.recovery import Recovery
from paceline.train.member import Member

CHECKED_STEPS = 3
"""Steps in which a newcomer's parameters are compared with those of the ranks that it joined."""


class Membership:
    """Decides on one rank whether ranks may be lost, and takes part when newcomers join.

    Args:
        is_forecast: A forecast measures a few steps; there is no training.

    Attributes:
        recovery: Replaces lost ranks; ``None``: their loss ends this rank.
        start: Records the results of the start's operations, or replays them to a newcomer.
        control: Messages of the launcher; ``None`` without one.
        sources: Hashes of the script's files as they were when it began, by module.
    """

    def __init__(self, member: Member, training: Training, *, is_forecast: bool) -> None:
        self._member, self._training, self._is_forecast = member, training, is_forecast
        self.recovery: Recovery | None = None
        self.start: Recording | Replay | None = None
        self.control: Control | None = None
        self.sources: dict[str, str] = {}
        self.script_extras: tuple[str, ...] = ()
        self._trainings = 0  # calls of session.epochs
        self._script_line = ""
        self._has_two_loaders = False
        self._received: _ReceivedState | None = None
        self._newcomers: dict[int, int] = {}  # by slot, the step until which they are compared
        self._comparison_end = 0  # the same step of this process, if it is a newcomer

    def attach(self, recovery: Recovery, start: Recording | Replay) -> None:
        """Has lost ranks replaced from now on."""
        self.sources = newcomer.sources()
        self.recovery, self.start = recovery, start
        comms = self._member.comms
        comms.slot, comms.fault_handler, comms.start = recovery.slot, recovery, start
        comms.joining = isinstance(start, Replay)

    @property
    def data_place(self) -> tuple[int, int]:
        """Rank and number of ranks by which data are divided; all ranks agree on them."""
        place = self._member.world if self.recovery is None else self.recovery.place
        return place.rank, place.size

    @property
    def can_lose_ranks(self) -> bool:
        """Whether there are other ranks, and this one goes on when they are lost."""
        recovery = self.recovery
        return recovery is not None and recovery.able and not self._member.comms.is_alone

    def slots(self) -> Sequence[int]:
        """Returns the slots of all present ranks, in rank order; a collective."""
        assert self.recovery is not None
        rows = self._member.comms.rows(torch.tensor([self.recovery.slot]))
        return [int(slot) for slot in rows[:, 0]]

    def verify(self) -> None:
        """Proves that parameters and buffers are bit-identical on all ranks; see Session.verify."""
        if self._member.comms.joining:
            return
        self._training.models.synchronize()
        if self._training.checksum is not None:
            with self.without_newcomers():
                self._training.checksum.verify()

    # -- the start of the script -----------------------------------------------------------

    def mark(self, name: str) -> None:
        """Records a named point of the script's start, which a newcomer also reaches."""
        if self.start is not None:
            self.start.mark(name)

    def without_newcomers(self) -> AbstractContextManager[object]:
        """Context of operations that a newcomer skips when it starts."""
        return nullcontext() if self.start is None else self.start.paused()

    def note_change(self, method: str) -> None:
        """Closes the job to newcomers if the script changes the training after its start."""
        if self._trainings:
            self._close_joins(newcomer.LATE_CHANGE.format(method))

    def start_training(self, loader: Loader) -> None:
        """Records that the script has called ``session.epochs`` with this loader."""
        self._trainings += 1
        self._script_line = newcomer.line_of_script()
        self._training.context = {
            "calls of session.epochs": str(self._trainings),
            "training samples": f"{loader.order.size:,} of {loader.kind}",
            "global batch": f"{loader.global_batch:,}",
        }
        if self._trainings > 1:
            self._close_joins(newcomer.SECOND_TRAINING)
        self.mark("epochs")

    def start_side_loader(self) -> None:
        """Records that the script takes batches from a second loader while it trains."""
        if self._has_two_loaders or self._member.progress.finished:
            return
        self._has_two_loaders = True
        if self.recovery is not None and self.recovery.able:
            self.report_recoverable(self.recovery)

    def publish_start(self) -> None:
        """Ends the start: rank 0 publishes the recording of it in the store, for newcomers."""
        recovery, start, comms = self.recovery, self.start, self._member.comms
        assert recovery is not None
        assert start is not None
        comms.start, comms.joining = None, False
        if start.obstacle and recovery.able:
            self._close_joins(start.obstacle)
        if recovery.able and not recovery.joins_closed and comms.world.rank == 0:
            start.publish(recovery.group.store, training=self.description())

    def _close_joins(self, reason: str) -> None:
        recovery = self.recovery
        if recovery is not None and not recovery.joins_closed:
            recovery.joins_closed = True
            self._member.event("door closed", why=reason)

    # -- ranks that are lost ---------------------------------------------------------------

    def report_recoverable(self, recovery: Recovery) -> None:
        """Tells the launcher whether the training goes on without a lost rank."""
        reason = self._unrecoverable_part()
        if recovery.able == bool(reason) or not recovery.is_reported:
            recovery.is_reported = True
            self._member.event("recoverable", able=not reason, why=reason)
        recovery.able = not reason

    def _unrecoverable_part(self) -> str:
        """Returns why a lost rank cannot be replaced; empty if it can."""
        member, module = self._member, self._training.models.module
        if self._is_forecast:
            return "it is a few measured steps"
        if not member.leaves_group:
            return "the script has made the process group"
        on_cpus = member.device.type == "cpu" or member.comms.mixed
        uses_gloo = not dist.is_initialized() or dist.get_backend() == "gloo"
        if not member.comms.has_device_group and not (on_cpus and uses_gloo):
            if dist.is_initialized() and dist.get_backend() == "nccl":
                return (
                    "torch handles NCCL's errors itself: TORCH_NCCL_ASYNC_ERROR_HANDLING is not 1,"
                    " or this version of torch does not report them"
                )
            return (
                "only ranks that train on CPUs over gloo, or on GPUs over NCCL, can go on"
                " without a lost one"
            )
        if parallel.is_sharded(module):
            return "parameters are spread over the ranks (FSDP)"
        if self._has_two_loaders:
            return "the script trains from two loaders at once, of which one would be divided anew"
        if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
            return "SyncBatchNorm has collectives of its own"
        return "" if self.start is None else self.start.obstacle

    # -- ranks that join -------------------------------------------------------------------

    def join(self) -> None:
        """Waits as a newcomer until the other ranks let it in, and takes their training.

        Raises:
            SettingError: This process runs another training.
        """
        recovery, comms = self.recovery, self._member.comms
        assert recovery is not None
        self._check_training()
        comms.start = None
        self._member.event("newcomer ready")
        recovery.join()
        self._comparison_end = self._member.progress.step + CHECKED_STEPS

    def keep_received(self) -> None:
        """Keeps a copy of the state that this newcomer received, before its script continues.

        The script repeats what the other ranks have done already before an epoch's first batch;
        :meth:`restore_received` undoes that.
        """
        self._received = _ReceivedState(self._training, self.script_extras)
        # until its first batch the script is at its start
        self._member.comms.start = self.start

    def restore_received(self) -> None:
        """Restores the received state of a newcomer when its first batch begins."""
        if self._received is not None:
            received, self._received = self._received, None
            received.restore()

    def meet_newcomers(self) -> None:
        """Exchanges which ranks of a new group are newcomers; a collective."""
        comms, step = self._member.comms, self._member.progress.step
        rows = comms.rows(torch.tensor([comms.slot, self._comparison_end])).tolist()
        self._newcomers = {slot: end for slot, end in rows if end > step}

    def compare_newcomers(self) -> None:
        """Ends a newcomer whose parameters differ from the others' after one of its first steps.

        The other ranks are unharmed: no gradient of its diverged parameters was averaged yet.

        Raises:
            JobError: On that newcomer.
        """
        comms, step = self._member.comms, self._member.progress.step
        if step > max(self._newcomers.values(), default=-1):
            return
        slot, proof = comms.slot, self._training.checksum
        if slot is None or proof is None or comms.mixed or self._training.models.is_diverged:
            return
        if wrong := proof.diverged_parameter(slot, self._newcomers):
            raise JobError(
                NEWCOMER_DIVERGED,
                found=f"after step {step} {wrong} is not what it is there",
                remedy="a counter of the script's own (of enumerate, of a warm-up) begins anew in"
                " the process that comes for a lost one: go by session.progress.step",
            )

    def _check_training(self) -> None:
        assert isinstance(self.start, Replay)
        expected, actual = {**self.start.info.get("training", {})}, self.description()
        expected_files, actual_files = (
            json.loads(description.pop(SOURCES, "{}")) for description in (expected, actual)
        )
        for name, expected_hash in expected_files.items():
            # It may import it later; and each rank may have modules that others have not.
            actual_hash = actual_files.get(name) or newcomer.source_of(name)
            if actual_hash is not None:
                key = f"source of {name}"
                expected[key], actual[key] = expected_hash, actual_hash
        names = {**expected, **actual}
        differing = [name for name in names if expected.get(name) != actual.get(name)]
        if differing:
            raise SettingError(
                "this process runs another training than the ranks that it comes to",
                found="\n".join(
                    f"{name}: {expected.get(name, 'nothing')} there,"
                    f" {actual.get(name, 'nothing')} here"
                    for name in sorted(differing)
                ),
                remedy="give every node the same files and the same options, and leave the script's"
                " files as they are while it runs",
            )

    def description(self) -> dict[str, str]:
        """Returns what must be the same for a process to join, by name."""
        training = self._training
        module = training.models.module
        tensors = [*module.named_parameters(), *module.named_buffers()]
        shapes = [[name, str(tensor.dtype), [*tensor.shape]] for name, tensor in tensors]
        digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]
        return {
            "seed": str(training.seed),
            "model": digest,
            "session.epochs called in": self._script_line,
            SOURCES: json.dumps({**newcomer.sources(), **self.sources}),  # as each was at first
            **training.context,
            **training.identity,
        }


class _ReceivedState:
    """Copy of the state that a newcomer received."""

    def __init__(self, training: Training, extras: Sequence[str]) -> None:
        self._training, self._models = training, CommittedModels(training.models)
        self._models.commit()
        states: dict[str, Any] = {name: training.extras[name].state_dict() for name in extras}
        self._extras = copy.deepcopy(states)
        self._steps, self._switches = training.progress.steps, training.models.switches

    def restore(self) -> None:
        """Puts the state back; called right before the first batch."""
        training = self._training
        training.progress.steps, training.models.switches = self._steps, self._switches
        self._models.restore()
        for name, state in self._extras.items():
            training.extras[name].load_state_dict(state)
