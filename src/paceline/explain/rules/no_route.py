"""A host cannot be reached: no route.

Meaning: The kernel knows no way to an address that was published.
Cause: The wrong interface was chosen or advertised, or a route is missing.
Confirm: ip route get ADDRESS on that host; paceline check names the pair.
Remedy: paceline check -H HOSTS finds the guilty host and prints the command; paceline run
    chooses reachable addresses itself, --iface NAME forces one.
Source: nccl-tests 219, ColossalAI 6261; errno 113 EHOSTUNREACH and 101 ENETUNREACH.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "no-route",
    __doc__,
    ["(?P<words>No route to host)", "(?P<words>Network is unreachable)"],
    "{where}: {words}: an address that was published cannot be reached from there",
    unless="ssh: connect to host",
    confidence=0.9,
)
