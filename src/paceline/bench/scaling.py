"""The scaling of a command over 1, 1×P, N×1 and N×P processes. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.bench.speedup import Point, speedups
from paceline.spec.events import Event
from paceline.spec.failure import format_location
from paceline.spec.terminal import wrap

MIN_EFFICIENCY = 0.8  # a lower one is explained
MIN_LIMITING_SHARE = 0.2  # of the time, for a part to be named as the limit


@dataclass(frozen=True, slots=True)
class Layout:
    """Number of nodes, and of processes on each."""

    nodes: int
    processes: int

    @property
    def world(self) -> int:
        return self.nodes * self.processes

    @property
    def label(self) -> str:
        return f"{self.nodes}×{self.processes}"


def ladder(nodes: int, processes: int) -> list[Layout]:
    """One process, one full node, one process on every node, and all; without duplicates."""
    steps = [Layout(1, 1), Layout(1, processes), Layout(nodes, 1), Layout(nodes, processes)]
    return list(dict.fromkeys(steps))


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run. All times are in seconds; startup, training and shutdown add up to ``wall``.

    Attributes:
        wall: From the command's start to its end.
        startup: Until all ranks had joined, or were started if they never joined.
        training: From there until the last rank ended.
        shutdown: The remaining time, in which results are fetched and connections closed.
        samples: Samples trained on, ``None`` if the script does not report them.
        loop: Time in the training loop alone, as the script reports it.
        shares: Shares of the loop by name: see :data:`paceline.spec.events.PARTS`.
        slowest: The rank and host for which the others mostly wait, if there is one.
    """

    wall: float
    startup: float
    training: float
    shutdown: float
    samples: int | None = None
    loop: float | None = None
    shares: Mapping[str, float] | None = None
    slowest: str = ""

    @property
    def speed(self) -> float:
        """Samples per second if they are known, else runs per second of the training part."""
        if self.samples and self.loop:
            return self.samples / self.loop
        return 1.0 / max(self.training, 1e-9)


