"""The report of one run: from what its files say to what its page says. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.report import curves as figures
from paceline.report.curves import Curve, Divided, Point
from paceline.report.machines import machines, ranks_of
from paceline.report.page import Listed, Mood, Page, Part, Picture, Section, Table, Words
from paceline.report.record import Record, objects_in
from paceline.report.timeline import SAID, Timeline, timeline
from paceline.rundir.records import number, whole, words
from paceline.spec import rundir as names
from paceline.spec.command import shell_text
from paceline.spec.events import PART_NAMES, PARTS, Event
from paceline.spec.failure import UNKNOWN, place, signal_name
from paceline.spec.figures import lasting
from paceline.spec.helptext import counted

ROWS = 400  # of a table of raw numbers
OPENED = 40  # lines of a traceback that stand there at once
_HELD_UP = 0.05  # of a step, from which on waiting is worth a word


@dataclass(frozen=True, slots=True)
class Run:
    """A run, as far as several parts of its page need it.

    Attributes:
        record: Its files.
        records: Of metrics.jsonl, each with its time where that is known.
        estimated: Those times are.
        line: What happened when.
        curves: Of its metrics.
        divided: How its steps divided, the mean of all ranks first.
    """

    record: Record
    records: Sequence[Mapping[str, Any]]
    estimated: bool
    line: Timeline
    curves: Sequence[Curve]
    divided: Sequence[Divided]

    @property
    def ranks(self) -> int:
        return whole(self.record.plan.get("world_size")) or len(self.line.rows)

    @property
    def hosts(self) -> list[str]:
        """Those that had ranks by the plan, in its order."""
        return [words(node.get("host"), 255) for node in objects_in(self.record.plan.get("nodes"))]

    def last(self, kind: str) -> Event | None:
        """The last event of a kind."""
        return next((one for one in reversed(self.record.events) if one.kind == kind), None)


def run_of(record: Record, now: float = 0.0) -> Run:
    """Puts together what is in the files.

    Args:
        record: The files.
        now: Seconds since 1970, of a run that has not ended; else 0.
    """
    records, estimated = figures.timed(record.metrics, record.events)
    failure = record.result.failure
    failed = (failure.host, failure.rank, failure.headline) if failure else None
    took = number((record.said or {}).get("seconds"))
    line = timeline(
        record.events,
        records,
        record.plan,
        took,
        failed,
        now,
        record.result.interrupted is not None,
    )
    groups = _Groups(record)
    return Run(record, records, estimated, line, figures.curves(records, line.began),
               figures.divided(records, groups.of))  # fmt: skip


class _Groups:
    """Whose numbers stand in a record, in its order."""

    def __init__(self, record: Record) -> None:
        self._known = [(event.time, tuple(event["members"] or ())) for event in record.events
                       if event.kind in ("started", "regroup")]  # fmt: skip
        self._all = tuple(range(whole(record.plan.get("world_size")) or 0))

    def of(self, record: Mapping[str, Any]) -> tuple[int, ...]:
        at = number(record.get("time"))
        known = [members for since, members in self._known if since <= at]
        return (known[-1] if known else ()) or self._all


def page_of(run: Run) -> Page:
    """The page of a run."""
    mood, outcome = outcome_of(run)
    happened = Section("What happened", [*_happened(run)])
    found = Section("Findings and remedies", [*_findings(run)])
    middle = [found, happened] if mood == "bad" else [happened, found]
    sections = [
        *middle,
        Section("Curves", [*_curves(run)]),
        Section("Throughput and efficiency", [*_speed(run)]),
        Section("Hosts and links", machines(run.record)),
        Section("Forecast and what came", [*_forecast(run.record.forecast)]),
        Section("Plan, configuration, versions", [*_plan(run.record)]),
        Section("Run it again", [*again(run.record), *_goes_on(run)]),
        Section("About this report", [*_about(run)]),
    ]
    shown = [section for section in sections if section.parts]
    return Page(run.record.name, mood, outcome, [*_facts(run)], shown)


# -- the outcome ---------------------------------------------------------------------------


def outcome_of(run: Run) -> tuple[Mood, str]:
    """How it went, in one sentence."""
    record, result = run.record, run.record.result
    size = _size(run)
    if record.running:
        where = f", now at step {last_step(run)}" if last_step(run) else ""
        return "unsure", f"Still running: {size}{where}."
    took = lasting(number((record.said or {}).get("seconds")) or run.line.seconds)
    if record.said is None:
        if not record.events:
            return "unsure", "Nothing tells how this run went: it left neither events nor a result."
        who = f" (process {record.owner['pid']} on {record.owner['host']})" if record.owner else ""
        return "bad", f"Lost: its launcher{who} ended without a word after {took}."
    if result.error:
        return "bad", f"Not started: {result.error.splitlines()[0]}"
    if result.failure is not None:
        first = result.failure
        how = "Stopped" if result.interrupted else "Failed"
        others = f"; {counted(result.others, 'other')} failed after it" if result.others else ""
        return "bad", f"{how} after {took}: {_cause(record) or first.describe()}{others}."
    if result.interrupted is not None:
        saved = _saved(run.last("stopped"))
        at = f" at step {last_step(run)}" if last_step(run) else ""
        name = signal_name(result.interrupted)
        return "unsure", f"Stopped by {name} after {took}{at}{saved}."
    if result.exit_code == UNKNOWN:
        return "unsure", f"How it ended is not known: result.json does not say so ({size}, {took})."
    if result.exit_code:
        return "bad", f"Failed with exit status {result.exit_code} after {took}."
    last = last_step(run)
    steps = f" trained {last:,} step{'s' * (last != 1)}" if last else ""
    text = f"Finished: {size}{steps} in {took}"
    return "good", text + _afterwards(run) + "."


def _cause(record: Record) -> str:
    """What ``explain`` has found, in its words; the raw error stands below it."""
    causes = (one for one in record.findings if one.get("outcome") == "fail"
              and words(one.get("check"), 100).startswith("explain/"))  # fmt: skip
    return next((words(one.get("message")).rstrip(".") for one in causes), "")


def _saved(stopped: Event | None) -> str:
    """What a training that was asked to stop could save, in words that follow."""
    if stopped is None:
        return ""
    saved, step = stopped["saved"], stopped["step"]
    if saved is None or saved == step:
        return ", its state is saved"
    return f", saved up to step {saved:,}" if saved else ", and nothing is saved"


def _size(run: Run) -> str:
    where = f" on {counted(len(run.hosts), 'host')}" if run.hosts else ""
    return f"{counted(run.ranks, 'rank')}{where}"


def _afterwards(run: Run) -> str:
    """What a run that ended well had to overcome."""
    recovered = (run.record.said or {}).get("recoveries")
    count = whole(recovered.get("count")) if isinstance(recovered, dict) else 0
    starts = sum(1 for event in run.record.events if event.kind == "started") - 1
    told = [f"the others trained on after {_lost(run, count)}"] if count else []
    told += [f"it was started again {counted(starts, 'time')}"] if starts > 0 else []
    if (slow := slowest(run)) is not None:
        told.append(f"{slow[0]} held the others up")
    return "; " + ", ".join(told) if told else ""


def _lost(run: Run, count: int) -> str:
    """``the loss of n2, which came back``: of many, and where it was no host, the number."""
    hosts = list(dict.fromkeys(one.host for one in run.record.events if one.kind == "lost"))
    returned = [row.label for row in run.line.rows if any(one.what == "back" for one in row.marks)]
    back = {host for host in hosts if any(label.endswith(f" {host}") for label in returned)}
    said = [host + ", which came back" * (host in back) for host in hosts]
    if 0 < len(said) <= 3:
        return f"the loss of {'; and of '.join(said)}"
    return "a rank was lost" if count == 1 else f"ranks were lost ({count} times)"


def slowest(run: Run) -> tuple[str, str] | None:
    """The rank that held the others up, and the words in which that was told."""
    if (trained := run.last("trained")) and trained["straggler"] is not None:
        who = place(str(trained["its_host"] or ""), trained["straggler"])
        told = [event for event in run.record.events if event.kind == "straggler"
                and event["straggler"] == trained["straggler"]]  # fmt: skip
        return who, str(told[-1]["text"] or "") if told else f"{who}: {trained['cause'] or ''}"
    told = [event for event in run.record.events if event.kind == "straggler"]
    if not told or run.last("trained"):
        return None
    last = told[-1]
    return place(str(last["its_host"] or ""), last["straggler"]), str(last["text"] or "")


# What helps against the causes of train/straggler.py.
_REMEDIES = {
    "quota": "Give its control group more CPU time (cpu.max), or its host fewer ranks.",
    "cpu": "End the other programs on its host (top shows them), or train with {by_speed}.",
    "stolen": "Move it to a host whose CPUs are its own, or train with {by_speed}.",
    "swap": "Give its host fewer ranks or smaller batches, or more memory.",
    "hot": "Look at the cooling of its host; until then {by_speed}.",
    "share": "Give its host a smaller weight (--balance), or train with {by_speed}.",
    "batch": "Give every rank samples of like lengths.",
    "data": "Put its data on a faster disk, or load it with more workers.",
    "link": "Look at the cable, port and speed of its interface; paceline check measures links.",
    "computing": "Train with {by_speed}: each rank gets the share that suits its speed.",
}
_BY_SPEED = '--balance auto (in a script session.loader(…, balance="auto"))'


def _remedy(run: Run) -> str:
    """What helps against the cause for which a rank was slow."""
    causes = [event["cause"] for event in run.record.events
              if event.kind in ("straggler", "trained") and event["cause"]]  # fmt: skip
    found = _REMEDIES.get(str(causes[-1]), "") if causes else ""
    return found.format(by_speed=_BY_SPEED)


def last_step(run: Run) -> int:
    """The last step that anything tells of."""
    found = [step for one in run.records[-20:] if (step := whole(one.get("step"))) is not None]
    ends = [step for event in run.record.events[-200:] if isinstance(step := event["step"], int)]
    if (trained := run.last("trained")) and isinstance(trained["steps"], int):
        ends.append(max([trained["steps"], *found]))
    return max([*found, *ends], default=0)


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    record = run.record
    if run.line.began:
        yield "Started", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(run.line.began))
    if took := number((record.said or {}).get("seconds")) or run.line.seconds:
        yield "Took", lasting(took)
    if run.ranks:
        hosts = f" on {len(run.hosts)}" if run.hosts else ""
        yield "Ranks" + (", hosts" if hosts else ""), f"{run.ranks}{hosts}"
    if step := last_step(run):
        yield "Steps", f"{step:,}"
    if rate := figures.mean_rate(run.records):
        yield "Samples/s", shown(rate)
    if computing := _computing(run):
        yield "Computing", computing
    for curve in headline(run.curves):
        best = curve.best
        more = f" (best {shown(best.value)})" if best.value != curve.last.value else ""
        yield f"{curve.metric}, {curve.split}", f"{shown(curve.last.value)}{more}"


def _computing(run: Run) -> str:
    """The share of computing, with the number that the training itself has told at its end."""
    trained = run.last("trained")
    parts = trained["parts"] if trained else None
    if isinstance(parts, dict) and "computing" in parts:
        seen_by = " (rank that waited most)" if run.ranks > 1 else ""
        return f"{number(parts['computing']):.0%} of a step{seen_by}"
    if not run.divided:
        return ""
    mean = " (mean of all ranks)" if run.ranks > 1 else ""
    return f"{run.divided[0].part('computing'):.0%} of a step{mean}"


def headline(curves: Sequence[Curve], most: int = 4) -> list[Curve]:
    """The curves to name first: of what was held out, and the loss."""
    names_ = [curve for curve in curves if curve.metric != "lr"]
    held_out = [curve for curve in names_ if curve.split != "train"]
    return [*held_out, *(curve for curve in names_ if curve not in held_out)][:most]


# -- what happened -------------------------------------------------------------------------


def _happened(run: Run) -> Iterator[Part]:
    line = run.line
    if not line.rows:
        if run.record.events:
            yield Words("No rank was started.")
        yield from _events(run.record.events, line.began)
        return
    yield Picture("timeline", "All ranks over time", _seen(run), timeline_data(line), height=0)
    if line.moments:
        items = [(one.kind, f"after {lasting(one.at)}: {one.text}") for one in line.moments]
        yield Listed(items, numbered=True)
    left_ranks, left_moments = line.left_out
    if left_ranks:
        yield Words(f"{counted(left_ranks, 'rank')} more are not drawn: these are the ones of"
                    " which there is most to tell.", "small")  # fmt: skip
    if left_moments:
        yield Words(f"{counted(left_moments, 'moment')} more are not numbered; the events below"
                    " have them.", "small")  # fmt: skip
    yield from _events(run.record.events, line.began)


def _seen(run: Run) -> str:
    """What the picture of all ranks shows, in words."""
    line, said = run.line, list[str]()
    for row in line.rows:
        gone = sum(span.end - span.begin for span in row.spans if span.doing == "gone")
        lost = sum(1 for mark in row.marks if mark.what in ("lost", "failed"))
        if lost:
            back = ", and came back" if any(mark.what == "back" for mark in row.marks) else ""
            away = f" (away for {lasting(gone)})" if gone > 0.05 and back else ""
            how = f"was lost {_times(lost)}" if back or lost > 1 else "was lost for good"
            last = row.marks[-1].what == "failed" and lost == 1
            said.append(f"{row.label} {'failed' if last else how}{back}{away}")
        if row.slow:
            held = sum(one.end - one.begin for one in row.slow)
            said.append(f"{row.label} held the others up for {lasting(held)}")
    saved = sum(1 for row in line.rows for mark in row.marks if mark.what == "checkpoint")
    said += [f"{counted(saved, 'checkpoint')} {'was' if saved == 1 else 'were'} written"] * bool(
        saved
    )
    what = "; ".join(said[:12]) or "no rank was lost, and none held the others up"
    ranks = counted(len(line.rows), "rank")
    return f"{ranks} over {lasting(line.seconds)}, a row each. {what[0].upper()}{what[1:]}."


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def timeline_data(line: Timeline) -> dict[str, Any]:
    """The numbers of the picture; times are seconds since the run began."""
    return {
        "seconds": round(line.seconds, 3),
        "doing": SAID,
        "parts": [[name, PART_NAMES[name]] for name in PARTS],
        "rows": [
            {
                "label": row.label,
                "spans": [[_ms(one.begin), _ms(one.end), one.doing] for one in row.spans],
                "cells": [[_ms(one.begin), _ms(one.end), *one.parts] for one in row.cells],
                "marks": [[_ms(one.at), one.what] for one in row.marks],
                "slow": [[_ms(one.begin), _ms(one.end), one.text] for one in row.slow],
            }
            for row in line.rows
        ],
        "moments": [[_ms(one.at), one.text, one.kind] for one in line.moments],
    }


def _ms(seconds: float) -> float:
    return round(seconds, 3)


def _events(events: Sequence[Event], began: float) -> Iterator[Part]:
    if not events:
        return
    kept = events if len(events) <= ROWS else [*events[: ROWS // 2], *events[-ROWS // 2 :]]
    rows = [
        [f"{event.time - began:.2f}", event.where, event.kind, _details(event)] for event in kept
    ]
    cut = f", the first and last {ROWS // 2} of {len(events)}" if len(kept) < len(events) else ""
    yield Table(["seconds", "where", "event", "details"], rows, f"Every event{cut}")


def _details(event: Event) -> str:
    return ", ".join(
        f"{name} {value}" for name, value in event.fields.items() if value not in (None, "")
    )


# -- findings ------------------------------------------------------------------------------


def _findings(run: Run) -> Iterator[Part]:
    result, told = run.record.result, list[tuple[str, str]]()
    if result.error:
        yield Words(result.error, "pre")
    wrong = [
        one for one in run.record.findings if one.get("outcome") in ("fail", "warn", "unknown")
    ]
    wrong.sort(key=lambda one: ("fail", "unknown", "warn").index(str(one.get("outcome"))))
    for one in wrong[:20]:
        remedy = words(one.get("remedy")).strip()
        check = words(one.get("check"), 100)
        by = "" if check.startswith("explain/") else f" (check: {check})"
        text = f"{words(one.get('message'))}{by}"
        told.append(("bad" if one.get("outcome") == "fail" else "slow",
                     text + (f" → {remedy}" if remedy else "")))  # fmt: skip
    if (slow := slowest(run)) is not None and slow[1]:
        told.append(("slow", slow[1] + (f" → {remedy}" if (remedy := _remedy(run)) else "")))
    told += [("note", f"note: {words(note)}") for note in _texts(run.record.plan.get("notes"))]
    if told:
        yield Listed(told)
    elif not result.error:
        well = [one for one in run.record.findings if one.get("outcome") == "pass"]
        checks = f" ({counted(len(well), 'check')} passed)" if well else ""
        apart = "Apart from what is told above, nothing" if run.line.moments else "Nothing"
        yield Words(f"{apart} was found wrong{checks}.")
    if result.failure is not None and _cause(run.record):
        yield Words(f"Failed first: {result.failure.describe()}", "small")
    if result.failure is not None and result.failure.traceback:
        yield Words(
            result.failure.traceback,
            "pre",
            f"Traceback of {result.failure.where}",
            opened=result.failure.traceback.count("\n") < OPENED,
        )


def _texts(value: Any) -> list[str]:
    return [one for one in value[:50] if isinstance(one, str)] if isinstance(value, list) else []


# -- curves --------------------------------------------------------------------------------


def _curves(run: Run) -> Iterator[Part]:
    by_metric: dict[str, list[Curve]] = {}
    for curve in run.curves:
        by_metric.setdefault(curve.metric, []).append(curve)
    for metric, some in sorted(by_metric.items(), key=lambda one: one[0] == "lr"):
        yield Picture("curves", metric, _curves_say(some), curves_data(metric, some),
                      _curves_table(some))  # fmt: skip


def _curves_say(some: Sequence[Curve]) -> str:
    said = []
    for curve in some:
        first, last, best = curve.points[0], curve.last, curve.best
        if len(curve.points) == 1:
            text = f"{curve.split}: {shown(last.value)} at step {last.step:,}"
        else:
            text = (
                f"{curve.split}: from {shown(first.value)} at step {first.step:,}"
                f" to {shown(last.value)} at step {last.step:,}"
            )
            if best not in (first, last) and curve.metric != "lr":
                text += f", best {shown(best.value)} at step {best.step:,}"
        broken = f"; {counted(curve.broken, 'value')} not a finite number" if curve.broken else ""
        said.append(text + broken)
    thin = any(curve.recorded > len(curve.points) for curve in some)
    return "; ".join(said) + "." + (" Of many values, highs and lows are drawn." if thin else "")


def curves_data(metric: str, some: Sequence[Curve], labels: Sequence[str] = (),
                over: str = "step") -> dict[str, Any]:  # fmt: skip
    """The numbers of the picture, over steps or seconds."""
    series = []
    for at, curve in enumerate(some):
        points = [
            [point.step if over == "step" else point.seconds, point.value]
            for point in curve.points
            if over == "step" or point.seconds is not None
        ]
        series.append({"name": labels[at] if labels else curve.split, "points": points})
    return {"metric": metric, "over": over, "series": series}


def _curves_table(some: Sequence[Curve]) -> Table:
    points = [(point.step, curve.split, point) for curve in some for point in curve.points]
    points.sort(key=lambda one: one[0])
    each = max(1, -(-len(points) // ROWS))
    rows = [
        [str(step), split, f"{point.value:.8g}",
         "" if point.seconds is None else f"{point.seconds:.1f}"]
        for step, split, point in points[::each]
    ]  # fmt: skip
    total = sum(curve.recorded for curve in some)
    cut = f", {len(rows):,} of {total:,}" if len(rows) < total else ""
    return Table(["step", "split", some[0].metric, "seconds"], rows, f"The numbers{cut}")


# -- throughput and efficiency -------------------------------------------------------------


def _speed(run: Run) -> Iterator[Part]:
    speed = figures.throughput(run.records, run.line.began)
    if speed is not None:
        mean = figures.mean_rate(run.records) or speed.last.value
        first, last = speed.points[0], speed.last
        most = max(speed.points, key=lambda point: point.value)
        says = (
            f"{shown(mean)} samples a second over all steps: {shown(first.value)} at step"
            f" {first.step:,}, {shown(last.value)} at step {last.step:,}, at most"
            f" {shown(most.value)} at step {most.step:,}."
        )
        data = curves_data("samples/s", [speed], ["samples/s"])
        yield Picture("curves", "Throughput", says, data, _curves_table([speed]))
    if not run.divided:
        return
    every, *ranks = run.divided
    labels = {one.rank: _label(run, one.rank) for one in run.divided}
    rows = ranks or [every]
    yield Words(_efficiency(every, ranks, labels))
    yield Picture(
        "division", "How a step divides, by rank", _division_says(every, ranks, labels),
        {
            "parts": [[name, PART_NAMES[name]] for name in PARTS],
            "rows": [[labels[one.rank], *(round(1e3 * part, 3) for part in one.seconds)]
                     for one in rows],
        },
        Table(["rank", *(f"{PART_NAMES[name]}, ms" for name in PARTS), "step, ms"],
              [[labels[one.rank], *(f"{1e3 * part:.2f}" for part in one.seconds),
                f"{1e3 * sum(one.seconds):.2f}"] for one in run.divided],
              "The numbers: milliseconds of a step"),
        height=min(900, 90 + 34 * len(rows)),
    )  # fmt: skip


def _label(run: Run, rank: int | None) -> str:
    if rank is None:
        return "mean of all"
    return next((row.label for row in run.line.rows if row.rank == rank), f"rank {rank}")


def _efficiency(every: Divided, ranks: Sequence[Divided], labels: Mapping[int | None, str]) -> str:
    mean = " (mean of all ranks)" if len(ranks) > 1 else ""
    text = f"Of the time of a step{mean}, {every.part('computing'):.0%} was computing"
    rest = [(every.part(name), PART_NAMES[name]) for name in PARTS if name != "computing"]
    said = [f"{part:.0%} {name}" for part, name in sorted(rest, reverse=True) if part >= 0.005]
    text += f"; {', '.join(said)}." if said else "."
    if len(ranks) > 1:
        waited = sorted(ranks, key=lambda one: one.part("waiting"))
        if waited[-1].part("waiting") - waited[0].part("waiting") > _HELD_UP:
            text += (
                f" The others waited most for {labels[waited[0].rank]}: it waited"
                f" {waited[0].part('waiting'):.0%} of the time for others,"
                f" {labels[waited[-1].rank]} {waited[-1].part('waiting'):.0%}."
            )
    return text


def _division_says(every: Divided, ranks: Sequence[Divided],
                   labels: Mapping[int | None, str]) -> str:  # fmt: skip
    said = [f"{labels[one.rank]} computes {1e3 * one.seconds[PARTS.index('computing')]:.1f} ms and"
            f" waits {1e3 * one.seconds[PARTS.index('waiting')]:.1f} ms for slower ranks"
            for one in ranks[:8]]  # fmt: skip
    return f"A step takes {1e3 * sum(every.seconds):.1f} ms. " + "; ".join(said) + "." * bool(said)


# -- forecast ------------------------------------------------------------------------------


def _forecast(found: Mapping[str, Any]) -> Iterator[Part]:
    told, came = found.get("forecast"), found.get("came")
    if not isinstance(told, dict) or not isinstance(came, dict):
        return
    low, high, said = (number(told.get(name)) for name in ("low", "high", "seconds"))
    took = number(came.get("seconds"))
    if not took or not said:
        return
    off = took / said - 1
    inside = "inside" if low <= took <= high else "outside"
    says = (
        f"A step was forecast to take {1e3 * said:.1f} ms ({1e3 * low:.1f} … {1e3 * high:.1f},"
        f" limited by {words(told.get('limit'), 100)}), and took {1e3 * took:.1f} ms:"
        f" {abs(off):.0%} {'longer' if off > 0 else 'shorter'}, {inside} the error bar."
    )
    rows = [["forecast", f"{1e3 * said:.3f}", f"{1e3 * low:.3f}", f"{1e3 * high:.3f}"],
            ["came", f"{1e3 * took:.3f}", "", ""]]  # fmt: skip
    yield Picture(
        "forecast", "Milliseconds of a step", says,
        {"low": 1e3 * low, "high": 1e3 * high, "said": 1e3 * said, "came": 1e3 * took},
        Table(["", "ms", "low", "high"], rows, "The numbers"), height=150,
    )  # fmt: skip


# -- plan, configuration, versions ---------------------------------------------------------


def _plan(record: Record) -> Iterator[Part]:
    nodes = objects_in(record.plan.get("nodes"))
    if nodes:
        titles = ["host", "ranks", "devices", "address", "interface", "code", "folder", "python"]
        yield Table(titles, [
            [words(node.get("host"), 255), ranks_of(node),
             *(words(node.get(name), 400) for name in
               ("devices", "address", "interface", "code", "workdir", "python"))]
            for node in nodes[:ROWS]
        ], "What ran where", folded=False)  # fmt: skip
    if rows := settings_of(record.plan):
        yield Table(["setting", "value", "from"], rows, "Settings, and where each came from")
    options = record.config.get("options")
    if isinstance(options, dict):
        rows = [[name, said(value)] for name, value in options.items()][:ROWS]
        recipe = words(record.config.get("recipe"), 100)
        yield Table(["option", "value"], rows, f"Options of the recipe {recipe}")
    elif record.config:
        rows = [[name, said(value)] for name, value in record.config.items()][:ROWS]
        yield Table(["option", "value"], rows, "Configuration of the program")
    environment = record.plan.get("environment")
    if isinstance(environment, dict) and environment:
        rows = [[name, said(value)] for name, value in environment.items()][:ROWS]
        yield Table(["variable", "value"], rows, "Variables that were given to the ranks")
    if rows := versions_of(record):
        yield Table(["", "version", "where"], rows, "Versions", folded=False)


def settings_of(plan: Mapping[str, Any]) -> list[list[str]]:
    """Name, value and source of every setting of a plan."""
    found, rows = plan.get("settings"), []
    for name, one in found.items() if isinstance(found, dict) else ():
        if isinstance(one, dict):
            detail = words(one.get("detail"), 400)
            source = words(one.get("source"), 100)
            rows.append([name, said(one.get("value")), f"{source}: {detail}" if detail else source])
    return rows[:ROWS]


def said(value: Any) -> str:
    """A value of a setting for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value[:100]))
    return "" if value is None else str(value)


