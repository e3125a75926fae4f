"""Schemas that validate JSON values from the wire and from files of a run.

A schema is a function of a value and of its path (for messages); it raises :class:`InvalidValue`.
The wire refuses an invalid message; readers of files treat an invalid value as absent
(:func:`matches`).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from typing import Any

Schema = Callable[[Any, str], None]

MAX_TEXT, MAX_LONG_TEXT = 4096, 1 << 20  # characters
MAX_ITEMS = 1 << 18  # of a list or table
MAX_INTEGER = 1 << 53
MAX_DEPTH = 12  # of nested free values
MAX_DIGITS = 20  # of an integer, as in a frame


class InvalidValue(Exception):
    """A value does not match its schema; the message says why."""


def describe_value(value: Any) -> str:
    """A value as messages quote it: short, or only its type."""
    return f"{value!r:.60}" if isinstance(value, (str, int, float, bool)) else type(value).__name__


def reject(path: str, value: Any, expected: str) -> None:
    raise InvalidValue(f"{path} is {describe_value(value)} instead of {expected}")


def text(max_length: int = MAX_TEXT) -> Schema:
    def check(value: Any, path: str) -> None:
        if not isinstance(value, str):
            reject(path, value, "text")
        if len(value) > max_length:
            raise InvalidValue(f"{path} has {len(value)} characters, more than {max_length}")

    return check


def regex(pattern: str, name: str) -> Schema:
    fullmatch = re.compile(pattern).fullmatch

    def check(value: Any, path: str) -> None:
        if not isinstance(value, str) or len(value) > MAX_TEXT or not fullmatch(value):
            reject(path, value, name)

    return check


def integer(low: int = 0, high: int = MAX_INTEGER) -> Schema:
    def check(value: Any, path: str) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            reject(path, value, f"a whole number from {low} to {high}")

    return check


def number(value: Any, path: str) -> None:
    """A finite number of plausible size for clocks and rates."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        reject(path, value, "a number")
    if not abs(value) <= 1e18:  # also NaN; isfinite raises for huge integers
        reject(path, value, "a finite number")


def boolean(value: Any, path: str) -> None:
    if not isinstance(value, bool):
        reject(path, value, "true or false")


_ADDRESS_TEXT = re.compile(r"[0-9A-Fa-f:.]{2,45}(%[^\s!$`;&|<>()'\"\\]{1,32})?")


def address(value: Any, path: str) -> None:
    """An IP address. Its zone is the name of an interface: ``ipaddress`` allows any text there."""
    try:
        is_text = isinstance(value, str) and _ADDRESS_TEXT.fullmatch(value)
        ipaddress.ip_address(value if is_text else "")
    except ValueError:
        reject(path, value, "an IP address")


def choice(*values: Any) -> Schema:
    def check(value: Any, path: str) -> None:
        if not isinstance(value, (str, int)) or value not in values:
            reject(path, value, " or ".join(map(repr, values)))

    return check


def optional(schema: Schema) -> Schema:
    def check(value: Any, path: str) -> None:
        if value is not None:
            schema(value, path)

    return check


def list_of(schema: Schema, max_items: int = MAX_ITEMS) -> Schema:
    def check(value: Any, path: str) -> None:
        if not isinstance(value, list):
            reject(path, value, "a list")
        if len(value) > max_items:
            raise InvalidValue(f"{path} has {len(value)} entries, more than {max_items}")
        for index, item in enumerate(value):
            schema(item, f"{path}[{index}]")

    return check


def tuple_of(*schemas: Schema) -> Schema:
    def check(value: Any, path: str) -> None:
        if not isinstance(value, list) or len(value) != len(schemas):
            reject(path, value, f"a list of {len(schemas)}")
        for index, schema in enumerate(schemas):
            schema(value[index], f"{path}[{index}]")

    return check


def dict_of(schema: Schema, key: Schema | None = None, max_items: int = MAX_ITEMS) -> Schema:
    check_key = key or text()

    def check(value: Any, path: str) -> None:
        if not isinstance(value, dict) or len(value) > max_items:
            reject(path, value, f"a table of at most {max_items}")
        for name, item in value.items():
            check_key(name, f"a name in {path}")
            schema(item, f"{path}.{name:.40}")

    return check


def any_json(value: Any, path: str, depth: int = MAX_DEPTH) -> None:
    """Any JSON value with bounded nesting and integers."""
    if depth == 0:
        raise InvalidValue(f"{path} is nested too deeply")
    if isinstance(value, dict):
        for name, item in value.items():
            any_json(item, f"{path}.{name:.40}", depth - 1)
    elif isinstance(value, list):
        for item in value:
            any_json(item, path, depth - 1)
    elif isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
        reject(path, value, "a number of usual size")


def memory_bytes(value: Any, limit: int) -> int:
    """Estimates the memory in bytes of a JSON value, which may be twenty times its text.

    Stops counting above ``limit``.
    """
    total, waiting = 0, [value]
    while waiting and total <= limit:
        item = waiting.pop()
        total += 64 + (len(item) if isinstance(item, str) else 0)
        if isinstance(item, dict):
            waiting += [*item, *item.values()]
        elif isinstance(item, list):
            waiting += item
    return total


def record(optional: Mapping[str, Schema] | None = None, **required: Schema) -> Schema:
    """A table with these fields; others are only checked by :func:`any_json`."""
    schemas = {**(optional or {}), **required}

    def check(value: Any, path: str) -> None:
        if not isinstance(value, dict):
            reject(path, value, "a table")
        for name in required:
            if name not in value:
                raise InvalidValue(f"{path} lacks {name}")
        for name, item in value.items():
            schemas.get(name, any_json)(item, f"{path}.{name:.40}")

    return check


def matches(schema: Schema, value: Any) -> bool:
    """Whether a value matches a schema."""
    try:
        schema(value, "")
    except InvalidValue:
        return False
    return True


# --- common schemas -------------------------------------------------------------------------------

SIZE = integer()
RANK = integer(0, 1 << 24)
PROCESS = integer(0, 1 << 31)
SHORT_TEXT = text(256)
