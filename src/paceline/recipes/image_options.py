"""Settings of the image recipe."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.recipes.datasets import NAMED
from paceline.recipes.options import Options, at_least, below_one, known
from paceline.spec.errors import SettingError

MODELS = ("cnn",)
AUGMENTATIONS = ("flip", "crop", "rotate", "zoom")


@dataclass(frozen=True)
class ImageOptions(Options):
    """Train an image classifier."""

    model: str = "cnn"
    """Network: cnn (a small one without batch normalisation and dropout)."""
    data: str = "digits"
    """digits, fashion-mnist, mnist, cifar10, or a folder with a folder for each class."""
    epochs: int = 15
    """Passes over the training data."""
    global_batch: int = 64
    """Samples of one step over all processes together; the same at any number of them."""
    lr: float = 4e-3
    """Highest learning rate of the schedule."""
    label_smoothing: float = 0.0
    """Part of the target that is spread over all classes."""
    augment: tuple[str, ...] = ()
    """Augmentations of the training images: flip, crop, rotate, zoom."""
    image_size: int = 0
    """Height and width to which images of a folder are brought (0: 64)."""
    test_fraction: float = 0.2
    """Part of every class that is held out, where the data have no split of their own."""
    val_fraction: float = 0.0
    """Part of the training images taken out for validation, where the data have no such part."""

    def validate(self) -> None:
        super().validate()
        known("--model", self.model, MODELS)
        for name in self.augment:
            known("--augment", name, AUGMENTATIONS)
        if not _is_path(self.data):
            known("--data", self.data, NAMED)
        below_one("--label-smoothing", self.label_smoothing)
        below_one("--val-fraction", self.val_fraction)
        self._validate_images()

    def _validate_images(self) -> None:
        if not 0 < self.test_fraction < 1:
            raise SettingError(
                f"--test-fraction {self.test_fraction} must lie between 0 and 1",
                remedy="--test-fraction 0.2",
            )
        if self.image_size and self.data in NAMED:
            raise SettingError(
                f"--image-size {self.image_size} cannot be used with --data {self.data}",
                found="its images have one size already",
                remedy="leave --image-size out",
            )
        if self.image_size:
            at_least("--image-size", self.image_size, 8)


def _is_path(data: str) -> bool:
    return "/" in data or data.startswith((".", "~"))
