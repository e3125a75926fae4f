"""The models that a session trains: one, or several by name, each with an optimizer of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from paceline.spec.errors import JobError, SettingError
from paceline.train import parallel
from paceline.train.elastic.committed import BufferSnapshot, CommittedModels
from paceline.train.reduce.choice import Communication
from paceline.train.reduce.exchange import GradientExchange
from paceline.train.update import Updater

UNNAMED = ""
"""The name of the only model of a session that gives none."""


class Models:
    """Updaters by model name, in the order of preparation.

    A loss changes only the model that it is given for, whatever other models it passes through:
    their gradients are not computed, and no rank waits for them.

    Attributes:
        module: The only model, or a module of all of them by name.
    """

    def __init__(self, updaters: Mapping[str, Updater] | None = None) -> None:
        self._updaters: dict[str, Updater] = {}
        self._committed: CommittedModels | None = None
        self._batch_buffers: BufferSnapshot | None = None
        self.module = nn.Module()
        for name, updater in (updaters or {}).items():
            self.add(name, updater)

    def close_exchange(self, name: str) -> None:
        """Ends the gradient exchange of a model that is to be replaced."""
        former = self._updaters.get(name)
        if former is not None and former.exchange is not None:
            former.exchange.close()
            former.exchange.leave_group()

    def add(self, name: str, updater: Updater) -> None:
        """Adds a model, or replaces one of that name (after :meth:`close_exchange`).

        Raises:
            ValueError: The name is not an identifier, or only some models have names.
        """
        if name and not name.isidentifier():
            raise ValueError(f"session.prepare: the name {name!r} is not an identifier")
        if any(bool(existing) != bool(name) for existing in self._updaters):
            raise ValueError(
                "session.prepare: of several models each needs a name: name='generator'"
            )
        self._updaters[name], self._committed, self._batch_buffers = updater, None, None
        modules = {key: prepared.module for key, prepared in self._updaters.items()}
        self.module = nn.ModuleDict(modules) if name else updater.module

    def __getitem__(self, name: str) -> Updater:
        if name in self._updaters:
            return self._updaters[name]
        if not self._updaters:
            raise RuntimeError("session.prepare comes before session.step and session.checkpoints")
        names = ", ".join(map(repr, self._updaters))
        given = f"{name!r}" if name else "none: each loss belongs to a model, session.step({...})"
        raise ValueError(f"models were prepared under the names {names}, but given was {given}")

    @property
    def _communications(self) -> list[Communication]:
        return [updater.communication for updater in self if updater.communication is not None]

    @property
    def _exchanges(self) -> list[GradientExchange]:
        return [updater.exchange for updater in self if updater.exchange is not None]

    @property
    def _replicas(self) -> list[parallel.Replica]:
        return [updater.model for updater in self if isinstance(updater.model, parallel.Replica)]

    def __iter__(self) -> Iterator[Updater]:
        return iter(self._updaters.values())

    def __bool__(self) -> bool:
        return bool(self._updaters)

    def metric_names(self, metric: str) -> dict[str, str]:
        """Returns the metric's name in records by model: ``loss`` or ``generator_loss``."""
        return {name: f"{name}_{metric}" if name else metric for name in self._updaters}

    @property
    def learning_rates(self) -> dict[str, float]:
        return {metric: self._updaters[name].lr for name, metric in self.metric_names("lr").items()}

    @property
    def changed_settings(self) -> list[str]:
        """Hyperparameters that differ from those of the loaded checkpoint, for the user."""
        return [
            f"{name}: {change}" if name else change
            for name, updater in self._updaters.items()
            for change in updater.changed_settings
        ]

    def check_finite(self, losses: Mapping[str, float], step: int) -> None:
        """Checks that mean losses are finite; called with the same losses on every rank.

        Raises:
            JobError: One is not; the loss scale of fp16 handles such steps itself.
        """
        wrong = [f"{name} {loss}" for name, loss in losses.items() if not math.isfinite(loss)]
        if wrong and self.first.scaler is None:
            rates = ", ".join(f"{lr:g}" for lr in self.learning_rates.values())
            raise JobError(
                f"the loss is not finite ({', '.join(wrong)}): the training has diverged",
                found=f"at or before step {step}, with learning rate {rates}",
                remedy="lower --lr or lengthen the warm-up; clip gradients (--clip-norm 1.0)",
            )

    @property
    def first(self) -> Updater:
        return next(iter(self), None) or self[UNNAMED]

    def unsynced(self) -> AbstractContextManager[None]:
        """Context of backward passes without gradient exchange; only for a single model."""
        updater = self._updaters.get(UNNAMED)
        return parallel.unsynced(updater.model) if updater else nullcontext()

    def start(self, steps: int, step: int) -> list[str]:
        """Tells the communication how long the training is; returns messages for the user."""
        texts = {name: updater.communication.begin(steps, step)
                 for name, updater in self._updaters.items() if updater.communication}  # fmt: skip
        return [f"{name}: {text}" if name else text for name, text in texts.items() if text]

    def record_commit(self) -> None:
        """Records the models after a step that counts, for :meth:`at_last_commit`."""
        if self.is_diverged:
            self._committed = None  # nobody takes the model of a rank that steps alone
            return
        if self._committed is None:
            self._committed = CommittedModels(self, keeps_all_buffers=self._has_device_group)
        self._committed.commit()

    @property
    def _has_device_group(self) -> bool:
        return any(exchange.has_device_group for exchange in self._exchanges)

    @property
    def is_diverged(self) -> bool:
        """Whether ranks have different models for some steps."""
        return any(method.is_local for method in self._communications)

    def start_batch(self) -> None:
        """Records the buffers before a global batch, for :meth:`roll_back`."""
        if self._batch_buffers is None:
            keeps_all = self._has_device_group
            self._batch_buffers = BufferSnapshot([self.module], keeps_all=keeps_all)
        self._batch_buffers.take()

    def roll_back(self) -> None:
        """Discards gradients and restores buffers of a batch that does not count."""
        self.clear_gradients()
        if self._batch_buffers is not None:
            self._batch_buffers.restore()

    def skip_forward(self) -> None:
        """Restores buffers after a forward pass whose update was done already."""
        if self._committed is not None:
            self._committed.buffers.restore()

    def at_last_commit(self, is_needed: bool = True) -> AbstractContextManager[bool]:
        """Context in which models are as last committed; yields ``False`` if that is unknown."""
        if self._committed is None or not is_needed:
            return nullcontext(True)
        return self._committed.restored()

    def stepped(self, step: int) -> None:
        for method in self._communications:
            method.stepped(step)
        self._start_step()

    def _start_step(self) -> None:
        for replica in self._replicas:
            replica.start_step()

    def clear_gradients(self, *, is_committed: bool = False) -> None:
        """Clears all gradients.

        Args:
            is_committed: The step counts: the models were adopted from a rank that had stepped.
                Otherwise the exchanged gradients are discarded.
        """
        for parameter in self.module.parameters():
            parameter.grad = None
        for exchange in self._exchanges:
            exchange.commit() if is_committed else exchange.rollback()
        self._start_step()

    def renew(self) -> None:
        """Moves gradient exchange to the new group of ranks; a collective."""
        self.clear_gradients()
        for updater in self:
            if updater.exchange is not None and updater.communication is not None:
                updater.exchange.renew()
                updater.communication.renew()

    def synchronized_parameters(self) -> dict[str, Tensor]:
        """Parameters at the last synchronisation, by name; empty if models never diverge."""
        updater = self._updaters.get(UNNAMED)
        if updater is None or updater.communication is None or updater.communication.local is None:
            return {}
        synchronized = updater.communication.local.synced_parameters()
        names = {parameter: name for name, parameter in updater.module.named_parameters()}
        parameters = updater.module.named_parameters(remove_duplicate=False)
        return {
            name: synchronized[names[parameter]]
            for name, parameter in parameters
            if names[parameter] in synchronized
        }

    @property
    def max_unsynced_steps(self) -> int:
        """Largest number of local steps that are lost with a rank."""
        return max((method.max_unsynced_steps for method in self._communications), default=0)

    @property
    def switches(self) -> dict[str, list[str]]:
        """Names of frozen parameters, of exchanged ones, and of modules in evaluation mode."""
        exchanged = {parameter for replica in self._replicas for parameter in replica.exchanged}
        parameters = [*self.module.named_parameters()]
        return {
            "frozen": [name for name, parameter in parameters if not parameter.requires_grad],
            "exchanged": [name for name, parameter in parameters if parameter in exchanged],
            "evaluated": [name for name, part in self.module.named_modules() if not part.training],
        }

    @switches.setter
    def switches(self, switches: Mapping[str, list[str]]) -> None:
        """Sets exactly these; which parameters are exchanged takes effect in :meth:`renew`."""
        frozen, evaluated = {*switches["frozen"]}, {*switches["evaluated"]}
        parameters = dict(self.module.named_parameters())
        for name, parameter in parameters.items():
            parameter.requires_grad_(name not in frozen)
        for name, part in self.module.named_modules():
            part.training = name not in evaluated
        exchanged = {parameters[name] for name in switches["exchanged"]}
        for replica in self._replicas:
            replica.exchanged = exchanged.intersection(replica.module.parameters())

    def include_thawed(self) -> bool:
        """Averages gradients of parameters that were frozen before; returns whether there are any.

        Raises:
            SettingError: Ranks take local steps (``local``) and were never together with them.
        """
        widened = False
        for updater in self:
            exchange, communication = updater.exchange, updater.communication
            if exchange is None or communication is None or not exchange.model.has_new_parameters:
                continue
            if communication.requested.name == "local":
                raise SettingError(
                    "--communication local: ranks that step apart have no common beginning for"
                    " parameters that are trained from now on",
                    found="the script has set requires_grad of parameters that were frozen when"
                    " session.prepare was called",
                    remedy="--communication exact, or freeze them after session.prepare",
                )
            exchange.include_trained()
            communication.renew()
            widened = True
        return widened

    def synchronize(self, *, moments: bool = False) -> None:
        """Gives all ranks the same models, and on request the same optimizer moments."""
        for method in self._communications:
            method.synchronise(moments=moments)

    def close(self) -> None:
        """Ends the gradient exchanges; no rank may be in a step."""
        for exchange in self._exchanges:
            exchange.close()

    def backward(
        self, name: str, loss: Tensor, *, is_last: bool, retain_graph: bool = False
    ) -> None:
        """Adds the gradient of a loss to one model.

        Args:
            is_last: Whether the gradient is complete then, and averaged over all ranks.
            retain_graph: Keeps the graph for another loss that shares a part of it.

        Raises:
            JobError: The loss does not depend on some parameters (see ``unused``).
        """
        updater = self[name]
        if self._committed is not None:
            self._committed.start_step()
        if name == UNNAMED:
            updater.backward(loss)
        elif parallel.is_sharded(self.module):
            # the forward pass used other tensors, gathered from the shards: none can be left out
            with _preserved_gradients(other.module for other in self if other is not updater):
                updater.backward(loss, retain_graph=retain_graph)
        else:
            if is_last and isinstance(updater.model, parallel.ManualReplica):
                updater.model.expect(loss)
            parameters = [p for p in updater.module.parameters() if p.requires_grad]
            updater.backward(loss, parameters, retain_graph=retain_graph)
        if is_last and isinstance(updater.model, parallel.Replica):
            updater.model.check_used()

    @contextmanager
    def averaged(self, names: Iterable[str] = ()) -> Iterator[None]:
        """Context in which these models, or all with an average, have averaged weights."""
        averages = [self[name].average for name in names] or [updater.average for updater in self]
        with ExitStack() as stack:
            for average in filter(None, averages):
                stack.enter_context(average.applied())
            yield

    @contextmanager
    def without_averages(self) -> Iterator[bool]:
        """Context without averaged weights; yields whether any model had them."""
        with ExitStack() as stack:
            averages = [updater.average for updater in self if updater.average is not None]
            was_applied = [stack.enter_context(average.suspended()) for average in averages]
            yield any(was_applied)

    def state(self, *, assemble: bool = True, replicated_only: bool = False) -> dict[str, Any]:
        options = {"assemble": assemble, "replicated_only": replicated_only}
        if UNNAMED in self._updaters:
            return self._updaters[UNNAMED].state(**options)
        states = {name: updater.state(**options) for name, updater in self._updaters.items()}
        return {"models": states}

    def select_known(self, saved_state: dict[str, Any]) -> dict[str, Any]:
        """Returns a state of :meth:`state` without averages that are not kept now."""
        if UNNAMED in self._updaters:
            return self._updaters[UNNAMED].select_known(saved_state)
        saved = saved_state["models"]
        states = {name: self._updaters[name].select_known(saved[name]) for name in self._updaters}
        return {"models": states}

    def load_state(
        self, state: dict[str, Any], *, assemble: bool = True, replicated_only: bool = False
    ) -> None:
        options = {"assemble": assemble, "replicated_only": replicated_only}
        if UNNAMED in self._updaters:
            self._updaters[UNNAMED].load_state(state, **options)
            return
        for name, updater in self._updaters.items():
            updater.load_state(state["models"][name], **options)


@contextmanager
def _preserved_gradients(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context that hides the gradients of modules from a backward pass, and restores them."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in zip(parameters, gradients, strict=True):
            parameter.grad = grad
