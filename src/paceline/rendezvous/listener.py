"""Connections from nodes: where a scheduler, or a person, starts them and leaves us no stream.

The launcher listens, each node's first process (see ``agent.caller``) connects over TLS, both prove
that they know the key of this run, and two connections (frames, standard error) become one link.
Nobody vouches for the certificate, which is made for one run: the key is proven over its hash.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import hmac
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.agent import caller
from paceline.remote.openssh import FALLBACK_PYTHONS, agent_command
from paceline.spec.errors import SettingError

HANDSHAKE_S = 5.0
UNPROVEN = 64  # connections that have not proven the key yet; beyond it somebody has to go
LINE_LIMIT = caller.LINE_LIMIT
STRANGERS_KEPT = 100
_BACKLOG = 256
_CERTIFICATE_CONFIG = "[req]\ndistinguished_name = name\nprompt = no\n[name]\nCN = paceline\n"
_OPENSSL_S = 20.0

# Takes the first Python there is: this part runs on any, the agent itself then on the chosen one.
_FIND_PYTHON = (
    'c="$1"; d="$2"; shift 2; for p in "$@"; do if command -v "$p" >/dev/null 2>&1; then '
    'exec "$p" -I -c "import base64,sys,zlib;'
    'exec(zlib.decompress(base64.b64decode(sys.argv[1])))" "$c" "$d"; fi; done; '
    'echo "paceline-boot: no Python: tried $*" >&2; exit 127'
)


class Records:
    """Writes to a node in records, so that an end can be said where TLS knows no half-closing."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.transport = writer.transport

    def write(self, data: bytes) -> None:
        """Sends ``data``; nothing when it is empty, which would be the end."""
        if data:
            self._say(caller.RECORD.pack(len(data)) + data)

    def write_eof(self) -> None:
        """Nothing more comes."""
        self._say(caller.RECORD.pack(0))

    def _say(self, record: bytes) -> None:
        """What is said to a connection that is closed is lost, as on any other.

        A closed TLS transport raises what nobody looks for: AttributeError.
        """
        if not self.transport.is_closing():
            self._writer.write(record)

    async def drain(self) -> None:
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()


class PeerLink:
    """A link made of the two connections of a peer."""

    def __init__(self, frames: Connection, errors: Connection) -> None:
        self.reader, self.errors = frames.reader, errors.reader
        self.writer = Records(frames.writer)
        self._errors_writer = errors.writer

    @property
    def status(self) -> int | None:
        return None

    async def over(self) -> bool:
        """The node's end of it says nothing about what became of the agent."""
        return False

    async def cut(self) -> None:
        for writer in (self.writer, self._errors_writer):
            writer.transport.abort()

    async def release(self) -> None:
        await self.cut()

    async def end(self, patience_s: float) -> None:
        """Says that nothing more comes; waits until the agent has hung up."""
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.write_eof()
        with contextlib.suppress(asyncio.TimeoutError, ConnectionError, RuntimeError):
            await asyncio.wait_for(_to_end(self.reader), patience_s or 0.001)
        for writer in (self.writer, self._errors_writer):
            writer.close()


async def _to_end(reader: asyncio.StreamReader) -> None:
    while not reader.at_eof():
        await asyncio.sleep(0.01)  # the channel's own task does the reading


@dataclass
class Connection:
    """One connection of somebody who knows the key.

    Attributes:
        about: What it said of itself: ``stream``, ``index``, ``name``, ``session``, …
        reader, writer: The connection, ready for use once :meth:`accept` was called.
        peer: Address it came from.
        seal: Puts our proof of the key before the first answer.
    """

    about: dict[str, Any]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    peer: str
    seal: Callable[[str], str] = str

    def accept(self) -> None:
        """Proves the key in turn."""
        self._answer({"ok": True}, self.seal)

    def refuse(self, why: str) -> None:
        """Tells it why, and hangs up."""
        self._answer({"error": why}, self.seal)
        self.writer.close()

    def tell(self, **message: Any) -> None:
        """One line of JSON, for those who only wait (stream ``status``)."""
        self._answer(message)

    def _answer(self, message: Mapping[str, Any], seal: Callable[[str], str] = str) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.write(seal(json.dumps(message)).encode() + b"\n")


