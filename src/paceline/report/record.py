"""Reads the files of a run for its report, as one bounded value.

A run directory may come from a stranger, be damaged, or be that of a run that has not ended.
Missing files are named, so that a reader can tell them from things that did not happen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from paceline.rundir.directory import short
from paceline.rundir.ownership import owner_alive, read_of_last_start, read_owner, start_id
from paceline.rundir.records import (
    as_float,
    as_int,
    as_text,
    is_regular,
    object_in,
    objects_in,
    read_object,
    sampled_records,
)
from paceline.spec import rundir as names
from paceline.spec.events import Event, events_of_start, read_events
from paceline.spec.failure import Result

EVENTS_BYTES = 1536 << 10  # read of events.jsonl; samples of a longer one
METRICS_BYTES = 2 << 20
_CONTENTS = {
    names.PLAN: "what ran where, and the settings",
    names.HOSTS: "the hosts",
    names.EVENTS: "what happened",
    names.METRICS: "curves",
    names.RESULT: "how it ended",
}
_Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Record:
    """The files of a run.

    Attributes:
        plan, hosts, config, forecast, collectives: Objects of these files; empty if missing.
        events: Of the last start in the run directory that was not refused, in the order of time.
        earlier_events: Of former starts.
        has_result: Whether there is a result.json of this run.
        duration_s: By result.json; 0 when not known.
        num_recoveries: Losses that the run survived, by result.json.
        findings, links: Findings of checks and explanation; measured rates of links.
        owner: The process that owns the run.
        is_running: Whether the owner lives.
        missing: Files that are missing or unreadable, each with a sentence.
        sampled: Names of files of which only samples were read.
    """

    path: Path
    plan: _Object = field(default_factory=dict)
    hosts: _Object = field(default_factory=dict)
    config: _Object = field(default_factory=dict)
    events: Sequence[Event] = ()
    earlier_events: Sequence[Event] = ()
    metrics: Sequence[_Object] = ()
    has_result: bool = False
    duration_s: float = 0.0
    num_recoveries: int = 0
    result: Result = field(default_factory=Result)
    findings: Sequence[_Object] = ()
    links: Sequence[_Object] = ()
    forecast: _Object = field(default_factory=dict)
    collectives: _Object = field(default_factory=dict)
    owner: _Object | None = None
    is_running: bool = False
    missing: Sequence[str] = ()
    sampled: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The run's name, which is that of its folder on the launching machine."""
        return Path(short(self.path.absolute())).name

    @property
    def nodes(self) -> list[_Object]:
        return objects_in(self.plan.get("nodes"))

    @property
    def planned_hosts(self) -> list[str]:
        """The hosts that had ranks by the plan, in its order."""
        return [as_text(node.get("host"), 255) for node in self.nodes]


def read(path: Path) -> Record:
    owner = read_owner(path)
    is_running = owner is not None and owner_alive(owner)
    objects = {
        name: read_object(path / name)
        for name in (names.PLAN, names.HOSTS, names.CONFIG, names.FINDINGS, names.FORECAST,
                     names.COLLECTIVES)
    }  # fmt: skip
    objects[names.RESULT] = read_of_last_start(path, names.RESULT)
    events, is_events_complete = sampled_records(path / names.EVENTS, EVENTS_BYTES)
    metrics, is_metrics_complete = sampled_records(path / names.METRICS, METRICS_BYTES)
    all_events = tuple(sorted(read_events(events), key=lambda event: event.time))
    of_start = events_of_start(all_events, start_id(path))
    present = {name for name, value in objects.items() if value is not None}
    present |= {names.EVENTS} if events else set()
    present |= {names.METRICS} if metrics else set()
    present |= {names.RESULT} if is_running else set()
    result, findings = objects[names.RESULT] or {}, objects[names.FINDINGS] or {}
    return Record(
        path=path,
        plan=objects[names.PLAN] or {},
        hosts=objects[names.HOSTS] or {},
        config=objects[names.CONFIG] or {},
        events=of_start,
        earlier_events=tuple(takewhile(lambda event: event is not of_start[0], all_events)),
        metrics=metrics,
        has_result=objects[names.RESULT] is not None,
        duration_s=as_float(result.get("seconds")),
        num_recoveries=as_int(object_in(result, "recoveries").get("count")) or 0,
        result=Result.from_json(result),
        findings=objects_in(findings.get("findings")),
        links=objects_in(findings.get("links")),
        forecast=objects[names.FORECAST] or {},
        collectives=objects[names.COLLECTIVES] or {},
        owner=owner,
        is_running=is_running,
        missing=[_describe_missing(path, name) for name in _CONTENTS if name not in present],
        sampled=[names.EVENTS] * (not is_events_complete)
                + [names.METRICS] * (not is_metrics_complete),
    )  # fmt: skip


def _describe_missing(path: Path, name: str) -> str:
    state = "cannot be read" if is_regular(path / name) else "is missing"
    return f"{name} {state}, so this page does not show {_CONTENTS[name]}"