def measure(wall: float, started_at: float, events: Sequence[Event]) -> Measurement:
    """Makes a measurement of one run.

    Args:
        wall: Duration of the whole command.
        started_at: Seconds since 1970.
        events: Of the run; a training reports its samples and how its time divided.
    """
    times: dict[str, list[float]] = {}
    for event in events:
        times.setdefault(event.kind, []).append(event.time)
    ready = max(times.get("world joined") or times.get("rank started") or [started_at])
    ended = max(times.get("rank ended") or [started_at + wall])
    startup = min(max(ready - started_at, 0.0), wall)
    training = min(max(ended - ready, 0.0), wall - startup)
    measurement = Measurement(wall, startup, training, wall - startup - training)
    trained = next((event for event in reversed(events) if event.kind == "trained"), None)
    if trained is None or not trained["samples"] or not trained["seconds"]:
        return measurement
    rank = trained["straggler"]
    return replace(
        measurement,
        samples=trained["samples"],
        loop=trained["seconds"],
        shares=trained["parts"] or None,
        slowest="" if rank is None else format_location(trained["its_host"] or "", rank),
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One layout over its repetitions.

    Attributes:
        speed, spread: Mean speed and its standard deviation (0 for one run).
        speedup, efficiency: Relative to the first layout.
    """

    layout: Layout
    runs: tuple[Measurement, ...]
    speed: float
    spread: float
    speedup: float
    efficiency: float

    def mean(self, name: str) -> float:
        """Mean of one of the times."""
        return statistics.fmean(float(getattr(run, name)) for run in self.runs)

    def share(self, name: str) -> float:
        """Mean share of a part of the loop; 0 unless every run reports it."""
        shares = [run.shares[name] for run in self.runs if run.shares and name in run.shares]
        return statistics.fmean(shares) if len(shares) == len(self.runs) else 0.0


def make_rows(measurements: Sequence[tuple[Layout, Sequence[Measurement]]], *,
              weak: bool = False) -> list[Row]:  # fmt: skip
    """Computes speed-up and efficiency relative to the first layout.

    Args:
        weak: The batch of each process is fixed, so a run that does not report its samples is
            taken to have done work in proportion to its processes.
    """
    first_world = measurements[0][0].world
    rows, base = list[Row](), 0.0
    for layout, runs in measurements:
        speeds = [run.speed * (layout.world if weak and not run.samples else 1) for run in runs]
        speed = statistics.fmean(speeds)
        base = base or speed
        spread = statistics.stdev(speeds) if len(speeds) > 1 else 0.0
        speedup = speed / base
        efficiency = speedup / layout.world * first_world
        rows.append(Row(layout, tuple(runs), speed, spread, speedup, efficiency))
    return rows


def limit(row: Row, rows: Sequence[Row]) -> str:
    """What limits a layout, in words; empty if nothing does."""
    if row.efficiency >= MIN_EFFICIENCY or row.layout.world == 1:
        return ""
    if text := _limiting_part(row):
        return text
    communication, waiting = row.share("moving"), row.share("waiting")
    if waiting > MIN_LIMITING_SHARE and waiting >= communication:
        slowest = next((run.slowest for run in row.runs if run.slowest), "slower ranks")
        return f"waiting for {slowest}: {waiting:.0%} of the time"
    if communication > MIN_LIMITING_SHARE:
        return f"communication: {communication:.0%} of the time"
    if row.layout.nodes == 1:
        return "computing: the processes share the processors and memory of one node"
    if any(r.efficiency < MIN_EFFICIENCY for r in rows
           if r.layout.processes == 1 and r.layout.nodes > 1):  # fmt: skip
        return "communication: one process a node is slow already"
    if any(r.efficiency < MIN_EFFICIENCY for r in rows
           if r.layout.nodes == 1 and r.layout.world > 1):  # fmt: skip
        return "computing: one node alone is slow already"
    return "unknown: neither one node nor one process a node is slow by itself"


def _limiting_part(row: Row) -> str:
    """Waiting for data or saving checkpoints, if that limits a layout; else empty."""
    data, saving = row.share("data"), row.share("saving")
    if data > MIN_LIMITING_SHARE:
        return f"data: {data:.0%} of the time was spent waiting for it"
    if saving > max(MIN_LIMITING_SHARE, row.share("waiting"), row.share("moving")):
        return f"saving checkpoints: {saving:.0%} of the time"
    return ""


def verdict(row: Row, rows: Sequence[Row]) -> str:
    """One line for a layout: its size, and what limits it, if anything does."""
    nodes, processes = row.layout.nodes, row.layout.processes
    noun = "processes" if processes > 1 else "process"
    if nodes == 1:
        size = f"{processes} processes on one node" if processes > 1 else "one process"
    else:
        size = f"{processes} {noun} on each of {nodes} nodes"
    is_first = row.layout == rows[0].layout
    if reason := limit(row, rows) or (_limiting_part(row) if is_first else ""):
        text = f"limited by {reason}"
    elif is_first:
        text = "limited by computing alone; the measure for the others"
    else:
        text = f"{row.efficiency:.0%} of the ideal, nothing limits it much"
    startup, wall = row.mean("startup"), row.mean("wall")
    if startup > wall / 2:
        text += f"; {startup:.1f} of its {wall:.1f} s are the start: a longer training says more"
    return f"{size}: {text}"


def _know_samples(rows: Sequence[Row]) -> bool:
    return all(run.samples for row in rows for run in row.runs)


def advice(rows: Sequence[Row], *, weak: bool = False) -> str:
    """Advice against misreading the numbers; empty if there is none."""
    if weak or _know_samples(rows) or all(row.efficiency >= MIN_EFFICIENCY for row in rows):
        return ""
    return (
        "The script does not report its samples, so each layout is assumed to do the same work. If"
        " the batch of each process is fixed, the work grows with their number: use --weak."
    )


def format_table(rows: Sequence[Row]) -> str:
    """A table for people, at most 80 columns wide, with the verdict below each row."""
    unit = "samples/s" if _know_samples(rows) else "runs/s"
    head = f"{'layout':<8}{'wall s':>8}{'start s':>9}{'train s':>9}{'end s':>7}{unit:>15}"
    lines = [f"{head}{'speed-up':>10}{'efficiency':>12}"]
    for row in rows:
        spread = f"±{row.spread:.1f}" if len(row.runs) > 1 else ""
        speed = f"{row.speed:,.1f}{spread}" if unit == "samples/s" else f"{row.speed:.3f}{spread}"
        times = "".join(
            f"{row.mean(name):>{width}.2f}"
            for name, width in (("wall", 8), ("startup", 9), ("training", 9), ("shutdown", 7))
        )
        lines.append(
            f"{row.layout.label:<8}{times}{speed:>15}{row.speedup:>10.2f}{row.efficiency:>12.0%}"
        )
        lines.append(wrap(f"{'':<8}{verdict(row, rows)}", 80))
    return "\n".join(lines)


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every number, and every repetition."""
    return [
        {
            "nodes": row.layout.nodes,
            "processes": row.layout.processes,
            "speed": row.speed,
            "spread": row.spread,
            "speedup": row.speedup,
            "efficiency": row.efficiency,
            "limited_by": limit(row, rows),
            "verdict": verdict(row, rows),
            "runs": [{**asdict(run), "speed": run.speed} for run in row.runs],
        }
        for row in rows
    ]


def draw(rows: Sequence[Row]) -> str:
    """Draws the speed-up over processes as SVG."""
    points = [
        Point(row.layout.world, row.speedup, f"{row.layout.label}: {row.speedup:.2f}")
        for row in rows
    ]
    return speedups(points, max(point.at for point in points), "processes", "speed-up")
