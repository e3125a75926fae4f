"""A connection to another rank broke.

Meaning: A rank lost the connection to a peer.
Cause: The peer ended first; this rank is healthy and only noticed.
Confirm: Which rank ended first, and with what? Its log comes before this one.
Remedy: Look at the ranks that do not complain of a lost connection: one of them failed first.
Source: gloo's and NCCL's messages; pytorch 63174.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "peer-gone",
    __doc__,
    [
        r"(?P<words>Connection closed by peer(?: \S+)?)",
        "(?P<words>Connection reset by peer)",
        r"(?:BrokenPipeError|\[c10d\]|gloo|NCCL|RuntimeError).{0,300}(?P<words>Broken pipe)",
        "(?P<words>Socket Timeout|remote process exited or there was a network error)",
    ],
    "{where} lost the connection to another rank ({words}), which failed first",
    confidence=0.5,
    symptom=True,
)
