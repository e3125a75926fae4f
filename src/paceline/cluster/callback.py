"""Agents that call back: for schedulers that start nodes but leave no stream to each of them.

The launcher listens, each node's first process (see ``agent.caller``) calls, both prove that they
know the key of this run, and two connections (frames, standard error) become one link.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
import os
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.agent import caller
from paceline.cluster.openssh import FALLBACK_PYTHONS, agent_command

HANDSHAKE_S = 10.0
STREAM_LIMIT = 1 << 20
_BACKLOG = 256

# Takes the first Python there is: this part runs on any, the agent itself then on the chosen one.
_FIND_PYTHON = (
    'c="$1"; d="$2"; shift 2; for p in "$@"; do if command -v "$p" >/dev/null 2>&1; then '
    'exec "$p" -I -c "import base64,sys,zlib;'
    'exec(zlib.decompress(base64.b64decode(sys.argv[1])))" "$c" "$d"; fi; done; '
    'echo "paceline-boot: no Python: tried $*" >&2; exit 127'
)


class CallLink:
    """A link made of two calls of the same node."""

    def __init__(self, frames: Call, errors: Call) -> None:
        self.reader, self.writer, self.errors = frames.reader, frames.writer, errors.reader
        self._errors_writer = errors.writer

    @property
    def status(self) -> int | None:
        return None

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
class Call:
    """One connection of somebody who knows the key.

    Attributes:
        about: What it said of itself: ``stream``, ``index``, ``name``, ``session``, …
        reader, writer: The connection, ready for use once :meth:`accept` was called.
        peer: Address it came from.
    """

    about: dict[str, Any]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    peer: str

    def accept(self) -> None:
        self._answer({"ok": True})

    def refuse(self, why: str) -> None:
        """Tells it why, and hangs up."""
        self._answer({"error": why})
        self.writer.close()

    def tell(self, **message: Any) -> None:
        """One line of JSON, for those who only wait (stream ``status``)."""
        self._answer(message)

    def _answer(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.write(json.dumps(message).encode() + b"\n")


@dataclass
class Switchboard:
    """Listens for calls and hands over those whose caller knows the key.

    Attributes:
        key: The secret of this run.
        on_call: Told of every proven call; has to accept or refuse it.
        addresses: Where it listens, after :meth:`open`.
        strangers: Addresses of callers that did not know the key.
    """

    key: bytes
    on_call: Callable[[Call], None]
    addresses: list[tuple[str, int]] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)
    _servers: list[asyncio.Server] = field(default_factory=list)
    _talking: set[asyncio.Task[None]] = field(default_factory=set)

    async def open(self, addresses: Sequence[str], port: int = 0) -> None:
        """Listens on each address, on ``port`` or a free one. OSError when none can be had."""
        problem: OSError | None = None
        for address in addresses:
            try:
                server = await asyncio.start_server(
                    self._take, address, port, limit=STREAM_LIMIT, backlog=_BACKLOG
                )
            except OSError as error:
                problem = error
                continue
            self._servers.append(server)
            self.addresses.append((address, server.sockets[0].getsockname()[1]))
        if not self.addresses and problem is not None:
            raise problem

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talking.add(task)
        try:
            call = await asyncio.wait_for(self._shake_hands(reader, writer), HANDSHAKE_S)
        except (OSError, EOFError, ValueError, asyncio.TimeoutError):
            self.strangers.append(_peer(writer))
            writer.close()
        else:
            self.on_call(call)
        finally:
            self._talking.discard(task)

    async def _shake_hands(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Call:
        magic, nonce = (await reader.readuntil(b"\n")).decode().split()
        if magic != caller.MAGIC:
            raise ValueError(magic)
        ours = os.urandom(16).hex()
        writer.write(f"{ours} {caller.mac(self.key, 'launcher', nonce, ours)}\n".encode())
        proof, _, about = (await reader.readuntil(b"\n")).decode().rstrip("\n").partition(" ")
        if not hmac.compare_digest(proof, caller.mac(self.key, "agent", nonce, ours, about)):
            raise ValueError("wrong key")
        _keep_alive(writer)
        return Call(json.loads(about), reader, writer, _peer(writer))

    async def close(self) -> None:
        """Stops listening; calls that were accepted go on."""
        for server in self._servers:
            server.close()
        for task in list(self._talking):
            task.cancel()
        await asyncio.gather(*self._talking, return_exceptions=True)
        self._servers.clear()


def _peer(writer: asyncio.StreamWriter) -> str:
    name = writer.get_extra_info("peername")
    return str(name[0]) if name else "?"


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def caller_config(
    addresses: Sequence[tuple[str, int]],
    pythons: Sequence[str],
    places: Sequence[str],
    strip: str,
    patience_s: float,
    about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What a node needs to know to call.

    Args:
        addresses: Where the launcher listens.
        pythons: The interpreter for each node, in rank order.
        places: Variables that tell a node its place, the first that is set wins.
        strip: Regular expression of variables that the agent must not inherit.
        patience_s: How long to try.
        about: Further facts that the node shall tell of itself.
    """
    same = len(set(pythons)) == 1
    return {
        "addresses": [list(address) for address in addresses],
        "pythons": list(pythons[:1] if same else pythons),
        "places": list(places),
        "strip": strip,
        "patience": patience_s,
        "agent": agent_command("@"),
        **({"about": dict(about)} if about else {}),
    }


def caller_command(config: Mapping[str, Any]) -> list[str]:
    """The command that makes a node call. It holds no secret: the key is in the environment."""
    source = Path(caller.__file__).read_text(encoding="utf-8") + "\nmain(sys.argv[2])\n"
    packed = base64.b64encode(zlib.compress(source.encode(), 9)).decode()
    pythons = dict.fromkeys([*FALLBACK_PYTHONS, *config["pythons"]])
    text = json.dumps(config)
    return ["/bin/sh", "-c", _FIND_PYTHON, "paceline", packed, text, *pythons]
