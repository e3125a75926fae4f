"""A script with relative imports was started as a file; the module to start instead."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, match_unit

_NO_PARENT = re.compile(r"attempted relative import with no known parent package")
_IMPORT = re.compile(r"^\s*from (?P<dots>\.+)")


def match(evidence: Evidence) -> Match | None:
    for unit, _ in evidence.search(_NO_PARENT):
        script = unit.frames[-1].file if unit.frames else ""
        imports = [found for line in unit.lines if (found := _IMPORT.match(line))]
        path = PurePosixPath(script)
        num_levels = len(imports[-1]["dots"]) if imports else 0
        if not num_levels or len(path.parts) <= num_levels or path.suffix != ".py":
            continue
        module = ".".join([*path.parts[-num_levels - 1 : -1], path.stem])
        folder = path.parents[num_levels]
        cause = f"{unit.label}: {path.name} has a relative import, and was started as a file"
        remedy = f"Start it as a module, in {folder}: `paceline run -m {module}`"
        return match_unit(unit, cause, 0.98, remedy=remedy)
    return None
