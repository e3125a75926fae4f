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
MOST = 100  # connections that are told
_TALKS = ("01", "02")  # states of TCP: established, and calling
_SENDS_AGAIN = "01"  # the timer that runs


def unanswered(table: str) -> List[List[Any]]:
    """Connections on which something was sent again, and has no answer yet.

    Args:
        table: ``/proc/net/tcp`` or ``tcp6``.

    Returns:
        ``[peer address, number, times]`` each: the number is the socket's own, and times how often
        it was sent again since the peer answered last.
    """
    found = []
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 10 or fields[3] not in _TALKS:
            continue
        times = int(fields[6], 16)
        if times and fields[5].split(":")[0] == _SENDS_AGAIN:
            address = ipaddress.ip_address(parse_address(fields[2].rsplit(":", 1)[0]))
            plain = getattr(address, "ipv4_mapped", None) or address
            found.append([str(plain), int(fields[9]), times])
    return found


def _unanswered(agent: Any, request: Message, _: bytes) -> None:
    """Those of the job's processes; of very many some."""

    def work() -> None:
        found: List[List[Any]] = []
        for name in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):
                found += unanswered(Path("/proc/net", name).read_text())
        if found:
            pids = [process.pid for process in processes.job_processes(agent.job.token, [], [])]
            ours = processes.sockets_of(pids)
            found = [one for one in found if one[1] in ours]
        agent.reply(request, connections=found[:MOST])

    agent.in_thread(work, request)


def _hear(agent: Any, request: Message, _: bytes) -> None:
    """Listens on ``address`` for ``seconds``, and says who we are to who calls; answers the port.

    Apart from the agent's listeners, which others ask for and close.
    """

    def work() -> None:
        with contextlib.closing(probe.listen(request["address"])) as listener:
            agent.reply(request, port=listener.getsockname()[1])
            until = time.monotonic() + request["seconds"]
            while (left := until - time.monotonic()) > 0:
                if select.select([listener], [], [], left)[0]:
                    probe.answer(listener, agent.identity)

    agent.in_thread(work, request)


OPERATIONS: Dict[str, Callable[[Any, Message, bytes], None]] = {
    "unanswered": _unanswered,
    "hear": _hear,
}
