"""Shapes of values from outside: what a field may hold, held against whatever came.

A shape is a function of a value and of its place in words; it raises :class:`Untrue`. The wire
refuses what does not fit; who reads a file of a run takes it for absent (:func:`fits`).
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

Shape = Callable[[Any, str], None]

TEXT, LONG_TEXT = 4096, 1 << 20  # characters
MANY = 1 << 18  # entries of a list
LARGEST = 1 << 53
DEPTH = 12  # of what is passed on as it came
MOST_DIGITS = 20  # of a whole number, as in a frame


class Untrue(Exception):
    """A value has not the shape that it should have; the text says what is wrong."""


def shown(value: Any) -> str:
    """A value in the text of :class:`Untrue`."""
    return f"{value!r:.60}" if isinstance(value, (str, int, float, bool)) else type(value).__name__


def refuse(where: str, value: Any, wanted: str) -> None:
    raise Untrue(f"{where} is {shown(value)} instead of {wanted}")


def text(most: int = TEXT) -> Shape:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, str):
            refuse(where, value, "text")
        if len(value) > most:
            raise Untrue(f"{where} has {len(value)} characters, more than {most}")

    return check


def form(pattern: str, what: str) -> Shape:
    matches = re.compile(pattern).fullmatch

    def check(value: Any, where: str) -> None:
        if not isinstance(value, str) or len(value) > TEXT or not matches(value):
            refuse(where, value, what)

    return check


def whole(low: int = 0, high: int = LARGEST) -> Shape:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            refuse(where, value, f"a whole number from {low} to {high}")

    return check


def number(value: Any, where: str) -> None:
    """A finite number, of a size that clocks and rates have."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        refuse(where, value, "a number")
    if not math.isfinite(value) or abs(value) > 1e18:
        refuse(where, value, "a finite number")


def flag(value: Any, where: str) -> None:
    if not isinstance(value, bool):
        refuse(where, value, "true or false")


def nothing(value: Any, where: str) -> None:
    if value is not None:
        refuse(where, value, "null")


def address(value: Any, where: str) -> None:
    """An IP address."""
    try:
        ipaddress.ip_address(value if isinstance(value, str) else "")
    except ValueError:
        refuse(where, value, "an IP address")


def one_of(*values: Any) -> Shape:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, (str, int)) or value not in values:
            refuse(where, value, " or ".join(map(repr, values)))

    return check


def maybe(shape: Shape) -> Shape:
    def check(value: Any, where: str) -> None:
        if value is not None:
            shape(value, where)

    return check


def each(shape: Shape, most: int = MANY) -> Shape:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, list):
            refuse(where, value, "a list")
        if len(value) > most:
            raise Untrue(f"{where} has {len(value)} entries, more than {most}")
        for at, one in enumerate(value):
            shape(one, f"{where}[{at}]")

    return check


def row(*shapes: Shape) -> Shape:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, list) or len(value) != len(shapes):
            refuse(where, value, f"a list of {len(shapes)}")
        for at, shape in enumerate(shapes):
            shape(value[at], f"{where}[{at}]")

    return check


def table(shape: Shape, key: Shape | None = None, most: int = MANY) -> Shape:
    check_key = key or text()

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict) or len(value) > most:
            refuse(where, value, f"a table of at most {most}")
        for name, one in value.items():
            check_key(name, f"a name in {where}")
            shape(one, f"{where}.{name:.40}")

    return check


def free(value: Any, where: str, depth: int = DEPTH) -> None:
    """Anything that is not nested too deeply and has no absurd numbers."""
    if depth == 0:
        raise Untrue(f"{where} is nested too deeply")
    if isinstance(value, dict):
        for name, one in value.items():
            free(one, f"{where}.{name:.40}", depth - 1)
    elif isinstance(value, list):
        for one in value:
            free(one, where, depth - 1)
    elif isinstance(value, int) and abs(value) >= 10**MOST_DIGITS:
        refuse(where, value, "a number of usual size")


def record(optional: Mapping[str, Shape] | None = None, **required: Shape) -> Shape:
    """A table with these names; what else it holds is only bounded."""
    shapes = {**(optional or {}), **required}

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            refuse(where, value, "a table")
        for name in required:
            if name not in value:
                raise Untrue(f"{where} lacks {name}")
        for name, one in value.items():
            shapes.get(name, free)(one, f"{where}.{name:.40}")

    return check


def fits(shape: Shape, value: Any) -> bool:
    """Whether a value has the shape."""
    try:
        shape(value, "")
    except Untrue:
        return False
    return True


# --- words that many shapes are made of -----------------------------------------------------------

SIZE = whole()
RANK = whole(0, 1 << 24)
PROCESS = whole(0, 1 << 31)
SMALL = text(256)
