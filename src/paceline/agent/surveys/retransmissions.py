"""What a line to another host lets through: what has no answer, and an ear for who calls.

The kernel sends again what was not answered, and counts how often in a row, for each connection. So
a line that lets nothing through is seen without a packet of our own; what was lost once or twice
and then arrived has no count any more.
"""

from __future__ import annotations

import contextlib
import ipaddress
import select
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

from ..supervision import processes
from . import probe
from .checks import parse_address

Message = Dict[str, Any]
MAX_CONNECTIONS = 100  # connections that are told
_ACTIVE_STATES = ("01", "02")  # states of TCP: established, and calling
_RETRANSMIT_TIMER = "01"  # the timer that runs


def unacked_connections(table: str) -> List[List[Any]]:
    """Connections on which something was sent again, and has no answer yet.

    Args:
        table: ``/proc/net/tcp`` or ``tcp6``.

    Returns:
        ``[peer address, number, times]`` each: the number is the socket's own, and times how often
        it was sent again since the peer answered last.
    """
    connections = []
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 10 or fields[3] not in _ACTIVE_STATES:
            continue
        retransmits = int(fields[6], 16)
        if retransmits and fields[5].split(":")[0] == _RETRANSMIT_TIMER:
            address = ipaddress.ip_address(parse_address(fields[2].rsplit(":", 1)[0]))
            peer = getattr(address, "ipv4_mapped", None) or address
            connections.append([str(peer), int(fields[9]), retransmits])
    return connections


def _report_unacked(agent: Any, request: Message, _: bytes) -> None:
    """Those of the job's processes; of very many some."""

    def work() -> None:
        connections: List[List[Any]] = []
        for name in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):
                connections += unacked_connections(Path("/proc/net", name).read_text())
        if connections:
            pids = [process.pid for process in processes.job_processes(agent.job.token, [], [])]
            job_sockets = processes.sockets_of(pids)
            connections = [connection for connection in connections if connection[1] in job_sockets]
        agent.reply(request, connections=connections[:MAX_CONNECTIONS])

    agent.in_thread(work, request)


def _listen_for(agent: Any, request: Message, _: bytes) -> None:
    """Listens on ``address`` for ``seconds``, and says who we are to who calls; answers the port.

    Apart from the agent's listeners, which others ask for and close.
    """

    def work() -> None:
        with contextlib.closing(probe.listen(request["address"])) as listener:
            agent.reply(request, port=listener.getsockname()[1])
            deadline = time.monotonic() + request["seconds"]
            while (remaining_s := deadline - time.monotonic()) > 0:
                if select.select([listener], [], [], remaining_s)[0]:
                    probe.answer(listener, agent.identity)

    agent.in_thread(work, request)


OPERATIONS: Dict[str, Callable[[Any, Message, bytes], None]] = {
    "unanswered": _report_unacked,
    "hear": _listen_for,
}
