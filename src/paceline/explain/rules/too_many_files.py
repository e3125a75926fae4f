"""Too many open files.

Meaning: A process may not open more files.
Cause: Many loader workers with the file_descriptor sharing strategy, or files that are never
    closed.
Confirm: ulimit -n on that host, in a non-interactive login.
Remedy: Raise it: `* soft nofile 65536` in /etc/security/limits.conf; or
    torch.multiprocessing.set_sharing_strategy('file_system'); or fewer workers.
Source: errno 24 EMFILE.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "too-many-files",
    __doc__,
    [r"(?:\[Errno 24\] )?Too many open files(?:: '(?P<path>[^']{1,1000})')?"],
    "{where}: too many open files",
    confidence=0.95,
)
