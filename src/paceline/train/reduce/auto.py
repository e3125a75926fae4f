"""``auto``: measures step and network, and takes the finest method that hides its bytes.

Network and coding are measured before the first step, and computing in it: so there is a choice
after one step, and a better one after each of the next two. Then the time of some steps decides. It
is measured again when communication takes longer or shorter than it did, and now and then, for a
network that became faster shows in nothing. All ranks decide by the slowest, so alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.train.comms import Comms
from paceline.train.data.fetch import usable_cpus
from paceline.train.measure.pace import PARTS, StepTimings
from paceline.train.reduce.buckets import BucketExchange
from paceline.train.reduce.codecs import BLOCK
from paceline.train.reduce.coded_reducer import CodedReducer
from paceline.train.reduce.collectives import Collectives
from paceline.train.reduce.registry import REDUCERS
from paceline.train.reduce.selection import CANDIDATES, TOLERANCE, Choice, Measurement, choose

_SKIPPED_STEPS = 2  # after a change: memory, caches and buckets are new
_SAMPLE_STEPS = 5
_EARLY_STEPS = 3  # after each of which there is a preliminary choice
_MAX_EXACT_S, _FALLBACK_METHOD = 1.0, "int8"  # for all bytes, or not even the first step is exact
_PROBE_S, _MAX_PROBE_BYTES = 0.1, 1 << 24  # of a message that shows how fast the network is
_SAMPLE_ELEMENTS = 1 << 20  # that are coded for a measurement
_CHANGED_SHARE = 0.15  # of a step by which communication differs from before
_MEASURING_SHARE = 0.002  # of the time that measuring again may take
_BUCKET_S = 0.5e-3  # that a bucket takes on busy processors, before it is known
_MAX_TRIALS = 4  # methods and numbers of buckets, before one of them is to stay
_MOVING, _WAITING = PARTS.index("moving"), PARTS.index("waiting")


class AutoMethod:
    """Chooses the method of one model's exchange. Every rank has one and calls it alike.

    Args:
        use: Switches to a method by name, which keeps the last one's quantisation errors.
        warmup_steps: Returns the number of first steps in which the method in use sends more bytes
            than later.

    Attributes:
        choice: The last choice; ``None`` before the first step.
        final_step: Number of the first step with the final method.
        is_final: Whether the choice was confirmed by the time of steps; before, it is preliminary.
    """

    def __init__(
        self,
        exchange: BucketExchange,
        comms: Comms,
        use: Callable[[str], None],
        warmup_steps: Callable[[], int] = lambda: 0,
    ) -> None:
        self._exchange, self._comms, self._use_method = exchange, comms, use
        self._warmup_steps = warmup_steps
        self._collectives, self._cpu_s = Collectives(exchange.context()), 0.0  # of the last sum
        self.choice: Choice | None = None
        self.is_final, self.final_step = False, 0
        self._seen: list[Tensor] = []  # seconds of each rank and part, by step
        self._reference_share: float | None = None  # of a step that communication took at first
        self._changes, self._change_step, self._next_check = 0, 0, 0
        self._first_step: int | None = None
        self._network, self._is_unused = self._measure(), True  # no look has used it yet
        self._tried: dict[tuple[str, int], float] = {}  # seconds of a step, by method and buckets
        self._slowdown: dict[str, float] = {}  # by method: times the forecast that its steps took
        self._bucket_s = _BUCKET_S if comms.device.type == "cpu" else 0.0  # see Measurement
        self._early: list[float] = []  # seconds that the slowest rank computed, by step
        if self._network.sent["exact"] / self._network.bytes_per_s > _MAX_EXACT_S:
            fallback = replace(self._network, computing_s=_MAX_EXACT_S, bucket_s=self._bucket_s)
            self._use(Choice(_FALLBACK_METHOD, fallback.best(_FALLBACK_METHOD)[0], {}))

    def stepped(self, computing: Callable[[], float]) -> None:
        """Chooses by the computing time of a step, after each of the first few steps."""
        if self.is_final or len(self._early) >= _EARLY_STEPS:
            return
        slowest = self._comms.max(torch.tensor([computing()], dtype=torch.float64))[0]
        self._early.append(slowest)
        if slowest > 0:
            shortest = min(seconds for seconds in self._early if seconds > 0)
            choice = choose(replace(self._network, computing_s=shortest, bucket_s=self._bucket_s))
            if choice.method != self.method:
                self._use(choice)
                self._change_step = len(self._early)

    @property
    def method(self) -> str:
        return "exact" if self.choice is None else self.choice.method

    def consider(self, timings: StepTimings) -> str:
        """Reconsiders the choice by the timings of the last steps; called between two steps.

        Returns:
            What was decided, and why; empty when nothing changes.
        """
        numbers = torch.arange(timings.seconds.shape[1]) * timings.stride + timings.first_step
        if not self.is_final and self._first_step is None:
            self._first_step = int(numbers[0])  # steps are counted from there
            self._change_step += self._first_step
        eligible = numbers >= max(self._change_step, self._warmup_steps()) + _SKIPPED_STEPS
        end = int(numbers[-1]) + 1
        self._seen += list(timings.seconds[:, eligible].unbind(1))
        if len(self._seen) < _SAMPLE_STEPS:
            return ""
        steps, self._seen = torch.stack(self._seen, dim=1), []
        if self.is_final and not self._is_check_due(steps, end):
            return ""
        is_first, present = not self.is_final, self._in_use
        idle = steps[:, :, _MOVING] + steps[:, :, _WAITING]
        computing_s = float((steps.sum(2) - idle).median(1).values.max())
        measured = self._update_network(computing_s, is_first)
        if is_first:
            # Bytes move on all ranks at once; who waits for whom may change from step to step.
            step_s = computing_s + float(steps[0, :, _MOVING].median())
            measured, choice, self.is_final = self._evaluate_trial(measured, step_s)
            if not self.is_final:
                self._use(choice)
                self._change_step = end
                return ""
        else:
            choice = choose(measured, self.method, self._slowdown)
        step_s = max(float(steps.sum(2).mean()), 1e-6)
        self._next_check = end + max(100, int(self._measuring_s / _MEASURING_SHARE / step_s))
        self._reference_share, self._change_step, self.final_step = None, end, self._change_step
        if choice.method == present[0] and not is_first:
            return ""
        is_changed = (choice.method, choice.buckets) != present
        if is_changed and {choice.method, present[0]} != {"exact"}:
            self._use(choice)
            self.final_step = end
        self.choice = choice
        return choice.explain(measured)

    def _update_network(self, computing_s: float, is_first: bool) -> Measurement:
        """Returns the measurement after steps in which the slowest rank computed so long."""
        if not (is_first or self._is_unused):
            handling_s = self._network.handling_s  # other threads of a rank may be at work by now
            network = self._measure()
            self._network = replace(network, handling_s=min(handling_s, network.handling_s))
        self._is_unused = False
        # while a CPU has to do with messages, it computes less
        pure_s = max(computing_s - self._network.processor_s(self.method), 1e-6)
        return replace(self._network, computing_s=pure_s, bucket_s=self._bucket_s)

    @property
    def _in_use(self) -> tuple[str, int]:
        """Method in use, and its number of buckets; 0 when the buckets are DDP's."""
        return _trial_of(self.choice) if self.choice else ("exact", 0)

    def _evaluate_trial(
        self, measured: Measurement, seconds: float
    ) -> tuple[Measurement, Choice, bool]:
        """Chooses again after the method in use took ``seconds`` a step.

        No measurement tells how long codes wait for a processor while ranks compute. So if steps
        differ from the forecast another method or number of buckets is tried, and the best stays.

        Returns:
            The corrected measurement, the choice, and whether it is final.
        """
        present = self._in_use
        if present[0] != "exact":
            corrected = measured.corrected(*present, seconds)
            # the most that was seen: it is not the same in all numbers
            bucket_s = max(corrected.bucket_s, measured.bucket_s if self._tried else 0.0)
            measured, self._bucket_s = replace(measured, bucket_s=bucket_s), bucket_s
            self._tried[present] = seconds
        elif seconds < measured.best("exact")[1]:  # otherwise other buckets may yet be better
            self._slowdown["exact"] = seconds / measured.best("exact")[1]
        choice = choose(measured, slowdown=self._slowdown)
        if choice.method == "exact":
            return measured, choice, True
        if _trial_of(choice) not in self._tried and len(self._tried) < _MAX_TRIALS:
            return measured, choice, False
        limit = TOLERANCE * min(self._tried.values())
        candidates = [trial for trial, duration in self._tried.items() if duration <= limit]
        method, buckets = min(candidates, key=lambda t: (CANDIDATES.index(t[0]), self._tried[t]))
        slowest_first = sorted(self._tried.items(), key=lambda item: -item[1])
        durations = {trial[0]: duration for trial, duration in slowest_first}
        self._slowdown |= {name: s / measured.best(name)[1] for name, s in durations.items()}
        return measured, Choice(method, buckets, {**choice.seconds, **durations}), True

    def _is_check_due(self, steps: Tensor, end: int) -> bool:
        share = float(steps[:, :, _MOVING].mean() / steps.sum(2).mean().clamp(min=1e-9))
        if self._reference_share is None:
            self._reference_share = share
        is_changed = abs(share - self._reference_share) > _CHANGED_SHARE
        self._changes = self._changes + 1 if is_changed else 0
        return self._changes >= 2 or end >= self._next_check

    def _measure(self) -> Measurement:
        """Measures network and coding by the slowest rank, but not computing; a collective."""
        context, start = self._exchange.context(), time.perf_counter()
        latency_s, bytes_per_s, handling_s = self._probe()
        coding_s = [self._measure_coding(method) for method in CANDIDATES]
        timings = [latency_s, 1 / bytes_per_s, *coding_s, handling_s, time.perf_counter() - start]
        slowest = self._comms.max(torch.tensor(timings, dtype=torch.float64))
        self._measuring_s = slowest.pop()  # what it costs to measure again
        handling_s = slowest.pop()
        elements, ranks = self._exchange.elements, context.world_size
        sent = {
            method: REDUCERS[method](context, self._collectives).bytes_sent(elements, ranks)
            for method in CANDIDATES
        }
        return Measurement(
            0.0,
            self._exchange.nbytes,
            slowest[0],
            1 / slowest[1],
            sent,
            dict(zip(CANDIDATES, slowest[2:], strict=True)),
            handling_s=handling_s,
        )

    def _measure_coding(self, method: str) -> float:
        reducer = REDUCERS[method]
        if not issubclass(reducer, CodedReducer):
            return 0.0
        count = max(1, min(_SAMPLE_ELEMENTS, self._exchange.elements) // BLOCK) * BLOCK
        generator = torch.Generator().manual_seed(0)  # the script's own draws must not change
        values = torch.randn(count, generator=generator).to(self._comms.device)
        size = reducer.up.message_bytes(count)
        message = torch.zeros(size, dtype=torch.uint8, device=values.device)
        seconds = []
        for _ in range(3):
            start = self._time()
            reducer.up.encode(values, message, keep_error=reducer.has_feedback)
            reducer.up.decode(message, values)
            reducer.up.decode(message, values, add=True)
            seconds.append(self._time() - start)
        return min(seconds) * self._exchange.elements / count

    def _probe(self) -> tuple[float, float, float]:
        """Measures the network.

        Returns:
            Seconds of a collective of a few bytes, bytes a second that this rank sends, and
            seconds for which that takes the processor that computes, a byte.
        """
        latency_s = min(self._all_reduce_s(256) for _ in range(4))
        size, ranks = 1 << 14, self._collectives.world_size
        while True:
            self._all_reduce_s(256)  # all begin together
            seconds = self._all_reduce_s(size // 4)
            slowest_s = self._comms.max(torch.tensor([seconds], dtype=torch.float64))[0]
            if slowest_s >= _PROBE_S or size >= _MAX_PROBE_BYTES:
                sent = 2 * (ranks - 1) / ranks * size
                handling_s = 0.0 if self._has_spare_processor else self._cpu_s / sent
                return latency_s, sent / max(seconds - latency_s, 1e-9), handling_s
            size *= 4

    @property
    def _has_spare_processor(self) -> bool:
        """Whether bytes are moved by a processor that does not compute."""
        if self._comms.device.type != "cpu":
            return True
        computing = torch.get_num_threads() * self._comms.world.local_size
        return usable_cpus() > computing

    def _all_reduce_s(self, elements: int) -> float:
        tensor = torch.zeros(elements, device=self._comms.device)
        start, cpu_start_s = self._time(), time.process_time()

        def act() -> None:
            if self._comms.stale:
                self._comms.wait_for_all()
            else:
                self._collectives.ring_all_reduce(tensor)

        self._comms.event(act)
        self._cpu_s = time.process_time() - cpu_start_s
        return self._time() - start

    def _time(self) -> float:
        if self._comms.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def _use(self, choice: Choice) -> None:
        self.choice = choice
        if choice.method == "exact":  # DDP's own way costs least; BucketTrial begins with it
            self._exchange.reset()
            return
        size = max(1, self._exchange.nbytes // choice.buckets)
        first = max(1, size // 2) if choice.buckets > 1 else size
        self._exchange.set_bucket_sizes(size, first)
        self._use_method(choice.method)

    def state(self) -> dict[str, Any]:
        """Returns the final choice; empty before there is one."""
        if self.choice is None or not self.is_final:
            return {}
        ranks = self._collectives.world_size
        return {
            "way": self.choice.method,
            "buckets": self.choice.buckets,
            "seconds": dict(self.choice.seconds),
            "known": {"ranks": ranks, "each": self._bucket_s, "off": dict(self._slowdown)},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on with what was chosen, and measures again after some steps."""
        if state.get("way") in CANDIDATES:
            self._use(Choice(state["way"], int(state["buckets"]), dict(state["seconds"])))
            saved = state.get("known", {})
            if saved.get("ranks") == self._collectives.world_size:
                self._bucket_s, self._slowdown = float(saved["each"]), dict(saved["off"])
            self.is_final, self._next_check = True, 0


def _trial_of(choice: Choice) -> tuple[str, int]:
    return choice.method, 0 if choice.method == "exact" else choice.buckets
