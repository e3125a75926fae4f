"""Image classifiers by name, and Hugging Face's by id or folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from paceline.recipes import hub_models
from paceline.recipes.resnet import Basic, Bottleneck, ResNet

Shape = tuple[int, int, int]


def cnn(shape: Shape, classes: int) -> nn.Module:
    """A small convolutional network for images from 8×8 upwards.

    Halves the image until it is at most 7 pixels wide. It has neither batch normalisation nor
    dropout: both make the result depend on how a batch is shared among processes.

    Args:
        shape: (channels, height, width) of an image.
        classes: Number of outputs.
    """
    channels, height, width = shape
    layers: list[nn.Module] = []
    out = 16
    while max(height, width) > 7 or len(layers) < 4:
        pool = nn.MaxPool2d(2) if max(height, width) > 7 else nn.Identity()
        layers += [nn.Conv2d(channels, out, 3, padding=1), pool, nn.ReLU()]
        if not isinstance(pool, nn.Identity):
            height, width = max(height // 2, 1), max(width // 2, 1)
        channels, out = out, min(2 * out, 64)
    hidden = [nn.Flatten(), nn.Linear(channels * height * width, 64), nn.ReLU()]
    return nn.Sequential(*layers, *hidden, nn.Linear(64, classes))


MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "cnn": cnn,
    "resnet18": partial(ResNet, Basic, (2, 2, 2, 2)),
    "resnet34": partial(ResNet, Basic, (3, 4, 6, 3)),
    "resnet50": partial(ResNet, Bottleneck, (3, 4, 6, 3)),
}


class HubImages(nn.Module):
    """An image classifier of Hugging Face, for images of any size and of one or three channels.

    Args:
        model: The library's.
        size: Height and width that it wants; ``None`` takes any.
    """

    def __init__(self, model: Any, size: tuple[int, int] | None) -> None:
        super().__init__()
        self.model, self.size = model, size

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[1] == 1:
            images = images.expand(-1, 3, -1, -1)
        if self.size and tuple(images.shape[2:]) != self.size:
            with torch.autocast(images.device.type, enabled=False):
                images = interpolate(images, self.size, mode="bilinear", antialias=True)
        logits: Tensor = self.model(pixel_values=images).logits
        return logits


def hub_images(model: Any) -> HubImages:
    """The wrapped model; what size it wants is in its own description."""
    size = getattr(model.config, "image_size", None)
    wants = (size, size) if isinstance(size, int) else tuple(size) if size else None
    # Convolutional networks name a size but take any.
    fixed = wants is not None and bool(getattr(model.config, "patch_size", None))
    return HubImages(model, (wants[0], wants[1]) if fixed and wants else None)


def backbone(network: nn.Module) -> Sequence[nn.Module]:
    """The parts of a network without its head."""
    if isinstance(network, HubImages):
        return _hub_backbone(network.model)
    children = list(network.children())
    return children[:-1]


def _hub_backbone(model: Any) -> Sequence[nn.Module]:
    inner = getattr(model, "timm_model", None)
    if inner is not None:
        head = inner.get_classifier()
        return [child for child in inner.children() if child is not head]
    if model.base_model is model:
        return list(model.children())[:-1]
    return [model.base_model]


def describe_network(network: nn.Module, name: str) -> dict[str, Any]:
    """What makes the same network again, as JSON values."""
    if isinstance(network, HubImages):
        return {"kind": "hub", "config": hub_models.description(network.model)}
    return {"kind": name}


def rebuilt(description: dict[str, Any], shape: Shape, classes: int) -> nn.Module:
    """The network that a run's ``config.json`` describes, with initial weights."""
    if description["kind"] == "hub":
        return hub_images(hub_models.rebuilt("image", description["config"]))
    return MODELS[description["kind"]](shape, classes)
