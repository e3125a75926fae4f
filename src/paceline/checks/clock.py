"""Do the clocks agree?

Looks at: each host's wall clock against this machine's, corrected for the round trip.
Warns when: one is off by more than 2 s. Jobs use monotonic clocks; logs, make, tokens and
certificates do not.
"""

from __future__ import annotations

import time
from typing import Any

from paceline.checks.check import Check, ProbeSession, Survey, passed, warned
from paceline.remote.fanout import gather_all
from paceline.spec.finding import Finding

MAX_OFFSET_S = 2.0


async def probe(session: ProbeSession) -> dict[str, Any]:
    """Returns the seconds by which a clock is ahead of this machine's, by host."""

    async def offset_s(name: str) -> float:
        sent = time.time()
        answer = await session.request(name, "clock")
        return float(answer["time"]) - (sent + time.time()) / 2

    offsets = await gather_all([offset_s(name) for name in session.channels])
    return dict(zip(session.channels, offsets, strict=True))


def evaluate(survey: Survey) -> list[Finding]:
    offsets = survey.evidence["clock"]
    findings = []
    for name, offset_s in offsets.items():
        if abs(offset_s) > MAX_OFFSET_S:
            direction = "ahead of" if offset_s > 0 else "behind"
            message = f"the clock of {name} is {abs(offset_s):.1f} s {direction} this machine's"
            remedy = f"On {name}: sudo timedatectl set-ntp true (or sudo chronyc makestep)"
            findings.append(warned("clock", [name], message, remedy))
    largest = max((abs(offset_s) for offset_s in offsets.values()), default=0.0)
    return findings or [passed("clock", survey.names, f"clocks agree within {largest:.2f} s")]


check = Check("clock", "Clocks", evaluate, probe)
