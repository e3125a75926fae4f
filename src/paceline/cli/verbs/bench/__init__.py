"""``paceline bench``: measurements, each a command of its own, imported when it is called."""

from __future__ import annotations

from typing import ClassVar

import click

from paceline.cli.verb import Registered


class Benches(Registered):
    registry: ClassVar = {
        "collectives": (
            "collectives", "Measure and check collectives; name slow hosts and links.",
        ),
        "scaling": ("scaling", "Measure how a command scales from one process to all."),
    }  # fmt: skip
    package = __name__


@click.group("bench", cls=Benches)
def command() -> None:
    """Measure how jobs scale, and how fast collectives are."""
