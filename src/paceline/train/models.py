"""The models that a session trains: one, or several by name, each with an optimizer of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from paceline.spec.errors import JobError, SettingError
from paceline.train import parallel
from paceline.train.elastic.committed import BufferSnapshot, CommittedModels
from paceline.train.update import Updater

ALONE = ""
"""The name of the only model of a session that gives none."""


class Models:
    """By name, in the order in which they were prepared.

    A loss changes the model that it is given for and no other, whatever else it passes through:
    neither are the others' gradients computed nor does any rank wait for them.

    Attributes:
        module: The only one, or all of them under their names.
    """

    def __init__(self, updaters: Mapping[str, Updater] | None = None) -> None:
        self._updaters: dict[str, Updater] = {}
        self._counted: CommittedModels | None = None
        self._begun: BufferSnapshot | None = None
        self.module = nn.Module()
        for name, one in (updaters or {}).items():
            self.add(name, one)

    def leave(self, name: str) -> None:
        """Ends the exchange of a model that is to be replaced, if there is one of that name."""
        if name in self._updaters and (exchange := self._updaters[name].exchange) is not None:
            exchange.close()
            exchange.leave_group()

    def add(self, name: str, updater: Updater) -> None:
        """Takes a further model; one of the same name is replaced, and was left (:meth:`leave`).

        Raises:
            ValueError: The name cannot be, or some have names and others have none.
        """
        if name and not name.isidentifier():
            raise ValueError(f"session.prepare: the name {name!r} is no identifier")
        if any(bool(other) != bool(name) for other in self._updaters):
            raise ValueError(
                "session.prepare: of several models each needs a name: name='generator'"
            )
        self._updaters[name], self._counted, self._begun = updater, None, None
        modules = {one: known.module for one, known in self._updaters.items()}
        self.module = nn.ModuleDict(modules) if name else updater.module

    def __getitem__(self, name: str) -> Updater:
        if name in self._updaters:
            return self._updaters[name]
        if not self._updaters:
            raise RuntimeError("session.prepare comes before session.step and session.checkpoints")
        known = ", ".join(map(repr, self._updaters))
        told = f"{name!r}" if name else "none: each loss belongs to a model, session.step({...})"
        raise ValueError(f"models were prepared under the names {known}, but given was {told}")

    def __iter__(self) -> Iterator[Updater]:
        return iter(self._updaters.values())

    def __bool__(self) -> bool:
        return bool(self._updaters)

    def figures(self, what: str) -> dict[str, str]:
        """How a figure is called in the records, by model: ``loss`` or ``generator_loss``."""
        return {name: f"{name}_{what}" if name else what for name in self._updaters}

    @property
    def lrs(self) -> dict[str, float]:
        """Learning rates, as they are recorded."""
        return {said: self._updaters[name].lr for name, said in self.figures("lr").items()}

    def check(self, losses: Mapping[str, float], step: int) -> None:
        """Ends a training that has diverged, on every rank.

        Raises:
            JobError: A mean loss is not finite (fp16 takes such steps back by itself).
        """
        wrong = [f"{name} {one}" for name, one in losses.items() if not math.isfinite(one)]
        if wrong and self.first.scaler is None:
            rates = ", ".join(f"{lr:g}" for lr in self.lrs.values())
            raise JobError(
                f"the loss is not finite ({', '.join(wrong)}): the training has diverged",
                found=f"at or before step {step}, with learning rate {rates}",
                remedy="lower --lr or lengthen the warm-up; clip gradients (--clip-norm 1.0)",
            )

    @property
    def first(self) -> Updater:
        """Of the model that was prepared first."""
        return next(iter(self), None) or self[ALONE]

    def unsynced(self) -> AbstractContextManager[None]:
        """The context of passes whose gradients stay here; several models are told one by one."""
        alone = self._updaters.get(ALONE)
        return parallel.unsynced(alone.model) if alone else nullcontext()

    def begin(self, steps: int, step: int) -> list[str]:
        """Says how many steps the training has, and are done; returns what is to be told."""
        each = [one.communication for one in self if one.communication is not None]
        return list(filter(None, [one.begin(steps, step) for one in each]))

    def note(self) -> None:
        """A step counts: :meth:`as_counted` gives what the models are now."""
        if self.parted:
            self._counted = None  # nobody takes the model of a rank that steps alone
            return
        self._counted = self._counted or CommittedModels(self)
        self._counted.commit()

    @property
    def parted(self) -> bool:
        """Whether each rank has a model of its own for some steps."""
        return any(one.communication is not None and one.communication.is_local for one in self)

    def begin_batch(self) -> None:
        """A global batch begins that may turn out not to count."""
        self._begun = self._begun or BufferSnapshot([self.module])
        self._begun.take()

    def take_back(self) -> None:
        """The batch does not count: nothing of it is left, in gradients or in buffers."""
        self.drop()
        if self._begun is not None:
            self._begun.restore()

    def skip(self) -> None:
        """A forward pass was made for an update that counts already: it leaves buffers alone."""
        if self._counted is not None:
            self._counted.restore_buffers()

    def as_counted(self, wanted: bool = True) -> AbstractContextManager[bool]:
        """Within it the models are as they were when last noted; False where that is not known."""
        if self._counted is None or not wanted:
            return nullcontext(True)
        return self._counted.restored()

    def stepped(self, step: int) -> None:
        """To be called after each global step, with the number of those that are done."""
        for one in self:
            if one.communication is not None:
                one.communication.stepped(step)
        self._begin_step()

    def _begin_step(self) -> None:
        for one in self._replicas:
            one.begin_step()

    def drop(self, *, counted: bool = False) -> None:
        """Forgets all gradients.

        Args:
            counted: They count all the same: the models are as another rank's optimizers have left
                them. Otherwise what was exchanged of them is void.
        """
        for one in self.module.parameters():
            one.grad = None
        for updater in self:
            if (exchange := updater.exchange) is not None:
                exchange.commit() if counted else exchange.rollback()
        self._begin_step()

    def renew(self) -> None:
        """Has gradients exchanged in a new group of ranks from now on; a collective."""
        self.drop()
        for one in self:
            if one.exchange is not None:
                one.exchange.renew()
            if one.communication is not None:
                one.communication.renew()

    def met(self) -> dict[str, Tensor]:
        """Parameters where all ranks last met, by name; none of models that are alike on all."""
        alone = self._updaters.get(ALONE)
        if (
            alone is None
            or alone.communication is None
            or not (at := alone.communication.synced_parameters())
        ):
            return {}
        names = {one: name for name, one in alone.module.named_parameters()}
        every = alone.module.named_parameters(remove_duplicate=False)
        return {name: at[names[one]] for name, one in every if names[one] in at}

    @property
    def max_unsynced_steps(self) -> int:
        """Steps of their own that ranks which were lost have taken with them, at most."""
        each = [
            one.communication.max_unsynced_steps for one in self if one.communication is not None
        ]
        return max(each, default=0)

    @property
    def switches(self) -> dict[str, list[str]]:
        """By name: frozen parameters, exchanged ones, and parts that are in evaluation mode."""
        exchanged = {id(one) for replica in self._replicas for one in replica.exchanged}
        parameters = [*self.module.named_parameters()]
        return {
            "frozen": [name for name, one in parameters if not one.requires_grad],
            "exchanged": [name for name, one in parameters if id(one) in exchanged],
            "evaluated": [name for name, part in self.module.named_modules() if not part.training],
        }

    @switches.setter
    def switches(self, switches: Mapping[str, list[str]]) -> None:
        """Has it so with these, and with no others; what is exchanged from :meth:`renew` on."""
        frozen, evaluated = {*switches["frozen"]}, {*switches["evaluated"]}
        parameters = dict(self.module.named_parameters())
        for name, parameter in parameters.items():
            parameter.requires_grad_(name not in frozen)
        for name, part in self.module.named_modules():
            part.training = name not in evaluated
        exchanged = {id(parameters[name]) for name in switches["exchanged"]}
        for one in self._replicas:
            every = one.module.parameters()
            one.exchanged = [parameter for parameter in every if id(parameter) in exchanged]

    @property
    def _replicas(self) -> list[parallel.Replica]:
        return [one.model for one in self if isinstance(one.model, parallel.Replica)]

    def widen(self) -> bool:
        """Has gradients averaged of parameters that were frozen before; whether there are any.

        Raises:
            SettingError: Ranks step apart, and have met without them.
        """
        widened = False
        for one in self:
            if one.exchange is None or not one.exchange.has_thawed:
                continue
            if one.communication is not None and one.communication.requested.name == "local":
                raise SettingError(
                    "--communication local: ranks that step apart have no common beginning for"
                    " parameters that are trained from now on",
                    found="the script has set requires_grad of parameters that were frozen when"
                    " session.prepare was called",
                    remedy="--communication exact, or freeze them after session.prepare",
                )
            one.exchange.widen()
            if one.communication is not None:
                one.communication.renew()
            widened = True
        return widened

    def together(self, *, moments: bool = False) -> None:
        """Sees to it that all ranks have the same models, and the same moments where asked."""
        for one in self:
            if one.communication is not None:
                one.communication.synchronise(moments=moments)

    def close(self) -> None:
        """Ends what exchanges gradients; no rank may be in a step."""
        for one in self:
            if one.exchange is not None:
                one.exchange.close()

    def wait_with(self, before_step: Callable[[], None]) -> None:
        """Calls this before any optimizer changes parameters."""
        for one in self:
            one.before_step = before_step

    def backward(self, name: str, loss: Tensor, *, last: bool, again: bool = False) -> None:
        """Adds the loss's gradient to one model's.

        Args:
            name: Of the model.
            loss: A single number.
            last: The gradient is then complete, and averaged over all ranks.
            again: Another loss, that may share a part of the way, comes after this one.

        Raises:
            JobError: The loss has left parameters out, and nobody has said that it may.
        """
        updater = self[name]
        if self._counted is not None:
            self._counted.start_step()
        if name == ALONE:
            updater.backward(loss)
        elif parallel.is_sharded(self.module):
            with self._aside(updater):
                updater.backward(loss, again=again)
        else:
            if last and isinstance(updater.model, parallel.Apart):
                updater.model.expect(loss)
            own = [one for one in updater.module.parameters() if one.requires_grad]
            updater.backward(loss, own, again=again)
        if last and isinstance(updater.model, parallel.Replica):
            updater.model.check_used()

    @contextmanager
    def _aside(self, chosen: Updater) -> Iterator[None]:
        """Keeps the other models' gradients as they are.

        A loss cannot be told to leave sharded parameters alone: in the forward pass they were
        others, put together for it.
        """
        others = [
            one for updater in self if updater is not chosen for one in updater.module.parameters()
        ]
        kept = [one.grad for one in others]
        for one in others:
            one.grad = None
        try:
            yield
        finally:
            for one, grad in zip(others, kept, strict=True):
                one.grad = grad

    @contextmanager
    def averaged(self, names: Iterable[str] = ()) -> Iterator[None]:
        """Within it models have averaged weights: these, or all that have an average."""
        found = [self[name].average for name in names] or [one.average for one in self]
        with ExitStack() as stack:
            for average in filter(None, found):
                stack.enter_context(average.applied())
            yield

    @contextmanager
    def own_weights(self) -> Iterator[bool]:
        """Within it no module has averaged weights; True when one had them before."""
        with ExitStack() as stack:
            averages = [one.average for one in self if one.average is not None]
            before = [stack.enter_context(one.suspended()) for one in averages]
            yield any(before)

    def state(self, *, whole: bool = True, alone: bool = False) -> dict[str, Any]:
        """That of the only updater (:meth:`Updater.state`), or all of them under their names."""
        how = {"whole": whole, "alone": alone}
        if ALONE in self._updaters:
            return self._updaters[ALONE].state(**how)
        return {"models": {name: one.state(**how) for name, one in self._updaters.items()}}

    def known(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state of :meth:`state` without averages that are not asked for now."""
        if ALONE in self._updaters:
            return self._updaters[ALONE].known(state)
        saved = state["models"]
        return {"models": {name: one.known(saved[name]) for name, one in self._updaters.items()}}

    def load_state(self, state: dict[str, Any], *, whole: bool = True, alone: bool = False) -> None:
        """Takes a state of :meth:`state`."""
        how = {"whole": whole, "alone": alone}
        if ALONE in self._updaters:
            self._updaters[ALONE].load_state(state, **how)
            return
        for name, one in self._updaters.items():
            one.load_state(state["models"][name], **how)
