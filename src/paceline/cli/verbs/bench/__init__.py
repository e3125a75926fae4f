"""``paceline bench``: measurements, each a command of its own, imported when it is called."""

from __future__ import annotations

import click

from paceline.cli.verb import Registered, Registry

# name → (module with ``command``, one line for --help)
BENCHES: Registry = {
    "collectives": (
        "collectives",
        "Bandwidth of collectives, checked, against the links' own rate.",
    ),
    "scaling": (
        "scaling",
        "How a command speeds up from 1 process to all.",
    ),
}


class Benches(Registered):
    """All measurements."""

    registry = BENCHES
    package = __name__


@click.group("bench", cls=Benches)
def command() -> None:
    """Measure jobs, networks and start-up."""
