"""Ranks built different models.

Meaning: DDP found other parameter shapes or counts on another rank.
Cause: The model depends on the rank, on data that differs per host, or code differs between
    hosts.
Confirm: Print the parameter shapes on every rank; paceline run ships equal code unless --ship
    never.
Remedy: Build the model from the same settings on all ranks, and let code be shipped (leave
    --ship never out).
Source: DDP's message.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "different-models",
    __doc__,
    [
        (
            r"params?\[\d+\] in this process with sizes (?P<words>\[[^\]]{0,300}\]) appears not to"
            " match"
        ),
        r"DDP expects same model across all ranks, but (?P<words>Rank \d+ has \d+ params)",
    ],
    "{where}: its model is not that of the other ranks ({words})",
    confidence=0.97,
)
