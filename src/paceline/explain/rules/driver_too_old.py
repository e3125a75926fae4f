"""The GPU driver is too old.

Meaning: The driver does not know the CUDA version that torch was built for.
Cause: torch was updated (or installed anew on one node) while the driver was not.
Confirm: nvidia-smi shows the driver and the newest CUDA it can do, on every host: paceline
    check.
Remedy: Update the driver on that host, or install a torch built for an older CUDA on all
    hosts.
Source: nccl 447; CUDA's messages.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "driver-too-old",
    __doc__,
    [
        r"NVIDIA driver on your system is too old \(found version (?P<words>\d+)\)",
        "(?P<words>CUDA driver version is insufficient for CUDA runtime version)",
    ],
    "{where}: the GPU driver is too old ({words})",
    confidence=0.97,
)
