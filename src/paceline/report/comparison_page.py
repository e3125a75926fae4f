"""The page that compares several runs: outcomes, configurations, curves, time to a goal. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.report.curves import Curve, Point, mean_rate
from paceline.report.page import Figure, ItemList, Page, Paragraph, Part, Section, Status, Table
from paceline.report.run import Run
from paceline.report.run_page import (
    MAX_ROWS,
    curves_data,
    format_last,
    format_seconds,
    format_setting,
    format_value,
    outcome_of,
    settings_of,
    stride_of,
    versions_of,
)
from paceline.rundir.records import as_text, object_in
from paceline.spec.formatting import format_duration

_TIME_AXIS_NOTE = "The same over the seconds since each run began, its start included."
_NOT_COMPARED = {"hosts", "master_port"}  # settings that are shown elsewhere or always differ


@dataclass(frozen=True, slots=True)
class Goal:
    """A value of a metric to reach; an empty split stands for any, held-out data first."""

    metric: str
    value: float
    split: str = ""


def build_page(runs: Sequence[Run], goals: Sequence[Goal] = ()) -> Page:
    """Builds the page that compares at least two runs.

    Without ``goals``, the best value that all runs have reached is the goal.
    """
    names = [run.record.name for run in runs]
    labels = [name if names.count(name) == 1 else f"{name} ({number})"
              for number, name in enumerate(names, 1)]  # fmt: skip
    labeled = list(zip(labels, runs, strict=True))
    statuses: list[Status] = [outcome_of(run)[0] for run in runs]
    sections = [
        Section("Outcomes", [_outcomes(labeled)]),
        Section("Time to a figure", [*_times_to_goals(labeled, goals or _common_goal(runs))]),
        Section("What was different", [*_differences(labeled)]),
        Section("Curves over each other", [*_curves(labeled)]),
    ]
    status: Status = statuses[0] if len(set(statuses)) == 1 else "unsure"
    with_parts = [section for section in sections if section.parts]
    return Page(f"{len(runs)} runs compared", status, _conclusion(labeled), (), with_parts)


_Labeled = Sequence[tuple[str, Run]]


def _conclusion(runs: _Labeled) -> str:
    finished = sorted((run.duration_s, label, run.progress) for label, run in runs
                      if outcome_of(run)[0] == "good")  # fmt: skip
    if len(finished) == 1:
        seconds, label, _ = finished[0]
        return f"Only {label} of {len(runs)} runs ended well, after {format_duration(seconds)}."
    if not finished:
        return f"0 of {len(runs)} runs ended well."
    (fastest_s, fastest, progress), *_, (slowest_s, slowest, slowest_progress) = finished
    if progress == slowest_progress:
        text = (f"{fastest} was the quickest: {format_duration(fastest_s)},"
                f" {slowest} took {format_duration(slowest_s)}")  # fmt: skip
    else:  # the run that took longer may have been the quicker one
        text = (f"{fastest} {progress} in {format_duration(fastest_s)};"
                f" {slowest} {slowest_progress} in {format_duration(slowest_s)}")  # fmt: skip
    failed = len(runs) - len(finished)
    return text + (f"; {failed} did not end well." if failed else ".")


def _outcomes(runs: _Labeled) -> Table:
    keys = dict.fromkeys(curve.key for _, run in runs for curve in run.main_curves)
    titles = ["run", "outcome", "took", "hosts", "ranks", "samples/s",
              *(f"{metric}, {split}" for metric, split in keys)]  # fmt: skip
    rows = []
    for label, run in runs:
        curves, rate = {curve.key: curve for curve in run.curves}, mean_rate(run.metrics)
        rows.append([
            label, outcome_of(run)[1], format_duration(run.duration_s), str(len(run.hosts) or ""),
            str(run.num_ranks or ""), format_value(rate) if rate else "",
            *(format_last(curves[key]) if key in curves else "" for key in keys),
        ])  # fmt: skip
    return Table(titles, rows, "Each run in a row", collapsed=False)


def _common_goal(runs: Sequence[Run]) -> list[Goal]:
    """The best value that all runs have reached, of held-out data if there is any."""
    for curve in runs[0].main_curves:
        optima = [c.best.value for run in runs for c in run.curves if c.key == curve.key]
        if len(optima) == len(runs):
            target = max(optima) if curve.lower_is_better else min(optima)
            return [Goal(curve.metric, target, curve.split)]
    return []


def _times_to_goals(runs: _Labeled, goals: Sequence[Goal]) -> Iterator[Part]:
    for goal in goals:
        rows, times = [], []
        for label, run in runs:
            point, text = _first_point_at(run, goal)
            step = str(point.step) if point else ""
            rows.append([label, format_seconds(point) if point else "", step, text])
            if point is not None and point.seconds is not None:
                times.append((point.seconds, label))
        title = f"{goal.split} {goal.metric} of {goal.value:.6g}".lstrip()
        text = f"{title}. "
        if times:
            seconds, label = min(times)
            text += f"First to reach it: {label}, after {format_duration(seconds)}."
        yield Paragraph(text)
        titles = ["run", "seconds", "step", "value"]
        yield Table(titles, rows, f"Time to {title}", collapsed=False)


def _first_point_at(run: Run, goal: Goal) -> tuple[Point | None, str]:
    """The first point at which a run reached a goal, and its value or why there is none."""
    curve = _curve_of(run, goal)
    if curve is None:
        return None, f"it records no {goal.metric}"
    sign = 1 if curve.lower_is_better else -1
    for point in curve.points:
        if sign * point.value <= sign * goal.value:
            return point, f"{format_value(point.value)} in {curve.split}"
    return None, f"not reached: best {format_value(curve.best.value)}"


def _curve_of(run: Run, goal: Goal) -> Curve | None:
    """The run's curve of a goal; of several splits one of held-out data."""
    curves = [curve for curve in run.curves if curve.metric == goal.metric
              and goal.split in ("", curve.split)]  # fmt: skip
    return min(curves, key=lambda curve: curve.split == "train", default=None)


