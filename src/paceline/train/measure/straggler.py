"""Which rank holds the others up, why, and what that costs: decided from looks alone.

Every rank has the same looks, so every rank decides the same. A rank is named when it needs
clearly more time than the others for its own part of a step, in three groups of steps one after
the other, so that no single event (a first step, a compilation, an evaluation, a checkpoint, a
garbage collection, a hiccup of a disk) names anybody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.spec.formatting import format_duration
from paceline.train.measure.pace import PARTS, StepTimings, active_ranks, combined_vitals, num_steps
from paceline.train.measure.slow_link import STEADY_COUNT, find_slow_link, recent_timings
from paceline.train.measure.vitals import VITALS

GROUP_STEPS, NUM_GROUPS = 5, 3  # steps, and how many groups of them have to agree
MIN_EXCESS_PART = 0.25  # part of a step that is worth a name
MIN_EXCESS_S = 0.002  # seconds of a step below which nothing is
MIN_STEP_EXCESS_PART = 0.4  # of both: a step in which a rank is that much slower counts against it
MIN_SLOW_STEPS_PART = 0.8  # of the steps have to
RECOVERED_PART = 0.5  # of both, below which a rank that was named keeps up again
MIN_EXPLAINED_PART = 0.3  # of the time that a rank needs more: what explains that is the cause
MAX_STEP_RATIO = 10  # usual steps: a step that takes longer counts as one of so many
MIN_SUMMARY_PART = 0.005  # of all steps, at the end of a training
SKIPPED_STEPS = 2  # steps of the process that say nothing
_AT = {name: number for number, name in enumerate(PARTS)}

CAUSES = {
    "quota": "its CPU quota throttles it",
    "cpu": "other programs use its CPUs",
    "stolen": "the hypervisor takes its host's CPUs",
    "swap": "its memory is swapped out",
    "hot": "its CPU is slowed down because of its heat",
    "share": "its share of each batch is larger",
    "batch": "its samples are larger",
    "data": "it waits for its data",
    "link": "its link is slow",
    "computing": "it computes more slowly",
}
"""Why a rank may be slow, by name; ``computing`` where nothing else is seen."""
BURSTY_CAUSES = ("quota", "swap", "data")


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that holds the others up.

    Attributes:
        cause: One of :data:`CAUSES`.
        seconds: By which every step is longer because of it.
        part: Of the time of a step.
        detail: What was seen of the cause, for people.
    """

    rank: int
    cause: str
    seconds: float
    part: float
    detail: str = ""

    def describe(self, rank_name: str) -> str:
        """Describes the straggler to users, who know it by this name."""
        cause = CAUSES[self.cause] + (f" ({self.detail})" if self.detail else "")
        return (
            f"{rank_name} slows the others down by {format_duration(self.seconds)} a step"
            f" ({self.part:.0%}): {cause}"
        )

    def summarize(self, rank_name: str) -> str:
        return (
            f"{rank_name}, for which the others waited {format_duration(self.seconds)} a step"
            f" ({self.part:.0%} of it): {CAUSES[self.cause]}"
        )


class StragglerDetector:
    """Reads step timings and decides which rank is slow.

    Attributes:
        current: The straggler at present; ``None`` when all keep up.
    """

    def __init__(self) -> None:
        self._history: list[StepTimings] = []
        self._is_first = True
        self._cost: dict[tuple[int, str], list[float]] = {}
        self.current: Straggler | None = None

    def update(self, timings: StepTimings) -> bool:
        """Adds timings; returns whether the straggler or its cause changed."""
        if self._is_first:
            self._is_first, timings = False, skip_steps(timings, SKIPPED_STEPS)
        if len(timings.seconds) < 2 or not timings.samples.shape[1]:
            return False
        self._history.append(timings)
        link_window = len(recent_timings(self._history)) or len(self._history)
        del self._history[: -max(STEADY_COUNT, len(_latest_timings(self._history)), link_window)]
        former = self.current
        if _num_noted_steps(self._history) < GROUP_STEPS * NUM_GROUPS - SKIPPED_STEPS:
            return False
        straggler = find_straggler(self._history, former)
        if straggler is not None:
            cost = self._cost.setdefault((straggler.rank, straggler.cause), [0.0, 0.0])
            steps = timings.samples.shape[1]
            if former is None:
                select = recent_timings if straggler.cause == "link" else _latest_timings
                steps = _num_noted_steps(select(self._history))
            cost[0], cost[1] = cost[0] + straggler.seconds * steps, cost[1] + straggler.part * steps
        self.current = straggler
        if straggler is None or former is None:
            is_gone = former is not None and former.rank not in active_ranks(self._history)
            return straggler is not former and not is_gone  # who was dropped does not keep up again
        return (straggler.rank, straggler.cause) != (former.rank, former.cause)

    def costliest(self, steps: int) -> Straggler | None:
        """Returns the straggler that cost most over these steps of the training.

        ``None`` where that is less than half a percent of them: it would be named for nothing.
        """
        if not self._cost:
            return None
        (rank, cause), (seconds, part) = max(self._cost.items(), key=lambda entry: entry[1][0])
        straggler = Straggler(rank, cause, seconds / max(steps, 1), part / max(steps, 1))
        return straggler if straggler.part >= MIN_SUMMARY_PART else None


