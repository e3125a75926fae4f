"""Turns commands, which are lists, into shell text; nothing else does."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


def shell_text(argv: Sequence[str]) -> str:
    """Quotes a command for POSIX shells, csh and fish."""
    return shlex.join(argv)


def bash_line(argv: Sequence[str]) -> str:
    """Quotes a command for bash on a single line: line breaks are escaped."""
    return " ".join(map(_quote_single_line, argv))


def _quote_single_line(arg: str) -> str:
    if not {"\n", "\r"} & set(arg):
        return shlex.quote(arg)
    escaped = arg.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + escaped.replace("\n", "\\n").replace("\r", "\\r") + "'"
