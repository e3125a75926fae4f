"""Tables of the results of ``slow_links.py``: seconds to the final loss of exact DDP.

    python bench/slow_links/report.py results.jsonl…

How the figures are computed:

* A validation loss is the mean of the last three validations, for all methods. A final loss is that
  at DDP's number of steps.
* A method's learning rate is the one with the lowest final loss over half the steps at seed 0.
* The target of a seed is DDP's final loss. A method reaches it at the first step (interpolated
  between validations) at which its loss is not higher.
* The time at a step is ``measured`` if the training ran on that link. Otherwise it is ``composed``:
  the first steps as measured on that link, and each further step as the mean of the later half of
  these, with the losses of the unshaped link.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Curve = list[tuple[float, float]]  # step, loss


def read(path: Path) -> list[Record]:
    """Records of a file; incomplete lines are skipped."""
    records = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return records


def select(records: Iterable[Record], **criteria: Any) -> list[Record]:
    """Records without an error that have the given values."""
    return [
        record
        for record in records
        if "found" in record and all(record.get(key) == value for key, value in criteria.items())
    ]


def smooth(curve: Sequence[Sequence[float]]) -> Curve:
    """Steps and the mean of the last three losses up to each."""
    losses = [point[2] for point in curve]
    return [
        (point[0], statistics.fmean(losses[max(0, number - 2) : number + 1]))
        for number, point in enumerate(curve)
    ]


def final(record: Record) -> float:
    """Loss at DDP's number of steps; infinite if the training did not reach it."""
    losses = [loss for step, loss in smooth(record["found"]["curve"]) if step <= record["horizon"]]
    is_complete = (
        record["found"]["curve"] and record["found"]["curve"][-1][0] >= record["horizon"] * 0.99
    )
    return losses[-1] if is_complete and losses[-1] == losses[-1] else float("inf")


def best_rate(records: Iterable[Record], model: str, method: str) -> float | None:
    """Learning rate with the lowest final loss; None if there is none."""
    candidates = select(records, kind="rate", model=model, method=method)
    best_record = min(candidates, key=final, default=None)
    return (
        best_record["lr"] if best_record is not None and final(best_record) < float("inf") else None
    )


def lowest_loss(records: Iterable[Record], model: str, method: str) -> float:
    """Lowest final loss of all learning rates; infinite if there is none."""
    candidates = select(records, kind="rate", model=model, method=method)
    return min((final(record) for record in candidates), default=float("inf"))


def reached(curve: Curve, target: float) -> float | None:
    """First step at which the loss is not above the target, interpolated between validations."""
    previous: tuple[float, float] | None = None
    for step, loss in curve:
        if loss <= target:
            if previous is None or previous[1] == loss:
                return step
            fraction = (previous[1] - target) / (previous[1] - loss)
            return previous[0] + fraction * (step - previous[0])
        previous = (step, loss)
    return None


