"""``paceline completion``: prints a shell's lines for completion."""

from __future__ import annotations

import click

from paceline.cli.completion.shells import SHELLS
from paceline.cli.verb import Verb


@click.command("completion", cls=Verb)
@click.argument("shell", type=click.Choice(list(SHELLS)))
def command(shell: str) -> None:
    """Print the script that makes SHELL complete paceline's commands.

    For the current shell, type: eval "$(paceline completion bash)". With zsh, type zsh instead of
    bash; with fish, type: paceline completion fish | source

    For all future shells, append the output to ~/.bashrc or ~/.zshrc; for fish, write it to
    ~/.config/fish/completions/paceline.fish.

    It completes commands, options, their values, hosts, runs, labs, faults, recipes and files.
    """
    script = SHELLS[shell].source_template.lstrip("\n")
    click.echo(script, nl=False)
