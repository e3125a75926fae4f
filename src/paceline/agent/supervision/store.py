"""The rendezvous store that the fork server runs on this node, restricted to the job's hosts."""

from __future__ import annotations

import signal
import socket
from typing import List, Optional

from ..ranks import peer_filters
from . import processes

EXIT_TIMEOUT_S = 1.0


class Store:
    """The store's process and listening socket; empty if this node has no store.

    Attributes:
        process: Its process while it runs.
    """

    def __init__(self) -> None:
        self.process: Optional[processes.Process] = None
        self._listener: Optional[socket.socket] = None
        self._filter: Optional[peer_filters.PeerFilter] = None

    def restrict(self, listener: socket.socket, addresses: str) -> None:
        """Lets only the job's hosts connect to the caller's listening socket, for the next store.

        ``addresses``: the hosts, as in :data:`peer_filters.VARIABLE`; empty for all.
        """
        self._listener = listener.dup()
        self._filter = peer_filters.PeerFilter(listener, _parse_hosts(addresses))

    def admit(self, addresses: str) -> None:
        """Lets these hosts connect instead of the former ones."""
        if self._listener is not None and self._filter is not None:
            self._filter.admit(self._listener, _parse_hosts(addresses))

    def readers(self) -> List[int]:
        """Returns the descriptor that is readable once a connection was rejected, if any."""
        if self._filter is None or self._filter.reject_socket is None:
            return []
        return [self._filter.reject_socket.fileno()]

    def accept_rejected(self) -> str:
        """Closes a rejected connection; returns its address the first time, else ""."""
        return "" if self._filter is None else self._filter.accept_rejected()

    def on_exit(self) -> None:
        """Forgets the process, which has ended, and closes the socket."""
        self.process = None
        self.close_socket()

    def end(self) -> None:
        """Kills the store and waits until its port is free."""
        self.close_socket()
        if self.process is not None:
            processes.send(self.process, signal.SIGKILL)
            processes.wait_for_exit(self.process, EXIT_TIMEOUT_S)
            self.process = None

    def close_socket(self) -> None:
        """Closes this process's copy of the listening socket."""
        if self._filter is not None:
            self._filter.close()
        if self._listener is not None:
            self._listener.close()
        self._filter = self._listener = None


def _parse_hosts(addresses: str) -> peer_filters.HostSet:
    return peer_filters.parse_hosts(addresses) or peer_filters.ALL_HOSTS
