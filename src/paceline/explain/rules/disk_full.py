"""A disk is full.

Meaning: A write failed because no space was left.
Cause: Checkpoints, logs or a cache filled the file system that holds the named path.
Confirm: df -h PATH on that host (and df -i: files can run out, too).
Remedy: On that host free some space (du -xsh DIR/* | sort -h), keep fewer checkpoints, or
    move the run with --run-dir to another disk; then run again: with checkpoints it resumes from
    the last good one.
Source: errno 28 ENOSPC.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "disk-full",
    __doc__,
    [
        r"No space left on device(?!.{0,300}(?:/dev/shm|torch_\d))(?::? '?(?P<path>/[^'\s]+))?",
        "PytorchStreamWriter failed writing file",
    ],
    "{where}: the disk is full, writing {path}",
    confidence=0.96,
)
