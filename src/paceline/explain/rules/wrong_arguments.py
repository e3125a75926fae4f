"""An option of paceline stood after the script's name and reached the script."""

from __future__ import annotations

import re

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, match_unit
from paceline.spec.formatting import shell_text

# of `paceline run`
PACELINE_OPTIONS = frozenset({
    "-H", "--hosts", "--ssh-config", "--nnodes", "-p", "--nproc-per-node", "--run-dir", "--name",
    "--env", "--iface", "--python", "--max-restarts", "--check", "--plan", "--via", "--detach",
    "--keep", "--data", "--screen", "--ship", "--no-torch", "--hang-timeout",
})  # fmt: skip
_UNRECOGNIZED = re.compile(r"(?P<script>\S{1,300}): error: unrecognized arguments: (?P<words>.+)")


def match(evidence: Evidence) -> Match | None:
    for unit, error in evidence.search(_UNRECOGNIZED):
        arguments = error["words"].split()
        flag = arguments[0].partition("=")[0]
        if flag in PACELINE_OPTIONS:
            option = shell_text(["paceline", "run", *arguments, error["script"]])
            cause = f"{unit.label}: {flag} stands after the script, which does not know it"
            remedy = (
                f"Options of Paceline go before the script: `{option}`, with your other options"
                " beside it, and the script's own arguments after its name"
            )
            return match_unit(unit, cause, 0.96, remedy=remedy)
    return None
