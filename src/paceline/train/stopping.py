"""Stopping early when a metric no longer gets better."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Best:
    """The best value so far.

    Every rank gives it the same reduced values, so every rank decides the same.

    Attributes:
        higher: True when more is better.
        patience: Evaluations without a better value before it says stop; 0 never does.
        value: The best value; ``None`` before the first.
        step: Global step of the best value.
        stale: Evaluations since then.
    """

    higher: bool = True
    patience: int = 0
    value: float | None = None
    step: int = 0
    stale: int = 0

    def update(self, value: float, step: int) -> bool:
        """Takes the value of an evaluation; True when it is the best so far."""
        if step == self.step and self.value is not None:  # evaluated again after a resume
            return value == self.value
        better = self.value is None or (value > self.value if self.higher else value < self.value)
        if better:
            self.value, self.step, self.stale = value, step, 0
        else:
            self.stale += 1
        return better

    @property
    def stop(self) -> bool:
        """True when patience has run out."""
        return 0 < self.patience <= self.stale

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from an earlier state; the present patience stays."""
        self.value, self.step, self.stale = state["value"], state["step"], state["stale"]
