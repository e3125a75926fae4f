"""Runs global steps: backward passes and updates, until a step counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from paceline.train import parallel
from paceline.train.data.loader import Batch, Loader
from paceline.train.elastic.membership import Membership
from paceline.train.elastic.recovery import ExchangeResult
from paceline.train.journal import Journal
from paceline.train.measure.pace import StepTimer
from paceline.train.measure.summed_loss import WARNING, is_summed
from paceline.train.measure.watch import NormAndLoadWatch
from paceline.train.member import Member
from paceline.train.models import UNNAMED, Models
from paceline.train.update import loss_of, per_sample_losses


@dataclass(eq=False)
class StepRunner:
    """Computes the gradients of batches and updates the models with them.

    A step is void when a rank is lost before all ranks have its gradients: nothing of it is left,
    and the loader gives its samples again.
    """

    _member: Member
    _journal: Journal
    _models: Models
    _membership: Membership
    _pace: StepTimer
    _watch: NormAndLoadWatch
    loader: Loader | None = None
    _measured: dict[str, Tensor] = field(default_factory=dict)  # values of the running step
    _updates: int = 0  # within the step, on this pass over its batch
    _committed: dict[str, Tensor] = field(default_factory=dict)  # values of updates that count
    _checked: set[str] = field(default_factory=set)  # models whose loss was checked once

    def start_batch(self) -> None:
        """Called when the script gets a global batch, for the first time or again."""
        if self._membership.recovery is not None:
            self._membership.recovery.start_batch()
        self._journal.meter.mark()
        if self._membership.can_lose_ranks:
            self._models.start_batch()

    def run(
        self, losses: Tensor | Mapping[str, Tensor], values: Mapping[str, Tensor]
    ) -> Batch | None:
        """Adds the gradients of the present batch and after its last part updates the models.

        Returns:
            The last part of a global batch that counts; ``None`` for other parts and void steps.
        """
        if self.loader is None:
            raise RuntimeError("session.step was called without a new batch from the loader")
        batch = self.loader.take()
        losses_by_name = losses if isinstance(losses, Mapping) else {UNNAMED: losses}
        exchanged = self.backward(batch, losses_by_name)
        measured, self._measured = self._measured, {}
        if exchanged is ExchangeResult.VOID:
            self._discard()
            return None
        self._pace.add_batch(batch.count, batch.data)
        self._journal.meter.add(batch.count, **{**measured, **values})
        if missing := self._committed.keys() - measured.keys():
            committed = {name: self._committed[name] for name in missing}
            self._journal.meter.add_other_samples(**committed)
        if not batch.last:
            return None
        self._commit(exchanged, losses_by_name)
        return batch

    def run_idle(self, batch: Batch) -> bool:
        """Takes part in a step with zero gradients: this rank computes nothing of it.

        Returns:
            Whether the step counts.
        """
        updater = self._models[UNNAMED]
        if self.loader is None or not isinstance(updater.model, parallel.Replica):
            raise RuntimeError("a rank can only be idle in the training of a single model")
        loss = updater.model.zero_loss()
        exchanged = self.backward(replace(batch, ids=np.zeros(1, dtype=np.int64)), {UNNAMED: loss})
        self._measured = {}
        if exchanged is ExchangeResult.VOID:
            self._discard()
            return False
        self._commit(exchanged, [UNNAMED])
        return True

    def update(self, name: str, losses: Tensor, values: Mapping[str, Tensor]) -> None:
        """Updates one of several models within the step; see :meth:`Session.update`."""
        if self.loader is None or not (batch := self.loader.current()).last:
            raise RuntimeError(
                "session.update needs a whole batch, and this one comes in pieces (limit=… of"
                " session.loader, or a share beyond this rank's memory): give session.step the"
                " losses of all models together"
            )
        self._updates += 1
        progress = self._member.progress
        names = [self._models.metric_names("loss")[name], *values]
        if self._updates <= progress.updated:  # done when the same samples were given before
            for value_name in names:  # a newcomer has measured nothing of it
                self._committed.setdefault(value_name, torch.empty(0, device=self._member.device))
            self._models.skip_forward()
            return
        exchanged = self.backward(batch, {name: losses})
        self._measured.update(values)
        if exchanged is ExchangeResult.VOID:
            return
        self._commit(exchanged, [name])
        progress.updated += 1
        samples = 0 if progress.stand_in else batch.count
        self._committed |= {key: self._measured[key].detach()[:samples] for key in names}

    def end_step(self) -> None:
        self._member.progress.updated = self._updates = 0
        self._committed = {}
        if self._membership.recovery is not None:
            self._membership.recovery.end_batch()

    def backward(self, batch: Batch, losses: Mapping[str, Tensor]) -> ExchangeResult:
        _ = self._models.first  # RuntimeError before there is a model
        names, recovery = self._models.metric_names("loss"), self._membership.recovery
        for number, (name, given) in enumerate(losses.items(), 1):
            communication = self._models[name].communication  # an unknown name is refused
            is_local = communication is not None and communication.is_local
            # In a new group nothing is exchanged before all have begun anew in it. A rank that took
            # the models of another after the first of several updates has its batch still.
            is_outdated = recovery is not None and recovery.stale and not is_local
            if is_outdated or (recovery is not None and recovery.is_batch_void):
                return ExchangeResult.VOID
            if name not in self._checked:
                self._checked.add(name)
                if not given.dim() and is_summed(given, len(batch.ids)):
                    self._member.say(WARNING)
            sample_losses = per_sample_losses(given, len(batch.ids))
            loss = loss_of(sample_losses, batch, self._membership.data_place[1])
            if batch.last:
                self._pace.start_backward(loss, self._member.progress.step)
            try:
                with nullcontext() if recovery is None else recovery.span:
                    self._models.backward(
                        name, loss, is_last=batch.last, retain_graph=number < len(losses)
                    )
                    if batch.last and recovery is not None and not is_local:
                        recovery.wait_for_device()
            except RuntimeError as error:
                if recovery is None:
                    raise
                if (exchanged := recovery.recover_exchange(error)) is not ExchangeResult.AVERAGED:
                    self._measured[names[name]] = sample_losses
                    return exchanged
            else:
                if batch.last and recovery is not None and not is_local:
                    recovery.finish()
            local = None if communication is None else communication.local
            if local is not None and is_local and batch.last and self._member.comms.stale:
                local.step_unreduced()
            self._pace.end_backward()
            self._measured[names[name]] = sample_losses
        return ExchangeResult.AVERAGED

    def _commit(self, exchanged: ExchangeResult, names: Iterable[str]) -> None:
        """Updates the named models, unless they were adopted from a rank that had stepped."""
        if exchanged is ExchangeResult.ADOPTED:
            self._models.clear_gradients(is_committed=True)
        else:
            for name in names:
                is_watched = self._watch.is_due(self._member.progress.step + 1)
                self._watch.add(name, self._models[name].update(measured=is_watched))
                if self._membership.recovery is not None:
                    self._membership.recovery.updates += 1
        if self._membership.can_lose_ranks:
            self._models.record_commit()  # what follows is done by each rank itself

    def _discard(self) -> None:
        assert self.loader is not None
        self._updates = 0
        self._models.roll_back()
        self._journal.meter.roll_back()
        self.loader.void()
