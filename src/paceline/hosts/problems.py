"""Builds the errors: which source, which line, what stands there, what was expected."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from paceline.hosts.dialect import LIST_LABEL
from paceline.spec.errors import HostsError

_SHOWN = 120  # characters of a line worth showing


def bad_line(label: str, number: int, line: str, expected: str) -> HostsError:
    """The error for one line of a description; ``number`` counts from 1."""
    where = f"{label}, line {number}" if label != LIST_LABEL else label
    return HostsError(f"{where}: cannot be read", found=shown(line), remedy=f"expected {expected}")


def shown(line: str) -> str:
    """The line with control characters made visible and cut to a readable length."""
    text = line.strip()
    visible = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return visible if len(visible) <= _SHOWN else visible[:_SHOWN] + "…"


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The most similar of the known words, or an empty string."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``known: a, b; did you mean `a`?`` for an unknown word."""
    names = list(known)
    guess = nearest(word, names)
    listed = "one of " + ", ".join(names)
    return f"{listed}; did you mean `{guess}`?" if guess else listed