def _differences(runs: _Labeled) -> Iterator[Part]:
    configurations = [configuration(run) for _, run in runs]
    rows = differences(configurations)
    if not rows:
        yield Paragraph("Nothing that is recorded of their configuration differs.")
        return
    titles = ["", *(label for label, _ in runs)]
    yield Table(titles, rows[:MAX_ROWS], "Configuration, where it differs", collapsed=False)
    num_equal = len(configurations[0].keys() - {row[0] for row in rows})
    yield Paragraph(f"{num_equal} other settings are the same in all of them.", "small")
    missing = [("bad", f"{label}: {text}") for label, run in runs for text in run.record.missing]
    if missing:
        yield ItemList(missing)


def configuration(run: Run) -> dict[str, str]:
    """Everything that was chosen for a run, by name."""
    plan, record = run.record.plan, run.record
    values = {"hosts": ", ".join(run.hosts), "ranks": str(run.num_ranks)}
    if entry := object_in(plan, "entry"):
        args = entry.get("args")
        values["program"] = as_text(entry.get("target"), 1000)
        values["arguments"] = " ".join(map(str, args[:200])) if isinstance(args, list) else ""
    values |= {name: value for name, value, _ in settings_of(plan) if name not in _NOT_COMPARED}
    options: Any = record.config.get("options", record.config)
    for prefix, group in (("option", options), ("variable", plan.get("environment"))):
        if isinstance(group, dict):
            values |= {f"{prefix} {name}": format_setting(value)
                       for name, value in list(group.items())[:MAX_ROWS]}  # fmt: skip
    for node in record.nodes:
        values[f"devices of {as_text(node.get('host'), 255)}"] = as_text(node.get("devices"), 200)
    for name, version, _ in versions_of(record):
        values[name] = ", ".join(filter(None, [values.get(name, ""), version]))
    return values


def differences(configurations: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Name and values of what is not the same in all configurations."""
    keys = dict.fromkeys(key for values in configurations for key in values)
    rows = [[key, *(values.get(key, "–") for values in configurations)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _curves(runs: _Labeled) -> Iterator[Part]:
    by_key: dict[tuple[str, str], list[tuple[str, Curve]]] = {}
    for label, run in runs:
        for curve in run.curves:
            by_key.setdefault(curve.key, []).append((label, curve))
    for (metric, split), pairs in by_key.items():
        if len(pairs) < 2:
            continue
        labels, group = [label for label, _ in pairs], [curve for _, curve in pairs]
        ends = "; ".join(
            f"{label} ends at {format_value(curve.last.value)}"
            + f", best {format_value(curve.best.value)}" * (metric != "lr")
            for label, curve in pairs
        )
        rows = [[label, str(point.step), f"{point.value:.8g}", format_seconds(point)]
                for label, curve in pairs for point in curve.points]  # fmt: skip
        table = Table(["run", "step", "value", "seconds"], rows[:: stride_of(rows)], "The numbers")
        data = curves_data(metric, group, labels)
        yield Figure("curves", f"{metric}, {split}", f"{ends}.", data, table)
        if metric != "lr" and all(curve.last.seconds is not None for curve in group):
            by_seconds = curves_data(metric, group, labels, "seconds")
            yield Figure("curves", f"{metric}, {split}, over time", _TIME_AXIS_NOTE, by_seconds)
