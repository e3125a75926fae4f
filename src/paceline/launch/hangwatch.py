"""Watches the ranks of an attempt for hangs; :mod:`.hanging` decides what it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from paceline.diagnose.stacks import Stand, parse
from paceline.launch import hanging
from paceline.launch.fleet import Fleet
from paceline.launch.hanging import Hang, Heartbeats, Look
from paceline.launch.node import Node
from paceline.spec.errors import PacelineError

LOOK_S = 1.0
STACKS_S = 0.3  # until asked stacks have come
BETWEEN_S = 1.5  # between two looks at the same ranks
PATIENCE_S = 2.0  # for a node's answer
QUIET_S = 2.0  # without CPU time: then one look is enough


class HangWatch:
    """Looks every second whether the job goes on, and tells what keeps it.

    Args:
        fleet: The nodes.
        told: Called with every hang that is found, and with ``None`` when the job goes on again.
        over: Called with the hang that has lasted for ``limit_s``.
        limit_s: 0 never calls ``over``.
    """

    def __init__(self, fleet: Fleet, told: Callable[[Hang | None, float], None],
                 over: Callable[[Hang], None], limit_s: float = 0.0) -> None:  # fmt: skip
        self._fleet = fleet
        self._told, self._over, self._limit_s = told, over, limit_s
        self._heartbeats = Heartbeats()
        self._pids: dict[int, int] = {}
        self._ended: list[tuple[str, int]] = []
        self._hang: Hang | None = None
        self._since = 0.0  # of the hang that was told
        self._next_look = 0.0

    def heartbeat(self, rank: int, phase: str) -> None:
        """A rank has told its step."""
        self._heartbeats.take(rank, phase, time.monotonic())

    def started(self, rank: int, pid: int) -> None:
        self._pids[rank] = pid

    def ended(self, host: str, rank: int) -> None:
        """A rank has ended with status 0."""
        self._ended.append((host, rank))

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            silent_s = self._silent_s()
            if self._hang is not None and silent_s < LOOK_S * 2 and not self._frozen():
                self._told(None, time.monotonic() - self._since)
                self._hang = None
            hang = self._frozen()
            if hang is None and self._suspicious(silent_s):
                hang = await self._inspect(silent_s)
            if hang is not None:
                self._tell(hang, silent_s)
            self._judge_limit()

    def _tell(self, hang: Hang, silent_s: float) -> None:
        if self._hang is None:
            self._since = time.monotonic() - silent_s
        if self._hang is None or (self._hang.rank, self._hang.host) != (hang.rank, hang.host):
            self._told(hang, silent_s)
            self._hang = hang

    def _judge_limit(self) -> None:
        if self._hang is not None and 0 < self._limit_s < time.monotonic() - self._since:
            self._over(self._hang)
            self._limit_s = 0.0

    def _silent_s(self) -> float:
        """How long no rank has made a step, as far as that is told; else used no CPU."""
        if self._heartbeats.known:
            return self._heartbeats.silent_s(time.monotonic())
        quiet = [node.quiet_s for node in self._fleet.nodes if node.quiet_s is not None]
        return min(quiet, default=0.0)

    def _suspicious(self, silent_s: float) -> bool:
        known = self._heartbeats.known
        patience_s = self._heartbeats.patience_s if known else hanging.UNTOLD_S
        if silent_s <= patience_s or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + max(LOOK_S, silent_s / 4)
        return True

    def _frozen(self) -> Hang | None:
        for node in self._fleet.nodes:
            for rank, seconds in sorted(node.frozen.items()):
                if seconds >= hanging.FROZEN_S and not node.lost:
                    text = hanging.frozen_text(node.name, rank, seconds, self._pids)
                    return Hang(node.name, rank, text)
        return None

    async def _inspect(self, silent_s: float) -> Hang | None:
        """Looks at all ranks twice."""
        before = await self._looks()
        await asyncio.sleep(BETWEEN_S)
        after = await self._looks()
        return hanging.judge(before, after, BETWEEN_S + STACKS_S, silent_s, self._ended)

    async def at_the_end(self) -> Hang | None:
        """One quick look, when somebody stops a job that may hang."""
        if self._hang is not None or self._silent_s() < QUIET_S:
            return self._hang
        quiet = [node.quiet_s or 0.0 for node in self._fleet.nodes]
        if min(quiet, default=0.0) < QUIET_S:
            return None
        looks = await self._looks()  # nobody has used a CPU for a while: nobody moves
        return hanging.judge(looks, looks, 1.0, self._silent_s(), self._ended)

    async def _looks(self) -> list[Look]:
        await self._fleet.tell("witness", patience_s=PATIENCE_S)
        await asyncio.sleep(STACKS_S)
        found = await asyncio.gather(*(self._looks_at(node) for node in self._fleet.nodes))
        return [look for looks in found for look in looks]

    async def _looks_at(self, node: Node) -> list[Look]:
        try:
            answer = await asyncio.wait_for(node.channel.request("seen"), PATIENCE_S)
        except (PacelineError, ConnectionError, asyncio.TimeoutError):
            return []
        return [_look(node.name, said) for said in answer["ranks"]]


def _look(host: str, said: dict[str, Any]) -> Look:
    frames = parse(str(line) for line in said["stack"])
    stand = Stand(host, int(said["rank"]), str(said["state"]), frames)
    return Look(stand, float(said["cpu_s"]), int(said["pid"]))
