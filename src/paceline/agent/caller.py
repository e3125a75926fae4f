"""Connects a node's agent to its launcher over TLS, if the scheduler provides no stream to it.

This source is part of the command that a scheduler or a person starts; the key is in the
environment or a file, never in a command. Standard library only. It starts the agent and relays its
standard streams, so that the agent works as over SSH.

Both sides prove that they know the key *and* that they see the same certificate, which is made for
this run; the caller proves first. All nodes know the key, so one that takes over the launcher's
address could pass for it. The caller therefore accepts only the certificate of its configuration.
``mac`` is HMAC-SHA256 under the key, CERT the certificate's SHA-256, both hexadecimal::

    node:     paceline-call NONCE mac("caller" CERT NONCE)    PROOF_BYTES bytes
    node:     ABOUT                                           one line of JSON
    launcher: mac("launcher" CERT NONCE ANSWER) ANSWER        ANSWER: {"ok": true} or
    launcher: wrong-key                                               {"error": TEXT}

Then the launcher sends records (a four-byte length, then the bytes; length 0 ends the input), and
the node sends the agent's output unframed. A connection that ends without that record has broken:
the caller connects again and has the living agent reattached (see ``reconnection.py``). Then ABOUT
says whether this side found that bytes were changed on the way.
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
PROOF_BYTES = len(MAGIC) + 1 + 32 + 1 + 64 + 1  # of a node's first line
WRONG_KEY = "wrong-key"
AGENT_ENDED = b"paceline-call: the agent has ended"  # sent on the stream of standard error
LINE_LIMIT = 1 << 16
CONNECT_S = 3.0
TCP_TIMEOUT_MS = 4000  # after which unacknowledged data breaks the connection
RETRY_S = 0.2  # between two attempts to connect
ANSWER_S = 5.0  # for the launcher's answer to a reconnection
MAX_REFUSED_S = 2.0  # of refused connections, after which the launcher counts as ended
EXIT_TIMEOUT_S = 2.0
PIECE_BYTES = 1 << 16
MAX_BUFFERED_BYTES = 1 << 20  # per direction, above which no more is read
RECORD = struct.Struct(">I")
USER_TIMEOUT = 18  # TCP_USER_TIMEOUT, which some Pythons lack
# Not a failure of TLS: the connection has ended, or this side is closing it
ENDS = ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError
END_REASONS = ("UNEXPECTED_EOF_WHILE_READING", "APPLICATION_DATA_AFTER_CLOSE_NOTIFY")


class CallRefused(Exception):
    """The launcher has rejected this node; the message says why."""


def shows_change(error: Optional[BaseException]) -> bool:
    """Whether an error says that bytes were changed on the way.

    Between two sides that know the key, only that makes TLS fail, also while they agree on keys.
    """
    is_end = isinstance(error, ENDS) or getattr(error, "reason", "") in END_REASONS
    return isinstance(error, ssl.SSLError) and not is_end


def mac(key: bytes, *parts: str) -> str:
    """Returns the proof of the key over some texts."""
    return hmac.new(key, "\0".join(parts).encode(), hashlib.sha256).hexdigest()


def index_of(environ: Mapping[str, str], names: List[Any]) -> Optional[int]:
    """Returns this node's index from the first of these variables that has it."""
    for name in names:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return None


def dial(
    addresses: List[Any],
    key: bytes,
    caller: Dict[str, Any],
    deadline: float,
    certificate: str = "",
) -> ssl.SSLSocket:
    """Connects to the launcher at the first address that answers.

    ``certificate``: its certificate's SHA-256; empty if any is accepted.

    Raises:
        CallRefused: The launcher rejects this node.
        OSError: No process that knows the key answers in time.
    """
    problem = OSError("no address to call")
    while True:
        for host, port in addresses:
            try:
                timeout_s = CONNECT_S * 20  # it may wait for other nodes
                return call(host, port, key, caller, timeout_s, certificate)
            except OSError as error:
                problem = OSError("%s port %d: %s" % (host, port, error.strerror or error))
        if time.monotonic() > deadline:
            raise problem
        time.sleep(RETRY_S)


