"""The timing ladder: the same command at 1, 1×P, N×1 and N×P processes. Everything here is pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.bench.speedup import Point, speedups
from paceline.spec.events import Event
from paceline.spec.failure import place
from paceline.spec.terminal import wrapped

POOR = 0.8  # an efficiency below this deserves a word
NOTICEABLE = 0.2  # and so does a share of the time above this


@dataclass(frozen=True, slots=True)
class Layout:
    """How many nodes, and how many processes on each."""

    nodes: int
    processes: int

    @property
    def world(self) -> int:
        return self.nodes * self.processes

    @property
    def label(self) -> str:
        return f"{self.nodes}×{self.processes}"


def ladder(nodes: int, processes: int) -> list[Layout]:
    """One process, one node full, every node with one, everything; each once."""
    steps = [Layout(1, 1), Layout(1, processes), Layout(nodes, 1), Layout(nodes, processes)]
    return list(dict.fromkeys(steps))


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. All times in seconds; the three parts add up to ``wall``.

    Attributes:
        wall: From the command to its end.
        startup: Until all ranks had joined (or were started, if they never joined).
        training: From there until the last rank ended.
        shutdown: The rest: results brought home, connections closed.
        samples: Samples trained on, ``None`` when the script does not tell.
        loop: Time in the training loop alone, as the script tells it.
        shares: Parts of the loop by name: see :data:`paceline.spec.events.PARTS`.
        slowest: The rank and its host for which the others mostly wait, if there is one.
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
        """Samples a second where they are known, else runs a second of the training part."""
        if self.samples and self.loop:
            return self.samples / self.loop
        return 1.0 / max(self.training, 1e-9)


def measure(wall: float, began: float, events: Sequence[Event]) -> Measured:
    """Puts one run's record together.

    Args:
        wall: Seconds that the whole command took.
        began: When it was started, seconds since 1970.
        events: What happened in it; a training tells of its samples, and where its time went.
    """
    times: dict[str, list[float]] = {}
    for event in events:
        times.setdefault(event.kind, []).append(event.time)
    ready = max(times.get("world joined") or times.get("rank started") or [began])
    ended = max(times.get("rank ended") or [began + wall])
    startup = min(max(ready - began, 0.0), wall)
    training = min(max(ended - ready, 0.0), wall - startup)
    shutdown = wall - startup - training
    told = next((event for event in reversed(events) if event.kind == "trained"), None)
    if told is None or not told["samples"] or not told["seconds"]:
        return Measured(wall, startup, training, shutdown)
    slowest = "" if told["straggler"] is None else place(told["its_host"] or "", told["straggler"])
    return Measured(
        wall,
        startup,
        training,
        shutdown,
        told["samples"],
        told["seconds"],
        told["parts"] or None,
        slowest,
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One layout over its repetitions.

    Attributes:
        layout: Which.
        runs: Its repetitions.
        speed, spread: Mean speed and its standard deviation (0 for one run).
        speedup, efficiency: Against the first layout.
    """

    layout: Layout
    runs: tuple[Measured, ...]
    speed: float
    spread: float
    speedup: float
    efficiency: float

    def mean(self, name: str) -> float:
        """Mean of one of the times."""
        return statistics.fmean(float(getattr(run, name)) for run in self.runs)

    def share(self, name: str) -> float | None:
        """Mean part of the loop that went to something, where every run tells it."""
        found = [run.shares[name] for run in self.runs if run.shares and name in run.shares]
        return statistics.fmean(found) if len(found) == len(self.runs) else None


def rows(measured: Sequence[tuple[Layout, Sequence[Measured]]], *, weak: bool = False) -> list[Row]:
    """Speed-up and efficiency against the first.

    Args:
        measured: Layouts with their runs.
        weak: The batch of each process is fixed: where a run does not tell its samples, it did as
            many times the work as it had processes.
    """
    first = measured[0][0].world
    made = []
    base = 0.0
    for layout, runs in measured:
        speeds = [run.speed * (layout.world if weak and not run.samples else 1) for run in runs]
        base = base or statistics.fmean(speeds)
        speed = statistics.fmean(speeds)
        spread = statistics.stdev(speeds) if len(speeds) > 1 else 0.0
        made.append(
            Row(
                layout,
                tuple(runs),
                speed,
                spread,
                speed / base,
                speed / base / layout.world * first,
            )
        )
    return made


