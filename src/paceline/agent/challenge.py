"""Proofs of a key by both sides of a connection between two agents: challenge and response.

``mac`` is HMAC-SHA256 under the key (see ``reconnection.py``). The side that was called speaks
first and proves last, so a caller without the key is told nothing but a random number::

    listener: NONCE
    caller:   OTHER mac("forwarder" NONCE OTHER)
    listener: mac("gateway" OTHER NONCE)
"""

from __future__ import annotations

import hmac
import os
import socket
import time
from typing import Generator, Tuple

from .reconnection import NONCE_BYTES, PROOF_TIMEOUT_S, mac

_NONCE_CHARS, _MAC_CHARS = 2 * NONCE_BYTES, 64

Handshake = Generator[Tuple[str, int], str, str]
"""Yields a text to send and the length of the answer; returns the last text to send.

Raises ValueError if the other side does not know the key."""


def listener_handshake(key: bytes) -> Handshake:
    """Proves the key to a caller, after it has proven it."""
    nonce = os.urandom(NONCE_BYTES).hex()
    reply = yield nonce, _NONCE_CHARS + _MAC_CHARS
    other, proof = reply[:_NONCE_CHARS], reply[_NONCE_CHARS:]
    _verify(proof, mac(key, "forwarder", nonce, other))
    return mac(key, "gateway", other, nonce)


def caller_handshake(key: bytes) -> Handshake:
    """Proves the key to a listener, and has it prove it."""
    nonce = yield "", _NONCE_CHARS
    own = os.urandom(NONCE_BYTES).hex()
    proof = yield own + mac(key, "forwarder", nonce, own), _MAC_CHARS
    _verify(proof, mac(key, "gateway", own, nonce))
    return ""


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
            sock.sendall(done.value.encode())
            return
