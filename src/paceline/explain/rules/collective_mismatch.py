"""Ranks called different collectives."""

from __future__ import annotations

from paceline.explain import stacks
from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match
from paceline.explain.stacks import Stand
from paceline.spec.failure import PEER_GONE


def match(evidence: Evidence) -> Match | None:
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
