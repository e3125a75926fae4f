"""Connects a node's agent to its launcher over TLS, for starters that give no stream to each node.

This source travels in the command that a scheduler or a person starts; the key is in the
environment, never in a command. Standard library only. It starts the agent and relays its standard
streams; from there on everything is as over SSH.

The launcher's certificate is made for this run and unverified: both sides prove that they know the
key *and* that they see the same certificate. The caller proves first. ``mac`` is HMAC-SHA256 under
the key, CERT the certificate's SHA-256, both hexadecimal::

    node:     paceline-call NONCE mac("caller" CERT NONCE ABOUT) ABOUT    ABOUT: one line of JSON
    launcher: mac("launcher" CERT NONCE ANSWER) ANSWER                    ANSWER: {"ok": true} or
    launcher: wrong-key                                                           {"error": TEXT}

Then the launcher sends records (a four-byte length, then the bytes; length 0 ends the input), and
the node sends the agent's output unframed. A connection that ends without that record has broken:
the caller connects again and has the living agent reattached (see ``reconnection.py``).
"""

import contextlib
import hashlib
import hmac
import json
import os
import re
import select
import signal
import socket
import ssl
import struct
import subprocess
import sys
import time
from typing import Any, Dict, List, Mapping, Optional, Tuple

KEY_VARIABLE = "PACELINE_CALL_KEY"
MAGIC = "paceline-call"
WRONG_KEY = "wrong-key"
AGENT_ENDED = b"paceline-call: the agent has ended"  # said on its standard error
LINE_LIMIT = 1 << 16
CONNECT_S = 3.0
TCP_TIMEOUT_MS = 4000  # after which what was sent and nobody acknowledged has broken the connection
RETRY_S = 0.2  # between two calls after a break
ANSWER_S = 5.0  # for the answer to such a call
MAX_REFUSED_S = 2.0  # nobody listens there any more: the launcher has ended
EXIT_TIMEOUT_S = 2.0
PIECE_BYTES = 1 << 16
MAX_BUFFERED_BYTES = 1 << 20  # bytes under way in one direction, above which no more are read
RECORD = struct.Struct(">I")
USER_TIMEOUT = 18  # of Linux' TCP; some Pythons do not name it


class CallRefused(Exception):
    """The launcher was reached and does not want us."""


def mac(key: bytes, *parts: str) -> str:
    """Proof of the key over some words."""
    return hmac.new(key, "\0".join(parts).encode(), hashlib.sha256).hexdigest()


def index_of(environ: Mapping[str, str], names: List[Any]) -> Optional[int]:
    """Our place among the nodes, from the first variable that tells it."""
    for name in names:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return None


def dial(
    addresses: List[Any], key: bytes, caller: Dict[str, Any], deadline: float, pause: float = 0.2
) -> ssl.SSLSocket:
    """A connection to the launcher at whichever address it answers.

    Refused when it says no; OSError when nobody who knows the key answers in time.
    """
    problem = OSError("no address to call")
    while True:
        for host, port in addresses:
            try:
                return call(host, port, key, caller, CONNECT_S * 20)  # it may wait for other nodes
            except OSError as error:
                problem = OSError("%s port %d: %s" % (host, port, error.strerror or error))
        if time.monotonic() > deadline:
            raise problem
        time.sleep(pause)


def call(
    host: str, port: int, key: bytes, caller: Dict[str, Any], patience: float
) -> ssl.SSLSocket:
    """One call; the connection is ready for the agent's stream when this returns.

    ``patience``: seconds for the launcher to say how it likes us.
    """
    sock = socket.create_connection((host, port), CONNECT_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, USER_TIMEOUT, TCP_TIMEOUT_MS)
    connection = sock
    try:
        try:
            connection = encrypted = unverified().wrap_socket(sock)
        except (ssl.SSLError, ValueError):
            raise OSError("something else answers there") from None
        greet(encrypted, key, caller, patience)
    except BaseException:
        connection.close()
        raise
    encrypted.settimeout(None)
    return encrypted


def unverified() -> ssl.SSLContext:
    """TLS with whomever: the proofs that follow tell who it is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def greet(connection: ssl.SSLSocket, key: bytes, caller: Dict[str, Any], patience: float) -> None:
    """Proves that we know the key to the owner of the certificate that we see; hears the same."""
    certificate = hashlib.sha256(connection.getpeercert(True) or b"").hexdigest()
    nonce = os.urandom(16).hex()
    text = json.dumps(caller)
    proof = mac(key, "caller", certificate, nonce, text)
    connection.sendall(("%s %s %s %s\n" % (MAGIC, nonce, proof, text)).encode())
    connection.settimeout(patience)
    reply = read_line(connection).rstrip("\n")
    if reply == WRONG_KEY:
        raise OSError("the launcher that answers there has another key")
    proof_received, _, answer = reply.partition(" ")
    if not hmac.compare_digest(
        proof_received.encode(), mac(key, "launcher", certificate, nonce, answer).encode()
    ):
        raise OSError("something else answers there")
    if "error" in json.loads(answer):
        raise CallRefused(json.loads(answer)["error"])


def read_line(connection: ssl.SSLSocket) -> str:
    """Byte by byte: what follows the line belongs to the agent."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(line) > LINE_LIMIT:
            raise OSError("the launcher hung up")
        line += byte
    return line.decode()


