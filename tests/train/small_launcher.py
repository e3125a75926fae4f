"""A minimal launcher with agents in one process, for ranks that are lost and come back.

Ranks are forked, each with its own pipes. A rank that a signal ends is lost: the others are told to
form a new group without it, and a newcomer is forked in its place, which joins when it is ready. A
separate process holds the rendezvous store. Only for test scripts that have started no thread and
no computation before.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import forked_worlds
import local_ranks

from paceline.train import files

Body = Callable[[], object]
Message = dict[str, Any]
LIMIT_S = 250.0  # of one world; the forking process of several worlds waits longer


@dataclass
class Process:
    """The process of a rank, or of a newcomer in its place."""

    slot: int
    pid: int
    events: int
    control: int
    began: float
    rest: bytes = b""
    status: int | None = None
    ready: bool = False
    joining: bool = False
    unneeded: bool = False  # it was to join a group whose other ranks have ended


@dataclass
class Job:
    """Runs ``body`` on some ranks until all have ended.

    Args:
        body: What each rank does.
        size: Number of ranks at the start.
        folder: The run directory; metrics are recorded in it as by the launcher.
        late: Further slots, with the seconds after which each joins.
        again: How many newcomers may replace each lost rank.
        saw: Called with each message of a rank.
        extra: Further variables of all ranks.
        whole: Start no batch with fewer ranks than at the start, as if nodes were missing.

    Attributes:
        said: All events: time, slot, message.
        statuses: Exit status of each slot's last process; negative for signals.
        running: The processes by slot.
        lost: Lost slots with their times, in order.
    """

    body: Body
    size: int
    folder: Path
    late: Mapping[int, float] = field(default_factory=dict)
    again: int = 1
    saw: Callable[[Job, int, Message], object] = lambda job, slot, message: None
    extra: Mapping[str, str] = field(default_factory=dict)
    whole: bool = False
    said: list[tuple[float, int, Message]] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    lost: list[tuple[float, int]] = field(default_factory=list)
    running: dict[int, Process] = field(default_factory=dict)

    def run(self, timeout: float = LIMIT_S) -> Job:
        """Runs until all ranks have ended; late ones print their stacks and are killed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._metrics = files.RecordFile(self.folder / "metrics.jsonl")
        self._members = list(range(self.size))
        self._generation, self._tries = 0, dict.fromkeys([*self._members, *self.late], 0)
        self._closed = self._holds = False
        self._unsettled: set[int] = set()  # members that are not in the newest group yet
        self._store, self._port = forked_worlds.store()
        due = dict(self.late)
        began = time.monotonic()
        try:
            for slot in self._members:
                self._start(slot)
            while self.running:
                now = time.monotonic()
                if now > began + timeout:
                    raise AssertionError(self._describe_late())
                for slot in [slot for slot, after in due.items() if now > began + after]:
                    del due[slot]
                    self._start(slot, newcomer=True)
                self._listen()
                self._reap()
        finally:
            for one in self.running.values():
                with contextlib.suppress(OSError):
                    os.kill(one.pid, signal.SIGKILL)
                    os.waitpid(one.pid, 0)
            os.kill(self._store, signal.SIGKILL)
            os.waitpid(self._store, 0)
        return self

    # -- processes -----------------------------------------------------------------------

    def _start(self, slot: int, *, newcomer: bool = False) -> None:
        events, said = os.pipe()
        told, control = os.pipe()
        for fd in (events, control):  # other ranks must not inherit them
            fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        size = max(self.size, slot + 1)
        environ = local_ranks.environment(slot, size, self._port, self.extra) | {
            "PACELINE_EVENT_FD": str(said),
            "PACELINE_CONTROL_FD": str(told),
            "PACELINE_RUN_ID": "run",
            "PACELINE_RUN_DIR": str(self.folder),
            "PACELINE_HOST": f"n{slot}",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        if newcomer:
            environ["PACELINE_NEWCOMER"] = "1"
        held = [fd for one in self.running.values() for fd in (one.events, one.control)]

        def body() -> None:
            faulthandler.register(signal.SIGUSR1)
            for fd in (*held, events, control):
                os.close(fd)
            self.body()

        pid = forked_worlds.forked(environ, body)
        os.close(said)
        os.close(told)
        os.set_blocking(events, False)
        self.running[slot] = Process(slot, pid, events, control, time.monotonic())

    def kill(self, slot: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to the process of a slot."""
        os.kill(self.running[slot].pid, number)

    def _reap(self) -> None:
        for one in list(self.running.values()):
            ended, status = os.waitpid(one.pid, os.WNOHANG)
            if not ended:
                continue
            self._read(one)
            del self.running[one.slot]
            os.close(one.events)
            os.close(one.control)
            self.statuses[one.slot] = 0 if one.unneeded else os.waitstatus_to_exitcode(status)
            if os.WIFSIGNALED(status) and not one.unneeded:
                self._lose(one)
            self._end_newcomers()

    def _end_newcomers(self) -> None:
        """Ends newcomers that have no rank left to join."""
        for one in self.running.values():
            self._read(one)  # reads whether it has joined
        if any(s in self._members and not one.joining for s, one in self.running.items()):
            return
        for one in self.running.values():
            if one.joining:  # it waits for the others in the new group
                one.unneeded = True
                os.kill(one.pid, signal.SIGKILL)
        self._tell({"control": "end", "why": "the others have ended"})

    def _describe_late(self) -> str:
        for slot in self.running:
            self.kill(slot, signal.SIGUSR1)
            time.sleep(1)  # the process prints its stacks
        said = [(slot, message) for _, slot, message in self.said[-8:]]
        return (
            f"{self.folder.name}: still running: {sorted(self.running)}, members {self._members} "
            f"of generation {self._generation}, unsettled {self._unsettled}; last events: {said}"
        )

    def _lose(self, one: Process) -> None:
        self.lost.append((time.monotonic(), one.slot))
        if one.slot in self._members:
            self._members.remove(one.slot)
            for other in list(self.running.values()):  # it may not have the state yet
                if other.slot in self._unsettled and other.joining:
                    self._members.remove(other.slot)
                    self._tries[other.slot] -= 1
                    os.kill(other.pid, signal.SIGKILL)
            if self._members:
                self._regroup(planned=False)
        if self._tries[one.slot] < self.again and not self._closed:
            self._tries[one.slot] += 1
            self._start(one.slot, newcomer=True)

    # -- messages ----------------------------------------------------------------------------

    def _listen(self) -> None:
        open_ones = {one.events: one for one in self.running.values()}
        for fd in select.select([*open_ones], [], [], 0.002)[0]:
            self._read(open_ones[fd])

    def _read(self, one: Process) -> None:
        with contextlib.suppress(BlockingIOError):
            while came := os.read(one.events, 1 << 16):
                *lines, one.rest = (one.rest + came).split(b"\n")
                for line in lines:
                    self._take(one, json.loads(line))

    def _take(self, one: Process, message: Message) -> None:
        kind = message.pop("kind")
        if kind == "metrics":
            self._metrics.append(message)
        elif kind == "begin":
            if message["resumed"]:
                self._metrics.skip_recorded()
            else:
                self._metrics.back_up()
        elif kind == "event":
            self.said.append((time.monotonic(), one.slot, message))
            if message["event"] == "newcomer ready":
                one.ready = True
            elif message["event"] == "regrouped" and message["generation"] == self._generation:
                self._unsettled.discard(one.slot)
                one.ready = one.joining = False
                if self._holds and not self._unsettled and len(self._members) == self.size:
                    self._regroup(planned=False, holds=False)
            elif message["event"] == "door closed" and not self._closed:
                self._close(one)
            self._take_in()
        self.saw(self, one.slot, {"kind": kind, **message})

    def _close(self, teller: Process) -> None:
        """Ends all newcomers, as none can join any more; the others form a group without them."""
        self._closed = True
        waits = teller.slot in self._unsettled
        for one in self.running.values():
            if one.slot not in self._members or (one.joining and waits):
                one.ready = False
                os.kill(one.pid, signal.SIGKILL)
        if waits and any(one.joining for one in self.running.values()):
            self._members = [s for s in self._members if not self.running[s].joining]
            self._regroup(planned=False)

    def _take_in(self) -> None:
        """Lets ready newcomers join as soon as all others are in the newest group."""
        ready = [one for one in self.running.values() if one.ready and not one.joining]
        if ready and not self._unsettled and self._members:
            for one in ready:
                one.joining = True
            self._members += [one.slot for one in ready]
            self._regroup(planned=True)

    def _regroup(self, *, planned: bool, holds: bool | None = None) -> None:
        self._generation += 1
        self._holds = self.whole if holds is None else holds
        self._unsettled = set(self._members)
        members = [
            {"slot": slot, "host": f"n{slot}", "local_rank": slot, "local_size": 1}
            for slot in self._members
        ]
        store = {"address": "127.0.0.1", "port": self._port}
        word = {"generation": self._generation, "members": members, "store": store}
        how = {"planned": planned, "holds": self._holds}
        self._tell({"control": "regroup", **word, **how})

    def _tell(self, word: Message) -> None:
        for one in self.running.values():
            with contextlib.suppress(OSError):
                os.write(one.control, json.dumps(word).encode() + b"\n")

    # -- results -----------------------------------------------------------------------------

    def events(self, name: str) -> list[tuple[float, int, Message]]:
        """Returns all events of this name: time, slot, message."""
        return [one for one in self.said if one[2]["event"] == name]

    def metrics(self) -> list[Message]:
        """Returns the recorded metrics."""
        text = (self.folder / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def ended_well(self) -> Job:
        """Checks that every slot's last process has succeeded."""
        assert not any(self.statuses.values()), self.statuses
        return self
