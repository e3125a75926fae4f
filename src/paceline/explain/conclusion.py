"""Ranks the rules that match a run's evidence and draws one conclusion. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.explain.evidence import Evidence
from paceline.explain.outcome import Outcome
from paceline.explain.rule import Match, Rule
from paceline.spec.finding import Finding

UNKNOWN = "unknown"
# Of causes found without their own rule in 510 recorded and altered logs, by where the rule that
# answered instead matched: the share that is right if one kind of failure in five is unknown
BY_CONTEXT = 0.95
BY_CONSEQUENCE = 0.93
CHECKPOINT_FAILED = "checkpoint failed"
NO_RECORD = (
    "no launcher recorded how this run ended; if Python itself started the script, its messages are"
    " in the terminal"
)
NO_FAILURE = "no failure found: nothing in this log shows that a training job failed"


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What explains the failure.

    Attributes:
        matches: Rules that match, with their results, the likeliest first.
    """

    matches: tuple[tuple[Rule, Match], ...]
    text: str

    @property
    def is_healthy(self) -> bool:
        """Whether nothing shows that a job failed."""
        return self.text == NO_FAILURE


def conclude(evidence: Evidence, rules: Sequence[Rule]) -> Conclusion:
    """Sorts what explains the first failure before the rest, causes before symptoms."""
    first, outcome = evidence.first_failure, evidence.outcome
    matches = [(rule, _calibrate(rule, match, outcome)) for rule in rules
               if (match := rule.match(evidence)) is not None]  # fmt: skip

    # even a symptom of the rank that ended first says more than another rank's messages
    is_known = (first is not None and first.rank is not None and not first.is_secondary
                and first.signal not in (signal.SIGABRT, signal.SIGTERM))  # fmt: skip

    def is_other_rank(match: Match) -> bool:
        return first is not None and match.rank is not None and match.rank != first.rank

    def order(item: tuple[Rule, Match]) -> tuple[int, bool, bool, bool, float]:
        rule, match = item
        is_other = is_other_rank(match)
        group = 0 if match.unit is None else outcome.group(match.unit)
        return (group, is_known and is_other, rule.symptom, is_other, -match.confidence)

    if is_known and all(rule.symptom and is_other_rank(match) for rule, match in matches):
        matches = []  # what other ranks noticed says nothing about why the first one ended
    ranked = tuple(sorted(matches, key=order))
    return Conclusion(ranked, ranked[0][1].cause if ranked else _describe_unexplained(evidence))


def _calibrate(rule: Rule, match: Match, outcome: Outcome) -> Match:
    """Lowers the confidence in a cause that follows from other messages than the failure's own."""
    if match.unit is None or rule.symptom or match.unit in outcome.failures:
        return match
    factor = BY_CONTEXT if match.unit in outcome.context else BY_CONSEQUENCE
    return replace(match, confidence=round(match.confidence * factor, 3))


def _describe_unexplained(evidence: Evidence) -> str:
    launcher, first = evidence.launcher, evidence.first_failure
    if launcher is not None and launcher.alive:
        return f"the run has not ended: its {launcher.role} is {launcher.location}"
    if first is not None:
        return f"unknown cause: {first.where}: {first.headline}"
    if evidence.result.exit_code == 0:
        return describe_success(evidence)
    unit = evidence.outcome.first
    if evidence.result.exit_code > 0 or (evidence.events and launcher is not None):
        return "unknown cause: no rule fits"
    if evidence.events:
        return NO_RECORD
    if unit is None or not evidence.outcome.has_failed:
        return NO_FAILURE
    return f"unknown cause: {unit.label}: {unit.text.strip().splitlines()[0][:200]}"


def describe_success(evidence: Evidence) -> str:
    """The sentence for a run that ended with status 0."""
    if evidence.losses:
        return "the run ended with status 0, although something was lost on the way"
    saves = [event for event in evidence.events if event.kind in ("checkpoint", CHECKPOINT_FAILED)]
    if saves and saves[-1].kind == CHECKPOINT_FAILED:
        problem = saves[-1]["problem"] or saves[-1]["warning"]
        return f"the run ended with status 0, but its last checkpoint was not saved: {problem}"
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
