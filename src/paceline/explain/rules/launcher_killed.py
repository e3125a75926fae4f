"""The launcher ended without a result."""

from __future__ import annotations

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match


def match(evidence: Evidence) -> Match | None:
    launcher = evidence.launcher
    if launcher is None or launcher.alive:
        return None
    hosts, role = (launcher.host,), launcher.role
    remedy = f"Run again with the same `--run-dir FOLDER`: {evidence.rerun_effect}."
    if launcher.alive is False:
        cause = f"the {role} was killed or its host {launcher.host} restarted: it"
        return Match(
            f"{cause} left no result ({launcher.location})", hosts, None, 0.97, remedy=remedy
        )
    cause = f"the {role} on {launcher.host} still runs or was killed: there is"
    confirm = f"On {launcher.host}: `ps -p {launcher.pid} -o lstart,args`"
    if launcher.pid is None:
        confirm = f"As soon as {launcher.host} can be reached: `paceline status`"
    message = f"{cause} no result ({launcher.location})"
    return Match(message, hosts, None, 0.6, remedy=remedy, confirm=confirm)
