"""A node went away while the job ran.

Meaning: The launcher heard nothing more of a node, or the connection to it ended.
Cause: Switched off, restarted, unplugged, frozen, or a network failure.
Confirm: ping the host; uptime there (restarted?); its console.
Remedy: Bring the host back and run again with the same --run-dir, or leave it out: --nnodes, or the
    host list without it. With --max-restarts N, over SSH, a lost host is dialled
    again for six leases (--lease), and all nodes start again once it is back.
Source: pytorch 67742 and 111646.
"""

from __future__ import annotations

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, define


def match(evidence: Evidence) -> Match | None:
    first = evidence.first
    if first is None or first.kind != "lost":
        return None
    return Match(f"{first.host} went away: {first.headline}", (first.host,), None, 0.97)


rule = define("node-lost", __doc__, match)
