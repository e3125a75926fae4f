"""Curves of a run's metrics and throughput, and how its steps divide, from metrics.jsonl. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.rundir.records import as_float, as_int
from paceline.spec.events import PARTS, Event

MAX_POINTS = 600  # drawn of a curve
MAX_CURVES = 60  # of a run
MAX_RANKS = 256  # for which the division of steps is shown
NOT_METRICS = {"step", "epoch", "split", "samples", "samples_per_s", "time", "event", "rank"}
_LOWER_IS_BETTER = ("loss", "perplexity", "error", "wer", "cer", "mse", "mae", "rmse", "seconds")
_HIGHER_IS_BETTER = ("acc", "top", "bleu", "chrf", "f1", "score")
# kinds of events that have both a step and a time
_ANCHORS = {"checkpoint", "overlap settled", "regrouped", "interrupted", "trained", "stopped"}
_Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """A finite value at a step; ``seconds`` since the run began, ``None`` when not known."""

    step: int
    seconds: float | None
    value: float


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric of one split, such as ``loss`` of ``train``.

    Attributes:
        points: By step; at most :data:`MAX_POINTS`.
        num_recorded: How many points there are in the file.
        num_nonfinite: How many values were not finite, such as a loss of NaN.
    """

    metric: str
    split: str
    points: tuple[Point, ...]
    num_recorded: int
    num_nonfinite: int = 0

    @property
    def key(self) -> tuple[str, str]:
        return self.metric, self.split

    @property
    def last(self) -> Point:
        return self.points[-1]

    @property
    def best(self) -> Point:
        select = min if self.lower_is_better else max
        return select(self.points, key=lambda point: point.value)

    @property
    def lower_is_better(self) -> bool:
        """Whether lower values are better, by the metric's name; else whether the last is lower."""
        name = self.metric.lower()
        if any(pattern in name for pattern in _LOWER_IS_BETTER):
            return True
        if any(pattern in name for pattern in _HIGHER_IS_BETTER):
            return False
        return self.points[-1].value < self.points[0].value


def make_curves(records: Sequence[_Record], started_at: float) -> list[Curve]:
    """The curves of all metrics and splits, in the order of their first records.

    Args:
        started_at: Seconds since 1970 when the run began; 0 when not known.
    """
    points: dict[tuple[str, str], list[Point]] = {}
    num_nonfinite: dict[tuple[str, str], int] = {}
    for record in records:
        step, split = as_int(record.get("step")), record.get("split")
        if step is None or not isinstance(split, str) or split == "pace":
            continue
        for name, value in record.items():
            if name in NOT_METRICS or isinstance(value, bool):
                continue
            key = (name[:100], split[:50])
            if isinstance(value, (int, float)) and abs(value) < 1e300:
                if key in points or len(points) < MAX_CURVES:
                    point = Point(step, _seconds(record, started_at), float(value))
                    points.setdefault(key, []).append(point)
            elif value is None or isinstance(value, float):
                num_nonfinite[key] = num_nonfinite.get(key, 0) + 1
    return [Curve(*key, tuple(thin_points(of_key)), len(of_key), num_nonfinite.get(key, 0))
            for key, of_key in points.items()]  # fmt: skip


def add_times(records: Sequence[_Record],
              events: Sequence[Event]) -> tuple[Sequence[_Record], bool]:  # fmt: skip
    """Adds missing times to records, estimated from events that have both a step and a time.

    Records have no times if a rank wrote them without a launcher, or an older version did.

    Returns:
        The records, and whether their times are estimated.
    """
    if any(as_float(record.get("time")) for record in records):
        return records, False
    anchors = [(0, event.time) for event in events if event.kind == "prepared"][:1]
    for event in events:
        step = event["steps"] if event.kind == "trained" else event["step"]
        if anchors and event.kind in _ANCHORS and isinstance(step, int) and step > anchors[-1][0]:
            anchors.append((step, event.time))
    if len(anchors) < 2:
        return records, False
    steps = [step for step, _ in anchors]
    timed = list[_Record]()
    for record in records:
        step = as_int(record.get("step"))
        if step is None or not steps[0] <= step <= steps[-1]:
            timed.append(record)
            continue
        index = bisect.bisect_left(steps, step, lo=1)
        (first, start), (last, end) = anchors[index - 1], anchors[index]
        timed.append({**record, "time": start + (end - start) * (step - first) / (last - first)})
    return timed, True


