"""Ranks of other hosts look for the store at their own loopback address."""

from __future__ import annotations

import re

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, match_unit

_STORE_WAITS = re.compile(r"waiting for clients\. \d{1,9}/\d{1,9} clients joined")
_LOOKS_AT_HOME = re.compile(
    r"trying to connect to \((?P<address>127\.[\d.]{5,11}|::1|localhost), \d{1,5}\)"
)
_REMEDY = (
    "Give all nodes an address of rank 0's host in `MASTER_ADDR` that the other hosts reach;"
    " `paceline run` finds one by itself."
)


def match(evidence: Evidence) -> Match | None:
    """The store waits for ranks that look for it on their own hosts, or it would have met them."""
    if not evidence.contains(_STORE_WAITS):
        return None
    for unit, groups in evidence.search(_LOOKS_AT_HOME):
        cause = (
            f"{unit.label} looks for the store at {groups['address']}, on its own host, while the"
            " store waits on another one"
        )
        return match_unit(unit, cause, 0.95, remedy=_REMEDY)
    return None
