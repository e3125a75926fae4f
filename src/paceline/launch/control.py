"""What can be asked of a run while its launcher runs: by a key, or from any terminal.

:class:`Actions` does it. :class:`Control` lets other processes of the same user ask for it, through
a Unix socket whose abstract name is made of the run's id: one line of JSON there, one line back::

    {"do": "stop", "now": BOOL}  {"do": "save"}  {"do": "stacks"}  {"do": "state"}
    {"text": TEXT}   {"state": OBJECT}   or   {"error": TEXT, "found": TEXT, "remedy": TEXT}

Who connects is known from the kernel (``SO_PEERCRED``); another user is hung up on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from paceline.agent.control import MAX_REQUEST_BYTES, address
from paceline.agent.reconnection import peer_uid
from paceline.launch.interrupts import Interrupts
from paceline.launch.recorder import Recorder
from paceline.spec import rundir as names
from paceline.spec.errors import NodeError, PacelineError, SettingError
from paceline.spec.events import Event
from paceline.spec.failure import format_location
from paceline.spec.plan import Plan

if TYPE_CHECKING:
    from paceline.launch.health.hang_verdict import RankSnapshot

T = TypeVar("T")

AT_ONCE = 16  # connections to the socket
WISH_S = 5.0  # for a wish to come whole, and for an answer to be taken
PAUSE_S = 0.5
OUTCOMES = 64  # checkpoints whose outcome is remembered
_STATES = {"R": "running", "S": "waiting", "D": "waiting for a disk", "T": "stopped", "Z": "ended"}


class RunningRanks(Protocol):
    """The ranks of one attempt, as a person can ask of them."""

    plan: Plan

    async def tell_ranks(self, line: Mapping[str, Any]) -> None:
        """Sends a line to every rank."""

    async def looks(self) -> list[RankSnapshot]:
        """What every rank does at this moment."""
        ...


class Actions:
    """What a person can ask of a run on the way; used from the launcher's loop only.

    Args:
        run_id: Of the run.
        recorder: Writes down what was asked.
        note: Tells the user of this terminal.

    Attributes:
        interrupts: The user's signals, once they are listened to.
        attempt: The ranks that run; ``None`` while none do.
    """

    def __init__(self, run_id: str, recorder: Recorder, note: Callable[[str], None]) -> None:
        self.run_id = run_id
        self.interrupts: Interrupts | None = None
        self.attempt: RunningRanks | None = None
        self._recorder, self._note = recorder, note
        self._saves = self._answers = 0  # asked for, and answered
        self._keeps = False  # the ranks make checkpoints
        self._saving: int | None = None  # the step of the last that was asked for
        self._outcomes: dict[int, Event] = {}
        self._changed = asyncio.Event()

    # --- asking ------------------------------------------------------------------------------

    def stop(self, *, now: bool = False, signum: signal.Signals = signal.SIGTERM) -> str:
        """Ends the run as a signal does: with time to save, or at once."""
        if self.interrupts is None:
            raise NodeError("the run is not to be stopped at this moment")
        self._recorder.event("asked", do="stop", text="at once" if now else "")
        for _ in range(2 if now else 1):
            self.interrupts.take(signum)
        return "stopping at once" if now else "stopping"

    async def save(self) -> str:
        """Has all ranks make a checkpoint at the same step; returns when it is complete.

        Raises:
            SettingError: The script makes none, or has not come to that yet.
            NodeError: It could not be written, or the ranks ended before.
        """
        attempt = self._running("to save")
        if not self._keeps:
            raise SettingError(
                "no checkpoint can be made now",
                found="the ranks have not said that they make checkpoints: the script has no"
                " session.checkpoints(…) of paceline.train, or has not come to it yet",
                remedy="Use session.checkpoints(…) in the script, or ask again once it trains",
            )
        self._recorder.event("asked", do="save")
        self._saves += 1
        answers = self._answers
        await attempt.tell_ranks({"control": "save", "number": self._saves})
        step = await self._until(lambda: self._saving if self._answers > answers else None)
        outcome = await self._until(lambda: self._outcomes.get(step))
        if outcome.kind == "checkpoint failed":
            problem = outcome["warning"] or outcome["problem"] or ""
            raise NodeError(f"the checkpoint of step {step} could not be written", found=problem)
        size = f": {outcome['megabytes']:g} MB" if outcome["megabytes"] is not None else ""
        text = f"checkpoint of step {step} is complete{size}"
        self._note(f"paceline: {text}")
        return text

    async def stacks(self) -> str:
        """Writes where every rank stands into the run directory; the text of it.

        NodeError when no ranks run.
        """
        looks = await self._running("to look at").looks()
        text = stacks_text(looks)
        name = f"{names.STACKS}/{time.strftime('%Y%m%d-%H%M%S')}.txt"
        self._recorder.write(name, text + "\n")
        self._recorder.event("asked", do="stacks", text=name)
        self._note(f"paceline: stacks of {len(looks)} ranks: {self._recorder.shown_path}/{name}")
        return text

    def state(self) -> dict[str, Any]:
        """Where the run is, as far as its files do not say so."""
        attempt = self.attempt
        stopping = self.interrupts is not None and bool(self.interrupts.received)
        state = "stopping" if stopping else "running" if attempt is not None else "starting"
        number = None if attempt is None else attempt.plan.attempt
        return {"run_id": self.run_id, "state": state, "attempt": number, "saves": self._keeps,
                "pid": os.getpid(), "run_dir": self._recorder.path}  # fmt: skip

    def _running(self, what: str) -> RunningRanks:
        if self.attempt is None:
            raise NodeError(f"no ranks run at this moment {what}")
        return self.attempt

    async def _until(self, known: Callable[[], T | None]) -> T:
        attempt = self.attempt
        while (value := known()) is None:
            if self.attempt is not attempt:
                raise NodeError("the ranks ended before the checkpoint was made")
            await self._changed.wait()
        return value

    # --- hearing -----------------------------------------------------------------------------

    def runs(self, attempt: RunningRanks | None) -> None:
        """Other ranks run from now on, or none do."""
        self.attempt, self._keeps = attempt, False
        self._change()

    def heard(self, event: Event) -> None:
        """Follows what ranks say of their checkpoints."""
        if event.kind == "keeps checkpoints":
            self._keeps = True
        elif event.kind == "saving" and event["step"] is not None:
            self._saving, self._answers = event["step"], self._answers + 1
        elif event.kind in ("checkpoint", "checkpoint failed", "resumed"):
            step = event["step"]
            if step is not None:
                self._outcomes[step] = event
            if len(self._outcomes) > OUTCOMES:
                del self._outcomes[next(iter(self._outcomes))]
        else:
            return
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def stacks_text(looks: Sequence[RankSnapshot]) -> str:
    """Where ranks stand, for people: the innermost line last, as in a traceback."""
    parts = []
    for look in sorted(looks, key=lambda look: look.stack.rank):
        stand = look.stack
        state = _STATES.get(stand.state, stand.state)
        lines = [f"{format_location(stand.host, stand.rank)} (process {look.pid}, {state}):"]
        frames = [f'  File "{one.file}", line {one.line} in {one.function}'
                  for one in reversed(stand.frames)]  # fmt: skip
        parts.append("\n".join([*lines, *(frames or ["  no Python stack could be had"])]))
    return "\n\n".join(parts) or "no rank answered"


class Control:
    """Takes wishes of other processes of this user, through the run's socket.

    Args:
        actions: Does what they ask.
    """

    def __init__(self, actions: Actions) -> None:
        self._actions = actions
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._does: Mapping[str, Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]] = {
            "stop": self._stop, "save": self._save, "stacks": self._stacks, "state": self._state,
        }  # fmt: skip

    async def __aenter__(self) -> Control:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(address(self._actions.run_id))
            listener.listen(AT_ONCE)
        except OSError:  # somebody has the name: the run goes on without
            listener.close()
            return self
        listener.setblocking(False)
        self._listener = listener
        self._begin(self._listen(listener))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self, listener: socket.socket) -> None:
        while True:
            try:
                line, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError:  # no descriptor is left at this moment
                await asyncio.sleep(PAUSE_S)
                continue
            if peer_uid(line) != os.getuid() or len(self._tasks) > AT_ONCE:
                line.close()
                continue
            line.setblocking(False)
            self._begin(self._met(line))

    async def _met(self, line: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        # whoever it was may go at any time, or talk at length
        with contextlib.closing(line), contextlib.suppress(OSError, asyncio.TimeoutError):
            wish = b""
            until = loop.time() + WISH_S
            while not wish.endswith(b"\n"):
                came = await asyncio.wait_for(
                    loop.sock_recv(line, MAX_REQUEST_BYTES), until - loop.time()
                )
                wish += came
                if not came or len(wish) > MAX_REQUEST_BYTES:
                    return
            answer = json.dumps(await self._answer(wish)).encode() + b"\n"
            await asyncio.wait_for(loop.sock_sendall(line, answer), WISH_S)

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            wish = json.loads(line)
            if not isinstance(wish, dict) or wish.get("do") not in self._does:
                raise SettingError(f"a run can be asked to {', '.join(self._does)}")
            return await self._does[wish["do"]](wish)
        except PacelineError as error:
            return {"error": error.message, "found": error.found, "remedy": error.remedy}
        except (ValueError, RecursionError):
            return {"error": "what was asked is no JSON", "found": "", "remedy": ""}

    async def _stop(self, wish: Mapping[str, Any]) -> dict[str, Any]:
        return {"text": self._actions.stop(now=wish.get("now") is True)}

    async def _save(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return {"text": await self._actions.save()}

    async def _stacks(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return {"text": await self._actions.stacks()}

    async def _state(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return {"state": self._actions.state()}
