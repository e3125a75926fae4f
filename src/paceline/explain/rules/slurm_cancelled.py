"""A job step was cancelled, and not because one of its tasks had failed."""

from __future__ import annotations

import re

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, match_unit

# srun cancels the step after a task has failed, too, and then writes the same
_STEP_CANCELLED = re.compile(
    r"\*\*\* STEP [\d.+_]{1,30} ON \S{1,253} "
    r"(?P<words>CANCELLED AT (?!.{0,60}DUE TO).{1,40}) \*\*\*"
)


def match(evidence: Evidence) -> Match | None:
    outcome = evidence.outcome
    errors = (unit.error for unit in outcome.consequences if unit.kind in ("traceback", "crash"))
    was_interrupted = all(error and error.type == "KeyboardInterrupt" for error in errors)
    if outcome.failures or not was_interrupted:
        return None
    for unit, words in evidence.search(_STEP_CANCELLED):
        return match_unit(unit, f"the job was ended by the scheduler: {words['words']}", 0.9)
    return None
