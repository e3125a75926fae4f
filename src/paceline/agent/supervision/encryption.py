"""TLS between two agents of one job, with a certificate made for it (``--encrypt``).

Only the listener has a certificate, which all nodes of the job know. The proofs of the job's key,
which both sides send next, contain its hash (see ``challenge.py``).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import ssl
from typing import Any, Callable, Iterator

from ..caller import shows_change

_MAX_READS = 4  # a record holds 16 KiB


class TlsSocket(ssl.SSLSocket):
    """A non-blocking socket in TLS, with the errors of one without.

    Attributes:
        has_partial: The last call of :meth:`recv` has read the beginning of a record only.
    """

    has_partial = False

    def do_handshake(self, block: bool = False) -> None:
        self._call(super().do_handshake)

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Receives at most ``buflen`` bytes, of several records at once; something has arrived."""
        self.has_partial = True  # if the next call cannot return anything
        parts = [self._call(super().recv, buflen)]
        missing = buflen - len(parts[0])
        while parts[-1] and missing > 0 and len(parts) < _MAX_READS and self._has_arrived():
            try:
                parts.append(self._call(super().recv, missing))
            except BlockingIOError:
                return b"".join(parts)
            missing -= len(parts[-1])
        self.has_partial = False
        return b"".join(parts)

    def _has_arrived(self) -> bool:
        try:
            socket.socket.recv(self, 1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        return True  # also at the end of the stream

    def send(self, data: Any, flags: int = 0) -> int:
        return int(self._call(super().send, data))

    @staticmethod
    def _call(method: Any, *args: Any) -> Any:
        try:
            return method(*args)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None


class Encryption:
    """Wraps sockets between agents.

    Args:
        certificate, private_key: In PEM, of the job's listeners.
        on_altered: Called in a relay's thread with the address of a connection whose bytes were
            changed on the way.
    """

    def __init__(
        self,
        certificate: str,
        private_key: str,
        on_altered: Callable[[str], None] = lambda address: None,
    ) -> None:
        self.on_altered = on_altered
        der = ssl.PEM_cert_to_DER_cert(certificate)
        self._server = _context(ssl.PROTOCOL_TLS_SERVER)
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT)
        self._hash = hashlib.sha256(der).hexdigest()
        self._server.num_tickets = 0
        _load(self._server, certificate, private_key)

    def wrap(self, sock: socket.socket, is_listener: bool) -> TlsSocket:
        """Wraps a connected, non-blocking socket, which it replaces."""
        context = self._server if is_listener else self._client
        return context.wrap_socket(  # type: ignore[return-value]
            sock, server_side=is_listener, do_handshake_on_connect=False
        )

    @staticmethod
    def has_begun(sock: socket.socket) -> bool:
        return isinstance(sock, TlsSocket)

    def binding(self, tls: TlsSocket) -> str:
        """Returns the hash of the job's certificate, for the proofs.

        Raises ValueError if the listener has another one: somebody in between answers.
        """
        if not tls.server_side:
            certificate = tls.getpeercert(binary_form=True) or b""
            if hashlib.sha256(certificate).hexdigest() != self._hash:
                raise ValueError("not the job's certificate")
        return self._hash

    shows_change = staticmethod(shows_change)


def _context(protocol: Any) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslsocket_class = TlsSocket
    return context


def _load(context: ssl.SSLContext, certificate: str, private_key: str) -> None:
    """Loads certificate and key from pipes: the key is on no disk."""
    with _readable(certificate) as first, _readable(private_key) as second:
        context.load_cert_chain(first, second)


@contextlib.contextmanager
def _readable(text: str) -> Iterator[str]:
    """Yields the path of a pipe with a text, which fits into its buffer."""
    read_end, write_end = os.pipe()
    try:
        with open(write_end, "w") as file:
            file.write(text)
        yield "/proc/self/fd/%d" % read_end
    finally:
        os.close(read_end)
