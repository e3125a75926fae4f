"""The table of ``slow_links.py``'s results: seconds to the loss that exact DDP ends with.

    python bench/slow_links/report.py results.jsonl…

Pure arithmetic over what was measured:

* A validation loss is the mean of the last three validations, for all methods alike; a final loss
  is that at the number of steps that DDP makes.
* A method's learning rate is the one with the least final loss over half the steps at seed 0.
* The target of a seed is DDP's final loss. A method reaches it at the first step (interpolated
  between validations) where its loss is no higher.
* Seconds at a step are those measured, where the training ran on that line (``measured``);
  otherwise those of the first steps on that line, as measured, and from there on the mean of the
  later half of them for each further step (``composed``), with the losses of the unshaped line.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]
Curve = list[tuple[float, float]]  # step, loss


def read(path: Path) -> list[Line]:
    """The results of a file; a last line that was cut off is left out."""
    found = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found


def chosen(lines: Iterable[Line], **wanted: Any) -> list[Line]:
    """The lines without error that have these values."""
    return [
        line
        for line in lines
        if "found" in line and all(line.get(key) == value for key, value in wanted.items())
    ]


def smooth(curve: Sequence[Sequence[float]]) -> Curve:
    """Steps and the mean of the last three losses up to each."""
    losses = [point[2] for point in curve]
    return [
        (point[0], statistics.fmean(losses[max(0, number - 2) : number + 1]))
        for number, point in enumerate(curve)
    ]


def final(line: Line) -> float:
    """The loss at the number of steps that DDP makes; infinite where it was not reached."""
    at = [loss for step, loss in smooth(line["found"]["curve"]) if step <= line["horizon"]]
    whole = line["found"]["curve"] and line["found"]["curve"][-1][0] >= line["horizon"] * 0.99
    return at[-1] if whole and at[-1] == at[-1] else float("inf")


def best_rate(lines: Iterable[Line], model: str, method: str) -> float | None:
    """The learning rate with the least final loss of those that were tried."""
    tried = chosen(lines, kind="rate", model=model, method=method)
    best = min(tried, key=final, default=None)
    return best["lr"] if best is not None and final(best) < float("inf") else None


def best_end(lines: Iterable[Line], model: str, method: str) -> float:
    """The least final loss of the learning rates that were tried."""
    tried = chosen(lines, kind="rate", model=model, method=method)
    return min((final(line) for line in tried), default=float("inf"))


def reached(curve: Curve, target: float) -> float | None:
    """The step at which the loss first is no higher than the target, between validations too."""
    before: tuple[float, float] | None = None
    for step, loss in curve:
        if loss <= target:
            if before is None or before[1] == loss:
                return step
            part = (before[1] - target) / (before[1] - loss)
            return before[0] + part * (step - before[0])
        before = (step, loss)
    return None


def seconds_at(step: float, seconds: Sequence[float], period: int = 1) -> float:
    """Seconds of so many steps, composed of the first ones.

    Args:
        step: How many; between two whole ones in proportion.
        seconds: Of each of the first steps.
        period: Steps that repeat as a whole, as between two exchanges of DiLoCo.
    """
    if step <= len(seconds):
        whole = int(step)
        rest = (step - whole) * seconds[whole] if whole < len(seconds) else 0.0
        return sum(seconds[:whole]) + rest
    later = max(period, len(seconds) // 2 // period * period)
    return sum(seconds) + (step - len(seconds)) * statistics.fmean(seconds[-later:])


def period_of(method: str) -> int:
    return int(method.split()[1]) if method.startswith("diloco") else 1


def measured_at(step: float, curve: Sequence[Sequence[float]]) -> float:
    """Seconds at a step of a training that ran on this line, from its validations."""
    before = (0.0, 0.0)
    for at, seconds, *_ in curve:
        if step <= at:
            return before[1] + (step - before[0]) / (at - before[0]) * (seconds - before[1])
        before = (at, seconds)
    return before[1]


def median(values: Iterable[float | None]) -> float | None:
    """The median, with a run that did not reach the target as the slowest."""
    known = [float("inf") if value is None else value for value in values]
    middle = statistics.median(known) if known else None
    return None if middle == float("inf") else middle


def to_target(
    lines: list[Line], model: str, method: str, link: str, seed: int
) -> tuple[float | None, str] | None:
    """Seconds to the loss that DDP of this seed ends with, and how they were found.

    None where something has not been measured.
    """
    base = _curve(lines, model, "ddp", seed)
    if base is None:
        return None
    target = final(base)
    ran = chosen(lines, kind="curve", model=model, method=method, seed=seed, link=link)
    if ran:
        step = reached(smooth(ran[-1]["found"]["curve"]), target)
        at = None if step is None else measured_at(step, ran[-1]["found"]["curve"])
        return at, "measured"
    own = _curve(lines, model, method, seed)
    paces = chosen(lines, kind="pace", model=model, method=method, link=link)
    same = [line for line in paces if line["seed"] == seed] or paces
    if own is None or not same:
        return None
    step = reached(smooth(own["found"]["curve"]), target)
    if step is None:
        return None, "composed"
    return seconds_at(step, same[-1]["found"]["seconds"], period_of(method)), "composed"


def _curve(lines: list[Line], model: str, method: str, seed: int) -> Line | None:
    """A training on the unshaped line. That of exact averages is DDP's: see :func:`unequal`."""
    for name in (method, "ddp") if method == "ours exact" else (method,):
        wanted = {"model": model, "method": name, "seed": seed, "link": "unshaped"}
        if found := chosen(lines, kind="curve", **wanted):
            return found[-1]
    return None


