"""Everything that has a name, for people and programs to choose from. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

from paceline.recipes import RECIPES, image_options, text_options, translation_options
from paceline.recipes.datasets import NAMED


@dataclass(frozen=True, slots=True)
class Entry:
    """Something with a name.

    Attributes:
        kind: ``recipes``, ``models``, ``data``, ``augmentations`` or ``presets``.
        name: As typed.
        recipe: The recipe that takes it.
        summary: One line for people.
    """

    kind: str
    name: str
    recipe: str
    summary: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def catalogue() -> list[Entry]:
    """All entries, in the order in which they are listed."""
    sizes = {name: _size(numbers) for name, numbers in translation_options.SIZES.items()}
    images = {name: named.summary for name, named in NAMED.items()}
    presets = {name: " ".join(flags) for name, flags in image_options.PRESETS.items()}
    return [
        *(Entry("recipes", one.name, one.name, one.summary) for one in RECIPES.values()),
        *_entries("models", "image", image_options.MODELS),
        *_entries("models", "text", text_options.MODELS),
        *_entries("models", "translation", sizes),
        *_entries("data", "image", images),
        *_entries("data", "text", text_options.GENERATED),
        *_entries("data", "translation", translation_options.GENERATED),
        *_entries("augmentations", "image", image_options.AUGMENTATIONS),
        *_entries("presets", "image", presets),
    ]


def _entries(kind: str, recipe: str, names: Mapping[str, str]) -> Iterator[Entry]:
    return (Entry(kind, name, recipe, summary) for name, summary in names.items())


def _size(numbers: Iterable[int]) -> str:
    labels = ("d_model", "layers", "heads", "ff")
    return ", ".join(f"{label} {n}" for label, n in zip(labels, numbers, strict=True))
