"""Lets torchvision's wheel be imported beside a torch without CUDA, for which it is not built.

Its compiled operators cannot be loaded there, and it looks for their names while it is imported.
They are named here, without code: models, transforms and data sets of images need none of them.
Stands on PYTHONPATH of the scripts under test only.
"""

import importlib.abc
import sys

_OPERATORS = ["nms", "qnms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool",
              "deform_conv2d", "qroi_align", "box_iou_rotated"]  # fmt: skip
_libraries = []  # torch forgets an operator when its library goes


class _Namer(importlib.abc.MetaPathFinder):
    """Names the operators when torchvision is about to be imported, and finds nothing itself."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and not _libraries:
            import torch

            _libraries.append(torch.library.Library("torchvision", "DEF"))
            for operator in _OPERATORS:
                _libraries[0].define(f"{operator}(Tensor given) -> Tensor")
        return


sys.meta_path.insert(0, _Namer())