def _num_noted_steps(history: Sequence[StepTimings]) -> int:
    return sum(timings.samples.shape[1] for timings in history)


def _latest_timings(history: Sequence[StepTimings]) -> Sequence[StepTimings]:
    """Returns the timings of the last steps that must agree."""
    first = len(history) - 1
    while first > 0 and _num_noted_steps(history[first:]) < GROUP_STEPS * NUM_GROUPS:
        first -= 1
    return history[first:]


def skip_steps(timings: StepTimings, steps: int) -> StepTimings:
    selected = _select(timings, (slice(None), slice(steps, None)))
    return replace(selected, first_step=timings.first_step + steps)


def _select(timings: StepTimings, index: Any) -> StepTimings:
    """Returns the timings of some ranks and steps, by an index of ``[ranks, steps]``."""
    seconds, samples = timings.seconds[index], timings.samples[index]
    return replace(timings, seconds=seconds, samples=samples, elements=timings.elements[index])


@dataclass(frozen=True, slots=True)
class _SlowRank:
    """A rank that needs more time for its own part than others do.

    Attributes:
        excess_s: Seconds of a step.
        data_s: Seconds of these in which it waits for its data.
        is_steady: It does in most of the steps.
        is_lasting: It does in every group of them.
    """

    rank: int
    excess_s: float
    data_s: float
    is_steady: bool
    is_lasting: bool


def find_straggler(
    history: Sequence[StepTimings], former: Straggler | None = None
) -> Straggler | None:
    """Finds the rank that holds the others up in consecutive timings.

    Args:
        history: At least as many steps as are needed, the latest last.
    """
    latest = _latest_timings(history)
    seconds = torch.cat([timings.seconds for timings in latest], dim=1)
    step_s = float(seconds.sum(dim=2).mean(dim=0).median())
    mean_step_s = max(step_s, float(seconds.sum(dim=2).mean()), 1e-9)  # with what comes in bursts
    min_excess_s = max(MIN_EXCESS_PART * mean_step_s, MIN_EXCESS_S)
    active = active_ranks(history)
    known_rank = None
    if former is not None and former.cause != "link" and former.rank in active:
        known_rank = active.index(former.rank)
    slow_rank = _find_slow_rank(seconds[active], step_s, min_excess_s, known_rank)
    if slow_rank is None:
        reported_rank = former.rank if former is not None and former.cause == "link" else None
        finding = find_slow_link(history, min_excess_s, reported_rank)
        if finding is None:
            return None
        part = finding.seconds / mean_step_s
        return Straggler(finding.rank, "link", finding.seconds, part, finding.detail)
    rank, vitals = active[slow_rank.rank], combined_vitals(latest)[active]
    selected = [_select(timings, active) for timings in latest]
    cause, detail = _find_cause(slow_rank, selected, vitals, num_steps(latest))
    # What stops a process stops it for many steps at once, and data come so, too. Without such
    # a cause a rank is only slow when it is so nearly always.
    if not (slow_rank.is_lasting if cause in BURSTY_CAUSES else slow_rank.is_steady):
        return None
    return Straggler(rank, cause, slow_rank.excess_s, slow_rank.excess_s / mean_step_s, detail)


def _reference(values: Tensor) -> Tensor:
    """Returns what the faster half of ranks manages; ``values`` has shape ``[ranks, …]``."""
    return values.median(dim=0).values  # the lower of two


