"""A rank's side of encrypted ways to the ranks of other hosts: see ``supervision/tunnels.py``.

Ranks listen on loopback, at their host's address there. Before a rank connects to another one, its
agent opens a way there.
"""

from __future__ import annotations

import json
import os
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

from .. import reconnection

VARIABLE = "PACELINE_TUNNELS"  # as in spec/jobenv.py
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")  # of gloo and RPC
_TIMEOUT_S = 10.0
PORT_TAKEN = "port taken: "  # how an agent's answer begins if a program has the port on its host
MAX_ATTEMPTS = 5  # of a group to find ports that are free on all hosts
_KEY = "paceline/socket/%d/%s"  # in the store of a group; of an attempt

Way = Tuple[str, int, str, int]
"""Address and port of a rank; address and port of its gateway, "" and 0 if the agent knows it."""


class Tunnels(NamedTuple):
    """What the agent says in :data:`VARIABLE`.

    Attributes:
        address: At which this host's ranks listen.
        gateway, port: Of this host.
        agent: Name of the abstract socket on which the agent takes requests.
    """

    address: str
    gateway: str
    port: int
    agent: str


def current() -> Optional[Tunnels]:
    """Returns this rank's tunnels; ``None`` if the job is not encrypted."""
    parts = os.environ.get(VARIABLE, "").split()
    return Tunnels(parts[0], parts[1], int(parts[2]), parts[3]) if parts else None


class PortTakenError(OSError):
    """Another program has the port of another host's rank on this host."""


def open_ways(tunnels: Tunnels, ways: Sequence[Way]) -> None:
    """Has the agent open ways to ranks of other hosts.

    Raises PortTakenError, or OSError if it cannot for another reason.
    """
    others = [way for way in ways if way[0] != tunnels.address]
    if not others:
        return
    with reconnection.connect(tunnels.agent, _TIMEOUT_S) as connection:
        connection.sendall(json.dumps(others).encode() + b"\n")
        answer = connection.recv(4096).decode()
    if answer.startswith(PORT_TAKEN):
        raise PortTakenError(answer[len(PORT_TAKEN) :])
    if answer != "ok":
        raise OSError("the encrypted connections cannot be opened: %s" % (answer or "no answer"))


def open_known(places: Sequence[Tuple[str, int]]) -> None:
    """Opens ways to ranks of hosts that this one has met; does nothing if there are no tunnels.

    Raises OSError as :func:`open_ways`.
    """
    tunnels = current()
    if tunnels is not None:
        open_ways(tunnels, [(address, port, "", 0) for address, port in places])


def meet(tunnels: Tunnels, store: Any, rank: int, size: int, port: int, attempt: int) -> bool:
    """Publishes where this rank of a group listens, and opens ways to all others.

    Waits until all have done so. Returns whether all hosts could: the system chooses the ports on
    one host, and another program may have one of them on another. Then all ranks have to listen
    elsewhere, and meet again. ``store``: the group's, as of torch.

    Raises OSError if the last attempt was in vain.
    """

    def key(what: object) -> str:
        return _KEY % (attempt, what)

    own = (tunnels.address, port, tunnels.gateway, tunnels.port)
    store.set(key(rank), json.dumps(own))
    published: List[bytes] = store.multi_get([key(other) for other in range(size)])
    try:
        open_ways(tunnels, [tuple(json.loads(way)) for way in published])
    except PortTakenError as error:
        store.set(key("problem"), "rank %d: %s" % (rank, error))
    if store.add(key("done"), 1) % size == 0:  # more if torch has used its keys before
        problem = store.get(key("problem")) if store.check([key("problem")]) else b""
        store.set(key("outcome"), b"-" + problem)  # torch takes no empty values
    problem = bytes(store.get(key("outcome")))[1:]
    if problem and attempt + 1 >= MAX_ATTEMPTS:
        raise OSError("the encrypted connections cannot be opened: %s" % problem.decode())
    return not problem