def worse(lines: list[Line], model: str, method: str, link: str, seed: int) -> float | None:
    """By what part a method's final loss is above DDP's of the same seed."""
    base = _curve(lines, model, "ddp", seed)
    ran = chosen(lines, kind="curve", model=model, method=method, seed=seed, link=link)
    own = ran[-1] if ran else _curve(lines, model, method, seed)
    return None if base is None or own is None else final(own) / final(base) - 1


def unequal(lines: list[Line]) -> tuple[int, list[str]]:
    """How many trainings of one method, rate and seed were compared over two lines, and which of
    them had other losses in their first steps."""
    kept: dict[tuple[Any, ...], tuple[str, list[str]]] = {}
    compared, wrong = 0, []
    for line in chosen(lines):
        if line.get("kind") not in ("curve", "pace") or line["method"].startswith("ours auto"):
            continue
        key = tuple(line[name] for name in ("model", "method", "lr", "seed", "horizon"))
        losses = line["found"]["losses"]
        if key not in kept:
            kept[key] = (line["link"], losses)
            continue
        both = min(len(losses), len(kept[key][1]))
        compared += 1
        if losses[:both] != kept[key][1][:both]:
            wrong.append(f"{key}: {kept[key][0]} and {line['link']}")
    return compared, wrong


def exact_apart(lines: list[Line], model: str, link: str) -> float | None:
    """The largest relative difference between the first losses of our exact way and DDP's."""
    one, two = (
        chosen(lines, kind="pace", model=model, method=method, link=link)
        for method in ("ours exact", "ddp")
    )
    if not one or not two:
        return None
    both = zip(one[-1]["found"]["losses"], two[-1]["found"]["losses"], strict=False)
    pairs = [(float.fromhex(a), float.fromhex(b)) for a, b in both]
    return max((abs(a / b - 1) for a, b in pairs), default=None)


