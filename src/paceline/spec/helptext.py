"""The one form of every help, and other texts: wrapped between words, with right plurals. Pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WIDTH = 80
MOST_WIDTH = 100
_COLUMN = 26  # where texts begin; a longer left side takes a line of its own


@dataclass(frozen=True, slots=True)
class Row:
    """An option, an argument or a verb.

    Attributes:
        left: As typed, with what stands for its value.
        text: What it does.
        default: Its default as people say it; empty for none.
        choices: The values that it may have, where they are few.
        required: It has to be given.
    """

    left: str
    text: str
    default: str = ""
    choices: tuple[str, ...] = ()
    required: bool = False

    def about(self) -> str:
        """The whole right side: text, values, default, each once."""
        parts = [self.text.strip()]
        if self.choices:
            parts.append(f"One of: {', '.join(self.choices)}")
        if self.default and "default" not in self.text.lower():
            parts.append(f"Default: {self.default}")
        if self.required:
            parts.append("Required")
        return " ".join(part if part.endswith((".", ")", "…")) else f"{part}." for part in parts)


def counted(number: int, noun: str) -> str:
    """``1 host``, ``2 hosts``."""
    return f"{number} {noun}{'s' * (number != 1)}"


Section = tuple[str, Sequence[Row]]


def render(usage: str, about: str, sections: Sequence[Section], after: Sequence[str] = (),
           width: int = WIDTH) -> str:  # fmt: skip
    """A whole help.

    Args:
        usage: What is typed, without the word usage.
        about: Paragraphs, an empty line between two.
        sections: Titles with their rows; empty ones are left out.
        after: Paragraphs at the end.
        width: Of the terminal, in characters.
    """
    width = min(width, MOST_WIDTH)
    blocks = [_wrapped(f"Usage: {usage}", width, "       ")]
    blocks += [_paragraph(text, width) for text in about.strip().split("\n\n") if text.strip()]
    for title, rows in sections:
        if rows:
            lines = [line for row in rows for line in _row(row, width)]
            blocks.append("\n".join([f"{title}:", *lines]))
    blocks += [_wrapped(text, width) for text in after]
    return "\n\n".join(blocks)


def _paragraph(text: str, width: int) -> str:
    if text.lstrip().startswith("\b"):  # click's mark for lines that stay as they are
        return "\n".join(f"  {line}" for line in text.strip().lstrip("\b").strip("\n").splitlines())
    return _wrapped(text, width, "  ", "  ")


def _wrapped(text: str, width: int, later: str = "", first: str = "") -> str:
    """Wraps between words; what is typed, between backticks, stays on one line."""
    whole = re.sub(r"`[^`]{1,40}`", lambda code: code[0].replace(" ", "\0"), " ".join(text.split()))
    lines = textwrap.wrap(
        whole, width, initial_indent=first, subsequent_indent=later,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return "\n".join(lines).replace("\0", " ")


def _row(row: Row, width: int) -> list[str]:
    left, column = f"  {row.left}", " " * _COLUMN
    texts = _wrapped(row.about(), width, column, column).splitlines()
    if len(left) > _COLUMN - 2:
        return [left, *texts]
    return [f"{left:<{_COLUMN}}{texts[0].lstrip()}", *texts[1:]] if texts else [left]


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The most similar of the known words, or an empty string."""
    import difflib  # here: it takes a mistake

    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``known: a, b; did you mean `a`?`` for an unknown word."""
    names = list(known)
    guess = nearest(word, names)
    listed = "one of " + ", ".join(names)
    return f"{listed}; did you mean `{guess}`?" if guess else listed


def span(seconds: float) -> str:
    """``10 minutes``, ``1 hour``, ``90 s``: a length of time in the largest unit that fits."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length and seconds % length == 0:
            return counted(int(seconds // length), unit)
    return f"{seconds:g} s"
