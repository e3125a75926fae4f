"""The launcher ended without a word."""

from __future__ import annotations

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match


def match(evidence: Evidence) -> Match | None:
    launcher = evidence.launcher
    if launcher is None or launcher.alive:
        return None
    hosts, what = (launcher.host,), launcher.what
    again = f"Run again with the same --run-dir: {evidence.again}."
    if launcher.alive is False:
        cause = f"the {what} was killed or its host {launcher.host} restarted: it"
        return Match(f"{cause} left no result ({launcher.where})", hosts, None, 0.97, remedy=again)
    cause = f"the {what} on {launcher.host} still runs or was killed: there is"
    confirm = f"On {launcher.host}: ps -p {launcher.pid} -o lstart,args"
    if launcher.pid is None:
        confirm = f"As soon as {launcher.host} can be reached: paceline status"
    said = f"{cause} no result ({launcher.where})"
    return Match(said, hosts, None, 0.6, remedy=again, confirm=confirm)
