"""Renders a conclusion for people: the cause, the evidence, the remedy, and what else matched."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.explain.conclusion import Conclusion, describe_success
from paceline.explain.evidence import Evidence
from paceline.explain.libraries import summarize
from paceline.explain.outcome import is_consequence
from paceline.explain.rule import Match, Rule

WIDTH = 200
MAX_CANDIDATES = 3
MAX_LOSSES = 20
MAX_QUOTED = 8  # lines of one message
MIN_CONFIDENCE = 0.6  # below it, other candidates are shown with theirs
TO_COLLECT = (
    "No rule fits. The logs of all ranks, `dmesg` of that host, and the same run with\n"
    "`paceline run --debug SCRIPT` help. `paceline explain RUN --bundle FILE.tar.gz` packs them."
)

EXITED = (
    "The last lines of {log}, and what ends the process with status {code}:\n"
    "`sys.exit` or `os._exit` in the script or a library, or a shell script around it."
)


def summary_lines(conclusion: Conclusion) -> list[str]:
    """Cause and remedy, for the end of a failed run."""
    if not conclusion.matches:
        return [f"cause: {conclusion.text}"]
    rule, match = conclusion.matches[0]
    remedy = _labeled("remedy: ", match.remedy or rule.sections["Remedy"])
    return [f"cause: {match.cause} [{rule.code}]", *remedy]


def lines(conclusion: Conclusion, evidence: Evidence) -> list[str]:
    text = [conclusion.text]
    if conclusion.matches:
        _, match = conclusion.matches[0]
        text += _describe_match(*conclusion.matches[0])
        others = [(rule, other) for rule, other in conclusion.matches[1:]
                  if not (rule.symptom and _quotes_same_error(match, other))]  # fmt: skip
        text += _describe_candidates(
            others[:MAX_CANDIDATES], is_certain=match.confidence >= MIN_CONFIDENCE
        )
    elif not conclusion.is_healthy:
        text += _describe_unknown(evidence)
    return text + library_lines(evidence)


def _quotes_same_error(match: Match, other: Match) -> bool:
    last_line = match.lines[-1:]
    return bool(last_line) and (last_line, match.rank) == (other.lines[-1:], other.rank)


def _describe_unknown(evidence: Evidence) -> list[str]:
    """The first failure, the messages around it, and what to collect."""
    if evidence.launcher is not None and evidence.launcher.alive:
        return ["", "`paceline status` says where its ranks are.", *_log_tail(evidence)]
    first, context = evidence.outcome.first, evidence.outcome.context
    failure = evidence.first_failure
    if first is None:
        quoted = _log_tail(evidence)
    else:
        is_other = failure is not None and failure.where not in first.label
        heading, quoted = "first error in the logs" if is_other else "first failure", list[str]()
        if failure is not None and is_other and is_consequence(first):
            heading, quoted = "a consequence of it", _log_tail(evidence, failure.where)
        quoted += ["", f"{heading} ({first.label}):", *_indented(first.lines[-MAX_QUOTED:])]
        words = [unit.lines[0] for unit in context if unit is not first][-MAX_QUOTED:]
        quoted += ["", "before it:", *_indented(words)] if words else []
    if failure is not None and failure.kind == "exit" and failure.code and failure.rank is not None:
        log = f"logs/{failure.host}/{failure.rank}.log"
        quoted += ["", *_labeled("to look at: ", EXITED.format(code=failure.code, log=log))]
    return [*quoted, "", *_labeled("to collect: ", TO_COLLECT)]


def of_success(evidence: Evidence) -> list[str]:
    losses = evidence.losses
    num_hidden = len(losses) - MAX_LOSSES
    note = [f"and {num_hidden} more, in events.jsonl"] if num_hidden > 0 else []
    return [describe_success(evidence), *_indented([*losses[:MAX_LOSSES], *note]),
            *library_lines(evidence)]  # fmt: skip


def library_lines(evidence: Evidence) -> list[str]:
    summary = summarize(evidence.debug)
    return ["", "the libraries said:", *(f"    {line}" for line in summary)] if summary else []


def _describe_match(rule: Rule, match: Match) -> list[str]:
    quoted = _indented([line for line in match.lines if line.strip()])
    return [
        "", *(["evidence:", *quoted] if quoted else []),
        *_labeled("cause:      ", match.reason or rule.sections["Cause"]),
        *_labeled("confirm:    ", match.confirm or rule.sections["Confirm"]),
        *_labeled("remedy:     ", match.remedy or rule.sections["Remedy"]),
        f"confidence: {round(100 * match.confidence)} % (rule: {rule.code})",
    ]  # fmt: skip


def _labeled(label: str, text: str) -> list[str]:
    first, *continuation = text.splitlines() or [""]
    return [label + first, *(" " * len(label) + line for line in continuation)]


def _indented(texts: Sequence[str]) -> list[str]:
    return [f"    {text[:WIDTH]}" for text in texts]


def _describe_candidates(matches: Sequence[tuple[Rule, Match]], is_certain: bool) -> list[str]:
    """Lists what else fits: causes if the first is uncertain, and what they have led to."""
    causes, seen = [], []
    for rule, match in matches:
        text = f"    {match.cause[:WIDTH]} ({rule.code}{', a consequence' * rule.symptom})"
        if is_certain or rule.symptom:
            seen.append(text)
        else:
            remedy = (match.remedy or rule.sections["Remedy"])[:WIDTH]
            causes.append(f"{text}, {round(100 * match.confidence)} %: {remedy}")
    return [
        *(["", "other possible causes:", *causes] if causes else []),
        *(["", "also seen:", *seen] if seen else []),
    ]


def _log_tail(evidence: Evidence, label: str = "") -> list[str]:
    """The last lines of the log with this label, or of the first one that has any."""
    for log in evidence.logs:
        tail = [line for line in log.lines if line.strip()][-8:]
        if tail and label in ("", log.label):
            return ["", f"last lines of {log.label}:", *_indented(tail)]
    return []
