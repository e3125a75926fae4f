"""Accepts TLS connections from nodes that a scheduler or a person started.

Each node's first process (see ``agent.caller``) connects, both sides prove that they know the run's
key, and two connections (frames, standard error) become one link. The certificate is made for the
run and not signed: the proofs include its hash.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import hmac
import json
import random
import socket
import ssl
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.agent import caller
from paceline.remote.openssh import FALLBACK_PYTHONS, agent_command
from paceline.rendezvous import unproven
from paceline.rendezvous.certificate import make_certificate

HANDSHAKE_S = 5.0
LINE_LIMIT = caller.LINE_LIMIT
MAX_STRANGERS = 100
_BACKLOG = 256

# Runs on the first Python there is; the agent itself then runs on the requested one.
_FIND_PYTHON = (
    'c="$1"; d="$2"; shift 2; for p in "$@"; do if command -v "$p" >/dev/null 2>&1; then '
    'exec "$p" -I -c "import base64,sys,zlib;'
    'exec(zlib.decompress(base64.b64decode(sys.argv[1])))" "$c" "$d"; fi; done; '
    'echo "paceline-boot: no Python: tried $*" >&2; exit 127'
)


class Records:
    """Writes records, because TLS cannot close one direction: an empty record is the end."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.transport = writer.transport

    def write(self, data: bytes) -> None:
        """Sends ``data`` unless it is empty."""
        if data:
            self._write(caller.RECORD.pack(len(data)) + data)

    def write_eof(self) -> None:
        """Announces the end."""
        self._write(caller.RECORD.pack(0))

    def _write(self, record: bytes) -> None:
        # a closed TLS transport raises AttributeError
        if not self.transport.is_closing():
            self._writer.write(record)

    async def drain(self) -> None:
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()


class PeerLink:
    """A link over the two connections of a node."""

    def __init__(self, frames: Connection, errors: Connection) -> None:
        self.reader, self.errors = frames.reader, errors.reader
        self.writer = Records(frames.writer)
        self._errors_writer = errors.writer

    @property
    def status(self) -> int | None:
        return None

    async def has_exited(self) -> bool:
        """Unknown: the end of a connection does not show whether the agent ended."""
        return False

    def abort(self) -> None:
        """Closes both connections at once."""
        for writer in (self.writer, self._errors_writer):
            writer.transport.abort()

    async def drop(self) -> None:
        self.abort()

    async def release(self) -> None:
        await self.drop()

    async def end(self, timeout_s: float) -> None:
        """Announces the end and waits until the agent closes the connection."""
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.write_eof()
        with contextlib.suppress(asyncio.TimeoutError, ConnectionError, RuntimeError):
            await asyncio.wait_for(_wait_for_eof(self.reader), timeout_s or 0.001)
        for writer in (self.writer, self._errors_writer):
            writer.close()


async def _wait_for_eof(reader: asyncio.StreamReader) -> None:
    while not reader.at_eof():
        await asyncio.sleep(0.01)  # the channel's own task does the reading


class _Reader(asyncio.StreamReader):
    """Reports a failure of TLS which shows that bytes were changed on the way."""

    connection: Connection | None = None  # once the node has proven the key

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        if self.connection is not None and caller.shows_change(exc):
            self.connection.on_altered(self.connection.local_address)


@dataclass
class Connection:
    """A connection from a node that has proven the key.

    Attributes:
        info: The node's description of itself: ``stream``, ``index``, ``name``, ``session``, …
        reader, writer: Its streams, usable after :meth:`accept`.
        peer: Remote address.
        seal: Prepends this side's proof to the first answer.
        local_address: The node connected to it.
        on_altered: Called with that address when bytes turn out to have been changed on the way.
    """

    info: dict[str, Any]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    peer: str
    seal: Callable[[str], str] = str
    local_address: str = ""
    on_altered: Callable[[str], None] = lambda address: None

    def accept(self) -> None:
        """Accepts the node and proves the key."""
        self._write(self.seal(json.dumps({"ok": True})))

    def reject(self, reason: str) -> None:
        """Sends the reason and closes the connection."""
        self._write(self.seal(json.dumps({"error": reason})))
        self.writer.transport.abort()  # an orderly close needs the peer's cooperation

    def send_status(self, exit_code: int) -> None:
        """Sends the job's exit status on a connection of stream ``status``, and closes it."""
        self._write(json.dumps({"exit_code": exit_code}))
        self.writer.close()

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.write(line.encode() + b"\n")


