"""The rules of ``paceline explain``: their data types and the parser of their pages."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.explain.evidence import Evidence
from paceline.explain.units import Unit
from paceline.spec.events import Event

SECTIONS = ("Meaning", "Cause", "Confirm", "Remedy", "Source")


MAX_EVIDENCE_LINES = 12


@dataclass(frozen=True, slots=True)
class Match:
    """The result of a rule that matches the evidence.

    Attributes:
        cause: One sentence that names the ranks and hosts.
        hosts: The hosts that it names; empty when not known.
        rank: The rank; ``None`` when the cause concerns a host or the job.
        confidence: From 0 to 1.
        remedy, confirm, reason: More exact texts that replace the rule's Remedy, Confirm and Cause.
        unit: The message that it explains; ``None`` if it follows from events.
    """

    cause: str
    hosts: tuple[str, ...] = ()
    rank: int | None = None
    confidence: float = 0.9
    lines: tuple[str, ...] = ()
    remedy: str = ""
    confirm: str = ""
    reason: str = ""
    unit: Unit | None = None


_ERROR_FIELD = re.compile(r"^  (found|remedy): +([^\n]*(?:\n   [^\n]*)*)", re.MULTILINE)


def parse_error_fields(text: str) -> dict[str, str]:
    """The parts ``found`` and ``remedy`` of a rendered PacelineError, if it has them."""
    return {name: "\n".join(line.strip() for line in part.splitlines())
            for name, part in _ERROR_FIELD.findall(text)}  # fmt: skip


Matcher = Callable[[Evidence], Match | None]


def match_unit(unit: Unit, cause: str, confidence: float, **texts: Any) -> Match:
    """A match of one message of a log."""
    lines = _evidence_lines(unit)
    return Match(cause, unit.hosts, unit.rank, confidence, lines, unit=unit, **texts)


def _evidence_lines(unit: Unit) -> tuple[str, ...]:
    """The last lines of a message; of a traceback, with the last frame of the script."""
    start = len(unit.lines) - MAX_EVIDENCE_LINES
    frame = unit.error.script_frame if unit.error else None
    location = f'File "{frame.file}", line {frame.line},' if frame else ""
    in_script = [index for index, line in enumerate(unit.lines) if frame and location in line]
    if not in_script or in_script[-1] >= start:
        return unit.lines[-MAX_EVIDENCE_LINES:]
    frame_lines = unit.lines[in_script[-1] : in_script[-1] + 2]
    return (*frame_lines, "  ...", *unit.lines[start + 3 :])


def match_exit(end: Event, cause: str, confidence: float, **texts: Any) -> Match:
    """A match of the end of one rank."""
    return Match(cause, (end.host,) if end.host else (), end.rank, confidence, **texts)


@dataclass(frozen=True, slots=True)
class FrontMatter:
    """The YAML block above a rule's page.

    Attributes:
        patterns: Regular expressions, one a line. One of them must match the text of a message that
            may explain the failure. ``says`` can use their named groups.
        says: The cause, as one sentence; ``{where}`` is the rank and host.
        confidence: From 0 to 1, of a match by the patterns.
        unless: A pattern that excludes the rule if any such message contains it.
        kinds: Kinds of messages that are searched, separated by blanks; by default, all.
        frames: A pattern that one frame of the traceback must match, as ``FILE FUNCTION``.
        symptom: Whether other failures cause this one. Symptoms count only when no cause is known.
        computed: Whether the module of the same name has a ``match``. It is tried first.
        place: Position among rules of equal confidence; the lower comes first.
    """

    patterns: str = ""
    says: str = ""
    confidence: float = 0.9
    unless: str = ""
    kinds: str = ""
    frames: str = ""
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
    _, front, body = page.split("---\n", 2)
    try:
        head = FrontMatter(**_parse_front_matter(front))
    except (TypeError, ValueError) as error:
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


# without PyYAML, which a supervisor's host may lack; also several times as fast
_YAML_FIELD = re.compile(r"^(\w+): (?:\|\n((?:  .*\n)+)|(?:'(.*)'|(.+))$)", re.MULTILINE)


def _parse_front_matter(front: str) -> dict[str, Any]:
    """Parses the part of YAML that pages use.

    Values are ``|`` blocks, texts in quotation marks, numbers, ``true`` and ``false``.

    Raises:
        ValueError: A value is none of these.
    """
    return {
        name: textwrap.dedent(block) if block else json.loads(value) if value
        else quoted.replace("''", "'")
        for name, block, quoted, value in _YAML_FIELD.findall(front)
    }  # fmt: skip


def log_matcher(head: FrontMatter) -> Matcher:
    """Makes a matcher that searches the logs for the patterns of a page."""
    # a group name may occur in one alternative only, so each alternative numbers its own
    numbered = (
        re.sub(r"\(\?P<(\w+)>", rf"(?P<\1_{number}>", pattern)
        for number, pattern in enumerate(head.patterns.splitlines())
    )
    alternatives = "|".join(f"(?:{alternative})" for alternative in numbered)
    pattern = re.compile(alternatives, re.MULTILINE)
    excluded = re.compile(head.unless) if head.unless else None
    framed = re.compile(head.frames) if head.frames else None
    kinds = head.kinds.split()
    names = set(re.findall(r"\{(\w+)\}", head.says)) - {"where"}

    def match(evidence: Evidence) -> Match | None:
        if excluded is not None and evidence.contains(excluded):
            return None
        found = [(unit, _groups(match)) for unit, match in evidence.search(pattern)
                 if (not kinds or unit.kind in kinds) and _has_frame(unit, framed)]  # fmt: skip
        if not found:
            return None
        unit, groups = found[0]
        complete = (groups for _, groups in found if groups.keys() >= names)
        values = {**next(complete, groups), "where": unit.label}
        return match_unit(unit, fill_template(head.says, values), head.confidence)

    return match


def _groups(match: re.Match[str]) -> dict[str, str]:
    """The named groups that matched, each on one line and without the number of its alternative."""
    groups = {name.rsplit("_", 1)[0]: text for name, text in match.groupdict().items() if text}
    return {name: " ".join(text.split()) for name, text in groups.items()}


def _has_frame(unit: Unit, pattern: re.Pattern[str] | None) -> bool:
    frames = (f"{frame.file} {frame.function}" for frame in unit.frames)
    return pattern is None or any(map(pattern.search, frames))


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """Fills in the values; a missing one is left out with the words that lead to it."""
    for name in re.findall(r"\{(\w+)\}", template):
        if name not in values:
            lead = r"(?: to|, writing|:)? ?\(?"
            template = re.sub(rf"{lead}\{{{name}\}}\)?", "", template, count=1)
    return template.format_map(values)
