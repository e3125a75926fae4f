"""One conversation with one agent: requests with answers, and a queue of events.

It outlives the link that it began with: when that breaks, or is silent, another one to the same
agent is looked for (``reconnection.py``), on which both sides go on where they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sys
from collections.abc import Callable
from typing import Any

from paceline.agent.caller import ENDED
from paceline.agent.frames import (
    MAX_ANSWER,
    MAX_ANSWER_BLOB,
    MAX_HELLO,
    SAY_HEARD,
    Decoder,
    FrameError,
    Unheard,
    encode,
)
from paceline.agent.lanes import AT_ONCE, Joiner, Lanes, Waiting, lane_of
from paceline.agent.pace import Pace
from paceline.remote import protocol, reconnection, this_machine, warm
from paceline.remote.agent_code import agent_code
from paceline.remote.link import Link, ProcessLink, ended
from paceline.remote.openssh import (
    ANOTHER_COMMAND,
    NO_ANSWER,
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
END_OF_INPUT_S = 3.0  # for a shell that reads all of its input first, such as fish
REST_S = 5.0  # for an agent to be done with a job
MEET_S = 5.0  # for one that waits to be there
STALL_S = 5.0  # for the rest of a greeting that has begun
BEAT_S = 5.0  # between two looks at a host that no lease watches
SILENCE_S = 60.0  # after which such a host is given up
TRIES = 4
LOGINS_AT_ONCE = 16
FAREWELL_S = 2.0  # to say goodbye on another link, when the one it was said on broke


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
        nest: Where the agent can be left for the next command; ``None`` where it cannot.
        rests: It waits there.

    Args:
        link: What it begins with.
        dial: How another link to the host is had; ``None`` where there can be none.
    """

    def __init__(self, host: Host, link: Link, dial: reconnection.Dial | None = None) -> None:
        self.host = host
        self.facts: Message = {}
        self.identity = ""
        self.chosen_python = ""
        self.fingerprint: str | None = None
        self.lost = asyncio.Event()
        self.last_heard = 0.0
        self.on_event: Callable[[Event], None] = lambda event: None
        self.nest: warm.Nest | None = None
        self.rests = False
        self._link = link
        self._linked = True  # what is said goes out at once
        self._broken_at: float | None = None
        self._dial = dial
        self._place: reconnection.Place | None = None  # where the agent can be met again
        self._left = False  # it said that it leaves, or was told to
        self._bye: int | None = None  # number of our goodbye, until that is answered
        self._looking: asyncio.Task[None] | None = None  # for another link
        self._staying: asyncio.Task[None] | None = None
        self._unheard = Unheard()
        self._lanes = Lanes()  # what waits for room on the line
        self._pace = Pace()
        self._joiner = Joiner(MAX_HELLO)
        self._heard = 0  # frames
        self._untold = 0  # bytes heard since we said anything
        self.trouble = ""
        self._decoder = _decoder(max_json=MAX_HELLO)
        self._conversation = protocol.Conversation()
        self._early = b""  # came with the first line
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[Message, bytes]]] = {}
        self._stderr = bytearray()
        self._stderr_before = 0  # bytes of it that came by earlier links
        self._tasks: list[asyncio.Task[None]] = []
        self._watching: asyncio.Task[None] | None = None
        self._silent_s = 0.0
        self._hello: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # nobody may be waiting for it when the connection ends: that is no error of its own
        self._hello.add_done_callback(lambda hello: hello.cancelled() or hello.exception())

    # --- opening -----------------------------------------------------------------------------

    async def open(self, met: bytes | None = None) -> None:
        """Becomes a connection to a running agent. LoginRefused when it does not.

        Args:
            met: It has been met already, and this came after its first words.
        """
        self._tasks.append(asyncio.create_task(self._read_stderr()))
        try:
            if met is None:
                await asyncio.wait_for(self._boot(), HELLO_TIMEOUT_S)
            else:
                self._early = met
            self.listen()
            if self._dial is not None:  # said before the hello: no break is too early for it
                self._staying = asyncio.create_task(self._stay())
            await asyncio.wait_for(self._greeting(), HELLO_TIMEOUT_S)
            if self._staying is not None:
                await asyncio.wait_for(self._staying, HELLO_TIMEOUT_S)
        except Untrue as lie:
            self.trouble = self.trouble or str(lie)
            await self.close()
            raise LoginRefused(self.host, self._not_our_agent()) from None
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            timed_out = isinstance(error, asyncio.TimeoutError)
            await self.close(END_OF_INPUT_S if timed_out else 0.0)
            raise LoginRefused(self.host, self._refusal(timed_out)) from None
        if newly_pinned(self.stderr):
            self.fingerprint = pinned_key(self.stderr)
        self._watching = asyncio.create_task(self._watch())

    async def _stay(self) -> None:
        """Has the agent wait for us after a break, from now on.

        ConnectionError when the connection ends before the answer.
        """
        key = reconnection.fresh_key()
        with contextlib.suppress(NodeError):  # it cannot: then a break is the end
            answer = await self.request("stay", key=key.hex())
            self._place = reconnection.Place(str(answer["place"]), key)

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
        words, self._early = await reconnection.read_words(
            self._link, b"", self._decoder.take_noise, protocol.BOOT_WORDS
        )
        if words[0] == "need":
            await self._write(b"%010d" % len(code.archive) + code.archive)
        elif words[0] == "old":
            self._stderr += f"\npaceline-boot: no Python: {words[2]} is {words[1]}".encode()
            raise EOFError
        elif words[0] == "system":
            self._stderr += f"\npaceline-boot: not Linux: this is {words[1]}".encode()
            raise EOFError

    def _not_our_agent(self) -> Refusal:
        return Refusal(
            "not our agent",
            f"it sent {self.trouble}",
            f"Look at the shell start-up files of that user on {self.host.name}, and at the "
            f"Python there: ssh {self.host.address}",
        )

    def _refusal(self, timed_out: bool) -> Refusal:
        refusal = classify(self.stderr, self._link.status, self.host, self.noise)
        if timed_out and refusal.cause in (NO_ANSWER, ANOTHER_COMMAND):
            words = f"\n{refusal.found}" if self.stderr.strip() else ""
            return Refusal(
                "no answer",
                f"connected, but no agent answered within {HELLO_TIMEOUT_S:.0f} s{words}",
                f"Look at the shell start-up files of that user on {self.host.name}: "
                "one of them may wait for input, or for a lock",
            )
        return refusal

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
        waiting = self._put({"op": op, "id": number, **fields}, blob)
        try:
            if self._linked:
                with contextlib.suppress(OSError):
                    await self._link.writer.drain()
            message, data = await answer
        except asyncio.CancelledError:
            if waiting is not None and self._lanes.withdraw(waiting):
                del self._waiting[number]  # the agent never hears of it
            raise
        if "error" in message:
            raise AgentRefusal(self.host, op, message)
        return message, data

    def _put(self, message: Message, blob: bytes = b"") -> Waiting | None:
        """One frame, now or on the next link; what is long waits for room in its lane.

        Callers wait for answers, so these are few.
        """
        frame = encode({**message, "heard": self._heard}, blob)
        lane = lane_of(message, len(frame), blob)
        if lane == AT_ONCE:
            self._send(frame)
            return None
        waiting = self._lanes.add(lane, frame)
        self._fill()
        return waiting

    def _fill(self) -> None:
        """Sends what there is room for on the line."""
        while self._linked and self._lanes and self._pace.room:
            frame, about, data = self._lanes.next(self._pace)
            self._send(frame or encode({**about, "heard": self._heard}, data))

    def _send(self, frame: bytes) -> None:
        self._untold = 0
        self._unheard.add(frame)
        self._pace.sent(len(frame), asyncio.get_running_loop().time(), bool(self._lanes))
        if self._linked:
            with contextlib.suppress(OSError):
                self._link.writer.write(frame)

    async def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self._link.writer.write(data)
            await self._link.writer.drain()

    async def _read_frames(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            data, self._early = self._early, b""
            while data or (data := await self._link.reader.read(1 << 18)):
                self.last_heard = loop.time()
                self._stop_looking()  # it was only silent
                self._untold += len(data)
                for message, blob in self._decoder.feed(data):
                    self._hear(message, blob)
                if self._untold > SAY_HEARD:
                    self._put({})  # with what every frame tells
                data = b""
        except OSError:
            pass
        except (Untrue, FrameError) as lie:
            self.trouble = str(lie)
            self._dismiss()  # one that only erred leaves at once, not when its lease runs out
            self._link.writer.close()
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._end()
            raise
        if not self.lost.is_set():
            await self._link_ended()

    async def _link_ended(self) -> None:
        """Another one is looked for, unless there is nobody that it could lead to."""
        self._linked, self._broken_at = False, asyncio.get_running_loop().time()
        if not self.trouble:
            await self._last_words()
        gone = ENDED in self._stderr[self._stderr_before :]
        if self._place is None or self._left or self.trouble or gone or await self._link.over():
            self._end()
        else:
            self.look_again()

    # --- another link ------------------------------------------------------------------------

    @property
    def broken(self) -> bool:
        """True while its link has ended and another one is looked for."""
        return self._broken_at is not None and not self.lost.is_set()

    def look_again(self) -> None:
        """Looks for another link to the agent: the one there is has broken, or is silent.

        As soon as a silent one speaks it is kept after all. Nothing where no other can be had.
        """
        if self._dial is None or self._place is None or self.lost.is_set():
            return
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._meet_again(self._dial, self._place))

    def _stop_looking(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def _meet_again(self, dial: reconnection.Dial, place: reconnection.Place) -> None:
        try:
            while True:
                found = await reconnection.look(dial, place)
                try:
                    await self._drop_link()  # what it still holds will be said again
                    count, self._early = await reconnection.prove(found, place, self._heard)
                    self._unheard.heard(count)
                except (OSError, EOFError, ValueError, Untrue):
                    await found.link.cut()
                except BaseException:
                    await found.link.cut()
                    raise
                else:
                    break
        except reconnection.Gone:
            self._end()
            return
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._end()
            raise
        self._looking = None
        self._go_on(found.link)

    async def _drop_link(self) -> None:
        self._linked = False
        self._broken_at = self._broken_at or self.last_heard  # a silent one: since then
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._link.cut()

    def _go_on(self, link: Link) -> None:
        """On another link, with the first of our frames that the agent has not heard."""
        self._link, self._linked = link, True
        now = asyncio.get_running_loop().time()
        about = {"seconds": round(now - (self._broken_at or self.last_heard), 3)}
        self.last_heard, self._broken_at = now, None
        self._decoder = _decoder(bytes(self._decoder.noise))
        self._stderr_before = len(self._stderr)
        self._pace = Pace()  # it is another line
        for frame in self._unheard:
            link.writer.write(frame)
            self._pace.sent(len(frame), now, bool(self._lanes))
        self._fill()
        self._tasks = [asyncio.create_task(self._read_stderr())]
        self.listen()
        self.on_event(Event("connection restored", self.host.name, fields=about))

    async def _last_words(self) -> None:
        """What ended the connection may say why on standard error, a moment later."""
        await asyncio.wait(self._tasks[:1], timeout=LAST_WORDS_S)

    def _hear(self, message: Message, blob: bytes) -> None:
        """A frame, or a piece of one."""
        try:
            if fresh := self._unheard.heard(message.pop("heard", 0)):
                self._pace.heard(fresh, self.last_heard)
                self._fill()
            self._heard += 1
            if "part" not in message:
                self._take(message, blob)
                return
            self._untold += SAY_HEARD  # the next piece waits until this one was heard
            for frame in self._joiner.add(message, blob):
                for inner in _decoder().feed(frame):
                    self._take(*inner)
        except ValueError as lie:
            raise Untrue(str(lie)) from None

    def _take(self, message: Message, blob: bytes) -> None:
        message.pop("heard", 0)  # of when it began to wait
        if not message:
            return
        if "re" in message:
            if message["re"] == self._bye:
                self._bye = None
            waiting = self._waiting.pop(self._conversation.answer(message, blob), None)
            if waiting is not None and not waiting.done():
                waiting.set_result((message, blob))
        elif not self._conversation.event(message, blob):
            return
        elif message["event"] == "hello":
            self.facts, self.identity = message["facts"], message["identity"]
            self.chosen_python = message["chosen_python"]
            self._decoder.allow(MAX_ANSWER)
            self._joiner = Joiner(MAX_ANSWER + MAX_ANSWER_BLOB)
            if not self._hello.done():
                self._hello.set_result(None)
        else:
            if message["event"] == "leaving":
                self._left, self._bye = True, None
            self.on_event(Event.heard(self.host.name, message, blob))

    def abandon(self) -> None:
        """Gives up a host that is silent: whoever waits for an answer gets ConnectionError."""
        if not self.lost.is_set():
            with contextlib.suppress(AttributeError):  # asyncio's, of a pipe that has closed by now
                self._link.writer.transport.abort()  # a full pipe to a frozen host never drains
            self._end()

    def _end(self) -> None:
        if self.lost.is_set():
            return
        self.lost.set()
        self._linked = False
        if self._looking is not None and self._looking is not asyncio.current_task():
            self._looking.cancel()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._why_lost())
        self._waiting.clear()
        if not self._hello.done():
            self._hello.set_exception(Untrue(self.trouble) if self.trouble else EOFError())
        words = self._stderr[self._stderr_before :].decode(errors="replace")
        about = {"stderr": words[-2000:], "trouble": self.trouble}
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
                too_many = max(0, len(self._stderr) - STDERR_KEPT)
                del self._stderr[:too_many]
                self._stderr_before = max(0, self._stderr_before - too_many)

    @property
    def stderr(self) -> str:
        """What ssh and the agent wrote on standard error (the last of it)."""
        return self._stderr.decode(errors="replace")

    @property
    def noise(self) -> str:
        return self._decoder.noise.decode(errors="replace")

    async def rest(self, seconds: float, imported: str = "", anew: bool = True) -> bool:
        """Has the agent wait for the next command instead of leaving; closes the connection.

        Args:
            seconds: How long it is to wait, at least: after each use it is as long.
            imported: What its fork server has, for people.
            anew: This was such a use.

        Returns:
            False where it cannot be: the connection is to be closed as ever.
        """
        nest = self.nest
        if nest is None or self.lost.is_set() or not self._linked:
            return False
        seconds = max(seconds, nest.waiting.seconds if nest.waiting is not None else 0.0)
        boot = str(self.facts.get("boot_id") or "")
        waiting = nest.leave(seconds, boot, imported, anew) if seconds else None
        if waiting is None:
            nest.forget()
            return False
        left = waiting.until - waiting.since
        try:
            asked = self.request("rest", place=waiting.place, key=waiting.key, seconds=left)
            await asyncio.wait_for(asked, REST_S)
            await asyncio.wait_for(self.lost.wait(), REST_S)  # it has cleaned up
        except (NodeError, ConnectionError, asyncio.TimeoutError):
            nest.forget()
            return False
        self.rests = True
        await asyncio.gather(self.close(), nest.keep_login(left))
        nest.let_go()
        return True

    async def close(self, patience_s: float = 0.0) -> None:
        """Ends the connection; the agent ends what is left of the job there.

        Args:
            patience_s: How long the agent may take to end by itself.
        """
        self.leased()
        self._dismiss()
        looking = [task for task in (self._looking, self._staying) if task is not None]
        for task in looking:
            task.cancel()
        await asyncio.gather(*looking, return_exceptions=True)
        if self.rests:
            await self._link.release()
        else:
            if self.nest is not None:
                self.nest.forget()
            closing = asyncio.get_running_loop().time()
            await self._link.end(patience_s)
            took_s = asyncio.get_running_loop().time() - closing
        for task in self._tasks if not self.rests else ():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(task), 0.5)
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._bye is not None and not self.rests and took_s < patience_s:
            await self._say_goodbye_again(min(FAREWELL_S, patience_s))
        if not self.lost.is_set():
            self._end()

    def _dismiss(self) -> None:
        """The end of the link is no break from now on; an agent that was not told so would wait."""
        self._lanes.clear()  # it does not need the rest of a file
        if not self._left and not self.lost.is_set() and self._hello.done():
            self._bye = next(self._ids)
            self._conversation.ask(self._bye, "bye", {})
            self._put({"op": "bye", "id": self._bye})
        self._left = True

    async def _say_goodbye_again(self, seconds: float) -> None:
        """The link broke before the goodbye was answered: said by another one, or by the lease."""
        if self._dial is None or self._place is None or self.trouble:
            return
        with contextlib.suppress(reconnection.Gone, OSError, EOFError, ValueError, FrameError,
                                 Untrue, asyncio.TimeoutError):  # fmt: skip
            await asyncio.wait_for(self._meet_for_goodbye(self._dial, self._place), seconds)

    async def _meet_for_goodbye(self, dial: reconnection.Dial, place: reconnection.Place) -> None:
        found = await reconnection.look(dial, place)
        try:
            count, data = await reconnection.prove(found, place, self._heard)
            self._unheard.heard(count)
            for frame in self._unheard:
                found.link.writer.write(frame)
            await found.link.writer.drain()
            said, answered = _decoder(), False
            while not answered and (data := data or await found.link.reader.read(1 << 16)):
                answered = any(about.get("re") == self._bye for about, _ in said.feed(data))
                data = b""
        finally:
            await found.link.cut()


