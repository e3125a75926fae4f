"""One connection to one agent: requests with answers, and a queue of events."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sys
from collections.abc import Callable
from typing import Any

from paceline.agent.frames import MAX_ANSWER, MAX_ANSWER_BLOB, Decoder, FrameError, encode
from paceline.remote import protocol, this_machine
from paceline.remote.agent_code import agent_code
from paceline.remote.link import Link, ProcessLink
from paceline.remote.openssh import (
    Refusal,
    SshOptions,
    agent_command,
    classify,
    newly_pinned,
    pinned_key,
    ssh_command,
)
from paceline.spec.errors import NodeError
from paceline.spec.events import Event
from paceline.spec.hosts import Host
from paceline.spec.shapes import Untrue

Message = dict[str, Any]
STDERR_KEPT = 64 * 1024
LAST_WORDS_S = 0.5
HELLO_TIMEOUT_S = 30.0
STALL_S = 5.0  # for the rest of a greeting that has begun
BEAT_S = 5.0  # between two looks at a host that no lease watches
SILENCE_S = 60.0  # after which such a host is given up
TRIES = 4
LOGINS_AT_ONCE = 16


class LoginRefused(Exception):
    """A login failed; sorted and reported together with the others by the caller."""

    def __init__(self, host: Host, refusal: Refusal) -> None:
        super().__init__(f"{host.name}: {refusal.cause}")
        self.host = host
        self.refusal = refusal


class Channel:
    """The connection to one host's agent.

    Attributes:
        host: Whom it leads to.
        facts: What the agent said of its machine.
        identity: The agent's random identity, hexadecimal.
        noise: What stood outside frames (login banners), decoded.
        fingerprint: The host key that this login pinned for the first time, if it did.
        lost: Set when the connection has ended.
        trouble: What the host sent that no agent sends, if it did: its connection ends with it.
    """

    def __init__(self, host: Host, link: Link) -> None:
        self.host = host
        self.facts: Message = {}
        self.identity = ""
        self.chosen_python = ""
        self.fingerprint: str | None = None
        self.lost = asyncio.Event()
        self.last_heard = 0.0
        self.on_event: Callable[[Event], None] = lambda event: None
        self._link = link
        self.trouble = ""
        self._decoder = Decoder(max_json=MAX_ANSWER, max_blob=MAX_ANSWER_BLOB)
        self._conversation = protocol.Conversation()
        self._early = b""  # came with the first line
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[Message, bytes]]] = {}
        self._stderr = bytearray()
        self._tasks: list[asyncio.Task[None]] = []
        self._watching: asyncio.Task[None] | None = None
        self._silent_s = 0.0
        self._hello: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # nobody may be waiting for it when the connection ends: that is no error of its own
        self._hello.add_done_callback(lambda hello: hello.cancelled() or hello.exception())

    # --- opening -----------------------------------------------------------------------------

    async def open(self) -> None:
        """Becomes a connection to a running agent. LoginRefused when it does not."""
        self._tasks.append(asyncio.create_task(self._read_stderr()))
        try:
            await asyncio.wait_for(self._boot(), HELLO_TIMEOUT_S)
            self.listen()
            await asyncio.wait_for(self._greeting(), HELLO_TIMEOUT_S)
        except Untrue as lie:
            self.trouble = self.trouble or str(lie)
            await self.close()
            raise LoginRefused(self.host, self._not_our_agent()) from None
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            timed_out = isinstance(error, asyncio.TimeoutError)
            await self.close()
            raise LoginRefused(self.host, self._refusal(timed_out)) from None
        if newly_pinned(self.stderr):
            self.fingerprint = pinned_key(self.stderr)
        self._watching = asyncio.create_task(self._watch())

    def listen(self) -> None:
        """Takes what the agent says from now on."""
        self._tasks.append(asyncio.create_task(self._read_frames()))

    async def _watch(self) -> None:
        """Gives the host up once nothing at all has come for long, though it was asked the time.

        Looks are counted, not clocks compared: a time in which we did not run is no silence.
        """
        heard, asked = self.last_heard, None
        while not self.lost.is_set():
            await asyncio.sleep(BEAT_S)
            self._silent_s = 0.0 if self.last_heard != heard else self._silent_s + BEAT_S
            heard = self.last_heard
            if self._silent_s >= SILENCE_S:
                self.abandon()
            elif self._waiting and (asked is None or asked.done()):
                asked = asyncio.create_task(self.request("clock"))
                # whoever waits for an answer of use hears of the end: nobody waits for this one
                asked.add_done_callback(lambda task: task.cancelled() or task.exception())

    def leased(self) -> None:
        """From now on somebody else notices the host's silence."""
        if self._watching is not None:
            self._watching.cancel()

    async def _greeting(self) -> None:
        """Waits for it; once begun it has to come at once."""
        loop = asyncio.get_running_loop()
        while not self._hello.done():
            await asyncio.wait([self._hello], timeout=STALL_S / 10)
            if self._decoder.halfway and loop.time() - self.last_heard > STALL_S:
                raise Untrue(f"the beginning of a message, and then nothing for {STALL_S:.0f} s")
        self._hello.result()

    async def _boot(self) -> None:
        code = agent_code()
        await self._write(code.first_line)
        words = await self._boot_words()
        if words[0] == "need":
            await self._write(b"%010d" % len(code.archive) + code.archive)
        elif words[0] == "old":
            self._stderr += f"\npaceline-boot: no Python: {words[2]} is {words[1]}".encode()
            raise EOFError
        elif words[0] == "system":
            self._stderr += f"\npaceline-boot: not Linux: this is {words[1]}".encode()
            raise EOFError
        elif words[0] == "disk":
            self._stderr += b"\npaceline-boot: " + " ".join(words).encode()
            raise EOFError

    async def _boot_words(self) -> list[str]:
        heard = bytearray()
        while (at := heard.find(protocol.BOOT)) < 0 or (end := heard.find(b"\n", at)) < 0:
            data = await self._link.reader.read(1 << 16)
            if not data:
                self._decoder.take_noise(bytes(heard))
                raise EOFError
            heard += data
            if len(heard) > protocol.MOST_BANNER:
                raise Untrue(f"more than {protocol.MOST_BANNER >> 20} MiB before the agent's words")
        self._decoder.take_noise(bytes(heard[:at]))
        self._early = bytes(heard[end + 1 :])
        return protocol.boot_words(bytes(heard[at + len(protocol.BOOT) : end]))

    def _not_our_agent(self) -> Refusal:
        return Refusal(
            "not our agent",
            f"it sent {self.trouble}",
            f"Look at the shell start-up files of that user on {self.host.name}, and at the "
            f"Python there: ssh {self.host.address}",
        )

    def _refusal(self, timed_out: bool) -> Refusal:
        if timed_out and not self.stderr.strip():
            return Refusal(
                "no answer",
                f"connected, but no agent answered within {HELLO_TIMEOUT_S:.0f} s",
                f"Look at the shell start-up files of that user on {self.host.name}: "
                "one of them may wait for input",
            )
        return classify(self.stderr, self._link.status, self.host)

    # --- talking -----------------------------------------------------------------------------

    async def request(self, op: str, *, blob: bytes = b"", **fields: Any) -> Message:
        """Asks and waits for the answer; NodeError when the agent says it cannot.

        ConnectionError when the connection ends before the answer.
        """
        message, _ = await self.ask(op, blob=blob, **fields)
        return message

    async def ask(self, op: str, *, blob: bytes = b"", **fields: Any) -> tuple[Message, bytes]:
        """As :meth:`request`; also the bytes that came with the answer."""
        if self.lost.is_set():
            raise ConnectionError(f"{self.host.name} is gone")
        number = next(self._ids)
        answer = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._conversation.ask(number, op, fields)
        await self._write(encode({"op": op, "id": number, **fields}, blob))
        message, data = await answer
        if "error" in message:
            raise AgentRefusal(self.host, op, message)
        return message, data

    async def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self._link.writer.write(data)
            await self._link.writer.drain()

    async def _read_frames(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            data = self._early
            while data or (data := await self._link.reader.read(1 << 18)):
                self.last_heard = loop.time()
                for message, blob in self._decoder.feed(data):
                    self._take(message, blob)
                data = b""
        except OSError:
            pass
        except (Untrue, FrameError) as lie:
            self.trouble = str(lie)
            self._link.writer.transport.abort()
        finally:
            if not self.lost.is_set():
                if not self.trouble:
                    await self._last_words()
                self._end()

    async def _last_words(self) -> None:
        """What ended the connection may say why on standard error, a moment later."""
        await asyncio.wait(self._tasks[:1], timeout=LAST_WORDS_S)

    def _take(self, message: Message, blob: bytes) -> None:
        if "re" in message:
            waiting = self._waiting.pop(self._conversation.answer(message, blob), None)
            if waiting is not None and not waiting.done():
                waiting.set_result((message, blob))
        elif not self._conversation.event(message, blob):
            return
        elif message["event"] == "hello":
            self.facts, self.identity = message["facts"], message["identity"]
            self.chosen_python = message["chosen_python"]
            if not self._hello.done():
                self._hello.set_result(None)
        else:
            self.on_event(Event.heard(self.host.name, message, blob))

    def abandon(self) -> None:
        """Gives up a host that is silent: whoever waits for an answer gets ConnectionError."""
        if not self.lost.is_set():
            self._link.writer.transport.abort()  # a full pipe to a frozen host never drains
            self._end()

    def _end(self) -> None:
        self.lost.set()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._why_lost())
        self._waiting.clear()
        if not self._hello.done():
            self._hello.set_exception(Untrue(self.trouble) if self.trouble else EOFError())
        about = {"stderr": self.stderr[-2000:], "trouble": self.trouble}
        self.on_event(Event("connection ended", self.host.name, fields=about))

    def _why_lost(self) -> Exception:
        if self.trouble:
            return Untrusted(self.host, self.trouble)
        if self._silent_s >= SILENCE_S:
            return Silent(self.host, self._silent_s)
        return ConnectionError(f"{self.host.name} is gone")

    async def _read_stderr(self) -> None:
        with contextlib.suppress(OSError):
            while data := await self._link.errors.read(1 << 16):
                self._stderr += data
                del self._stderr[:-STDERR_KEPT]

    @property
    def stderr(self) -> str:
        """What ssh and the agent wrote on standard error (the last of it)."""
        return self._stderr.decode(errors="replace")

    @property
    def noise(self) -> str:
        return self._decoder.noise.decode(errors="replace")

    async def close(self, patience_s: float = 0.0) -> None:
        """Ends the connection; the agent ends what is left of the job there.

        Args:
            patience_s: How long the agent may take to end by itself.
        """
        self.leased()
        await self._link.end(patience_s)
        for task in self._tasks:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(task), 0.5)
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self.lost.is_set():
            self._end()


