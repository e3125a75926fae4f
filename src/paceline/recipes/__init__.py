"""Whole training scripts, read top to bottom, meant to be copied.

This registry is torch-free: the launcher lists recipes and refuses options without torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.recipes.options import Options, known, parse, to_argv


@dataclass(frozen=True, slots=True)
class Recipe:
    """A built-in recipe.

    Attributes:
        name: As in ``paceline train NAME``.
        module: Run in every rank as ``python -m MODULE FLAGS…``.
        options: ``MODULE:CLASS`` of its settings; importable without torch.
        summary: One line for people.
    """

    name: str
    module: str
    options: str
    summary: str

    def options_class(self) -> type[Options]:
        """The dataclass of the recipe's settings."""
        module, name = self.options.split(":")
        kind: type[Options] = getattr(importlib.import_module(module), name)
        return kind


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "image",
            "paceline.recipes.image",
            "paceline.recipes.image_options:ImageOptions",
            "classify images: bundled digits, MNIST-like, CIFAR-10, or a folder for each class",
        ),
        Recipe(
            "text",
            "paceline.recipes.text",
            "paceline.recipes.text_options:TextOptions",
            "classify texts: csv, jsonl or Hugging Face data; small models or pretrained ones",
        ),
        Recipe(
            "translation",
            "paceline.recipes.translation",
            "paceline.recipes.translation_options:TranslationOptions",
            "translate: an encoder-decoder transformer from scratch on a parallel corpus",
        ),
    )
}


def recipe(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        SettingError: Unknown name; the nearest one is suggested.
    """
    known("recipe", name, RECIPES)
    return RECIPES[name]


def parse_options(name: str, argv: Sequence[str]) -> Options:
    """A recipe's options from flags, validated as far as possible without torch.

    Raises:
        SettingError: Unknown flag or unusable value.
        DataError: The data set cannot be found on this machine.
        SystemExit: After ``--help``.
    """
    options = parse(recipe(name).options_class(), argv, f"paceline train {name}")
    options.validate()
    return options


def options_to_argv(options: Options) -> list[str]:
    """The flags that make these options again."""
    return to_argv(options)


__all__ = ["RECIPES", "Options", "Recipe", "options_to_argv", "parse_options", "recipe"]
