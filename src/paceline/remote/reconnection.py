"""Reconnects to an agent that is still running; the launcher's side of the handshake."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from paceline.agent.reconnection import MARK, MAX_DIGITS, NONCE_BYTES, mac
from paceline.remote.agent_code import reconnect_source
from paceline.remote.link import Link
from paceline.remote.protocol import MAX_BANNER_BYTES, RECONNECTION_REPLIES, parse_boot_line
from paceline.spec.schema import InvalidValue

Dial = Callable[[], Awaitable[Link]]  # starts the remote command on the host once more

MAX_PARALLEL_ATTEMPTS = 4  # an attempt may hang on lost packets while the next gets through
ATTEMPT_INTERVAL_S = 0.4  # short enough to resume after an outage of two seconds
PAUSE_S = 0.2  # after an attempt that was refused
PROOF_S = 5.0
KEY_BYTES = 32


class AgentNotFound(Exception):
    """The host answers, but no agent waits there for this launcher."""


@dataclass(frozen=True, slots=True)
class AgentAddress:
    """Where an agent accepts reconnections.

    Attributes:
        name: Name of its socket, chosen by the agent.
        key: Secret that the agent and this launcher share.
        starts_session: The agent waits for the next command, which starts a new conversation.
    """

    name: str
    key: bytes = field(repr=False)
    starts_session: bool = False


def generate_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


@dataclass(frozen=True, slots=True)
class PendingLink:
    """A link to an agent that has not been authenticated yet.

    Attributes:
        nonce: The agent's nonce, which our proof must contain.
        early: Bytes that followed the agent's first reply.
    """

    link: Link
    nonce: str
    early: bytes


async def reconnect(dial: Dial, address: AgentAddress) -> PendingLink:
    """Dials until the agent answers; raises AgentNotFound if it never will. May be cancelled."""
    loop = asyncio.get_running_loop()
    attempts: set[asyncio.Task[PendingLink]] = set()
    try:
        while True:
            started_at = loop.time()
            if len(attempts) < MAX_PARALLEL_ATTEMPTS:
                attempts.add(asyncio.create_task(dial_agent(dial, address)))
            finished, _ = await asyncio.wait(
                attempts, timeout=ATTEMPT_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED
            )
            for attempt in finished:
                error = attempt.exception()
                if error is None:
                    await _cancel(attempts - {attempt})  # a cancellation here gives up the result
                    attempts.clear()
                    return attempt.result()
                if not isinstance(error, (OSError, EOFError, InvalidValue)):
                    raise error
            attempts -= finished
            await asyncio.sleep(max(0.0, PAUSE_S - (loop.time() - started_at)))
    finally:
        await _cancel(attempts)


async def _cancel(attempts: set[asyncio.Task[PendingLink]]) -> None:
    for attempt in attempts:
        attempt.cancel()
    for outcome in await asyncio.gather(*attempts, return_exceptions=True):
        if isinstance(outcome, PendingLink):
            await outcome.link.drop()


async def dial_agent(dial: Dial, address: AgentAddress) -> PendingLink:
    """Dials once.

    Raises:
        AgentNotFound: No agent waits there.
        OSError, EOFError, InvalidValue: The attempt failed.
    """
    link = await dial()
    try:
        link.writer.write(reconnect_source(address.name, address.starts_session))
        await link.writer.drain()
        reply, early = await read_boot_line(link, b"")
        if reply[0] == "gone":
            raise AgentNotFound
        if reply[0] != "meet":
            raise InvalidValue(f"the word {reply[0]} before a reconnection")
    except BaseException:
        await link.drop()
        raise
    return PendingLink(link, reply[1], early)


async def authenticate(
    pending: PendingLink, address: AgentAddress, num_received: int
) -> tuple[int, bytes]:
    """Authenticates both sides; returns how many frames the agent received, and early data.

    ``num_received``: number of its frames that this side has received.

    Raises:
        AgentNotFound: One side could not prove the key.
        OSError, EOFError, InvalidValue: The link broke, or its other end is no agent.
    """
    our_nonce, count = secrets.token_hex(NONCE_BYTES), str(num_received)
    proof = mac(address.key, "launcher", pending.nonce, our_nonce, count)
    pending.link.writer.write(f"{our_nonce} {count} {proof}\n".encode())
    with contextlib.suppress(OSError):
        await pending.link.writer.drain()
    try:
        reading = read_boot_line(pending.link, pending.early)
        reply, early = await asyncio.wait_for(reading, PROOF_S)
    except asyncio.TimeoutError:
        raise EOFError from None
    if reply[0] == "stranger":
        raise AgentNotFound
    if reply[0] != "again" or not reply[1].isdigit() or len(reply[1]) > MAX_DIGITS:
        raise InvalidValue("no answer to our proof")
    expected = mac(address.key, "agent", our_nonce, pending.nonce, reply[1])
    if not hmac.compare_digest(reply[2].encode(), expected.encode()):
        raise AgentNotFound
    return int(reply[1]), early


async def read_boot_line(
    link: Link, early: bytes, noise: Callable[[bytes], None] = lambda noise: None,
    replies: dict[str, int] = RECONNECTION_REPLIES,
) -> tuple[list[str], bytes]:  # fmt: skip
    """Reads the next reply of the remote command; returns its words and the bytes after it.

    Args:
        link, early: The link to it, and bytes that were read before.
        noise: Called with the output before the reply.
        replies: Allowed first words, with the number of words after each.

    Raises:
        EOFError: The link ended.
        InvalidValue: It is none of these replies.
    """
    buffer = bytearray(early)
    while (at := buffer.find(MARK)) < 0 or (end := buffer.find(b"\n", at)) < 0:
        data = await link.reader.read(1 << 16)
        if not data:
            noise(bytes(buffer))
            raise EOFError
        buffer += data
        if len(buffer) > MAX_BANNER_BYTES:
            raise InvalidValue(f"more than {MAX_BANNER_BYTES >> 20} MiB before the agent's words")
    noise(bytes(buffer[:at]))
    return parse_boot_line(bytes(buffer[at + len(MARK) : end]), replies), bytes(buffer[end + 1 :])
