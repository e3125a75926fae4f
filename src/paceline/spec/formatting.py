"""Formats values for people, commands for shells, and parses durations."""

from __future__ import annotations

import itertools
import re
import shlex
import time
from collections.abc import Iterable, Sequence

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_SECONDS = {unit[0]: size for size, unit in _UNITS}
_DURATION_PART = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])", re.ASCII)


def format_duration(seconds: float) -> str:
    """``8.23 ms``, ``0.183 s``, ``3.4 s``, ``42 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``."""
    if seconds < 0.09995:
        return f"{seconds * 1e3:.3g} ms" if seconds >= 5e-6 else "0 s"
    if seconds < 99.5:
        return f"{seconds:.{3 if seconds < 0.9995 else 2}g} s"
    for (size, unit), (small_size, small_unit) in itertools.pairwise(_UNITS):
        number, remainder = divmod(round(seconds / small_size), size // small_size)
        if number >= (2 if unit == "d" else 1):
            small = f" {remainder} {small_unit}" if remainder else ""
            return f"{number} {unit}{small}"
    raise AssertionError("not reached")


def format_duration_short(seconds: float) -> str:
    """``5 s``, ``12 min``, ``3 h``, ``9 d``."""
    positive = max(0.0, seconds)
    size, unit = next((entry for entry in _UNITS if positive >= entry[0]), _UNITS[-1])
    return f"{positive // size:.0f} {unit}"


DATE_TIME = "%Y-%m-%d %H:%M:%S"


def format_time(seconds: float, pattern: str = "%H:%M:%S", *, utc: bool = False) -> str:
    """The local time of day, or what a ``strftime`` pattern says; ``?`` for impossible times.

    Args:
        seconds: Since 1970, perhaps from a file or a host that is not trusted.
    """
    try:
        return time.strftime(pattern, (time.gmtime if utc else time.localtime)(seconds))
    except (OSError, OverflowError, ValueError):
        return "?"


def format_bit_rate(rate: float) -> str:
    """Bits a second: ``940 Mbit/s``, ``9.4 Gbit/s``."""
    for size, name in ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if rate >= 0.9995 * size:
            return f"{rate / size:.3g} {name}"
    return f"{rate:.0f} bit/s"


def parse_bit_rate(text: str | float) -> float:
    """Returns the bits a second of ``100mbit`` or ``2.5gbit``; ValueError for anything else."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([kmg])bit(?:/s)?", str(text).strip().lower())
    if match is None or not float(match[1]):
        raise ValueError(f"{text!r} is not a rate: type 100mbit or 1gbit")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def format_size(count: int) -> str:
    """Bytes: ``512 MiB``, ``1.5 GiB``."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def format_epoch(epoch: int, epochs: int | None = None) -> str:
    """``epoch 1/5`` for epoch 0: people count from 1, scripts and records from 0.

    Args:
        epoch: Counted from 0; a number past the end is shown as the last epoch.
        epochs: Epochs of the whole training, if known.
    """
    return f"epoch {min(epoch + 1, epochs)}/{epochs}" if epochs else f"epoch {epoch + 1}"


def pluralize(number: int, noun: str) -> str:
    """``1 host``, ``1,024 hosts``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def span(seconds: float) -> str:
    """``10 minutes``, ``1 hour``, ``90 s``: a length of time in the largest unit that fits."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length and seconds % length == 0:
            return pluralize(int(seconds // length), unit)
    return f"{seconds:g} s"


def closest_match(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """The shortest name that starts with ``name``, else the most similar; empty if none is."""
    import difflib  # needed only after a mistake

    candidates = list(names)
    completions = [other for other in candidates if len(name) >= 3 and other.startswith(name)]
    if completions:
        return min(completions, key=len)
    matches = difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff)
    return matches[0] if matches else ""


def suggest(name: str, choices: Iterable[str]) -> str:
    """``one of a, b; did you mean `a`?`` for an unknown name."""
    names = list(choices)
    guess = closest_match(name, names)
    listed = "one of " + ", ".join(names)
    return f"{listed}; did you mean `{guess}`?" if guess else listed


def parse_duration(text: str | float) -> float:
    """Seconds in ``90``, ``10m`` or ``1h30m``; raises ValueError for anything else."""
    parts = _DURATION_PART.findall(text) if isinstance(text, str) else []
    if parts and "".join(map("".join, parts)) == text:
        return float(sum(float(number) * _SECONDS[unit] for number, unit in parts))
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"not a length of time: {text!r}")
    return seconds


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