class StreamRelay:
    """Passes an agent's three streams on through TLS, until it has ended or the way has broken.

    One thread, nothing waits on a single stream: a TLS connection must not be read and written by
    two threads at once.
    """

    def __init__(
        self, agent: "subprocess.Popen[bytes]", frames: ssl.SSLSocket, errors: ssl.SSLSocket
    ) -> None:
        assert agent.stdin is not None
        assert agent.stdout is not None
        assert agent.stderr is not None
        self._stdin: Optional[int] = agent.stdin.fileno()
        self._agent = agent
        self._outputs = {agent.stdout.fileno(): frames, agent.stderr.fileno(): errors}
        self._unsent = {frames: bytearray(), errors: bytearray()}
        self._frames: Optional[ssl.SSLSocket] = frames
        self._errors: Optional[ssl.SSLSocket] = errors  # on which nothing comes but its end
        self._input_backlog = bytearray()  # what the agent has not taken yet
        self._record_bytes_left = 0
        self._header = b""
        self._is_closed = False  # the launcher has said that nothing more comes
        self._is_broken = False
        for fd in (self._stdin, *self._outputs):
            os.set_blocking(fd, False)
        frames.setblocking(False)
        errors.setblocking(False)

    def run(self) -> bool:
        """Returns when all that the agent said has been sent; True when the way has broken."""
        while not self._is_broken and (self._outputs or any(self._unsent.values())):
            readable, writable = self._ready()
            for fd in [fd for fd in self._outputs if fd in readable]:
                self._read_output(fd)
            for wire in [wire for wire in self._unsent if wire in writable]:
                self._send(wire)
            if self._frames is not None and self._frames in readable:
                self._read_input()
            if self._errors is not None and self._errors in readable:
                self._check_errors(self._errors)
            if self._stdin is not None:
                self._deliver()
        return self._is_broken

    def _ready(self) -> Tuple[List[Any], List[Any]]:
        reads: List[Any] = [
            fd
            for fd, wire in self._outputs.items()
            if len(self._unsent.get(wire, b"")) < MAX_BUFFERED_BYTES
        ]
        pending = []
        if self._frames is not None and len(self._input_backlog) < MAX_BUFFERED_BYTES:
            reads.append(self._frames)
            pending = [self._frames] if self._frames.pending() else []
        if self._errors is not None:
            reads.append(self._errors)
        writes: List[Any] = [wire for wire, data in self._unsent.items() if data]
        if self._stdin is not None and self._input_backlog:
            writes.append(self._stdin)
        readable, writable, _ = select.select(reads, writes, [], 0 if pending else 1.0)
        return readable + pending, writable

    def _read_output(self, fd: int) -> None:
        wire = self._outputs[fd]
        data = read_available(fd)
        if data == b"":
            del self._outputs[fd]
        elif data and wire in self._unsent:
            self._unsent[wire] += data

    def _send(self, wire: ssl.SSLSocket) -> None:
        unsent = self._unsent[wire]
        try:
            while unsent:
                del unsent[: wire.send(unsent[:PIECE_BYTES])]
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError:  # nobody listens any more
            del self._unsent[wire]
            self._hang_up()

    def _read_input(self) -> None:
        assert self._frames is not None
        try:
            data = self._frames.recv(PIECE_BYTES)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError:
            data = b""
        if not data:
            self._hang_up()
        while data and not self._is_closed:
            data = self._consume_record(data)

    def _check_errors(self, errors: ssl.SSLSocket) -> None:
        try:
            if errors.recv(PIECE_BYTES):
                return
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError:
            pass
        self._errors = None
        self._hang_up()

    def _consume_record(self, data: bytes) -> bytes:
        """Takes the beginning of what came; returns the rest."""
        if self._record_bytes_left:
            part = data[: self._record_bytes_left]
            self._input_backlog += part
            self._record_bytes_left -= len(part)
            return data[len(part) :]
        missing = RECORD.size - len(self._header)
        self._header += data[:missing]
        if len(self._header) == RECORD.size:
            (self._record_bytes_left,) = RECORD.unpack(self._header)
            self._header = b""
            self._is_closed = self._record_bytes_left == 0
        return data[missing:]

    def _hang_up(self) -> None:
        """In order, if it was said before."""
        self._frames, self._is_broken = None, not self._is_closed

    def _deliver(self) -> None:
        assert self._stdin is not None
        try:
            while self._input_backlog:
                del self._input_backlog[: os.write(self._stdin, self._input_backlog[:PIECE_BYTES])]
        except BlockingIOError:
            return
        except OSError:  # the agent has closed its input
            self._input_backlog.clear()
        if self._is_closed:
            assert self._agent.stdin is not None
            self._agent.stdin.close()
            self._stdin = None


