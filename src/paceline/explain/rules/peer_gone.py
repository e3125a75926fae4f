"""Ranks lost their connection to one that ended first."""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, match_unit
from paceline.explain.units import Unit
from paceline.spec.failure import PEER_LOST

_LOST = re.compile(
    f"{PEER_LOST.pattern}|Connection closed by remote peer|remote process exited"
    r"|detected by watchdog at work"
)
_ADDRESS = re.compile(
    r"(?:Call to (?:recv|send|recvmsg) from |closed by (?:remote )?peer )\[?"
    r"(?P<peer>[\w.:-]{1,100}?)\]?(?:<\d{1,5}>|:\d{1,5}\b)"
)


def match(evidence: Evidence) -> Match | None:
    """Names the only rank that neither complains nor goes on, or the only peer of complaints."""
    lost = [unit for unit, _ in evidence.search(_LOST)]
    labeled = [unit for unit in lost if unit.rank is not None]
    silent = evidence.outcome.ranks - evidence.outcome.running - {unit.rank for unit in labeled}
    if not lost or evidence.events:
        return None
    if not labeled or len(silent) != 1:
        return _by_address(lost)
    rank = min(silent)
    cause = f"rank {rank} ended first: {labeled[0].label} lost its connection to it"
    found = match_unit(labeled[0], cause, 0.6)
    return Match(cause, (), rank, found.confidence, found.lines, unit=labeled[0])


def _by_address(lost: Sequence[Unit]) -> Match | None:
    """Names the address to which two processes or more lost their connection, if it is one."""
    peers = [(unit, found["peer"]) for unit in lost if (found := _ADDRESS.search(unit.text))]
    if len({peer for _, peer in peers}) != 1 or len({unit.label for unit, _ in peers}) < 2:
        return None
    unit, peer = peers[0]
    if any(peer == other.host for other in lost):
        return None
    cause = (
        f"a process on {peer} ended first, or its host left the network: {unit.label} and others"
        " lost their connection to it"
    )
    remedy = (
        f"Look at the log of the ranks on {peer}, and whether that host is up: what failed there"
        " is not in this log."
    )
    return Match(cause, (peer,), None, 0.6, unit.lines[-1:], remedy, unit=unit)
