"""Hangs: noticed from what ranks say and from how quiet they are, and told with the line.

:mod:`.verdict` decides from two looks at all ranks; :class:`HangWatch` takes them. It ends nothing
itself. A long evaluation, a compilation or a slow download look quiet, too: so a silence only makes
us look at the ranks' stacks, and only where some wait in a collective for others that do not move
is it called a hang. Looks at ranks are of different moments, and a job may go on between any two:
so nothing is told of ranks that are not where they were at each of three looks, or that have begun
another collective. By its number two hangs at one line are told apart, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from paceline.launch.health.hang_verdict import (
    Hang,
    Look,
    begun,
    frozen_text,
    judge,
    stays,
    went_on,
)
from paceline.launch.health.heartbeats import LEAST_S, Heartbeats, told
from paceline.launch.nodes.fleet import Fleet, Node
from paceline.spec.errors import PacelineError
from paceline.spec.events import Event

UNTOLD_S = 15.0  # without CPU time, of ranks that tell nothing and look up now and then
LOOK_S = 1.0
CALLS_S = 2.0  # without CPU time, until ranks that tell no steps are asked for their collectives
AGAIN_S = 8.0  # at ranks that are known to hang
WHERE_S = 2.0  # between two tellings of where the ranks are
BETWEEN_S = 1.2  # between two looks at the same ranks
PATIENCE_S = 5.0  # for a node's answer, with what it waits for itself
QUIET_S = 5.0  # without CPU time or a step, that a job is looked at for when somebody stops it
SURE_S = 1.0  # by which what is heard of two nodes may be apart


class HangWatch:
    """Looks every second whether the job goes on, and tells what keeps it.

    Args:
        fleet: The nodes.
        told: Called with every hang that is found, and with ``None`` when the job goes on again.
        over: Called with a hang that has lasted for too long, and for how long that may be. True
            when the job goes on without that rank.
        where: Called now and then with where the ranks are (see ``beats.told``), and the hang.
        limit_s: How long that is; ``None``: measured, where ranks tell their steps; 0: never.
        outside: Ranks that are in no group: nobody waits for them.
    """

    def __init__(self, fleet: Fleet, on_hang: Callable[[Hang | None, float], None],
                 end_hang: Callable[[Hang, float], bool],
                 where: Callable[[list[dict[str, Any]], str], None],
                 limit_s: float | None = 0.0,
                 outside: Callable[[], Collection[int]] = tuple) -> None:  # fmt: skip
        self._fleet, self._where, self._outside = fleet, where, outside
        self._hosts: dict[int, str] = {}
        self._where_at, self._where_hang = -math.inf, ""
        self._told, self._over, self._limit_s = on_hang, end_hang, limit_s
        self.heartbeats = Heartbeats()
        self._ended: list[tuple[str, int]] = []
        self._frozen: dict[tuple[str, int], tuple[Event, float]] = {}
        self._hang: Hang | None = None
        self._by_lines = False  # it is known which hosts do not hear each other
        self._since = 0.0  # of the hang that was told
        self._seen_at = 0.0  # the same hang, the last time
        self._still_until = 0.0  # what ranks did up to then does not speak against it
        self._next_look = 0.0
        self._begun: dict[int, str] = {}  # the collective that each rank has begun last
        self._begun_at = -math.inf  # when that was first seen
        self._asked_at = -math.inf  # for it

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
            self._still_until = time.monotonic()  # others may have worked while it was held up
            self._next_look = 0.0
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

    def deaf(self, text: str) -> None:
        """Ranks wait because hosts do not hear each other: told as a hang, whatever looks show.

        Not where a rank is held up, which is known for certain, too.
        """
        if not self._frozen:
            self._by_lines = True
            self._tell(Hang("", None, text, "deaf"), self.silent_s())

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            held = next((self._held(*frozen) for frozen in self._frozen.values()), None)
            if self._hang is not None and held is None and await self._goes_on(self._hang):
                self._tell_end(time.monotonic())
            await self._ask_calls()
            hang = held
            if hang is None and not self._by_lines and self._suspicious(self.silent_s()):
                hang = await self._inspect(self.silent_s())
            if hang is not None:
                self._tell(hang, self.silent_s())
            self._judge_limit()
            self._tell_where()

    def _tell_where(self) -> None:
        now, hang = time.monotonic(), "" if self._hang is None else self._hang.text
        due = self.heartbeats.beats and now - self._where_at >= WHERE_S
        if due or hang != self._where_hang:
            self._where_at, self._where_hang = now, hang
            self._where(told(self.heartbeats.beats, self._hosts, now), hang)

    def _tell(self, hang: Hang, silent_s: float) -> None:
        now = time.monotonic()
        if self._hang is not None and went_on(self._hang.begun, hang.begun):
            silent_s = min(silent_s, now - self._seen_at)  # nobody looked when it went on
            self._tell_end(self._seen_at)
        if self._hang is None:
            self._since = now - silent_s
            self._still_until = self._since
        if self._hang is None or not self._hang.same(hang):
            self._told(hang, silent_s)
            self._hang = hang
        elif not self._hang.begun:
            self._hang = replace(self._hang, begun=hang.begun)
        self._seen_at = now

    def _tell_end(self, now: float) -> None:
        """The job goes on, or has done so since."""
        self._hang, self._by_lines = None, False
        self._told(None, now - self._since)

    async def _goes_on(self, hang: Hang, *, surely: bool = False) -> bool:
        """Whether the job goes on again: a hang may be over before we look, and another begin.

        Args:
            surely: Asks the ranks even if none has used a CPU.
        """
        active = self._active_since(self._still_until)
        if self.heartbeats.known or not hang.begun or not (active or surely):
            return active
        # a CPU may have been used by a thread that has nothing to do with it; and what two ranks
        # send each other is no collective
        looks = await self._looks(closely=True)
        if looks is not None:
            self._note(begun(looks))
            if went_on(hang.begun, begun(looks)) is not False or not stays(hang, looks):
                return True
        self._still_until = time.monotonic()
        return False

    def _judge_limit(self) -> None:
        if self._hang is None or self._limit_s == 0:
            return
        limit_s = self.heartbeats.limit_s if self._limit_s is None else self._limit_s
        if self._limit_s is None and self._hang.kind in ("busy", "last"):
            return  # how long its work, or an upload after it, may take nobody has said
        if limit_s is not None and time.monotonic() - self._since > limit_s:
            if self._over(self._hang, limit_s):
                self._hang, self._by_lines = None, False
            else:
                self._limit_s = 0.0

    def _active_at(self) -> float | None:
        """When a rank made a step last, as far as that is told; else used a CPU."""
        if self.heartbeats.known:
            return self.heartbeats.last_at
        used_at = self._used_at()
        return None if used_at is None else max(used_at, self._begun_at)

    def _used_at(self) -> float | None:
        """When a rank used a CPU last."""
        times = [node.active_at for node in self._fleet.nodes if node.active_at is not None]
        return max(times, default=None)

    async def _ask_calls(self) -> None:
        """Steps of ranks that tell none may need next to no CPU: their collectives show them."""
        used_at, now = self._used_at(), time.monotonic()
        if self.heartbeats.known or used_at is None or now - used_at < CALLS_S:
            return
        if used_at > self._asked_at:
            self._asked_at = now
            looks = await _look(self._fleet, closely=True, stacks=False)
            self._note(begun([look for some in looks if some for look in some]))

    def _note(self, calls: Sequence[tuple[int, str]]) -> None:
        """Which collectives ranks have begun by now."""
        if calls and went_on(tuple(self._begun.items()), calls) is not False:
            self._begun_at = time.monotonic()
        self._begun.update(calls)

    def _active_since(self, when: float) -> bool:
        active_at = self._active_at()
        return active_at is not None and active_at > when + SURE_S

    def silent_s(self) -> float:
        """Seconds without a step, or of a script that tells none, without a CPU's work."""
        active_at = self._active_at()
        return 0.0 if active_at is None else max(time.monotonic() - active_at, 0.0)

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
        since = time.monotonic() - silent_s
        before = await self._looks()
        looked_at = time.monotonic()
        await asyncio.sleep(BETWEEN_S)
        after = await self._looks()
        if before is None or after is None:
            return None
        between_s = time.monotonic() - looked_at
        hang = judge(before, after, between_s, silent_s, self._ended)
        if hang is None or not (hang.sure or silent_s > min(UNTOLD_S, self._hurry_s)):
            return None
        closely = await self._looks(closely=True)
        if closely is None:
            return None
        self._note(begun(closely))
        if self._active_since(since):
            return None
        return judge(before, after, between_s, silent_s, self._ended, closely)

    async def at_the_end(self) -> Hang | None:
        """What holds the job up, when somebody stops it."""
        if self._frozen:
            return self._held(*next(iter(self._frozen.values())))
        if self._hang is not None and await self._goes_on(self._hang, surely=True):
            return None
        if self._hang is not None and self._hang.kind != "frozen":
            return self._hang
        silent_s = self.silent_s()
        usual_s = self.heartbeats.usual_s if self.heartbeats.known else 0.0
        return None if silent_s < max(QUIET_S, usual_s) else await self._inspect(silent_s)

    async def _looks(self, closely: bool = False) -> list[Look] | None:
        """At all ranks; ``None`` when a node that has some does not answer."""
        looks = await _look(self._fleet, closely)
        if None in looks:
            return None
        outside = self._outside()
        return [look for some in looks for look in some or () if look.stand.rank not in outside]


