"""Statistics of the heartbeats of ranks: steps, phases, and how long they usually take. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.spec.failure import format_location

MIN_IDLE_S = 10.0  # before silence is inspected
IDLE_GAP_FACTOR = 4  # times the longest gap between heartbeats, before silence is inspected
PHASE_IDLE_S = 60.0  # in a phase other than training
HANG_GAP_FACTOR = 5  # times the slowest step or phase, before a hang is ended
MIN_HANG_LIMIT_S = 30.0
FIRST_PHASE_LIMIT_S = 600.0  # in a phase that has not ended before: a start, a compilation
MIN_GAPS = 3  # before gaps count as typical
SHOWN_IDLE_S = 5.0  # before the progress line shows the silence
TRAINING = "train"
MAX_PHASES = 1000  # whose duration is known


@dataclass(frozen=True, slots=True)
class Beat:
    """The latest heartbeat of one rank.

    Attributes:
        step: Global steps done.
        phase: What it does.
        time: When it arrived, in seconds of the launcher's clock.
    """

    step: int
    phase: str
    time: float


class HeartbeatStats:
    """The latest heartbeats, and how long it usually takes until the next."""

    def __init__(self) -> None:
        self.beats: dict[int, Beat] = {}
        self._latest: tuple[float, str] | None = None
        self._gaps: list[float] = []
        self._slowest: dict[str, float] = {}
        self._num_phases = Counter[str]()

    def take(
        self, rank: int, step: int, phase: str, timestamp: float, *, hung: bool = False
    ) -> None:
        """Adds a heartbeat. If the job hung since the previous one, that gap is not typical."""
        if self._latest is not None and not hung:
            gap, previous = timestamp - self._latest[0], self._latest[1]
            if phase == TRAINING:
                self._gaps = [*self._gaps[-20:], gap]
            if previous in self._slowest or len(self._slowest) < MAX_PHASES:
                self._slowest[previous] = max(gap, self._slowest.get(previous, 0.0))
                self._num_phases[previous] += 1
        self.beats[rank] = Beat(step, phase, timestamp)
        self._latest = (timestamp, phase)

    @property
    def is_calibrated(self) -> bool:
        """Whether there were enough heartbeats to know the usual gap."""
        return len(self._gaps) >= MIN_GAPS

    @property
    def received_at(self) -> float:
        """When the latest heartbeat arrived; 0 if none did."""
        return 0.0 if self._latest is None else self._latest[0]

    @property
    def timeout_s(self) -> float:
        """Seconds of silence before the ranks are inspected."""
        return max(MIN_IDLE_S, self.expected_gap_s)

    @property
    def expected_gap_s(self) -> float:
        """Seconds of silence that are usual in the present phases."""
        gap_s = IDLE_GAP_FACTOR * max(self._gaps, default=0.0)
        training = all(beat.phase == TRAINING for beat in self.beats.values())
        return gap_s if training else max(gap_s, PHASE_IDLE_S)

    @property
    def limit_s(self) -> float | None:
        """Seconds of silence after which a hang is ended; ``None`` without heartbeats."""
        if not self.beats:
            return None
        phases = {beat.phase for beat in self.beats.values()}
        is_known = self.is_calibrated and all(self._num_phases[p] >= MIN_GAPS for p in phases)
        slowest = max(self._slowest.get(phase, 0.0) for phase in phases | {TRAINING})
        return max(MIN_HANG_LIMIT_S if is_known else FIRST_PHASE_LIMIT_S, HANG_GAP_FACTOR * slowest)


def describe_phases(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Describes ranks that are not training, for the progress line; empty if all are."""
    idle_s = min((float(rank["silent_s"]) for rank in ranks), default=0.0)
    idle_text = f"no word for {idle_s:.0f} s" if idle_s >= SHOWN_IDLE_S else ""
    phases = Counter(str(rank["phase"]) for rank in ranks)
    if len(phases) == 1 and (phase := next(iter(phases))) != TRAINING:
        return "  ".join(part for part in (phase, idle_text) if part)
    absent = [rank for rank in ranks if rank["phase"] != TRAINING]
    positions = [f"{format_location(r['host'], r['rank'])}: {r['phase']}" for r in absent[:2]]
    if len(absent) > len(positions):
        positions.append(f"{len(absent) - len(positions)} more elsewhere")
    return "  ".join(part for part in ("; ".join(positions), idle_text) if part)


def positions_json(
    beats: Mapping[int, Beat], hosts: Mapping[int, str], timestamp: float
) -> list[dict[str, Any]]:
    """Returns the entries of ``ranks.json``: rank, host, step, phase, seconds of silence."""
    return [
        {"rank": rank, "host": hosts.get(rank, ""), "step": beat.step, "phase": beat.phase,
         "silent_s": round(timestamp - beat.time, 1)}
        for rank, beat in sorted(beats.items())
    ]  # fmt: skip