def pace(lines: list[Line], model: str, method: str, link: str) -> float | None:
    """Median seconds of a step in the later half of the first ones."""
    values = []
    for line in chosen(lines, kind="pace", model=model, method=method, link=link):
        seconds, period = line["found"]["seconds"], period_of(method)
        later = max(period, len(seconds) // 2 // period * period)
        values.append(statistics.fmean(seconds[-later:]))
    return median(values)


def _figure(value: float | None, form: str, missing: str = "") -> str:
    return missing if value is None else format(value, form)


TARGETS = {"1 Gbit/s": 1.3, "100 Mbit/s": 4.5, "20 Mbit/s": 8.0}  # times as quick as DDP
LOSS = 0.005  # part by which a final loss may be worse


def verdicts(lines: list[Line], method: str = "ours auto") -> list[str]:
    """A row for each model and line: how many times as quick as DDP, and what was wanted."""
    ran = chosen(lines, kind="curve", method=method)
    rows = []
    for model in dict.fromkeys(line["model"] for line in ran):
        own = [line for line in ran if line["model"] == model]
        seeds = sorted({line["seed"] for line in own})
        for link in dict.fromkeys(line["link"] for line in own):
            times = median(_seconds(lines, model, method, link, seeds))
            base = median(_seconds(lines, model, "ddp", link, seeds))
            ratio = base / times if base and times else None
            losses = [w for s in seeds if (w := worse(lines, model, method, link, s)) is not None]
            loss, wanted = median(losses), TARGETS.get(link, 1.0)
            took = [line["found"].get("method", "") for line in own if line["link"] == link]
            met = ratio is not None and ratio >= wanted
            near = loss is not None and loss <= LOSS
            rows.append(
                f"| {model} | {link} | {', '.join(dict.fromkeys(took))}"
                f" | {_figure(ratio, '.2f', '-')} | {wanted:g} | {'yes' if met else 'no'}"
                f" | {_figure(loss, '+.2%')} | {'yes' if near else 'no'} | {len(losses)} |"
            )
    return rows


def table(lines: list[Line]) -> str:
    """The whole report in Markdown."""
    curves = chosen(lines, kind="curve")
    models = list(dict.fromkeys(line["model"] for line in curves))
    known = [*curves, *chosen(lines, kind="pace")]
    methods = list(dict.fromkeys(one["method"] for one in known if one["method"] != "alone"))
    methods.sort(key=lambda name: (name.startswith("ours"), name))
    seeds = sorted({line["seed"] for line in curves})
    links = [
        name
        for name in dict.fromkeys(line["link"] for line in chosen(lines) if line.get("link"))
        if name != "unshaped"
    ]
    parts = [
        "| model | line | took | times as quick as DDP | wanted | met | final loss, median"
        " | within 0.5 % | seeds |\n|---|---|---|---|---|---|---|---|---|",
        *verdicts(lines),
    ]
    for model in models:
        ends = [final(one) for s in seeds if (one := _curve(lines, model, "ddp", s)) is not None]
        spread = f", {min(ends):.4f} to {max(ends):.4f} over {len(ends)} seeds" if ends else ""
        alone = pace(lines, model, "alone", "unshaped")
        parts.append(f"\n## {model}\n")
        parts.append(
            f"Loss that DDP ends with: {_figure(median(ends), '.4f')}{spread}. Computing alone (C):"
            f" {_figure(alone and alone * 1000, '.0f')} ms a step.\n"
        )
        for link in links:
            rows = []
            base = median(_seconds(lines, model, "ddp", link, seeds))
            for method in methods:
                found = [to_target(lines, model, method, link, seed) for seed in seeds]
                times = [one for one in found if one is not None]
                if not times:
                    continue
                seconds = median(one[0] for one in times)
                losses = [
                    w for s in seeds if (w := worse(lines, model, method, link, s)) is not None
                ]
                step = pace(lines, model, method, link)
                lr = next(
                    (o["lr"] for o in known if (o["model"], o["method"]) == (model, method)), None
                )
                ratio = base / seconds if base and seconds else None
                bytes_ = [
                    line["found"]["sent"]
                    for line in chosen(lines, model=model, method=method, link=link)
                ]
                rows.append(
                    f"| {method} | {_figure(lr, 'g', '-')} | {_figure(step and step * 1000, '.0f')}"
                    f" | {_figure((bytes_ and statistics.median(bytes_) / 1e6) or None, '.2f')}"
                    f" | {_figure(seconds, '.1f', 'not reached')} | {_figure(ratio, '.2f')}"
                    f" | {_figure(median(losses) if losses else None, '+.2%')}"
                    f" | {_figure(max(losses, default=None), '+.2%')} | {len(times)}"
                    f" | {'/'.join(sorted({one[1] for one in times}))} |"
                )
            if rows:
                parts.append(
                    f"### {link}\n\n| method | lr | ms a step | MB sent a step | s to DDP's loss |"
                    " times as quick as DDP | final loss, median | worst seed | seeds | how |\n"
                    "|---|---|---|---|---|---|---|---|---|---|"
                )
                parts.append("\n".join(rows) + "\n")
    compared, wrong = unequal(lines)
    parts.append(
        f"\nLosses of the first steps, compared to the last bit between lines: {compared}"
        f" comparisons, {len(wrong)} unequal.\n"
    )
    parts += [f"* {one}" for one in wrong]
    for model in models:
        for link in links:
            if (apart := exact_apart(lines, model, link)) is not None:
                parts.append(
                    f"* {model}, {link}: first losses of ours exact and DDP's differ by {apart:.1e}"
                )
    parts.append(
        "\n| model | method | final loss after half the steps, by learning rate |\n|---|---|---|"
    )
    for model in models:
        for method in methods:
            tried = chosen(lines, kind="rate", model=model, method=method)
            if tried:
                ends = ", ".join(
                    f"{o['lr']:g}: {final(o):.4f}" for o in sorted(tried, key=lambda o: o["lr"])
                )
                parts.append(f"| {model} | {method} | {ends} |")
    parts.append("")
    for line in chosen(lines, kind="line"):
        found = line["found"]
        parts.append(
            f"* {line['link']}: all-reduce of {line['steps']:,} numbers at {found['mbit_s']:.1f}"
            f" Mbit/s, of one in {found['small'] * 1000:.2f} ms"
        )
    return "\n".join(parts)


def _seconds(
    lines: list[Line], model: str, method: str, link: str, seeds: Sequence[int]
) -> list[float | None]:
    found = (to_target(lines, model, method, link, seed) for seed in seeds)
    return [one[0] for one in found if one is not None]


if __name__ == "__main__":
    print(table([line for path in sys.argv[1:] for line in read(Path(path))]))
