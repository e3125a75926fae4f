"""Forecasts a training on each number of hosts by a fitted model of its steps. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.bench.speedup import Point, speedups
from paceline.bench.step_model import StepEstimate, StepModel, estimate_step
from paceline.spec.formatting import format_duration, pluralize
from paceline.spec.terminal import wrap
from paceline.spec.training.step_time import BYTES_SENT

MAX_RELATIVE_ERROR = 0.5  # nothing is forecast with a larger error bar
MIN_EFFICIENCY = 0.8  # a lower efficiency wastes hosts
MAX_BATCH_FACTOR = 64  # of a suggested batch, relative to the training's
MAX_HOSTS = 1024  # two hosts do not show what happens on more
DENSE_HOSTS = 32  # every number of hosts up to it is forecast
MAX_SUBSETS = 5000  # of hosts that are all compared


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast for a number of hosts. Times in seconds.

    Attributes:
        speedup, efficiency: Relative to the fastest host alone.
        by_speed: Time of a step with shares by speed; ``None`` if it is hardly shorter.
        communication: The most exact method of sending less that removes the limit, else the
            fastest; empty if none helps.
        with_it: Time of a step with that method.
        better_batch: A global batch with a good efficiency; 0 if there is none.
        steps: Steps of the whole training with this batch.
        price: Price of the whole training; ``None`` without a given price.
        declined: Why there is no forecast; empty if there is one.
    """

    hosts: int
    names: tuple[str, ...]
    batch: int
    step: StepEstimate
    speedup: float
    efficiency: float
    by_speed: float | None = None
    communication: str = ""
    with_it: float | None = None
    better_batch: int = 0
    steps: int = 0
    price: float | None = None
    declined: str = ""

    @property
    def total(self) -> float:
        """Time of the whole training, without its start and evaluations."""
        return self.steps * self.step.seconds


