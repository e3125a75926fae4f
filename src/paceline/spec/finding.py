"""The result of a check."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Outcome = Literal["pass", "warn", "fail", "unknown"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check about hosts, with its remedy.

    Attributes:
        outcome: ``unknown`` means that the check could not be made.
        message: What was found, in one sentence.
        remedy: What to type or change; required when the outcome is ``fail``.
    """

    check: str
    outcome: Outcome
    hosts: tuple[str, ...]
    message: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.outcome == "fail" and not self.remedy:
            raise ValueError(f"check {self.check} fails without a remedy")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
