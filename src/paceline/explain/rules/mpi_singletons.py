"""Processes that MPI started do not know of each other."""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, match_unit
from paceline.explain.units import Unit

_SIZE = r"(?:world[ _]?|comm[ _]?)?size"
_ALONE = re.compile(
    r"(?i:\b(?:rank|process(?:or)?|proc|task|am)\W{0,3}0(?: of |/| out of )1(?![\d./])"
    rf"|\brank\W{{1,4}}0\b.{{0,60}}\b{_SIZE}\W{{1,4}}1(?![\d.])"
    rf"|\b{_SIZE}\W{{1,4}}1(?![\d.]).{{0,60}}\brank\W{{1,4}}0\b)"
)
_TOGETHER = re.compile(
    r"(?i:\b(?:rank|process(?:or)?|proc|task)\W{0,3}\d{1,6}(?: of |/| out of )(?:[2-9]|\d\d)"
    rf"|\b{_SIZE}\W{{1,4}}(?:[2-9]|\d\d))"
)
_MPI = re.compile(r"\b(?:MPI|MPICH|mpirun|mpiexec|mpi4py|PMI|hydra)\b")
_ENDS_START = ("progress", "finish", "traceback", "crash", "exit")


def match(evidence: Evidence) -> Match | None:
    """Counts the processes that start at one time and say that they are the only one.

    Processes that start one after another are separate runs. If the log does not mention MPI and
    the job succeeded, this may be intended.
    """
    units = sorted((u for log in evidence.logs for u in log.units()), key=lambda u: u.number)
    if evidence.events or any(_TOGETHER.search(unit.text) for unit in units):
        return None
    alone = _longest_start(units)
    if len(alone) < 2:
        return None
    signs = [unit.kind for unit in units if unit.sign_of_life > 1]
    if signs[-1:] == ["finish"] and not any(_MPI.search(unit.text) for unit in units):
        return None
    cause = f"{len(alone)} processes each say that they are rank 0 of 1: they do not form one job"
    return match_unit(alone[0], cause, 0.9)


def _longest_start(units: Sequence[Unit]) -> list[Unit]:
    """Returns the longest series of equal statements without other output in between."""
    longest: list[Unit] = []
    current: dict[tuple[str, int], list[Unit]] = {}
    for unit in units:
        statement = _ALONE.search(unit.text)
        if statement and unit.kind in ("text", "progress"):
            form = statement[0].lower(), len(unit.text.split())  # hosts may differ
            current.setdefault(form, []).append(unit)
            longest = max(longest, list(current[form]), key=len)
        elif unit.kind in _ENDS_START:
            current = {}
    return longest
