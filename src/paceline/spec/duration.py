"""Lengths of time as people type them."""

from __future__ import annotations

import re

_PART = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])", re.ASCII)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds_in(said: str | float) -> float:
    """Seconds in ``90``, ``10m`` or ``1h30m``. ValueError for what is no length of time."""
    parts = _PART.findall(said) if isinstance(said, str) else []
    if parts and "".join(map("".join, parts)) == said:
        return float(sum(float(number) * _UNITS[unit] for number, unit in parts))
    seconds = float(said)
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"not a length of time: {said!r}")
    return seconds
