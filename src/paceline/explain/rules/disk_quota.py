"""A disk quota is used up.

Meaning: A write failed because the user's share is used up; the disk itself may have room.
Cause: Home folders on clusters have quotas; caches of hubs and packages fill them.
Confirm: quota -s (or lfs quota -h DIR) on that host; du -sh ~/.cache.
Remedy: Move caches and runs to scratch: --env HF_HOME=/scratch/$USER/hf, --run-dir
    /scratch/$USER/runs; or delete from ~/.cache.
Source: errno 122 EDQUOT.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "disk-quota",
    __doc__,
    [r"Disk quota exceeded(?::? '?(?P<path>/[^'\s]+))?"],
    "{where}: the disk quota is used up, writing {path}",
    confidence=0.96,
)
