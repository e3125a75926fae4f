"""What images must look like for the model: size, cut, normalisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.recipes import hub_models
from paceline.recipes.image_options import MODELS, ImageOptions
from paceline.recipes.pictures import Normalisation

MARGIN = 8 / 7
"""Images are decoded so much larger than what is cut out of them: 256 for 224."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the model and the options ask of images.

    Attributes:
        size: Height and width that go into the model (0: as they come).
        decoded: Height and width to which files are brought before (0: by the reader).
        crop: Files of another aspect are cut instead of squeezed.
        mean, deviation: Of each colour, as the pretrained model expects; empty measures them.
    """

    size: int = 0
    decoded: int = 0
    crop: bool = False
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()

    def fitted(self, shape: tuple[int, int, int]) -> int:
        """To what images of this shape are cut or enlarged; 0 when they are used as they are."""
        return 0 if tuple(shape[1:]) == (self.size, self.size) else self.size

    def normalise(self, channels: int) -> Normalisation | None:
        """The pretrained model's normalisation, also for grey images."""
        if not self.mean:
            return None
        if channels == len(self.mean):
            return Normalisation(self.mean, self.deviation)
        average = (sum(one) / len(one) for one in (self.mean, self.deviation))
        return Normalisation(*((one,) * channels for one in average))


def inputs(options: ImageOptions) -> Inputs:
    """What the options, and the model that they name, ask for."""
    found: Mapping[str, Any] = {}
    if options.model not in MODELS:
        wanted = hub_models.HubModel("image", options.model, options.offline)
        found = hub_models.load_preprocessing(wanted)
    size = options.image_size or _size(found.get("size"))
    crop = "resized-crop" in options.augment
    mean, deviation = (tuple(found.get(name) or ()) for name in ("image_mean", "image_std"))
    return Inputs(size, round(size * MARGIN) if crop else size, crop, mean, deviation)


def _size(found: Any) -> int:
    """Libraries write 224, {"height": 224, "width": 224} or {"shortest_edge": 224}."""
    if isinstance(found, Mapping):
        found = found.get("height") or found.get("shortest_edge") or 0
    return int(found or 0)
