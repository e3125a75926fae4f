"""Commands are lists; this is the one place where a list becomes text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


def shell_text(argv: Sequence[str]) -> str:
    """The command as a POSIX shell (and csh, and fish) reads it back, word for word."""
    return shlex.join(argv)


def for_people(argv: Sequence[str], limit: int = 200) -> str:
    """The command in one line for a message, shortened in the middle of nowhere."""
    text = shell_text(argv)
    return text if len(text) <= limit else text[: limit - 1] + "…"
