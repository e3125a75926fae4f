"""A script was given an option of ours, which stood behind its name."""

from __future__ import annotations

import re

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match
from paceline.spec.command import shell_text

# of `paceline run`, as people type them
OURS = frozenset({
    "-H", "--hosts", "--ssh-config", "--nnodes", "-p", "--nproc-per-node", "--run-dir", "--name",
    "--env", "--iface", "--python", "--max-restarts", "--check", "--plan", "--via", "--detach",
    "--keep", "--data", "--screen", "--ship", "--no-torch", "--hang-timeout",
})  # fmt: skip
_REFUSED = re.compile(r"(?P<script>\S{1,300}): error: unrecognized arguments: (?P<words>.+)")


def match(evidence: Evidence) -> Match | None:
    for log, at, found in evidence.search(_REFUSED):
        words = found["words"].split()
        flag = words[0].partition("=")[0]
        if flag in OURS:
            typed = shell_text(["paceline", "run", *words, found["script"]])
            cause = f"{log.where}: {flag} stands behind the script, which does not know it"
            remedy = f"{flag} is an option of paceline: {typed}"
            return Match(cause, (log.host,) if log.host else (), log.rank, 0.96, (log.lines[at],),
                         remedy)  # fmt: skip
    return None
