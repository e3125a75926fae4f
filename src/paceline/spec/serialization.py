"""Converts a job and its hosts to JSON and back, for a supervisor on another machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Data, Entry, Environment, Input, Job, NodeRange
from paceline.spec.settings import Setting, Source

_KINDS = {
    kind.__name__: kind
    for kind in (Cluster, Data, Entry, Environment, Host, Input, Job, NodeRange, Setting)
}
_KIND = "is"  # the key that names a value's class; _TABLE for a mapping
_TABLE = "table"


def to_jsonable(value: Any) -> Any:
    """Converts a value to JSON types, including an environment's secrets."""
    if isinstance(value, Source):
        return {_KIND: "Source", "value": int(value)}
    if is_dataclass(value) and type(value).__name__ in _KINDS:
        values = {field.name: to_jsonable(getattr(value, field.name)) for field in fields(value)}
        return {_KIND: type(value).__name__, **values}
    if isinstance(value, Mapping):
        return {_KIND: _TABLE, "of": {str(name): to_jsonable(item) for name, item in value.items()}}
    if isinstance(value, (tuple, list)):
        return [to_jsonable(item) for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def from_jsonable(value: Any) -> Any:
    """Inverts :func:`to_jsonable`; sequences become tuples.

    Raises:
        ValueError: The value was not made by it.
    """
    if isinstance(value, list):
        return tuple(map(from_jsonable, value))
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind == _TABLE:
        return {name: from_jsonable(item) for name, item in value["of"].items()}
    if kind == "Source":
        return Source(value["value"])
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"{kind!r} is no kind of value")
    try:
        return _KINDS[kind](**{k: from_jsonable(v) for k, v in value.items() if k != _KIND})
    except TypeError as error:
        raise ValueError(str(error)) from None