class AgentRefusal(NodeError):
    """An agent could not do what it was asked; ``answer`` is all that it said."""

    def __init__(self, host: Host, op: str, answer: Message) -> None:
        super().__init__(
            f"{host.name} could not do its part ({op.replace('_', ' ')})",
            found=str(answer["error"]),
            remedy=f"Look there: ssh {host.address}",
        )
        self.host = host
        self.answer = answer


class Untrusted(NodeError):
    """A host sent what no agent sends; its connection has ended."""

    def __init__(self, host: Host, trouble: str) -> None:
        super().__init__(
            f"{host.name} sent what no agent of this version sends",
            found=trouble,
            remedy=f"Leave {host.name} out until it is known what answers there: "
            f"ssh {host.address}",
        )


class Silent(NodeError):
    """A host said nothing for long; its connection has ended."""

    def __init__(self, host: Host, seconds: float) -> None:
        super().__init__(
            f"{host.name} fell silent",
            found=f"connected, but nothing came for {seconds:.0f} s",
            remedy=f"Look whether it is frozen or cut off: ssh {host.address}",
        )


Wrap = Callable[[Host, list[str]], list[str]]


def unwrapped(host: Host, agent: list[str]) -> list[str]:
    """The agent runs on the host itself, not in a container there."""
    return agent


