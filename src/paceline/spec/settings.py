"""Settings that remember where they came from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

T = TypeVar("T")

TOML_NAME = "paceline.toml"  # the file of settings, in the folder that one starts from


class Source(IntEnum):
    """Where a value came from; a higher source wins over a lower one."""

    DEFAULT = 0
    FOUND = 1  # found out from the machine or the scheduler
    FILE = 2  # paceline.toml
    ENVIRONMENT = 3
    COMMAND_LINE = 4
    ARGUMENT = 5  # of a call from Python

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class Setting(Generic[T]):
    """A value and its source.

    Attributes:
        value: The effective value.
        source: Which kind of source won.
        detail: Which file, variable or rule exactly; may be empty.
    """

    value: T
    source: Source = Source.DEFAULT
    detail: str = ""

    def describe(self) -> str:
        """``value (source: detail)`` for people."""
        where = f"{self.source.label}: {self.detail}" if self.detail else self.source.label
        return f"{self.value} ({where})"
