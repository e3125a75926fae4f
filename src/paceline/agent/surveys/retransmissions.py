"""Detects links that drop packets, from the kernel's retransmission counts; sends nothing itself.

A segment that was lost and then arrived leaves no count.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, List

from ..operations import in_thread
from ..ranks import peer_filters
from ..supervision import processes
from . import probe
from .checks import decode_address

if TYPE_CHECKING:
    from ..operations import Agent
Message = Dict[str, Any]
MAX_CONNECTIONS = 100  # connections in a reply
_ACTIVE_STATES = ("01", "02")  # TCP_ESTABLISHED, TCP_SYN_SENT
_RETRANSMIT_TIMER = "01"  # kind of a connection's active timer


def unacked_connections(sockets: Iterable[List[str]]) -> List[List[Any]]:
    """Returns connections that retransmit, as [peer address, inode, retransmissions so far].

    Args:
        sockets: Fields of each socket, as from :func:`processes.tcp_sockets`.
    """
    connections = []
    for fields in sockets:
        if len(fields) < 10 or fields[3] not in _ACTIVE_STATES:
            continue
        retransmits = int(fields[6], 16)
        if retransmits and fields[5].split(":")[0] == _RETRANSMIT_TIMER:
            peer = peer_filters.parse_address(decode_address(fields[2].rsplit(":", 1)[0]))
            connections.append([str(peer), int(fields[9]), retransmits])
    return connections


@in_thread
def _report_unacked(agent: Agent, request: Message, _: bytes) -> None:
    """Answers the job's connections that retransmit, at most :data:`MAX_CONNECTIONS`."""
    connections = unacked_connections(processes.tcp_sockets())
    if connections:
        pids = [process.pid for process in processes.job_processes(agent.job.token, [], [])]
        pids.append(os.getpid())  # forwards connections to the store
        job_sockets = processes.sockets_of(pids)
        connections = [link for link in connections if link[1] in job_sockets]
    agent.reply(request, connections=connections[:MAX_CONNECTIONS])


@in_thread
def _listen_for(agent: Agent, request: Message, _: bytes) -> None:
    """Listens on ``address`` for ``seconds``, sends callers the agent's identity; answers the port.

    The listener is not one of ``agent.listeners``, which other requests open and close.
    """
    with contextlib.closing(probe.listen(request["address"])) as listener:
        agent.reply(request, port=listener.getsockname()[1])
        deadline = time.monotonic() + request["seconds"]
        while (remaining_s := deadline - time.monotonic()) > 0:
            if select.select([listener], [], [], remaining_s)[0]:
                probe.answer(listener, agent.identity)


OPERATIONS: "Dict[str, Callable[[Agent, Message, bytes], None]]" = {
    "unanswered": _report_unacked,
    "hear": _listen_for,
}
