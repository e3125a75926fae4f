"""A rank missed a module of the project that git ignores, such as a generated or compiled one."""

from __future__ import annotations

from paceline.explain.evidence import MISSED_MODULE, Evidence
from paceline.explain.rule import Match
from paceline.explain.rules import missing_file


def match(evidence: Evidence) -> Match | None:
    return missing_file.match(evidence, MISSED_MODULE)
