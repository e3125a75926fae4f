"""What a rule is, and the common kind: words in a log."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.explain.evidence import Evidence, Log

SECTIONS = ("Meaning", "Cause", "Confirm", "Remedy", "Source")
AROUND = 2  # lines shown before and after


@dataclass(frozen=True, slots=True)
class Match:
    """What a rule says of the evidence.

    Attributes:
        cause: One sentence with who and where.
        hosts: The hosts that it blames; empty when not known.
        rank: The rank; ``None`` when a host or the job is meant.
        confidence: 0 … 1.
        lines: The evidence, as found.
        remedy, confirm: In place of the rule's own, when they can be more exact.
    """

    cause: str
    hosts: tuple[str, ...] = ()
    rank: int | None = None
    confidence: float = 0.9
    lines: tuple[str, ...] = ()
    remedy: str = ""
    confirm: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """One failure that we know.

    Attributes:
        code: Its name; also that of its page.
        title: The first line of its description.
        sections: Meaning, Cause, Confirm, Remedy, Source.
        match: What it says of the evidence, ``None`` when it does not fit. Pure.
        symptom: True for what other failures cause, too: speaks only when nothing else does.
    """

    code: str
    title: str
    sections: dict[str, str] = field(hash=False)
    match: Callable[[Evidence], Match | None]
    symptom: bool = False


def define(code: str, doc: str | None, match: Callable[[Evidence], Match | None],
           symptom: bool = False) -> Rule:  # fmt: skip
    """A rule whose description is the docstring of its module.

    ValueError when a section is missing: a rule without remedy or source helps nobody.
    """
    title, sections = parse(doc or "")
    if missing := [name for name in SECTIONS if not sections.get(name)]:
        raise ValueError(f"rule {code} lacks {missing}")
    return Rule(code, title, sections, match, symptom)


def parse(doc: str) -> tuple[str, dict[str, str]]:
    """Title and sections of a description: ``Name: text``, continued on the lines below."""
    lines = doc.strip().splitlines()
    sections: dict[str, str] = {}
    name = ""
    for line in lines[1:]:
        head = re.match(rf"({'|'.join(SECTIONS)}): ?(.*)", line)
        if head:
            name, text = head[1], head[2]
            sections[name] = text.strip()
        elif name and line.strip():
            sections[name] = f"{sections[name]} {line.strip()}".strip()
    return lines[0].rstrip(".") if lines else "", sections


def in_log(code: str, doc: str | None, patterns: Sequence[str], says: str, *,
           unless: str = "", also: str = "", confidence: float = 0.9,
           symptom: bool = False) -> Rule:  # fmt: skip
    """A rule that looks for words in the logs.

    Args:
        code, doc, symptom: As for :func:`define`.
        patterns: Any of these, in one line. Named groups can be used in ``says``.
        says: The cause; ``{where}`` is the rank and host.
        unless: Words anywhere that speak against it.
        also: Words that must stand in the same log, too.
        confidence: How sure it is.
    """
    wanted = re.compile("|".join(f"(?:{p})" for p in _with_own_groups(patterns)))
    against = re.compile(unless) if unless else None
    needed = re.compile(also) if also else None

    def match(evidence: Evidence) -> Match | None:
        if against is not None and evidence.says(against):
            return None
        for log, at, found in evidence.search(wanted):
            if needed is None or needed.search(log.text):
                return _match(says, confidence, log, at, found)
        return None

    return define(code, doc, match, symptom)


def _with_own_groups(patterns: Sequence[str]) -> list[str]:
    """Group names may stand in one alternative only: those of the others get a number."""
    return [
        re.sub(r"\(\?P<(\w+)>", rf"(?P<\1_{at}>", pattern) for at, pattern in enumerate(patterns)
    ]


def _match(says: str, confidence: float, log: Log, at: int, found: re.Match[str]) -> Match:
    groups = {name.rsplit("_", 1)[0]: value for name, value in found.groupdict().items() if value}
    values = {**groups, "where": log.where}
    hosts = (log.host,) if log.host else ()
    lines = log.lines[max(0, at - AROUND) : at + AROUND + 1]
    return Match(filled(says, values), hosts, log.rank, confidence, tuple(lines))


def filled(says: str, values: Mapping[str, str]) -> str:
    """The sentence with its values; what leads to one that was not found is left out."""
    for name in re.findall(r"\{(\w+)\}", says):
        if name not in values:
            lead = r"(?: to|, writing|:)? ?\(?"
            says = re.sub(rf"{lead}\{{{name}\}}\)?", "", says, count=1)
    return says.format_map(values)
