"""The shared memory folder is too small.

Meaning: Data loader workers or NCCL ran out of shared memory.
Cause: Containers get 64 MiB of /dev/shm unless told otherwise; each loader worker passes
    whole batches through it.
Confirm: df -h /dev/shm inside the container or on the host.
Remedy: Start the container with --shm-size=8g (paceline: --shm-size 8g), on a host: sudo
    mount -o remount,size=8g /dev/shm; or fewer loader workers.
Source: NVIDIA/nccl issues 290 and 342; torch's own message;
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "shared-memory-small",
    __doc__,
    [
        "(?P<words>Unexpected bus error encountered in worker)",
        r"insufficient shared memory \(shm\)",
        "(?P<words>unable to (?:open|mmap|write|allocate) (?:to )?shared memory)",
        "No space left on device.{0,300}(?P<words>/dev/shm)",
        "(?P<words>Error while creating shared memory segment) /dev/shm/nccl",
    ],
    "{where}: /dev/shm is too small ({words})",
    confidence=0.98,
)