async def look_at_all(fleet: Fleet) -> list[Look]:
    """What every rank does at this moment, of the nodes that answer."""
    return [look for looks in await _look(fleet, False) if looks for look in looks]


async def looks_at_host(fleet: Fleet, host: str, closely: bool = False) -> list[Look] | None:
    """What the ranks of one host do; ``None`` where it does not answer, or is not there."""
    node = next((node for node in fleet.nodes if node.name == host and not node.lost), None)
    if node is None:
        return None
    asking: Any = node.channel.request("dump_stacks", closely=closely, stacks=True)
    with contextlib.suppress(PacelineError, ConnectionError, asyncio.TimeoutError):
        await asyncio.wait_for(asking, PATIENCE_S)
        return await _looks_at(node, closely)
    return None


async def _look(fleet: Fleet, closely: bool, stacks: bool = True) -> list[list[Look] | None]:
    """By node; ``None`` of one that has ranks and does not answer."""
    await fleet.tell("dump_stacks", patience_s=PATIENCE_S, closely=closely, stacks=stacks)
    nodes = [node for node in fleet.nodes if not node.lost]
    return await asyncio.gather(*(_looks_at(node, closely and stacks) for node in nodes))


async def _looks_at(node: Node, closely: bool) -> list[Look] | None:
    request: Any = node.channel.request("seen", closely=closely)
    try:
        answer = await asyncio.wait_for(request, PATIENCE_S)
    except (PacelineError, ConnectionError, asyncio.TimeoutError):
        return None if node.running else []
    return [Look.told(node.name, report) for report in answer["ranks"]]