def _decoder(noise: bytes = b"", max_json: int = MAX_ANSWER) -> Decoder:
    """For what an agent says; begins with what an earlier link held beside it."""
    decoder = Decoder(max_json=max_json, max_blob=MAX_ANSWER_BLOB)
    decoder.take_noise(noise)
    return decoder


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


def command_for(host: Host, python: str, options: SshOptions, wrap: Wrap = unwrapped,
                control: str | None = None) -> list[str]:  # fmt: skip
    """The process that leads to the agent of ``host``, by a kept connection where there is one."""
    agent = wrap(host, agent_command(python))
    return agent if host.local else ssh_command(host, options, agent, control)


async def connect(host: Host, python: str, options: SshOptions, wrap: Wrap = unwrapped,
                  lasts: bool = False) -> Channel:  # fmt: skip
    """Opens one connection; retries what may pass. LoginRefused when it cannot be had.

    Args:
        host: Whom to connect to.
        python: Interpreter for the agent there.
        options: How to log in.
        wrap: Puts the agent's command into another, such as a container engine's.
        lasts: An agent that waits there since an earlier command will do, and this one may wait
            for the next.
    """
    if host.local and wrap is unwrapped and not this_machine.LINUX:
        words = f"paceline-boot: not Linux: this is {sys.platform}"
        raise LoginRefused(host, classify(words, 1, host))

    async def dial(is_agent: bool = False) -> Link:
        return await _start(command_for(host, python, options, wrap), is_agent)

    lasting = host.local or wrap is not unwrapped  # a pipe never breaks; a container is another
    redial = None if lasting else dial
    nest = warm.Nest(host, python, options) if lasts and wrap is unwrapped else None
    if nest is not None and (channel := await meet(host, python, options, nest)) is not None:
        return channel
    for attempt in itertools.count(1):
        channel = Channel(host, await dial(is_agent=host.local), redial)
        channel.nest = nest
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


