"""Ranks the rules that match a run's evidence and draws one conclusion. Pure."""

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
        matches: Rules that match, with their results, the likeliest first.
    """

    matches: tuple[tuple[Rule, Match], ...]
    text: str


def conclude(evidence: Evidence, rules: Sequence[Rule]) -> Conclusion:
    """Sorts causes before symptoms, the first failing rank before others, then by confidence."""
    matches = [(rule, match) for rule in rules if (match := rule.match(evidence)) is not None]
    first = evidence.first_failure

    def order(item: tuple[Rule, Match]) -> tuple[bool, bool, float]:
        rule, match = item
        is_other_rank = first is not None and match.rank is not None and match.rank != first.rank
        return (rule.symptom, is_other_rank, -match.confidence)

    ranked = tuple(sorted(matches, key=order))
    return Conclusion(ranked, ranked[0][1].cause if ranked else _describe_unexplained(evidence))


def _describe_unexplained(evidence: Evidence) -> str:
    launcher, first = evidence.launcher, evidence.first_failure
    if launcher is not None and launcher.alive:
        return f"the run has not ended: its {launcher.role} is {launcher.location}"
    if first is not None:
        return f"unknown cause: {first.where}: {first.headline}"
    if evidence.result.exit_code == 0:
        return describe_success(evidence)
    return "unknown cause: no rule fits"


def describe_success(evidence: Evidence) -> str:
    """The sentence for a run that ended with status 0."""
    if evidence.losses:
        return "the run ended with status 0, although something was lost on the way"
    return "nothing went wrong: the run ended with status 0"


def to_findings(conclusion: Conclusion) -> list[Finding]:
    """The conclusion as findings.json stores it: the likeliest cause fails, others warn."""
    if not conclusion.matches:
        return [Finding(f"explain/{UNKNOWN}", "unknown", (), conclusion.text)]
    return [
        Finding(f"explain/{rule.code}", "warn" if index else "fail", match.hosts, match.cause,
                match.remedy or rule.sections["Remedy"])
        for index, (rule, match) in enumerate(conclusion.matches)
    ]  # fmt: skip
