"""Training scripts, read top to bottom, meant to be copied; their parts are imported.

This registry is torch-free: the launcher lists recipes and refuses options without torch.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from paceline.recipes.argv import known, parse, to_argv, typed_in
from paceline.recipes.effect import settled
from paceline.recipes.options import ImageOptions, Options, TextOptions, TranslationOptions
from paceline.spec.errors import DataError, SettingError


@dataclass(frozen=True, slots=True)
class Recipe:
    """A built-in recipe.

    Attributes:
        name: As in ``paceline train NAME``.
        module: Run in every rank as ``python -m MODULE FLAGS…``.
        options: The dataclass of its settings.
        use: Module with ``evaluate_run`` and ``guesses`` for its trained models; needs torch.
        summary: One line for people.
    """

    name: str
    module: str
    options: type[Options]
    use: str
    summary: str


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "image",
            "paceline.recipes.image",
            ImageOptions,
            "paceline.recipes.use.image",
            "classify images: bundled digits, MNIST-like, CIFAR-10, or a folder for each class",
        ),
        Recipe(
            "text",
            "paceline.recipes.text",
            TextOptions,
            "paceline.recipes.use.text",
            "classify texts: csv, jsonl or Hugging Face data; small models or pretrained ones",
        ),
        Recipe(
            "translation",
            "paceline.recipes.translation",
            TranslationOptions,
            "paceline.recipes.use.translation",
            "translate: an encoder-decoder transformer from scratch on a parallel corpus",
        ),
    )
}


def recipe(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        SettingError: Unknown name; the nearest one is suggested.
    """
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, 1)
        raise SettingError(
            f'there is no recipe "{name}"',
            found=f"there are {', '.join(RECIPES)}",
            remedy=f"Did you mean {near[0]}?" if near else "For your own script: paceline run FILE",
        )
    return RECIPES[name]


def use_of(task: str) -> Any:
    """The module that uses trained models of a recipe.

    Raises:
        DataError: The recipe is unknown.
    """
    if task not in RECIPES:
        raise DataError(
            f"the model was trained by another program: the recipe {task!r} is not known"
            if task
            else "the model does not say which recipe trained it",
            found=f"known recipes: {', '.join(RECIPES)}",
            remedy="paceline.train.load_weights fills your own network with its weights",
        )
    return importlib.import_module(RECIPES[task].use)


def parse_options(name: str, argv: Sequence[str], filed: Sequence[str] = ()) -> Options:
    """A recipe's options from flags, validated as far as possible without torch.

    Args:
        name: Of the recipe.
        argv: Flags as typed.
        filed: Those that paceline.toml stands for. What is typed wins, and what has no effect
            beside it falls away.

    Raises:
        SettingError: Unknown flag, unusable value, or one that has no effect.
        DataError: The data set cannot be found on this machine.
        SystemExit: After ``--help``.
    """
    kind, prog = recipe(name).options, f"paceline train {name}"
    chosen, typed = _preset(name, argv)
    usual, filed = _preset(name, filed)
    preset = usual if chosen is None else chosen
    # what is typed comes last, so that it wins
    options = parse(kind, [*(preset or ()), *filed, *typed], prog)
    own = typed_in(kind, typed, prog)  # refuses an option that is typed twice
    options.validate()
    if any(word.partition("=")[0] == "--like" for word in typed):
        decided = frozenset(field.name for field in fields(kind))
    else:
        decided = own | typed_in(kind, chosen or (), prog)
    return settled(options, own, typed_in(kind, filed, prog) - own, decided)


def typed_fields(name: str, argv: Sequence[str]) -> frozenset[str]:
    """The options that these flags set themselves, by field."""
    return typed_in(recipe(name).options, _preset(name, argv)[1], f"paceline train {name}")


def _preset(name: str, argv: Sequence[str]) -> tuple[Sequence[str] | None, list[str]]:
    """The flags that ``--preset`` stands for, ``None`` without one, and the others."""
    flags = list(argv)
    joined = next((f for f in flags if f.startswith("--preset=")), None)
    at = flags.index("--preset") if "--preset" in flags[:-1] else None
    if joined is None and at is None:
        return None, flags
    wanted = joined.partition("=")[2] if joined else flags[at + 1] if at is not None else ""
    presets = recipe(name).options.presets
    if not presets:
        return None, flags
    known("--preset", wanted, presets)
    typed = [f for f in flags if f is not joined]
    if joined is None and at is not None:
        typed = flags[:at] + flags[at + 2 :]
    return presets[wanted], typed


def options_to_argv(options: Options) -> list[str]:
    """The flags that make these options again."""
    return to_argv(options)


__all__ = ["RECIPES", "Options", "Recipe", "options_to_argv", "parse_options", "recipe",
           "typed_fields", "use_of"]  # fmt: skip
