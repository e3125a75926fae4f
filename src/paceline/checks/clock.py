"""Do the clocks agree?

Looks at: each host's wall clock against this machine's, corrected for the way there and back.
Warns when: one is off by more than 2 s. Jobs here go by monotonic clocks; logs, make, tokens
and certificates do not.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from paceline.checks.check import Check, ProbeSession, Survey, gather_all, passed, warned
from paceline.spec.finding import Finding

ALLOWED_S = 2.0


async def probe(session: ProbeSession) -> dict[str, Any]:
    """By host, seconds by which its clock is ahead of ours."""

    async def offset(name: str) -> float:
        await asyncio.sleep(0)
        sent = time.time()
        answer = await session.request(name, "clock")
        return float(answer["time"]) - (sent + time.time()) / 2

    offsets = await gather_all([offset(name) for name in session.channels])
    return dict(zip(session.channels, offsets, strict=True))


def evaluate(survey: Survey) -> list[Finding]:
    offsets = survey.evidence["clock"]
    findings = [
        warned(
            "clock",
            [name],
            f"the clock of {name} is {abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} "
            "this machine's",
            f"On {name}: sudo timedatectl set-ntp true (or sudo chronyc makestep)",
        )
        for name, off in offsets.items()
        if abs(off) > ALLOWED_S
    ]
    largest = max((abs(off) for off in offsets.values()), default=0.0)
    return findings or [passed("clock", survey.names, f"clocks agree within {largest:.2f} s")]


check = Check("clock", "Clocks", "quick", evaluate, probe)
