"""A port is taken.

Meaning: A server socket could not be opened because the address is in use.
Cause: A left-over of an earlier job, a second job with the same fixed port, or a port inside
    the ephemeral range that the kernel gave away.
Confirm: ss -ltnp 'sport = :PORT' on the host of rank 0: whose process is it, how old?
Remedy: Leave the port out: paceline run takes a free one and holds it; or end the process
    that ss names.
Source: pytorch 72816 and 191560, enroot 243.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "port-taken",
    __doc__,
    [
        r"failed to listen on any local network address\. port: (?P<port>\d+)",
        (
            "(?:Address already in use|EADDRINUSE"
            r"|address already in use)(?:.{0,300}?port[ :=]{1,5}(?P<port>\d{1,9}))?"
        ),
        r"\[Errno 98\]",
    ],
    "{where}: port {port} is taken",
    confidence=0.95,
)
