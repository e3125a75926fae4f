"""What ranks tell of themselves: steps, phases, how long they usually take. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.spec.failure import format_location

LEAST_S = 10.0  # of silence that is looked into
USUAL_GAPS = 4  # as many times the usual time between two steps' tellings
OTHER_PHASE_S = 60.0  # in a phase other than training
LIMIT_GAPS = 5  # as many times the slowest step or phase that was seen: then a hang is ended
LEAST_LIMIT_S = 30.0
UNSEEN_LIMIT_S = 600.0  # the same in a phase that has not been seen to end: a start, a compilation
ENOUGH = 3  # gaps until it is known what is usual
SILENT_S = 5.0  # which a line of progress tells of
TRAINING = "train"


@dataclass(frozen=True, slots=True)
class Beat:
    """What one rank told last.

    Attributes:
        step: Global steps done.
        phase: What it does.
        time: When it was told, in seconds of the launcher's clock.
    """

    step: int
    phase: str
    time: float


class Heartbeats:
    """The steps that ranks tell of, and how long it usually takes until the next."""

    def __init__(self) -> None:
        self.beats: dict[int, Beat] = {}
        self._last: tuple[float, str] | None = None
        self._gaps: list[float] = []
        self._slowest: dict[str, float] = {}
        self._counts = Counter[str]()

    def take(self, rank: int, step: int, phase: str, now: float, *, hung: bool = False) -> None:
        """A rank has told what it does.

        Args:
            rank, step, phase, now: Who, and what, and when.
            hung: The time since the last word was a hang: it is not how long things take.
        """
        if self._last is not None and not hung:
            gap, before = now - self._last[0], self._last[1]
            if phase == TRAINING:
                self._gaps = [*self._gaps[-20:], gap]
            self._slowest[before] = max(gap, self._slowest.get(before, 0.0))
            self._counts[before] += 1
        self.beats[rank] = Beat(step, phase, now)
        self._last = (now, phase)

    @property
    def known(self) -> bool:
        """Whether enough was told to know what is usual."""
        return len(self._gaps) >= ENOUGH

    @property
    def last_at(self) -> float:
        """When something was told last; 0 when nothing was."""
        return 0.0 if self._last is None else self._last[0]

    @property
    def patience_s(self) -> float:
        """Seconds of silence that are nothing to look at."""
        return max(LEAST_S, self.usual_s)

    @property
    def usual_s(self) -> float:
        """Seconds of silence that are nothing new."""
        usual = USUAL_GAPS * max(self._gaps, default=0.0)
        training = all(beat.phase == TRAINING for beat in self.beats.values())
        return usual if training else max(usual, OTHER_PHASE_S)

    @property
    def limit_s(self) -> float | None:
        """Seconds of silence after which a hang is ended; ``None`` where no steps are told."""
        if not self.beats:
            return None
        phases = {beat.phase for beat in self.beats.values()}
        unseen = not self.known or any(self._counts[phase] < ENOUGH for phase in phases)
        slowest = max(self._slowest.get(phase, 0.0) for phase in phases | {TRAINING})
        return max(UNSEEN_LIMIT_S if unseen else LEAST_LIMIT_S, LIMIT_GAPS * slowest)


def aside(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Who is elsewhere than in the training, for the line of progress; empty where nobody is."""
    silent_s = min((float(rank["silent_s"]) for rank in ranks), default=0.0)
    since = f"no word for {silent_s:.0f} s" if silent_s >= SILENT_S else ""
    phases = Counter(str(rank["phase"]) for rank in ranks)
    if len(phases) == 1 and (phase := next(iter(phases))) != TRAINING:
        return "  ".join(part for part in (phase, since) if part)
    elsewhere = [rank for rank in ranks if rank["phase"] != TRAINING]
    who = [
        f"{format_location(rank['host'], rank['rank'])}: {rank['phase']}" for rank in elsewhere[:2]
    ]
    if len(elsewhere) > len(who):
        who.append(f"{len(elsewhere) - len(who)} more elsewhere")
    return "  ".join(part for part in ("; ".join(who), since) if part)


def told(beats: Mapping[int, Beat], hosts: Mapping[int, str], now: float) -> list[dict[str, Any]]:
    """Who is where, as ``ranks.json`` holds it: rank, host, step, phase, seconds of silence."""
    return [
        {"rank": rank, "host": hosts.get(rank, ""), "step": beat.step, "phase": beat.phase,
         "silent_s": round(now - beat.time, 1)}
        for rank, beat in sorted(beats.items())
    ]  # fmt: skip