@dataclass
class Listener:
    """Listens for nodes, and hands over their connections once they have proven the key.

    Attributes:
        key: The secret of this run.
        on_connection: Called with every proven connection; must accept or reject it.
        addresses: Where it listens, after :meth:`open`.
        strangers: Addresses of nodes with another key.
        certificate: SHA-256 of its certificate, after :meth:`open`.
    """

    key: bytes
    on_connection: Callable[[Connection], None]
    addresses: list[tuple[str, int]] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)
    certificate: str = ""
    _listeners: list[tuple[socket.socket, asyncio.Task[None]]] = field(default_factory=list)
    _unproven: dict[asyncio.Task[None], unproven.Peer] = field(default_factory=dict)
    _random: random.Random = field(default_factory=random.SystemRandom)

    async def open(self, addresses: Sequence[str], port: int = 0) -> None:
        """Listens on each address, on ``port`` or a free one; raises OSError if all fail."""
        self._context, self.certificate = await asyncio.to_thread(identity)
        problem: OSError | None = None
        for address in addresses:
            try:
                listener = _listening(address, port)
            except OSError as error:
                problem = error
                continue
            accepting = asyncio.create_task(self._accept(listener))
            self._listeners.append((listener, accepting))
            self.addresses.append((address, listener.getsockname()[1]))
        if not self.addresses and problem is not None:
            raise problem

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(listener)
            except OSError:  # out of descriptors, or closed before it was accepted
                await asyncio.sleep(0.05)
                continue
            self._drop_excess()
            task = asyncio.create_task(self._handle(connection, str(peer[0])))
            self._unproven[task] = unproven.peer_of(str(peer[0]))
            task.add_done_callback(lambda task: self._unproven.pop(task, None))

    def _drop_excess(self) -> None:
        if len(self._unproven) < unproven.max_unproven():
            return
        task = list(self._unproven)[unproven.victim([*self._unproven.values()], self._random)]
        del self._unproven[task]
        task.cancel()

    async def _handle(self, connection: socket.socket, peer: str) -> None:
        """Handles a connection up to its proof; errors of the peer are ignored."""
        opened: list[asyncio.StreamWriter] = []
        try:
            handshake = self._shake_hands(connection, peer, opened)
            proven = await asyncio.wait_for(handshake, HANDSHAKE_S)
        except (OSError, EOFError, ValueError, RecursionError, asyncio.LimitOverrunError,
                asyncio.TimeoutError, asyncio.CancelledError):  # fmt: skip
            for writer in opened:
                writer.transport.abort()  # an orderly close needs the peer's cooperation
        else:
            self.on_connection(proven)

    async def _shake_hands(
        self, connection: socket.socket, peer: str, opened: list[asyncio.StreamWriter]
    ) -> Connection:
        loop = asyncio.get_running_loop()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader = _Reader(limit=LINE_LIMIT)
        transport, protocol = await loop.connect_accepted_socket(
            lambda: asyncio.StreamReaderProtocol(reader), connection, ssl=self._context,
            ssl_handshake_timeout=HANDSHAKE_S,
        )  # fmt: skip
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        opened.append(writer)
        return await self._proven(reader, writer, peer)

    async def _proven(self, reader: _Reader, writer: asyncio.StreamWriter, peer: str) -> Connection:
        """Verifies the caller's proof, before anything else is read or sent."""
        line = b""
        while len(line) < caller.PROOF_BYTES and not line.endswith(b"\n"):
            part = await reader.read(caller.PROOF_BYTES - len(line))
            if not part:
                raise EOFError
            line += part
        magic, nonce, proof = line.decode().split()
        if magic != caller.MAGIC:
            raise ValueError(magic)
        expected = caller.mac(self.key, "caller", self.certificate, nonce)
        if not hmac.compare_digest(proof.encode(), expected.encode()):
            self.strangers = [*self.strangers[-MAX_STRANGERS:], peer]
            writer.write(f"{caller.WRONG_KEY}\n".encode())
            raise ValueError("wrong key")
        info = json.loads(await reader.readuntil(b"\n"))
        if not isinstance(info, dict):
            raise ValueError("no description of a node")

        def seal(answer: str) -> str:
            proof = caller.mac(self.key, "launcher", self.certificate, nonce, answer)
            return f"{proof} {answer}"

        local_address = str(writer.get_extra_info("sockname")[0])
        reader.connection = Connection(info, reader, writer, peer, seal, local_address)
        return reader.connection

    async def close(self) -> None:
        """Stops listening; accepted connections stay open."""
        loop = asyncio.get_running_loop()
        for listener, accepting in self._listeners:
            loop.remove_reader(listener)  # a caller may have come in this very moment
            accepting.cancel()
            listener.close()
        tasks = [*(accepting for _, accepting in self._listeners), *self._unproven]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listeners.clear()