def versions_of(record: Record) -> list[list[str]]:
    """What ran in which version, and where, where hosts differ."""
    found: dict[tuple[str, str], list[str]] = {}
    typed = record.plan.get("typed")
    if isinstance(typed, dict) and typed.get("paceline"):
        found["paceline", words(typed["paceline"], 50)] = []
    for event in record.events:
        if event.kind == "imported":
            for name in ("python", "torch", "cuda", "nccl"):
                if event[name]:
                    hosts = found.setdefault((name, str(event[name])), [])
                    hosts += [event.host] if event.host not in hosts else []
    for host, facts in list(record.hosts.items())[:1000]:
        kernel = words(facts.get("kernel"), 100) if isinstance(facts, dict) else ""
        driver = facts.get("devices") if isinstance(facts, dict) else None
        driver = words(driver.get("nvidia_driver"), 100) if isinstance(driver, dict) else ""
        for name, version in (("kernel", kernel), ("NVIDIA driver", driver)):
            if version:
                found.setdefault((name, version), []).append(str(host)[:255])
    several = {name for name, _ in found if sum(1 for one, _ in found if one == name) > 1}
    return [[name, version, ", ".join(hosts[:20]) if name in several else
             ("all hosts" if len(hosts) > 1 else ", ".join(hosts))]
            for (name, version), hosts in found.items()]  # fmt: skip


