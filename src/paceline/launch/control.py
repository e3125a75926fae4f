"""Actions on a running job, requested by a key or from any terminal.

:class:`RunActions` carries them out. :class:`ControlServer` accepts requests of other processes of
the same user on a Unix socket whose abstract name holds the run's id. A request is one line of
JSON, and so is its answer::

    {"do": "stop", "now": BOOL}  {"do": "save"}  {"do": "stacks"}  {"do": "state"}
    {"text": TEXT}   {"state": OBJECT}   or   {"error": TEXT, "found": TEXT, "remedy": TEXT}

The kernel tells who connects (``SO_PEERCRED``); connections of other users are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
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

MAX_CONNECTIONS = 16
REQUEST_TIMEOUT_S = 5.0  # to receive a request, and to send its answer
MAX_CHECKPOINT_RESULTS = 64
_PROCESS_STATES = {"R": "running", "S": "waiting", "D": "waiting for a disk", "T": "stopped",
                   "Z": "ended"}  # fmt: skip


class RunningRanks(Protocol):
    """The ranks of one attempt."""

    plan: Plan

    async def broadcast(self, message: Mapping[str, Any]) -> None:
        """Sends a control message to every rank."""

    async def snapshots(self) -> list[RankSnapshot]:
        """Takes a snapshot of every rank."""
        ...


class RunActions:
    """Actions that a person can request of a run. Used from the launcher's event loop only.

    Args:
        note: Prints a line for the user of this terminal.

    Attributes:
        interrupts: The user's signals, once they are handled.
        attempt: The running ranks; ``None`` while none run.
    """

    def __init__(self, run_id: str, recorder: Recorder, note: Callable[[str], None]) -> None:
        self.run_id = run_id
        self.interrupts: Interrupts | None = None
        self.attempt: RunningRanks | None = None
        self._recorder, self._note = recorder, note
        self._num_requested = self._num_answered = 0  # checkpoints
        self._saves_checkpoints = False
        self._pending_step: int | None = None  # of the last requested checkpoint
        self._checkpoint_results: dict[int, Event] = {}
        self._changed = asyncio.Event()

    # --- requests ----------------------------------------------------------------------------

    def stop(self, *, immediately: bool = False) -> str:
        """Stops the run as a signal does: with time to save, or at once."""
        if self.interrupts is None:
            raise NodeError("the run cannot be stopped at this moment")
        self._recorder.event("asked", do="stop", text="at once" if immediately else "")
        for _ in range(2 if immediately else 1):
            self.interrupts.receive(signal.SIGTERM)
        return "stopping at once" if immediately else "stopping"

    async def save(self) -> str:
        """Has all ranks save a checkpoint at the same step, and waits until it is complete.

        Raises:
            SettingError: The script saves none, or has not set them up yet.
            NodeError: The checkpoint could not be written, or the ranks ended first.
        """
        attempt = self._running_ranks("to save")
        if not self._saves_checkpoints:
            raise SettingError(
                "no checkpoint can be made now",
                found="the ranks have not reported that they save checkpoints: the script does not"
                " call session.checkpoints(…) of paceline.train, or has not reached it yet",
                remedy="Use session.checkpoints(…) in the script, or ask again once it trains",
            )
        self._recorder.event("asked", do="save")
        self._num_requested += 1
        answers = self._num_answered
        await attempt.broadcast({"control": "save", "number": self._num_requested})
        step = await self._wait_for(
            lambda: self._pending_step if self._num_answered > answers else None
        )
        outcome = await self._wait_for(lambda: self._checkpoint_results.get(step))
        if outcome.kind == "checkpoint failed":
            problem = outcome["warning"] or outcome["problem"] or ""
            raise NodeError(f"the checkpoint of step {step} could not be written", found=problem)
        size = f": {outcome['megabytes']:g} MB" if outcome["megabytes"] is not None else ""
        text = f"checkpoint of step {step} is complete{size}"
        self._note(f"paceline: {text}")
        return text

    async def stacks(self) -> str:
        """Writes every rank's stack into the run directory; returns it. NodeError without ranks."""
        snapshots = await self._running_ranks("to look at").snapshots()
        text = format_stacks(snapshots)
        name = f"{names.STACKS}/{time.strftime('%Y%m%d-%H%M%S')}.txt"
        self._recorder.write(name, text + "\n")
        self._recorder.event("asked", do="stacks", text=name)
        self._note(
            f"paceline: stacks of {len(snapshots)} ranks: {self._recorder.display_path}/{name}"
        )
        return text

    def state(self) -> dict[str, Any]:
        """Returns the state of the run that its files do not hold."""
        attempt = self.attempt
        stopping = self.interrupts is not None and bool(self.interrupts.received)
        state = "stopping" if stopping else "running" if attempt is not None else "starting"
        number = None if attempt is None else attempt.plan.attempt
        return {"run_id": self.run_id, "state": state, "attempt": number, "pid": os.getpid(),
                "saves": self._saves_checkpoints, "run_dir": self._recorder.path}  # fmt: skip

    def _running_ranks(self, purpose: str) -> RunningRanks:
        if self.attempt is None:
            raise NodeError(f"no ranks run at this moment {purpose}")
        return self.attempt

    async def _wait_for(self, poll: Callable[[], T | None]) -> T:
        attempt = self.attempt
        while (value := poll()) is None:
            if self.attempt is not attempt:
                raise NodeError("the ranks ended before the checkpoint was made")
            await self._changed.wait()
        return value

    # --- events ------------------------------------------------------------------------------

    def set_attempt(self, attempt: RunningRanks | None) -> None:
        """Sets the ranks that run from now on; ``None`` when none do."""
        self.attempt, self._saves_checkpoints = attempt, False
        self._notify_changed()

    def on_event(self, event: Event) -> None:
        """Follows the ranks' events about checkpoints."""
        if event.kind == "keeps checkpoints":
            self._saves_checkpoints = True
        elif event.kind == "saving" and event["step"] is not None:
            self._pending_step, self._num_answered = event["step"], self._num_answered + 1
        elif event.kind in ("checkpoint", "checkpoint failed", "resumed"):
            step = event["step"]
            if step is not None:
                self._checkpoint_results[step] = event
            if len(self._checkpoint_results) > MAX_CHECKPOINT_RESULTS:
                del self._checkpoint_results[next(iter(self._checkpoint_results))]
        else:
            return
        self._notify_changed()

    def _notify_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def format_stacks(snapshots: Sequence[RankSnapshot]) -> str:
    """Formats ranks' stacks, the innermost frame last, as in a traceback."""
    parts = []
    for snapshot in sorted(snapshots, key=lambda snapshot: snapshot.stack.rank):
        stack = snapshot.stack
        state = _PROCESS_STATES.get(stack.state, stack.state)
        lines = [f"{format_location(stack.host, stack.rank)} (process {snapshot.pid}, {state}):"]
        frames = [f'  File "{frame.file}", line {frame.line} in {frame.function}'
                  for frame in reversed(stack.frames)]  # fmt: skip
        parts.append("\n".join([*lines, *(frames or ["  no Python stack could be read"])]))
    return "\n\n".join(parts) or "no rank answered"


