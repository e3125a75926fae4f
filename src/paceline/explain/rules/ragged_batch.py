"""A DataLoader stacks samples of different sizes. A model may stack tensors of its own, too."""

from __future__ import annotations

import re

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, match_unit

_STACK = re.compile(r"stack expects each tensor to be equal size[^\n]{0,120}")
_COLLATE = re.compile(r"/torch/utils/data/|collat")


def match(evidence: Evidence) -> Match | None:
    for unit, words in evidence.search(_STACK):
        if any(_COLLATE.search(f"{frame.file} {frame.function}") for frame in unit.frames):
            cause = f"{unit.label}: the samples of a batch have different sizes ({words[0]})"
            return match_unit(unit, cause, 0.93)
    return None
