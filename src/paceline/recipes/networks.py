"""Classifiers of images and of texts: our own by name, and Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from paceline.recipes import pretrained, torchvision_models
from paceline.recipes.heads import add_layers
from paceline.recipes.transformer import Embedding, EncoderLayer
from paceline.recipes.transformer import Shape as Sizes

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


SMALL_IMAGE, TINY_IMAGE = 64, 16
"""Up to these heights and widths the first layers halve the image once, or not at all, instead of
twice."""


def _conv3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


class Basic(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv3(inputs, width, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv3(width, width), nn.BatchNorm2d(width)
        self.relu, self.downsample = nn.ReLU(inplace=True), shortcut

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        total: Tensor = self.relu(self.bn2(self.conv2(x)) + kept)
        return total


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions and a shortcut; the stride is in the 3×3 one."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, shortcut: nn.Module | None) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv3(width, width, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu, self.downsample = nn.ReLU(inplace=True), shortcut

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        total: Tensor = self.relu(self.bn3(self.conv3(x)) + kept)
        return total


class ResNet(nn.Module):
    """A residual network.

    Args:
        block: Kind of block.
        depths: Blocks of each of the four stages.
        shape: (channels, height, width) of an image. Small images are not made smaller by the
            first convolution (3×3 instead of 7×7); otherwise little would be left of them.
        classes: Number of outputs.
    """

    def __init__(
        self,
        block: type[Basic] | type[Bottleneck],
        depths: tuple[int, ...],
        shape: tuple[int, int, int],
        classes: int,
    ) -> None:
        super().__init__()
        channels, height, width = shape
        small, tiny = max(height, width) <= SMALL_IMAGE, max(height, width) <= TINY_IMAGE
        wide = nn.Conv2d(channels, 64, 7, 2, padding=3, bias=False)
        self.conv1 = _conv3(channels, 64) if small else wide
        self.bn1, self.relu = nn.BatchNorm2d(64), nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if tiny else nn.MaxPool2d(3, 2, padding=1)
        self._inputs = 64
        self.layer1 = self._stage(block, 64, depths[0], 1)
        self.layer2 = self._stage(block, 128, depths[1], 2)
        self.layer3 = self._stage(block, 256, depths[2], 2)
        self.layer4 = self._stage(block, 512, depths[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * block.expansion, classes)
        self._initialise()

    def _stage(
        self, block: type[Basic] | type[Bottleneck], width: int, depth: int, stride: int
    ) -> nn.Sequential:
        outputs = width * block.expansion
        shortcut = None
        if stride > 1 or self._inputs != outputs:
            conv = nn.Conv2d(self._inputs, outputs, 1, stride, bias=False)
            shortcut = nn.Sequential(conv, nn.BatchNorm2d(outputs))
        first = block(self._inputs, width, stride, shortcut)
        self._inputs = outputs
        return nn.Sequential(first, *(block(outputs, width, 1, None) for _ in range(depth - 1)))

    def _initialise(self) -> None:
        """Every block starts as its shortcut alone, which makes the first steps steadier."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, (Basic, Bottleneck)):
                last = module.bn3 if isinstance(module, Bottleneck) else module.bn2
                nn.init.zeros_(last.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


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
        return pretrained.backbone_of(network.model)
    if isinstance(network, torchvision_models.TorchvisionImages):
        return [network.model]
    children = list(network.children())
    return children[:-1]


def describe_network(network: nn.Module, name: str, layers: Sequence[int]) -> dict[str, Any]:
    """What makes the same network again, as JSON values.

    Args:
        network: Of this module.
        name: As it was asked for.
        layers: Widths of those that were added to its head.
    """
    if isinstance(network, HubImages):
        config = pretrained.description(network.model)
        return {"kind": "hub", "config": config, "layers": [*layers]}
    if isinstance(network, torchvision_models.TorchvisionImages):
        return {**network.describe(), "layers": [*layers]}
    return {"kind": name, "layers": [*layers]}


def rebuilt_images(description: dict[str, Any], shape: Shape, classes: int) -> nn.Module:
    """The network that a run's ``config.json`` describes, with initial weights."""
    if description["kind"] == "hub":
        network: nn.Module = hub_images(pretrained.rebuilt("image", description["config"]))
    elif description["kind"] == "torchvision":
        network = torchvision_models.rebuilt(description, classes)
    else:
        network = MODELS[description["kind"]](shape, classes)
    add_layers(network, backbone(network), description.get("layers", ()))
    return network


WIDTH, LAYERS, HEADS, FF = 128, 2, 4, 256


class Words(nn.Module):
    """Word vectors, averaged over a text."""

    def __init__(self, tokens: int, width: int = WIDTH) -> None:
        super().__init__()
        self.table = nn.Embedding(tokens, width)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return _mean(self.table(ids), mask)


class Encoder(nn.Module):
    """A transformer encoder, averaged over a text."""

    def __init__(self, tokens: int, dropout: float) -> None:
        super().__init__()
        shape = Sizes(tokens, tokens, WIDTH, LAYERS, HEADS, FF, dropout=dropout)
        self.embedding = Embedding(tokens, shape)
        self.layers = nn.ModuleList(EncoderLayer(shape) for _ in range(LAYERS))
        self.end = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, mask[:, None, None, :])
        return _mean(self.end(x), mask)


def _mean(vectors: Tensor, mask: Tensor) -> Tensor:
    weights = mask[:, :, None].to(vectors.dtype)
    return (vectors * weights).sum(1) / weights.sum(1).clamp(min=1)


class TextClassifier(nn.Module):
    """A backbone of ours and a linear head; logits ``[n, classes]`` of token ids ``[n, t]``."""

    def __init__(self, kind: str, tokens: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.backbone = Words(tokens) if kind == "words" else Encoder(tokens, dropout)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(ids, mask))
        return logits


class HubClassifier(nn.Module):
    """A sequence classifier of Hugging Face."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def backbone(self) -> nn.Module:
        """The model without its head."""
        found: nn.Module = self.model.base_model
        return found

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, attention_mask=mask.long()).logits
        return logits


def rebuilt_texts(description: dict[str, Any], classes: int) -> nn.Module:
    """The network that a run's ``config.json`` describes, with initial weights."""
    network: TextClassifier | HubClassifier
    if description["kind"] == "hub":
        network = HubClassifier(pretrained.rebuilt("text", description["config"]))
    else:
        kind, tokens = description["kind"], description["tokens"]
        network = TextClassifier(kind, tokens, classes, description["dropout"])
    add_layers(network, [network.backbone], description.get("layers", ()))
    return network
