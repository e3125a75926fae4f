"""Settings of the image recipe."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.recipes.datasets import NAMED
from paceline.recipes.fine_tuning_options import check_fine_tuning
from paceline.recipes.options import Options, at_least, below_one, check_accuracy, known
from paceline.recipes.sources import is_path
from paceline.spec.errors import SettingError

MODELS = {
    "cnn": "a small network without batch normalisation and dropout",
    "resnet18": "residual network, 11 million parameters",
    "resnet34": "residual network, 21 million parameters",
    "resnet50": "residual network, 26 million parameters",
}
AUGMENTATIONS = {
    "flip": "mirrored, every second image",
    "crop": "shifted by up to an eighth of the size",
    "rotate": "turned by up to 15 degrees",
    "zoom": "larger or smaller by up to 15 percent",
    "resized-crop": "a random part of 8 to 100 percent of the area, brought to the full size",
}
_IMAGENET = (
    *("--epochs=90", "--global-batch=256", "--lr=0.1", "--image-size=224"),
    *("--optimizer=sgd", "--momentum=0.9", "--weight-decay=0.0001"),
    *("--augment", "resized-crop", "flip"),
)
PRESETS: dict[str, tuple[str, ...]] = {
    "imagenet": (
        *("--model=resnet50", *_IMAGENET),
        *("--schedule=cosine", "--warm-up=0.055", "--label-smoothing=0.1"),
    ),
    "imagenet-example": (
        *("--model=resnet18", *_IMAGENET, "--no-nesterov", "--schedule=step", "--warm-up=0"),
        *("--milestones", "0.333333", "0.666666"),
    ),
}
"""Flags that stand for a known recipe; flags that are typed come after them."""


@dataclass(frozen=True)
class ImageOptions(Options):
    """Train an image classifier."""

    preset: str = ""
    """Settings to start from: imagenet or imagenet-example; what else is typed changes them."""
    model: str = "cnn"
    """cnn, resnet18, resnet34, resnet50, or any image classifier of Hugging Face by id or
    folder."""
    weights: str = ""
    """Start from these weights: a run directory, a safetensors or a .pth file (cnn, resnets)."""
    from_scratch: bool = False
    """Take only the architecture of a Hugging Face model, not its weights."""
    freeze: bool = False
    """Train the head only; the backbone stays exactly as it was loaded."""
    unfreeze_every: int = 0
    """With --freeze: epochs after which one more stage, from the head backwards, trains too."""
    fast: bool = True
    """Compute in bf16 where the machine is faster in it, and with channels last (not cnn on images
    below 16 pixels); --no-fast keeps to --dtype."""
    data: str = "digits"
    """digits, fashion-mnist, mnist, cifar10, dummy, a folder with a folder for each class, or a
    Hugging Face data set by id or folder."""
    data_config: str = ""
    """Configuration of a Hugging Face data set."""
    offline: bool = False
    """Never touch the network; use what is in the cache."""
    skip_damaged: bool = False
    """Leave images out that cannot be read; every file is tried at the start."""
    epochs: int = 15
    """Passes over the training data."""
    global_batch: int = 64
    """Samples of one step over all processes together; the same at any number of them."""
    lr: float = 4e-3
    """Highest learning rate of the schedule."""
    label_smoothing: float = 0.0
    """Part of the target that is spread over all classes."""
    augment: tuple[str, ...] = ()
    """Augmentations of the training images: flip, crop, rotate, zoom, resized-crop."""
    image_size: int = 0
    """Height and width to which images are brought (0: what a pretrained model wants, else 64 for
    a folder's, and the others as they are)."""
    test_fraction: float = 0.2
    """Part of every class that is held out, where the data have no split of their own."""
    val_fraction: float = 0.0
    """Part of the training images taken out for validation, where the data have no such part."""

    def validate(self) -> None:
        super().validate()
        check_accuracy(self.stop_at)
        if not is_path(self.model):
            known("--model", self.model, MODELS)
        if self.preset:
            known("--preset", self.preset, PRESETS)
        at_least("--unfreeze-every", self.unfreeze_every, 0)
        check_fine_tuning(self.model in MODELS, self)
        for name in self.augment:
            known("--augment", name, AUGMENTATIONS)
        if not is_path(self.data):
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
        if self.image_size:
            at_least("--image-size", self.image_size, 8)
