"""Reports the first inputs of a script's DistributedDataParallel, as checksums.

The launcher compares them: ranks that all get the same batches do the same work.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable, Dict, List

from .checksum import checksum

INPUTS = "replica inputs"
NUM_BATCHES = 4  # in training; later ones are not looked at
MAX_BYTES = 1 << 30  # of a batch
_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_MARK = "_paceline_inputs"  # of our hook

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
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return
        try:
            sums.append(_sum_of_inputs(torch, (args, kwargs)))
        except Exception:  # something that is not compared, or a tensor without bits of its own
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

    setattr(before_forward, _MARK, True)
    handle = model.register_forward_pre_hook(before_forward, with_kwargs=True)


def hide_in_copies(getstate: Callable[[Any], Dict[str, Any]]) -> Callable[[Any], Dict[str, Any]]:
    """Wraps a module's ``__getstate__``, so that no copy and no saved module has the hook."""

    @functools.wraps(getstate)
    def without_hook(module: Any) -> Dict[str, Any]:
        state = getstate(module)
        ours = {key for key, hook in state[_HOOKS[0]].items() if getattr(hook, _MARK, False)}
        for name in _HOOKS if ours else ():
            state[name] = type(state[name])(
                (key, value) for key, value in state[name].items() if key not in ours
            )
        return state

    return without_hook


def _sum_of_inputs(torch: Any, inputs: Any) -> int:
    """Returns a checksum of all tensors in nested containers.

    Raises:
        ValueError: There is none, they are too large, or there are objects of another kind, which
            may hold what differs.
    """
    tensors = []
    for leaf in torch.utils._pytree.tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif not isinstance(leaf, (int, float, str, type(None))):
            raise ValueError
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if not tensors or num_bytes > MAX_BYTES:
        raise ValueError
    with torch.no_grad():
        values = [int(checksum(torch, tensor.detach())) for tensor in tensors]
    return sum((2 * position + 1) * value for position, value in enumerate(values))
