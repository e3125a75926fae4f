"""What the files of a run say, read for its report: a value, bounded whatever stands in them.

A run directory may come from a stranger, be damaged, or be that of a run under way. What is missing
is named, so that a reader knows it from what did not happen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.rundir.directory import short
from paceline.rundir.ownership import owner_alive, read_owner
from paceline.rundir.records import is_regular, read_object, sampled_records
from paceline.spec import rundir as names
from paceline.spec.events import Event, read_events
from paceline.spec.failure import Result

EVENTS_BYTES = 1536 << 10  # read of events.jsonl, of a longer one at places all over it
METRICS_BYTES = 2 << 20
NEEDED = (names.PLAN, names.HOSTS, names.EVENTS, names.METRICS, names.RESULT)
WHAT = {
    names.PLAN: "what ran where, and the settings",
    names.HOSTS: "the hosts",
    names.EVENTS: "what happened",
    names.METRICS: "curves",
    names.RESULT: "how it ended",
}


@dataclass(frozen=True, slots=True)
class Record:
    """The files of a run.

    Attributes:
        path: The run directory.
        plan, hosts, config: The objects of these files; empty where there is none.
        events: What happened, in the order of time.
        metrics: The records of metrics.jsonl.
        said: The object of result.json; ``None`` while there is none.
        result: The same, as far as it can be believed.
        findings, links: What the checks and the explanation found; what the links carried.
        forecast: What was forecast, beside what came.
        collectives: What ``paceline bench collectives`` measured.
        ranks: Where everybody was last.
        owner: Whose run it still is.
        running: Its launcher lives.
        missing: Files that are not there or cannot be read, each with what cannot be told so.
        thinned: Files that were too long to be read whole.
    """

    path: Path
    plan: Mapping[str, Any] = field(default_factory=dict)
    hosts: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[Event] = ()
    metrics: Sequence[Mapping[str, Any]] = ()
    said: Mapping[str, Any] | None = None
    result: Result = field(default_factory=Result)
    findings: Sequence[Mapping[str, Any]] = ()
    links: Sequence[Mapping[str, Any]] = ()
    forecast: Mapping[str, Any] = field(default_factory=dict)
    collectives: Mapping[str, Any] = field(default_factory=dict)
    ranks: Mapping[str, Any] = field(default_factory=dict)
    owner: Mapping[str, Any] | None = None
    running: bool = False
    missing: Sequence[str] = ()
    thinned: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The run's, which is that of its folder where it was started."""
        return Path(short(self.path.absolute())).name


def read(path: Path) -> Record:
    """Everything that a report is made of."""
    owner = read_owner(path)
    running = owner is not None and owner_alive(owner)
    objects = {
        name: read_object(path / name)
        for name in (names.PLAN, names.HOSTS, names.CONFIG, names.RESULT, names.FINDINGS,
                     names.FORECAST, names.COLLECTIVES, names.RANKS)
    }  # fmt: skip
    if owner is not None:  # what lies there is of the run before this one
        objects[names.RESULT] = None
    lines, all_events = sampled_records(path / names.EVENTS, EVENTS_BYTES)
    metrics, all_metrics = sampled_records(path / names.METRICS, METRICS_BYTES)
    there = {name for name, found in objects.items() if found is not None}
    there |= {names.EVENTS} if lines else set()
    there |= {names.METRICS} if metrics else set()
    said = objects[names.RESULT]
    found = objects[names.FINDINGS] or {}
    return Record(
        path=path,
        plan=objects[names.PLAN] or {},
        hosts=objects[names.HOSTS] or {},
        config=objects[names.CONFIG] or {},
        events=sorted(read_events(lines), key=lambda event: event.time),
        metrics=metrics,
        said=said,
        result=Result.from_json(said or {}),
        findings=objects_in(found.get("findings")),
        links=objects_in(found.get("links")),
        forecast=objects[names.FORECAST] or {},
        collectives=objects[names.COLLECTIVES] or {},
        ranks=objects[names.RANKS] or {},
        owner=owner,
        running=running,
        missing=[_absent(path, name) for name in NEEDED
                 if name not in there and not (running and name == names.RESULT)],
        thinned=[name for name, whole in ((names.EVENTS, all_events), (names.METRICS, all_metrics))
                 if not whole],
    )  # fmt: skip


def _absent(path: Path, name: str) -> str:
    how = "cannot be read" if is_regular(path / name) else "is not there"
    return f"{name} {how}, so nothing is said of it here ({WHAT[name]})"


def objects_in(value: Any, most: int = 10_000) -> list[Mapping[str, Any]]:
    """The objects in a list of them; none in anything else."""
    if not isinstance(value, list):
        return []
    return [one for one in value[:most] if isinstance(one, dict)]
