"""Parses durations as people type them."""

from __future__ import annotations

import re

_PART = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])", re.ASCII)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration(text: str | float) -> float:
    """Seconds in ``90``, ``10m`` or ``1h30m``; raises ValueError for anything else."""
    parts = _PART.findall(text) if isinstance(text, str) else []
    if parts and "".join(map("".join, parts)) == text:
        return float(sum(float(number) * _UNITS[unit] for number, unit in parts))
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"not a length of time: {text!r}")
    return seconds
