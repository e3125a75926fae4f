"""Every name that recipes accept: recipes, models, data sets, augmentations, presets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from paceline.recipes import RECIPES, options
from paceline.recipes.data import IMAGE_SETS, PAIR_SETS, TEXT_SETS


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of ``paceline list``.

    Attributes:
        kind: ``recipes``, ``models``, ``data``, ``augmentations`` or ``presets``.
    """

    kind: str
    name: str
    recipe: str
    summary: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def catalogue() -> list[Entry]:
    """Lists all entries in display order."""
    sizes = {
        name: f"d_model {width}, layers {layers}, heads {heads}, ff {ff}"
        for name, (width, layers, heads, ff) in options.TRANSLATION_SIZES.items()
    }
    images, texts, pairs = (
        {name: dataset.summary for name, dataset in sets.items()}
        for sets in (IMAGE_SETS, TEXT_SETS, PAIR_SETS)
    )
    presets = {name: " ".join(flags) for name, flags in options.IMAGE_PRESETS.items()}
    return [
        *(Entry("recipes", name, name, recipe.summary) for name, recipe in RECIPES.items()),
        *_entries("models", "image", options.IMAGE_MODELS),
        *_entries("models", "text", options.TEXT_MODELS),
        *_entries("models", "translation", sizes),
        *_entries("data", "image", images),
        *_entries("data", "text", {**options.GENERATED_TEXTS, **texts}),
        *_entries("data", "translation", {**options.GENERATED_PAIRS, **pairs}),
        *_entries("augmentations", "image", options.AUGMENTATIONS),
        *_entries("presets", "image", presets),
    ]


def _entries(kind: str, recipe: str, names: Mapping[str, str]) -> Iterator[Entry]:
    return (Entry(kind, name, recipe, summary) for name, summary in names.items())