async def _start(command: list[str], is_agent: bool = False) -> Link:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the launcher, which ends the job in order
        limit=1 << 20,
    )
    return ProcessLink(process, is_agent)


async def meet(host: Host, python: str, options: SshOptions, nest: warm.Nest) -> Channel | None:
    """The connection to an agent that waits for this command; ``None``, silently, without one.

    Args:
        host, python, options: As for :func:`connect`.
        nest: Where it may wait.
    """
    waiting = nest.take()
    if waiting is None:
        return None

    async def kept() -> Link:
        return await _start(command_for(host, python, options, control=warm.control_path()))

    async def again() -> Link:
        return await _start(command_for(host, python, options))

    async def met() -> tuple[reconnection.Found, bytes]:
        found = await reconnection.find(kept, waiting.where())
        try:
            return found, (await reconnection.prove(found, waiting.where(), 0))[1]
        except BaseException:
            await found.link.cut()
            raise

    try:
        found, early = await asyncio.wait_for(met(), MEET_S)
        channel = Channel(host, found.link, None if host.local else again)
        channel.nest = nest
        await channel.open(early)
    except (reconnection.Gone, OSError, EOFError, Untrue, asyncio.TimeoutError, LoginRefused):
        nest.forget()
        return None
    except BaseException:
        nest.let_go()
        raise
    return channel


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
            await ended(process)
    return pinned_key(words.decode(errors="replace"))
