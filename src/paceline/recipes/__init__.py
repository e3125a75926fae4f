"""Registry of the built-in recipes and parsing of their options.

Needs no torch: the launcher lists recipes and validates options without it.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from paceline.recipes.argv import check_known, explicit_fields, parse, split_option
from paceline.recipes.effect import drop_ineffective
from paceline.recipes.language.options import LanguageOptions, SftOptions
from paceline.recipes.options import ImageOptions, Options, TextOptions, TranslationOptions
from paceline.spec.errors import DataError, SettingError


@dataclass(frozen=True, slots=True)
class Recipe:
    """A built-in recipe: the module of its name in a package, and in ``use`` for trained models."""

    name: str
    options: type[Options]
    summary: str
    package: str = __name__

    @property
    def module(self) -> str:
        """Module that every rank runs, ``python -m MODULE FLAGS…``."""
        return f"{self.package}.{self.name}"


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("image", ImageOptions,
               "classify images: bundled digits, MNIST-like, CIFAR-10, or a folder for each class"),
        Recipe("text", TextOptions,
               "classify texts: csv, jsonl or Hugging Face data; small models or pretrained ones"),
        Recipe("translation", TranslationOptions,
               "translate: an encoder-decoder transformer from scratch on a parallel corpus"),
        Recipe("language", LanguageOptions,
               "train a language model from scratch on texts; --depth sets its size",
               f"{__name__}.language"),
        Recipe("sft", SftOptions,
               "fine-tune a language model on conversations or texts, by default with LoRA",
               f"{__name__}.language"),
    )
}  # fmt: skip


def recipe(name: str) -> Recipe:
    """Returns a recipe by name; SettingError suggests the nearest one."""
    if name not in RECIPES:
        matches = difflib.get_close_matches(name, RECIPES, 1)
        suggestion = f"Did you mean {matches[0]}?" if matches else ""
        raise SettingError(
            f'there is no recipe "{name}"',
            found=f"there are {', '.join(RECIPES)}",
            remedy=suggestion or "For your own script: paceline run FILE",
        )
    return RECIPES[name]


def load_use_module(task: str) -> Any:
    """Imports the module with ``evaluate_run``, ``portable`` and ``predictions`` of a recipe.

    Raises:
        DataError: The recipe is unknown.
    """
    if task not in RECIPES:
        raise DataError(
            f"the model's recipe {task!r} is not known" if task else "the model names no recipe",
            found=f"known recipes: {', '.join(RECIPES)}",
            remedy="paceline.train.load_weights fills your own network with its weights",
        )
    return importlib.import_module(f"{__name__}.use.{task}")


def parse_options(name: str, argv: Sequence[str], from_file: Sequence[str] = ()) -> Options:
    """Parses and validates a recipe's options, as far as possible without torch.

    Args:
        from_file: Flags from paceline.toml. The command line overrides them; those without effect
            beside it are dropped.

    Raises:
        SettingError: Unknown flag, unusable value, or one that has no effect.
        DataError: The data set cannot be found on this machine.
        SystemExit: After ``--help``.
    """
    kind, prog = recipe(name).options, f"paceline train {name}"
    cli_preset, flags = _split_preset(name, argv)
    file_preset, from_file = _split_preset(name, from_file)
    preset_flags = file_preset if cli_preset is None else cli_preset
    # The command line comes last, so that it wins.
    options = parse(kind, [*(preset_flags or ()), *from_file, *flags], prog)
    explicit = explicit_fields(kind, flags, prog)  # refuses repeated options
    options.validate()
    if any(flag.partition("=")[0] == "--like" for flag in flags):
        decided = frozenset(field.name for field in fields(kind))
    else:
        decided = explicit | explicit_fields(kind, cli_preset or (), prog)
    return drop_ineffective(
        options, explicit, explicit_fields(kind, from_file, prog) - explicit, decided
    )


def explicit_options(name: str, argv: Sequence[str]) -> frozenset[str]:
    """Returns the fields that the flags set explicitly, without those of a preset."""
    _, flags = _split_preset(name, argv)
    return explicit_fields(recipe(name).options, flags, f"paceline train {name}")


def _split_preset(name: str, argv: Sequence[str]) -> tuple[Sequence[str] | None, Sequence[str]]:
    """Splits ``--preset`` from the flags: the preset's flags (``None`` without one), the rest."""
    presets = recipe(name).options.presets
    preset, flags = split_option("--preset", argv)
    if preset is None or not presets:
        return None, argv
    check_known("--preset", preset, presets)
    return presets[preset], flags
