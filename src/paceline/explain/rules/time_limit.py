"""The scheduler's time limit was reached.

Meaning: The batch system ended the job because its time was over.
Cause: The job takes longer than it asked for.
Confirm: sacct -j JOB --format=Elapsed,Timelimit,State
Remedy: Ask for more (--time), or let it come back by itself: --requeue saves a checkpoint
    before the limit and resumes.
Source: Slurm's and PBS's messages.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "time-limit",
    __doc__,
    ["DUE TO (?P<words>TIME LIMIT)", r"PBS: job killed: (?P<words>walltime \S{1,50} exceeded)"],
    "the job's time was over ({words})",
    confidence=0.98,
)
