"""``paceline recipe``: shows or copies the scripts of built-in recipes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click

from paceline.cli.verb import Verb, VerbGroup, say
from paceline.recipes import recipe
from paceline.spec.errors import SettingError

MINIMAL = "paceline.recipes.minimal"
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
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def copy(name: str, target: Path | None, full: bool, force: bool) -> None:
    """Copy the script of RECIPE to TARGET (default: my_RECIPE.py in this folder), so that you can
    change it.

    It is a complete training script in one short file: data, network, loop and evaluation, with
    torch and `paceline.train`. Run it with `paceline run my_RECIPE.py --epochs 3`. For sft there
    is only the `--full` script.
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
    """Returns the source of a recipe or of its minimal form, without importing it."""
    full_script = recipe(name).module
    spec = importlib.util.find_spec(full_script if full else f"{MINIMAL}.{name}")
    if spec is None:
        raise SettingError(
            f"there is no short script of the recipe {name}", remedy="--full copies the whole one"
        )
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")
