"""A screen for the runs of a measurement, which shows only notes of plans."""

from __future__ import annotations

from paceline.cli.verb import say
from paceline.launch.terminal.screen import Screen


class PlanNotesScreen(Screen):
    """Shows nothing but the notes of a plan, each once; ``printed`` are those printed before."""

    def __init__(self, printed: set[str]) -> None:
        super().__init__("none")
        self._printed = printed

    def print(self, text: str, rank: int | None = None) -> None:
        """Drops the script's lines."""

    def note(self, text: str) -> None:
        """Prints notes of plans; drops other lines, which would disturb the table."""
        if ": note: " in text and text not in self._printed:
            self._printed.add(text)
            say(text, err=True)