def call(
    host: str,
    port: int,
    key: bytes,
    caller: Dict[str, Any],
    timeout_s: float,
    certificate: str = "",
) -> ssl.SSLSocket:
    """Connects to one address and authenticates both sides, see :func:`dial`.

    ``timeout_s``: time for the launcher to accept or reject this node.
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
        if certificate and certificate != certificate_of(encrypted):
            raise OSError("another launcher answers there")
        greet(encrypted, key, caller, timeout_s)
    except BaseException:
        connection.close()
        raise
    encrypted.settimeout(None)
    return encrypted


def unverified() -> ssl.SSLContext:
    """Makes a TLS context that verifies no certificate; :func:`call` authenticates the peer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def certificate_of(connection: ssl.SSLSocket) -> str:
    """Returns the SHA-256 of the other side's certificate, in hexadecimal."""
    return hashlib.sha256(connection.getpeercert(True) or b"").hexdigest()


def greet(connection: ssl.SSLSocket, key: bytes, caller: Dict[str, Any], timeout_s: float) -> None:
    """Proves the key to the owner of the received certificate, and verifies its proof."""
    certificate = certificate_of(connection)
    nonce = os.urandom(16).hex()
    proof = mac(key, "caller", certificate, nonce)
    connection.sendall(("%s %s %s\n%s\n" % (MAGIC, nonce, proof, json.dumps(caller))).encode())
    reply = read_line(connection, timeout_s).rstrip("\n")
    if reply == WRONG_KEY:
        raise OSError("the launcher that answers there has another key")
    proof_received, _, answer = reply.partition(" ")
    if not hmac.compare_digest(
        proof_received.encode(), mac(key, "launcher", certificate, nonce, answer).encode()
    ):
        raise OSError("something else answers there")
    if "error" in json.loads(answer):
        raise CallRefused(json.loads(answer)["error"])


def read_line(connection: ssl.SSLSocket, timeout_s: float) -> str:
    """Reads a line byte by byte, because the bytes after it belong to the agent.

    Raises:
        OSError: The line is too long, or not complete in ``timeout_s``.
    """
    line, deadline = b"", time.monotonic() + timeout_s
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        byte = connection.recv(1)
        if not byte or len(line) > LINE_LIMIT:
            raise OSError("the launcher hung up")
        line += byte
    return line.decode(errors="replace")


