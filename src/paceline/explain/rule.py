"""What a rule is, and how its page is read."""

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
        hosts: The hosts that it names; empty when not known.
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


Matcher = Callable[[Evidence], Match | None]


@dataclass(frozen=True, slots=True)
class FrontMatter:
    """What stands above a rule's page.

    Attributes:
        patterns: Regular expressions, one a line: any of them, in one line of any rank's log.
            Named groups can be used in ``says``.
        says: The cause, as one sentence; ``{where}`` is the rank and host.
        confidence: 0 … 1, of what the patterns find.
        unless: Words anywhere in the logs that speak against it.
        also: Words that must stand in the same log, too.
        symptom: True for what other failures cause, too: speaks only when no cause is known.
        computed: ``match`` of the module of the same name is asked where no pattern is found.
        place: Of two rules that are equally sure, the one with the lower place speaks first.
    """

    patterns: str = ""
    says: str = ""
    confidence: float = 0.9
    unless: str = ""
    also: str = ""
    symptom: bool = False
    computed: bool = False
    place: int = 1000


@dataclass(frozen=True, slots=True)
class Rule:
    """One failure that we know.

    Attributes:
        code: Its name; also that of its page.
        title: The heading of its page.
        sections: Meaning, Cause, Confirm, Remedy, Source.
        match: What it says of the evidence, ``None`` when it does not fit. Pure.
        symptom, place: As in :class:`FrontMatter`.
    """

    code: str
    title: str
    sections: Mapping[str, str] = field(hash=False)
    match: Matcher
    symptom: bool = False
    place: int = 1000


def from_page(code: str, page: str, computed: Callable[[], Matcher]) -> Rule:
    """The rule that a page describes.

    Args:
        code: The page's name.
        page: Its text: YAML between two lines of dashes, then Markdown.
        computed: Brings ``match`` of its module; called only where the page says that it has one.

    ValueError when nothing could match, and when a section is missing: a rule without remedy or
    source helps nobody.
    """
    import yaml

    _, front, body = page.split("---\n", 2)
    try:
        head = FrontMatter(**yaml.safe_load(front))
    except TypeError as error:
        raise ValueError(f"rule {code}: {error}") from None
    title, sections = _parts(body)
    if missing := [name for name in SECTIONS if not sections.get(name)]:
        raise ValueError(f"rule {code} lacks {missing}")
    ways = [computed()] if head.computed else []  # it sees more than lines of a log
    ways += [in_logs(head)] if head.patterns else []
    if not ways:
        raise ValueError(f"rule {code} has no patterns and is not computed")

    def match(evidence: Evidence) -> Match | None:
        return next((found for way in ways if (found := way(evidence)) is not None), None)

    return Rule(code, title, sections, match, head.symptom, head.place)


def _parts(body: str) -> tuple[str, dict[str, str]]:
    """Title and sections of a page; the lines of a section are joined."""
    heading, *rest = re.split(r"^## ", body, flags=re.MULTILINE)
    pairs = (part.split("\n", 1) for part in rest)
    return heading.strip().removeprefix("# "), {name: " ".join(t.split()) for name, t in pairs}


def in_logs(head: FrontMatter) -> Matcher:
    """Looks for the patterns of a page in the logs."""
    patterns = head.patterns.splitlines()
    wanted = re.compile("|".join(f"(?:{p})" for p in _with_own_groups(patterns)))
    against = re.compile(head.unless) if head.unless else None
    needed = re.compile(head.also) if head.also else None

    def match(evidence: Evidence) -> Match | None:
        if against is not None and evidence.says(against):
            return None
        for log, at, found in evidence.search(wanted):
            if needed is None or needed.search(log.text):
                return _match(head, log, at, found)
        return None

    return match


def _with_own_groups(patterns: Sequence[str]) -> list[str]:
    """Group names may stand in one alternative only: those of the others get a number."""
    return [
        re.sub(r"\(\?P<(\w+)>", rf"(?P<\1_{at}>", pattern) for at, pattern in enumerate(patterns)
    ]


def _match(head: FrontMatter, log: Log, at: int, found: re.Match[str]) -> Match:
    groups = {name.rsplit("_", 1)[0]: value for name, value in found.groupdict().items() if value}
    says = filled(head.says, {**groups, "where": log.where})
    hosts = (log.host,) if log.host else ()
    lines = log.lines[max(0, at - AROUND) : at + AROUND + 1]
    return Match(says, hosts, log.rank, head.confidence, tuple(lines))


def filled(says: str, values: Mapping[str, str]) -> str:
    """The sentence with its values; what leads to one that was not found is left out."""
    for name in re.findall(r"\{(\w+)\}", says):
        if name not in values:
            lead = r"(?: to|, writing|:)? ?\(?"
            says = re.sub(rf"{lead}\{{{name}\}}\)?", "", says, count=1)
    return says.format_map(values)
