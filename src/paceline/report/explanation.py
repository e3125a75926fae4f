"""A conclusion as people read it: one line, the evidence, what to do, what else was seen."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.explain.conclusion import Conclusion, describe_success
from paceline.explain.evidence import Evidence
from paceline.explain.libraries import summarize
from paceline.explain.rule import Match, Rule

WIDTH = 200
OTHERS = 3
LOSSES = 20


def short(conclusion: Conclusion) -> list[str]:
    """For the end of a failed run: the cause and the remedy."""
    if not conclusion.matches:
        return [f"cause: {conclusion.text}"]
    rule, match = conclusion.matches[0]
    remedy = _lines("remedy: ", match.remedy or rule.sections["Remedy"])
    return [f"cause: {match.cause} [{rule.code}]", *remedy]


def lines(conclusion: Conclusion, evidence: Evidence, rules_page: str = "") -> list[str]:
    """The whole explanation.

    Args:
        conclusion: What fits.
        evidence: For what is said of the other ranks.
        rules_page: Where the rules' pages are; empty leaves that out.
    """
    text = [conclusion.text]
    if conclusion.matches:
        text += _first(*conclusion.matches[0], rules_page)
        text += _others(conclusion.matches[1 : OTHERS + 1])
    else:
        goes_on = evidence.launcher is not None and evidence.launcher.alive
        more = "`paceline status` says where its ranks are."
        text += ["", more if goes_on else "No rule fits. --bundle FILE packs what support needs."]
        text += _last_words(evidence)
    return text + libraries(evidence)


def of_success(evidence: Evidence) -> list[str]:
    """Of a run that ended well, with what was lost on the way."""
    told = evidence.losses
    more = [f"    and {len(told) - LOSSES} more, in events.jsonl"] if len(told) > LOSSES else []
    lost = [f"    {line[:WIDTH]}" for line in told[:LOSSES]]
    return [describe_success(evidence), *lost, *more, *libraries(evidence)]


def libraries(evidence: Evidence) -> list[str]:
    """What the libraries under the job told that matters; empty where they told nothing."""
    told = summarize(evidence.debug)
    return ["", "the libraries said:", *(f"    {line}" for line in told)] if told else []


def _first(rule: Rule, match: Match, rules_page: str) -> list[str]:
    quoted = [f"    {line[:WIDTH]}" for line in match.lines if line.strip()]
    text = ["", "evidence:", *quoted] if quoted else [""]
    text += _lines("cause:      ", rule.sections["Cause"])
    text += _lines("confirm:    ", match.confirm or rule.sections["Confirm"])
    text += _lines("remedy:     ", match.remedy or rule.sections["Remedy"])
    text += [f"confidence: {round(100 * match.confidence)} % (rule: {rule.code})"]
    return text + ([f"more:       {rules_page}{rule.code}.md"] if rules_page else [])


def _lines(label: str, text: str) -> list[str]:
    first, *rest = text.splitlines() or [""]
    return [label + first, *(" " * len(label) + line for line in rest)]


def _others(found: Sequence[tuple[Rule, Match]]) -> list[str]:
    if not found:
        return []
    shown = [
        f"    {match.cause[:WIDTH]} ({rule.code}{', a consequence' * rule.symptom})"
        for rule, match in found
    ]
    return ["", "also seen:", *shown]


def _last_words(evidence: Evidence) -> list[str]:
    for log in evidence.logs:
        words = [line for line in log.lines if line.strip()][-8:]
        if words:
            return ["", f"last lines of {log.label}:", *(f"    {w[:WIDTH]}" for w in words)]
    return []