class ControlServer:
    """Answers requests of this user's other processes on the run's socket."""

    def __init__(self, actions: RunActions) -> None:
        self._actions = actions
        self._server: asyncio.AbstractServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ControlServer:
        with contextlib.suppress(OSError):  # the name is taken: the run goes on without a server
            self._server = await asyncio.start_unix_server(
                self._accept, address(self._actions.run_id), limit=MAX_REQUEST_BYTES
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # an aborted transport closes its socket in the next iteration

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("socket")
        if peer_uid(peer) != os.getuid() or len(self._tasks) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request. The client may disconnect at any time, or send without end."""
        try:
            line = await asyncio.wait_for(reader.readline(), REQUEST_TIMEOUT_S)
            if line.endswith(b"\n"):
                writer.transport.set_write_buffer_limits(0)  # drain() waits until all is sent
                writer.write(json.dumps(await self._answer(line)).encode() + b"\n")
                await asyncio.wait_for(writer.drain(), REQUEST_TIMEOUT_S)
                writer.close()
        except (OSError, ValueError, asyncio.TimeoutError):  # ValueError: the line is too long
            pass
        finally:
            if not writer.is_closing():
                writer.transport.abort()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        actions = self._actions
        try:
            request = json.loads(line)
            action = request.get("do") if isinstance(request, dict) else None
            if action == "stop":
                return {"text": actions.stop(immediately=request.get("now") is True)}
            if action == "save":
                return {"text": await actions.save()}
            if action == "stacks":
                return {"text": await actions.stacks()}
            if action == "state":
                return {"state": actions.state()}
            raise SettingError("unknown request: a run takes stop, save, stacks and state")
        except PacelineError as error:
            return {"error": error.message, "found": error.found, "remedy": error.remedy}
        except (ValueError, RecursionError):
            return {"error": "the request is not JSON", "found": "", "remedy": ""}
