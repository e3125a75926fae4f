"""What detection needs: a look at the mentions of a text without raising its errors."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.hosts.dialect import Colon, Reading
from paceline.hosts.lines import Mention, read_mentions
from paceline.hosts.mentions import colon_meaning
from paceline.spec.errors import HostsError


def peek(reading: Reading) -> Sequence[Mention]:
    """The mentions; none where the text cannot be read (its parser will say why)."""
    try:
        return read_mentions(reading)
    except HostsError:
        return ()


def has_colon(reading: Reading, meaning: Colon) -> bool:
    """Whether some ``host:n`` of the text has this meaning by the default rule."""
    mentions = peek(reading)
    return any(colon_meaning(m, mentions, reading.colon) == meaning for m in mentions)
