"""The job hung, and was ended for it.

Meaning: No rank made a step for longer than --hang-timeout, and some waited in a collective for
    another that did not come.
Cause: A rank that is stopped, waits for something else, took another branch or ended early; or a
    network that lets data through in one direction only.
Confirm: events.jsonl: "hang" says who stood where. In a run that hangs now: py-spy dump --pid PID.
Remedy: Let every rank come to the same collectives in the same order. Where all wait for each
    other, paceline check tries every direction between the hosts.
Source: torch.distributed waits as long as its time-out, by default half an hour.
"""

from __future__ import annotations

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, define


def match(evidence: Evidence) -> Match | None:
    first = evidence.first
    if first is None or first.kind != "hang":
        return None
    who = first.where if first.rank is not None else "the job"
    hosts = (first.host,) if first.rank is not None else ()
    return Match(f"{who} {first.headline}", hosts, first.rank, 0.98)


rule = define("hang", __doc__, match)
