"""Reports the first inputs of a script's DistributedDataParallel, as checksums.

The launcher compares them: ranks that all get the same batches do the same work.
"""

from __future__ import annotations

import sys
from typing import Any, Callable, Dict, List

from .checksum import checksum

INPUTS = "replica inputs"
NUM_BATCHES = 4  # in training; later ones are not looked at

Report = Callable[[Dict[str, Any]], None]


def watch_inputs(model: Any, number: int, members: List[int], report: Report) -> None:
    """Reports the checksums of the first batches of ``model``, and then lets go of it.

    Args:
        number: Number of the model, in the order in which the script makes them.
        members: Ranks of the model's process group.
    """
    torch: Any = sys.modules["torch"]
    sums: List[int] = []

    def before_forward(module: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        try:
            sums.append(_sum_of_inputs(torch, (args, kwargs)))
        except Exception:  # no memory for it, a tensor without bits of its own, or no tensor at all
            handle.remove()
            return
        if len(sums) == NUM_BATCHES:
            handle.remove()
            batches = ["%016x" % (value & (1 << 64) - 1) for value in sums]
            report(
                {
                    "kind": "event", "event": INPUTS, "replica": number, "members": members,
                    "batches": batches,
                }
            )  # fmt: skip

    handle = model.register_forward_pre_hook(before_forward, with_kwargs=True)


def _sum_of_inputs(torch: Any, inputs: Any) -> int:
    """Returns a checksum of all tensors in nested containers; raises ValueError without any."""
    tensors = [
        leaf for leaf in torch.utils._pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)
    ]
    if not tensors:
        raise ValueError
    with torch.no_grad():
        values = [int(checksum(torch, tensor.detach())) for tensor in tensors]
    return sum((2 * position + 1) * value for position, value in enumerate(values))
