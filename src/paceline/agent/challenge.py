"""Proofs of a key by both sides of a connection between two agents: challenge and response.

``mac`` is HMAC-SHA256 under the key (see ``reconnection.py``). The side that was called speaks
first and proves last, so a caller without the key is told nothing but a random number::

    listener: NONCE
    caller:   OTHER mac("forwarder" NONCE OTHER BINDING REQUEST) REQUEST
    listener: mac("gateway" OTHER NONCE BINDING)

``BINDING`` is the hash of the listener's certificate in TLS, so that nobody in between can pass the
proofs on. ``REQUEST`` says what the caller wants; both may be empty.
"""

from __future__ import annotations

import hmac
import os
import socket
import time
from typing import Generator, Tuple

from .reconnection import NONCE_BYTES, PROOF_TIMEOUT_S, mac

_NONCE_CHARS, _MAC_CHARS = 2 * NONCE_BYTES, 64

Handshake = Generator[Tuple[str, int], str, Tuple[str, str]]
"""Yields a text to send and the length of the answer; returns the last text, and the request.

Raises ValueError if the other side does not know the key."""


def listener_handshake(key: bytes, binding: str = "", request_length: int = 0) -> Handshake:
    """Proves the key to a caller, after it has proven it; returns the caller's request."""
    nonce = os.urandom(NONCE_BYTES).hex()
    reply = yield nonce, _NONCE_CHARS + _MAC_CHARS + request_length
    peer_nonce, proof = reply[:_NONCE_CHARS], reply[_NONCE_CHARS : _NONCE_CHARS + _MAC_CHARS]
    request = reply[_NONCE_CHARS + _MAC_CHARS :]
    _verify(proof, mac(key, "forwarder", nonce, peer_nonce, binding, request))
    return mac(key, "gateway", peer_nonce, nonce, binding), request


def caller_handshake(key: bytes, binding: str = "", request: str = "") -> Handshake:
    """Proves the key to a listener, and has it prove it."""
    nonce = yield "", _NONCE_CHARS
    own = os.urandom(NONCE_BYTES).hex()
    proof = yield own + mac(key, "forwarder", nonce, own, binding, request) + request, _MAC_CHARS
    _verify(proof, mac(key, "gateway", own, nonce, binding))
    return "", ""


def _verify(proof: str, expected: str) -> None:
    if not hmac.compare_digest(proof.encode(), expected.encode()):
        raise ValueError("wrong key")


def run(sock: socket.socket, handshake: Handshake) -> None:
    """Runs a handshake on a blocking socket.

    Raises:
        OSError: The other side ends the connection, or is not done within ``PROOF_TIMEOUT_S``.
        ValueError: It does not know the key.
    """
    deadline = time.monotonic() + PROOF_TIMEOUT_S
    text, missing = next(handshake)
    while True:
        sock.sendall(text.encode())
        reply = b""
        while len(reply) < missing:
            sock.settimeout(max(0.01, deadline - time.monotonic()))
            data = sock.recv(missing - len(reply))
            if not data:
                raise ConnectionResetError("the connection has ended")
            reply += data
        try:
            text, missing = handshake.send(reply.decode("latin-1"))
        except StopIteration as done:
            sock.sendall(done.value[0].encode())
            return
