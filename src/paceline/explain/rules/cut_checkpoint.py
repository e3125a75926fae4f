"""A checkpoint is cut off: torch's reader cannot find its end, and says no more."""

from __future__ import annotations

import re

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, match_unit

_INVALID_ARGUMENT = re.compile(r"OSError: (?P<words>\[Errno 22\] Invalid argument)$")
_READER = re.compile(r"/torch/serialization\.py$")


def match(evidence: Evidence) -> Match | None:
    """Finds EINVAL from the reader of ``torch.load``, which names no file."""
    for unit, message in evidence.search(_INVALID_ARGUMENT):
        frames = unit.error.frames if unit.error else ()
        if frames and _READER.search(frames[-1].file) and "Reader" in "".join(unit.lines[-4:]):
            cause = f"{unit.label}: a checkpoint is cut off or damaged ({message['words']})"
            return match_unit(unit, cause, 0.8)
    return None
