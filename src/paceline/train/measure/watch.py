"""What a session records besides losses and figures: norms of its models, load of its devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paceline.train.measure.usage import Usage


class Watch:
    """Off until it is told otherwise, and then at no cost.

    Args:
        record: Called with a split and its figures.

    Attributes:
        every: Steps between two looks at norms; 0: none.
        usage: Of devices; ``None``: none.
    """

    def __init__(self, record: Callable[[str, Mapping[str, float]], None]) -> None:
        self._record = record
        self._norms: dict[str, float] = {}
        self.every = 0
        self.usage: Usage | None = None

    def due(self, step: int) -> bool:
        """Whether the norms of this step are wanted."""
        return self.every > 0 and step % self.every == 0

    def take(self, model: str, norms: Mapping[str, float]) -> None:
        """The norms of one of several models' update; of the only one without a name."""
        self._norms |= {f"{model}_{key}" if model else key: one for key, one in norms.items()}

    def stepped(self) -> None:
        """Records the norms of the step, where there are any."""
        if self._norms:
            self._record("norms", self._norms)
            self._norms = {}

    def recorded(self) -> None:
        """Records the load of devices; a collective."""
        if self.usage is not None:
            self._record("usage", self.usage.figures())
