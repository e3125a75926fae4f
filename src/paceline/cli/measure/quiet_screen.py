"""What is shown of the runs of a measurement."""

from __future__ import annotations

from paceline.cli.verb import say
from paceline.launch.terminal.screen import Screen


class PlanNotesScreen(Screen):
    """Shows nothing but the notes of a plan, each once.

    Args:
        printed: Notes that were printed before.
    """

    def __init__(self, printed: set[str]) -> None:
        super().__init__("none")
        self._printed = printed

    def print(self, text: str, rank: int | None = None) -> None:
        """What the script has to say would only disturb the table."""

    def note(self, text: str) -> None:
        """The launcher's other lines would only disturb the table."""
        if ": note: " in text and text not in self._printed:
            self._printed.add(text)
            say(text, err=True)
