"""Which way a model's gradients are averaged: the one that was asked for, or ``auto``'s."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from paceline.spec import jobenv
from paceline.spec.formatting import format_duration
from paceline.spec.training import communication
from paceline.spec.training.step_time import BYTES_SENT
from paceline.train.comms import Comms
from paceline.train.measure.pace import PARTS, Look
from paceline.train.reduce import coded_reducer
from paceline.train.reduce.auto import Auto
from paceline.train.reduce.exact import Exact
from paceline.train.reduce.exchange import Exchange, Method
from paceline.train.reduce.local import Local
from paceline.train.reduce.registry import METHODS

_WORTH = 0.2  # part of a step that communication may take before other ways are spoken of
_LEAST = 0.01  # seconds of a step that it takes then
_STEPS = 8  # that this is judged by
_PARTS, _SMALLEST = 8, 1 << 18  # so many buckets, and the least bytes of one
_FIRST, _MOST_FIRST = 0.1, 20
"""Part of a training, and at most steps, whose gradients are not said in 4 bits but in 8: what
optimizers make of the first gradients decides how soon the loss falls (``bench/slow_links``)."""
_COARSE, _FINER = "int4", "int8"


def check(text: str, *, sharded: bool, name: str, scaled: bool) -> None:
    """Refuses what cannot be.

    Args:
        text: What was asked for.
        sharded: The model's parameters are spread over the ranks.
        name: Of one of several models.
        scaled: Its losses are (fp16).

    Raises:
        SettingError: There is no such way, or not for such a model.
    """
    communication.validate(text, sharded=sharded, several=bool(name), scaled=scaled)


class Communication:
    """How the gradients of one model are averaged.

    Args:
        text: What was asked for.
        exchange: Of the model's gradients.
        comms: Of all ranks.
        optimizer: Of the model.
    """

    def __init__(
        self, text: str, exchange: Exchange, comms: Comms, optimizer: Optimizer | None = None
    ) -> None:
        self.asked, self._exchange, self._comms = communication.parse_method(text), exchange, comms
        self._optimizer = optimizer
        self._auto: Auto | None = None
        self._seen: list[tuple[float, float]] = []  # of a step: communication, all of it
        self._told, self._steps, self._step = False, 0, 0
        self._first = 0
        self._given: dict[str, Any] | None = None  # another rank's choice, to go on with
        if self.asked.name == "auto":
            self._auto = self._automatic()
        else:
            self._as_asked()
        if self.asked.name == "local":
            exchange.send_buffers(False)

    def _automatic(self) -> Auto:
        return Auto(self._exchange, self._comms, self._take, lambda: self.first)

    def _as_asked(self) -> None:
        if self.asked.name == "exact":
            return
        size = max(_SMALLEST, self._exchange.nbytes // _PARTS)
        self._exchange.buckets(size, size // 2)
        self._take(self.asked.name)

    def renew(self) -> None:
        """Begins anew in a new group of ranks, whose exchange has; a collective.

        Each rank goes on with what it has not said yet of its gradients.
        """
        self._seen.clear()
        left = self._exchange.left
        if self._auto is None:
            self._as_asked()
        elif not self._comms.alone:
            kept = self._auto.state() if self._given is None else self._given
            self._auto = self._automatic()
            self._auto.load_state(kept)
        elif left is not None:  # there is nobody to measure with
            self._take(left.name)
        self._exchange.left = self._given = None
        self.begin(self._steps, self._step)

    @property
    def _finer(self) -> bool:
        """Whether the next step is one of the first."""
        return self._step < self._first

    @property
    def _way(self) -> str:
        return self.asked.name if self._auto is None else self._auto.way

    @property
    def first(self) -> int:
        """So many steps of the training send more than later ones by the way in use."""
        return self._first if self._way == _COARSE else 0

    def _at(self, steps: int, step: int) -> None:
        """So many steps are done of those that the training has."""
        self._steps, self._step = steps, step
        few = int(_FIRST * steps)
        self._first = 0 if os.environ.get(jobenv.PROBE) else min(few, _MOST_FIRST)

    def _go_on(self, steps: int, step: int) -> None:
        """The same, between two steps: it may be time for another way."""
        before = self._finer
        self._at(steps, step)
        if self._finer != before and self._way == _COARSE and self._exchange.method is not None:
            self._take(_COARSE)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Within it averages are made in the same way by who has nothing to say of former steps.

        To be entered and left between two steps; the former goes on where it was.
        """
        former = self._exchange.method
        if former is not None and not isinstance(former, Exact):
            self._exchange.method = self._made(former.name)
        try:
            yield
        finally:
            if former is not None:
                self._exchange.method = former

    def _made(self, name: str) -> Method:
        method = METHODS[name](self._exchange.line())
        if isinstance(method, Local):
            method.comms = self._comms
        if self.asked.number:
            method.number = self.asked.number  # type: ignore[attr-defined]
        return method

    def _take(self, name: str) -> None:
        method = self._made(_FINER if name == _COARSE and self._finer else name)
        if (before := self._exchange.left or self._exchange.method) is not None:
            method.follow(before)
        self._exchange.method = method

    def counted(self) -> None:
        """The optimizer has stepped with what was exchanged last."""
        if (method := self._exchange.method) is not None:
            method.counted()

    def void(self) -> None:
        """What was exchanged last does not count: a rank was lost meanwhile."""
        if (method := self._exchange.method) is not None:
            method.void()

    def begin(self, steps: int, step: int) -> str:
        """Says how many steps the training has, and are done; returns what is to be told."""
        self._go_on(steps, step)
        method = self._exchange.method
        if not isinstance(method, Local):
            return ""
        said = method.begin(steps)
        return f"communication: {method.name}: {said}" if said else ""

    @property
    def parted(self) -> bool:
        """The next step is each rank's own: nothing is exchanged in it."""
        method = self._exchange.method
        return isinstance(method, Local) and method.parted

    def step_apart(self) -> None:
        """Such a step was computed beside the exchange, whose group has lost ranks."""
        method = self._exchange.method
        if isinstance(method, Local):
            method.step_apart()

    @property
    def at_stake(self) -> int:
        """Steps of their own that ranks which were lost have taken with them, at most."""
        method = self._exchange.left or self._exchange.method
        return method.at_stake if isinstance(method, Local) else 0

    def met(self) -> Mapping[str, Tensor]:
        """Parameters where all ranks last met, by name; empty where they are together."""
        method = self._exchange.method
        return method.met() if isinstance(method, Local) else {}

    def stepped(self, step: int) -> None:
        """To be called after each step of the optimizer, with the number of those that are done."""
        self._go_on(self._steps, step)
        method = self._exchange.method
        if not isinstance(method, Local):
            return
        began = self._exchange.moment()
        with self._comms.told_elsewhere():
            if method.parting:
                # Who is still in the last exchange takes its model from one that is not yet alone.
                self._comms.meet(lambda: None)
            if method.due:
                self.together()
        self._exchange.stood(began, self._exchange.moment())

    def together(self, *, moments: bool = False) -> None:
        """Sees to it that all ranks have the same model; a collective where they have not.

        Args:
            moments: And the same state of the optimizer.
        """
        method = self._exchange.method
        if not isinstance(method, Local):
            return
        method.synchronise(self._exchange.moving_buffers())
        if moments and self._optimizer is not None:
            method.share_moments(self._optimizer)

    @property
    def since(self) -> int | None:
        """Number of the first step by a way that measurement settled; ``None``: it was given."""
        return None if self._auto is None else self._auto.since

    @property
    def settled(self) -> bool:
        """The way is the one that is to stay: buckets may be fitted to it."""
        if self._auto is None:
            return self._step >= self.first
        return self._auto.settled

    def computed(self, seconds: Callable[[], float]) -> None:
        """Takes how long this rank computed in the last step, if that matters; 0: not known."""
        if self._auto is not None and not self._comms.alone:
            self._auto.stepped(seconds)

    def looked(self, look: Look) -> str:
        """Takes where the time of the last steps went; what is to be said about it, once."""
        if self._comms.alone:  # the others were lost
            return ""
        if self._auto is not None:
            said = self._auto.looked(look)
            return f"communication: {said}" if said else ""
        if self.asked.name != "exact" or self._told or self._comms.mixed:  # which have no other
            return ""
        parts = look.seconds.sum(0) / len(look.seconds)
        moving = parts[:, PARTS.index("moving")]
        self._seen += list(zip(moving.tolist(), parts.sum(1).tolist(), strict=True))
        if len(self._seen) < _STEPS:
            return ""
        steps = len(self._seen)
        spent, whole = (sum(one) / steps for one in zip(*self._seen, strict=True))
        self._seen.clear()
        if spent < _WORTH * whole or spent < _LEAST:
            return ""
        self._told = True
        return self._advice(spent, whole)

    def _advice(self, moving: float, whole: float) -> str:
        """What other ways would give, where communication costs so much of a step."""
        ranks, count = self._comms.world.size, self._exchange.elements
        step = format_duration(whole)
        so_much = f"{moving / whole:.0%} of each {step} step goes into sending gradients"
        if count < coded_reducer.LEAST:  # it would be sent as it is
            why = "its messages are short, and fewer bytes would not help"
            return f"{so_much}: {why}; a larger batch has fewer of them"
        part = BYTES_SENT["int8"][ranks > 2] * 4 * count / self._exchange.nbytes
        shorter = format_duration(whole - moving * (1 - part))
        return (
            f'{so_much}. session.prepare(…, communication="int8") would make a step about {shorter}'
            ' at best, "auto" measures and chooses (--communication auto of a recipe)'
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; a collective. Nothing where averages are exact."""
        method = self._exchange.method
        if self.asked.name == "exact" or (method is None and self._auto is None):
            return {}
        kept: dict[str, Any] = {"method": "exact", "rests": {}}
        if method is not None:
            rests: dict[str, Any] = {}

            def ask() -> None:
                rests.clear()
                rests.update(method.alike() if self._comms.stale else method.state())

            self._comms.meet(ask)
            kept = {"method": method.name, "rests": rests}
        return kept if self._auto is None else {**kept, "auto": self._auto.state()}

    def alike(self) -> dict[str, Any]:
        """What is the same on every rank of :meth:`state`; no collective."""
        method = self._exchange.method
        if self.asked.name == "exact":
            return {}
        kept: dict[str, Any] = {"method": "exact", "alike": {}}
        if method is not None:
            kept = {"method": method.name, "alike": method.alike()}
        kept |= {"step": self._step, "steps": self._steps}
        return kept if self._auto is None else {**kept, "auto": self._auto.state()}

    def take_alike(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`alike` gave; :meth:`renew` comes next, and goes on with it.

        Only this rank calls it, so nothing is sent here; and of a pass that counts on it what is
        left to say is not known to have counted yet.
        """
        self._at(state.get("steps", self._steps), state.get("step", self._step))
        self._given = state.get("auto", {})
        method = self._exchange.method
        if method is not None and state.get("method") == method.name:
            method.take_alike(state["alike"])

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`state` gave; of another method nothing is left to say."""
        if self._auto is not None:
            self._auto.load_state(state.get("auto", {}))
        method = self._exchange.method
        if method is not None:
            both = {state.get("method"), method.name}
            same = len(both) == 1 or both == {_COARSE, _FINER}  # which keep the same
            method.load_state(state["rests"] if same else {})