def _listening(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    return listener


def caller_config(
    addresses: Sequence[tuple[str, int]],
    certificate: str,
    pythons: Sequence[str],
    places: Sequence[str],
    strip: str,
    timeout_s: float,
    info: Mapping[str, Any] | None = None,
    names: Sequence[str] = (),
    wrap: Callable[[list[str]], list[str]] = list,
    is_single_use: bool = False,
    key_file: str = "",
) -> dict[str, Any]:
    """The configuration of a node's caller.

    Args:
        addresses, timeout_s: Where the launcher listens, and how long to try.
        certificate: SHA-256 of the launcher's certificate, so that no other node passes for it.
        pythons: The interpreter for each node, in rank order.
        places, names: Variables with the node's rank and with the scheduler's name for it; the
            first that is set counts.
        strip: Regular expression of variables that the agent must not inherit.
        info: Further entries of the node's description of itself.
        wrap: Wraps the agent's command, for example in a container engine's.
        is_single_use: The agent cannot reconnect: a broken connection is its end.
        key_file: File with the key, for nodes whose environment does not have it.
    """
    is_uniform = len(set(pythons)) == 1
    return {
        "addresses": [list(address) for address in addresses],
        "certificate": certificate,
        "pythons": list(pythons[:1] if is_uniform else pythons),
        "places": list(places),
        "names": list(names),
        "strip": strip,
        "timeout_s": timeout_s,
        "agent": wrap(agent_command("@")),
        **({"once": True} if is_single_use else {}),
        **({"about": dict(info)} if info else {}),
        **({"key_file": key_file} if key_file else {}),
    }


def caller_command(config: Mapping[str, Any]) -> list[str]:
    """The command that makes a node connect, without secrets: the key is in the environment."""
    source = Path(caller.__file__).read_text(encoding="utf-8") + "\nmain(sys.argv[2])\n"
    packed = base64.b64encode(zlib.compress(source.encode(), 9)).decode()
    pythons = dict.fromkeys([*FALLBACK_PYTHONS, *config["pythons"]])
    text = json.dumps(config)
    return ["/bin/sh", "-c", _FIND_PYTHON, "paceline", packed, text, *pythons]


# --- the run's certificate


@functools.cache
def identity() -> tuple[ssl.SSLContext, str]:
    """This process's TLS context as a server, and its certificate's SHA-256 in hexadecimal.

    Raises SettingError if there is no ``openssl`` to make one, or it cannot.
    """
    certificate, key = make_certificate()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.NamedTemporaryFile("w", prefix="paceline-tls-") as file:
        file.write(certificate + key)
        file.flush()
        context.load_cert_chain(file.name)
    return context, hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate)).hexdigest()
