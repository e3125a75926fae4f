"""Several runs beside each other: what differed, curves over each other, time to a figure. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.report.curves import Curve, falls, mean_rate
from paceline.report.page import Listed, Mood, Page, Part, Picture, Section, Table, Words
from paceline.report.record import objects_in
from paceline.report.story import (
    ROWS,
    Run,
    curves_data,
    headline,
    last_step,
    lasted,
    outcome_of,
    said,
    settings_of,
    shown,
    versions_of,
)
from paceline.rundir.records import number, words
from paceline.spec.figures import lasting

OVER_TIME = "The same over the seconds since each run began, its start included."
FOUND_OUT = {"master_port"}  # settings that differ from run to run by themselves


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure to reach.

    Attributes:
        metric: Its name.
        value: To be reached.
        split: Of the data; empty for any, those that were held out first.
    """

    metric: str
    value: float
    split: str = ""


def page_of(runs: Sequence[Run], goals: Sequence[Goal] = ()) -> Page:
    """The page that compares runs.

    Args:
        runs: At least two.
        goals: Figures whose time is asked for; without any, the best that all have reached.
    """
    labels = labels_of(runs)
    moods: list[Mood] = [outcome_of(run)[0] for run in runs]
    sections = [
        Section("Outcomes", [_outcomes(runs, labels)]),
        Section("Time to a figure", [*_reached(runs, labels, goals or _common(runs))]),
        Section("What was different", [*_differences(runs, labels)]),
        Section("Curves over each other", [*_curves(runs, labels)]),
    ]
    mood: Mood = "good" if set(moods) == {"good"} else "bad" if set(moods) == {"bad"} else "unsure"
    shown_ = [section for section in sections if section.parts]
    return Page(f"{len(runs)} runs compared", mood, _conclusion(runs, labels), (), shown_)


def labels_of(runs: Sequence[Run]) -> list[str]:
    """A name for each run: its folder's, with its number where two are alike."""
    named = [run.record.name for run in runs]
    return [name if named.count(name) == 1 else f"{name} ({at + 1})"
            for at, name in enumerate(named)]  # fmt: skip


def _took(run: Run) -> float:
    return number((run.record.said or {}).get("seconds")) or run.line.seconds


def _conclusion(runs: Sequence[Run], labels: Sequence[str]) -> str:
    ended = [(_took(run), label) for run, label in zip(runs, labels, strict=True)
             if outcome_of(run)[0] == "good"]  # fmt: skip
    if len(ended) == 1 < len(runs):
        return f"Only {ended[0][1]} of {len(runs)} runs ended well, after {lasting(ended[0][0])}."
    if len(ended) < 2:
        return f"{len(ended)} of {len(runs)} runs ended well."
    (quick, who), *_, (slow, last) = sorted(ended)
    steps = dict(zip(labels, map(last_step, runs), strict=True))
    if steps[who] == steps[last]:
        text = f"{who} was the quickest: {lasting(quick)}, {last} took {lasting(slow)}"
    else:  # what took longer may have been the quicker one
        text = "; ".join(f"{name} trained {steps[name]:,} steps in {lasting(seconds)}"
                         for seconds, name in ((quick, who), (slow, last)))  # fmt: skip
    rest = len(runs) - len(ended)
    return text + (f"; {rest} did not end well." if rest else ".")


