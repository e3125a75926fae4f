"""Joins command lines, as a second --hosts or --data would be refused."""

from __future__ import annotations

from collections.abc import Sequence

_ONCE = {"-H": "--hosts", "--hosts": "--hosts", "--data": "--data"}


def overridden(words: Sequence[str], by: Sequence[str]) -> list[str]:
    """Joins ``words`` and ``by``; hosts and data in ``by`` replace those in ``words``."""
    given = {_ONCE.get(word.partition("=")[0]) for word in by} - {None}
    kept, drop = [], False
    for word in words:
        if word.startswith("-"):
            drop = _ONCE.get(word.partition("=")[0]) in given
        if not drop:
            kept.append(word)
    return [*kept, *by]
