"""Ranks called different collectives.

Meaning: Two ranks met in a collective operation with different calls or sizes.
Cause: A branch that not all ranks take (if rank == 0), or tensors whose size depends on the
    rank's data.
Confirm: TORCH_DISTRIBUTED_DEBUG=DETAIL names the two calls.
Remedy: Let all ranks make the same calls in the same order with the same shapes; pad what
    differs in size.
Source: gloo's and c10d's messages.
"""

from __future__ import annotations

from paceline.diagnose.rule import in_log

rule = in_log(
    "collective-mismatch",
    __doc__,
    [
        "Detected mismatch between collectives on ranks(?P<words>[^.]*)",
        r"(?P<words>op\.preamble\.length <= op\.nbytes\. \d+ vs \d+)",
        "(?P<words>Mismatch between collective operation types)",
    ],
    "{where}: ranks called different collectives ({words})",
    confidence=0.97,
)
