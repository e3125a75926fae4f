"""A rank missed a file of the project that git ignores."""

from __future__ import annotations

import os
import re

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, match_unit
from paceline.spec.formatting import shell_text

_MISSING = re.compile(r"No such file or directory: '(?P<path>[^']{1,1000})'")


def match(evidence: Evidence) -> Match | None:
    for unit, error in evidence.search(_MISSING):
        path = os.path.normpath(error["path"])
        if path in evidence.ignored_files:
            folder, name = os.path.split(path)
            add = shell_text(["git", "-C", folder, "add", "-f", name])
            cause = f"{unit.label}: there is no {path}: git ignores it here, so it is not sent"
            remedy = (
                f"`{add}`, or take it out of .gitignore: the next start sends it. Send large data"
                " with `paceline run --data FOLDER SCRIPT`, and read it from `$PACELINE_DATA_DIR`"
            )
            confirm = f"`{shell_text(['git', '-C', folder, 'check-ignore', '-v', name])}`"
            return match_unit(unit, cause, 0.97, remedy=remedy, confirm=confirm)
    return None
