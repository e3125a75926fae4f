"""Not all nodes came to the rendezvous.

Meaning: The launcher waited for more nodes than came.
Cause: A node was not started, has another id or number of nodes, or cannot reach the
    endpoint.
Confirm: How many joined (in the message)? Which nodes' logs show no start?
Remedy: Start all nodes with the same id, --nnodes and endpoint; or one command for all:
    paceline run -H HOSTS SCRIPT.
Source: torch.distributed's messages; pytorch 147064.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "rendezvous-incomplete",
    __doc__,
    [
        r"waiting for clients\. (?P<words>\d+/\d+) clients joined",
        "(?P<words>RendezvousTimeoutError)",
        "(?P<words>RendezvousConnectionError)",
    ],
    "the nodes did not all meet ({words})",
    confidence=0.9,
)
