"""Curves out of a run's records: of every metric, of the throughput, of how steps divide. Pure."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.rundir.records import number, whole
from paceline.spec.events import PARTS, Event

POINTS = 600  # drawn of a curve
CURVES = 60  # of a run
RANKS = 256  # of which it is said how their steps divide
NOT_METRICS = {"step", "epoch", "split", "samples", "samples_per_s", "time", "event", "rank"}
# better the lower; of others it is said by where a training begins
_FALLS = ("loss", "perplexity", "error", "wer", "cer", "mse", "mae", "rmse", "seconds")


@dataclass(frozen=True, slots=True)
class Point:
    """A value.

    Attributes:
        step: Of the training.
        seconds: Since the run began; ``None`` where that is not known.
        value: Finite.
    """

    step: int
    seconds: float | None
    value: float


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric of one split.

    Attributes:
        metric, split: ``loss``, ``train``.
        points: By step; at most :data:`POINTS`.
        recorded: How many there were in the file.
        broken: Values among them that were no finite numbers (a loss that was NaN).
    """

    metric: str
    split: str
    points: tuple[Point, ...]
    recorded: int
    broken: int = 0

    @property
    def last(self) -> Point:
        return self.points[-1]

    @property
    def best(self) -> Point:
        return (min if falls(self) else max)(self.points, key=lambda point: point.value)


def falls(curve: Curve) -> bool:
    """Whether less is better: by the name, else by the way that the training went."""
    if any(word in curve.metric.lower() for word in _FALLS):
        return True
    if any(word in curve.metric.lower() for word in ("acc", "top", "bleu", "chrf", "f1", "score")):
        return False
    return curve.points[-1].value < curve.points[0].value


def curves(records: Sequence[Mapping[str, Any]], began: float) -> list[Curve]:
    """Every metric of every split, in the order in which they first came.

    Args:
        records: Of metrics.jsonl.
        began: Seconds since 1970, from which the time of a point counts; 0 where not known.
    """
    found: dict[tuple[str, str], list[Point]] = {}
    broken: dict[tuple[str, str], int] = {}
    for record in records:
        step, split = whole(record.get("step")), record.get("split")
        if step is None or not isinstance(split, str) or split == "pace":
            continue
        for name, value in record.items():
            if name in NOT_METRICS or isinstance(value, bool):
                continue
            key = (name[:100], split[:50])
            if isinstance(value, (int, float)) and math.isfinite(value) and abs(value) < 1e300:
                if key in found or len(found) < CURVES:
                    point = Point(step, moment(record, began), float(value))
                    found.setdefault(key, []).append(point)
            elif value is None or isinstance(value, float):
                broken[key] = broken.get(key, 0) + 1
    return [
        Curve(metric, split, tuple(thinned(points)), len(points), broken.get((metric, split), 0))
        for (metric, split), points in found.items()
    ]


def timed(records: Sequence[Mapping[str, Any]],
          events: Sequence[Event]) -> tuple[Sequence[Mapping[str, Any]], bool]:  # fmt: skip
    """The records with the time of each, and whether that is only estimated.

    Records that a rank kept without a launcher, or an older version, have none; then it is taken
    from between events that name both a step and a time.
    """
    if any(number(record.get("time")) for record in records):
        return records, False
    known = [(0, event.time) for event in events if event.kind == "prepared"][:1]
    for event in events:
        step = event["steps"] if event.kind == "trained" else event["step"]
        if known and event.kind in _ANCHORS and isinstance(step, int) and step > known[-1][0]:
            known.append((step, event.time))
    if len(known) < 2:
        return records, False
    steps = [step for step, _ in known]
    found = list[Mapping[str, Any]]()
    for record in records:
        step = whole(record.get("step"))
        if step is None or not steps[0] <= step <= steps[-1]:
            found.append(record)
            continue
        at = min(bisect.bisect_left(steps, step, lo=1), len(known) - 1)
        (first, begin), (last, end) = known[at - 1], known[at]
        found.append({**record, "time": begin + (end - begin) * (step - first) / (last - first)})
    return found, True