def limit(row: Row, every: Sequence[Row]) -> str:
    """What limits a layout, in words; empty when nothing does."""
    if row.efficiency >= POOR or row.layout.world == 1:
        return ""
    data, communication = row.share("data"), row.share("moving")
    slower = row.share("waiting")
    if data is not None and data > NOTICEABLE:
        return f"data: {data:.0%} of the time was spent waiting for it"
    saving = row.share("saving") or 0.0
    if saving > max(NOTICEABLE, slower or 0, communication or 0):
        return f"saving checkpoints: {saving:.0%} of the time"
    if slower is not None and slower > NOTICEABLE and slower >= (communication or 0):
        named = next((run.slowest for run in row.runs if run.slowest), "slower ranks")
        return f"waiting for {named}: {slower:.0%} of the time"
    if communication is not None and communication > NOTICEABLE:
        return f"communication: {communication:.0%} of the time"
    one_node = next((r for r in every if r.layout.nodes == 1 and r.layout.world > 1), None)
    spread_out = next((r for r in every if r.layout.processes == 1 and r.layout.nodes > 1), None)
    if row.layout.nodes == 1:
        return "computing: the processes share the processors and memory of one node"
    if spread_out is not None and spread_out.efficiency < POOR:
        return "communication: one process a node is slow already"
    if one_node is not None and one_node.efficiency < POOR:
        return "computing: one node alone is slow already"
    return "unknown: neither one node nor one process a node is slow by itself"


def verdict(row: Row, every: Sequence[Row]) -> str:
    """One line for a layout: what it is, and what limits it, if anything does."""
    nodes, processes = row.layout.nodes, row.layout.processes
    if nodes == 1:
        what = f"{processes} processes on one node" if processes > 1 else "one process"
    else:
        noun = "processes" if processes > 1 else "process"
        what = f"{processes} {noun} on each of {nodes} nodes"
    data, saving = row.share("data") or 0.0, row.share("saving") or 0.0
    if why := limit(row, every):
        words = f"limited by {why}"
    elif row.layout == every[0].layout and data > NOTICEABLE:
        words = f"limited by data: {data:.0%} of the time was spent waiting for it"
    elif row.layout == every[0].layout and saving > NOTICEABLE:
        words = f"limited by saving checkpoints: {saving:.0%} of the time"
    elif row.layout == every[0].layout:
        words = "limited by computing alone; the measure for the others"
    else:
        words = f"{row.efficiency:.0%} of the ideal, nothing limits it much"
    start, wall = row.mean("startup"), row.mean("wall")
    if start > wall / 2:
        words += f"; {start:.1f} of its {wall:.1f} s are the start: a longer training says more"
    return f"{what}: {words}"


def advice(found: Sequence[Row], *, weak: bool = False) -> str:
    """What the figures may not mean; empty when there is nothing to say."""
    if weak or all(run.samples for row in found for run in row.runs):
        return ""
    if all(row.efficiency >= POOR for row in found):
        return ""
    return (
        "The script does not tell its samples, so each layout is taken to do the same work. If the"
        " batch of each process is fixed, the work grows with their number: use --weak."
    )


def table(found: Sequence[Row]) -> str:
    """For people; fixed columns, 80 wide at most, a line in words below each layout."""
    unit = "samples/s" if all(run.samples for row in found for run in row.runs) else "runs/s"
    head = f"{'layout':<8}{'wall s':>8}{'start s':>9}{'train s':>9}{'end s':>7}{unit:>15}"
    lines = [f"{head}{'speed-up':>10}{'efficiency':>12}"]
    for row in found:
        spread = f"±{row.spread:.1f}" if len(row.runs) > 1 else ""
        speed = f"{row.speed:,.1f}{spread}" if unit == "samples/s" else f"{row.speed:.3f}{spread}"
        times = "".join(
            f"{row.mean(name):>{width}.2f}"
            for name, width in (("wall", 8), ("startup", 9), ("training", 9), ("shutdown", 7))
        )
        lines.append(
            f"{row.layout.label:<8}{times}{speed:>15}{row.speedup:>10.2f}{row.efficiency:>12.0%}"
        )
        lines.append(wrapped(f"{'':<8}{verdict(row, found)}", 80))
    return "\n".join(lines)


def to_json(found: Sequence[Row]) -> list[dict[str, Any]]:
    """Every number, and every repetition."""
    return [
        {
            "nodes": row.layout.nodes,
            "processes": row.layout.processes,
            "speed": row.speed,
            "spread": row.spread,
            "speedup": row.speedup,
            "efficiency": row.efficiency,
            "limited_by": limit(row, found),
            "verdict": verdict(row, found),
            "runs": [{**asdict(run), "speed": run.speed} for run in row.runs],
        }
        for row in found
    ]


def picture(found: Sequence[Row]) -> str:
    """Speed-up over processes as SVG."""
    points = [
        Point(row.layout.world, row.speedup, f"{row.layout.label}: {row.speedup:.2f}")
        for row in found
    ]
    return speedups(points, max(one.at for one in points), "processes", "speed-up")
