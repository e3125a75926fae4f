"""``paceline list`` and ``paceline recipe``: what is built in, as names and as scripts."""

from __future__ import annotations

import importlib.util
import json
import sys
import textwrap
from pathlib import Path

import click

from paceline.cli.verb import Verb, VerbGroup, say
from paceline.recipes import RECIPES, recipe
from paceline.recipes.catalogue import Entry, catalogue
from paceline.recipes.pretrained_list import list_pretrained
from paceline.spec.errors import SettingError
from paceline.spec.terminal import columns

_KINDS = ("recipes", "models", "data", "augmentations", "presets")


@click.command("list", cls=Verb)
@click.argument("kind", type=click.Choice(_KINDS), required=False)
@click.option("--recipe", "only", type=click.Choice(list(RECIPES)), help="Of this recipe only.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def listing(kind: str | None, only: str | None, as_json: bool) -> None:
    """List recipes, models, data sets, augmentations and presets by name.

    With the models come pretrained ones: much used ones that others publish, those in the caches,
    and those in runs/. Any other classifier of Hugging Face is named by its id, or a local folder;
    of torchvision by torchvision/NAME.
    """
    found = [one for one in catalogue() if kind in (None, one.kind) and only in (None, one.recipe)]
    weights = [
        one
        for one in (list_pretrained() if kind in (None, "models") else [])
        if only in (None, one.recipe)
    ]
    if as_json:
        rows = [*(one.to_json() for one in found), *(one.to_json() for one in weights)]
        click.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    width = max(40, columns()) if sys.stdout.isatty() else sys.maxsize
    for heading in _KINDS:
        _section(heading, [one for one in found if one.kind == heading], width)
        if heading == "models" and weights:
            say("pretrained:")
            for one in weights:
                if width < 120:
                    say(f"  {one.flags}")
                left = " " * 5 if width < 120 else f"  {one.flags:<46} "
                _line(f"{left} {one.recipe:<6} ", one.line(), width)


def _section(heading: str, entries: list[Entry], width: int) -> None:
    if not entries:
        return
    say(f"{heading}:")
    for entry in entries:
        recipe = "" if heading == "recipes" else entry.recipe
        _line(f"  {entry.name:<18} {recipe:<12} ", entry.summary, width)


def _line(left: str, text: str, width: int) -> None:
    """Two columns; the right one is broken between words."""
    say(textwrap.fill(text, width, initial_indent=left, subsequent_indent=" " * len(left),
                      break_long_words=False, break_on_hyphens=False))  # fmt: skip


FULL = click.option(
    "--full", is_flag=True, help="The script of `paceline train RECIPE`, with all its options."
)


@click.group("recipe", cls=VerbGroup)
def command() -> None:
    """Show or copy the script of a built-in recipe."""


@command.command("show", cls=Verb)
@click.argument("name", metavar="RECIPE")
@FULL
def show(name: str, full: bool) -> None:
    """Print the script of RECIPE that `paceline recipe copy` writes."""
    click.echo(script(name, full), nl=False)


@command.command("copy", cls=Verb)
@click.argument("name", metavar="RECIPE")
@click.argument("target", type=click.Path(path_type=Path), required=False)
@FULL
@click.option("--force", is_flag=True, help="Overwrite a file that is there.")
def copy(name: str, target: Path | None, full: bool, force: bool) -> None:
    """Copy the script of RECIPE to TARGET (default: my_RECIPE.py in this folder), to be changed.

    It is a whole training in one short file: data, network, loop and evaluation, on torch and
    `paceline.train`. Run it with `paceline run my_RECIPE.py --epochs 3`.
    """
    text = script(name, full)
    path = target or Path(f"my_{name}.py")
    if path.is_dir():
        path = path / f"my_{name}.py"
    if path.exists() and not force:
        raise SettingError(f"{path} exists already", remedy="name another file, or --force")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingError(f"{path} cannot be written", found=str(error)) from None
    say(f"{path}\nrun it: paceline run {path} --help")


@command.command("options", cls=Verb)
@click.argument("name", metavar="RECIPE")
def options(name: str) -> None:
    """Print the reference of RECIPE's options, as a Markdown table."""
    from paceline.recipes.reference import markdown

    click.echo(markdown(recipe(name).options), nl=False)


def script(name: str, full: bool = False) -> str:
    """The source of the recipe, or of its minimal form; neither is imported.

    Raises:
        SettingError: Unknown recipe; the nearest one is suggested.
    """
    module = recipe(name).module
    spec = importlib.util.find_spec(
        module if full else module.replace("recipes", "recipes.minimal")
    )
    if spec is None or spec.origin is None:
        raise SettingError(
            f"the script of {name} is not there", found=f"known: {', '.join(RECIPES)}"
        )
    return Path(spec.origin).read_text(encoding="utf-8")
