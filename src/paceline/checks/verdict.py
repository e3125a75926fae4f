"""From findings to one line and an exit status. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.spec.finding import Finding, Outcome

SEVERITY: tuple[Outcome, ...] = ("fail", "unknown", "warn", "pass")


def exit_status(findings: Sequence[Finding]) -> int:
    """1 when something fails, 2 when something could not be checked, else 0."""
    outcomes = {finding.outcome for finding in findings}
    return 1 if "fail" in outcomes else 2 if "unknown" in outcomes else 0


def of(findings: Sequence[Finding], outcome: Outcome) -> list[Finding]:
    return [finding for finding in findings if finding.outcome == outcome]


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """What matters first: failures, what is unknown, warnings, then what is well."""
    return sorted(findings, key=lambda finding: SEVERITY.index(finding.outcome))


def conclusion(findings: Sequence[Finding]) -> str:
    """The first line: the gravest finding, or that all is well."""
    counts = {outcome: len(of(findings, outcome)) for outcome in SEVERITY}
    if not findings:
        return "nothing was checked"
    gravest = ranked(findings)[0]
    if gravest.outcome == "pass":
        return f"all is well: {counts['pass']} checks passed"
    label = {"fail": "will fail", "unknown": "could not be checked", "warn": "warning"}
    more = _others(counts, gravest.outcome)
    return f"{label[gravest.outcome]}: {gravest.message}{more}"


def _others(counts: dict[Outcome, int], gravest: Outcome) -> str:
    nouns: dict[Outcome, str] = {
        "fail": "failure",
        "unknown": "unknown",
        "warn": "warning",
        "pass": "pass",
    }
    left = {o: counts[o] - (o == gravest) for o in SEVERITY[:3]}
    parts = [f"{n} more {nouns[o]}{'s' * (n > 1)}" for o, n in left.items() if n]
    return f" (and {', '.join(parts)})" if parts else ""
