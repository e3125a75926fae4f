"""The first lines on a node whose agent has to call back: dial, prove who we are, become the agent.

A scheduler that starts the nodes (mpiexec, srun, a person) leaves no stream of its own to each of
them. So what it starts calls the launcher over TCP, and the sockets become the agent's standard
streams. From there on everything is as over SSH.

The source of this file travels in the command that the scheduler starts; the key travels in the
environment, never in a command. It may use nothing but the standard library of any Python 3.6.

The call, line by line (``mac`` is HMAC-SHA256 under the key, hexadecimal)::

    node:     paceline-call NONCE
    launcher: NONCE2 mac("launcher" NONCE NONCE2)
    node:     mac("agent" NONCE NONCE2 ABOUT) ABOUT        ABOUT: one line of JSON
    launcher: {"ok": true} or {"error": TEXT}
"""

import hashlib
import hmac
import json
import os
import re
import socket
import sys
import time
from typing import Any, Dict, List, Mapping, Optional

KEY = "PACELINE_CALL_KEY"
MAGIC = "paceline-call"
LINE_LIMIT = 1 << 16
CONNECT_S = 3.0


class Refused(Exception):
    """The launcher was reached and does not want us."""


def mac(key: bytes, *words: str) -> str:
    """Proof of the key over some words."""
    return hmac.new(key, "\0".join(words).encode(), hashlib.sha256).hexdigest()


def index_of(environ: Mapping[str, str], names: List[Any]) -> Optional[int]:
    """Our place among the nodes, from the first variable that tells it."""
    for name in names:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return None


def dial(
    addresses: List[Any], key: bytes, about: Dict[str, Any], deadline: float, pause: float = 0.2
) -> socket.socket:
    """A connection to the launcher at whichever address it answers.

    Refused when it says no; OSError when nobody who knows the key answers in time.
    """
    problem = OSError("no address to call")
    while True:
        for host, port in addresses:
            try:
                return call(host, port, key, about)
            except OSError as error:
                problem = OSError("%s port %d: %s" % (host, port, error.strerror or error))
        if time.monotonic() > deadline:
            raise problem
        time.sleep(pause)


def call(host: str, port: int, key: bytes, about: Dict[str, Any]) -> socket.socket:
    """One call; the connection is ready for the agent's stream when this returns."""
    connection = socket.create_connection((host, port), CONNECT_S)
    try:
        greet(connection, key, about)
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def greet(connection: socket.socket, key: bytes, about: Dict[str, Any]) -> None:
    """Both sides prove that they know the key; then we say who we are."""
    nonce = os.urandom(16).hex()
    connection.sendall(("%s %s\n" % (MAGIC, nonce)).encode())
    words = read_line(connection).split()
    if len(words) != 2:
        raise OSError("something else answers there")
    theirs, proof = words
    if not hmac.compare_digest(proof, mac(key, "launcher", nonce, theirs)):
        raise OSError("a launcher with another key answers there")
    text = json.dumps(about)
    connection.sendall(("%s %s\n" % (mac(key, "agent", nonce, theirs, text), text)).encode())
    # the launcher may wait for other nodes before it says how it likes us
    connection.settimeout(CONNECT_S * 20)
    answer = json.loads(read_line(connection))
    if "error" in answer:
        raise Refused(answer["error"])


def read_line(connection: socket.socket) -> str:
    """Byte by byte: what follows the line belongs to the agent."""
    line = b""
    while not line.endswith(b"\n"):
        more = connection.recv(1)
        if not more or len(line) > LINE_LIMIT:
            raise OSError("the launcher hung up")
        line += more
    return line.decode()


def become_agent(config: Dict[str, Any], key: bytes) -> None:
    """Calls twice, for the frames and for standard error, and turns into the agent."""
    about = {
        "index": index_of(os.environ, config["places"]),
        "name": socket.gethostname(),
        "node": os.environ.get("SLURMD_NODENAME", ""),
        "session": os.urandom(8).hex(),
    }
    if "about" in config:
        about.update(config["about"])
    deadline = time.monotonic() + config["patience"]
    frames = dial(config["addresses"], key, dict(about, stream="frames"), deadline)
    errors = dial([frames.getpeername()[:2]], key, dict(about, stream="errors"), deadline)
    for name in [name for name in os.environ if re.match(config["strip"], name)]:
        del os.environ[name]
    pythons = config["pythons"]
    python = pythons[(about["index"] or 0) % len(pythons)]
    argv = [python if word == "@" else word for word in config["agent"]]
    os.dup2(frames.fileno(), 0)
    os.dup2(frames.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    os.execvp(argv[0], argv)


def main(text: str) -> None:
    """``text``: JSON of addresses, patience, places, strip, agent, pythons."""
    key = bytes.fromhex(os.environ.pop(KEY, ""))
    try:
        become_agent(json.loads(text), key)
    except (OSError, Refused) as error:
        sys.stderr.write("paceline-call: %s: %s\n" % (socket.gethostname(), error))
        sys.exit(1)
