"""Some parameters got no gradient.

Meaning: DDP waited for gradients of parameters that the loss did not use.
Cause: A part of the model is skipped in some steps, or outputs are dropped before the loss.
Confirm: TORCH_DISTRIBUTED_DEBUG=DETAIL lists the parameters by name.
Remedy: Remove or freeze the unused parts, or DistributedDataParallel(...,
    find_unused_parameters=True), with paceline.train session.prepare(..., unused=True).
Source: DDP's message.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "unused-parameters",
    __doc__,
    [
        "Expected to have finished reduction in the prior iteration",
        r"Parameter indices which did not receive grad for rank (?P<rank>\d+)",
    ],
    "{where}: some parameters of the model got no gradient",
    confidence=0.96,
)
