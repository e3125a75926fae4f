"""Classifiers of images and of texts: built-in ones by name, and Hugging Face's."""

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
    """Creates a small convolutional network for images of at least 8×8 pixels.

    Halves the image until it is at most 7 pixels wide. Has no batch normalisation and no dropout,
    which make the result depend on how a batch is shared among processes.

    Args:
        shape: (channels, height, width) of an image.
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
"""Up to these sizes the first layers halve the image once, or never, instead of twice."""


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
        identity = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        total: Tensor = self.relu(self.bn2(self.conv2(x)) + identity)
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
        identity = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        total: Tensor = self.relu(self.bn3(self.conv3(x)) + identity)
        return total


class ResNet(nn.Module):
    """A residual network.

    Args:
        depths: Blocks of each of the four stages.
        shape: (channels, height, width) of an image. Small images are not made smaller by the
            first convolution (3×3 instead of 7×7).
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
        """Initialises weights; each block starts as its shortcut alone, for stable first steps."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, (Basic, Bottleneck)):
                norm = module.bn3 if isinstance(module, Bottleneck) else module.bn2
                nn.init.zeros_(norm.weight)

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


class HubImageClassifier(nn.Module):
    """An image classifier of Hugging Face, for images of any size and of one or three channels.

    Args:
        size: Height and width of its input; ``None`` for any.
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


def wrap_hub_model(model: Any) -> HubImageClassifier:
    """Wraps a model of Hugging Face, with the input size from its configuration."""
    size = getattr(model.config, "image_size", None)
    # Convolutional networks name a size but accept any.
    if not size or not getattr(model.config, "patch_size", None):
        return HubImageClassifier(model, None)
    height, width = (size, size) if isinstance(size, int) else size[:2]
    return HubImageClassifier(model, (height, width))


def backbone(network: nn.Module) -> Sequence[nn.Module]:
    """Returns the modules of a network without its head."""
    if isinstance(network, HubImageClassifier):
        return pretrained.split_backbone(network.model)
    if isinstance(network, torchvision_models.TorchvisionImages):
        return [network.model]
    children = list(network.children())
    return children[:-1]


def describe_network(network: nn.Module, name: str, layers: Sequence[int]) -> dict[str, Any]:
    """Describes a network of this module as JSON values, to build it again.

    ``name`` is its built-in name, ``layers`` the widths of layers added to its head.
    """
    if isinstance(network, HubImageClassifier):
        config = pretrained.describe_config(network.model)
        return {"kind": "hub", "config": config, "layers": [*layers]}
    if isinstance(network, torchvision_models.TorchvisionImages):
        return {**network.describe(), "layers": [*layers]}
    return {"kind": name, "layers": [*layers]}


def build_image_network(description: dict[str, Any], shape: Shape, classes: int) -> nn.Module:
    """Builds the network that a run's ``config.json`` describes, with initial weights."""
    if description["kind"] == "hub":
        network: nn.Module = wrap_hub_model(
            pretrained.build_from_description("image", description["config"])
        )
    elif description["kind"] == "torchvision":
        network = torchvision_models.build_from_description(description, classes)
    else:
        network = MODELS[description["kind"]](shape, classes)
    add_layers(network, backbone(network), description.get("layers", ()))
    return network


WIDTH, LAYERS, HEADS, FF = 128, 2, 4, 256


class WordAverage(nn.Module):
    """Average of a text's word vectors."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.table = nn.Embedding(tokens, WIDTH)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return _masked_mean(self.table(ids), mask)


class Encoder(nn.Module):
    """Average of a transformer encoder's outputs over a text."""

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
        return _masked_mean(self.end(x), mask)


def _masked_mean(vectors: Tensor, mask: Tensor) -> Tensor:
    weights = mask[:, :, None].to(vectors.dtype)
    return (vectors * weights).sum(1) / weights.sum(1).clamp(min=1)


class TextClassifier(nn.Module):
    """A built-in backbone and a linear head: token ids ``[n, t]`` to logits ``[n, classes]``."""

    def __init__(self, kind: str, tokens: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.backbone = WordAverage(tokens) if kind == "words" else Encoder(tokens, dropout)
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
        base: nn.Module = self.model.base_model
        return base

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, attention_mask=mask.long()).logits
        return logits


def build_text_network(description: dict[str, Any], classes: int) -> nn.Module:
    """Builds the network that a run's ``config.json`` describes, with initial weights."""
    network: TextClassifier | HubClassifier
    if description["kind"] == "hub":
        network = HubClassifier(pretrained.build_from_description("text", description["config"]))
    else:
        kind, tokens = description["kind"], description["tokens"]
        network = TextClassifier(kind, tokens, classes, description["dropout"])
    add_layers(network, [network.backbone], description.get("layers", ()))
    return network
