"""A rank ended with an exit status, and raised nothing."""

from __future__ import annotations

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, match_unit
from paceline.explain.units import Exit, Unit
from paceline.spec.failure import format_location

MAX_WORDS = 200


def match(evidence: Evidence) -> Match | None:
    """Names the first process that ended by itself, by its launcher's report.

    Without a message of its own, or of ranks that missed it, the cause remains unknown. Python ends
    with status 1 after an exception: if another rank's is there, the log has lost this one. Nor is
    it another rank if that which the launcher names as the first raised an exception.
    """
    outcome = evidence.outcome
    has_exception = any(unit.kind == "traceback" and unit.error and unit.error.type
                        for unit in outcome.failures)  # fmt: skip
    raised = {unit.rank for unit in (*outcome.failures, *outcome.consequences)
              if unit.kind in ("traceback", "crash")}  # fmt: skip
    if evidence.events or None in raised:
        return None
    for unit in outcome.failures:
        if any(end.is_root and end.rank in raised for end in unit.exits):
            return None
        for end in unit.exits:
            if end.code == 1 and has_exception:
                return None
            if end.code and end.rank is not None and end.rank not in raised:
                where = format_location(end.host, end.rank)
                words = _last_complaint(evidence, unit, end)
                if not words and not outcome.consequences:
                    return None
                cause = (
                    f"{where} ended with exit status {end.code}, and the log has no exception of it"
                )
                return match_unit(unit, cause + words, 0.6)
    return None


def _last_complaint(evidence: Evidence, report: Unit, end: Exit) -> str:
    """The last error that the process, or an unknown one, printed before its end."""
    errors = [unit for unit in evidence.outcome.context
              if unit.kind == "text" and unit.level == "error" and unit.number < report.number
              and unit.rank in (None, end.rank)]  # fmt: skip
    return f": {errors[-1].text.strip()[:MAX_WORDS]}" if errors else ""
