"""Finds the commands in the documentation."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(paceline [^`]+)`")
# placeholders: capitals, or dots
_PLACEHOLDER = re.compile(r"…|\b[A-Z]{3,}\b|\[")


@dataclass(frozen=True)
class Shown:
    """One command on a page.

    Attributes:
        page: File name.
        text: The command line, with continuation lines joined.
        output: The lines below it in a ``console`` block, otherwise empty.
        inline: Whether it is in running text or in a table.
    """

    page: str
    text: str
    output: tuple[str, ...] = ()
    inline: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the command as a shell splits them, without the comment."""
        try:
            return tuple(shlex.split(self.text, comments=True))
        except ValueError:  # an apostrophe in a placeholder
            return tuple(self.text.split())

    @property
    def ours(self) -> bool:
        """Whether it is a ``paceline`` command without a pipe."""
        return self.words[:1] == ("paceline",) and "|" not in self.words

    @property
    def template(self) -> bool:
        """Whether it has a placeholder."""
        return _PLACEHOLDER.search(self.text.partition(" #")[0]) is not None

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def in_blocks(page: Path) -> list[Shown]:
    """Returns the commands in shell blocks: all lines of ``sh``, otherwise lines with a prompt."""
    found = []
    for language, text in _FENCE.findall(page.read_text(encoding="utf-8")):
        lines = text.replace("\\\n", " ").splitlines()
        if language in ("sh", "bash"):
            found += [Shown(page.name, line.strip()) for line in lines if line.strip("# ")]
        elif language in ("console", ""):
            found += _prompts(page.name, lines)
    return [shown for shown in found if not shown.text.startswith("#")]


def _prompts(page: str, lines: list[str]) -> Iterator[Shown]:
    at = [number for number, line in enumerate(lines) if line.startswith("$ ")]
    for begin, end in itertools.pairwise([*at, len(lines)]):
        yield Shown(page, lines[begin][2:], tuple(lines[begin + 1 : end]))


def inline(page: Path) -> list[Shown]:
    """Returns the commands in running text."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    commands = [" ".join(command.split()) for command in _INLINE.findall(text)]
    return [Shown(page.name, command, inline=True) for command in commands]
