"""Commands are lists; this is the one place where a list becomes text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


def shell_text(argv: Sequence[str]) -> str:
    """The command as a POSIX shell (and csh, and fish) reads it back, word for word."""
    return shlex.join(argv)


def bash_line(argv: Sequence[str]) -> str:
    """The same for bash, on one line: no line break in a word begins a line of a script."""
    return " ".join(_without_breaks(word) for word in argv)


def _without_breaks(word: str) -> str:
    if not {"\n", "\r"} & set(word):
        return shlex.quote(word)
    plain = word.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + plain.replace("\n", "\\n").replace("\r", "\\r") + "'"