def read_available(fd: int) -> Optional[bytes]:
    """What a pipe holds: ``None`` for nothing just now, empty at its end."""
    try:
        return os.read(fd, PIECE_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def become_agent(config: Dict[str, Any], key: bytes) -> int:
    """Calls twice, for the frames and for standard error, and serves as the agent's wires.

    Returns:
        The agent's exit status.
    """
    caller = {
        "index": index_of(os.environ, config["places"]),
        "name": socket.gethostname(),
        "node": next(
            (os.environ[variable] for variable in config["names"] if variable in os.environ), ""
        ),
        "session": os.urandom(8).hex(),
    }
    if "about" in config:
        caller.update(config["about"])
    deadline = time.monotonic() + config["patience"]
    frames = dial(config["addresses"], key, dict(caller, stream="frames"), deadline)
    errors = dial([frames.getpeername()[:2]], key, dict(caller, stream="errors"), deadline)
    for name in [name for name in os.environ if re.match(config["strip"], name)]:
        del os.environ[name]
    pythons = config["pythons"]
    python = pythons[(caller["index"] or 0) % len(pythons)]
    argv = [python if argument == "@" else argument for argument in config["agent"]]
    pipe = subprocess.PIPE
    agent = subprocess.Popen(argv, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe)
    for variable in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(variable, lambda number, _: agent.send_signal(number))
    for variable in (signal.SIGUSR1, signal.SIGUSR2):  # meant for ranks
        signal.signal(variable, signal.SIG_IGN)
    connector, addresses = (
        agent,
        sorted(config["addresses"], key=lambda a: a[0] != frames.getpeername()[0]),
    )
    while StreamRelay(connector, frames, errors).run() or not has_ended(agent):
        hang_up(connector, frames, errors)
        if config.get("once"):
            dismiss(agent)
            break
        called = reconnect(agent, addresses, key, caller)
        if called is None:
            break
        frames, errors = called
        connector = subprocess.Popen(argv, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe)
    report_ended(errors)
    hang_up(connector, frames, errors)
    connector.wait()
    code = agent.wait()
    # One that a signal ended is for the launcher to make good: some MPIs would end all the others.
    return code if 0 <= code < 128 else 0


def report_ended(errors: ssl.SSLSocket) -> None:
    """The agent is gone: nobody is to wait until it calls again."""
    with contextlib.suppress(OSError):
        errors.settimeout(ANSWER_S)
        errors.sendall(b"\n" + AGENT_ENDED + b"\n")


def has_ended(agent: "subprocess.Popen[bytes]") -> bool:
    """Whether it is the agent that has ended, not only what was to meet it on another way."""
    try:
        agent.wait(RETRY_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def hang_up(connector: "subprocess.Popen[bytes]", *wires: ssl.SSLSocket) -> None:
    """Closes what connected a process with the launcher: both its ends have gone."""
    for stream in (connector.stdin, connector.stdout, connector.stderr, *wires):
        if stream is not None:
            stream.close()


def reconnect(
    agent: "subprocess.Popen[bytes]", addresses: List[Any], key: bytes, caller: Dict[str, Any]
) -> Optional[Tuple[ssl.SSLSocket, ssl.SSLSocket]]:
    """Calls while the agent lives; ``None`` when it does not, or is to end: nobody is there."""
    refused_since = None
    while agent.poll() is None:
        num_refused = 0
        for host, port in addresses:
            try:
                frames = call(host, port, key, dict(caller, stream="frames", again=True), ANSWER_S)
                errors = call(host, port, key, dict(caller, stream="errors", again=True), ANSWER_S)
                return frames, errors
            except ConnectionRefusedError:
                num_refused += 1
            except CallRefused:
                dismiss(agent)
                return None
            except OSError:
                pass
        now = time.monotonic()
        refused_since = None if num_refused < len(addresses) else refused_since or now
        if refused_since is not None and now - refused_since > MAX_REFUSED_S:
            dismiss(agent)
            return None
        time.sleep(RETRY_S)
    return None


def dismiss(agent: "subprocess.Popen[bytes]") -> None:
    """Asks an agent to end that nobody will meet again, unless it does so by itself."""
    try:
        agent.wait(EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        agent.terminate()


def main(text: str) -> None:
    """``text``: JSON of addresses, patience, places, names, strip, agent, pythons."""
    key = bytes.fromhex(os.environ.pop(KEY_VARIABLE, ""))
    try:
        sys.exit(become_agent(json.loads(text), key))
    except (OSError, CallRefused) as error:
        sys.stderr.write("paceline-call: %s: %s\n" % (socket.gethostname(), error))
        sys.exit(1)
