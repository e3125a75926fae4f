"""What a session records besides losses and figures: norms of its models, load of its devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paceline.train.measure.usage import Usage


class Watch:
    """Records norms and load, if it is switched on.

    Attributes:
        norm_interval: Steps between two looks at norms; 0: none.
    """

    def __init__(self, record: Callable[[str, Mapping[str, float]], None]) -> None:
        self._record = record
        self._norms: dict[str, float] = {}
        self.norm_interval = 0
        self.usage: Usage | None = None

    def is_due(self, step: int) -> bool:
        return self.norm_interval > 0 and step % self.norm_interval == 0

    def add(self, model: str, norms: Mapping[str, float]) -> None:
        """Adds the norms of one model's update; the only model has no name."""
        self._norms |= {f"{model}_{key}" if model else key: value for key, value in norms.items()}

    def stepped(self) -> None:
        if self._norms:
            self._record("norms", self._norms)
            self._norms = {}

    def recorded(self) -> None:
        """Records the load of devices; a collective."""
        if self.usage is not None:
            self._record("usage", self.usage.figures())
