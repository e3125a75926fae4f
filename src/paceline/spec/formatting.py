"""Formats durations, rates and epochs for people, alike everywhere."""

from __future__ import annotations

import itertools

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


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


def format_bit_rate(rate: float) -> str:
    """Bits a second: ``940 Mbit/s``, ``9.4 Gbit/s``."""
    for size, name in ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if rate >= 0.9995 * size:
            return f"{rate / size:.3g} {name}"
    return f"{rate:.0f} bit/s"


def format_epoch(epoch: int, epochs: int | None = None) -> str:
    """``epoch 1/5`` for epoch 0: people count from 1, scripts and records from 0.

    Args:
        epoch: Counted from 0; a number past the end is shown as the last epoch.
        epochs: Epochs of the whole training, if known.
    """
    return f"epoch {min(epoch + 1, epochs)}/{epochs}" if epochs else f"epoch {epoch + 1}"
