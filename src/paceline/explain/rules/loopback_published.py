"""A loopback address was published to others.

Meaning: A rank told the others an address that means 'myself' on every machine.
Cause: The host's own name stands on a 127.0.1.1 line in /etc/hosts (Debian and Ubuntu), and
    the library published what the name resolves to.
Confirm: getent hosts $(hostname) on each host: 127.0.1.1 is the culprit.
Remedy: paceline run sets the interface per node and needs no change. Otherwise set
    GLOO_SOCKET_IFNAME and TP_SOCKET_IFNAME, or correct the line: paceline check prints the
    command.
Source: pytorch 15592 and 42879, aws-do-eks 69.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "loopback-published",
    __doc__,
    [
        (
            r"(?:connect|Connection|SO_ERROR|remote=|peer|gloo).{0,300}\[?(?P<address>127\.0\.1\.1"
            r"|127\.0\.0\.2)\b"
        )
    ],
    "{where}: another rank published the loopback address {address}",
    confidence=0.95,
)
