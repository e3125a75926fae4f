"""The connection to one agent: requests with answers, and events.

It survives its link: ``reconnection.py`` opens another one to the same agent, and both resume.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.agent.caller import AGENT_ENDED, shows_change
from paceline.agent.congestion import CongestionWindow
from paceline.agent.frames import (
    ACK_BYTES,
    MAX_ANSWER,
    MAX_ANSWER_BLOB,
    MAX_EVENT,
    MAX_HELLO,
    FrameError,
    UnackedFrames,
    encode,
)
from paceline.agent.multiplexing import URGENT, QueuedFrame, Reassembler, SendQueues, lane_of
from paceline.remote import protocol, reconnection, warm
from paceline.remote.agent_code import agent_code
from paceline.remote.link import Link
from paceline.remote.openssh import (
    NO_ANSWER,
    SILENT,
    UNEXPECTED_COMMAND,
    Refusal,
    classify,
    server_fingerprint,
    was_key_pinned,
)
from paceline.remote.work_share import WorkShare
from paceline.spec.errors import NodeError
from paceline.spec.events import Event
from paceline.spec.hosts import Host
from paceline.spec.schema import InvalidValue

Message = dict[str, Any]
MAX_STDERR_BYTES = 64 * 1024
STDERR_GRACE_S = 0.5
HELLO_TIMEOUT_S = 30.0
END_OF_INPUT_S = 3.0  # a shell such as fish reads all of its input first
PARK_TIMEOUT_S = 5.0  # for an agent to be done with a job
HELLO_STALL_S = 5.0  # for the rest of a greeting that has begun
POLL_S = 5.0  # between checks of a host without a lease
SILENCE_TIMEOUT_S = 60.0  # after which such a host is abandoned
NOTE_AFTER_S = 15.0  # without an answer, the user is told which host is waited for
ANSWER_TIMEOUT_S = 600.0  # a slow network disk with many files takes minutes
SLOW_OPS = {"hash_data", "have_data", "build_tree", "compare_tree", "execute"}
"""Requests without that limit: they read files of any size, or have a limit of their own."""
GOODBYE_TIMEOUT_S = 2.0  # to repeat the goodbye on another link after a break


class LoginError(Exception):
    """A login failed; the caller reports all refusals together."""

    def __init__(self, host: Host, refusal: Refusal) -> None:
        super().__init__(f"{host.name}: {refusal.cause}")
        self.host = host
        self.refusal = refusal


class Channel:
    """The connection to one host's agent.

    Attributes:
        facts: The agent's facts about its machine.
        identity: The agent's random identity, hexadecimal.
        noise: Output outside frames (login banners), decoded.
        fingerprint: The host key, if this login pinned it for the first time.
        on_late: Called with the name of a request whose answer is late.
        lost: Set when the connection has ended.
        violation: The protocol violation that ended the connection, if any.
        ssh_config: ssh config file of the login; ``None`` for the user's.
        warm_slot: Where the agent can wait for the next command; ``None`` if it cannot.
        is_parked: The agent waits there.

    Args:
        link: The first link.
        dial: Opens another link to the host; ``None`` if that is impossible.
    """

    def __init__(self, host: Host, link: Link, dial: reconnection.Dial | None = None) -> None:
        self.host = host
        self.facts: Message = {}
        self.identity = ""
        self.agent_python = ""
        self.fingerprint: str | None = None
        self.lost = asyncio.Event()
        self.received_at = 0.0
        self.on_event: Callable[[Event], None] = lambda event: None
        self.on_late: Callable[[str], None] = lambda op: None
        self.warm_slot: warm.WarmSlot | None = None
        self.ssh_config: Path | None = None
        self.is_parked = False
        self._link = link
        self._is_linked = True  # frames are written at once
        self._broken_at: float | None = None
        self._dial = dial
        self._address: reconnection.AgentAddress | None = None  # for reconnections
        self._is_dismissed = False  # the agent leaves, or was told to
        self._goodbye_id: int | None = None  # of our goodbye, until it is answered
        self._reconnecting: asyncio.Task[None] | None = None  # for another link
        self._registering: asyncio.Task[None] | None = None
        self._unacked = UnackedFrames()
        self._lanes = SendQueues()  # queued frames
        self._pace = CongestionWindow()
        self._joiner = Reassembler(MAX_HELLO)
        self._work_share = WorkShare()
        self._num_received = 0  # frames
        self._unacked_bytes = 0  # received since the last frame was sent
        self.violation = ""
        self._decoder = protocol.make_decoder(is_greeted=False)
        self._conversation = protocol.Conversation()
        self._buffered = b""  # followed the first line
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[tuple[Message, bytes]]] = {}
        self._stderr = bytearray()
        self._stderr_offset = self._taken_bytes = 0  # from earlier links; by take_stderr
        self._tasks: list[asyncio.Task[None]] = []
        self._watcher: asyncio.Task[None] | None = None
        self._silence_s = 0.0
        self._hello: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # retrieve its exception, which may have no waiter
        self._hello.add_done_callback(lambda hello: hello.cancelled() or hello.exception())

    # --- opening -----------------------------------------------------------------------------

    async def open(self, early_data: bytes | None = None) -> None:
        """Starts the agent and waits for its hello; raises LoginError when that fails.

        Args:
            early_data: Bytes after the handshake with an agent that was already running.
        """
        self._tasks.append(asyncio.create_task(self._read_stderr()))
        try:
            if early_data is None:
                await asyncio.wait_for(self._boot(), HELLO_TIMEOUT_S)
            else:
                self._buffered = early_data
            self.listen()
            if self._dial is not None:  # before the hello, so that no break comes too early
                self._registering = asyncio.create_task(self._register())
            await asyncio.wait_for(self._wait_for_hello(), HELLO_TIMEOUT_S)
            if self._registering is not None:
                await asyncio.wait_for(self._registering, HELLO_TIMEOUT_S)
        except InvalidValue as error:
            self.violation = self.violation or str(error)
            await self.close()
            raise LoginError(self.host, self._violation_refusal()) from None
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            timed_out = isinstance(error, asyncio.TimeoutError)
            await self.close(END_OF_INPUT_S)  # ssh passes the exit status on, which explains much
            raise LoginError(self.host, self._refusal(timed_out)) from None
        if was_key_pinned(self.stderr):
            self.fingerprint = server_fingerprint(self.stderr)
        self._watcher = asyncio.create_task(self._watch())

    async def _register(self) -> None:
        """Asks the agent to accept reconnections; raises ConnectionError if the link ends first."""
        key = reconnection.generate_key()
        with contextlib.suppress(NodeError):  # unsupported: a break then ends the connection
            answer = await self.request("stay", key=key.hex())
            self._address = reconnection.AgentAddress(str(answer["place"]), key)

    def listen(self) -> None:
        """Starts reading frames."""
        self._tasks.append(asyncio.create_task(self._read_frames()))

    async def _watch(self) -> None:
        """Abandons the host after long silence in spite of a ``clock`` request.

        Polls are counted instead of comparing clocks: time in which this process was suspended
        does not count.
        """
        previous, ping = self.received_at, None
        while not self.lost.is_set():
            await asyncio.sleep(POLL_S)
            has_stalled = self.received_at == previous
            self._silence_s = self._silence_s + POLL_S if has_stalled else 0.0
            previous = self.received_at
            if self._silence_s >= SILENCE_TIMEOUT_S:
                self.abandon()
            elif self._pending and (ping is None or ping.done()):
                ping = asyncio.create_task(self.request("clock"))
                # retrieve its exception; other requests report the end
                ping.add_done_callback(lambda task: task.cancelled() or task.exception())

    def stop_watching(self) -> None:
        """Stops the watch for silence, because a lease replaces it."""
        if self._watcher is not None:
            self._watcher.cancel()

    async def _wait_for_hello(self) -> None:
        """Waits for the hello; raises InvalidValue if it stalls halfway."""
        loop = asyncio.get_running_loop()
        while not self._hello.done():
            await asyncio.wait([self._hello], timeout=HELLO_STALL_S / 10)
            if self._decoder.is_mid_frame and loop.time() - self.received_at > HELLO_STALL_S:
                raise InvalidValue(
                    f"the beginning of a message, and then nothing for {HELLO_STALL_S:.0f} s"
                )
        self._hello.result()

    async def _boot(self) -> None:
        code = agent_code()
        await self._write(code.first_line)
        reply, self._buffered = await reconnection.read_boot_line(
            self._link, b"", self._decoder.add_noise, protocol.BOOT_REPLIES
        )
        if reply[0] == "need":
            await self._write(b"%010d" % len(code.archive) + code.archive)
        elif reply[0] in ("old", "system"):
            problem = f"not Linux: this is {reply[1]}"
            if reply[0] == "old":
                problem = f"no Python: {reply[2]} is {reply[1]}"
            self._stderr += f"\npaceline-boot: {problem}".encode()
            raise EOFError

    def _violation_refusal(self) -> Refusal:
        return Refusal(
            "not our agent",
            f"it sent {self.violation}",
            f"Look at the shell start-up files of that user on {self.host.name}, and at the "
            f"Python there: ssh {self.host.address}",
        )

    def _refusal(self, timed_out: bool) -> Refusal:
        if shows_change(self._link.reader.exception()):
            text = f"bytes were changed on the way between this machine and {self.host.name}"
            return Refusal("bytes changed", text, "Find what changes them, or use another network")
        refusal = classify(self.stderr, self._link.status, self.host, self.noise, self.ssh_config)
        if timed_out and refusal.cause in (NO_ANSWER, UNEXPECTED_COMMAND):
            details = f"\n{refusal.details}" if self.stderr.strip() else ""
            if not self.stderr.strip() and not self.noise.strip():
                return Refusal(
                    SILENT,
                    f"nothing came from the host within {HELLO_TIMEOUT_S:.0f} s",
                    f"The connection itself may hang, or a shell start-up file of that user on "
                    f"{self.host.name} waits for input or for a lock. "
                    f"By hand: ssh -v {self.host.address} true",
                )
            return Refusal(
                "no answer",
                f"connected, but no agent answered within {HELLO_TIMEOUT_S:.0f} s{details}",
                f"Look at the shell start-up files of that user on {self.host.name}: "
                "one of them may wait for input, or for a lock",
            )
        return refusal

    # --- requests ----------------------------------------------------------------------------

    async def request(self, op: str, *, blob: bytes = b"", **fields: Any) -> Message:
        """Sends a request and returns the answer.

        Raises:
            NodeError: The agent refuses, or does not answer in ten minutes.
            ConnectionError: The connection ended before the answer.
        """
        message, _ = await self.request_with_blob(op, blob=blob, **fields)
        return message

    async def request_with_blob(
        self, op: str, *, blob: bytes = b"", **fields: Any
    ) -> tuple[Message, bytes]:
        """As :meth:`request`; also returns the bytes that came with the answer."""
        if self.lost.is_set():
            raise ConnectionError(f"{self.host.name} is gone")
        number = next(self._ids)
        answer = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        self._conversation.add_request(number, op, fields)
        waiting = self._enqueue({"op": op, "id": number, **fields}, blob)
        try:
            if self._is_linked:
                with contextlib.suppress(OSError):
                    await self._link.writer.drain()
            message, data = await self._await_answer(op, answer)
        except asyncio.CancelledError:
            answer.cancel()
            if waiting is not None and self._lanes.withdraw(waiting):
                del self._pending[number]  # it was never sent
            raise
        if "error" in message:
            raise AgentRefusal(self.host, op, message)
        return message, data

    async def _await_answer(
        self, op: str, answer: asyncio.Future[tuple[Message, bytes]]
    ) -> tuple[Message, bytes]:
        await asyncio.wait([answer], timeout=NOTE_AFTER_S)
        if not answer.done():
            self.on_late(op)
            limit_s = None if op in SLOW_OPS else ANSWER_TIMEOUT_S - NOTE_AFTER_S
            await asyncio.wait([answer], timeout=limit_s)
        if answer.cancel():  # it did not come
            raise HostSilent(self.host, op)
        return answer.result()

    def _enqueue(self, message: Message, blob: bytes = b"") -> QueuedFrame | None:
        """Sends a frame now, or queues a long one in its lane; may be for the next link."""
        frame = encode({**message, "heard": self._num_received}, blob)
        lane = lane_of(message, len(frame), blob)
        if lane == URGENT:
            self._send(frame)
            return None
        waiting = self._lanes.add(lane, frame)
        self._flush()
        return waiting

    def _flush(self) -> None:
        """Sends queued frames as far as the pace allows."""
        while self._is_linked and self._lanes and self._pace.has_room:
            frame, message, data = self._lanes.next(self._pace)
            self._send(frame or encode({**message, "heard": self._num_received}, data))

    def _send(self, frame: bytes) -> None:
        self._unacked_bytes = 0
        self._unacked.add(frame)
        self._pace.sent(len(frame), asyncio.get_running_loop().time(), bool(self._lanes))
        # asyncio logs each write after the other side has stopped reading
        if self._is_linked and not self._link.writer.transport.is_closing():
            with contextlib.suppress(OSError):
                self._link.writer.write(frame)

    async def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self._link.writer.write(data)
            await self._link.writer.drain()

    async def _read_frames(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            data, self._buffered = self._buffered, b""
            while data or (data := await self._link.reader.read(1 << 18)):
                self.received_at = loop.time()
                self._cancel_reconnect()  # the link only stalled
                self._unacked_bytes += len(data)
                started_at = loop.time()
                for message, blob in self._decoder.feed(data):
                    self._on_frame(message, blob)
                    if pause_s := self._work_share.pause_s(started_at, loop.time()):
                        await asyncio.sleep(pause_s)  # other hosts' leases must not run out
                        self.received_at = loop.time()  # it is not silent: it has to wait
                    started_at = loop.time()
                if self._unacked_bytes > ACK_BYTES:
                    self._enqueue({})  # acknowledges, as every frame does
                data = b""
        except OSError:
            pass
        except (InvalidValue, FrameError) as error:
            self.violation = str(error)
            self._dismiss()  # so that a faulty agent leaves before its lease expires
            self._link.writer.close()
        except Exception:
            self._end()
            raise
        if not self.lost.is_set():
            await self._on_link_end()

    async def _on_link_end(self) -> None:
        """Reconnects, unless the agent has ended or left."""
        self._is_linked, self._broken_at = False, asyncio.get_running_loop().time()
        if not self.violation:
            await asyncio.wait(self._tasks[:1], timeout=STDERR_GRACE_S)  # for the reason
        has_ended = AGENT_ENDED in self._stderr[self._stderr_offset :]
        cannot_resume = self._address is None or self._is_dismissed or self.violation or has_ended
        if cannot_resume or await self._link.has_exited():
            self._end()
        else:
            self.reconnect()

    # --- another link ------------------------------------------------------------------------

    @property
    def is_broken(self) -> bool:
        """Whether its link has ended and it is reconnecting."""
        return self._broken_at is not None and not self.lost.is_set()

    def reconnect(self) -> None:
        """Starts to look for another link, because this one broke or stalled.

        Stops as soon as a stalled link delivers data. Does nothing if no other link is possible.
        """
        if self._dial is None or self._address is None or self.lost.is_set():
            return
        if self._reconnecting is None or self._reconnecting.done():
            self._reconnecting = asyncio.create_task(self._reconnect(self._dial, self._address))

    def _cancel_reconnect(self) -> None:
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            self._reconnecting = None

    async def _reconnect(self, dial: reconnection.Dial, address: reconnection.AgentAddress) -> None:
        try:
            while True:
                pending = await reconnection.reconnect(dial, address)
                try:
                    await self._drop_link()  # frames in transit will be sent again
                    count, self._buffered = await reconnection.authenticate(
                        pending, address, self._num_received
                    )
                    self._unacked.acknowledge(count)
                except (OSError, EOFError, ValueError, InvalidValue):
                    await pending.link.drop()
                except BaseException:
                    await pending.link.drop()
                    raise
                else:
                    break
        except reconnection.AgentNotFound:
            self._end()
            return
        except Exception:
            self._end()
            raise
        self._reconnecting = None
        self._resume(pending.link)

    async def _drop_link(self) -> None:
        self._is_linked = False
        self._broken_at = self._broken_at or self.received_at  # for a stalled link
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._link.drop()

    def _resume(self, link: Link) -> None:
        """Resumes on another link with the first frame that the agent has not received."""
        self._link, self._is_linked = link, True
        resumed_at = asyncio.get_running_loop().time()
        seconds = round(resumed_at - (self._broken_at or self.received_at), 3)
        self.received_at, self._broken_at = resumed_at, None
        self._decoder = protocol.make_decoder(bytes(self._decoder.noise))
        self._stderr_offset = len(self._stderr)
        self._pace = CongestionWindow()
        for frame in self._unacked:
            link.writer.write(frame)
            self._pace.sent(len(frame), resumed_at, bool(self._lanes))
        self._flush()
        self._tasks = [asyncio.create_task(self._read_stderr())]
        self.listen()
        self.on_event(Event("connection restored", self.host.name, fields={"seconds": seconds}))

    def _on_frame(self, message: Message, blob: bytes) -> None:
        """Handles a frame, or a part of one."""
        try:
            if num_acked := self._unacked.acknowledge(message.pop("heard", 0)):
                self._pace.acknowledge(num_acked, self.received_at)
                self._flush()
            self._num_received += 1
            if "part" not in message:
                self._on_message(message, blob)
                return
            self._unacked_bytes += ACK_BYTES  # the next part waits for an acknowledgement
            for frame in self._joiner.add(message, blob):
                decoder = protocol.make_decoder(is_greeted=bool(self.identity))
                inner_frames = decoder.feed(frame)
                if len(inner_frames) != 1:
                    raise InvalidValue(f"{len(inner_frames)} messages in pieces of one")
                self._on_message(*inner_frames[0])
        except ValueError as error:
            raise InvalidValue(str(error)) from None

    def _on_message(self, message: Message, blob: bytes) -> None:
        message.pop("heard", 0)  # outdated: from when it was queued
        if not message:
            return
        if "re" in message:
            if message["re"] == self._goodbye_id:
                self._goodbye_id = None
            waiting = self._pending.pop(self._conversation.answer(message, blob), None)
            if waiting is not None and not waiting.done():
                waiting.set_result((message, blob))
        elif not self._conversation.event(message, blob):
            return
        elif message["event"] == "hello":
            self.facts, self.identity = message["facts"], message["identity"]
            self.agent_python = message["chosen_python"]
            self._decoder.allow(MAX_ANSWER, MAX_EVENT)
            self._joiner = Reassembler(MAX_ANSWER + MAX_ANSWER_BLOB)
            if not self._hello.done():
                self._hello.set_result(None)
        else:
            if message["event"] == "leaving":
                self._is_dismissed, self._goodbye_id = True, None
            self.on_event(Event.from_message(self.host.name, message, blob))

    def abandon(self) -> None:
        """Ends the connection to a silent host; pending requests raise ConnectionError."""
        if not self.lost.is_set():
            transport = self._link.writer.transport
            with contextlib.suppress(AttributeError):  # asyncio's, of a pipe that has closed by now
                # a full pipe to a frozen host never drains; an empty one would close twice
                if transport.get_write_buffer_size() or not transport.is_closing():
                    transport.abort()
            self._end()

    def _end(self) -> None:
        if self.lost.is_set():
            return
        self.lost.set()
        self._is_linked = False
        if self._reconnecting is not None and self._reconnecting is not asyncio.current_task():
            self._reconnecting.cancel()
        for waiting in self._pending.values():
            if not waiting.done():
                waiting.set_exception(self._lost_error())
        self._pending.clear()
        if not self._hello.done():
            error = InvalidValue(self.violation) if self.violation else EOFError()
            self._hello.set_exception(error)
        stderr = self._stderr[self._stderr_offset :].decode(errors="replace")
        fields = {"stderr": stderr[-2000:], "trouble": self.violation}
        self.on_event(Event("connection ended", self.host.name, fields=fields))

    def _lost_error(self) -> Exception:
        if self.violation:
            return ProtocolViolation(self.host, self.violation)
        if self._silence_s >= SILENCE_TIMEOUT_S:
            return HostUnresponsive(self.host, self._silence_s)
        return ConnectionError(f"{self.host.name} is gone")

    async def _read_stderr(self) -> None:
        with contextlib.suppress(OSError):
            while data := await self._link.errors.read(1 << 16):
                self._stderr += data
                excess = max(0, len(self._stderr) - MAX_STDERR_BYTES)
                del self._stderr[:excess]
                self._stderr_offset = max(0, self._stderr_offset - excess)
                self._taken_bytes = max(0, self._taken_bytes - excess)

    @property
    def stderr(self) -> str:
        """The end of the standard error of ssh and the agent."""
        return self._stderr.decode(errors="replace")

    def take_stderr(self) -> str:
        """The end of what ssh and the agent have written since the last call."""
        taken, self._taken_bytes = self._taken_bytes, len(self._stderr)
        return self._stderr[taken:].decode(errors="replace")

    @property
    def noise(self) -> str:
        return self._decoder.noise.decode(errors="replace")

    async def park(self, seconds: float, imported: str = "", restart_timer: bool = True) -> bool:
        """Lets the agent wait for the next command instead of leaving; closes the connection.

        Args:
            seconds: Minimum time to wait, also after each later use.
            imported: The fork server's imports, for people.
            restart_timer: The agent was used, so its time starts again.

        Returns:
            False if it cannot wait: the connection must be closed as usual.
        """
        slot = self.warm_slot
        if slot is None or self.lost.is_set() or not self._is_linked:
            return False
        seconds = max(seconds, slot.waiting.seconds if slot.waiting is not None else 0.0)
        boot = str(self.facts.get("boot_id") or "")
        agent = slot.offer(seconds, boot, imported, restart_timer) if seconds else None
        if agent is None:
            slot.forget()
            return False
        remaining_s = agent.until - agent.since
        try:
            request = self.request("rest", place=agent.place, key=agent.key, seconds=remaining_s)
            await asyncio.wait_for(request, PARK_TIMEOUT_S)
            await asyncio.wait_for(self.lost.wait(), PARK_TIMEOUT_S)  # it has cleaned up
        except (NodeError, ConnectionError, asyncio.TimeoutError):
            slot.forget()
            return False
        self.is_parked = True
        await asyncio.gather(self.close(), slot.keep_login(remaining_s))
        slot.release()
        return True

    async def close(self, timeout_s: float = 0.0) -> None:
        """Ends the connection; the agent ends the job's remaining processes.

        Args:
            timeout_s: How long the agent may take to end by itself.
        """
        self.stop_watching()
        self._dismiss()
        tasks = [task for task in (self._reconnecting, self._registering) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.is_parked:
            await self._link.release()
        else:
            if self.warm_slot is not None:
                self.warm_slot.forget()
            closed_at = asyncio.get_running_loop().time()
            await self._link.end(timeout_s)
            elapsed_s = asyncio.get_running_loop().time() - closed_at
        for task in self._tasks if not self.is_parked else ():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(task), 0.5)
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._goodbye_id is not None and not self.is_parked and elapsed_s < timeout_s:
            await self._resend_goodbye(min(GOODBYE_TIMEOUT_S, timeout_s))
        if not self.lost.is_set():
            self._end()

    def _dismiss(self) -> None:
        """Tells the agent to leave; without that it would wait for a reconnection."""
        self._lanes.clear()  # no more files
        if not self._is_dismissed and not self.lost.is_set() and self._hello.done():
            self._goodbye_id = next(self._ids)
            self._conversation.add_request(self._goodbye_id, "bye", {})
            self._enqueue({"op": "bye", "id": self._goodbye_id})
        self._is_dismissed = True

    async def _resend_goodbye(self, seconds: float) -> None:
        """Sends the goodbye over another link if the first broke before its answer."""
        if self._dial is None or self._address is None or self.violation:
            return
        with contextlib.suppress(reconnection.AgentNotFound, OSError, EOFError, ValueError,
                                 FrameError, InvalidValue, asyncio.TimeoutError):  # fmt: skip
            await asyncio.wait_for(self._deliver_goodbye(self._dial, self._address), seconds)

    async def _deliver_goodbye(
        self, dial: reconnection.Dial, address: reconnection.AgentAddress
    ) -> None:
        pending = await reconnection.reconnect(dial, address)
        try:
            count, data = await reconnection.authenticate(pending, address, self._num_received)
            self._unacked.acknowledge(count)
            for frame in self._unacked:
                pending.link.writer.write(frame)
            await pending.link.writer.drain()
            decoder, is_answered = protocol.make_decoder(), False
            while not is_answered and (data := data or await pending.link.reader.read(1 << 16)):
                messages = decoder.feed(data)
                is_answered = any(m.get("re") == self._goodbye_id for m, _ in messages)
                data = b""
        finally:
            await pending.link.drop()


class AgentRefusal(NodeError):
    """An agent refused a request; ``answer`` is its message."""

    def __init__(self, host: Host, op: str, answer: Message) -> None:
        super().__init__(
            f"{host.name} could not do its part ({op.replace('_', ' ')})",
            found=str(answer["error"]),
            remedy=f"Look there: ssh {host.address}",
        )
        self.host = host
        self.answer = answer


class ProtocolViolation(NodeError):
    """A host violated the protocol; its connection has ended."""

    def __init__(self, host: Host, violation: str) -> None:
        super().__init__(
            f"{host.name} sent what no agent of this version sends",
            found=violation,
            remedy=f"Leave {host.name} out until it is known what answers there: "
            f"ssh {host.address}",
        )


class HostSilent(NodeError):
    """A host is connected but does not answer a request."""

    def __init__(self, host: Host, op: str) -> None:
        super().__init__(
            f"{host.name} has not answered the request {op} for {ANSWER_TIMEOUT_S:.0f} s",
            remedy=f"Look for a slow or hanging disk there: ssh {host.address}",
        )


class HostUnresponsive(NodeError):
    """A host sent nothing for long; its connection has ended."""

    def __init__(self, host: Host, seconds: float) -> None:
        super().__init__(
            f"{host.name} fell silent",
            found=f"connected, but nothing came for {seconds:.0f} s",
            remedy=f"Look whether it is frozen or cut off: ssh {host.address}",
        )
