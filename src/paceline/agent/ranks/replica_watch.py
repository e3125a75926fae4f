"""Reports what a script's DistributedDataParallel does: checksums of parameters, and timings.

The launcher compares the checksums of all ranks at the same step, and their timings. Nothing is
sent between ranks, so that a script whose ranks do different things is never held up.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import weakref
from typing import Any, Callable, Dict, List, NamedTuple

from .checksum import checksum
from .gradient_watch import on_import
from .input_watch import hide_in_copies, watch_inputs
from .sampler_watch import SamplerWatch

CHECKSUMS = "replica checksums"
TIMINGS = "replica timings"
TIMINGS_INTERVAL_S = 5.0  # between two reports
COST_SHARE = 0.0005  # part of the time of a training that checksums may take
MIN_INTERVAL = 16  # steps
EARLY_STEPS = (16, 64, 256, 1024)  # replicas are compared in any case, unless that is slow
MAX_EARLY_COST_S = 0.2  # for one of these comparisons
FIRST_TIMED_STEP, LAST_TIMED_STEP = 2, 6  # by which the time of a step is known at first
MAX_TENSORS = 25  # in a message, so that a pipe takes it at once
MAX_NAME = 90  # characters of a parameter's name

Report = Callable[[Dict[str, Any]], None]


class ReplicaWatch:
    """Watches each DistributedDataParallel that this process makes from now on.

    Args:
        verify, measure: Whether checksums and timings are reported.
    """

    def __init__(self, report: Report, *, verify: bool = True, measure: bool = True) -> None:
        self._report, self._verify, self._measure = report, verify, measure
        self._watched: List[_WatchedModel] = []
        self._samplers = SamplerWatch(report)

    def install(self) -> None:
        callbacks: Dict[str, Callable[[Any], None]] = {
            "torch.nn.parallel.distributed": self._watch_models,
            "torch.optim.optimizer": self._watch_optimizers,
        }
        if self._verify:
            callbacks["torch.utils.data.distributed"] = self._samplers.install
            callbacks["torch.distributed.algorithms.join"] = self._watch_joins
        on_import(callbacks)

    def _watch_models(self, module: Any) -> None:
        original = module.DistributedDataParallel.__init__

        @functools.wraps(original)
        def construct(model: Any, *args: Any, **kwargs: Any) -> None:
            original(model, *args, **kwargs)
            is_session = type(model).__module__.startswith("paceline.")  # compares by itself
            if model.process_group.size() > 1 and not is_session:
                watched = _WatchedModel(len(self._watched), model, self._report)
                watched.verifies, watched.measures = self._verify, self._measure
                self._watched.append(watched)
                if self._verify:
                    watch_inputs(model, watched.number, watched.members, self._report)

        module.DistributedDataParallel.__init__ = construct
        getstate = module.DistributedDataParallel.__getstate__
        module.DistributedDataParallel.__getstate__ = hide_in_copies(getstate)

    def _watch_joins(self, module: Any) -> None:
        """Ends comparisons in torch's Join: ranks without data do not count the others' steps."""
        original = module.Join.__enter__

        @functools.wraps(original)
        def enter(context: Any) -> Any:
            with contextlib.suppress(AttributeError):  # not in this torch
                for watched in self._watched if context._enable else ():
                    watched.before_join(sys.modules["torch"], context._joinables)
            return original(context)

        module.Join.__enter__ = enter

    def _watch_optimizers(self, module: Any) -> None:
        torch: Any = sys.modules["torch"]  # which may be being imported

        def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            # Traced where a step is compiled: no names of this module, which cannot be imported.
            if not torch.compiler.is_compiling():
                self._before_step(optimizer)

        module.register_optimizer_step_pre_hook(before_step)

    def _before_step(self, optimizer: Any) -> None:
        torch: Any = sys.modules["torch"]
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return
        self._samplers.on_step()
        for watched in self._watched:
            watched.before_step(torch, optimizer)


class _Sums(NamedTuple):
    """What DDP has measured of some steps.

    Attributes:
        num_steps: The first ten steps, and then one in a hundred.
        moving_s: From the first exchange of gradients to the end of the last, in all these steps.
        overlap_s: The part of it in which the backward pass went on.
    """

    num_steps: int
    moving_s: float
    overlap_s: float

    @classmethod
    def read(cls, timings: Dict[str, Any]) -> "_Sums":
        """Reads DDP's logging data; KeyError if it has no timings."""
        step = int(timings["iteration"])
        num_steps = min(step, 10) + step // 100
        return cls(
            num_steps,
            timings["avg_backward_comm_time"] / 1e9 * num_steps,
            timings["avg_backward_compute_comm_overlap_time"] / 1e9 * num_steps,
        )