def command_for(host: Host, python: str, options: SshOptions, wrap: Wrap = unwrapped) -> list[str]:
    """The process that leads to the agent of ``host``."""
    agent = wrap(host, agent_command(python))
    return agent if host.local else ssh_command(host, options, agent)


async def connect(host: Host, python: str, options: SshOptions, wrap: Wrap = unwrapped) -> Channel:
    """Opens one connection; retries what may pass. LoginRefused when it cannot be had.

    Args:
        host: Whom to connect to.
        python: Interpreter for the agent there.
        options: How to log in.
        wrap: Puts the agent's command into another, such as a container engine's.
    """
    if host.local and wrap is unwrapped and not this_machine.LINUX:
        words = f"paceline-boot: not Linux: this is {sys.platform}"
        raise LoginRefused(host, classify(words, 1, host))
    for attempt in itertools.count(1):
        process = await asyncio.create_subprocess_exec(
            *command_for(host, python, options, wrap),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the launcher, which ends the job in order
            limit=1 << 20,
        )
        channel = Channel(host, ProcessLink(process))
        try:
            await channel.open()
        except LoginRefused as refused:
            if not refused.refusal.passing or attempt == TRIES:
                raise
            await asyncio.sleep(random.uniform(0.2, 0.6) * 2**attempt)  # noqa: S311 - jitter
        except asyncio.CancelledError:
            await channel.close()
            raise
        else:
            return channel
    raise AssertionError("unreachable")


async def show_host_key(host: Host, options: SshOptions) -> str | None:
    """The fingerprint that a host shows, without trusting it; ``None`` when it shows none."""
    argv = ssh_command(host, options, ["true"])
    process = await asyncio.create_subprocess_exec(
        argv[0],
        "-v",
        *argv[1:],
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _, words = await asyncio.wait_for(process.communicate(), 15)
    except asyncio.TimeoutError:
        return None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return pinned_key(words.decode(errors="replace"))