@dataclass
class Listener:
    """Listens, and hands over the connections of those who know the key.

    Attributes:
        key: The secret of this run.
        on_connection: Told of every proven connection; has to accept or refuse it.
        addresses: Where it listens, after :meth:`open`.
        strangers: Addresses from which somebody came with another key.
    """

    key: bytes
    on_connection: Callable[[Connection], None]
    addresses: list[tuple[str, int]] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)
    _listeners: list[tuple[socket.socket, asyncio.Task[None]]] = field(default_factory=list)
    _unproven: dict[asyncio.Task[None], str] = field(default_factory=dict)  # oldest first

    async def open(self, addresses: Sequence[str], port: int = 0) -> None:
        """Listens on each address, on ``port`` or a free one. OSError when none can be had."""
        self._context, self._certificate = await asyncio.to_thread(identity)
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
            except OSError:  # out of descriptors, or it was gone before it was taken
                await asyncio.sleep(0.05)
                continue
            self._make_room()
            task = asyncio.create_task(self._take(connection, str(peer[0])))
            self._unproven[task] = str(peer[0])
            task.add_done_callback(lambda done: self._unproven.pop(done, None))

    def _make_room(self) -> None:
        """Hangs up on the longest silent of those who have the most unproven connections."""
        if len(self._unproven) < UNPROVEN:
            return
        (busiest, _), *_ = Counter(self._unproven.values()).most_common(1)
        task = next(task for task, peer in self._unproven.items() if peer == busiest)
        del self._unproven[task]
        task.cancel()

    async def _take(self, connection: socket.socket, peer: str) -> None:
        """One connection, up to its proof. Whatever a stranger does is no error of ours."""
        opened: list[asyncio.StreamWriter] = []
        try:
            handshake = self._shake_hands(connection, peer, opened.append)
            proven = await asyncio.wait_for(handshake, HANDSHAKE_S)
        except (OSError, EOFError, ValueError, RecursionError, asyncio.LimitOverrunError,
                asyncio.TimeoutError, asyncio.CancelledError):  # fmt: skip
            for writer in opened:
                writer.transport.abort()  # to close in order takes a stranger's consent
        else:
            self.on_connection(proven)

    async def _shake_hands(
        self, connection: socket.socket, peer: str, opened: Callable[[asyncio.StreamWriter], None]
    ) -> Connection:
        reader, writer = await self._encrypted(connection)
        opened(writer)
        return await self._proven(reader, writer, peer)

    async def _encrypted(
        self, connection: socket.socket
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader = asyncio.StreamReader(limit=LINE_LIMIT)
        transport, protocol = await loop.connect_accepted_socket(
            lambda: asyncio.StreamReaderProtocol(reader), connection, ssl=self._context,
            ssl_handshake_timeout=HANDSHAKE_S,
        )  # fmt: skip
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    async def _proven(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str
    ) -> Connection:
        """The caller proves first: we say nothing that depends on the key to anybody else."""
        line = (await reader.readuntil(b"\n")).decode().rstrip("\n")
        magic, nonce, proof, about = line.split(" ", 3)
        if magic != caller.MAGIC:
            raise ValueError(magic)
        expected = caller.mac(self.key, "caller", self._certificate, nonce, about)
        if not hmac.compare_digest(proof.encode(), expected.encode()):
            self.strangers = [*self.strangers[-STRANGERS_KEPT:], peer]
            writer.write(f"{caller.WRONG_KEY}\n".encode())
            raise ValueError("wrong key")
        said = json.loads(about)
        if not isinstance(said, dict):
            raise ValueError(about)

        def seal(answer: str) -> str:
            ours = caller.mac(self.key, "launcher", self._certificate, nonce, answer)
            return f"{ours} {answer}"

        return Connection(said, reader, writer, peer, seal)

    async def close(self) -> None:
        """Stops listening; connections that were accepted go on."""
        for listener, accepting in self._listeners:
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
    pythons: Sequence[str],
    places: Sequence[str],
    strip: str,
    patience_s: float,
    about: Mapping[str, Any] | None = None,
    names: Sequence[str] = (),
    wrap: Callable[[list[str]], list[str]] = list,
    once: bool = False,
) -> dict[str, Any]:
    """What a node needs to know to call.

    Args:
        addresses: Where the launcher listens.
        pythons: The interpreter for each node, in rank order.
        places: Variables that tell a node its place, the first that is set wins.
        strip: Regular expression of variables that the agent must not inherit.
        patience_s: How long to try.
        about: Further facts that the node shall tell of itself.
        names: Variables that hold the scheduler's name for the node, the first that is set wins.
        wrap: Puts the agent's command into another, such as a container engine's.
        once: The agent's streams cannot be met again: a call that breaks is its end.
    """
    same = len(set(pythons)) == 1
    return {
        "addresses": [list(address) for address in addresses],
        "pythons": list(pythons[:1] if same else pythons),
        "places": list(places),
        "names": list(names),
        "strip": strip,
        "patience": patience_s,
        "agent": wrap(agent_command("@")),
        **({"once": True} if once else {}),
        **({"about": dict(about)} if about else {}),
    }


