"""What the uses of all language models share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from paceline.recipes.language.conversations import Message
from paceline.recipes.use import PredictOptions
from paceline.recipes.use.predict import Prediction
from paceline.spec.errors import SettingError


@dataclass(frozen=True)
class Generator:
    """A language model that writes text.

    Attributes:
        model: A model of transformers, with adapters or without, in evaluation mode.
        encode: Returns the tokens of a text to continue.
        encode_chat: Returns the tokens of a conversation, up to the next answer. ValueError if the
            chat template refuses it. ``None`` for a model without chat template.
        is_chat: It was trained on conversations.
    """

    model: Any
    tokenizer: Any
    encode: Callable[[str], list[int]]
    encode_chat: Callable[[Sequence[Message]], list[int]] | None = None
    is_chat: bool = False


def portable(run: str) -> NoReturn:
    """Raises SettingError: only other models have fixed inputs and outputs."""
    raise SettingError(
        f"{run} holds a language model, which has no inputs of a fixed form",
        remedy=f"paceline export {run} --format transformers",
    )


def predictions(options: PredictOptions) -> Iterator[Prediction]:
    """Raises SettingError: a language model has no classes."""
    raise SettingError(
        f"{options.run} holds a language model, which predicts no classes",
        remedy=f"paceline generate {options.run}",
    )
