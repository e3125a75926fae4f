"""Ranks called different collectives.

Meaning: Two ranks met in a collective operation with different calls or sizes.
Cause: A branch that not all ranks take (if rank == 0), or tensors whose size depends on the
    rank's data.
Confirm: TORCH_DISTRIBUTED_DEBUG=DETAIL names the two calls.
Remedy: Let all ranks make the same calls in the same order with the same shapes; pad what
    differs in size.
Source: gloo's and c10d's messages.
"""

from __future__ import annotations

from paceline.explain import stacks
from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, define, in_log
from paceline.explain.stacks import Stand
from paceline.spec.failure import PEER_GONE

_CODE = "collective-mismatch"
_told = in_log(
    _CODE,
    __doc__,
    [
        "Detected mismatch between collectives on ranks(?P<words>[^.]*)",
        r"(?P<words>op\.preamble\.length <= op\.nbytes\. \d+ vs \d+)",
        "(?P<words>Mismatch between collective operation types)",
    ],
    "{where}: ranks called different collectives ({words})",
    confidence=0.97,
)


def match(evidence: Evidence) -> Match | None:
    return _told.match(evidence) or _by_stacks(evidence)


def _by_stacks(evidence: Evidence) -> Match | None:
    """Ranks that waited for each other in different calls."""
    stands = [*stacks.failed(evidence, PEER_GONE), *stacks.seen(evidence)]
    inside = {stand.rank: stand for stand in reversed(stands) if stand.own and stand.collective}
    if len(inside) < 2 or len({_call(stand) for stand in inside.values()}) < 2:
        return None
    one, *others = (inside[rank] for rank in sorted(inside))
    other = next(stand for stand in others if _call(stand) != _call(one))
    cause = f"ranks called different collectives: {one.who} {_words(one)}, "
    return Match(f"{cause}{other.who} {_words(other)}", (one.host, other.host), None, 0.9)


def _call(stand: Stand) -> tuple[str, str]:
    assert stand.own is not None
    return (stand.collective, stand.own.where)


def _words(stand: Stand) -> str:
    assert stand.own is not None
    return f"{stand.collective} ({stand.own.where})"


rule = define(_CODE, __doc__, match)
