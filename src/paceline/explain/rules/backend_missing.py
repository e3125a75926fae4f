"""This torch lacks the backend.

Meaning: A communication backend was asked for that this torch was built without, or that has
    no device.
Cause: A CPU build of torch on a GPU node, NCCL asked for on CPU, or MPI without a torch built
    for it.
Confirm: python -c 'import torch.distributed as d; print(d.is_nccl_available(),
    d.is_gloo_available(), d.is_mpi_available())'
Remedy: --backend gloo on CPUs; on GPUs install a CUDA build of torch.
Source: torch.distributed's messages.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "backend-missing",
    __doc__,
    [
        r"Distributed package doesn't have (?P<name>\w+) built in",
        "ProcessGroup(?P<name>NCCL) is only supported with GPUs, no GPUs found",
    ],
    "{where}: this torch has no usable backend {name}",
    confidence=0.97,
)