def _find_slow_rank(
    seconds: Tensor, step_s: float, min_excess_s: float, known_rank: int | None
) -> _SlowRank | None:
    if len(seconds) < 2:
        return None
    # Data and quotas come in bursts: means, but no single step outweighs all others.
    own_s = seconds[:, :, : _AT["computing"] + 1].clamp(max=MAX_STEP_RATIO * step_s)
    mean_s = own_s.mean(dim=1)
    extra_s = mean_s - _reference(mean_s)
    extra_by_rank = extra_s.sum(dim=1).tolist()
    excess = max(extra_by_rank)
    rank = extra_by_rank.index(excess)
    was_reported = rank == known_rank
    if excess < min_excess_s * (RECOVERED_PART if was_reported else 1):
        return None
    # The others wait for it, or its slowness costs nothing.
    if float(seconds[:, :, _AT["waiting"]].mean(dim=1).max()) < 0.3 * excess:
        return None
    data = float(extra_s[rank, 0])
    compared_s = own_s[:, :, 0] if data >= excess / 2 else own_s.sum(dim=2)
    step_extra_s = (compared_s - _reference(compared_s))[rank]
    min_step_extra_s = MIN_STEP_EXCESS_PART * min_excess_s
    is_frequent = float((step_extra_s >= min_step_extra_s).double().mean()) >= MIN_SLOW_STEPS_PART
    is_steady = is_frequent and float(step_extra_s.median()) >= min_excess_s
    groups = torch.split(step_extra_s, -(-len(step_extra_s) // NUM_GROUPS))
    is_lasting = all(float(group.mean()) >= min_step_extra_s for group in groups)
    return _SlowRank(rank, excess, data, was_reported or is_steady, was_reported or is_lasting)


def _find_cause(
    slow_rank: _SlowRank, history: Sequence[StepTimings], vitals: Tensor, steps: int
) -> tuple[str, str]:
    """Returns the cause and a detail that explain why a rank is slower."""
    rank, excess = slow_rank.rank, slow_rank.excess_s

    def excess_of(name: str) -> float:
        """Returns a counter for each step, beyond the median of other ranks."""
        column = vitals[:, VITALS.index(name)] / steps
        if math.isnan(float(column[rank])):
            return 0.0
        other_ranks = torch.cat([column[:rank], column[rank + 1 :]])
        other_ranks = other_ranks[~other_ranks.isnan()]
        return float(column[rank]) - (float(other_ranks.median()) if len(other_ranks) else 0.0)

    min_explained_s = MIN_EXPLAINED_PART * excess
    if (throttled_s := excess_of("throttled")) >= min_explained_s:
        return "quota", f"{1e3 * throttled_s:.0f} ms a step"
    if (queued_s := excess_of("queued")) >= min_explained_s:
        unseen = vitals[rank, VITALS.index("throttled")].isnan()
        or_so = "; a CPU quota could do the same, and cannot be seen there" if unseen else ""
        return "cpu", f"it waits {1e3 * queued_s:.0f} ms a step for a free one{or_so}"
    if (stolen_s := excess_of("stolen")) >= min_explained_s:
        return "stolen", f"{1e3 * stolen_s:.0f} ms a step"
    if excess_of("faults") >= 1 and excess_of("swapped") > 0:
        return "swap", f"{excess_of('faults'):.0f} pages a step"
    if excess_of("hot") >= min_explained_s:
        return "hot", ""
    if slow_rank.data_s >= 0.5 * excess:
        return "data", "its disk is slow" if excess_of("disk") >= min_explained_s else ""
    computing = torch.cat([timings.seconds[:, :, _AT["computing"]] for timings in history], dim=1)
    computing_s = computing.mean(dim=1)
    time_ratio = float(computing_s[rank]) / max(float(_reference(computing_s)), 1e-9)
    element_ratio = _relative_work([timings.elements for timings in history], rank)
    if element_ratio >= 1.05 and element_ratio - 1 >= 0.5 * (time_ratio - 1):
        sample_ratio = _relative_work([timings.samples for timings in history], rank)
        if sample_ratio >= element_ratio**0.5:  # most of it
            return "share", f"{sample_ratio:.1f} times those of others"
        return "batch", f"{element_ratio:.1f} times those of others"
    return "computing", f"{time_ratio:.1f} times the others' time"


def _relative_work(parts: Sequence[Tensor], rank: int) -> float:
    """Returns this rank's mean work as a multiple of the usual; 0 if that is nothing."""
    work = torch.cat([*parts], dim=1).mean(dim=1)
    reference = float(_reference(work))
    return float(work[rank]) / reference if reference > 0 else 0.0
