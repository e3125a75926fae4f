"""The job was stopped from outside.

Meaning: The launcher got a signal and ended the job in order.
Cause: Ctrl-C, a closed terminal, kill, or the scheduler's notice.
Confirm: result.json: interrupted.
Remedy: Run again with the same --run-dir: training resumes from the last checkpoint.
Source: the run's result.json.
"""

from __future__ import annotations

import signal

from paceline.diagnose.evidence import Evidence
from paceline.diagnose.rule import Match, define


def match(evidence: Evidence) -> Match | None:
    if not evidence.interrupted:
        return None
    name = signal.Signals(evidence.interrupted).name
    return Match(f"nothing failed: the job was stopped by {name} at the launcher", (), None, 0.99)


rule = define("interrupted", __doc__, match)
