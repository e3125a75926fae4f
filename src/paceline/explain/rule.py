"""The rules of ``paceline explain``: their data types and the parser of their pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.explain.evidence import Evidence, Log
from paceline.spec.events import Event

SECTIONS = ("Meaning", "Cause", "Confirm", "Remedy", "Source")


@dataclass(frozen=True, slots=True)
class Match:
    """The result of a rule that matches the evidence.

    Attributes:
        cause: One sentence that names the ranks and hosts.
        hosts: The hosts that it names; empty when not known.
        rank: The rank; ``None`` when the cause concerns a host or the job.
        confidence: From 0 to 1.
        remedy, confirm: More exact texts that replace the rule's own.
    """

    cause: str
    hosts: tuple[str, ...] = ()
    rank: int | None = None
    confidence: float = 0.9
    lines: tuple[str, ...] = ()
    remedy: str = ""
    confirm: str = ""


Matcher = Callable[[Evidence], Match | None]


def match_line(log: Log, index: int, cause: str, confidence: float, remedy: str = "") -> Match:
    """A match of one line of a log, with the lines around it."""
    return Match(cause, log.hosts, log.rank, confidence, log.context(index), remedy)


def match_exit(end: Event, cause: str, confidence: float, **texts: Any) -> Match:
    """A match of the end of one rank."""
    return Match(cause, (end.host,) if end.host else (), end.rank, confidence, **texts)


@dataclass(frozen=True, slots=True)
class FrontMatter:
    """The YAML block above a rule's page.

    Attributes:
        patterns: Regular expressions, one a line. One of them must match one line of any log.
            ``says`` can use their named groups.
        says: The cause, as one sentence; ``{where}`` is the rank and host.
        confidence: From 0 to 1, of a match by the patterns.
        unless: A pattern that excludes the rule if any log contains it.
        also: A pattern that the same log must contain, too.
        symptom: Whether other failures cause this one. Symptoms count only when no cause is known.
        computed: Whether the module of the same name has a ``match``. It is tried first.
        place: Position among rules of equal confidence; the lower comes first.
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
    """One known failure.

    Attributes:
        code: Its name, and that of its page.
        title: The heading of its page.
        sections: Texts by the names in :data:`SECTIONS`.
        match: Returns ``None`` when the rule does not fit the evidence. Pure.
        symptom, place: See :class:`FrontMatter`.
    """

    code: str
    title: str
    sections: Mapping[str, str] = field(hash=False)
    match: Matcher
    symptom: bool = False
    place: int = 1000


def parse_page(code: str, page: str, load_matcher: Callable[[], Matcher]) -> Rule:
    """Parses the page of a rule.

    Args:
        page: YAML between two lines of dashes, then Markdown.
        load_matcher: Imports ``match`` of the rule's module; called if the page is ``computed``.

    Raises:
        ValueError: A field is unknown, a section is missing, or there is nothing to match.
    """
    import yaml

    _, front, body = page.split("---\n", 2)
    try:
        head = FrontMatter(**yaml.safe_load(front))
    except TypeError as error:
        raise ValueError(f"rule {code}: {error}") from None
    heading, *parts = re.split(r"^## ", body, flags=re.MULTILINE)
    sections = {name: " ".join(text.split()) for name, text in (p.split("\n", 1) for p in parts)}
    if missing := [name for name in SECTIONS if not sections.get(name)]:
        raise ValueError(f"rule {code} lacks {missing}")
    matchers = [load_matcher()] if head.computed else []
    matchers += [log_matcher(head)] if head.patterns else []
    if not matchers:
        raise ValueError(f"rule {code} has no patterns and is not computed")

    def match(evidence: Evidence) -> Match | None:
        results = (matcher(evidence) for matcher in matchers)
        return next((result for result in results if result is not None), None)

    title = heading.strip().removeprefix("# ")
    return Rule(code, title, sections, match, head.symptom, head.place)


def log_matcher(head: FrontMatter) -> Matcher:
    """Makes a matcher that searches the logs for the patterns of a page."""
    # a group name may occur in one alternative only, so each alternative numbers its own
    numbered = (
        re.sub(r"\(\?P<(\w+)>", rf"(?P<\1_{number}>", pattern)
        for number, pattern in enumerate(head.patterns.splitlines())
    )
    pattern = re.compile("|".join(f"(?:{alternative})" for alternative in numbered))
    excluded = re.compile(head.unless) if head.unless else None
    required = re.compile(head.also) if head.also else None

    def match(evidence: Evidence) -> Match | None:
        if excluded is not None and evidence.contains(excluded):
            return None
        for log, index, found in evidence.search(pattern):
            if required is None or required.search(log.text):
                groups = {
                    name.rsplit("_", 1)[0]: text for name, text in found.groupdict().items() if text
                }
                cause = fill_template(head.says, {**groups, "where": log.label})
                return match_line(log, index, cause, head.confidence)
        return None

    return match


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """Fills in the values; a missing one is left out with the words that lead to it."""
    for name in re.findall(r"\{(\w+)\}", template):
        if name not in values:
            lead = r"(?: to|, writing|:)? ?\(?"
            template = re.sub(rf"{lead}\{{{name}\}}\)?", "", template, count=1)
    return template.format_map(values)
