"""``paceline list``: recipes, models and data sets by name."""

from __future__ import annotations

import json
import sys
import textwrap

import click

from paceline.cli.verb import Verb, say
from paceline.recipes import RECIPES
from paceline.recipes.catalogue import catalogue
from paceline.recipes.pretrained_list import list_pretrained
from paceline.rundir.records import read_object
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

    The list includes widely used pretrained models, models in the caches, and models in runs/.
    Other models can be used, too: a classifier of Hugging Face by its id or as a local folder, and
    one of torchvision as torchvision/NAME.
    """
    entries = [
        entry
        for entry in catalogue()
        if kind in (None, entry.kind) and only in (None, entry.recipe)
    ]
    pretrained = list_pretrained(read_object) if kind in (None, "models") else []
    weights = [entry for entry in pretrained if only in (None, entry.recipe)]
    if as_json:
        rows = [*(entry.to_json() for entry in entries), *(model.to_json() for model in weights)]
        click.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    width = max(40, columns()) if sys.stdout.isatty() else sys.maxsize
    for heading in _KINDS:
        section = [entry for entry in entries if entry.kind == heading]
        if section:
            say(f"{heading}:")
        for entry in section:
            recipe = "" if heading == "recipes" else entry.recipe
            _line(f"  {entry.name:<18} {recipe:<12} ", entry.summary, width)
        if heading == "models" and weights:
            say("pretrained:")
            for model in weights:
                if width < 120:
                    say(f"  {model.flags}")
                prefix = " " * 5 if width < 120 else f"  {model.flags:<46} "
                _line(f"{prefix} {model.recipe:<6} ", model.line(), width)


def _line(prefix: str, text: str, width: int) -> None:
    """Formats two columns; the right one is wrapped."""
    say(textwrap.fill(text, width, initial_indent=prefix, subsequent_indent=" " * len(prefix),
                      break_long_words=False, break_on_hyphens=False))  # fmt: skip
