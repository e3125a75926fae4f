"""Recognises documents that quote messages and are no logs: manuals, mail, source code. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from paceline.explain.exit_reports import parse_exit
from paceline.explain.line_kinds import classify, level_of

MAX_LINES = 4000  # that are looked at
MAX_MAIL_HEADERS = 12  # lines above the text of a mail
MAX_SHORT = 80  # characters of a line that may be no sentence
_FENCE = re.compile(r" {0,3}(?:```|~~~)")
_HEADING = re.compile(r"#{1,6} \S")
_UNDERLINE = re.compile(r"^([=\-~^\"*+])\1{2,}$")
_DIRECTIVE = re.compile(r"\.\. (?:[\w-]{1,40}::|_[^:]{1,80}:)")
_LIST_ITEM = re.compile(r"\s{0,8}(?:[*+-]|\d{1,3}[.)]) \S")
_TABLE_ROW = re.compile(r"\s{0,3}\|.{0,2000}\|$")
_QUOTE = re.compile(r" {0,3}> ?")
_SPAN = re.compile(r"`[^`]{1,300}`|\[[^\]]{1,200}\]\([^)\s]{1,300}\)")
# How a line of a log begins, and no line of a text
_LOG_LINE = re.compile(
    r"\[(?![^\]]{1,200}\](?:\(|:))(?!!\[)|Traceback \(most recent|\d\d(?:\d\d)?[-/:]\d\d[-/:]\d"
    r"|(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Z]\w{1,60}(?:Error|Exception): |[IWEF]\d{4} "
    r"|(?:srun|slurmstepd|mpirun|pdsh@\S{1,253}): |[\w.-]{1,64}\s{0,9}\| "
)
# Headings of the forms in which users report a failure, and others that occur there
_REPORT_HEADING = re.compile(
    r"(?i:#{1,6} .{0,40}\b(?:describe the (?:bug|issue|problem)|bug (?:report|description)|bug$"
    r"|(?:steps )?to reproduce|reproduction"
    r"|(?:expected|actual|current|observed) (?:behaviou?r|result)|what happened"
    r"|your (?:current )?environment|system info)\b)"
)
_REPORT_DETAIL = re.compile(
    r"(?i:#{1,6} .{0,40}\b(?:environment|versions?|logs?|(?:error|console) (?:message|output)"
    r"|stack ?trace|traceback|additional (?:context|information)|system information)\b)"
)
_GREETING = re.compile(r"(?:Hi|Hello|Hey|Dear)\b.{0,60}[,!]$")
_MAIL_HEADER = re.compile(r"(?:From|To|Subject|Date|Cc|Message-ID): \S|From [0-9a-f]{40} ")
_DEFINITION = re.compile(
    r"(?:async )?def \w{1,100}\(|class \w{1,100}[(:]|import \w|from [\w.]{1,100} import "
)
_STATEMENT = re.compile(
    r"[ \t]|#|@\w|[\])}]|(?:if|elif|else|for|while|try|except|finally|with|async|await|return|raise"
    r"|assert|pass|del|global|print)\b|[A-Za-z_][\w., ]{0,100}(?:\[[^\]]{1,100}\])?"
    r"(?:: [\w\[\], .|]{1,100})? ?[-+*/|&]?= ?\S|[A-Za-z_][\w.]{0,100}\(|[\"'(\[]"
)
_STRING_MARK = re.compile(r'"""|' + "'''")


def is_document(lines: Sequence[str]) -> bool:
    """Whether lines are a text in Markdown or reStructuredText, a mail, or a module of Python."""
    sample = lines[:MAX_LINES]
    return _is_python(sample) or _is_mail(sample) or _is_markup(sample)


def is_report(lines: Sequence[str]) -> bool:
    """Whether a document has the headings of a form in which users report a failure."""
    headings = [line for line, is_code in _split_code(lines[:MAX_LINES])
                if not is_code and _HEADING.match(line)]  # fmt: skip
    num_report = sum(_REPORT_HEADING.match(line) is not None for line in headings)
    num_detail = sum(_REPORT_DETAIL.match(line) is not None for line in headings)
    return num_report > 0 and num_report + num_detail > 1


def code_blocks(lines: Sequence[str]) -> list[tuple[str, ...]]:
    """The fenced blocks of a document in Markdown, without their fences."""
    groups = itertools.groupby(_split_code(lines), key=lambda item: item[1])
    blocks = (tuple(line for line, _ in items) for is_code, items in groups if is_code)
    return [block[1:-1] for block in blocks if len(block) > 2]


def _split_code(lines: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yields each line, and whether it belongs to a fenced block."""
    fence = ""
    for line in lines:
        mark = _FENCE.match(line)
        is_code = bool(fence or mark)
        if mark:
            fence = "" if fence == mark[0].strip() else fence or mark[0].strip()
        yield line, is_code


def _is_markup(lines: Sequence[str]) -> bool:
    """Whether lines have headings and other markup, and none outside of quotations is of a log."""
    num_headings = num_marks = num_items = 0
    fence = ""
    previous = ""
    for line in lines:
        if mark := _FENCE.match(line):
            num_marks += not fence
            fence = "" if fence == mark[0].strip() else fence or mark[0].strip()
        elif fence or not line:
            pass
        elif (_HEADING.match(line) and not previous) or _is_underline(line, previous):
            num_headings += 1
        elif _DIRECTIVE.match(line) or _TABLE_ROW.match(line) or line.endswith("::"):
            num_marks += 1
        elif _LIST_ITEM.match(line) or line[0].isspace() or _QUOTE.match(line):
            num_marks += _SPAN.search(line) is not None
            num_items += _LIST_ITEM.match(line) is not None
        elif _is_of_log(line):
            return False
        else:
            num_marks += _SPAN.search(line) is not None
        previous = line
    has_form = num_marks > 0 or num_items > 2 or num_headings > 3
    return num_headings > 0 and has_form and not fence


def _is_underline(line: str, title: str) -> bool:
    return (
        bool(title)
        and len(line) == len(title)
        and title[0].isalnum()
        and _UNDERLINE.match(line) is not None
    )


def _is_of_log(line: str) -> bool:
    """Whether a line without markup is one that a program wrote."""
    if _LOG_LINE.match(line) or level_of(line):
        return True
    plain = _SPAN.sub("", line)
    if classify(plain)[0] in ("progress", "numeric", "library"):
        return len(plain) < MAX_SHORT and not plain.endswith((".", ":", ",", ";"))
    return parse_exit(plain) is not None


def _is_mail(lines: Sequence[str]) -> bool:
    """Whether lines begin as a mail does, and none of them is of a log."""
    written = [line for line in lines if line]
    is_greeted = any(map(_GREETING.match, written[:MAX_MAIL_HEADERS]))
    headers = [line for line in written[:MAX_MAIL_HEADERS] if _MAIL_HEADER.match(line)]
    return (is_greeted or len(headers) > 1) and not any(map(_LOG_LINE.match, written))


def _is_python(lines: Sequence[str]) -> bool:
    """Whether every line that is not indented is a statement, and some define or import."""
    num_definitions = 0
    quote = ""
    for line in lines:
        was_quoted = bool(quote)
        for mark in _STRING_MARK.findall(line):
            quote = "" if quote == mark else quote or mark
        if was_quoted or not line:
            continue
        if _DEFINITION.match(line):
            num_definitions += 1
        elif not _STATEMENT.match(line):
            return False
    return num_definitions > 1 and not quote
