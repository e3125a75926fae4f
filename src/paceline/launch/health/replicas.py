"""Compares the parameters of a script's replicas by the checksums that ranks report. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from paceline.spec.events import Event
from paceline.spec.schema import memory_bytes

REPORT = "replica checksums"
NO_EXCHANGE = (
    ", and DistributedDataParallel has exchanged no gradients: the script has to call the"
    " DistributedDataParallel object, not the module inside it"
)
# in memory, of reports for which others are missing; the oldest are dropped
MAX_PENDING, MAX_PENDING_BYTES = 4000, 256 << 20


class Difference(NamedTuple):
    """Replicas that are not equal.

    Attributes:
        step: Number of optimizer steps before. At 0, the script's constructor of
            DistributedDataParallel had made them equal just before.
        host, rank: A rank that differs; with two ranks, the second.
        parameter: The first that differs.
        text: A sentence that names all ranks that differ.
    """

    step: int
    host: str
    rank: int
    parameter: str
    text: str


class ReplicaComparison:
    """Finds out whether the ranks of an attempt still train the same model."""

    def __init__(self) -> None:
        self._pending: dict[tuple[Any, ...], dict[int, Event]] = {}
        self._pending_bytes = Counter[tuple[Any, ...]]()
        self._total_bytes = 0
        self._has_differed = False

    def add(self, event: Event) -> Difference | None:
        """Takes a rank's report; returns a difference when ranks differ for the first time."""
        # the ranks of several groups may train models of the same number
        key = tuple(event["members"]), event["replica"], event["step"], event["first"]
        reports = self._pending.setdefault(key, {})
        fields = {name: event[name] for name in ("step", "sums", "exchanges")}
        reports[-1 if event.rank is None else event.rank] = replace(event, fields=fields)
        size = memory_bytes(fields, MAX_PENDING_BYTES)
        size += 64 * len(key[0]) if len(reports) == 1 else 0
        self._pending_bytes[key] += size
        self._total_bytes += size
        while len(self._pending) > MAX_PENDING or self._total_bytes > MAX_PENDING_BYTES:
            self._drop(next(iter(self._pending)))
        if self._has_differed or len(reports) < len(event["members"]):
            return None
        self._drop(key)
        difference = find_difference(reports)
        self._has_differed = difference is not None
        return difference

    def _drop(self, key: tuple[Any, ...]) -> None:
        self._pending.pop(key, None)
        self._total_bytes -= self._pending_bytes.pop(key, 0)


def find_difference(reports: Mapping[int, Event]) -> Difference | None:
    """Returns which ranks' parameters differ, by their reports of one step."""
    sums = {
        rank: {entry["name"]: entry["value"] for entry in event["sums"]}
        for rank, event in sorted(reports.items())
    }
    names = next(iter(sums.values()))
    for name in names:
        by_rank = {rank: values.get(name, "") for rank, values in sums.items()}
        value, count = Counter(by_rank.values()).most_common(1)[0]
        if count < len(by_rank):
            step = next(iter(reports.values()))["step"]
            wrong = [rank for rank in by_rank if by_rank[rank] != value]
            has_majority = 2 * count > len(by_rank)
            ranks = wrong if has_majority else list(by_rank)
            text = ", ".join(f"rank {rank} on {reports[rank].host}" for rank in ranks)
            than = "a different model from the others" if has_majority else "different models"
            verb = "trains" if len(ranks) == 1 else "train"
            moment = f"after step {step}" if step else "before the first step"
            sentence = f"{text} {verb} {than}: {name} differs {moment}"
            if step and all(event["exchanges"] is False for event in reports.values()):
                sentence += NO_EXCHANGE
            return Difference(step, reports[ranks[-1]].host, ranks[-1], name, sentence)
    return None
