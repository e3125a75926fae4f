"""The page of one run, made from its files. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.report import curves
from paceline.report.curves import Curve, Point, StepDivision
from paceline.report.machines import hosts_parts, links_parts, ranks_of
from paceline.report.page import Figure, ItemList, Page, Paragraph, Part, Section, Status, Table
from paceline.report.record import Record
from paceline.report.run import Run
from paceline.report.timeline import ACTIVITY_LABELS, Row, Timeline
from paceline.rundir.records import as_float, as_text, cause_in, object_in, objects_in
from paceline.spec import rundir as names
from paceline.spec.events import PART_NAMES, PARTS, Event, replica_difference
from paceline.spec.failure import UNKNOWN, format_location, signal_name
from paceline.spec.formatting import DATE_TIME, format_duration, format_time, pluralize, shell_text

MAX_ROWS = 400  # of a table of raw numbers
MAX_EXPANDED_LINES = 40  # a longer traceback is collapsed
_MIN_WAITING_GAP = 0.05  # of a step, between two ranks, to be mentioned


def build_page(run: Run) -> Page:
    status, outcome = outcome_of(run)
    sections = [
        Section("What happened", [*_timeline_parts(run)]),
        Section("Findings and remedies", [*_findings(run)]),
        Section("Curves", [*_curves(run)]),
        Section("Throughput and efficiency", [*_throughput(run)]),
        Section("Hosts and links", [*hosts_parts(run.record), *links_parts(run.record)]),
        Section("Forecast and what came", [*_forecast(run.record.forecast)]),
        Section("Plan, configuration, versions", [*_plan(run.record)]),
        Section("Run it again", [*_rerun_command(run.record), *_resume_hint(run)]),
        Section("About this report", [*_page_notes(run)]),
    ]
    if status == "bad":
        sections[:2] = reversed(sections[:2])
    with_parts = [section for section in sections if section.parts]
    return Page(run.record.name, status, outcome, [*_facts(run)], with_parts)


# -- the outcome ---------------------------------------------------------------------------


def outcome_of(run: Run) -> tuple[Status, str]:
    record, result = run.record, run.record.result
    hosts = f" on {pluralize(len(run.hosts), 'host')}" if run.hosts else ""
    size = f"{pluralize(run.num_ranks, 'rank')}{hosts}"
    step = run.last_step
    if record.is_running:
        return "unsure", f"Still running: {size}" + f", now at step {step}" * bool(step) + "."
    duration = format_duration(run.duration_s)
    if not record.has_result:
        if not record.events:
            return "unsure", "Nothing tells how this run went: it left neither events nor a result."
        owner = record.owner
        process = f" (process {owner['pid']} on {owner['host']})" if owner else ""
        return "bad", f"Lost: its launcher{process} ended without a result after {duration}."
    if result.error:
        return "bad", f"Not started: {result.error.splitlines()[0]}"
    if result.failure is not None:
        verb = "Stopped" if result.interrupted else "Failed"
        later = pluralize(result.num_other_failures, "other")
        echoes = f"; {later} failed after it" if result.num_other_failures else ""
        cause = cause_in(record.findings).rstrip(".") or result.failure.describe()
        return "bad", f"{verb} after {duration}: {cause}{echoes}."
    if result.interrupted is not None:
        name, step_text = signal_name(result.interrupted), f" at step {step}" if step else ""
        saved = _describe_saved(run.last_event("stopped"))
        return "unsure", f"Stopped by {name} after {duration}{step_text}{saved}."
    if result.exit_code == UNKNOWN:
        return "unsure", f"The outcome is not known: result.json lacks it ({size}, {duration})."
    if result.exit_code:
        return "bad", f"Failed with exit status {result.exit_code} after {duration}."
    trained = f"{size} {run.progress}".rstrip()
    sentence = "; ".join(filter(None, (f"{trained} in {duration}", _describe_troubles(run))))
    if difference := replica_difference(record.events):
        return "unsure", f"Finished: {sentence}; {difference}."
    return "good", f"Finished: {sentence}."


def _describe_saved(stopped: Event | None) -> str:
    if stopped is None:
        return ""
    saved, step = stopped["saved"], stopped["step"]
    if saved is None or saved == step:
        return ", its state is saved"
    return f", saved up to step {saved:,}" if saved else ", and nothing is saved"


def _describe_troubles(run: Run) -> str:
    """What a run that ended well had to overcome; empty if nothing."""
    texts = []
    if run.record.num_recoveries:
        texts.append(f"the others trained on after {_describe_losses(run)}")
    restarts = len(run.events("started")) - 1
    if restarts > 0:
        texts.append(f"it was started again {pluralize(restarts, 'time')}")
    if (slowest := slowest_rank(run)) is not None:
        texts.append(f"{slowest[0]} held the others up")
    return ", ".join(texts)


def _describe_losses(run: Run) -> str:
    """``the loss of n2, which came back``; a number if there are many, or no host was lost."""
    hosts = list(dict.fromkeys(event.host for event in run.events("lost")))
    if 0 < len(hosts) <= 3:
        returned = tuple(row.label for row in run.timeline.rows if row.has_returned)
        texts = [host + ", which came back" * any(label.endswith(f" {host}") for label in returned)
                 for host in hosts]  # fmt: skip
        return f"the loss of {'; and of '.join(texts)}"
    count = run.record.num_recoveries
    return "a rank was lost" if count == 1 else f"ranks were lost ({count} times)"


def slowest_rank(run: Run) -> tuple[str, str] | None:
    stragglers = run.events("straggler")
    if trained := run.last_event("trained"):
        rank = trained["straggler"]
        if rank is None:
            return None
        label = format_location(str(trained["its_host"] or ""), rank)
        texts = [str(event["text"] or "") for event in stragglers if event["straggler"] == rank]
        return label, texts[-1] if texts else f"{label}: {trained['cause'] or ''}"
    if not stragglers:
        return None
    event = stragglers[-1]
    location = format_location(str(event["its_host"] or ""), event["straggler"])
    return location, str(event["text"] or "")


# Remedies for the causes in train/measure/straggler.py.
_REMEDIES = {
    "quota": "Give its control group more CPU time (cpu.max), or its host fewer ranks.",
    "cpu": "End the other programs on its host (top shows them), or train with {by_speed}.",
    "stolen": "Move it to a host whose CPUs are its own, or train with {by_speed}.",
    "swap": "Give its host fewer ranks or smaller batches, or more memory.",
    "hot": "Look at the cooling of its host; until then {by_speed}.",
    "share": "Give its host a smaller weight (--balance), or train with {by_speed}.",
    "batch": "Give every rank samples of similar lengths.",
    "data": "Put its data on a faster disk, or load it with more workers.",
    "link": "Look at the cable, port and speed of its interface; paceline check measures links.",
    "computing": "Train with {by_speed}: each rank gets the share that suits its speed.",
}
_BY_SPEED = '--balance auto (in a script session.loader(…, balance="auto"))'


def _straggler_remedy(run: Run) -> str:
    causes = [event["cause"] for event in run.record.events
              if event.kind in ("straggler", "trained") and event["cause"]]  # fmt: skip
    remedy = _REMEDIES.get(str(causes[-1]), "") if causes else ""
    return remedy.format(by_speed=_BY_SPEED)


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    if run.timeline.started_at:
        yield "Started", format_time(run.timeline.started_at, f"{DATE_TIME} UTC", utc=True)
    if run.duration_s:
        yield "Took", format_duration(run.duration_s)
    if run.num_ranks:
        hosts = f" on {len(run.hosts)}" if run.hosts else ""
        yield "Ranks" + (", hosts" if hosts else ""), f"{run.num_ranks}{hosts}"
    if step := run.last_step:
        yield "Steps", f"{step:,}"
    if rate := curves.mean_rate(run.metrics):
        yield "Samples/s", format_value(rate)
    if computing := _computing_share(run):
        yield "Computing", computing
    for curve in run.main_curves:
        yield f"{curve.metric}, {curve.split}", format_last(curve)


def _computing_share(run: Run) -> str:
    trained = run.last_event("trained")
    parts = trained["parts"] if trained else None
    if isinstance(parts, dict) and "computing" in parts:
        share, basis = as_float(parts["computing"]), "rank that waited most"
    elif run.divisions:
        share, basis = run.divisions[0].share("computing"), "mean of all ranks"
    else:
        return ""
    return f"{share:.0%} of a step" + f" ({basis})" * (run.num_ranks > 1)


# -- what happened -------------------------------------------------------------------------


def _timeline_parts(run: Run) -> Iterator[Part]:
    timeline = run.timeline
    if timeline.rows:
        yield Figure("timeline", "All ranks over time", _describe_timeline(timeline),
                     timeline_data(timeline), height=0)  # fmt: skip
        if timeline.moments:
            items = [(moment.severity, f"after {format_duration(moment.at)}: {moment.text}")
                     for moment in timeline.moments]  # fmt: skip
            yield ItemList(items, numbered=True)
        if timeline.hidden_ranks:
            yield Paragraph(f"{pluralize(timeline.hidden_ranks, 'rank')} more are not drawn,"
                            " because less happened to them.", "small")  # fmt: skip
        if timeline.hidden_moments:
            yield Paragraph(f"{pluralize(timeline.hidden_moments, 'moment')} more are not numbered;"
                            " the events below have them.", "small")  # fmt: skip
    elif run.record.events:
        yield Paragraph("No rank was started.")
    yield from _events(run.record.events, timeline.started_at)


def _describe_timeline(timeline: Timeline) -> str:
    texts = [text for row in timeline.rows for text in _describe_row(row)]
    saved = sum(mark.kind == "checkpoint" for row in timeline.rows for mark in row.marks)
    if saved:
        texts.append(f"{pluralize(saved, 'checkpoint')} {'was' if saved == 1 else 'were'} written")
    text = "; ".join(texts[:12]) or "no rank was lost, and none held the others up"
    ranks = pluralize(len(timeline.rows), "rank")
    duration = format_duration(timeline.duration_s)
    return f"{ranks} over {duration}, a row each. {text[0].upper()}{text[1:]}."


def _describe_row(row: Row) -> Iterator[str]:
    losses = [mark.kind for mark in row.marks if mark.kind in ("lost", "failed")]
    if losses == ["failed"] and row.marks[-1].kind == "failed":
        yield f"{row.label} failed"
    elif losses and row.has_returned:
        gone_s = sum(span.end - span.start for span in row.spans if span.activity == "gone")
        absence = f" (away for {format_duration(gone_s)})" if gone_s > 0.05 else ""
        yield f"{row.label} was lost {_times(len(losses))}, and came back{absence}"
    elif losses:
        yield f"{row.label} was lost {_times(len(losses)) if len(losses) > 1 else 'for good'}"
    if row.slowdowns:
        duration = sum(slowdown.end - slowdown.start for slowdown in row.slowdowns)
        yield f"{row.label} held the others up for {format_duration(duration)}"


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def timeline_data(timeline: Timeline) -> dict[str, Any]:
    """The data of the figure, for ``page.js``; times are seconds since the run began."""

    def row_data(row: Row) -> dict[str, Any]:
        return {
            "label": row.label,
            "spans": [[round(span.start, 3), round(span.end, 3), span.activity]
                      for span in row.spans],
            "cells": [[round(cell.start, 3), round(cell.end, 3), *cell.shares]
                      for cell in row.cells],
            "marks": [[round(mark.at, 3), mark.kind] for mark in row.marks],
            "slow": [[round(slow.start, 3), round(slow.end, 3), slow.text]
                     for slow in row.slowdowns],
        }  # fmt: skip

    return {
        "seconds": round(timeline.duration_s, 3),
        "doing": ACTIVITY_LABELS,
        "parts": [[name, PART_NAMES[name]] for name in PARTS],
        "rows": [row_data(row) for row in timeline.rows],
        "moments": [[round(moment.at, 3), moment.text, moment.severity]
                    for moment in timeline.moments],
    }  # fmt: skip


def _events(events: Sequence[Event], started_at: float) -> Iterator[Part]:
    if not events:
        return
    half = MAX_ROWS // 2
    is_cut = len(events) > MAX_ROWS
    rows = [
        [f"{event.time - started_at:.2f}", event.where, event.kind,
         ", ".join(f"{name} {value}" for name, value in event.fields.items()
                   if value not in (None, ""))]
        for event in ([*events[:half], *events[-half:]] if is_cut else events)
    ]  # fmt: skip
    note = f", the first and last {half} of {len(events)}" if is_cut else ""
    yield Table(["seconds", "where", "event", "details"], rows, f"Every event{note}")


# -- findings ------------------------------------------------------------------------------


def _findings(run: Run) -> Iterator[Part]:
    error, failure = run.record.result.error, run.record.result.failure
    if error:
        yield Paragraph(error, "pre")
    items = [*_finding_items(run.record.findings)]
    if (slowest := slowest_rank(run)) is not None and slowest[1]:
        remedy = _straggler_remedy(run)
        items.append(("slow", slowest[1] + f" → {remedy}" * bool(remedy)))
    items += [("note", f"note: {note}") for note in _texts(run.record.plan.get("notes"))]
    if items:
        yield ItemList(items)
    elif not error:
        passed = sum(finding.get("outcome") == "pass" for finding in run.record.findings)
        checks = f" ({pluralize(passed, 'check')} passed)" if passed else ""
        scope = "Apart from what is told above, nothing" if run.timeline.moments else "Nothing"
        yield Paragraph(f"{scope} was found wrong{checks}.")
    if failure is None:
        return
    if cause_in(run.record.findings):
        yield Paragraph(f"Failed first: {failure.describe()}", "small")
    if failure.traceback:
        is_short = failure.traceback.count("\n") < MAX_EXPANDED_LINES
        title = f"Traceback of {failure.where}"
        yield Paragraph(failure.traceback, "pre", title, expanded=is_short)


def _finding_items(findings: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    outcomes = ("fail", "unknown", "warn")
    wrong = [finding for finding in findings if finding.get("outcome") in outcomes]
    wrong.sort(key=lambda finding: outcomes.index(str(finding.get("outcome"))))
    for finding in wrong[:20]:
        remedy = as_text(finding.get("remedy")).strip()
        check = as_text(finding.get("check"), 100)
        source = "" if check.startswith("explain/") else f" (check: {check})"
        text = f"{as_text(finding.get('message'))}{source}" + f" → {remedy}" * bool(remedy)
        yield "bad" if finding.get("outcome") == "fail" else "slow", text


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list):
        return []
    return [entry for entry in value[:50] if isinstance(entry, str)]


# -- curves --------------------------------------------------------------------------------


def _curves(run: Run) -> Iterator[Part]:
    by_metric: dict[str, list[Curve]] = {}
    for curve in run.curves:
        by_metric.setdefault(curve.metric, []).append(curve)
    for metric, group in sorted(by_metric.items(), key=lambda item: item[0] == "lr"):
        yield Figure("curves", metric, _describe_curves(group), curves_data(metric, group),
                     _curves_table(group))  # fmt: skip


def _describe_curves(group: Sequence[Curve]) -> str:
    texts = []
    for curve in group:
        first, last, best = curve.points[0], curve.last, curve.best
        if len(curve.points) == 1:
            text = f"{curve.split}: {_at_step(last)}"
        else:
            text = f"{curve.split}: from {_at_step(first)} to {_at_step(last)}"
            if best not in (first, last) and curve.metric != "lr":
                text += f", best {_at_step(best)}"
        if curve.num_nonfinite:
            text += f"; {pluralize(curve.num_nonfinite, 'value')} not a finite number"
        texts.append(text)
    is_thinned = any(curve.num_recorded > len(curve.points) for curve in group)
    return "; ".join(texts) + "." + " Of many values, highs and lows are drawn." * is_thinned


def _at_step(point: Point) -> str:
    return f"{format_value(point.value)} at step {point.step:,}"


def curves_data(metric: str, group: Sequence[Curve], labels: Sequence[str] = (),
                axis: str = "step") -> dict[str, Any]:  # fmt: skip
    series = [
        {"name": label,
         "points": [[x, point.value] for point in curve.points
                    if (x := getattr(point, axis)) is not None]}
        for label, curve in zip(labels or [curve.split for curve in group], group, strict=True)
    ]  # fmt: skip
    return {"metric": metric, "over": axis, "series": series}


def _curves_table(group: Sequence[Curve]) -> Table:
    points = [(point, curve.split) for curve in group for point in curve.points]
    points.sort(key=lambda item: item[0].step)
    rows = [[str(point.step), split, f"{point.value:.8g}", format_seconds(point)]
            for point, split in points[:: stride_of(points)]]  # fmt: skip
    total = sum(curve.num_recorded for curve in group)
    note = f", {len(rows):,} of {total:,}" if len(rows) < total else ""
    return Table(["step", "split", group[0].metric, "seconds"], rows, f"The numbers{note}")


# -- throughput and efficiency -------------------------------------------------------------


def _throughput(run: Run) -> Iterator[Part]:
    curve = curves.throughput(run.metrics, run.timeline.started_at)
    if curve is not None:
        mean_rate = curves.mean_rate(run.metrics) or curve.last.value
        highest = max(curve.points, key=lambda point: point.value)
        description = (
            f"{format_value(mean_rate)} samples a second over all steps:"
            f" {_at_step(curve.points[0])}, {_at_step(curve.last)}, at most {_at_step(highest)}."
        )
        data = curves_data("samples/s", [curve], ["samples/s"])
        yield Figure("curves", "Throughput", description, data, _curves_table([curve]))
    if not run.divisions:
        return
    mean_division, *by_rank = run.divisions
    rank_labels: dict[int | None, str] = {row.rank: row.label for row in run.timeline.rows}
    labels = {division.rank: rank_labels.get(division.rank, f"rank {division.rank}")
              for division in by_rank}  # fmt: skip
    labels[None] = "mean of all"
    drawn = by_rank or [mean_division]
    yield Paragraph(_describe_efficiency(mean_division, by_rank, labels))
    yield Figure(
        "division", "How a step divides, by rank",
        _describe_division(mean_division, by_rank, labels),
        {
            "parts": [[name, PART_NAMES[name]] for name in PARTS],
            "rows": [[labels[division.rank], *(round(1e3 * part, 3) for part in division.seconds)]
                     for division in drawn],
        },
        Table(["rank", *(f"{PART_NAMES[name]}, ms" for name in PARTS), "step, ms"],
              [[labels[division.rank], *(f"{1e3 * part:.2f}" for part in division.seconds),
                f"{1e3 * division.step_s:.2f}"] for division in run.divisions],
              "The numbers: milliseconds of a step"),
        height=min(900, 90 + 34 * len(drawn)),
    )  # fmt: skip


_Labels = Mapping[int | None, str]


def _describe_efficiency(mean: StepDivision, by_rank: Sequence[StepDivision],
                         labels: _Labels) -> str:  # fmt: skip
    basis = " (mean of all ranks)" if len(by_rank) > 1 else ""
    text = f"Of the time of a step{basis}, {mean.share('computing'):.0%} was computing"
    shares = sorted(((mean.share(name), PART_NAMES[name]) for name in PARTS
                     if name != "computing"), reverse=True)  # fmt: skip
    texts = [f"{share:.0%} {name}" for share, name in shares if share >= 0.005]
    text += f"; {', '.join(texts)}." if texts else "."
    if len(by_rank) > 1:
        slowest, *_, fastest = sorted(by_rank, key=lambda division: division.share("waiting"))
        min_waiting, max_waiting = slowest.share("waiting"), fastest.share("waiting")
        if max_waiting - min_waiting > _MIN_WAITING_GAP:
            text += (
                f" The others waited most for {labels[slowest.rank]}: it waited {min_waiting:.0%}"
                f" of the time for others, {labels[fastest.rank]} {max_waiting:.0%}."
            )
    return text


def _describe_division(mean: StepDivision, by_rank: Sequence[StepDivision],
                       labels: _Labels) -> str:  # fmt: skip
    texts = [f"{labels[division.rank]} computes {1e3 * division.part_s('computing'):.1f} ms and"
             f" waits {1e3 * division.part_s('waiting'):.1f} ms for slower ranks"
             for division in by_rank[:8]]  # fmt: skip
    return f"A step takes {1e3 * mean.step_s:.1f} ms. " + "; ".join(texts) + "." * bool(texts)


# -- forecast ------------------------------------------------------------------------------


def _forecast(record: Mapping[str, Any]) -> Iterator[Part]:
    forecast, measured = object_in(record, "forecast"), object_in(record, "came")
    fields = ("low", "high", "seconds")
    low, high, expected = (1e3 * as_float(forecast.get(name)) for name in fields)
    actual = 1e3 * as_float(measured.get("seconds"))
    if not actual or not expected:
        return
    error = actual / expected - 1
    description = (
        f"A step was forecast to take {expected:.1f} ms ({low:.1f} … {high:.1f}, limited by"
        f" {as_text(forecast.get('limit'), 100)}), and took {actual:.1f} ms: {abs(error):.0%}"
        f" {'longer' if error > 0 else 'shorter'},"
        f" {'inside' if low <= actual <= high else 'outside'} the error bar."
    )
    rows = [["forecast", f"{expected:.3f}", f"{low:.3f}", f"{high:.3f}"],
            ["came", f"{actual:.3f}", "", ""]]  # fmt: skip
    yield Figure(
        "forecast", "Milliseconds of a step", description,
        {"low": low, "high": high, "said": expected, "came": actual},
        Table(["", "ms", "low", "high"], rows, "The numbers"), height=150,
    )  # fmt: skip


# -- plan, configuration, versions ---------------------------------------------------------


def _plan(record: Record) -> Iterator[Part]:
    if record.nodes:
        fields = ("devices", "address", "interface", "code", "workdir", "python")
        titles = ["host", "ranks", "devices", "address", "interface", "code", "folder", "python"]
        rows = [[as_text(node.get("host"), 255), ranks_of(node),
                 *(as_text(node.get(name), 400) for name in fields)]
                for node in record.nodes[:MAX_ROWS]]  # fmt: skip
        yield Table(titles, rows, "What ran where", collapsed=False)
    if rows := settings_of(record.plan):
        yield Table(["setting", "value", "from"], rows, "Settings, and where each came from")
    options, recipe = record.config.get("options"), as_text(record.config.get("recipe"), 100)
    if isinstance(options, dict):
        yield _values_table("option", options, f"Options of the recipe {recipe}")
    elif record.config:
        yield _values_table("option", record.config, "Configuration of the program")
    if environment := object_in(record.plan, "environment"):
        yield _values_table("variable", environment, "Variables that were given to the ranks")
    if rows := versions_of(record):
        yield Table(["", "version", "where"], rows, "Versions", collapsed=False)


def _values_table(title: str, values: Mapping[str, Any], caption: str) -> Table:
    rows = [[name, format_setting(value)] for name, value in values.items()]
    return Table([title, "value"], rows[:MAX_ROWS], caption)


def settings_of(plan: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for name, setting in object_in(plan, "settings").items():
        if isinstance(setting, dict):
            detail = as_text(setting.get("detail"), 400)
            source = as_text(setting.get("source"), 100)
            value = format_setting(setting.get("value"))
            rows.append([name, value, f"{source}: {detail}" if detail else source])
    return rows[:MAX_ROWS]


def versions_of(record: Record) -> list[list[str]]:
    """Name and version of what ran, and its hosts if they differ."""
    hosts_by_version: dict[tuple[str, str], list[str]] = {}
    if version := object_in(record.plan, "typed").get("paceline"):
        hosts_by_version["paceline", as_text(version, 50)] = []
    for event in record.events:
        if event.kind == "imported":
            for name in ("python", "torch", "cuda", "nccl"):
                if event[name]:
                    hosts = hosts_by_version.setdefault((name, str(event[name])), [])
                    hosts += [event.host] if event.host not in hosts else []
    for host, facts in list(record.hosts.items())[:1000]:
        if not isinstance(facts, dict):
            continue
        driver = object_in(facts, "devices").get("nvidia_driver")
        for name, value in (("kernel", facts.get("kernel")), ("NVIDIA driver", driver)):
            if version := as_text(value, 100):
                hosts_by_version.setdefault((name, version), []).append(str(host)[:255])
    versions = [name for name, _ in hosts_by_version]
    return [[name, version, ", ".join(hosts[:20]) if versions.count(name) > 1 or len(hosts) < 2
             else "all hosts"] for (name, version), hosts in hosts_by_version.items()]  # fmt: skip


def _rerun_command(record: Record) -> Iterator[Part]:
    typed, entry = object_in(record.plan, "typed"), object_in(record.plan, "entry")
    if command := as_text(typed.get("command")):
        folder = as_text(typed.get("folder"), 4096)
        yield Paragraph((f"cd {shell_text([folder])}\n" if folder else "") + command, "command")
    elif target := as_text(entry.get("target")):
        argv = ["paceline", "run", *_placement_options(record)]
        argv += ["-m"] if entry.get("kind") == "module" else []
        argv += [target, *_texts(entry.get("args"))]
        yield Paragraph("The command was not recorded; this starts the same program on the same"
                        " hosts.", "small")  # fmt: skip
        yield Paragraph(shell_text(argv), "command")


def _resume_hint(run: Run) -> Iterator[Part]:
    saved = run.last_event("checkpoint")
    if saved is None or not isinstance(saved["step"], int) or outcome_of(run)[0] == "good":
        return
    folder = shell_text([str(run.record.path.absolute())])
    yield Paragraph(f"With --run-dir {folder} training resumes from the checkpoint of step"
                    f" {saved['step']:,}.")  # fmt: skip


def _placement_options(record: Record) -> list[str]:
    is_local = all(node.get("login") == "this machine" for node in record.nodes)
    options = [] if is_local else ["-H", ",".join(record.planned_hosts)]
    sizes = {len(objects_in(node.get("ranks"))) for node in record.nodes}
    return [*options, *(["-p", str(*sizes)] if len(sizes) == 1 and sizes != {1} else [])]


def _page_notes(run: Run) -> Iterator[Part]:
    items = [("bad", text) for text in run.record.missing]
    items += [("note", f"{name} is very long: only samples from all over the run were read")
              for name in run.record.sampled]  # fmt: skip
    if run.record.earlier_events:
        items.append(("note", "an earlier start in this run directory is only in the curves"))
    if run.has_estimated_times and run.record.metrics:
        text = f"{names.METRICS} holds no times: they are estimated from the events"
        items.append(("note", text))
    if items:
        yield ItemList(items)
    yield Paragraph(f"Made from {run.record.path.absolute()}.", "small")


# -- formats -------------------------------------------------------------------------------


def stride_of(rows: Sequence[Any]) -> int:
    """The stride with which at most :data:`MAX_ROWS` rows remain."""
    return max(1, -(-len(rows) // MAX_ROWS))


def format_setting(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value[:100]))
    return "" if value is None else str(value)


def format_seconds(point: Point) -> str:
    return "" if point.seconds is None else f"{point.seconds:.1f}"


def format_value(value: float) -> str:
    """A number with as many digits as matter."""
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def format_last(curve: Curve) -> str:
    last, best = curve.last.value, curve.best.value
    return format_value(last) + (f" (best {format_value(best)})" if best != last else "")
