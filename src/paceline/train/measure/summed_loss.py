"""Recognises losses that look like sums over samples, by autograd's last operation.

The gradient of such a loss grows with a rank's share of the batch, so the training would depend on
the number of processes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_SUM = 2  # torch's number for reduction="sum"
_TERMS = ("AddBackward0", "SubBackward0")
_NO_SAMPLES = ("StackBackward0", "CatBackward0")  # what they join are terms of the loss

WARNING = (
    "warning: the loss given to session.step looks like a sum over the samples of the batch. Then"
    " the training depends on the number of processes: give session.step one loss for each sample,"
    " or their mean (.mean())"
)


def is_summed(loss: Tensor, samples: int) -> bool:
    """Whether a scalar loss, or one of two terms of it, looks like a sum over a batch.

    Args:
        loss: Not yet used for a backward pass.
        samples: Size of the batch on this rank. Of one sample, the sum is the mean.
    """
    node: Any = loss.grad_fn
    if node is None or samples < 2:
        return False
    terms = [inner for inner, _ in node.next_functions] if node.name() in _TERMS else [node]
    return any(_sums_rows(term, samples) for term in terms if term is not None)


def _sums_rows(node: Any, samples: int) -> bool:
    if getattr(node, "_saved_reduction", None) == _SUM:
        rows = getattr(node, "_saved_self", None)
        return isinstance(rows, Tensor) and rows.shape[:1] == (samples,)
    if node.name() not in ("SumBackward0", "SumBackward1"):
        return False
    summand = node.next_functions[0][0]
    is_joined = summand is not None and summand.name() in _NO_SAMPLES
    return not is_joined and [*node._saved_self_sym_sizes][:1] == [samples]
