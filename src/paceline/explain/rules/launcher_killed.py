"""The launcher ended without a word.

Meaning: The run directory still says whose it is and holds no result of this run.
Cause: kill -9 of the launcher, the memory killer on its machine, or a restart or power cut there.
    The ranks were ended by their agents when the lease ran out.
Confirm: On that machine: dmesg -T | grep -i 'killed process'; uptime; last -x reboot.
Remedy: Run again with the same --run-dir: training that makes checkpoints resumes from the newest.
Source: owner.json without result.json in the run directory.
"""

from __future__ import annotations

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, define


def match(evidence: Evidence) -> Match | None:
    launcher = evidence.launcher
    if launcher is None or launcher.alive:
        return None
    hosts = (launcher.host,)
    again = f"Run again with the same --run-dir: {evidence.again}."
    if launcher.alive is False:
        cause = f"the launcher was killed or its machine {launcher.host} restarted: it"
        return Match(f"{cause} left no result ({launcher.where})", hosts, None, 0.97, remedy=again)
    cause = f"the launcher on {launcher.host} still runs or was killed: there is"
    confirm = f"On {launcher.host}: ps -p {launcher.pid} -o lstart,args"
    said = f"{cause} no result ({launcher.where})"
    return Match(said, hosts, None, 0.6, remedy=again, confirm=confirm)


rule = define("launcher-killed", __doc__, match)
