"""``paceline bench``: measurements, each a command of its own, imported when it is called."""

from __future__ import annotations

import importlib

import click

from paceline.cli.verb import VerbGroup
from paceline.spec.helptext import Row, Section

# name → (module with ``command``, one line for --help)
BENCHES: dict[str, tuple[str, str]] = {
    "collectives": (
        "paceline.cli.bench_collectives",
        "Bandwidth of collectives, checked, against the links' own rate.",
    ),
    "scaling": ("paceline.cli.bench_scaling", "How a command speeds up from 1 process to all."),
}


class Benches(VerbGroup):
    """Knows every measurement by name; imports its module when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(BENCHES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in BENCHES:
            return None
        command = importlib.import_module(BENCHES[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def sections(self, ctx: click.Context) -> list[Section]:
        return [("Commands", [Row(name, line) for name, (_, line) in BENCHES.items()])]


@click.group("bench", cls=Benches)
def command() -> None:
    """Measure jobs, networks and start-up."""
