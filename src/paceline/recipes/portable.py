"""A trained network with example inputs: what exporting, measuring and quantizing work on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

Figures = tuple[int, dict[str, float]]
"""Samples, and each figure over them."""


@dataclass(frozen=True)
class Portable:
    """A network on the CPU, in float32 and in evaluation mode.

    Attributes:
        folder: The run directory.
        config: The description of the model.
        network: Takes the inputs.
        names: Of the inputs.
        examples: Two samples of each input; the first dimension is the sample.
        lengths: For each input the dimensions, besides the first, that may differ, by number.
        measure: Runs the network as it is used, on inputs like the examples.
        evaluate: Figures of another network with the same inputs, on the held-out data;
            ``None`` where only the network's own parts can be used.
        hub: The library's model inside, for one of Hugging Face.
    """

    folder: Path
    config: Mapping[str, Any]
    network: nn.Module
    names: tuple[str, ...]
    examples: tuple[Tensor, ...]
    lengths: tuple[Mapping[int, str], ...]
    measure: Callable[[tuple[Tensor, ...]], object]
    evaluate: Callable[[nn.Module], Figures] | None = None
    hub: Any = None
