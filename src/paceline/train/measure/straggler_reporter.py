"""What is said of a training's pace: who holds the others up, and where the time went."""

from __future__ import annotations

from typing import Any

import torch

from paceline.train.measure.pace import Look, Pace, summary
from paceline.train.measure.straggler import Judge
from paceline.train.member import Member


class Lookout:
    """Tells what looks show, once for the job. Every rank has one and calls it alike.

    Args:
        member: Says and records it.
    """

    def __init__(self, member: Member) -> None:
        self._member, self.judge = member, Judge()

    def renew(self) -> None:
        """Begins anew: ranks have other numbers."""
        self.judge = Judge()

    def take(self, look: Look) -> None:
        """Says who holds the others up, when that has changed; a collective only then."""
        before = self.judge.named
        if not self.judge.take(look):
            return
        ranks, now = self._member.comms.texts(self._member.comms.called), self.judge.named
        slow = now or before
        assert slow is not None
        who = ranks[slow.rank]
        about = _place(who)
        if now is None:
            text = f"{who} keeps up again"
            self._tell("straggler over", **about, text=text)
        else:
            text, about["cause"] = now.said(who), now.cause
            seconds, part = round(now.seconds, 6), round(now.part, 4)
            self._tell("straggler", **about, seconds=seconds, part=part, text=text)
        self._member.say(text)

    def sum_up(self, pace: Pace, steps: int, waited: float) -> None:
        """What became of so many steps, in words and in the record; a collective.

        Args:
            pace: Of the training.
            steps: Done by this process; who joined later has done fewer than others.
            waited: Seconds in which this rank waited for its data.
        """
        steps = int(self._member.comms.most(torch.tensor([float(steps)], dtype=torch.float64))[0])
        if not steps:
            return
        for look in pace.finish():
            self.take(look)
        alone, slowest, slow = self._member.comms.alone, "", dict[str, Any]()
        if worst := self.judge.worst(steps):
            who = self._member.comms.texts(self._member.comms.called)[worst.rank]
            slowest = f"slowest: {worst.summed(who)}"
            slow = {**_place(who), "cause": worst.cause}
        shares, rate = pace.shares(), pace.rate
        said = None if alone else shares  # alone nobody waits for anybody
        self._member.say(summary(steps, rate.samples, rate.seconds, waited, said, slowest))
        parts = {name: round(part, 4) for name, part in (shares or {}).items()}
        some = {"samples": rate.samples, "seconds": round(rate.seconds, 4), "parts": parts}
        self._tell("trained", steps=steps, **some, **slow)

    def _tell(self, name: str, **details: Any) -> None:
        if self._member.world.rank == 0:
            self._member.event(name, **details)


def _place(who: str) -> dict[str, Any]:
    """Number and host of a rank, from what it is called."""
    number, _, host = who.removeprefix("rank ").partition(" on ")
    return {"straggler": int(number), "its_host": host}
