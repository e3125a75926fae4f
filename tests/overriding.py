"""Options that stand for others: Paceline refuses an option of one value that is given twice."""

from __future__ import annotations

from collections.abc import Sequence

_LONG = {"-H": "--hosts"}


def overridden(words: Sequence[str], by: Sequence[str]) -> list[str]:
    """``words`` with their values, without the options that ``by`` gives anew."""
    given = {_option(word) for word in by if word.startswith("-")}
    kept, drop = [], False
    for word in words:
        if word.startswith("-"):
            drop = _option(word) in given
        if not drop:
            kept.append(word)
    return [*kept, *by]


def _option(word: str) -> str:
    name = word.partition("=")[0]
    return _LONG.get(name, name)
