"""Hosts that are not there yet: waited for at the start, dialled in the background ever after."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Sequence

from paceline.launch.allowance import span
from paceline.launch.board import Waiting
from paceline.launch.fleet import Fleet, Node
from paceline.remote.channel import LOGINS_AT_ONCE, Channel
from paceline.remote.transport import Reached, Transport, nobody
from paceline.spec.errors import ConnectError, GoneError, PacelineError
from paceline.spec.helptext import counted
from paceline.spec.hosts import Host

LAST_CALL_S = 5.0  # for the others, once there are enough hosts to begin
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 5.0)  # between two calls of one host; the last one for ever
TOO_LATE_S = 30.0  # a host that asked for its own end is about to go: no call before


Waits = Callable[["Waiting | None"], None]


def unseen(waiting: Waiting | None) -> None:
    """Is told what nobody looks at."""


class Dialling:
    """Calls one host until it answers.

    Attributes:
        host: Whom.
        why: What stood in the way last; empty before the first answer.
        channel: The connection, once there is one.
        gone: There will be none: no further call of this run can reach it.
    """

    def __init__(self, transport: Transport, host: Host, python: str,
                 gate: asyncio.Semaphore, changed: asyncio.Event,
                 after_s: float = 0.0) -> None:  # fmt: skip
        self.host = host
        self.why = ""
        self.channel: Channel | None = None
        self.gone = False
        self._transport, self._python = transport, python
        self._gate, self._changed = gate, changed
        self.task = asyncio.create_task(self._call(after_s))

    async def _call(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        for number in itertools.count():
            try:
                async with self._gate:
                    (self.channel,) = await self._transport.open([self.host], [self._python])
            except PacelineError as error:
                self.why, self.gone = error.brief, isinstance(error, GoneError)
            self._changed.set()
            if self.channel is not None or self.gone:
                return
            await asyncio.sleep(PAUSES_S[min(number, len(PAUSES_S) - 1)])

    async def stop(self) -> Channel | None:
        """Ends the calls; what came of them at the last moment."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        return self.channel

    def describe(self) -> str:
        """The host, and what stands in its way."""
        return f"{self.host.name} ({self.why or 'no answer yet'})"


async def gather(transport: Transport, hosts: Sequence[Host], pythons: Sequence[str], least: int,
                 patience_s: float, note: Callable[[str], None], reached: Reached = nobody,
                 later: list[Dialling] | None = None, waits: Waits = unseen,
                 ) -> tuple[list[Channel], dict[str, str]]:  # fmt: skip
    """As many of the hosts as answer, in their order, and of the others by name why not.

    All that answer at once are taken; who has neither answered nor refused when there are enough
    gets a few seconds more.

    Args:
        transport: How agents are started, one by one.
        hosts, pythons: Whom to call, and the interpreter of each.
        least: Without how many nothing can begin.
        patience_s: How long to wait for those, in seconds.
        note: Tells the user.
        reached: Told how many answered by now.
        later: Gets the calls of the others, which go on; ``None``: they are ended.
        waits: Told once that too few are there and others are waited for; by whom, until when.

    Raises:
        ConnectError: There are too few; names the missing ones.
    """
    loop, gate = asyncio.get_running_loop(), asyncio.Semaphore(LOGINS_AT_ONCE)
    changed, began, enough_at, told = asyncio.Event(), loop.time(), None, False
    calls = [Dialling(transport, host, python, gate, changed)
             for host, python in zip(hosts, pythons, strict=True)]  # fmt: skip
    try:
        while True:
            changed.clear()
            missing = [call for call in calls if call.channel is None]
            here, now = len(calls) - len(missing), loop.time()
            reached(here)
            undecided = [call for call in missing if not call.why]
            if here >= least and enough_at is None:
                enough_at = now
            if not missing or (enough_at is not None and (
                    not undecided or now - enough_at >= LAST_CALL_S)):  # fmt: skip
                break
            late = now - began >= patience_s or all(call.gone for call in missing)
            if here < least and not undecided and late:
                raise _too_few(missing, here, least, now - began)
            if not told and not undecided and enough_at is None:
                told = True
                text = f"{counted(here, 'host')} of at least {least}: waiting up to"
                text += f" {span(patience_s)} for {_named(missing)}"
                note(f"paceline: {text}")
                waits(Waiting.now(text, patience_s, now - began))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(changed.wait(), 0.2)
    except BaseException:
        for channel in await asyncio.gather(*(call.stop() for call in calls)):
            if channel is not None:
                await channel.close()
        raise
    if later is None:
        await asyncio.gather(*(call.stop() for call in missing))
    else:
        later += missing
    channels = [call.channel for call in calls if call.channel is not None]
    return channels, {call.host.name: call.why for call in calls if call.channel is None}


def _named(missing: Sequence[Dialling], most: int = 6) -> str:
    shown = ", ".join(call.describe() for call in missing[:most])
    return shown if len(missing) <= most else f"{shown} and {len(missing) - most} more"


def _too_few(missing: Sequence[Dialling], here: int, least: int, seconds: float) -> ConnectError:
    names = ", ".join(call.host.name for call in missing)
    waited = f" within {seconds:.0f} s" if seconds >= 1 else ""
    fewer = ", or ask for fewer: --nnodes" if least > 1 else ""
    return ConnectError(
        f"{counted(here, 'host')} can be reached, at least {least} are needed: {names} did not"
        f" answer{waited}",
        found="\n".join(f"{call.host.name}: {call.why or 'no answer'}" for call in missing),
        remedy=f"See that they are on and let you in (paceline check){fewer}",
    )


