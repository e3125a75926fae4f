"""A GPU has no memory left.

Meaning: An allocation on a GPU failed.
Cause: Batch, model or activations are too large for the device, or another process holds part
    of its memory.
Confirm: nvidia-smi on that host while the job runs: does another process hold memory?
Remedy: Lower --global-batch or raise accumulation, use --dtype bf16, or set
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True when much is reserved but unallocated.
Source: torch's own message; pytorch/pytorch issues on CUDA out of memory.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "cuda-out-of-memory",
    __doc__,
    [
        "OutOfMemoryError: (?P<words>CUDA out of memory[^.]*)",
        "RuntimeError: (?P<words>CUDA out of memory[^.]*)",
        "HIP out of memory",
        "RuntimeError: (?P<words>CUDA error: out of memory)",
    ],
    "{where}: a GPU has no memory left ({words})",
    confidence=0.97,
)
