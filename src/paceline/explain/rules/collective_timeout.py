"""A rank did not come to a collective.

Meaning: Ranks waited for another in a collective operation until the time was over.
Cause: The other rank crashed, is frozen, far behind (loading, checkpointing, evaluating
    alone), or ran out of data.
Confirm: Which rank did not report the timeout? Its log's last lines say what it was doing.
Remedy: Look at the ranks that do not report it; give work that one rank does alone a longer
    timeout; equal numbers of batches on all ranks.
Source: pytorch 38174, 118369 and 141069, nccl 708, torchtune 2093.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "collective-timeout",
    __doc__,
    [
        r"Watchdog caught collective operation timeout: (?P<words>WorkNCCL\([^)]{0,300}\))",
        r"(?P<words>Timed out waiting \d{1,20}ms for (?:recv|send) operation)",
        "(?P<words>Application timeout caused pair closure)",
        "(?P<words>Monitored barrier|monitoredBarrier).{0,300}(?:timed out|did not reach)",
    ],
    "{where} waited in vain for another rank ({words})",
    confidence=0.6,
    symptom=True,
)
