"""``paceline train``: a built-in recipe, here or on every host."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import click

from paceline.cli.dispatch import prepare
from paceline.cli.launch import launch_job
from paceline.cli.options import launch_options
from paceline.cli.recipe_job import (
    check_data_exists,
    check_host_names,
    check_same_recipe,
    parse_recipe_options,
    prepared_job,
    require_recipe_first,
)
from paceline.cli.verb import HELP_ALL, Verb, say
from paceline.recipes import RECIPES, parse_options
from paceline.spec.helptext import Row, Section


class Train(Verb):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Leaves ``--keep N`` to the recipe; without a number it is the option of all runs."""
        args, counts = split_keep(args)
        remaining = super().parse_args(ctx, args)
        ctx.params["options"] = (*ctx.params["options"], *counts)
        return remaining

    def sections(self, ctx: click.Context) -> list[Section]:
        return [("Recipes", [Row(recipe.name, recipe.summary) for recipe in RECIPES.values()])]


@click.command(
    "train", cls=Train, context_settings={"ignore_unknown_options": True}, add_help_option=False
)
@launch_options
@click.option("-h", "--help", "wants_help", is_flag=True, help="Show this, or a recipe's options.")
@click.option("--help-all", is_flag=True, help="Show every option and exit.")
@click.argument("chosen", metavar="RECIPE", required=False)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, /, chosen: str | None, options: tuple[str, ...],
            wants_help: bool, help_all: bool, **_: object) -> None:  # fmt: skip
    """Train RECIPE. The recipe's own OPTIONS can be mixed with those below.

    `paceline train RECIPE --help` lists the recipe's options.
    """
    ctx.meta[HELP_ALL] = help_all
    if chosen is None:
        click.echo(ctx.get_help())
        ctx.exit(0 if wants_help or help_all else 2)
    if wants_help or help_all:
        parse_options(chosen, ["--help-all" if help_all else "--help"])
    require_recipe_first(chosen, options, "train")
    ctx.exit(train(ctx, chosen, options))


def split_keep(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits arguments into the others, and ``--keep=N`` for each ``--keep`` with a number."""
    others, counts = list[str](), list[str]()
    words = iter(itertools.zip_longest(args, args[1:], fillvalue=""))
    for word, following in words:
        option, equals, value = word.partition("=")
        if option == "--keep" and (value if equals else following).isdecimal():
            counts.append(f"--keep={value if equals else next(words)[0]}")
        else:
            others.append(word)
    return others, counts


def train(ctx: click.Context, name: str, argv: tuple[str, ...]) -> int:
    options = parse_recipe_options(ctx, name, argv)
    if ctx.params["run_dir"] is not None and options.resume == "auto":
        check_same_recipe(name, ctx.params["run_dir"])
    cluster, dispatch = prepare(ctx)
    check_data_exists(ctx, options, cluster, dispatch)
    with prepared_job(ctx, name, options, cluster) as job:
        check_host_names(options, job, cluster, dispatch)
        return launch_job(ctx, job, cluster, dispatch, package=True, on_success=_print_results)


def _print_results(path: Path) -> None:
    names = {"model": "model", "adapters": "adapters", "metrics": "metrics.jsonl", "logs": "logs"}
    for label, name in names.items():
        if (path / name).exists():
            say(f"{label:<8} {path / name}", err=True)
