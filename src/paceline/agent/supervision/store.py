"""The rendezvous store of this node's ranks: the fork server runs it, or another node has it.

A *closed* store has a key. It listens on loopback only, and all connections go through
:mod:`relay`. Any other store listens on the address of its node, restricted to the job's
hosts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

from ..ranks import peer_filters
from ..surveys import facts, probe
from . import processes
from .relay import Relay, Route

if TYPE_CHECKING:
    from .encryption import Encryption

EXIT_TIMEOUT_S = 1.0
STORE_ADDRESS = "127.0.0.2"  # of a closed store; torch's own client gets its port from the socket
NUM_OTHER_ADDRESSES = 16  # on loopback, tried if another user has taken the port at that address
GATEWAY_DESCRIPTORS = 4096  # two for each rank of another node, and unproven connections
Message = Dict[str, Any]


def _listen_inside(port: int) -> Tuple[socket.socket, peer_filters.PortFilter]:
    """Listens for the closed store on a loopback address, which nobody reaches without the filter.

    Another user can take the port at an address known in advance, but not at random ones. Raises
    OSError if there is no address.
    """
    addresses = ["127.%d.%d.%d" % (128 + a % 127, b, 1 + c % 254)
                 for a, b, c in (os.urandom(3) for _ in range(NUM_OTHER_ADDRESSES))]  # fmt: skip
    for address in (STORE_ADDRESS, *addresses):
        with contextlib.ExitStack() as closing:
            try:
                inner = closing.enter_context(probe.bind(address, port))
                port_filter = closing.enter_context(
                    contextlib.closing(peer_filters.PortFilter(inner))
                )
                inner.listen(probe.BACKLOG)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            closing.pop_all()
            return inner, port_filter
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


class Store:
    """The store's process and listening socket, or the forwarder to the store of another node.

    Attributes:
        process: Its process while it runs here.
        encryption: Of connections to other nodes, in an encrypted job.
    """

    encryption: Optional[Encryption] = None

    def __init__(self) -> None:
        self.process: Optional[processes.Process] = None
        self._closed_store: Optional[Message] = None
        self._endpoint: Message = {}  # address and port on loopback that lead to it
        self._relay: Optional[Relay] = None
        self._port_filter: Optional[peer_filters.PortFilter] = None
        self._listener: Optional[socket.socket] = None
        self._filter: Optional[peer_filters.PeerFilter] = None

    def restrict(self, listener: socket.socket, addresses: str) -> None:
        """Lets only the job's hosts connect to the caller's listening socket, for the next store.

        Ends connections that were made, or begun, before.

        ``addresses``: the hosts, as in :data:`peer_filters.VARIABLE`; empty for all.
        """
        self._filter = peer_filters.PeerFilter(listener, peer_filters.admitted_hosts(addresses))
        with contextlib.suppress(OSError):  # a sandbox without SO_REUSEPORT
            self._filter.renew(listener)
        self._listener = listener.dup()

    def open_gateway(self, store: Message, listener: socket.socket) -> socket.socket:
        """Makes ``listener`` the gateway to a closed store; returns the store's listening socket.

        A listener on loopback, in a job on one host, becomes the local gateway.

        ``store``: address and port of ``listener``, and the key.
        """
        with contextlib.suppress(OSError):
            processes.raise_descriptor_limit(GATEWAY_DESCRIPTORS)
        key, is_gateway = bytes.fromhex(store["key"]), not probe.is_loopback(store["address"])
        with self._listen_locally(store) if is_gateway else listener.dup() as local:
            self._set_endpoint(store, local)
            try:
                inner, self._port_filter = _listen_inside(local.getsockname()[1])
            except OSError as error:
                if error.errno == errno.EADDRINUSE:  # another user could cause that
                    raise
                # perhaps a sandbox with one loopback address: the store is open
                inner, target, has_local_gateway = local.dup(), local.getsockname()[:2], False
            else:
                target, has_local_gateway = inner.getsockname()[:2], True
            routes = [(listener, Route(target, key, True, self._port_filter))] * is_gateway
            if has_local_gateway:
                local_route = Route(target, None, False, self._port_filter)
                routes.append((local, local_route))
                if self._port_filter is not None and self._port_filter.reject_socket is not None:
                    routes.append((self._port_filter.reject_socket, local_route))
            self._relay = Relay(self.encryption)
            for accepting, route in routes:
                self._relay.listen(accepting, route)
        return inner

    def connect(self, store: Message) -> Message:
        """Returns address and port on loopback at which ranks here reach a closed store.

        ``store``: as for :meth:`open_gateway`. Opens a forwarder once if it is on another node.
        """
        if store != self._closed_store:
            self.end()
            with self._listen_locally(store) as local:
                self._set_endpoint(store, local)
                target = store["address"], store["port"]
                key = bytes.fromhex(store["key"])
                self._relay = Relay(self.encryption)
                self._relay.listen(local, Route(target, key, is_gateway=False))
        return self._endpoint

    def _listen_locally(self, store: Message) -> socket.socket:
        """Listens on loopback, on the same port as the gateway if it is free here."""
        address = "::1" if ":" in store["address"] else "127.0.0.1"
        try:
            return probe.listen(address, store["port"])
        except OSError:
            return probe.listen_outside_ephemeral(address, facts.ephemeral_ports())

    def _set_endpoint(self, store: Message, local: socket.socket) -> None:
        address, port = local.getsockname()[:2]
        self._endpoint, self._closed_store = {"address": address, "port": port}, store

    def localize(self, line: Message) -> Message:
        """Returns a message to ranks in which a closed store has its address on this node."""
        if "key" not in line.get("store", ()):
            return line
        store = line["store"]
        return dict(line, store=dict(self.connect(store), host=store["address"]))

    def admit(self, addresses: str) -> None:
        """Lets these hosts connect instead of the former ones."""
        if self._listener is not None and self._filter is not None:
            self._filter.admit(self._listener, peer_filters.admitted_hosts(addresses))

    def readers(self) -> List[int]:
        """Returns the descriptor that is readable once a connection was rejected, if any."""
        if self._filter is None or self._filter.reject_socket is None:
            return []
        return [self._filter.reject_socket.fileno()]

    def accept_rejected(self) -> str:
        """Closes a rejected connection; returns its address the first time, else ""."""
        return "" if self._filter is None else self._filter.accept_rejected()

    def on_exit(self) -> None:
        """Forgets the process, which has ended, and closes the sockets."""
        self.process = None
        self.close_sockets()

    def end(self) -> None:
        """Kills the store and waits until its port is free."""
        self.close_sockets()
        if self.process is not None:
            processes.send(self.process, signal.SIGKILL)
            processes.wait_for_exit(self.process, EXIT_TIMEOUT_S)
            self.process = None

    def close_sockets(self) -> None:
        """Closes the connections between nodes, and this process's listening sockets."""
        if self._relay is not None:
            self._relay.close()
        if self._port_filter is not None:
            self._port_filter.close()
        if self._filter is not None:
            self._filter.close()
        if self._listener is not None:
            self._listener.close()
        self._relay = None
        self._port_filter = self._filter = self._listener = self._closed_store = None
