"""A job and its hosts as JSON, and back: for a launcher that runs on another machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Data, Entry, Environment, Input, Job
from paceline.spec.nodes import NodeRange
from paceline.spec.settings import Setting, Source

_KINDS = {
    kind.__name__: kind
    for kind in (Cluster, Data, Entry, Environment, Host, Input, Job, NodeRange, Setting)
}
_KIND = "is"  # the key that names a value's kind; of a plain table it is _TABLE
_TABLE = "table"


def to_plain(value: Any) -> Any:
    """The value in terms of JSON: secrets of an environment included."""
    if isinstance(value, Source):
        return {_KIND: "Source", "value": int(value)}
    if is_dataclass(value) and type(value).__name__ in _KINDS:
        of = {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
        return {_KIND: type(value).__name__, **of}
    if isinstance(value, Mapping):
        return {_KIND: _TABLE, "of": {str(name): to_plain(one) for name, one in value.items()}}
    if isinstance(value, (tuple, list)):
        return [to_plain(one) for one in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def from_plain(said: Any) -> Any:
    """What :func:`to_plain` was given; sequences come back as tuples.

    ValueError for anything that it does not make.
    """
    if isinstance(said, list):
        return tuple(from_plain(one) for one in said)
    if not isinstance(said, dict):
        return said
    about = {name: from_plain(one) for name, one in said.items() if name not in (_KIND, "of")}
    kind = said.get(_KIND)
    if kind == _TABLE:
        return {name: from_plain(one) for name, one in said["of"].items()}
    if kind == "Source":
        return Source(said["value"])
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"{kind!r} is no kind of value")
    try:
        return _KINDS[kind](**about)
    except TypeError as error:
        raise ValueError(str(error)) from None
