"""A run as several sections of its page need it, made from its files. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.report import curves
from paceline.report.curves import Curve, StepDivision
from paceline.report.record import Record
from paceline.report.timeline import Timeline, build_timeline
from paceline.rundir.records import as_float, as_int
from paceline.spec.events import Event
from paceline.spec.formatting import pluralize


@dataclass(frozen=True, slots=True)
class Run:
    """A run, with its metrics, timeline and curves.

    Attributes:
        metrics: The records of metrics.jsonl, with times if they are known.
        has_estimated_times: Whether these times are estimated.
        divisions: How its steps divide, the mean of all ranks first.
    """

    record: Record
    metrics: Sequence[Mapping[str, Any]]
    has_estimated_times: bool
    timeline: Timeline
    curves: Sequence[Curve]
    divisions: Sequence[StepDivision]

    @property
    def num_ranks(self) -> int:
        return as_int(self.record.plan.get("world_size")) or len(self.timeline.rows)

    @property
    def hosts(self) -> list[str]:
        return self.record.planned_hosts

    @property
    def duration_s(self) -> float:
        return self.record.duration_s or self.timeline.duration_s

    @property
    def last_step(self) -> int:
        """The last step in metrics and events; 0 when there is none."""
        metric_steps = [step for record in self.metrics[-20:]
                    if (step := as_int(record.get("step"))) is not None]  # fmt: skip
        steps = [step for event in self.record.events[-200:]
                 if isinstance(step := event["step"], int)]  # fmt: skip
        if (trained := self.last_event("trained")) and isinstance(trained["steps"], int):
            steps.append(trained["steps"])
        return max([*metric_steps, *steps], default=0)

    @property
    def progress(self) -> str:
        """How far it trained, as the end of a clause; empty if it recorded no step.

        What a start in a reused run directory began with is not known.
        """
        if not (step := self.last_step):
            return ""
        return (f"trained to step {step:,}" if self.record.earlier_events
                else f"trained {pluralize(step, 'step')}")  # fmt: skip

    @property
    def main_curves(self) -> list[Curve]:
        """The most important curves: of held-out data first, then of the training."""
        metrics = [curve for curve in self.curves if curve.metric != "lr"]
        return sorted(metrics, key=lambda curve: curve.split == "train")[:4]

    def events(self, kind: str) -> list[Event]:
        return [event for event in self.record.events if event.kind == kind]

    def last_event(self, kind: str) -> Event | None:
        return next((event for event in reversed(self.record.events) if event.kind == kind), None)


def make_run(record: Record, now: float = 0.0) -> Run:
    """Makes a run of its files; ``now`` is seconds since 1970 if it has not ended, else 0."""
    metrics, has_estimated_times = curves.add_times(
        record.metrics, [*record.earlier_events, *record.events]
    )
    timeline = build_timeline(record, metrics, now)
    groups = [(event.time, tuple(event["members"] or ())) for event in record.events
              if event.kind in ("started", "regroup")]  # fmt: skip
    world = range(as_int(record.plan.get("world_size")) or 0)

    def group_of(metric: Mapping[str, Any]) -> Sequence[int]:
        at = as_float(metric.get("time"))
        earlier = [members for start, members in groups if start <= at]
        return (earlier[-1] if earlier else ()) or world

    return Run(record, metrics, has_estimated_times, timeline,
               curves.make_curves(metrics, timeline.started_at),
               curves.divide_steps(metrics, group_of))  # fmt: skip
