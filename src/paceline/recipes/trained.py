"""A trained image model, from its run directory and without running code from there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.recipes.datasets.images import Request
from paceline.recipes.models import rebuilt
from paceline.recipes.pictures import Normalisation
from paceline.spec.errors import DataError, SettingError
from paceline.train import load_config, load_weights


@dataclass(frozen=True)
class Trained:
    """A model as described by ``model/config.json``.

    Attributes:
        folder: The run directory.
        config: The whole description.
        shape: (channels, height, width) of an image.
        classes: Name of each class.
        normalise: How pixels become numbers.
    """

    folder: Path
    config: dict[str, Any]
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    normalise: Normalisation

    def network(self) -> nn.Module:
        """A new network of this shape, with initial weights."""
        network = rebuilt(self.config["network"], self.shape, len(self.classes))
        if self.config["channels_last"]:
            network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return network

    @property
    def size(self) -> int:
        """To what decoded images are cut or enlarged (0: they are used as they are)."""
        return self.shape[1] if list(self.shape) != self.config["decoded"] else 0

    def load(self, network: nn.Module) -> None:
        """Loads the trained weights into a network that is already in its place."""
        load_weights(self.folder, network)

    def request(self, data: str = "") -> Request:
        """How to read the data set that it was trained on, or another one in the same way."""
        recorded = self.config["data"]
        split = recorded["split"]
        return Request(
            data or recorded["source"],
            image_size=self.config["decoded"][1],
            test_fraction=split.get("test_fraction", 0.2),
            val_fraction=split.get("val_fraction", 0.0),
            seed=split.get("seed", 0),
            crop=self.config["crop"],
            skip_damaged=recorded["skip_damaged"],
            config="" if data else recorded["config"],
        )


def trained(run: str) -> Trained:
    """The image model of a run.

    Raises:
        SettingError: No run was named.
        DataError: There is no model, or none of an image recipe.
    """
    if not run:
        raise SettingError("--run is missing", remedy="--run runs/image-…")
    folder = Path(run)
    config = load_config(folder)
    try:
        if config["task"] != "image":
            raise ValueError(f"its model was trained by the recipe {config['task'] or '(unnamed)'}")
        channels, height, width = config["shape"]
        moments = config["normalisation"]
        normalise = Normalisation(tuple(moments["mean"]), tuple(moments["deviation"]))
        return Trained(
            folder, config, (channels, height, width), tuple(config["classes"]), normalise
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{folder} holds no model of the image recipe",
            found=f"model/config.json: {type(error).__name__} {error}",
        ) from None
