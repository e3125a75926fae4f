"""The host refused memory.

Meaning: The operating system would not give a process more memory; nobody was killed.
Cause: A huge allocation (often a wrong size), a limit (ulimit -v, a container) or a host
    whose memory is used up.
Confirm: free -h and ulimit -a on that host; is the size in the message plausible?
Remedy: Check the size in the message first; then fewer loader workers, a smaller batch,
    memory-mapped data, or more memory.
Source: torch's own message; numpy and CPython raise MemoryError.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "host-memory-refused",
    __doc__,
    [
        (
            r"DefaultCPUAllocator: can't allocate memory: you tried to allocate (?P<words>\d+"
            " bytes)"
        ),
        r"^(?P<words>(?:numpy\.\w+\.)*_?(?:Array)?MemoryError(?:: .*)?)$",
        r"OSError: \[Errno 12\] (?P<words>Cannot allocate memory)",
    ],
    "{where}: the host refused memory ({words})",
)
