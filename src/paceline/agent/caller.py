"""The first lines on a node whose agent has to call back: dial, prove who we are, become the agent.

What starts the nodes (a scheduler's command, a person) leaves no stream of its own to each of
them. So what it starts calls the launcher over TCP, starts the agent, and passes its standard
streams on through TLS. From there on everything is as over SSH.

The source of this file travels in the command that the scheduler starts; the key travels in the
environment, never in a command. It may use nothing but the standard library.

The launcher's certificate is made for this run and vouched for by nobody: both sides prove that
they know the key *and* that they see the same certificate. The caller proves first, so a stranger
learns nothing from the launcher. Within TLS, line by line (``mac`` is HMAC-SHA256 under the key,
CERT the certificate's SHA-256, both hexadecimal)::

    node:     paceline-call NONCE mac("caller" CERT NONCE ABOUT) ABOUT    ABOUT: one line of JSON
    launcher: mac("launcher" CERT NONCE ANSWER) ANSWER                    ANSWER: {"ok": true} or
    launcher: wrong-key                                                           {"error": TEXT}

Then the launcher sends records (four bytes of length and so many bytes; length 0 means that
nothing more comes), and the node sends the agent's output as it is.

A connection that ends without that record has broken. Then we call again and start the agent's
command once more, to which the launcher says to meet the living agent (see ``reconnection.py``).
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

KEY = "PACELINE_CALL_KEY"
MAGIC = "paceline-call"
WRONG_KEY = "wrong-key"
ENDED = b"paceline-call: the agent has ended"  # said on its standard error
LINE_LIMIT = 1 << 16
CONNECT_S = 3.0
SILENT_MS = 4000  # after which what was sent and nobody acknowledged has broken the connection
AGAIN_S = 0.2  # between two calls after a break
ANSWER_S = 5.0  # for the answer to such a call
REFUSED_S = 2.0  # nobody listens there any more: the launcher has ended
OWN_END_S = 2.0
PIECE = 1 << 16
FULL = 1 << 20  # bytes under way in one direction, above which no more are read
RECORD = struct.Struct(">I")
USER_TIMEOUT = 18  # of Linux' TCP; some Pythons do not name it


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
) -> ssl.SSLSocket:
    """A connection to the launcher at whichever address it answers.

    Refused when it says no; OSError when nobody who knows the key answers in time.
    """
    problem = OSError("no address to call")
    while True:
        for host, port in addresses:
            try:
                return call(host, port, key, about, CONNECT_S * 20)  # it may wait for other nodes
            except OSError as error:
                problem = OSError("%s port %d: %s" % (host, port, error.strerror or error))
        if time.monotonic() > deadline:
            raise problem
        time.sleep(pause)


def call(host: str, port: int, key: bytes, about: Dict[str, Any], patience: float) -> ssl.SSLSocket:
    """One call; the connection is ready for the agent's stream when this returns.

    ``patience``: seconds for the launcher to say how it likes us.
    """
    plain = socket.create_connection((host, port), CONNECT_S)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    plain.setsockopt(socket.IPPROTO_TCP, USER_TIMEOUT, SILENT_MS)
    connection = plain
    try:
        try:
            connection = encrypted = unverified().wrap_socket(plain)
        except (ssl.SSLError, ValueError):
            raise OSError("something else answers there") from None
        greet(encrypted, key, about, patience)
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


def greet(connection: ssl.SSLSocket, key: bytes, about: Dict[str, Any], patience: float) -> None:
    """Proves that we know the key to the owner of the certificate that we see; hears the same."""
    seen = hashlib.sha256(connection.getpeercert(True) or b"").hexdigest()
    nonce = os.urandom(16).hex()
    text = json.dumps(about)
    proof = mac(key, "caller", seen, nonce, text)
    connection.sendall(("%s %s %s %s\n" % (MAGIC, nonce, proof, text)).encode())
    connection.settimeout(patience)
    said = read_line(connection).rstrip("\n")
    if said == WRONG_KEY:
        raise OSError("the launcher that answers there has another key")
    theirs, _, answer = said.partition(" ")
    if not hmac.compare_digest(theirs.encode(), mac(key, "launcher", seen, nonce, answer).encode()):
        raise OSError("something else answers there")
    if "error" in json.loads(answer):
        raise Refused(json.loads(answer)["error"])


def read_line(connection: ssl.SSLSocket) -> str:
    """Byte by byte: what follows the line belongs to the agent."""
    line = b""
    while not line.endswith(b"\n"):
        more = connection.recv(1)
        if not more or len(line) > LINE_LIMIT:
            raise OSError("the launcher hung up")
        line += more
    return line.decode()


class Wires:
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
        self._from = {agent.stdout.fileno(): frames, agent.stderr.fileno(): errors}
        self._unsent = {frames: bytearray(), errors: bytearray()}
        self._frames: Optional[ssl.SSLSocket] = frames
        self._errors: Optional[ssl.SSLSocket] = errors  # on which nothing comes but its end
        self._undelivered = bytearray()  # what the agent has not taken yet
        self._in_record = 0
        self._header = b""
        self._last = False  # the launcher has said that nothing more comes
        self._broken = False
        for one in (self._stdin, *self._from):
            os.set_blocking(one, False)
        frames.setblocking(False)
        errors.setblocking(False)

    def run(self) -> bool:
        """Returns when all that the agent said has been sent; True when the way has broken."""
        while not self._broken and (self._from or any(self._unsent.values())):
            readable, writable = self._ready()
            for fd in [fd for fd in self._from if fd in readable]:
                self._take_output(fd)
            for wire in [wire for wire in self._unsent if wire in writable]:
                self._send(wire)
            if self._frames is not None and self._frames in readable:
                self._take_input()
            if self._errors is not None and self._errors in readable:
                self._see_end(self._errors)
            if self._stdin is not None:
                self._deliver()
        return self._broken

    def _ready(self) -> Tuple[List[Any], List[Any]]:
        reads: List[Any] = [
            fd for fd, wire in self._from.items() if len(self._unsent.get(wire, b"")) < FULL
        ]
        pending = []
        if self._frames is not None and len(self._undelivered) < FULL:
            reads.append(self._frames)
            pending = [self._frames] if self._frames.pending() else []
        if self._errors is not None:
            reads.append(self._errors)
        writes: List[Any] = [wire for wire, data in self._unsent.items() if data]
        if self._stdin is not None and self._undelivered:
            writes.append(self._stdin)
        readable, writable, _ = select.select(reads, writes, [], 0 if pending else 1.0)
        return readable + pending, writable

    def _take_output(self, fd: int) -> None:
        wire = self._from[fd]
        data = read_some(fd)
        if data == b"":
            del self._from[fd]
        elif data and wire in self._unsent:
            self._unsent[wire] += data

    def _send(self, wire: ssl.SSLSocket) -> None:
        unsent = self._unsent[wire]
        try:
            while unsent:
                del unsent[: wire.send(unsent[:PIECE])]
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError:  # nobody listens any more
            del self._unsent[wire]
            self._hang_up()

    def _take_input(self) -> None:
        assert self._frames is not None
        try:
            data = self._frames.recv(PIECE)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError:
            data = b""
        if not data:
            self._hang_up()
        while data and not self._last:
            data = self._take_record(data)

    def _see_end(self, errors: ssl.SSLSocket) -> None:
        try:
            if errors.recv(PIECE):
                return
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError:
            pass
        self._errors = None
        self._hang_up()

    def _take_record(self, data: bytes) -> bytes:
        """Takes the beginning of what came; returns the rest."""
        if self._in_record:
            part = data[: self._in_record]
            self._undelivered += part
            self._in_record -= len(part)
            return data[len(part) :]
        missing = RECORD.size - len(self._header)
        self._header += data[:missing]
        if len(self._header) == RECORD.size:
            (self._in_record,) = RECORD.unpack(self._header)
            self._header = b""
            self._last = self._in_record == 0
        return data[missing:]

    def _hang_up(self) -> None:
        """In order, if it was said before."""
        self._frames, self._broken = None, not self._last

    def _deliver(self) -> None:
        assert self._stdin is not None
        try:
            while self._undelivered:
                del self._undelivered[: os.write(self._stdin, self._undelivered[:PIECE])]
        except BlockingIOError:
            return
        except OSError:  # the agent has closed its input
            self._undelivered.clear()
        if self._last:
            assert self._agent.stdin is not None
            self._agent.stdin.close()
            self._stdin = None


def read_some(fd: int) -> Optional[bytes]:
    """What a pipe holds: ``None`` for nothing just now, empty at its end."""
    try:
        return os.read(fd, PIECE)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def become_agent(config: Dict[str, Any], key: bytes) -> int:
    """Calls twice, for the frames and for standard error, and serves as the agent's wires.

    Returns:
        The agent's exit status.
    """
    about = {
        "index": index_of(os.environ, config["places"]),
        "name": socket.gethostname(),
        "node": next((os.environ[one] for one in config["names"] if one in os.environ), ""),
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
    pipe = subprocess.PIPE
    agent = subprocess.Popen(argv, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe)
    for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(one, lambda number, _: agent.send_signal(number))
    for one in (signal.SIGUSR1, signal.SIGUSR2):  # meant for ranks
        signal.signal(one, signal.SIG_IGN)
    own, addresses = (
        agent,
        sorted(config["addresses"], key=lambda a: a[0] != frames.getpeername()[0]),
    )
    while Wires(own, frames, errors).run() or not ends(agent):
        hang_up(own, frames, errors)
        if config.get("once"):
            dismiss(agent)
            break
        called = call_again(agent, addresses, key, about)
        if called is None:
            break
        frames, errors = called
        own = subprocess.Popen(argv, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe)
    say_ended(errors)
    hang_up(own, frames, errors)
    own.wait()
    code = agent.wait()
    # One that a signal ended is for the launcher to make good: some MPIs would end all the others.
    return code if 0 <= code < 128 else 0


def say_ended(errors: ssl.SSLSocket) -> None:
    """The agent is gone: nobody is to wait until it calls again."""
    with contextlib.suppress(OSError):
        errors.settimeout(ANSWER_S)
        errors.sendall(b"\n" + ENDED + b"\n")


def ends(agent: "subprocess.Popen[bytes]") -> bool:
    """Whether it is the agent that has ended, not only what was to meet it on another way."""
    try:
        agent.wait(AGAIN_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def hang_up(own: "subprocess.Popen[bytes]", *wires: ssl.SSLSocket) -> None:
    """Closes what connected a process with the launcher: both its ends have gone."""
    for one in (own.stdin, own.stdout, own.stderr, *wires):
        if one is not None:
            one.close()


def call_again(
    agent: "subprocess.Popen[bytes]", addresses: List[Any], key: bytes, about: Dict[str, Any]
) -> Optional[Tuple[ssl.SSLSocket, ssl.SSLSocket]]:
    """Calls while the agent lives; ``None`` when it does not, or is to end: nobody is there."""
    refused_at = None
    while agent.poll() is None:
        refused = 0
        for host, port in addresses:
            try:
                frames = call(host, port, key, dict(about, stream="frames", again=True), ANSWER_S)
                errors = call(host, port, key, dict(about, stream="errors", again=True), ANSWER_S)
                return frames, errors
            except ConnectionRefusedError:
                refused += 1
            except Refused:
                dismiss(agent)
                return None
            except OSError:
                pass
        now = time.monotonic()
        refused_at = None if refused < len(addresses) else refused_at or now
        if refused_at is not None and now - refused_at > REFUSED_S:
            dismiss(agent)
            return None
        time.sleep(AGAIN_S)
    return None


def dismiss(agent: "subprocess.Popen[bytes]") -> None:
    """Asks an agent to end that nobody will meet again, unless it does so by itself."""
    try:
        agent.wait(OWN_END_S)
    except subprocess.TimeoutExpired:
        agent.terminate()


def main(text: str) -> None:
    """``text``: JSON of addresses, patience, places, names, strip, agent, pythons."""
    key = bytes.fromhex(os.environ.pop(KEY, ""))
    try:
        sys.exit(become_agent(json.loads(text), key))
    except (OSError, Refused) as error:
        sys.stderr.write("paceline-call: %s: %s\n" % (socket.gethostname(), error))
        sys.exit(1)
