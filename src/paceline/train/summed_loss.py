"""Recognises losses that are sums over samples, from the operations that autograd has recorded.

The gradient of such a loss grows with a rank's share of the batch, so the training would depend on
the number of processes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from torch import Tensor

from paceline.spec.errors import SettingError

_SUM = 2  # torch's number for reduction="sum"
# What keeps a sum a sum. Not a product or quotient of the script, which may make a mean of it;
# MulBackward1 is torch's own, in losses with label smoothing.
_OUTER = re.compile(r"(Neg|ToCopy|Add|Sub)Backward0|MulBackward1")
_WITHIN_SAMPLE = re.compile(
    r"(Neg|ToCopy|Add|Sub|Pow|Abs|Exp|Log|Sqrt|Clamp\w*|Where|MaskedFill|Squeeze|Mul|Div)Backward\d"
    r"|(Mean|Sum)Backward1"
)
_TERMS = re.compile(r"(Stack|Cat)Backward0|(Mean|Sum)Backward0")
# What has one row for each sample: outputs of layers and models.
_BY_SAMPLE = re.compile(
    r"(Addmm|Convolution|LogSoftmax|Gather)Backward0|_DDPSinkBackward|Compiled.*"
)
_PARAMETER = "torch::autograd::AccumulateGrad"


class Summed(Enum):
    """Whether a loss is a sum over samples."""

    NO = "no"
    MAYBE = "maybe"
    YES = "yes"


def classify_loss(loss: Tensor, samples: int) -> Summed:
    """Returns whether a scalar loss, or a term of it, is a sum over the samples of a batch.

    Args:
        loss: Not yet used for a backward pass.
        samples: Size of the batch on this rank. Of one sample, the sum is the mean.
    """
    if samples < 2:
        return Summed.NO
    findings = {_classify_term(node, samples) for node in _terms(loss.grad_fn)}
    return next((found for found in (Summed.YES, Summed.MAYBE) if found in findings), Summed.NO)


def check_loss(loss: Tensor, samples: int, warn: Callable[[str], None]) -> None:
    """Refuses a loss that is a sum over samples, and warns of one that may be.

    Args:
        loss, samples: As of :func:`classify_loss`.
        warn: Shows a line to the user.

    Raises:
        SettingError: It is a sum.
    """
    match classify_loss(loss, samples):
        case Summed.YES:
            raise SettingError(
                "session.step was given the sum of the losses, not their mean",
                found=f"a sum over {samples} samples, this process's part of the batch: the"
                " training would depend on the number of processes",
                remedy='give it one loss for each sample (reduction="none", and .mean(1) over what'
                " belongs to one sample), or the mean (.mean()). Gradients of a mean are smaller:"
                " the learning rate may have to be larger",
            )
        case Summed.MAYBE:
            warn(
                "warning: the loss given to session.step looks like a sum over the samples. Unless"
                " it is a mean, the training depends on the number of processes: give session.step"
                " one loss for each sample, or .mean()"
            )


def _terms(node: Any) -> Iterator[Any]:
    """Yields the operations whose results are added up to the loss."""
    if node is None:
        return
    if _OUTER.fullmatch(node.name()):
        for inner, _ in node.next_functions:
            yield from _terms(inner)
    else:
        yield node


def _classify_term(node: Any, samples: int) -> Summed:
    if getattr(node, "_saved_reduction", None) == _SUM:
        rows = getattr(node, "_saved_self", None)
        is_by_sample = isinstance(rows, Tensor) and rows.dim() and len(rows) % samples == 0
        return Summed.YES if is_by_sample else Summed.MAYBE
    if not re.fullmatch(r"SumBackward\d", node.name()):
        return Summed.NO
    if [*getattr(node, "_saved_self_sym_sizes", ())][:1] != [samples]:
        return Summed.NO
    return _classify_summand(node.next_functions[0][0], samples)


def _classify_summand(summand: Any, samples: int) -> Summed:
    """Returns whether what is summed has one row for each sample."""
    pending, ends, is_weighted = [summand], [], False
    while pending:
        node = pending.pop()
        if node is None:
            continue
        name = node.name()
        if _TERMS.fullmatch(name) or (name.endswith("nBackward1") and _is_over_rows(node)):
            return Summed.NO
        if _WITHIN_SAMPLE.fullmatch(name):
            inner = [function for function, _ in node.next_functions if function is not None]
            is_weighted |= name[:3] in ("Mul", "Div") and len(inner) < 2  # may make a mean of it
            pending += inner
        else:
            ends.append(node)
    names = [node.name() for node in ends]
    if all(name == _PARAMETER for name in names):  # weight decay
        return Summed.NO
    is_by_sample = any(
        _BY_SAMPLE.fullmatch(node.name()) or hasattr(node, "_saved_reduction") for node in ends
    )
    return Summed.YES if is_by_sample and not is_weighted else Summed.MAYBE


def _is_over_rows(reduction: Any) -> bool:
    """Whether a mean or sum was taken over the first dimension, among others."""
    dimensions = len(reduction._saved_self_sym_sizes)
    # negative ones are saved as unsigned 64-bit numbers
    dims = [dim - 2**64 if dim >= 2**63 else dim for dim in reduction._saved_dim]
    return any(dim % dimensions == 0 for dim in dims)
