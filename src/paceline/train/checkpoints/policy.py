"""When a checkpoint is due."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.spec.errors import SettingError


@dataclass(frozen=True, slots=True)
class Policy:
    """When checkpoints are made; any of these.

    Attributes:
        steps: After so many global steps; 0 not.
        seconds: After so much time, by the clock of rank 0; 0 not.
        epochs: After every epoch.
    """

    steps: int = 0
    seconds: float = 0.0
    epochs: bool = False

    def due_by_step(self, step: int) -> bool:
        return self.steps > 0 and step % self.steps == 0

    def due_by_time(self, elapsed: float) -> bool:
        return 0 < self.seconds <= elapsed


def policy(text: str) -> Policy:
    """From ``500`` (steps), ``10m`` or ``30s`` (time), ``epoch``, several with commas, ``never``.

    Raises:
        SettingError: Anything else.
    """
    steps, seconds, epochs = 0, 0.0, False
    for word in text.split(","):
        matched = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", word.strip())
        if matched:
            seconds = float(matched[1]) * {"s": 1, "m": 60, "h": 3600}[matched[2]]
        elif word.strip().isdecimal() and int(word) > 0:
            steps = int(word)
        elif word.strip() == "epoch":
            epochs = True
        elif text.strip() != "never":
            raise SettingError(
                f"--checkpoint-every {text}: cannot be understood",
                remedy="500 (steps), 10m (minutes), epoch, never, or several: epoch,10m",
            )
    return Policy(steps, seconds, epochs)
