"""An option of paceline stood after the script's name and reached the script."""

from __future__ import annotations

import re

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match
from paceline.spec.formatting import shell_text

# of `paceline run`
PACELINE_OPTIONS = frozenset({
    "-H", "--hosts", "--ssh-config", "--nnodes", "-p", "--nproc-per-node", "--run-dir", "--name",
    "--env", "--iface", "--python", "--max-restarts", "--check", "--plan", "--via", "--detach",
    "--keep", "--data", "--screen", "--ship", "--no-torch", "--hang-timeout",
})  # fmt: skip
_UNRECOGNIZED = re.compile(r"(?P<script>\S{1,300}): error: unrecognized arguments: (?P<words>.+)")


def match(evidence: Evidence) -> Match | None:
    for log, index, error in evidence.search(_UNRECOGNIZED):
        arguments = error["words"].split()
        flag = arguments[0].partition("=")[0]
        if flag in PACELINE_OPTIONS:
            command = shell_text(["paceline", "run", *arguments, error["script"]])
            cause = f"{log.label}: {flag} stands after the script, which does not know it"
            remedy = f"{flag} is an option of paceline: {command}"
            return Match(cause, log.hosts, log.rank, 0.96, (log.lines[index],),
                         remedy)  # fmt: skip
    return None
