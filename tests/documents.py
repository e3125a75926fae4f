"""The commands that the documentation shows."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(paceline [^`]+)`")


@dataclass(frozen=True)
class Shown:
    """One command as a page shows it.

    Attributes:
        page: File name.
        words: The command, split as a shell does, without its comment.
    """

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def in_blocks(page: Path) -> list[Shown]:
    """Commands in fenced blocks of shell, whole lines with their continuations."""
    found = []
    for language, text in _FENCE.findall(page.read_text(encoding="utf-8")):
        if language in ("sh", "console", "bash", ""):
            for line in text.replace("\\\n", " ").splitlines():
                line = line.strip().removeprefix("$ ")
                if line.startswith("paceline ") and "…" not in line:
                    found.append(Shown(page.name, tuple(shlex.split(line, comments=True))))
    return found


def inline(page: Path) -> list[Shown]:
    """Commands in running text."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return [Shown(page.name, tuple(_split(command))) for command in _INLINE.findall(text)]


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # an apostrophe in a placeholder
        return command.split()
