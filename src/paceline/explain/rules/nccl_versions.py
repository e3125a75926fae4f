"""NCCL versions differ.

Meaning: The ranks loaded different NCCL libraries.
Cause: torch was installed separately on each node, or LD_LIBRARY_PATH brings in another NCCL.
Confirm: NCCL_DEBUG=VERSION on every host; paceline check compares them.
Remedy: Install the same torch everywhere, and take foreign NCCL folders out of
    LD_LIBRARY_PATH.
Source: nccl 286, pytorch 122571.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "nccl-versions",
    __doc__,
    [
        r"(?P<words>(?:Mismatched NCCL version|NCCL version mismatch)[^\n]*)",
        "NCCL WARN.{0,300}(?P<words>version mismatch.*)",
    ],
    "{where}: {words}",
    confidence=0.96,
)