def again(record: Record) -> Iterator[Part]:
    """The command that repeats the run."""
    typed = record.plan.get("typed")
    command = words(typed.get("command")) if isinstance(typed, dict) else ""
    if command:
        folder = words(typed.get("folder"), 4096) if isinstance(typed, dict) else ""
        begin = f"cd {shell_text([folder])}\n" if folder else ""
        yield Words(begin + command, "command")
        return
    entry = record.plan.get("entry")
    if not isinstance(entry, dict) or not words(entry.get("target")):
        return
    argv = ["paceline", "run", *_chosen(record.plan)]
    argv += ["-m"] if entry.get("kind") == "module" else []
    argv += [words(entry.get("target")), *_texts(entry.get("args"))]
    yield Words(
        "The command was not recorded; this starts the same program on the same hosts.", "small"
    )
    yield Words(shell_text(argv), "command")


def _goes_on(run: Run) -> Iterator[Part]:
    """Where what was trained so far is kept."""
    saved = run.last("checkpoint")
    if saved is None or not isinstance(saved["step"], int) or outcome_of(run)[0] == "good":
        return
    folder = shell_text([str(run.record.path.absolute())])
    step = f"{saved['step']:,}"
    yield Words(f"With --run-dir {folder} training resumes from the checkpoint of step {step}.")


