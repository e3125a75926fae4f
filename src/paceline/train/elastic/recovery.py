"""Recovery in place: what a rank does when another one is lost.

The ranks that are left form a new group, settle how far each has come, and train on with the same
global batch (``docs/explanation/decisions/0011-recovery-by-membership-rounds.md``).

An event is an operation of :class:`paceline.train.comms.Comms`, or a whole exchange of gradients.
No rank finishes one before all ranks have come to it, so two ranks are at most one event apart, and
the number of events that each has finished settles everything:

* An operation that some rank has finished: the others take its result. Otherwise it is done again.
* An exchange that some rank has finished, so that its optimizer has stepped: the others take its
  models. Otherwise the batch is void, and the loader gives its samples again.
* A step that exchanges nothing (``local``) is no event: each rank has taken it, or takes it yet.

What must change alike on all ranks (shares, buckets, timings) changes where all have the same
events and steps behind them: before the loader gives a batch (:meth:`Recovery.renew`).
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.spec.errors import JobError
from paceline.spec.failure import SECONDARY_ERROR, unreachable_peer
from paceline.spec.schema import integer, list_of, optional, regex, tuple_of
from paceline.train.comms import TENSOR_TYPE, Comms, parse_texts
from paceline.train.elastic import waits
from paceline.train.elastic.control import Control, RegroupMessage
from paceline.train.elastic.device_group import end_process
from paceline.train.elastic.job_group import JobGroup, Superseded
from paceline.train.elastic.waits import STUCK_S, CollectiveSpan, release_waits
from paceline.train.world import World

T = TypeVar("T")


def _any(value: object, where: str) -> None:
    """Accepts any result: the caller of the operation looks at it."""


# of a tensor its shape and type, else the result itself
_RESULT = tuple_of(optional(list_of(integer(), 64)), regex(f"({TENSOR_TYPE})?", "a type"), _any)


class Activity(IntEnum):
    """What a rank was doing when it learned that another rank was lost."""

    OPERATION = 0
    EXCHANGE = 1
    FORWARD = 2
    RENEWAL = 3
    JOINING = 4


class ExchangeResult(IntEnum):
    """What became of an exchange of gradients."""

    AVERAGED = 0  # this rank has the mean
    ADOPTED = 1  # the models are those of a rank that had stepped already
    VOID = 2  # no rank has the mean


@dataclass(frozen=True, slots=True)
class Settlement:
    """What ranks have settled in a new group.

    Attributes:
        is_finished: Another rank had finished the event that this one was in.
    """

    is_finished: bool
    result: Any = None


class _Position(NamedTuple):
    """How far one rank has come.

    Attributes:
        events: Finished ones.
        activity: What it was in.
        updates: Optimizer steps done.
        batch: Step of the batch that its script has; -1: it has none.
        passes: How often that batch was given.
        has_events: Events have begun since it was given.
        step: Global steps done.
    """

    events: int
    activity: int
    updates: int
    batch: int
    passes: int
    has_events: int
    step: int


class Training(Protocol):
    """What recovery uses of the training (``train.loop.TrainingLoop``)."""

    @property
    def step(self) -> int: ...
    def event(self, name: str, **details: Any) -> None: ...
    def renew(self) -> None: ...
    def save_and_exit(self) -> NoReturn: ...
    def send_models(self, comms: Comms, source: int, receivers: Sequence[int]) -> None: ...
    def send_training(self, comms: Comms, source: int, receivers: Sequence[int]) -> None: ...


class Recovery:
    """A rank's part in recoveries. Every rank of a job has one.

    Attributes:
        able: Whether a lost rank can be replaced; until then its loss is an error like any other.
        is_reported: Whether the launcher was told :attr:`able`.
        joins_closed: No process can join any more; set at the same line of the script on all ranks.
        generation: Number of the group, from 0.
        place: This process's place at the last renewal: by it data are divided.
        training: Of this rank; set before the first event.
        alone: This rank is to save its training and end before its next batch.
        span: Entered around what may talk to the other ranks, apart from events.
    """

    training: Training

    def __init__(self, slot: int, comms: Comms, control: Control, group: JobGroup) -> None:
        self.slot, self.group = slot, group
        self._comms, self._control = comms, control
        self.able = self.is_reported = self.joins_closed = False
        self.generation = self._renewed = 0
        self.place = comms.world
        self._forming = threading.Lock()  # held while a group becomes the present one
        self._opened = 0  # generation in which others join before the next batch
        self._is_paused = False  # no batch is begun in the present group
        self.alone = self.has_lost_ranks = False
        self.updates = 0
        self._finished = 0  # events
        self._result: Any = None
        self._renewal_point = 0, 0  # most events and steps of any rank when the next batch is given
        self._is_renewing = False  # within a renewal operations are no events
        self._batch, self._passes = -1, 0  # step of the last batch, and how often it was given
        self._has_batch, self._has_events = False, False  # since the batch was given
        self._void = -1, 0  # so many passes over the batch of that step
        self.span = CollectiveSpan()
        waits.enable()
        control.on_shutdown = self._release
        comms.group = group.messages
        if group.device is not None:
            group.device.on_error = self._on_device_error

    # -- events --------------------------------------------------------------------------

    def event(self, act: Callable[[], T]) -> T:
        """Returns the result of ``act``; repeats it in a new group when a rank is lost."""
        if self._is_renewing:
            return self._run(act)
        if self._has_batch:
            self._has_events = True
        try:
            result = self._run(act)
        except RuntimeError as error:
            result = self._retry(act, error)
        self.finish(result)
        return result

    def _retry(self, act: Callable[[], T], error: RuntimeError) -> T:
        while True:
            settlement = self.regroup(error, Activity.OPERATION)
            if self.alone and not self._has_batch:  # what this rank has is no result of all
                self.training.save_and_exit()
            if settlement.is_finished:
                return settlement.result  # type: ignore[no-any-return]
            try:
                return self._run(act)
            except RuntimeError as next_error:
                error = next_error

    def _run(self, act: Callable[[], T]) -> T:
        with self.span:
            result = act()
            self.wait_for_device()
            return result

    def wait_for_device(self) -> None:
        """Waits, if a lost rank can be replaced, until the device has finished its collectives.

        Until then nobody knows whether they have worked.

        Raises:
            RuntimeError: They were aborted.
        """
        if self.able:
            self.group.wait_for_device()

    def finish(self, result: Any = None) -> None:
        """Counts an event, or a whole exchange of gradients, as finished."""
        self._finished, self._result = self._finished + 1, result

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Context in which to make a group whose collectives end when a rank is lost."""
        return self.group.connections.tracked(self._comms.world.size)

    def patient(self, timeout: timedelta) -> contextlib.AbstractContextManager[None]:
        """Context in which an operation may wait this long for a late rank."""
        return self.group.patient(timeout)

    def recover_exchange(self, error: RuntimeError) -> ExchangeResult:
        """Regroups after an exchange that failed; returns what became of the exchange.

        Raises:
            RuntimeError: The error, unless a lost rank is its cause and can be replaced.
        """
        if not self.regroup(error, Activity.EXCHANGE).is_finished:
            return ExchangeResult.VOID
        self.finish()
        return ExchangeResult.ADOPTED

    # -- batches -------------------------------------------------------------------------

    def start_batch(self) -> None:
        """Records that the loader gives the script a global batch, for the first time or again."""
        step = self.training.step
        self.group.release_retired()
        self._passes = self._passes + 1 if self._batch == step else 1
        self._batch, self._has_batch, self._has_events = step, True, False

    def end_batch(self) -> None:
        self._has_batch = False

    @property
    def is_batch_void(self) -> bool:
        """Whether the script's batch does not count: it was divided for a former group."""
        step, passes = self._void
        return self._batch == step and self._passes <= passes

    @property
    def stale(self) -> bool:
        """Whether there is a new group in which not everything was renewed yet."""
        return self._renewed != self.generation and not self._is_renewing

    # -- others that join ------------------------------------------------------------------

    def pending_generation(self) -> int:
        """Returns the generation that newcomers wait for, as far as this rank knows; 0: none."""
        message = self._control.newer(self.generation)
        joins = message is not None and message.planned and self.able and not self.joins_closed
        return message.generation if message is not None and joins else 0

    def agree_to_join(self, lowest: int, highest: int) -> None:
        """Lets newcomers join if ``lowest`` and ``highest`` generation of all ranks are equal."""
        if lowest == highest > self.generation:
            self._opened = lowest

    def end_together(self) -> None:
        """Records that all ranks save and end together: none does so alone any more."""
        self._control.is_ending = True

    @property
    def _should_admit(self) -> bool:
        return self._opened > self.generation and not self.joins_closed

    def join(self) -> None:
        """Joins the other ranks as a newcomer, and receives the training from one of them.

        Raises:
            SystemExit: They have no need of it any more.
        """
        self._finished, generation = -1, 0
        while (message := self._control.wait(generation, planned=True)) is not None:
            generation = message.generation
            if message.place_of(self.slot) is None:
                continue  # it is for other newcomers, that were quicker
            try:
                self._form_planned(message, Activity.JOINING)
            except RuntimeError as error:
                if not self._is_loss(error):
                    raise
                continue
            self.able = True
            return
        raise SystemExit(0)

    def _admit(self) -> None:
        """Forms the group that newcomers join; called between two batches."""
        message = self._control.newer(self.generation)
        self._opened = 0
        if message is None or not message.planned:
            return  # a rank is lost: the next collective will show it
        try:
            self._form_planned(message, Activity.RENEWAL)
        except RuntimeError as error:
            self.regroup(error, Activity.RENEWAL, message.generation)

    def _form_planned(self, message: RegroupMessage, activity: Activity) -> None:
        start, self._is_renewing = time.monotonic(), True
        try:
            self._form(message)
            self._settle(activity)
        finally:
            self._is_renewing = False
        self._report_regrouped(start)

    def _report_regrouped(self, start: float) -> None:
        seconds = round(time.monotonic() - start, 4)
        step = self.training.step
        self.training.event("regrouped", generation=self.generation, step=step, seconds=seconds)

    # -- renewal ---------------------------------------------------------------------------

    def renew(self) -> None:
        """Lets newcomers join and renews everything in a new group; called between two batches.

        While there are too few nodes to train, this is repeated in one group after the other.
        """
        self._renew()
        if self.alone:
            self.training.save_and_exit()
        while self._is_paused and not self.stale:
            self._wait_for_group()
            if self.alone:
                self.training.save_and_exit()
            self._renew()

    def _wait_for_group(self) -> None:
        """Waits for the next group while too few nodes are there; the state stays in memory."""
        message = self._control.wait(self.generation, planned=None)
        if message is None:
            raise RuntimeError("the job ends, for too few nodes are there to train")
        if message.planned:
            self._admit()
        else:
            self.regroup(RuntimeError("more nodes are there, or others"), Activity.RENEWAL)

    def _renew(self) -> None:
        while not self.alone and (self._should_admit or (self.stale and self._all_come_here)):
            if self._should_admit:
                self._admit()
                continue
            # How often each rank was given the batch that comes differs; from here on it is alike.
            self._batch, self._passes, self._void, self._has_batch = -1, 0, (-1, 0), False
            generation, place, self._is_renewing = self.generation, self._comms.world, True
            try:
                self.training.renew()
                self._comms.barrier()
            except RuntimeError as error:
                self._is_renewing = False
                if not self.regroup(error, Activity.RENEWAL).is_finished:
                    continue
            finally:
                self._is_renewing = False
            self.finish()
            self._renewed, self.place = generation, place
            self.has_lost_ranks = self.stale and self.has_lost_ranks

    @property
    def _all_come_here(self) -> bool:
        """Whether every rank will be as far as this one when it gets its next batch."""
        events, steps = self._renewal_point
        return self._finished >= events and self.training.step >= steps

    # -- a new group ---------------------------------------------------------------------

    @torch.inference_mode(False)  # what is made in an evaluation must also serve the training
    def regroup(self, error: RuntimeError, activity: Activity, generation: int = 0) -> Settlement:
        """Forms a new group and settles with its members who has come how far.

        Args:
            activity: What it was in.
            generation: The newest group that did not come about.

        Raises:
            RuntimeError: The error, unless a lost rank is its cause and can be replaced.
        """
        if not self.able or not self._is_loss(error):
            raise error
        start = time.monotonic()
        generation = max(generation, self.generation)
        while True:
            message = self._next_message(error, generation)
            if message is None:
                raise error
            generation = message.generation
            if message.is_last:
                return self._isolate(message)
            try:
                self._form(message)
                settlement = self._settle(activity)
            except RuntimeError as next_error:
                if not self._is_loss(next_error):
                    raise
                if unreachable_peer(str(next_error)):  # the launcher leaves out one of the two
                    error = next_error
                continue
            self._report_regrouped(start)
            return settlement

    def _next_message(self, error: RuntimeError, generation: int) -> RegroupMessage | None:
        """Waits for the launcher's message after a loss; reports the loss if there is none yet."""
        message = self._control.newer(generation)
        if message is None or message.planned:
            text = str(error).partition("\n")[0][:300]
            step = self.training.step
            self.training.event("interrupted", step=step, error=text, generation=generation)
            message = self._control.wait(generation)
        return message

    def _isolate(self, message: RegroupMessage) -> Settlement:
        """Goes on as the only rank, as far as this one knows; its batch is void."""
        former, self.alone = self._comms.world, True
        self._comms.world = World(0, 1, 0, 1, former.host, True, former.hosts)
        if self.group.device is not None:
            self.group.device.leave()
        with self._forming:
            self.generation = message.generation
        return Settlement(False)

    def _release(self, generation: int) -> None:
        """Frees the computing thread where cut connections do not; reports if that is in vain."""

        def is_finished() -> bool:
            return self.generation >= generation or self._control.newer(generation) is not None

        def release() -> None:
            release_waits(is_finished, self.group.connections.all_closed, self._forming)

        def watch() -> None:
            if self.able and self.span.is_idle_for(STUCK_S, is_finished):
                self.training.event("stuck", step=self.training.step, seconds=STUCK_S)

        threading.Thread(target=release, name="paceline-give-up", daemon=True).start()
        threading.Thread(target=watch, name="paceline-freed", daemon=True).start()

    def _on_device_error(self, error: str) -> None:
        """Frees what waits for the device; if a lost rank cannot be replaced, ends the process."""
        if self.able and self.group.device is not None:
            self.group.device.abort()
        else:
            end_process(error)

    def _is_loss(self, error: RuntimeError) -> bool:
        """Whether an error is one that a rank sees when another rank ends."""
        is_group_error = isinstance(error, (dist.DistError, Superseded))
        if is_group_error or SECONDARY_ERROR.search(str(error)):
            return True
        message = self._control.newer(self.generation)
        return message is not None and not message.planned  # whatever torch says of cut connections

    def _form(self, message: RegroupMessage) -> None:
        """Leaves the old group and forms the one that was announced, or raises RuntimeError."""
        place = message.place_of(self.slot)
        if place is None:
            raise JobError(
                "the others train on without this process",
                found=f"it is not in generation {message.generation} of the job",
                remedy="look at the launcher's output for why it was taken for lost",
            )
        self.training.event("arrived", generation=message.generation)
        gathered = partial(self.training.event, "gathered", generation=message.generation)
        self.group.form(message, place, gathered)
        former = self._comms.world
        self.has_lost_ranks = self.has_lost_ranks or place.size < former.size
        self._comms.world = replace(place, hosts=former.hosts)
        self._comms.group = self.group.messages
        self._is_paused = message.is_paused
        with self._forming:
            self.generation = message.generation

    # -- who has come how far --------------------------------------------------------------

    def _settle(self, activity: Activity) -> Settlement:
        """Settles the event that this rank was in; a collective of the new group."""
        with self.span:
            comms = replace(self._comms, fault_handler=None)
            positions = self._positions(comms, activity)
            return self._settle_events(comms, positions, activity)

    def _positions(self, comms: Comms, activity: Activity) -> list[_Position]:
        position = torch.tensor([
            self._finished, activity, self.updates, self._batch if self._has_batch else -1,
            self._passes, self._has_events and self._has_batch, self.training.step,
        ])  # fmt: skip
        return [_Position(*row) for row in comms.rows(position).tolist()]

    def _settle_events(
        self, comms: Comms, positions: Sequence[_Position], activity: Activity
    ) -> Settlement:
        # An operation is done to its end: by a rank that begins it again, or by its result.
        events = max(p.events + (p.activity == Activity.OPERATION) for p in positions)
        self._renewal_point = events, max(p.step for p in positions)
        finished = [p.events for p in positions]
        latest = max(finished)
        source, this_rank = finished.index(latest), comms.world.rank
        newcomers = [r for r, p in enumerate(positions) if p.activity == Activity.JOINING]
        behind = [r for r, p in enumerate(positions) if p.events < latest and r not in newcomers]
        if any(finished[rank] < latest - 1 for rank in behind):
            raise JobError(
                "the ranks that are left are too far apart to train on together",
                found=f"events that they have finished: {', '.join(map(str, finished))}",
            )
        if len(newcomers) == len(positions):
            raise JobError(
                "a process that comes for a lost one has nobody to join",
                found="none of this group's ranks has the training's state",
            )
        late = [rank for rank in behind if positions[rank].updates < positions[source].updates]
        receivers = [rank for rank in late if positions[rank].activity == Activity.EXCHANGE]
        result: Any = None
        if newcomers:
            self.training.send_training(comms, source, newcomers)
        if receivers:
            self.training.send_models(comms, source, receivers)
        elif any(positions[rank].activity == Activity.OPERATION for rank in behind):
            result = _broadcast_result(comms, source, self._result)
        self._void = max(self._void, _void_passes(positions, receivers, this_rank))
        if this_rank in receivers or this_rank in newcomers:
            self.updates = positions[source].updates
        # A rank that is through with a renewal has waited there for all, and may have gone on.
        is_finishing = activity in (Activity.OPERATION, Activity.RENEWAL)
        is_finished = this_rank in receivers or (this_rank in behind and is_finishing)
        if not is_finished:
            self._finished = latest
        return Settlement(is_finished, result)


def _void_passes(
    positions: Sequence[_Position], receivers: Sequence[int], this_rank: int
) -> tuple[int, int]:
    """Returns the step of the batch that is void (-1: none), and the last void pass over it."""
    newest = max(position.batch for position in positions)
    passes = [
        position.passes
        for rank, position in enumerate(positions)
        if position.batch == newest >= 0
        and rank not in receivers
        and (position.has_events or rank == this_rank)
    ]
    return (newest, max(0, *passes)) if passes else (-1, 0)


def _broadcast_result(comms: Comms, source: int, result: Any) -> Any:
    is_source = comms.world.rank == source
    shape, dtype = None, ""
    if isinstance(result, Tensor):
        shape, dtype = list(result.shape), str(result.dtype).removeprefix("torch.")
    value = None if isinstance(result, Tensor) else result
    texts = comms.texts(json.dumps([shape, dtype, value]) if is_source else "")
    shape, dtype, value = parse_texts(texts, optional(_RESULT))[source] or (None, "", None)
    if shape is None:
        return value
    tensor = result.cpu() if is_source else torch.empty(shape, dtype=getattr(torch, dtype))
    comms.broadcast([tensor], source)
    return tensor