def _seconds(record: _Record, started_at: float) -> float | None:
    """Seconds since the run began; ``None`` for a record without a plausible time."""
    seconds = as_float(record.get("time")) - started_at
    return round(seconds, 3) if started_at and 0 <= seconds < 10 * 365 * 86400 else None


def thin_points(points: Sequence[Point], max_points: int = MAX_POINTS) -> list[Point]:
    """Keeps both ends, and the lowest and highest point of each part between them."""
    if len(points) <= max_points:
        return list(points)
    num_parts = max(1, (max_points - 2) // 2)
    indices = {0, len(points) - 1}
    for part in range(num_parts):
        start, end = len(points) * part // num_parts, len(points) * (part + 1) // num_parts
        part_indices = range(start, max(end, start + 1))
        indices.add(min(part_indices, key=lambda index: points[index].value))
        indices.add(max(part_indices, key=lambda index: points[index].value))
    return [points[index] for index in sorted(indices)]


def throughput(records: Sequence[_Record], started_at: float) -> Curve | None:
    """The training's samples per second."""
    points = [
        Point(step, _seconds(record, started_at), rate)
        for record in records
        if record.get("split") == "train" and (step := as_int(record.get("step"))) is not None
        and (rate := as_float(record.get("samples_per_s"))) > 0
    ]  # fmt: skip
    if not points:
        return None
    return Curve("samples_per_s", "train", tuple(thin_points(points)), len(points))


def mean_rate(records: Sequence[_Record]) -> float | None:
    """Samples per second over the whole training, without evaluations."""
    samples = seconds = 0.0
    for record in records:
        count, rate = as_float(record.get("samples")), as_float(record.get("samples_per_s"))
        if record.get("split") == "train" and count > 0 and rate > 0:
            samples, seconds = samples + count, seconds + count / rate
    return samples / seconds if seconds > 0 else None


@dataclass(frozen=True, slots=True)
class StepDivision:
    """How the mean step of a rank (``None``: of all ranks) divides into :data:`PARTS`."""

    rank: int | None
    seconds: tuple[float, ...]

    @property
    def step_s(self) -> float:
        return sum(self.seconds)

    def share(self, part: str) -> float:
        return self.part_s(part) / max(self.step_s, 1e-12)

    def part_s(self, part: str) -> float:
        return self.seconds[PARTS.index(part)]


def divide_steps(records: Sequence[_Record],
                 group_of: Callable[[_Record], Iterable[int]]) -> list[StepDivision]:  # fmt: skip
    """How the steps of each rank divided, the mean of all first; empty when not known.

    Args:
        group_of: Gives the ranks of a record, in its order.
    """
    sums: dict[int | None, list[float]] = {}  # seconds of each part, then the number of steps

    def add(rank: int | None, seconds: Iterable[Any], num_steps: float) -> None:
        total = sums.setdefault(rank, [0.0] * (len(PARTS) + 1))
        for part, value in enumerate(seconds):
            total[part] += max(0.0, as_float(value)) * num_steps
        total[-1] += num_steps

    for record in records:
        if record.get("split") != "pace":
            continue
        num_steps = max(1.0, as_float(record.get("noted")))
        add(None, (record.get(f"{part}_s") for part in PARTS), num_steps)
        rows = record.get("ranks_s")
        rows = rows[:MAX_RANKS] if isinstance(rows, list) else []
        for rank, row in zip(group_of(record), rows, strict=False):
            if isinstance(row, list) and len(row) >= len(PARTS):
                add(rank, row[: len(PARTS)], num_steps)
    ordered = sorted(sums.items(), key=lambda item: (item[0] is not None, item[0] or 0))
    return [StepDivision(rank, tuple(value / num_steps for value in seconds))
            for rank, (*seconds, num_steps) in ordered if sum(seconds) > 0]  # fmt: skip