class _WatchedModel:
    """One model: its steps are those of the optimizers that have parameters of it.

    Args:
        number: Number of the model, in the order in which the script makes them.
    """

    verifies = measures = True

    def __init__(self, number: int, model: Any, report: Report) -> None:
        distributed: Any = sys.modules["torch.distributed"]
        self.number, self._report = number, report
        self._model = weakref.ref(model)
        self.members = distributed.get_process_group_ranks(model.process_group)
        self._ids = {id(parameter) for parameter in model.parameters()}
        self._is_trained_by: Any = weakref.WeakKeyDictionary()
        self._step, self._interval = -1, 0  # until it is known, how long a step takes
        self._cost_s, self._start_s, self._start_step = 0.0, 0.0, 0
        self._first_step_s = self._last_report_s = 0.0
        self._first_sums = _Sums(0, 0.0, 0.0)  # in the first steps, ranks wait for preparations

    def before_step(self, torch: Any, optimizer: Any) -> None:
        model = self._model()
        if model is None or not self._trains(optimizer):
            return
        self._step += 1
        if self.measures:
            self._report_timings(model)
        if self.verifies:
            self._verify(torch, model)

    def before_join(self, torch: Any, joinables: List[Any]) -> None:
        """Makes the comparison before the first step, and ends the comparisons, as on all ranks.

        In torch's ``Join``, a rank without data does not count the steps of the others.
        """
        model = self._model()
        if model is None or not self.verifies or all(item is not model for item in joinables):
            return
        if self._step < 0:
            with contextlib.suppress(Exception):  # as in a step
                self._send(torch, model, 0)
        self.verifies = False

    def _report_timings(self, model: Any) -> None:
        """Reports the timings that DDP takes of some steps, and the mean time of all steps."""
        current_s = time.monotonic()
        if self._step <= FIRST_TIMED_STEP:
            self._first_step_s = self._last_report_s = current_s
        is_due = current_s - self._last_report_s > TIMINGS_INTERVAL_S
        if self._step < FIRST_TIMED_STEP or not (
            is_due or self._step in (FIRST_TIMED_STEP, LAST_TIMED_STEP)
        ):
            return
        self._last_report_s = current_s
        try:
            timings = model._get_ddp_logging_data()
            sums = _Sums.read(timings)
            size = int(timings["total_parameter_size_bytes"])
        except Exception:  # not in this torch, or not for this model
            self.measures = False
            return
        if self._step == FIRST_TIMED_STEP:
            self._first_sums = sums
        num_steps = sums.num_steps - self._first_sums.num_steps
        if num_steps <= 0:
            return
        moving_s = (sums.moving_s - self._first_sums.moving_s) / num_steps
        overlap_s = (sums.overlap_s - self._first_sums.overlap_s) / num_steps
        self._report(
            {
                "kind": "event", "event": TIMINGS, "replica": self.number, "step": self._step,
                "members": self.members, "bytes": size, "moving_s": max(0.0, moving_s),
                "stall_s": max(0.0, moving_s - overlap_s),
                "seconds": (current_s - self._first_step_s) / (self._step - FIRST_TIMED_STEP),
            }
        )  # fmt: skip

    def _verify(self, torch: Any, model: Any) -> None:
        if self._step in (FIRST_TIMED_STEP, LAST_TIMED_STEP):
            self._time_steps()
        is_early = self._step in EARLY_STEPS and self._cost_s <= MAX_EARLY_COST_S
        if self._step == 0 or is_early or (self._interval and self._step % self._interval == 0):
            start_s = time.monotonic()
            try:
                self._send(torch, model, self._step)
            except Exception:  # no memory for it, or a tensor without bits of its own
                self.verifies = False
                return
            self._cost_s = time.monotonic() - start_s
            if self._interval:
                self._time_steps()

    def _trains(self, optimizer: Any) -> bool:
        if optimizer not in self._is_trained_by:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self._is_trained_by[optimizer] = any(id(p) in self._ids for p in parameters)
        return bool(self._is_trained_by[optimizer])

    def _time_steps(self) -> None:
        """Chooses the interval: a power of two, so that ranks with different ones meet."""
        current_s, steps = time.monotonic(), self._step - self._start_step
        if self._start_step:
            step_s = max((current_s - self._start_s) / max(steps, 1), 1e-6)
            wanted = max(MIN_INTERVAL, self._cost_s / (COST_SHARE * step_s))
            self._interval = 1 << (int(wanted) - 1).bit_length()
        self._start_s, self._start_step = current_s, self._step

    def _send(self, torch: Any, model: Any, step: int) -> None:
        ignored = getattr(model, "parameters_to_ignore", ())
        named = [(n, p) for n, p in model.module.named_parameters() if n not in ignored]
        with torch.no_grad():
            sums = [checksum(torch, parameter.detach()) for _, parameter in named]
            values = torch.stack(sums).tolist()
        rows = [
            {"name": name[-MAX_NAME:], "value": "%016x" % (value & (1 << 64) - 1)}
            for (name, _), value in zip(named, values)
        ]
        for start in range(0, len(rows), MAX_TENSORS):
            self._report(
                {
                    "kind": "event", "event": CHECKSUMS, "replica": self.number,
                    "step": step, "members": self.members, "first": start,
                    "sums": rows[start : start + MAX_TENSORS], "exchanges": _exchanges(model),
                }
            )  # fmt: skip


def _exchanges(model: Any) -> bool:
    """Whether DDP has exchanged gradients before this step; true if that is not known."""
    try:
        return bool(model._get_ddp_logging_data()["iteration"])
    except Exception:  # not in this torch, or not for this model
        return True
