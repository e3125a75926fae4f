"""A host name cannot be resolved.

Meaning: A rank was given a name that its host does not know.
Cause: The launcher published a host name that only some machines can resolve.
Confirm: getent hosts NAME on the host that complains.
Remedy: Use addresses: paceline run publishes addresses only. Or add the name to /etc/hosts on
    that host: paceline setup hosts prints the lines.
Source: pytorch 73656, 85300 and 150532.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "name-unknown",
    __doc__,
    [
        (
            r"network addresses of \((?P<name>[^,]{1,300}), \d{1,9}\)"
            r" cannot be retrieved \(gai error: -\d"
        ),
        (
            "(?:gaierror|getaddrinfo).{0,300}(?:Name or service not known"
            "|Temporary failure in name resolution)"
        ),
        r"unknown host:? (?P<name>\S+)",
    ],
    "{where}: the host name {name} cannot be resolved",
    unless="HTTPS?ConnectionPool|urllib3|URLError",
    confidence=0.92,
)
