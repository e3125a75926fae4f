"""Another way to an agent whose connection broke: the launcher's part of it."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from paceline.agent.reconnection import MARK, MOST_DIGITS, NONCE_BYTES, mac
from paceline.remote.agent_code import reconnect_source
from paceline.remote.link import Link
from paceline.remote.protocol import MAX_BANNER_BYTES, RECONNECTION_WORDS, parse_boot_line
from paceline.spec.schema import InvalidValue

Dial = Callable[[], Awaitable[Link]]  # starts the remote command on the host once more

MAX_PARALLEL_ATTEMPTS = (
    4  # a try may wait for packets that were lost, and the next one find its way
)
ATTEMPT_INTERVAL_S = (
    0.4  # between two of them: a link that was pulled for two seconds is met in time
)
PAUSE_S = 0.2  # after a try that was refused
PROOF_S = 5.0
KEY_BYTES = 32


class AgentGone(Exception):
    """The host was reached, and no agent waits there for us."""


@dataclass(frozen=True, slots=True)
class AgentAddress:
    """Where an agent is met.

    Attributes:
        name: As the agent told it.
        key: What only it and we know.
        anew: It waits for the next command, which begins another conversation.
    """

    name: str
    key: bytes = field(repr=False)
    anew: bool = False


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


@dataclass(frozen=True, slots=True)
class PendingLink:
    """A link to an agent that waits for our proof.

    Attributes:
        link: The new one.
        nonce: What our proof must hold.
        early: Came after the agent's first words.
    """

    link: Link
    nonce: str
    early: bytes


async def reconnect(dial: Dial, place: AgentAddress) -> PendingLink:
    """Tries until the agent is there. Gone when it is not and never will be; cancel it any time."""
    loop = asyncio.get_running_loop()
    tries: set[asyncio.Task[PendingLink]] = set()
    try:
        while True:
            begun = loop.time()
            if len(tries) < MAX_PARALLEL_ATTEMPTS:
                tries.add(asyncio.create_task(connect_once(dial, place)))
            done, _ = await asyncio.wait(
                tries, timeout=ATTEMPT_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED
            )
            for one in done:
                error = one.exception()
                if error is None:
                    await _cancel(tries - {one})  # whoever cancels us here gives this one up, too
                    tries.clear()
                    return one.result()
                if not isinstance(error, (OSError, EOFError, InvalidValue)):
                    raise error
            tries -= done
            await asyncio.sleep(max(0.0, PAUSE_S - (loop.time() - begun)))
    finally:
        await _cancel(tries)


async def _cancel(tries: set[asyncio.Task[PendingLink]]) -> None:
    for one in tries:
        one.cancel()
    for outcome in await asyncio.gather(*tries, return_exceptions=True):
        if isinstance(outcome, PendingLink):
            await outcome.link.cut()


async def connect_once(dial: Dial, place: AgentAddress) -> PendingLink:
    """Connects once. Gone without an agent; OSError, EOFError or InvalidValue if it failed."""
    link = await dial()
    try:
        link.writer.write(reconnect_source(place.name, place.anew))
        await link.writer.drain()
        words, early = await read_boot_line(link, b"", _ignore)
        if words[0] == "gone":
            raise AgentGone
        if words[0] != "meet":
            raise InvalidValue(f"the word {words[0]} before a reconnection")
    except BaseException:
        await link.cut()
        raise
    return PendingLink(link, words[1], early)


async def authenticate(found: PendingLink, place: AgentAddress, heard: int) -> tuple[int, bytes]:
    """Proves who we are and hears the same; how much the agent has heard, and what came after.

    Args:
        found: The agent.
        place: Where it was found.
        heard: How many of its frames we have heard.

    Raises:
        Gone: It is not ours, or does not take us for its launcher.
        OSError, EOFError, InvalidValue: The link broke, or something else is at its end.
    """
    other, count = secrets.token_hex(NONCE_BYTES), str(heard)
    proof = mac(place.key, "launcher", found.nonce, other, count)
    found.link.writer.write(f"{other} {count} {proof}\n".encode())
    with contextlib.suppress(OSError):
        await found.link.writer.drain()
    try:
        reading = read_boot_line(found.link, found.early, _ignore)
        words, early = await asyncio.wait_for(reading, PROOF_S)
    except asyncio.TimeoutError:
        raise EOFError from None
    if words[0] == "stranger":
        raise AgentGone
    if words[0] != "again" or not words[1].isdigit() or len(words[1]) > MOST_DIGITS:
        raise InvalidValue("no answer to our proof")
    expected = mac(place.key, "agent", other, found.nonce, words[1])
    if not hmac.compare_digest(words[2].encode(), expected.encode()):
        raise AgentGone
    return int(words[1]), early


async def read_boot_line(link: Link, early: bytes, noise: Callable[[bytes], None],
                     known: dict[str, int] = RECONNECTION_WORDS,
                     ) -> tuple[list[str], bytes]:  # fmt: skip
    """The next words of what the remote command has become, and what came after them.

    Args:
        link: To it.
        early: Was read before.
        noise: Told what stood before the words.
        known: Words, and how many follow each.

    Raises:
        EOFError: The link ended.
        InvalidValue: No command of ours says that.
    """
    heard = bytearray(early)
    while (at := heard.find(MARK)) < 0 or (end := heard.find(b"\n", at)) < 0:
        data = await link.reader.read(1 << 16)
        if not data:
            noise(bytes(heard))
            raise EOFError
        heard += data
        if len(heard) > MAX_BANNER_BYTES:
            raise InvalidValue(f"more than {MAX_BANNER_BYTES >> 20} MiB before the agent's words")
    noise(bytes(heard[:at]))
    return parse_boot_line(bytes(heard[at + len(MARK) : end]), known), bytes(heard[end + 1 :])


def _ignore(noise: bytes) -> None:
    """A login banner was seen at the first login."""
