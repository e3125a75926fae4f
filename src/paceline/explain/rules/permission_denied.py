"""A file may not be touched.

Meaning: The user of the job may not read or write a path on that host.
Cause: Another owner, a read-only mount, or a folder made by root.
Confirm: ls -ld PATH and id on that host; mount | grep PATH.
Remedy: On that host: sudo chown -R $USER PATH, remount it read-write, or use another folder
    with --run-dir.
Source: errno 13 EACCES and 30 EROFS.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "permission-denied",
    __doc__,
    [
        r"PermissionError: \[Errno 13\] Permission denied: '(?P<path>[^']{1,1000})'",
        r"OSError: \[Errno 30\] Read-only file system: '(?P<path>[^']{1,1000})'",
    ],
    "{where}: no permission for {path}",
    confidence=0.94,
)
