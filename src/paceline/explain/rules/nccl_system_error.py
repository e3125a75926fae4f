"""NCCL met a system error.

Meaning: A call of the operating system failed inside NCCL; the log without debug lines does
    not say which.
Cause: Network (wrong interface, closed ports), /dev/shm, or a peer that died.
Confirm: Run again with --env NCCL_DEBUG=INFO: the line before 'NCCL WARN' names the call.
Remedy: paceline check -H HOSTS looks at interfaces, ports and /dev/shm; then run again with
    --env NCCL_DEBUG=INFO and explain that run.
Source: nccl 388, 708 and 1956.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "nccl-system-error",
    __doc__,
    ["(?P<words>ncclSystemError|ncclInternalError|ncclRemoteError|unhandled system error)"],
    "{where}: NCCL failed ({words})",
    confidence=0.6,
    symptom=True,
)
