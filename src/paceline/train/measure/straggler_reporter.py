"""What is said of a training's pace: who holds the others up, and where the time went."""

from __future__ import annotations

from typing import Any

import torch

from paceline.train.measure.pace import StepTimer, StepTimings, summary
from paceline.train.measure.straggler import StragglerDetector
from paceline.train.member import Member


class StragglerMonitor:
    """Reports stragglers once for the job. Every rank has one and calls it alike."""

    def __init__(self, member: Member) -> None:
        self._member, self.detector = member, StragglerDetector()

    def regroup(self) -> None:
        self.detector = StragglerDetector()

    def update(self, timings: StepTimings) -> None:
        """Reports a change of the straggler; a collective only then."""
        former = self.detector.current
        if not self.detector.update(timings):
            return
        current = self.detector.current
        straggler = current or former
        assert straggler is not None
        rank_name = self._name_of(straggler.rank)
        details = _rank_and_host(rank_name)
        if current is None:
            text = f"{rank_name} keeps up again"
            self._record("straggler over", **details, text=text)
        else:
            text, details["cause"] = current.describe(rank_name), current.cause
            seconds, part = round(current.seconds, 6), round(current.part, 4)
            self._record("straggler", **details, seconds=seconds, part=part, text=text)
        self._member.say(text)

    def summarize(self, timer: StepTimer, steps: int, data_s: float) -> None:
        """Reports the whole training to user and record; a collective.

        Args:
            steps: Done by this process; who joined later has done fewer than others.
            data_s: Seconds in which this rank waited for its data.
        """
        steps = int(self._member.comms.max(torch.tensor([float(steps)], dtype=torch.float64))[0])
        if not steps:
            return
        for timings in timer.finish():
            self.update(timings)
        slowest_text, straggler_details = "", dict[str, Any]()
        if costliest := self.detector.costliest(steps):
            rank_name = self._name_of(costliest.rank)
            slowest_text = f"slowest: {costliest.summarize(rank_name)}"
            straggler_details = {**_rank_and_host(rank_name), "cause": costliest.cause}
        shares, rate = timer.totals.shares() if timer.totals is not None else None, timer.rate
        shown_shares = None if self._member.comms.is_alone else shares
        text = summary(
            steps, rate.measured_samples, rate.measured_s, data_s, shown_shares, slowest_text
        )
        self._member.say(text)
        parts = {name: round(part, 4) for name, part in (shares or {}).items()}
        totals = {
            "samples": rate.measured_samples,
            "seconds": round(rate.measured_s, 4),
            "parts": parts,
        }
        self._record("trained", steps=steps, **totals, **straggler_details)

    def _name_of(self, rank: int) -> str:
        """Returns the name of a rank for users; a collective."""
        return self._member.comms.texts(self._member.comms.rank_name)[rank]

    def _record(self, name: str, **details: Any) -> None:
        if self._member.world.rank == 0:
            self._member.event(name, **details)


def _rank_and_host(rank_name: str) -> dict[str, Any]:
    number, _, host = rank_name.removeprefix("rank ").partition(" on ")
    return {"straggler": int(number), "its_host": host}