def _chosen(plan: Mapping[str, Any]) -> list[str]:
    """The hosts and processes of a plan as options."""
    nodes = objects_in(plan.get("nodes"))
    if all(node.get("login") == "this machine" for node in nodes):
        hosts = []
    else:
        hosts = ["-H", ",".join(words(node.get("host"), 255) for node in nodes)]
    each = {len(objects_in(node.get("ranks"))) for node in nodes}
    return [*hosts, *(["-p", str(*each)] if len(each) == 1 and each != {1} else [])]


def _about(run: Run) -> Iterator[Part]:
    record = run.record
    items = [("bad", text) for text in record.missing]
    for name in record.thinned:
        items.append(("note", f"{name} is very long: parts of it, all over the run, were read"))
    if run.estimated and record.metrics:
        items.append(
            ("note", f"{names.METRICS} holds no times: they are estimated from the events")
        )
    if items:
        yield Listed(items)
    yield Words(f"Made from {record.path.absolute()}.", "small")


# -- numbers for people --------------------------------------------------------------------


def lasted(point: Point) -> str:
    """The time of a point in a table of seconds; empty where it is not known."""
    return "" if point.seconds is None else f"{point.seconds:.1f}"


def shown(value: float) -> str:
    """A number with as many digits as matter."""
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"
