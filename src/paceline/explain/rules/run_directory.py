"""The launcher could not write the run directory."""

from __future__ import annotations

import re

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match

_FIELD = re.compile(r"^ *(found|remedy): *(.+)$", re.MULTILINE)
_REMEDY = "Make room on the disk of the run directory, and leave the directory in place"


def match(evidence: Evidence) -> Match | None:
    failure = evidence.first_failure
    if failure is None or failure.kind != "record":
        return None
    fields = dict(_FIELD.findall(failure.headline))
    cause = ": ".join(filter(None, [failure.headline.partition("\n")[0], fields.get("found")]))
    remedy = fields.get("remedy", _REMEDY)
    again = f"{remedy}. Then run again with the same `--run-dir FOLDER`: {evidence.rerun_effect}."
    return Match(cause, (), None, 0.97, remedy=again)
