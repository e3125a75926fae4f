"""Which rules fit, in which order: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, Rule
from paceline.spec.finding import Finding

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What explains the failure.

    Attributes:
        found: Rules that fit with what they say, the likeliest first.
        text: One line.
    """

    found: tuple[tuple[Rule, Match], ...]
    text: str

    @property
    def known(self) -> bool:
        return bool(self.found)


def conclude(evidence: Evidence, rules: Sequence[Rule]) -> Conclusion:
    """Causes before symptoms, the first failing rank before others, the surer before the less."""
    found = [(rule, match) for rule in rules if (match := rule.match(evidence)) is not None]

    def order(item: tuple[Rule, Match]) -> tuple[bool, bool, float]:
        rule, match = item
        first = evidence.first
        elsewhere = first is not None and match.rank is not None and match.rank != first.rank
        return (rule.symptom, elsewhere, -match.confidence)

    ranked = tuple(sorted(found, key=order))
    return Conclusion(ranked, ranked[0][1].cause if ranked else _unknown(evidence))


def _unknown(evidence: Evidence) -> str:
    if evidence.launcher is not None and evidence.launcher.alive:
        who = evidence.launcher
        return f"the run has not ended: its {who.what} is {who.where}"
    if evidence.first is not None:
        return f"unknown cause: {evidence.first.where}: {evidence.first.headline}"
    if evidence.result.exit_code == 0:
        return success(evidence)
    return "unknown cause: no rule fits"


def success(evidence: Evidence) -> str:
    """What is to be said of a run that ended well."""
    if evidence.losses:
        return "the run ended with status 0, although something was lost on the way"
    return "nothing went wrong: the run ended with status 0"


def to_findings(conclusion: Conclusion) -> list[Finding]:
    """The conclusion as findings.json holds it: the likeliest cause fails, others warn."""
    found = []
    for at, (rule, match) in enumerate(conclusion.found):
        remedy = match.remedy or rule.sections["Remedy"]
        outcome = "fail" if at == 0 else "warn"
        found.append(Finding(f"explain/{rule.code}", outcome, match.hosts, match.cause, remedy))  # type: ignore[arg-type]
    if not found:
        return [Finding(f"explain/{UNKNOWN}", "unknown", (), conclusion.text)]
    return found
