"""A rank missed a file of the project that git ignores."""

from __future__ import annotations

import os
import re

from paceline.explain.evidence import MISSED_FILE, Evidence
from paceline.explain.rule import Match, match_unit
from paceline.spec.formatting import shell_text


def match(evidence: Evidence, pattern: re.Pattern[str] = MISSED_FILE) -> Match | None:
    for unit, error in evidence.search(pattern):
        path = evidence.ignored_files.get(error["path"])
        if path is not None:
            folder, name = os.path.split(path)
            add = shell_text(["git", "-C", folder, "add", "-f", name])
            cause = f"{unit.label}: {path} was not sent to the host, because git ignores it"
            remedy = (
                f"`{add}`, or remove it from .gitignore; the next start then sends it. If an"
                " earlier run wrote it, start with the `--run-dir` of that run instead. Send large"
                " data with `paceline run --data FOLDER SCRIPT`, and read it from"
                " `$PACELINE_DATA_DIR`"
            )
            confirm = f"`{shell_text(['git', '-C', folder, 'check-ignore', '-v', name])}`"
            return match_unit(unit, cause, 0.97, remedy=remedy, confirm=confirm)
    return None
