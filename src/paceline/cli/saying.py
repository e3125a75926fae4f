"""What verbs print: names, paths and words of strangers pass here, fit for a terminal."""

from __future__ import annotations

import click

from paceline.spec.terminal import clean


def say(text: str, err: bool = False, nl: bool = True) -> None:
    """Prints text without anything that a terminal obeys.

    Args:
        text: Of whatever origin.
        err: On standard error.
        nl: End the line.
    """
    click.echo(clean(text), err=err, nl=nl)