def seconds_at(step: float, seconds: Sequence[float], period: int = 1) -> float:
    """Seconds until a step, composed of the times of the first steps.

    Args:
        step: Number of steps; fractions are interpolated.
        seconds: Seconds of each of the first steps.
        period: Steps of a repeating period, such as between two exchanges of DiLoCo.
    """
    if step <= len(seconds):
        num_complete = int(step)
        remainder = (
            (step - num_complete) * seconds[num_complete] if num_complete < len(seconds) else 0.0
        )
        return sum(seconds[:num_complete]) + remainder
    num_later = max(period, len(seconds) // 2 // period * period)
    return sum(seconds) + (step - len(seconds)) * statistics.fmean(seconds[-num_later:])


def period_of(method: str) -> int:
    return int(method.split()[1]) if method.startswith("diloco") else 1


def measured_at(step: float, curve: Sequence[Sequence[float]]) -> float:
    """Seconds until a step of a training on the link, interpolated between its validations."""
    previous = (0.0, 0.0)
    for validated, seconds, *_ in curve:
        if step <= validated:
            return previous[1] + (step - previous[0]) / (validated - previous[0]) * (
                seconds - previous[1]
            )
        previous = (validated, seconds)
    return previous[1]


def median(values: Iterable[float | None]) -> float | None:
    """Median, in which None (target not reached) counts as the slowest. None if it is infinite."""
    known_values = [float("inf") if value is None else value for value in values]
    median_value = statistics.median(known_values) if known_values else None
    return None if median_value == float("inf") else median_value


def to_target(
    records: list[Record], model: str, method: str, link: str, seed: int
) -> tuple[float | None, str] | None:
    """Seconds to the final loss of DDP with this seed, and ``measured`` or ``composed``.

    None if a measurement is missing.
    """
    reference = _curve(records, model, "ddp", seed)
    if reference is None:
        return None
    target = final(reference)
    records_at_link = select(
        records, kind="curve", model=model, method=method, seed=seed, link=link
    )
    if records_at_link:
        step = reached(smooth(records_at_link[-1]["found"]["curve"]), target)
        seconds_to_target = (
            None if step is None else measured_at(step, records_at_link[-1]["found"]["curve"])
        )
        return seconds_to_target, "measured"
    training_record = _curve(records, model, method, seed)
    pace_records = select(records, kind="pace", model=model, method=method, link=link)
    candidates = [record for record in pace_records if record["seed"] == seed] or pace_records
    if training_record is None or not candidates:
        return None
    step = reached(smooth(training_record["found"]["curve"]), target)
    if step is None:
        return None, "composed"
    return seconds_at(step, candidates[-1]["found"]["seconds"], period_of(method)), "composed"


def _curve(records: list[Record], model: str, method: str, seed: int) -> Record | None:
    """Training on the unshaped link. Exact averages use DDP's: see :func:`unequal`."""
    for name in (method, "ddp") if method == "ours exact" else (method,):
        values = {"model": model, "method": name, "seed": seed, "link": "unshaped"}
        if matches := select(records, kind="curve", **values):
            return matches[-1]
    return None


def worse(records: list[Record], model: str, method: str, link: str, seed: int) -> float | None:
    """Relative increase of a method's final loss over DDP's with the same seed."""
    reference = _curve(records, model, "ddp", seed)
    records_at_link = select(
        records, kind="curve", model=model, method=method, seed=seed, link=link
    )
    training_record = (
        records_at_link[-1] if records_at_link else _curve(records, model, method, seed)
    )
    return (
        None
        if reference is None or training_record is None
        else final(training_record) / final(reference) - 1
    )


def unequal(records: list[Record]) -> tuple[int, list[str]]:
    """Compare the first losses of equal trainings on two links.

    Returns the number of comparisons, and a text for each with different losses."""
    first_by_key: dict[tuple[Any, ...], tuple[str, list[str]]] = {}
    compared, unequal_texts = 0, []
    for record in select(records):
        if record.get("kind") not in ("curve", "pace") or record["method"].startswith("ours auto"):
            continue
        key = tuple(record[name] for name in ("model", "method", "lr", "seed", "horizon"))
        losses = record["found"]["losses"]
        if key not in first_by_key:
            first_by_key[key] = (record["link"], losses)
            continue
        num_common = min(len(losses), len(first_by_key[key][1]))
        compared += 1
        if losses[:num_common] != first_by_key[key][1][:num_common]:
            unequal_texts.append(f"{key}: {first_by_key[key][0]} and {record['link']}")
    return compared, unequal_texts


def exact_difference(records: list[Record], model: str, link: str) -> float | None:
    """Largest relative difference of the first losses between Paceline's exact method and DDP."""
    exact, ddp = (
        select(records, kind="pace", model=model, method=method, link=link)
        for method in ("ours exact", "ddp")
    )
    if not exact or not ddp:
        return None
    paired_losses = zip(exact[-1]["found"]["losses"], ddp[-1]["found"]["losses"], strict=False)
    pairs = [(float.fromhex(a), float.fromhex(b)) for a, b in paired_losses]
    return max((abs(a / b - 1) for a, b in pairs), default=None)


def pace(records: list[Record], model: str, method: str, link: str) -> float | None:
    """Median seconds of a step in the later half of the first steps."""
    values = []
    for record in select(records, kind="pace", model=model, method=method, link=link):
        seconds, period = record["found"]["seconds"], period_of(method)
        num_later = max(period, len(seconds) // 2 // period * period)
        values.append(statistics.fmean(seconds[-num_later:]))
    return median(values)


def _format(value: float | None, format_spec: str, missing: str = "") -> str:
    return missing if value is None else format(value, format_spec)


TARGET_SPEEDUPS = {"1 Gbit/s": 1.3, "100 Mbit/s": 4.5, "20 Mbit/s": 8.0}  # speed relative to DDP
MAX_LOSS_INCREASE = 0.005  # relative


def verdicts(records: list[Record], method: str = "ours auto") -> list[str]:
    """Rows for each model and link: speed relative to DDP, and the target."""
    records_at_link = select(records, kind="curve", method=method)
    rows = []
    for model in dict.fromkeys(record["model"] for record in records_at_link):
        model_records = [record for record in records_at_link if record["model"] == model]
        seeds = sorted({record["seed"] for record in model_records})
        for link in dict.fromkeys(record["link"] for record in model_records):
            times = median(_seconds(records, model, method, link, seeds))
            ddp_s = median(_seconds(records, model, "ddp", link, seeds))
            ratio = ddp_s / times if ddp_s and times else None
            losses = [w for s in seeds if (w := worse(records, model, method, link, s)) is not None]
            loss, target = median(losses), TARGET_SPEEDUPS.get(link, 1.0)
            selected_methods = [
                record["found"].get("method", "")
                for record in model_records
                if record["link"] == link
            ]
            is_met = ratio is not None and ratio >= target
            is_close = loss is not None and loss <= MAX_LOSS_INCREASE
            rows.append(
                f"| {model} | {link} | {', '.join(dict.fromkeys(selected_methods))}"
                f" | {_format(ratio, '.2f', '-')} | {target:g} | {'yes' if is_met else 'no'}"
                f" | {_format(loss, '+.2%')} | {'yes' if is_close else 'no'} | {len(losses)} |"
            )
    return rows


def table(records: list[Record]) -> str:
    """The report in Markdown."""
    curves = select(records, kind="curve")
    models = list(dict.fromkeys(record["model"] for record in curves))
    all_records = [*curves, *select(records, kind="pace")]
    methods = list(
        dict.fromkeys(entry["method"] for entry in all_records if entry["method"] != "alone")
    )
    methods.sort(key=lambda name: (name.startswith("ours"), name))
    seeds = sorted({record["seed"] for record in curves})
    links = [
        name
        for name in dict.fromkeys(
            record["link"] for record in select(records) if record.get("link")
        )
        if name != "unshaped"
    ]
    parts = [
        "| model | link | selected method | speed relative to DDP | target | met"
        " | final loss, median | within 0.5 % | seeds |\n|---|---|---|---|---|---|---|---|---|",
        *verdicts(records),
    ]
    for model in models:
        final_losses = [
            final(curve) for s in seeds if (curve := _curve(records, model, "ddp", s)) is not None
        ]
        range_text = (
            f", {min(final_losses):.4f} to {max(final_losses):.4f} over {len(final_losses)} seeds"
            if final_losses
            else ""
        )
        computing_s = pace(records, model, "alone", "unshaped")
        parts.append(f"\n## {model}\n")
        parts.append(
            f"Final loss of DDP: {_format(median(final_losses), '.4f')}{range_text}."
            f" Computing only (C): {_format(computing_s and computing_s * 1000, '.0f')} ms/step.\n"
        )
        for link in links:
            rows = []
            ddp_s = median(_seconds(records, model, "ddp", link, seeds))
            for method in methods:
                times_by_seed = [to_target(records, model, method, link, seed) for seed in seeds]
                reached_times = [entry for entry in times_by_seed if entry is not None]
                if not reached_times:
                    continue
                seconds = median(entry[0] for entry in reached_times)
                losses = [
                    w for s in seeds if (w := worse(records, model, method, link, s)) is not None
                ]
                step = pace(records, model, method, link)
                lr = next(
                    (o["lr"] for o in all_records if (o["model"], o["method"]) == (model, method)),
                    None,
                )
                ratio = ddp_s / seconds if ddp_s and seconds else None
                bytes_sent = [
                    record["found"]["sent"]
                    for record in select(records, model=model, method=method, link=link)
                ]
                megabytes = statistics.median(bytes_sent) / 1e6 if bytes_sent else None
                rows.append(
                    f"| {method} | {_format(lr, 'g', '-')} | {_format(step and step * 1000, '.0f')}"
                    f" | {_format(megabytes or None, '.2f')}"
                    f" | {_format(seconds, '.1f', 'not reached')} | {_format(ratio, '.2f')}"
                    f" | {_format(median(losses) if losses else None, '+.2%')}"
                    f" | {_format(max(losses, default=None), '+.2%')} | {len(reached_times)}"
                    f" | {'/'.join(sorted({entry[1] for entry in reached_times}))} |"
                )
            if rows:
                parts.append(
                    f"### {link}\n\n| method | lr | ms/step | MB sent/step | s to DDP's loss |"
                    " speed relative to DDP | final loss, median | worst seed | seeds | time |\n"
                    "|---|---|---|---|---|---|---|---|---|---|"
                )
                parts.append("\n".join(rows) + "\n")
    compared, unequal_texts = unequal(records)
    parts.append(
        f"\nExact comparison of the losses of the first steps between links: {compared}"
        f" comparisons, {len(unequal_texts)} unequal.\n"
    )
    parts += [f"* {text}" for text in unequal_texts]
    for model in models:
        for link in links:
            if (difference := exact_difference(records, model, link)) is not None:
                parts.append(
                    f"* {model}, {link}: first losses of ours exact and DDP differ by"
                    f" {difference:.1e}"
                )
    parts.append(
        "\n| model | method | final loss after half the steps, by learning rate |\n|---|---|---|"
    )
    for model in models:
        for method in methods:
            rate_records = select(records, kind="rate", model=model, method=method)
            if rate_records:
                cells = ", ".join(
                    f"{o['lr']:g}: {final(o):.4f}"
                    for o in sorted(rate_records, key=lambda o: o["lr"])
                )
                parts.append(f"| {model} | {method} | {cells} |")
    parts.append("")
    for record in select(records, kind="line"):
        result = record["found"]
        parts.append(
            f"* {record['link']}: all-reduce of {record['steps']:,} numbers at"
            f" {result['mbit_s']:.1f} Mbit/s, of one in {result['small'] * 1000:.2f} ms"
        )
    return "\n".join(parts)


def _seconds(
    records: list[Record], model: str, method: str, link: str, seeds: Sequence[int]
) -> list[float | None]:
    times = (to_target(records, model, method, link, seed) for seed in seeds)
    return [time[0] for time in times if time is not None]


if __name__ == "__main__":
    print(table([record for path in sys.argv[1:] for record in read(Path(path))]))
