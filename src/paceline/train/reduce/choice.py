"""Chooses the reducer of a model's gradients: the one that was asked for, or ``auto``'s."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from paceline.spec import jobenv
from paceline.spec.formatting import format_duration
from paceline.spec.training import communication
from paceline.spec.training.step_time import BYTES_SENT
from paceline.train.comms import Comms
from paceline.train.measure.pace import PARTS, StepTimings
from paceline.train.parallel import Replica, trained_buffers
from paceline.train.reduce.auto import AutoMethod
from paceline.train.reduce.buckets import BucketExchange
from paceline.train.reduce.coded_reducer import MIN_BUCKET, SMALL_PARAMETER, CodedReducer
from paceline.train.reduce.exact import Exact
from paceline.train.reduce.local import Local
from paceline.train.reduce.reducer import GradientReducer
from paceline.train.reduce.registry import REDUCERS

_MIN_SHARE = 0.2  # of a step that communication takes before other methods are recommended
_MIN_S = 0.01  # of a step that it takes then
_JUDGED_STEPS = 8  # that this is judged by
_BUCKETS, _MIN_BUCKET_BYTES = 8, 1 << 18  # so many buckets, unless they become too small
_WARMUP_SHARE, _MAX_WARMUP_STEPS = 0.1, 20
"""Part of a training, and at most steps, whose gradients are sent in 8 bits instead of 4: what
optimizers make of the first gradients decides how soon the loss falls (``bench/slow_links``)."""
_COARSE, _WARMUP_METHOD = "int4", "int8"


class Communication:
    """How the gradients of one model are averaged.

    Args:
        method: As ``session.prepare`` takes it.

    Attributes:
        requested: The method, parsed.
    """

    def __init__(
        self,
        method: str,
        exchange: BucketExchange,
        comms: Comms,
        optimizer: Optimizer | None = None,
    ) -> None:
        self.requested = communication.parse_method(method)
        self._exchange, self._comms, self._optimizer = exchange, comms, optimizer
        self._auto: AutoMethod | None = None
        self._observed: list[tuple[float, float]] = []  # seconds of communication and of the step
        self._has_advised = False
        self._steps = self._step = 0  # of the training, and done
        self._warmup_steps = 0
        self._adopted_auto: dict[str, Any] | None = None  # state of another rank's AutoMethod
        if self.requested.name == "auto":
            self._auto = self._make_auto()
        else:
            self._use_requested()
        if self.requested.name == "local":
            _replica(exchange).broadcast_buffers = False

    def _make_auto(self) -> AutoMethod:
        return AutoMethod(self._exchange, self._comms, self._use, lambda: self.warmup_steps)

    def _use_requested(self) -> None:
        if self.requested.name == "exact":
            return
        size = max(_MIN_BUCKET_BYTES, self._exchange.nbytes // _BUCKETS)
        self._exchange.set_bucket_sizes(size, size // 2)
        self._use(self.requested.name)

    def _use(self, name: str) -> None:
        """Uses a reducer from now on, which goes on where the last one stopped."""
        is_too_coarse = name == _COARSE and self._is_warmup
        reducer = self._make_reducer(_WARMUP_METHOD if is_too_coarse else name)
        if (former := self._exchange.former_reducer or self._exchange.reducer) is not None:
            reducer.adopt(former)
        self._exchange.reducer = reducer

    def _make_reducer(self, name: str) -> GradientReducer:
        reducer = REDUCERS[name](self._exchange.context())
        if isinstance(reducer, Local):
            reducer.comms = self._comms
            reducer.local_steps = self.requested.number or reducer.local_steps
        return reducer

    @property
    def local(self) -> Local | None:
        """The reducer, if it makes local steps."""
        reducer = self._exchange.reducer
        return reducer if isinstance(reducer, Local) else None

    def renew(self) -> None:
        """Continues in a new group of ranks, after the exchange has done so; a collective.

        Each rank goes on with the quantisation errors of its gradients.
        """
        self._observed.clear()
        former = self._exchange.former_reducer
        if self._auto is None:
            self._use_requested()
        elif not self._comms.is_alone:
            state = self._auto.state() if self._adopted_auto is None else self._adopted_auto
            self._auto = self._make_auto()
            self._auto.load_state(state)
        elif former is not None:  # there is no other rank to measure with
            self._use(former.name)
        self._exchange.former_reducer = self._adopted_auto = None
        self.begin(self._steps, self._step)

    @contextmanager
    def temporary_reducer(self) -> Iterator[None]:
        """The context in which a new reducer of the same kind takes the present one's place.

        To be entered and left between two steps; the former goes on where it was.
        """
        former = self._exchange.reducer
        if former is not None and not isinstance(former, Exact):
            self._exchange.reducer = self._make_reducer(former.name)
        try:
            yield
        finally:
            if former is not None:
                self._exchange.reducer = former

    @property
    def _is_warmup(self) -> bool:
        """Whether the next step is one of the first, which 4 bits are too coarse for."""
        return self._step < self._warmup_steps

    @property
    def _method(self) -> str:
        return self.requested.name if self._auto is None else self._auto.method

    @property
    def warmup_steps(self) -> int:
        """First steps of the training that send more than later ones by the method in use."""
        return self._warmup_steps if self._method == _COARSE else 0

    def _set_position(self, steps: int, step: int) -> None:
        self._steps, self._step = steps, step
        is_probe = bool(os.environ.get(jobenv.PROBE))
        self._warmup_steps = 0 if is_probe else min(int(_WARMUP_SHARE * steps), _MAX_WARMUP_STEPS)

    def _advance(self, steps: int, step: int) -> None:
        """Takes the position between two steps: it may be time for another reducer."""
        was_fine = self._is_warmup
        self._set_position(steps, step)
        has_reducer = self._exchange.reducer is not None
        if self._is_warmup != was_fine and self._method == _COARSE and has_reducer:
            self._use(_COARSE)

    def begin(self, steps: int, step: int) -> str:
        """Takes how many steps the training has, and are done; returns what is to be told."""
        self._advance(steps, step)
        if local := self.local:
            return f"communication: {Local.name}: {local.set_length(steps)}"
        if self._auto is None and isinstance(self._exchange.reducer, CodedReducer):
            return self._no_effect()
        return ""

    def _no_effect(self) -> str:
        """Returns a message if the model is too small for any gradient to be coded."""
        sizes = [parameter.numel() for parameter in self._exchange.exchanged]
        if max(sizes, default=0) < SMALL_PARAMETER:
            reason = f"all trained parameters have fewer than {SMALL_PARAMETER:,} elements"
        elif sum(sizes) < MIN_BUCKET:
            reason = f"the model has fewer than {MIN_BUCKET:,} trained elements"
        else:
            return ""
        name = self.requested.name
        return f"communication: {name} has no effect: {reason}, which are sent as they are"

    @property
    def is_local(self) -> bool:
        local = self.local
        return local is not None and local.is_local

    @property
    def max_unsynced_steps(self) -> int:
        """Local steps that lost ranks have taken with them, at most."""
        reducer = self._exchange.former_reducer or self._exchange.reducer
        return reducer.max_unsynced_steps if isinstance(reducer, Local) else 0

    def stepped(self, step: int) -> None:
        """Advances the method after ``step`` steps of the optimizer, and exchanges what is due."""
        self._advance(self._steps, step)
        local = self.local
        if local is None:
            return
        model = _replica(self._exchange)
        start = model.timestamp()
        with self._comms.excluded_from_waited():
            if local.begins_local:
                # A rank in the last exchange takes its model from one that is not local yet.
                self._comms.collective(lambda: None)
            if local.is_due:
                self.synchronise()
        model.stalls.append((start, model.timestamp()))

    def synchronise(self, *, moments: bool = False) -> None:
        """Gives all ranks the same model; a collective if they differ."""
        local = self.local
        if local is None:
            return
        local.synchronise(trained_buffers(self._exchange.model.module))
        if moments and self._optimizer is not None:
            local.average_moments(self._optimizer)

    @property
    def final_step(self) -> int | None:
        """Number of the first step by a measured method; ``None``: it was asked for."""
        return None if self._auto is None else self._auto.final_step

    @property
    def is_final(self) -> bool:
        """Whether the method will not change any more, so that buckets may be fitted to it."""
        return self._step >= self.warmup_steps if self._auto is None else self._auto.is_final

    def computed(self, seconds: Callable[[], float]) -> None:
        """Takes how long this rank computed in the last step, if that matters; 0: not known."""
        if self._auto is not None and not self._comms.is_alone:
            self._auto.stepped(seconds)

    def consider(self, timings: StepTimings) -> str:
        """Takes where the time of the last steps went; returns what is to be told, once."""
        if self._comms.is_alone:  # the others were lost
            return ""
        if self._auto is not None:
            text = self._auto.consider(timings)
            return f"communication: {text}" if text else ""
        has_choice = self.requested.name == "exact" and not self._comms.mixed
        if self._has_advised or not has_choice:
            return ""
        parts = timings.seconds.sum(0) / len(timings.seconds)
        moving = parts[:, PARTS.index("moving")]
        self._observed += list(zip(moving.tolist(), parts.sum(1).tolist(), strict=True))
        steps = len(self._observed)
        if steps < _JUDGED_STEPS:
            return ""
        moving_s, step_s = (sum(values) / steps for values in zip(*self._observed, strict=True))
        self._observed.clear()
        if moving_s < _MIN_SHARE * step_s or moving_s < _MIN_S:
            return ""
        self._has_advised = True
        return self._advice(moving_s, step_s)

    def _advice(self, moving_s: float, step_s: float) -> str:
        """What other methods would save, when communication costs so much of a step."""
        ranks, count = self._comms.world.size, self._exchange.elements
        share = f"{moving_s / step_s:.0%} of each {format_duration(step_s)} step"
        finding = f"{share} goes into sending gradients"
        if count < MIN_BUCKET:  # it would be sent as it is
            cause = "its messages are short, and fewer bytes would not help"
            return f"{finding}: {cause}; a larger batch has fewer of them"
        part = BYTES_SENT["int8"][ranks > 2] * 4 * count / self._exchange.nbytes
        shorter = format_duration(step_s - moving_s * (1 - part))
        return (
            f'{finding}. With session.prepare(…, communication="int8") a step would take at least'
            f' {shorter}. communication="auto" measures, then chooses the fastest method (for a'
            " recipe: --communication auto)"
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; a collective. Nothing when averages are exact."""
        reducer = self._exchange.reducer
        if self.requested.name == "exact" or (reducer is None and self._auto is None):
            return {}
        state: dict[str, Any] = {"method": "exact", "rests": {}}
        if reducer is not None:
            residuals: dict[str, Any] = {}

            def collect() -> None:
                residuals.clear()
                is_stale = self._comms.stale
                residuals.update(reducer.replicated_state() if is_stale else reducer.state())

            self._comms.collective(collect)
            state = {"method": reducer.name, "rests": residuals}
        return state if self._auto is None else {**state, "auto": self._auto.state()}

    def replicated_state(self) -> dict[str, Any]:
        """The part of :meth:`state` that is the same on every rank; no collective."""
        reducer = self._exchange.reducer
        if self.requested.name == "exact":
            return {}
        state: dict[str, Any] = {"method": "exact", "alike": {}}
        if reducer is not None:
            state = {"method": reducer.name, "alike": reducer.replicated_state()}
        state |= {"step": self._step, "steps": self._steps}
        return state if self._auto is None else {**state, "auto": self._auto.state()}

    def load_replicated_state(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`replicated_state` gave; :meth:`renew` comes next, and goes on with it.

        Only this rank calls it, so nothing is sent here; and the residuals of a pass that counts on
        this rank are not known to have counted yet.
        """
        self._set_position(state.get("steps", self._steps), state.get("step", self._step))
        self._adopted_auto = state.get("auto", {})
        reducer = self._exchange.reducer
        if reducer is not None and state.get("method") == reducer.name:
            reducer.load_replicated_state(state["alike"])

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`state` gave; residuals of another method are dropped."""
        if self._auto is not None:
            self._auto.load_state(state.get("auto", {}))
        reducer = self._exchange.reducer
        if reducer is not None:
            methods = {state.get("method"), reducer.name}
            # these two have the same residuals
            is_compatible = len(methods) == 1 or methods == {_COARSE, _WARMUP_METHOD}
            reducer.load_state(state["rests"] if is_compatible else {})


def _replica(exchange: BucketExchange) -> Replica:
    """Returns the model of a session, which alone may take local steps."""
    assert isinstance(exchange.model, Replica)
    return exchange.model
