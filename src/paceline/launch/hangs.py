"""Hangs: noticed from what ranks say and from how quiet they are, and told with the line.

:mod:`.verdict` decides from two looks at all ranks; :class:`HangWatch` takes them. It ends nothing
itself. A long evaluation, a compilation or a slow download look quiet, too: so a silence only makes
us look at the ranks' stacks, twice, and only where some wait in a collective for others that do not
move is it called a hang.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

from paceline.launch.beats import LEAST_S, Heartbeats, told
from paceline.launch.fleet import Fleet, Node
from paceline.launch.verdict import Hang, Look, frozen_text, judge
from paceline.spec.errors import PacelineError
from paceline.spec.events import Event

UNTOLD_S = 15.0  # without CPU time, of ranks that tell nothing and look up now and then
LOOK_S = 1.0
AGAIN_S = 8.0  # at ranks that are known to hang
WHERE_S = 2.0  # between two tellings of where the ranks are
STACKS_S = 0.3  # until asked stacks have come
CLOSELY_S = 0.6  # until the ranks' recorders have answered, too
BETWEEN_S = 1.2  # between two looks at the same ranks
PATIENCE_S = 3.0  # for a node's answer
QUIET_S = 2.0  # without CPU time: then one look is enough


class HangWatch:
    """Looks every second whether the job goes on, and tells what keeps it.

    Args:
        fleet: The nodes.
        told: Called with every hang that is found, and with ``None`` when the job goes on again.
        over: Called with a hang that has lasted for too long, and for how long that may be. True
            when the job goes on without that rank.
        where: Called now and then with where the ranks are (see ``beats.told``), and the hang.
        limit_s: How long that is; ``None``: measured, where ranks tell their steps; 0: never.
    """

    def __init__(self, fleet: Fleet, told: Callable[[Hang | None, float], None],
                 over: Callable[[Hang, float], bool],
                 where: Callable[[list[dict[str, Any]], str], None],
                 limit_s: float | None = 0.0) -> None:  # fmt: skip
        self._fleet, self._where = fleet, where
        self._hosts: dict[int, str] = {}
        self._where_at, self._where_hang = -math.inf, ""
        self._told, self._over, self._limit_s = told, over, limit_s
        self.heartbeats = Heartbeats()
        self._ended: list[tuple[str, int]] = []
        self._frozen: dict[tuple[str, int], tuple[Event, float]] = {}
        self._hang: Hang | None = None
        self._since = 0.0  # of the hang that was told
        self._next_look = 0.0

    def heartbeat(self, host: str, rank: int, step: int, phase: str) -> None:
        """A rank has told what it does."""
        self._hosts[rank] = host
        hung = self._hang is not None and self._hang.kind != "busy"
        self.heartbeats.take(rank, step, phase, time.monotonic(), hung=hung)

    def ended(self, host: str, rank: int) -> None:
        """A rank has ended with status 0."""
        self._ended.append((host, rank))

    def frozen(self, event: Event) -> None:
        """An agent has told that a rank is held up, or is no longer."""
        assert event.rank is not None
        if event.kind == "rank thawed":
            self._frozen.pop((event.host, event.rank), None)
            return
        since = time.monotonic() - float(event["seconds"])
        self._frozen[event.host, event.rank] = (event, since)
        self._tell(self._held(event, since), time.monotonic() - since)

    def gone(self, host: str, rank: int) -> None:
        """A rank has ended in whatever way: what was known of it holds no longer."""
        self._frozen.pop((host, rank), None)
        self.heartbeats.beats.pop(rank, None)

    def lost(self, host: str) -> None:
        """A node has gone, and nobody tells of its ranks any more: others may get their numbers."""
        told = {rank for rank, where in self._hosts.items() if where == host}
        for rank in told | {rank for where, rank in self._frozen if where == host}:
            self.gone(host, rank)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            silent_s = self._silent_s()
            held = next((self._held(*one) for one in self._frozen.values()), None)
            if self._hang is not None and held is None and silent_s < LOOK_S * 2:
                self._told(None, time.monotonic() - self._since)
                self._hang = None
            hang = held
            if hang is None and self._suspicious(silent_s):
                hang = await self._inspect(silent_s)
            if hang is not None:
                self._tell(hang, silent_s)
            self._judge_limit()
            self._tell_where()

    def _tell_where(self) -> None:
        now, hang = time.monotonic(), "" if self._hang is None else self._hang.text
        due = self.heartbeats.beats and now - self._where_at >= WHERE_S
        if due or hang != self._where_hang:
            self._where_at, self._where_hang = now, hang
            self._where(told(self.heartbeats.beats, self._hosts, now), hang)

    def _tell(self, hang: Hang, silent_s: float) -> None:
        if self._hang is None:
            self._since = time.monotonic() - silent_s
        if self._hang is None or not self._hang.same(hang):
            self._told(hang, silent_s)
            self._hang = hang

    def _judge_limit(self) -> None:
        if self._hang is None or self._limit_s == 0:
            return
        limit_s = self.heartbeats.limit_s if self._limit_s is None else self._limit_s
        if self._limit_s is None and self._hang.kind == "busy":
            return  # it works: how long that may take nobody has said
        if limit_s is not None and time.monotonic() - self._since > limit_s:
            if self._over(self._hang, limit_s):
                self._hang = None
            else:
                self._limit_s = 0.0

    def _silent_s(self) -> float:
        """How long no rank has made a step, as far as that is told; else used no CPU."""
        if self.heartbeats.known:
            return self.heartbeats.silent_s(time.monotonic())
        quiet = [node.quiet_s for node in self._fleet.nodes if node.quiet_s is not None]
        return min(quiet, default=0.0)

    @property
    def _hurry_s(self) -> float:
        """Half of what was asked for: a hang is to be known before it is to be ended."""
        return self._limit_s / 2 if self._limit_s else math.inf

    def _suspicious(self, silent_s: float) -> bool:
        patience_s = self.heartbeats.patience_s if self.heartbeats.known else LEAST_S
        if silent_s <= min(patience_s, self._hurry_s) or time.monotonic() < self._next_look:
            return False
        again_s = LOOK_S if self._hang is None else AGAIN_S  # a look disturbs them
        self._next_look = time.monotonic() + max(again_s, silent_s / 4)
        return True

    def _held(self, event: Event, since: float) -> Hang:
        assert event.rank is not None
        text = frozen_text(event.host, event.rank, event["how"], time.monotonic() - since,
                           event["on"] or "", event["pid"])  # fmt: skip
        return Hang(event.host, event.rank, text, "frozen")

    async def _inspect(self, silent_s: float) -> Hang | None:
        """Looks at all ranks twice, and once more closely when they hang."""
        before = await self._looks()
        await asyncio.sleep(BETWEEN_S)
        after = await self._looks()
        hang = judge(before, after, BETWEEN_S + STACKS_S, silent_s, self._ended)
        if hang is None or not (hang.sure or silent_s > min(UNTOLD_S, self._hurry_s)):
            return None
        closely = await self._looks(closely=True)
        return judge(before, after, BETWEEN_S + STACKS_S, silent_s, self._ended, closely)

    async def at_the_end(self) -> Hang | None:
        """One quick look, when somebody stops a job that may hang."""
        if self._hang is not None or self._silent_s() < QUIET_S:
            return self._hang
        quiet = [node.quiet_s or 0.0 for node in self._fleet.nodes]
        if min(quiet, default=0.0) < QUIET_S:
            return None
        looks = await self._looks(closely=True)  # nobody has used a CPU for a while: nobody moves
        return judge(looks, looks, 1.0, self._silent_s(), self._ended)

    async def _looks(self, closely: bool = False) -> list[Look]:
        return await look_at_all(self._fleet, closely)


async def look_at_all(fleet: Fleet, closely: bool = False) -> list[Look]:
    """What every rank does at this moment, of the nodes that answer."""
    await fleet.tell("dump_stacks", patience_s=PATIENCE_S, closely=closely)
    await asyncio.sleep(CLOSELY_S if closely else STACKS_S)
    nodes = [node for node in fleet.nodes if not node.lost]
    found = await asyncio.gather(*(_looks_at(node, closely) for node in nodes))
    return [look for looks in found for look in looks]


async def _looks_at(node: Node, closely: bool) -> list[Look]:
    request: Any = node.channel.request("seen", closely=closely)
    try:
        answer = await asyncio.wait_for(request, PATIENCE_S)
    except (PacelineError, ConnectionError, asyncio.TimeoutError):
        return []
    return [Look.told(node.name, said) for said in answer["ranks"]]
