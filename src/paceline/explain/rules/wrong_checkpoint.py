"""A checkpoint does not fit the model.

Meaning: Loading weights failed because names or shapes differ.
Cause: Another architecture or number of classes, or weights saved with the 'module.' prefix
    of DDP.
Confirm: Print the first keys of both sides; do they start with 'module.'?
Remedy: Build the model with the settings of the checkpoint (config.json beside it); strip
    'module.' from the names; --resume never to start afresh.
Source: torch's message.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "wrong-checkpoint",
    __doc__,
    [r"Error\(s\) in loading state_dict for (?P<words>\w+)"],
    "{where}: the checkpoint does not fit the model {words}",
    confidence=0.96,
)