class Muster:
    """Calls hosts that are missing while the job runs, and brings those that come into the fleet.

    Args:
        transport: How agents are started.
        fleet: Gets those that came, as spares.
        python_of: The interpreter for a host.
        fit_out: Checks a node that came, gives it all that it needs, and returns when it could
            start ranks. PacelineError where it cannot take part.
        ready: Told of every node that could start ranks now.
        note: Tells the user.
    """

    def __init__(self, transport: Transport, fleet: Fleet, python_of: Callable[[Host], str],
                 fit_out: Callable[[Node], Awaitable[None]], ready: Callable[[Node], None],
                 note: Callable[[str], None]) -> None:  # fmt: skip
        self._transport, self._fleet, self._python_of = transport, fleet, python_of
        self._fit_out, self._ready, self._note = fit_out, ready, note
        self._gate = asyncio.Semaphore(LOGINS_AT_ONCE)
        self._changed = asyncio.Event()
        self._calls: dict[str, Dialling] = {}
        self._coming: dict[str, asyncio.Task[None]] = {}
        self._wanted: dict[str, asyncio.Future[Node]] = {}  # by who takes them in himself

    @property
    def called(self) -> list[str]:
        """Hosts that are called at present."""
        return list(self._calls)

    @property
    def reached(self) -> bool:
        """Whether a host has answered that cannot start ranks yet."""
        return any(call.channel is not None for call in self._calls.values())

    @property
    def missing(self) -> list[str]:
        """Hosts that are waited for, with what stands in their way."""
        return [call.describe() for call in self._calls.values()]

    def ways_back(self) -> dict[str, str]:
        """By host that is called: what stands in its way, in words that follow its name."""
        return {
            name: "back, getting ready" if call.channel is not None
            else "lost, dialled again" + (f": {call.why}" if call.why else "")
            for name, call in self._calls.items()
        }  # fmt: skip

    def call(self, host: Host, after_s: float = 0.0) -> None:
        """Begins to call a host, unless that is so already."""
        if self._transport.redials and host.name not in self._coming:
            self.go_on(Dialling(self._transport, host, self._python_of(host), self._gate,
                                self._changed, after_s))  # fmt: skip

    def go_on(self, call: Dialling) -> None:
        """Sees to a call that has begun."""
        self._calls[call.host.name] = call
        self._coming[call.host.name] = asyncio.create_task(self._see_in(call))

    def call_again(self, node: Node) -> None:
        """Begins to call the host of a lost node; one that was asked to end is about to go."""
        self.call(node.host, 0.0 if node.why else TOO_LATE_S)

    async def _see_in(self, call: Dialling) -> None:
        """From the first call of a host to a node that could start ranks; again where it fails."""
        name, number, told = call.host.name, 0, ""
        try:
            while True:
                await call.task
                if call.channel is None:
                    raise GoneError(f"{name} cannot come back", found=call.why)
                node = self._fleet.add(call.channel)
                try:
                    await self._fit_out(node)
                except (PacelineError, OSError) as error:  # a file to be sent may have gone, too
                    said = str(error) or type(error).__name__
                    why = node.why if node.lost else said.splitlines()[0]
                    await self._fleet.dismiss(node)
                    if why != told:
                        self._note(f"paceline: {name} cannot take part yet: {why}")
                    told, pause_s = why, PAUSES_S[min(number, len(PAUSES_S) - 1)]
                    number += 1
                    call = self._calls[name] = Dialling(
                        self._transport, call.host, self._python_of(call.host), self._gate,
                        self._changed, pause_s)  # fmt: skip
                    call.why = why
                else:
                    break
        except GoneError as gone:
            self._note(f"paceline: {gone.message}: {gone.brief}")
            if (wanted := self._wanted.pop(name, None)) is not None and not wanted.done():
                wanted.set_exception(gone)
            return
        finally:
            self._calls.pop(name, None)
            self._coming.pop(name, None)
            self._changed.set()
        wanted = self._wanted.pop(name, None)
        if wanted is None or wanted.done():
            self._ready(node)
        else:
            wanted.set_result(node)
        self._changed.set()

    async def bring(self, lost: Node) -> Node:
        """Calls the host of a lost node until it could start ranks, however long it takes.

        Whoever asks for it so takes it into the running job: nobody else is told that it came.

        Raises:
            GoneError: It never will.
        """
        wanted = self._wanted.get(lost.name)
        if wanted is None or wanted.done():  # somebody may have given up waiting
            wanted = self._wanted[lost.name] = asyncio.get_running_loop().create_future()
        self.call_again(lost)
        return await wanted  # who gives up waiting leaves it to the others

    async def until(self, enough: Callable[[], bool], patience_s: float) -> bool:
        """Waits for nodes to come; whether there are enough in time."""
        deadline = asyncio.get_running_loop().time() + patience_s
        while not enough():
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0 or not self._coming:
                return False
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)
        return True

    async def close(self) -> None:
        """Ends all calls; connections that the fleet does not have yet are closed."""
        calls = list(self._calls.values())  # which each task forgets at its end
        for task in self._coming.values():
            task.cancel()
        await asyncio.gather(*self._coming.values(), return_exceptions=True)
        for call in calls:
            channel = await call.stop()
            if channel is not None and channel not in self._fleet.channels:
                await channel.close()