class StreamRelay:
    """Relays an agent's three streams through TLS until it ends or a connection breaks.

    It uses one thread and never blocks on a single stream: two threads must not read and write a
    TLS connection at once.

    Attributes:
        is_altered: A connection broke because bytes were changed on the way.
    """

    is_altered = False

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
        self._errors: Optional[ssl.SSLSocket] = errors  # the launcher sends only its end
        self._input_backlog = bytearray()  # received bytes that the agent has not read yet
        self._record_bytes_left = 0
        self._header = b""
        self._is_closed = False  # the launcher has ended the input
        self._is_broken = False
        for fd in (self._stdin, *self._outputs):
            os.set_blocking(fd, False)
        frames.setblocking(False)
        errors.setblocking(False)

    def run(self) -> bool:
        """Relays until all of the agent's output is sent; returns whether a connection broke."""
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
        """Reads what the launcher has sent for the agent's standard input."""
        assert self._frames is not None
        try:
            data = self._frames.recv(PIECE_BYTES)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError as error:
            data, self.is_altered = b"", shows_change(error)
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
        except OSError as error:
            self.is_altered = self.is_altered or shows_change(error)
        self._errors = None
        self._hang_up()

    def _consume_record(self, data: bytes) -> bytes:
        """Consumes the next part of a record from ``data``; returns the remaining bytes."""
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
        """Handles the end of the frames: the connection broke unless the launcher ended it."""
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
    """Reads a pipe's available bytes; ``None`` if there are none yet, empty at its end."""
    try:
        return os.read(fd, PIECE_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def close_listeners() -> None:
    """Closes listening sockets that the scheduler has left open in this process.

    Intel MPI and MPICH pass on those of their own programs, and anybody can connect to them until
    every process has closed them. Other inherited descriptors stay open: MPI uses them to detect
    whether this process is alive.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            with socket.socket(fileno=os.dup(int(name))) as inherited:
                listens = inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens:
                os.close(int(name))


def become_agent(config: Dict[str, Any], key: bytes) -> int:
    """Connects twice, for frames and standard error; relays the agent's streams until its end.

    Returns the agent's exit status.
    """
    caller = {
        "index": index_of(os.environ, config["places"]),
        "name": socket.gethostname(),
        "node": next((os.environ[name] for name in config["names"] if name in os.environ), ""),
        "session": os.urandom(8).hex(),
        **config.get("about", {}),
    }
    deadline = time.monotonic() + config["timeout_s"]
    certificate = config["certificate"]
    frames = dial(config["addresses"], key, dict(caller, stream="frames"), deadline, certificate)
    address = frames.getpeername()[:2]
    errors = dial([address], key, dict(caller, stream="errors"), deadline, certificate)
    for name in [name for name in os.environ if re.match(config["strip"], name)]:
        del os.environ[name]
    pythons = config["pythons"]
    python = pythons[(caller["index"] or 0) % len(pythons)]
    argv = [python if argument == "@" else argument for argument in config["agent"]]
    pipe = subprocess.PIPE
    agent = subprocess.Popen(argv, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda number, _: agent.send_signal(number))
    for signum in (signal.SIGUSR1, signal.SIGUSR2):  # meant for ranks
        signal.signal(signum, signal.SIG_IGN)
    addresses = sorted(config["addresses"], key=lambda a: a[0] != address[0])
    connector, relay = agent, StreamRelay(agent, frames, errors)
    while relay.run() or not has_ended(agent):
        hang_up(connector, frames, errors)
        if config.get("once"):
            dismiss(agent)
            break
        about = dict(caller, altered=relay.is_altered)
        called = reconnect(agent, addresses, key, about, certificate)
        if called is None:
            break
        frames, errors = called
        connector = subprocess.Popen(argv, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe)
        relay = StreamRelay(connector, frames, errors)
    report_ended(errors)
    hang_up(connector, frames, errors)
    connector.wait()
    code = agent.wait()
    # the launcher handles an agent that a signal killed; some MPIs would end all the other nodes
    return code if 0 <= code < 128 else 0


def report_ended(errors: ssl.SSLSocket) -> None:
    """Reports that the agent has ended, so that the launcher waits for no reconnection."""
    with contextlib.suppress(OSError):
        errors.settimeout(ANSWER_S)
        errors.sendall(b"\n" + AGENT_ENDED + b"\n")


def has_ended(agent: "subprocess.Popen[bytes]") -> bool:
    """Whether the agent itself has ended, not only the process that reattached to it."""
    try:
        agent.wait(RETRY_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def hang_up(connector: "subprocess.Popen[bytes]", *wires: ssl.SSLSocket) -> None:
    """Closes the streams and connections between a process and the launcher."""
    for stream in (connector.stdin, connector.stdout, connector.stderr, *wires):
        if stream is not None:
            stream.close()


def reconnect(
    agent: "subprocess.Popen[bytes]",
    addresses: List[Any],
    key: bytes,
    caller: Dict[str, Any],
    certificate: str,
) -> Optional[Tuple[ssl.SSLSocket, ssl.SSLSocket]]:
    """Reconnects while the agent lives; ``None`` if it ended, or the launcher has gone."""

    def open_stream(host: str, port: int, stream: str) -> ssl.SSLSocket:
        info = dict(caller, stream=stream, again=True)
        return call(host, port, key, info, ANSWER_S, certificate)

    refused_since = None
    while agent.poll() is None:
        num_refused = 0
        for host, port in addresses:
            try:
                return open_stream(host, port, "frames"), open_stream(host, port, "errors")
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
    """Terminates an agent without a launcher, unless it ends by itself."""
    try:
        agent.wait(EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        agent.terminate()


def take_key(config: Dict[str, Any]) -> bytes:
    """Removes the key from the environment, or reads its file; OSError if it has neither."""
    key = os.environ.pop(KEY_VARIABLE, "")
    if not key and "key_file" in config:
        with open(config["key_file"]) as file:
            key = file.read()
    return bytes.fromhex(key.strip())


def main(text: str) -> None:
    """Runs the caller. ``text``: a JSON object, made by ``caller_config`` of the launcher."""
    config = json.loads(text)
    close_listeners()
    try:
        sys.exit(become_agent(config, take_key(config)))
    except (OSError, CallRefused) as error:
        sys.stderr.write("paceline-call: %s: %s\n" % (socket.gethostname(), error))
        sys.exit(1)
