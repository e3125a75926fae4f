"""``paceline list``: recipes, models, data sets and what else has a name."""

from __future__ import annotations

import json
import sys
import textwrap

import click

from paceline.cli.verb import Verb, say
from paceline.recipes import RECIPES
from paceline.recipes.reference import Entry, catalogue
from paceline.spec.terminal import columns

_KINDS = ("recipes", "models", "data", "augmentations", "presets")


@click.command("list", cls=Verb)
@click.argument("kind", type=click.Choice(_KINDS), required=False)
@click.option("--recipe", "only", type=click.Choice(list(RECIPES)), help="Of this recipe only.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def command(kind: str | None, only: str | None, as_json: bool) -> None:
    """List recipes, models, data sets, augmentations and presets by name.

    Models and data of Hugging Face are not listed: name them by their id, or a local folder.
    """
    found = [one for one in catalogue() if kind in (None, one.kind) and only in (None, one.recipe)]
    if as_json:
        click.echo(json.dumps([one.to_json() for one in found], indent=2, ensure_ascii=False))
        return
    width = max(40, columns()) if sys.stdout.isatty() else sys.maxsize
    for heading in _KINDS:
        _section(heading, [one for one in found if one.kind == heading], width)


def _section(heading: str, entries: list[Entry], width: int) -> None:
    if not entries:
        return
    say(f"{heading}:")
    for entry in entries:
        recipe = "" if heading == "recipes" else entry.recipe
        left = f"  {entry.name:<18} {recipe:<12} "
        text = textwrap.fill(entry.summary, width, initial_indent=left,
                             subsequent_indent=" " * len(left), break_long_words=False,
                             break_on_hyphens=False)  # fmt: skip
        say(text)
