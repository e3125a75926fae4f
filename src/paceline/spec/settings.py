"""Settings that remember where they came from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

T = TypeVar("T")

TOML_NAME = "paceline.toml"  # settings file in the current folder


class Source(IntEnum):
    """Where a value came from; a higher source wins over a lower one."""

    DEFAULT = 0
    FOUND = 1  # detected on the machine or from the scheduler
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
        detail: The file, variable or rule; may be empty.
    """

    value: T
    source: Source = Source.DEFAULT
    detail: str = ""

    def describe(self) -> str:
        """``value (source: detail)`` for people."""
        label = self.source.label
        return f"{self.value} ({f'{label}: {self.detail}' if self.detail else label})"
