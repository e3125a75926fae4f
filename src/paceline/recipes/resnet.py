"""Residual networks for images, with the tensor names that published weights have."""

from __future__ import annotations

from torch import Tensor, nn

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
