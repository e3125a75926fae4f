"""What the uses of all language models share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from paceline.recipes.use import PredictOptions
from paceline.recipes.use.predict import Prediction
from paceline.spec.errors import SettingError


def portable(run: str) -> NoReturn:
    """Raises SettingError: only other models have fixed inputs and outputs."""
    raise SettingError(
        f"{run} holds a language model, which this command cannot use",
        found="it measures and converts models with inputs of a fixed form",
        remedy=f"paceline evaluate {run}",
    )


def predictions(options: PredictOptions) -> Iterator[Prediction]:
    """Raises SettingError: a language model has no classes."""
    raise SettingError(
        f"{options.run} holds a language model, which predicts no classes",
        remedy=f"paceline evaluate {options.run}",
    )