_ANCHORS = {"checkpoint", "overlap settled", "regrouped", "interrupted", "trained", "stopped"}


def moment(record: Mapping[str, Any], began: float) -> float | None:
    """Seconds since the run began; ``None`` of a record without a time of ours."""
    at = number(record.get("time")) - began
    return round(at, 3) if began and 0 <= at < 10 * 365 * 86400 else None


def thinned(points: Sequence[Point], most: int = POINTS) -> list[Point]:
    """At most so many points: both ends, and the lowest and highest of each part between."""
    if len(points) <= most:
        return list(points)
    parts = max(1, (most - 2) // 2)
    kept = {0, len(points) - 1}
    for part in range(parts):
        begin, end = len(points) * part // parts, len(points) * (part + 1) // parts
        inside = range(begin, max(end, begin + 1))
        kept.add(min(inside, key=lambda at: points[at].value))
        kept.add(max(inside, key=lambda at: points[at].value))
    return [points[at] for at in sorted(kept)]


def throughput(records: Sequence[Mapping[str, Any]], began: float) -> Curve | None:
    """Samples a second of the training."""
    points = [
        Point(step, moment(record, began), speed)
        for record in records
        if record.get("split") == "train" and (step := whole(record.get("step"))) is not None
        and (speed := number(record.get("samples_per_s"))) > 0
    ]  # fmt: skip
    return Curve("samples_per_s", "train", tuple(thinned(points)), len(points)) if points else None


def mean_rate(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Samples a second over the whole training, without evaluations."""
    samples = seconds = 0.0
    for record in records:
        count, speed = number(record.get("samples")), number(record.get("samples_per_s"))
        if record.get("split") == "train" and count > 0 and speed > 0:
            samples, seconds = samples + count, seconds + count / speed
    return samples / seconds if seconds > 0 else None


@dataclass(frozen=True, slots=True)
class Divided:
    """How the steps of a rank divided over the training.

    Attributes:
        rank: Of it; ``None`` for the mean of all.
        seconds: Of a step in each of :data:`PARTS`.
    """

    rank: int | None
    seconds: tuple[float, ...]

    def part(self, name: str) -> float:
        """Of the time of a step."""
        return self.seconds[PARTS.index(name)] / max(sum(self.seconds), 1e-12)


def divided(records: Sequence[Mapping[str, Any]], group: Any) -> list[Divided]:
    """How the steps of each rank divided, the mean of all first; empty where it is not known.

    Args:
        records: Of metrics.jsonl.
        group: Gives the ranks of a record, in its order.
    """
    sums: dict[int | None, list[float]] = {}
    for record in records:
        if record.get("split") != "pace":
            continue
        noted = max(1.0, number(record.get("noted")))
        mean = [max(0.0, number(record.get(f"{name}_s"))) for name in PARTS]
        _add(sums, None, mean, noted)
        every = record.get("ranks_s")
        rows = every[:RANKS] if isinstance(every, list) else []
        for rank, row in zip(group(record), rows, strict=False):
            if isinstance(row, list) and len(row) >= len(PARTS):
                _add(sums, rank, [max(0.0, number(one)) for one in row[: len(PARTS)]], noted)
    ordered = sorted(sums.items(), key=lambda one: (one[0] is not None, one[0] or 0))
    return [
        Divided(rank, tuple(one / row[-1] for one in row[:-1]))
        for rank, row in ordered
        if sum(row[:-1]) > 0
    ]


def _add(sums: dict[int | None, list[float]], rank: int | None, row: Iterable[float],
         noted: float) -> None:  # fmt: skip
    total = sums.setdefault(rank, [0.0] * (len(PARTS) + 1))
    for at, one in enumerate(row):
        total[at] += one * noted
    total[-1] += noted
