"""The rendezvous store cannot be reached.

Meaning: A rank could not connect to the address and port of rank 0's store in time.
Cause: Rank 0 did not start or died early, a firewall drops the port, or the address is one
    that others do not reach.
Confirm: Did rank 0 start (its log)? nc -vz ADDRESS PORT from the host that complains.
Remedy: paceline check -H HOSTS tries the ports both ways and names the firewall; when rank 0
    failed, its own error comes first.
Source: pytorch 44544 and 85300; c10d's message.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "store-unreachable",
    __doc__,
    [
        (
            r"client socket has timed out after \d{1,12} ?m?s while trying to connect to"
            r" \((?P<host>[^,]{1,300}), (?P<port>\d{1,9})\)"
        ),
        r"TCP client failed to connect/validate to host (?P<host>[^: ]{1,300}):(?P<port>\d{1,9})",
    ],
    "{where}: the store at {host} port {port} does not answer",
    unless="gai error|ssh: connect",
    confidence=0.8,
)