def host_counts(max_hosts: int) -> list[int]:
    """The numbers of hosts to forecast: all small ones, then two for each power of two."""
    counts = list(range(1, min(max_hosts, DENSE_HOSTS) + 1))
    size = DENSE_HOSTS
    while size < max_hosts:
        counts += [count for count in (size + size // 2, 2 * size) if count < max_hosts]
        size *= 2
    return [*counts, max_hosts] if max_hosts > DENSE_HOSTS else counts


def forecast(model: StepModel, counts: Sequence[int], *, weak: bool = False,
             price: float | None = None) -> list[Forecast]:  # fmt: skip
    """Forecasts each number of hosts, on the fastest ones.

    Args:
        model: The fitted model.
        counts: Numbers of hosts; missing hosts are assumed to be like the last.
        weak: The batch of each host is fixed, not the global batch.
        price: Price of a host for an hour.
    """
    baseline_s = _single_host_s(model, model.batch)
    return [_forecast_count(_with_extra_hosts(model, count), count, baseline_s, weak, price)
            for count in counts]  # fmt: skip


def _single_host_s(model: StepModel, batch: int) -> float:
    """Time of a step on the fastest host alone."""
    return min(estimate_step(model, [name], batch).seconds for name in model.hosts)


def _with_extra_hosts(model: StepModel, num_hosts: int) -> StepModel:
    """Adds hosts like the last one if there are not enough."""
    template = model.hosts[-1]
    num_extra = max(0, num_hosts - len(model.hosts))
    extra = {f"{template}+{index + 1}": model.host_timings[template] for index in range(num_extra)}
    return replace(model, host_timings={**model.host_timings, **extra})


def _forecast_count(model: StepModel, num_hosts: int, baseline_s: float, weak: bool,
                    price: float | None) -> Forecast:  # fmt: skip
    batch = model.batch * num_hosts if weak else model.batch
    names = fastest_hosts(model, num_hosts, batch)
    step = estimate_step(model, names, batch)
    speedup = (num_hosts if weak else 1) * baseline_s / step.seconds
    steps = math.ceil(model.steps * model.batch / batch)
    result = Forecast(num_hosts, names, batch, step, speedup, speedup / num_hosts, steps=steps)
    if price is not None:
        result = replace(result, price=result.total / 3600 * num_hosts * price)
    if reason := _decline_reason(model, result):
        return replace(result, declined=reason)
    by_speed = estimate_step(model, names, batch, by_speed=num_hosts > 1).seconds
    if by_speed < 0.95 * step.seconds and not model.sharded:
        result = replace(result, by_speed=by_speed)
    return _with_remedies(model, result)


def _decline_reason(model: StepModel, result: Forecast) -> str:
    """Why nothing can be forecast; else empty."""
    num_ranks, step = result.hosts * model.ranks, result.step
    if result.batch < num_ranks:
        return f"a global batch of {result.batch} has no sample for each of {num_ranks} processes"
    if result.hosts == 1:
        return ""
    if not model.probed and not model.moving:
        return (
            "it needs steps on two hosts, and only one is named: -H with two, or --link with a rate"
        )
    if step.relative_error > MAX_RELATIVE_ERROR:
        return (
            f"between {format_duration(max(step.low, 0))} and {format_duration(step.high)} a step:"
            " the probe's steps differ too much (a busy host?), or a few messages take all the time"
        )
    return ""


def fastest_hosts(model: StepModel, num_hosts: int, batch: int) -> tuple[str, ...]:
    """The hosts with the shortest step, with the training's shares."""
    names = model.hosts
    if math.comb(len(names), num_hosts) <= MAX_SUBSETS:
        subsets = itertools.combinations(names, num_hosts)
        return min(subsets, key=lambda subset: estimate_step(model, subset, batch).seconds)
    share = batch / num_hosts
    ranked = sorted(names, key=lambda name: model.host_timings[name].seconds(share))
    return tuple(name for name in names if name in ranked[:num_hosts])


def _with_remedies(model: StepModel, result: Forecast) -> Forecast:
    """Adds what would remove the limit."""
    if result.hosts == 1:
        return result
    step = result.step
    is_exact = model.sent == (1.0, 1.0) and model.communication == "exact" and not model.sharded
    if step.limit == "link" and is_exact:
        has_many_ranks = result.hosts * model.ranks > 2
        seconds = {
            method: estimate_step(model, result.names, result.batch,
                                  bytes_fraction=fractions[has_many_ranks]).seconds
            for method, fractions in BYTES_SENT.items()
        }  # fmt: skip
        target_s = 1.1 * (step.seconds - step.link)
        method = next((method for method in seconds if seconds[method] <= target_s),
                      min(seconds, key=seconds.__getitem__))  # fmt: skip
        if seconds[method] < 0.9 * step.seconds:
            result = replace(result, communication=method, with_it=seconds[method])
    if step.limit in ("link", "small batch") and result.efficiency < MIN_EFFICIENCY:
        result = replace(result, better_batch=_efficient_batch(model, result))
    return result


def _efficient_batch(model: StepModel, result: Forecast) -> int:
    factor = 2
    while factor <= MAX_BATCH_FACTOR and result.batch * factor <= model.samples:
        batch = result.batch * factor
        seconds = estimate_step(model, result.names, batch).seconds
        if _single_host_s(model, batch) / seconds / result.hosts >= MIN_EFFICIENCY:
            return batch
        factor *= 2
    return 0


def advice(result: Forecast, model: StepModel) -> str:
    """What limits a forecast and what would remove the limit, as one line."""
    if result.declined:
        return f"not forecast: {result.declined}"
    step = result.step
    descriptions = {
        "computing": "computing",
        "data": "data: more of the time goes to waiting for it than to anything else",
        "link": f"the link: {step.link / step.seconds:.0%} of a step waits for it",
        "small batch": f"a small batch: {step.small / step.seconds:.0%} of a step does not"
        " get shorter with fewer samples for each host",
    }
    parts = [f"limited by {descriptions[step.limit]}"]
    if result.with_it is not None:
        seconds = format_duration(result.with_it)
        parts.append(f"with {result.communication} communication: about {seconds} a step")
    if result.better_batch:
        parts.append(
            f"a global batch of {result.better_batch:,} would be {MIN_EFFICIENCY:.0%} efficient"
        )
    if result.by_speed is not None:
        parts.append(f"shares by speed: {format_duration(result.by_speed)} a step")
    if len(model.hosts) > result.hosts:
        parts.append(f"on {', '.join(result.names)}")
    return "; ".join(parts)


def render_table(results: Sequence[Forecast], model: StepModel) -> str:
    """A table for people, at most 80 wide, with the advice below each row."""
    header = (
        f"{'hosts':<6}{'batch':>8}{'step':>20}{'speed-up':>10}{'efficiency':>12}{'to the end':>14}"
    )
    has_prices = any(result.price is not None for result in results)
    lines = [header + (f"{'price':>10}" if has_prices else "")]
    for result in results:
        row = f"{result.hosts:<6}{result.batch:>8,}"
        if result.declined:
            row += f"{'?':>20}"
        else:
            step = f"{format_duration(result.step.seconds)} ±{result.step.relative_error:.0%}"
            row += f"{step:>20}{result.speedup:>10.2f}{result.efficiency:>12.0%}"
            row += f"{format_duration(result.total):>14}"
            row += f"{_format_price(result.price):>10}" if result.price is not None else ""
        lines += [row, wrap(f"{'':<6}{advice(result, model)}", 80)]
    return "\n".join(lines)


def _format_price(price: float) -> str:
    """A price in hundredths, or with two digits if it is smaller."""
    if 0 < price < 0.001:
        return "<0.001"
    return f"{price:.2g}" if 0 < price < 0.095 else f"{price:,.2f}"


def conclusion(results: Sequence[Forecast]) -> str:
    """The fastest number of hosts, and the largest that is efficient."""
    usable = [result for result in results if not result.declined]
    if not usable:
        return "nothing can be forecast"
    best = min(usable, key=lambda result: result.total)
    efficient = [result for result in usable if result.efficiency >= MIN_EFFICIENCY]
    largest = max(efficient, key=lambda result: result.hosts, default=usable[0])
    text = f"fastest: {pluralize(best.hosts, 'host')}, {format_duration(best.total)} of training"
    if largest.hosts != best.hosts:
        text += (
            f"; largest number of hosts with an efficiency of at least {MIN_EFFICIENCY:.0%}:"
            f" {largest.hosts} ({format_duration(largest.total)})"
        )
    faster = [(r.with_it * r.steps, r) for r in usable if r.with_it is not None]
    if faster:
        total, result = min(faster, key=lambda pair: pair[0])
        if total < best.total:
            text += (
                f"; with {result.communication} communication: {pluralize(result.hosts, 'host')},"
                f" about {format_duration(total)}"
            )
    return text


def to_json(results: Sequence[Forecast], model: StepModel) -> dict[str, Any]:
    """All numbers, for ``forecast.json``."""
    return {
        "forecasts": [
            {
                **{name: value for name, value in asdict(result).items() if name != "step"},
                **asdict(result.step),
                "limit": "" if result.declined else result.step.limit,
                "total": result.total,
            }
            for result in results
        ],
        "model": {
            "moving": model.moving,
            "delay": model.delay,
            "buckets": model.buckets,
            "balance": model.balance,
            "residual_s": model.residual_s,
            "alone": {name: asdict(timing) for name, timing in model.host_timings.items()},
        },
    }


def render_svg(results: Sequence[Forecast]) -> str:
    """Speed-up over the number of hosts as SVG, with error bars."""
    points = []
    for result in results:
        if not result.declined:
            label = f"{result.hosts}: {result.speedup:.2f}, {result.step.limit}"
            work = result.speedup * result.step.seconds
            low, high = work / result.step.high, work / max(result.step.low, 1e-9)
            points.append(Point(result.hosts, result.speedup, label, low, high))
    max_hosts = max(result.hosts for result in results)
    return speedups(points, max_hosts, "hosts", "forecast of the speed-up")
