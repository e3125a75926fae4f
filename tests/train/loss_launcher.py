"""A small launcher that forks ranks, loses some of them, and tells the others."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forked_worlds
import local_ranks

PATIENCE = 10.0
"""Seconds after which a rank that waits for word while nobody is lost is told to end."""


@dataclass
class Rank:
    """A forked rank.

    Attributes:
        events: Read end of the pipe for its messages; ``said`` has them parsed.
        control: Write end of the pipe for messages to it.
        status: Exit status, negative for a signal.
    """

    slot: int
    pid: int
    events: int
    control: int
    status: int | None = None
    waits: float = 0.0
    frozen: bool = False
    said: list[dict[str, Any]] = field(default_factory=list)
    rest: bytes = b""


class Launcher:
    """Starts ranks; whenever one dies, tells the others to form a new group.

    Args:
        size: Number of ranks.
        body: What each rank does.
        out: Folder for their output.
    """

    def __init__(self, size: int, body: Callable[[int], object], out: Path) -> None:
        self.store, self.port = forked_worlds.store()
        self.generation, self.last_loss = 0, 0.0
        self.told: list[list[int]] = []  # members of each generation
        self.ranks = [self._start(slot, size, body, out) for slot in range(size)]

    def _start(self, slot: int, size: int, body: Callable[[int], object], out: Path) -> Rank:
        said, says = os.pipe()
        hears, told = os.pipe()
        pid = os.fork()
        if pid:
            os.close(says)
            os.close(hears)
            os.set_blocking(said, False)
            return Rank(slot, pid, said, told)
        status = 70
        try:
            log = os.open(out / f"{slot}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(local_ranks.environment(slot, size, self.port))
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            os.environ["PACELINE_EVENT_FD"] = str(says)
            os.environ["PACELINE_CONTROL_FD"] = str(hears)
            for fd in (told, said):
                os.close(fd)
            for one in getattr(self, "ranks", []):
                os.close(one.events)
                os.close(one.control)
            body(slot)
            status = 0
        except SystemExit as leaving:
            status = int(leaving.code or 0)
        except BaseException:
            traceback.print_exc()
            status = 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def kill(self, slot: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a rank that has not ended."""
        if self.ranks[slot].status is None:
            os.kill(self.ranks[slot].pid, number)

    def freeze(self, slot: int) -> None:
        """Stops a rank and treats it as lost; it stays frozen until the others have ended."""
        self.kill(slot, signal.SIGSTOP)
        self.ranks[slot].frozen, self.last_loss = True, time.monotonic()
        self.regroup([one.slot for one in self.ranks if one.status is None and not one.frozen])

    def run(self, timeout: float, act: Callable[[Launcher], None] = lambda _: None) -> list[int]:
        """Runs until all ranks have ended; returns exit statuses by slot.

        Args:
            timeout: Seconds after which all remaining ranks are killed.
            act: Called again and again; causes the faults.
        """
        deadline = time.monotonic() + timeout
        while any(one.status is None for one in self.ranks):
            act(self)
            if all(one.frozen for one in self.ranks if one.status is None):
                for one in self.ranks:
                    self.kill(one.slot)
            self._listen(0.002)
            self._bury()
            self._answer()
            if time.monotonic() > deadline:
                self._dump()
                for one in self.ranks:
                    self.kill(one.slot)
        self._listen(0)
        for one in self.ranks:
            os.close(one.events)
            os.close(one.control)
        os.kill(self.store, signal.SIGKILL)
        os.waitpid(self.store, 0)
        return [one.status if one.status is not None else 70 for one in self.ranks]

    def _dump(self) -> None:
        """Makes hanging ranks print their stacks to the logs."""
        for one in self.ranks:
            self.kill(one.slot, signal.SIGUSR1)
        time.sleep(0.5)

    def _listen(self, seconds: float) -> None:
        living = {one.events: one for one in self.ranks}
        for fd in select.select(living, [], [], seconds)[0]:
            one = living[fd]
            with contextlib.suppress(BlockingIOError):
                *lines, one.rest = (one.rest + os.read(fd, 1 << 16)).split(b"\n")
                for line in lines:
                    said = json.loads(line)
                    one.said.append(said)
                    # a rank of a former group has not read the newest message yet
                    if said.get("event") == "interrupted" and said["generation"] >= self.generation:
                        one.waits = time.monotonic()

    def _bury(self) -> None:
        """Records which ranks have ended; after a death, starts a new group of the others."""
        lost = False
        for one in self.ranks:
            if one.status is None and (ended := os.waitpid(one.pid, os.WNOHANG))[0]:
                one.status = os.waitstatus_to_exitcode(ended[1])
                lost = lost or (one.status != 0 and not one.frozen)
        if lost:
            self.last_loss = time.monotonic()
            self.regroup([one.slot for one in self.ranks if one.status is None and not one.frozen])

    def regroup(self, members: list[int]) -> None:
        """Tells these ranks to form a new group."""
        self.generation += 1
        self.told.append(members)
        places = [
            {"slot": slot, "host": "n1", "local_rank": place, "local_size": len(members)}
            for place, slot in enumerate(members)
        ]
        store = {"address": "127.0.0.1", "port": self.port}
        said = {"control": "regroup", "generation": self.generation, "members": places}
        self._tell(members, {**said, "store": store, "planned": False})

    def _tell(self, slots: list[int], said: dict[str, Any]) -> None:
        for slot in slots:
            self.ranks[slot].waits = 0.0
            with contextlib.suppress(OSError):
                os.write(self.ranks[slot].control, json.dumps(said).encode() + b"\n")

    def _answer(self) -> None:
        """Tells ranks that have waited too long that no rank is lost."""
        for one in self.ranks:
            if one.waits and time.monotonic() - one.waits > PATIENCE and one.status is None:
                self._tell([one.slot], {"control": "end", "why": "no rank is lost"})