def _outcomes(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    best = {(curve.metric, curve.split): None for run in runs for curve in headline(run.curves)}
    titles = ["run", "outcome", "took", "hosts", "ranks", "samples/s",
              *(f"{metric}, {split}" for metric, split in best)]  # fmt: skip
    rows = []
    for run, label in zip(runs, labels, strict=True):
        own = {(curve.metric, curve.split): curve for curve in run.curves}
        rate = mean_rate(run.records)
        rows.append([
            label, outcome_of(run)[1], lasting(_took(run)), str(len(run.hosts) or ""),
            str(run.ranks or ""), shown(rate) if rate else "",
            *(_figure(own[key]) if key in own else "" for key in best),
        ])  # fmt: skip
    return Table(titles, rows, "Each run in a row", folded=False)


def _figure(curve: Curve) -> str:
    last, best = curve.last.value, curve.best.value
    return shown(last) + (f" (best {shown(best)})" if best != last else "")


# -- time to a figure ----------------------------------------------------------------------


def _common(runs: Sequence[Run]) -> list[Goal]:
    """The best figure that all runs have reached, of what was held out where there is such."""
    for curve in headline(runs[0].curves):
        same = [_same(run, curve) for run in runs]
        if all(one is not None for one in same):
            bests = [one.best.value for one in same if one is not None]
            worst = max(bests) if falls(curve) else min(bests)
            return [Goal(curve.metric, worst, curve.split)]
    return []


def _same(run: Run, curve: Curve) -> Curve | None:
    return next((one for one in run.curves
                 if (one.metric, one.split) == (curve.metric, curve.split)), None)  # fmt: skip


def _reached(runs: Sequence[Run], labels: Sequence[str], goals: Sequence[Goal]) -> Iterator[Part]:
    for goal in goals:
        rows, first = [], None
        for run, label in zip(runs, labels, strict=True):
            curve = curve_of(run, goal)
            if curve is None:
                rows.append([label, "", "", f"it records no {goal.metric}"])
                continue
            at = reach(curve, goal.value)
            if at is None:
                rows.append([label, "", "", f"not reached: best {shown(curve.best.value)}"])
                continue
            when = curve.points[at]
            reached = f"{shown(when.value)} in {curve.split}"
            rows.append([label, lasted(when), str(when.step), reached])
            if when.seconds is not None:
                first = min(first or (when.seconds, label), (when.seconds, label))
        which = f"{goal.split} " if goal.split else ""
        title = f"{which}{goal.metric} of {goal.value:.6g}"
        says = f"First to reach it: {first[1]}, after {lasting(first[0])}." if first else ""
        yield Words(f"{title}. {says}")
        yield Table(["run", "seconds", "step", "value"], rows, f"Time to {title}", folded=False)


def curve_of(run: Run, goal: Goal) -> Curve | None:
    """The run's curve that a goal is about; of several splits one that was held out."""
    some = [curve for curve in run.curves if curve.metric == goal.metric
            and goal.split in ("", curve.split)]  # fmt: skip
    return min(some, key=lambda curve: curve.split == "train", default=None)


def reach(curve: Curve, value: float) -> int | None:
    """The first point at which a curve has come to a value; ``None`` where it never has."""
    down = falls(curve)
    return next((at for at, point in enumerate(curve.points)
                 if (point.value <= value if down else point.value >= value)), None)  # fmt: skip


# -- what differed -------------------------------------------------------------------------


def _differences(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[Part]:
    rows = differences([configuration(run) for run in runs])
    if not rows:
        yield Words("Nothing that is recorded of their configuration differs.")
        return
    yield Table(["", *labels], rows[:ROWS], "Configuration, where it differs", folded=False)
    same = sum(1 for key in configuration(runs[0]) if key not in {row[0] for row in rows})
    yield Words(f"{same} other settings are the same in all of them.", "small")
    missing = [("bad", f"{label}: {text}") for run, label in zip(runs, labels, strict=True)
               for text in run.record.missing]  # fmt: skip
    if missing:
        yield Listed(missing)


def configuration(run: Run) -> dict[str, str]:
    """Everything that was chosen for a run, by name."""
    plan, record = run.record.plan, run.record
    entry = plan.get("entry")
    found = {}
    if isinstance(entry, dict):
        args = entry.get("args")
        found["program"] = words(entry.get("target"), 1000)
        found["arguments"] = " ".join(map(str, args[:200])) if isinstance(args, list) else ""
    found["hosts"] = ", ".join(run.hosts)
    found["ranks"] = str(run.ranks)
    found |= {name: value for name, value, _ in settings_of(plan)
              if name not in FOUND_OUT and name != "hosts"}  # fmt: skip
    options: Any = record.config.get("options", record.config)
    if isinstance(options, dict):
        found |= {f"option {name}": said(value) for name, value in list(options.items())[:ROWS]}
    environment = plan.get("environment")
    if isinstance(environment, dict):
        found |= {f"variable {name}": said(value) for name, value in environment.items()}
    for node in objects_in(plan.get("nodes")):
        host = words(node.get("host"), 255)
        found[f"devices of {host}"] = words(node.get("devices"), 200)
    for name, version, _ in versions_of(record):
        found[name] = ", ".join(filter(None, [found.get(name, ""), version]))
    return found


def differences(every: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Name and values of what is not the same in all."""
    keys = dict.fromkeys(key for one in every for key in one)
    rows = [[key, *(one.get(key, "–") for one in every)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


# -- curves --------------------------------------------------------------------------------


def _curves(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[Part]:
    keys = dict.fromkeys((curve.metric, curve.split) for run in runs for curve in run.curves)
    for metric, split in keys:
        pairs = [
            (curve, label)
            for run, label in zip(runs, labels, strict=True)
            for curve in run.curves
            if (curve.metric, curve.split) == (metric, split)
        ]
        if len(pairs) < 2:
            continue
        some, named = [one for one, _ in pairs], [label for _, label in pairs]
        ends = "; ".join(
            f"{label} ends at {shown(curve.last.value)}"
            + f", best {shown(curve.best.value)}" * (metric != "lr")
            for curve, label in pairs
        )
        yield Picture("curves", f"{metric}, {split}", f"{ends}.",
                      curves_data(metric, some, named), _numbers(some, named))  # fmt: skip
        if metric != "lr" and all(curve.last.seconds is not None for curve in some):
            over = curves_data(metric, some, named, "seconds")
            yield Picture("curves", f"{metric}, {split}, over time", OVER_TIME, over)


def _numbers(some: Sequence[Curve], labels: Sequence[str]) -> Table:
    rows = [
        [label, str(point.step), f"{point.value:.8g}", lasted(point)]
        for curve, label in zip(some, labels, strict=True)
        for point in curve.points
    ]
    each = max(1, -(-len(rows) // ROWS))
    return Table(["run", "step", "value", "seconds"], rows[::each], "The numbers")
