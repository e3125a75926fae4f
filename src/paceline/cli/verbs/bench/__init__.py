"""``paceline bench``: measurements, each a command of its own, imported when it is called."""

from __future__ import annotations

from typing import ClassVar

import click

from paceline.cli.verb import Registered


class Benches(Registered):
    registry: ClassVar = {
        "collectives": (
            "collectives", "Bandwidth of collectives, checked, against the links' own rate.",
        ),
        "scaling": ("scaling", "How a command speeds up from 1 process to all."),
    }  # fmt: skip
    package = __name__


@click.group("bench", cls=Benches)
def command() -> None:
    """Measure jobs, networks and start-up."""
