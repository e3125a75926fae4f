"""Lengths of time and rates as people read them: the same everywhere that one is told. Pure."""

from __future__ import annotations

import itertools

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def lasting(seconds: float) -> str:
    """``8.23 ms``, ``0.183 s``, ``3.4 s``, ``42 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``."""
    if seconds < 0.09995:
        return f"{seconds * 1e3:.3g} ms" if seconds >= 5e-6 else "0 s"
    if seconds < 99.5:
        return f"{seconds:.{3 if seconds < 0.9995 else 2}g} s"
    for (size, name), (part, lesser) in itertools.pairwise(_UNITS):
        whole, rest = divmod(round(seconds / part), size // part)
        if whole >= (2 if name == "d" else 1):
            return f"{whole} {name} {rest} {lesser}" if rest else f"{whole} {name}"
    raise AssertionError("not reached")


def roughly(seconds: float) -> str:
    """``5 s``, ``12 min``, ``3 h``, ``9 d``: where there is little room."""
    whole = max(0.0, seconds)
    size, name = next((one for one in _UNITS if whole >= one[0]), _UNITS[-1])
    return f"{whole // size:.0f} {name}"


def bit_rate(rate: float) -> str:
    """Bits a second: ``940 Mbit/s``, ``9.4 Gbit/s``."""
    for size, name in ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if rate >= 0.9995 * size:
            return f"{rate / size:.3g} {name}"
    return f"{rate:.0f} bit/s"


def which_epoch(epoch: int, epochs: int | None = None) -> str:
    """``epoch 1/5`` of the first one: people count from 1, scripts and records from 0.

    Args:
        epoch: As scripts count them. Behind the last one it is that.
        epochs: How many there are to be, if that is known.
    """
    return f"epoch {min(epoch + 1, epochs)}/{epochs}" if epochs else f"epoch {epoch + 1}"