def caller_command(config: Mapping[str, Any]) -> list[str]:
    """The command that makes a node call. It holds no secret: the key is in the environment."""
    source = Path(caller.__file__).read_text(encoding="utf-8") + "\nmain(sys.argv[2])\n"
    packed = base64.b64encode(zlib.compress(source.encode(), 9)).decode()
    pythons = dict.fromkeys([*FALLBACK_PYTHONS, *config["pythons"]])
    text = json.dumps(config)
    return ["/bin/sh", "-c", _FIND_PYTHON, "paceline", packed, text, *pythons]


# --- the certificate of one run


@functools.cache
def identity() -> tuple[ssl.SSLContext, str]:
    """This process's TLS context as a server, and its certificate's SHA-256 in hexadecimal.

    Raises:
        SettingError: There is no ``openssl`` to make one, or it cannot.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-tls-") as folder:
        key, certificate = _made_in(Path(folder))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(certificate, key)
        der = ssl.PEM_cert_to_DER_cert(certificate.read_text(encoding="ascii"))
    return context, hashlib.sha256(der).hexdigest()


def _made_in(folder: Path) -> tuple[Path, Path]:
    """Private key and certificate, in a folder that only this user can enter."""
    config, key, certificate = (folder / name for name in ("config", "key.pem", "cert.pem"))
    config.write_text(_CERTIFICATE_CONFIG, encoding="ascii")
    argv = [
        _openssl(), "req", "-x509", "-config", str(config), "-newkey", "ec",
        "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30",
        "-keyout", str(key), "-out", str(certificate),
    ]  # fmt: skip
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, timeout=_OPENSSL_S,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        raise SettingError(
            "openssl could not make a certificate for the connections of this run",
            found=done.stderr.strip(), remedy=f"Try: {argv[0]} version", exit_code=1,
        )  # fmt: skip
    return key, certificate


def _openssl() -> str:
    beside = str(Path(sys.executable).parent)  # conda has its own there
    found = shutil.which("openssl", path=os.pathsep.join([os.environ.get("PATH", ""), beside]))
    if found is None:
        raise SettingError(
            "agents that call back do so over TLS, and there is no openssl to make a certificate",
            found="no openssl on PATH",
            remedy="Install it (Debian: sudo apt-get install openssl), or start over SSH",
        )
    return found
