"""Encrypted ways between the ranks of different hosts (``--encrypt``).

Each host of the job has an address of the loopback network, at which its ranks listen: say
127.70.0.1 and 127.70.0.2. On all other hosts, that host's agent listens at this address, too, on
the ports that its ranks are told of by other ranks. It forwards connections to the agent of the
host, as to the store (see ``relay.py``); that agent connects to the same address and port, from the
address of the caller's host. So every connection has the same two addresses on both hosts.

A rank asks its agent for these ways (see ``ranks/tunnels.py``) on an abstract Unix socket, one
line of JSON for each connection: a list of ``[address, port, gateway, gateway's port]``. Gateways
that the agent knows may be left out (``""``, 0). The answer is ``ok`` or an error.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from typing import Any, Callable, Dict, List, Tuple

from ..ranks import peer_filters, tunnels
from ..reconnection import peer_uid
from ..surveys import facts, probe
from . import processes
from .encryption import Encryption
from .relay import Relay, Route

MAX_WAYS = 2048  # beyond that the oldest is closed; connections over it stay
MAX_REQUEST_BYTES = 1 << 20
DESCRIPTORS = 1 << 14  # two for each connection, and one for each way
PAUSE_S = 0.1  # after the limit of open files was reached
TIMEOUT_S = 5.0
Message = Dict[str, Any]
Address = Tuple[str, int]


class Tunnels:
    """The gateway of this node's ranks, and the ways to those of other nodes.

    Args:
        settings: ``address`` of this node and ``loopback`` of its ranks; ``key``, ``certificate``
            and ``private_key`` of the job.
        hosts: The job's hosts, as in :data:`peer_filters.VARIABLE`.
        on_altered: As for ``Encryption``; also for connections to the store.

    Attributes:
        encryption: Also of the connections to the store.
        description: For the ranks: see ``ranks/tunnels.py``.
    """

    def __init__(self, settings: Message, hosts: str, on_altered: Callable[[str], None]) -> None:
        with contextlib.suppress(OSError):
            processes.raise_descriptor_limit(DESCRIPTORS)
        self.settings = settings
        certificate, private_key = settings["certificate"], settings["private_key"]
        self.encryption = Encryption(certificate, private_key, on_altered)
        self._key, self._loopback = bytes.fromhex(settings["key"]), settings["loopback"]
        self._network = socket.inet_aton(self._loopback)[:2]
        self._relay = Relay(self.encryption)
        self._ways: Dict[Address, Tuple[socket.socket, Address]] = {}  # oldest first
        self._gateways: Dict[str, Address] = {}  # by the address of the ranks
        address = settings["address"]
        self._listener = probe.listen_outside_ephemeral(address, facts.ephemeral_ports())
        self._filter = peer_filters.PeerFilter(self._listener, peer_filters.admitted_hosts(hosts))
        self._relay.listen(self._listener, Route((self._loopback, 0), self._key, is_gateway=True))
        name = "paceline-tunnels-" + os.urandom(16).hex()
        self._requests = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._requests.bind("\0" + name)
        self._requests.listen(128)
        port = self._listener.getsockname()[1]
        self.description = "%s %s %d %s" % (self._loopback, address, port, name)
        threading.Thread(target=self._serve, name="paceline-tunnels", daemon=True).start()

    def admit(self, hosts: str) -> None:
        """Lets these hosts connect instead of the former ones."""
        self._filter.admit(self._listener, peer_filters.admitted_hosts(hosts))

    def readers(self) -> List[int]:
        """Returns the descriptor that is readable once a connection was rejected, if any."""
        reject_socket = self._filter.reject_socket
        return [] if reject_socket is None else [reject_socket.fileno()]

    def accept_rejected(self) -> str:
        """Closes a rejected connection; returns its address the first time, else ""."""
        return self._filter.accept_rejected()

    def close(self) -> None:
        """Ends all connections, and listens no more."""
        with contextlib.suppress(OSError):
            self._requests.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._relay.close()
        self._filter.close()
        self._listener.close()

    def _serve(self) -> None:
        """Opens ways to other nodes for the ranks of this host, one request at a time."""
        with self._requests:
            while True:
                try:
                    connection, _ = self._requests.accept()
                except OSError as error:
                    if error.errno not in (errno.EMFILE, errno.ENFILE):
                        return
                    time.sleep(PAUSE_S)
                    continue
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(TIMEOUT_S)
                    if peer_uid(connection) == os.getuid():
                        connection.sendall(self._answer(connection).encode())

    def _answer(self, connection: socket.socket) -> str:
        data = b""
        while not data.endswith(b"\n"):
            chunk = connection.recv(MAX_REQUEST_BYTES)
            if not chunk or len(data) > MAX_REQUEST_BYTES:
                return "no request"
            data += chunk
        try:
            for address, port, gateway, gateway_port in json.loads(data):
                if gateway:
                    self._gateways[address] = gateway, gateway_port
                self.open_way((address, port), self._gateways[address])
        except (OSError, ValueError, TypeError, KeyError) as error:
            return str(error) or type(error).__name__
        return "ok"

    def open_way(self, target: Address, gateway: Address) -> None:
        """Listens at ``target``, an address of another host's ranks, if it does not yet.

        Raises OSError if another program has the port here, and ValueError if ``target`` is none of
        the job's: other hosts name it.
        """
        if not (socket.inet_aton(target[0])[:2] == self._network and 0 < target[1] < 1 << 16):
            raise ValueError("%s is no address of the job's ranks" % target[0])
        listener, former = self._ways.get(target, (None, None))
        if former == gateway or _is_own(gateway[0]):
            return
        if listener is not None:  # the host has come back with another agent
            self._relay.end_listening(self._ways.pop(target)[0])
        ends = socket.inet_aton(self._loopback) + socket.inet_aton(target[0])
        request = ends.hex() + "%04x" % target[1]
        route = Route(gateway, self._key, is_gateway=False, request=request)
        try:
            with socket.create_server(target, backlog=128) as new:
                self._ways[target] = self._relay.listen(new, route), gateway
        except OSError as error:
            taken = tunnels.PORT_TAKEN if error.errno == errno.EADDRINUSE else ""
            raise OSError("%sport %d, on which a rank of another host listens, is in use here (%s)"
                          % (taken, target[1], error.strerror)) from None  # fmt: skip
        if len(self._ways) > MAX_WAYS:
            self._relay.end_listening(self._ways.pop(next(iter(self._ways)))[0])


def _is_own(address: str) -> bool:
    """Whether an address is this machine's, as in a test; its ranks are reached directly."""
    family = probe.family_of(address)
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((address, 9))  # sends nothing
        return bool(sock.getsockname()[0] == sock.getpeername()[0])
    return False
