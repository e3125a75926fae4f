"""Renders help texts: wrapped between words, with correct plurals."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 80
MAX_WIDTH = 100
_COLUMN = 26  # where texts begin; a longer left side gets its own line


@dataclass(frozen=True, slots=True)
class Row:
    """An option, an argument or a verb.

    Attributes:
        term: The option as typed, with its placeholder.
        default: Its default for people; empty for none.
        choices: Its possible values, if they are few.
    """

    term: str
    text: str
    default: str = ""
    choices: tuple[str, ...] = ()
    required: bool = False

    def description(self) -> str:
        """The right side: text, values, default, each once."""
        parts = [self.text.strip()]
        if self.choices:
            parts.append(f"One of: {', '.join(self.choices)}")
        if self.default and "default" not in self.text.lower():
            parts.append(f"Default: {self.default}")
        if self.required:
            parts.append("Required")
        return " ".join(part if part.endswith((".", ")", "…")) else f"{part}." for part in parts)


Section = tuple[str, Sequence[Row]]


def render(usage: str, summary: str, sections: Sequence[Section], epilog: Sequence[str] = (),
           width: int = WIDTH) -> str:  # fmt: skip
    """Renders the help of a command.

    Args:
        usage: The command line, without the word usage.
        summary: Paragraphs, separated by empty lines.
        sections: Titles with their rows; empty ones are left out.
        epilog: Paragraphs at the end.
        width: Of the terminal, in characters.
    """
    width = min(width, MAX_WIDTH)
    blocks = [_wrap(f"Usage: {usage}", width, "       ")]
    blocks += [_paragraph(text, width) for text in summary.strip().split("\n\n") if text.strip()]
    for title, rows in sections:
        if rows:
            lines = [line for row in rows for line in _row(row, width)]
            blocks.append("\n".join([f"{title}:", *lines]))
    blocks += [_wrap(text, width) for text in epilog]
    return "\n\n".join(blocks)


def _paragraph(text: str, width: int) -> str:
    if text.lstrip().startswith("\b"):  # click's mark for lines that stay as they are
        return "\n".join(f"  {line}" for line in text.strip().lstrip("\b").strip("\n").splitlines())
    return _wrap(text, width, "  ", "  ")


def _wrap(text: str, width: int, indent: str = "", first: str = "") -> str:
    """Wraps between words; code between backticks stays on one line."""
    joined = re.sub(
        r"`[^`]{1,40}`", lambda code: code[0].replace(" ", "\0"), " ".join(text.split())
    )
    lines = textwrap.wrap(
        joined, width, initial_indent=first, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return "\n".join(lines).replace("\0", " ")


def _row(row: Row, width: int) -> list[str]:
    term, column = f"  {row.term}", " " * _COLUMN
    texts = _wrap(row.description(), width, column, column).splitlines()
    if len(term) > _COLUMN - 2:
        return [term, *texts]
    return [f"{term:<{_COLUMN}}{texts[0].lstrip()}", *texts[1:]] if texts else [term]
