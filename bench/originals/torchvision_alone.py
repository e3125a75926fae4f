"""Makes torchvision importable with a CPU build of torch, which cannot load its operators.

Add a folder with torchvision (``pip install --no-deps --target FOLDER torchvision``) and this file
as ``sitecustomize.py`` to ``PYTHONPATH``. The operators, which are for detection only, are defined
without an implementation, so that models, data sets and transforms can be used. The checksum of
CIFAR-10 is not verified, because ``cifar10.py`` packs it again.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

BOXES = ("nms", "qnms")
REGIONS = ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")


class Finder(importlib.abc.MetaPathFinder):
    """Defines the operators before the first import of torchvision."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        libraries.append(define_operators())
        from torchvision.datasets import CIFAR10

        CIFAR10._check_integrity = lambda self: True  # type: ignore[method-assign]
        CIFAR10.meta = {**CIFAR10.meta, "md5": None}


def define_operators() -> Any:
    """Define all operators without an implementation."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in BOXES:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for name in REGIONS:
        library.define(f"{name}(Tensor x) -> Tensor")
        library.define(f"_{name}_backward(Tensor x) -> Tensor")
    return library


libraries: list[Any] = []
sys.meta_path.insert(0, Finder())
