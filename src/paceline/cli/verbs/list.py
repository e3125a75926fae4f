"""``paceline list``: recipes, models and data sets by name."""

from __future__ import annotations

import json
import sys
import textwrap

import click

from paceline.cli.verb import Verb, say
from paceline.recipes import RECIPES
from paceline.recipes.catalogue import Entry, catalogue
from paceline.recipes.pretrained_list import list_pretrained
from paceline.spec.terminal import columns

_KINDS = ("recipes", "models", "data", "augmentations", "presets")


@click.command("list", cls=Verb)
@click.argument("kind", type=click.Choice(_KINDS), required=False)
@click.option(
    "--recipe", "only", type=click.Choice(list(RECIPES)), help="List only what this recipe takes."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(kind: str | None, only: str | None, as_json: bool) -> None:
    """List recipes, models, data sets, augmentations and presets by name.

    The models include pretrained ones: widely used ones, those in the caches, and those in runs/.
    Name any other classifier of Hugging Face by its id or a local folder, and one of torchvision by
    torchvision/NAME.
    """
    entries = [
        entry
        for entry in catalogue()
        if kind in (None, entry.kind) and only in (None, entry.recipe)
    ]
    weights = [
        entry
        for entry in (list_pretrained() if kind in (None, "models") else [])
        if only in (None, entry.recipe)
    ]
    if as_json:
        rows = [*(entry.to_json() for entry in entries), *(entry.to_json() for entry in weights)]
        click.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    width = max(40, columns()) if sys.stdout.isatty() else sys.maxsize
    for heading in _KINDS:
        _section(heading, [entry for entry in entries if entry.kind == heading], width)
        if heading == "models" and weights:
            say("pretrained:")
            for entry in weights:
                if width < 120:
                    say(f"  {entry.flags}")
                prefix = " " * 5 if width < 120 else f"  {entry.flags:<46} "
                _line(f"{prefix} {entry.recipe:<6} ", entry.line(), width)


def _section(heading: str, entries: list[Entry], width: int) -> None:
    if not entries:
        return
    say(f"{heading}:")
    for entry in entries:
        recipe = "" if heading == "recipes" else entry.recipe
        _line(f"  {entry.name:<18} {recipe:<12} ", entry.summary, width)


def _line(prefix: str, text: str, width: int) -> None:
    """Formats two columns; the right one is wrapped."""
    say(textwrap.fill(text, width, initial_indent=prefix, subsequent_indent=" " * len(prefix),
                      break_long_words=False, break_on_hyphens=False))  # fmt: skip
