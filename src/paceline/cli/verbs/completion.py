"""``paceline completion``: prints a shell's lines for completion."""

from __future__ import annotations

import click

from paceline.cli.completion.shells import SHELLS
from paceline.cli.verb import Verb


@click.command("completion", cls=Verb)
@click.argument("shell", type=click.Choice(list(SHELLS)))
def command(shell: str) -> None:
    """Print what makes SHELL complete paceline's commands at TAB.

    In the shell that you are in: eval "$(paceline completion bash)", the same with zsh, or
    paceline completion fish | source. For good, append what is printed to ~/.bashrc or ~/.zshrc; of
    fish it is the file ~/.config/fish/completions/paceline.fish.

    Completed are commands, options, their values, hosts, runs, labs, faults, recipes and files.
    """
    script = SHELLS[shell].source_template.lstrip("\n")
    click.echo(script, nl=False)
