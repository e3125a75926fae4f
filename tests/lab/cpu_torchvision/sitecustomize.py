"""Makes torchvision's CUDA wheel importable with a torch that was built without CUDA.

Torchvision's compiled operators cannot be loaded with this torch, but torchvision looks up their
names during its import. This module defines the names without code; models, transforms and image
data sets need none of the operators. It is on the PYTHONPATH of the scripts under test only.
"""

import importlib.abc
import sys

_OPERATORS = ["nms", "qnms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool",
              "deform_conv2d", "qroi_align", "box_iou_rotated"]  # fmt: skip
_libraries = []  # keeps the library alive: torch drops its operators with it


class _Namer(importlib.abc.MetaPathFinder):
    """Defines the operators before torchvision is imported; finds no module itself."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and not _libraries:
            import torch

            _libraries.append(torch.library.Library("torchvision", "DEF"))
            for operator in _OPERATORS:
                _libraries[0].define(f"{operator}(Tensor given) -> Tensor")
        return


sys.meta_path.insert(0, _Namer())
