"""Watches running ranks for hangs. It reports hangs and ends nothing itself.

A long evaluation, a compilation or a slow download is quiet, too. So silence only leads to an
inspection of the ranks' stacks; it is a hang if some ranks wait in a collective for others that do
not move (:mod:`.hang_verdict`). The job may go on between two snapshots. So a hang is reported only
if all ranks are at the same place in three snapshots and have begun no other collective.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from paceline.launch.health.hang_verdict import (
    Hang,
    RankSnapshot,
    describe_frozen,
    diagnose,
    has_progressed,
    latest_calls,
    persists,
)
from paceline.launch.health.heartbeats import MIN_IDLE_S, HeartbeatStats, positions_json
from paceline.launch.nodes.fleet import Fleet, Node, try_request
from paceline.spec.events import Event

UNREPORTED_IDLE_S = 15.0  # without CPU time, for ranks that report no steps and poll
POLL_S = 1.0
CALLS_S = 2.0  # without CPU time, before the collectives of ranks without steps are read
REINSPECT_S = 8.0  # between inspections of ranks that are known to hang
MAX_PAUSE_S = 15.0  # between inspections of ranks that are idle for long
REPORT_PERIOD_S = 2.0  # between reports of the ranks' phases
SNAPSHOT_GAP_S = 1.2  # between two snapshots of the same ranks
TIMEOUT_S = 5.0  # for a node's answer, with what it waits for itself
MIN_STOP_IDLE_S = 5.0  # without CPU time or a step, before a stopped job is inspected
CLOCK_TOLERANCE_S = 1.0  # between what two nodes report


class HangWatch:
    """Checks every second whether the job goes on, and reports what holds it up.

    Args:
        on_hang: Called with each hang and the seconds since its start, and with ``None`` when the
            job goes on.
        end_hang: Called with a hang that lasts longer than the limit, and that limit. Returns
            whether the job goes on without that rank.
        on_positions: Called regularly with the ranks' positions (:func:`positions_json`) and the
            hang's text.
        limit_s: Seconds after which a hang is ended; ``None`` to measure them if ranks report
            steps; 0 for never.
        ungrouped: Returns the ranks that are in no group, for which nobody waits.
    """

    def __init__(self, fleet: Fleet, on_hang: Callable[[Hang | None, float], None],
                 end_hang: Callable[[Hang, float], bool],
                 on_positions: Callable[[list[dict[str, Any]], str], None],
                 limit_s: float | None = 0.0,
                 ungrouped: Callable[[], Collection[int]] = tuple) -> None:  # fmt: skip
        self._fleet, self._on_positions, self._ungrouped = fleet, on_positions, ungrouped
        self._hosts: dict[int, str] = {}
        self._reported_at, self._reported_hang = -math.inf, ""
        self._on_hang, self._end_hang, self._limit_s = on_hang, end_hang, limit_s
        self.heartbeats = HeartbeatStats()
        self._ended: list[tuple[str, int]] = []
        self._frozen: dict[tuple[str, int], tuple[Event, float]] = {}
        self._hang: Hang | None = None
        self._found: Hang | None = None  # by the latest inspection
        self._no_hang_at = -math.inf  # when an inspection last found none
        self._by_lines = False  # the hang is that of blocked links
        self._hang_started_at = 0.0
        self._seen_at = 0.0  # when the current hang was observed last
        self._ignored_until_s = 0.0  # activity up to then does not contradict the hang
        self._inspect_at = 0.0
        self._calls: dict[int, str] = {}  # the latest collective of each rank
        self._calls_at = -math.inf  # when that was first seen
        self._calls_requested_at = -math.inf

    def heartbeat(self, host: str, rank: int, step: int, phase: str) -> None:
        """Records the step and phase of a rank."""
        self._hosts[rank] = host
        hung = self._hang is not None and self._hang.kind != "busy"
        self.heartbeats.take(rank, step, phase, time.monotonic(), hung=hung)

    def rank_ended(self, host: str, rank: int) -> None:
        """Records that a rank has ended with status 0."""
        self._ended.append((host, rank))

    def on_freeze_event(self, event: Event) -> None:
        """Handles an agent's report that a rank is held up, or no longer."""
        assert event.rank is not None
        if event.kind == "rank thawed":
            self._frozen.pop((event.host, event.rank), None)
            self._ignored_until_s = time.monotonic()  # others may have worked while it was held up
            self._inspect_at = 0.0
            return
        frozen_at = time.monotonic() - float(event["seconds"])
        self._frozen[event.host, event.rank] = (event, frozen_at)
        self._report(self._frozen_hang(event, frozen_at), time.monotonic() - frozen_at)

    def forget_rank(self, host: str, rank: int) -> None:
        """Forgets a rank that has ended."""
        self._frozen.pop((host, rank), None)
        self.heartbeats.beats.pop(rank, None)

    def forget_host(self, host: str) -> None:
        """Forgets the ranks of a lost node, whose numbers others may get."""
        ranks = {rank for rank, place in self._hosts.items() if place == host}
        for rank in ranks | {rank for place, rank in self._frozen if place == host}:
            self.forget_rank(host, rank)

    def report_blocked_links(self, text: str) -> None:
        """Reports blocked links as a hang, unless a rank is held up, which is certain as well."""
        if not self._frozen:
            self._by_lines = True
            self._report(Hang("", None, text, "deaf"), self.idle_s())

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            hang = next((self._frozen_hang(*frozen) for frozen in self._frozen.values()), None)
            if self._hang is not None and hang is None and await self._has_resumed(self._hang):
                self._report_end(time.monotonic())
            await self._request_calls()
            if hang is None and not self._by_lines and self._should_inspect(self.idle_s()):
                hang = self._repeated(await self._inspect(self.idle_s()))
            if hang is not None:
                is_unmeasured = hang.kind == "children"
                since_s = time.monotonic() - self._no_hang_at if is_unmeasured else math.inf
                self._report(hang, min(self.idle_s(), since_s))
            self._apply_limit()
            self._report_positions()

    def _repeated(self, hang: Hang | None) -> Hang | None:
        """Returns what an inspection has found; of ranks' children, only what two in a row found.

        Nobody measures when these have used a CPU last. So inspections also show that they go on.
        """
        previous, self._found = self._found, hang
        self._no_hang_at = time.monotonic() if hang is None else self._no_hang_at
        is_repeated = (hang and hang.at) == (previous and previous.at)
        if hang is None and is_repeated and self._hang and self._hang.kind == "children":
            self._report_end(time.monotonic())
        return None if hang and hang.kind == "children" and not is_repeated else hang

    def _report_positions(self) -> None:
        timestamp, hang = time.monotonic(), "" if self._hang is None else self._hang.text
        is_due = self.heartbeats.beats and timestamp - self._reported_at >= REPORT_PERIOD_S
        if is_due or hang != self._reported_hang:
            self._reported_at, self._reported_hang = timestamp, hang
            self._on_positions(positions_json(self.heartbeats.beats, self._hosts, timestamp), hang)

    def _report(self, hang: Hang, idle_s: float) -> None:
        timestamp = time.monotonic()
        if self._hang is not None and has_progressed(self._hang.calls, hang.calls):
            idle_s = min(idle_s, timestamp - self._seen_at)  # it went on unobserved
            self._report_end(self._seen_at)
        if self._hang is None:
            self._hang_started_at = timestamp - idle_s
            self._ignored_until_s = self._hang_started_at
        if self._hang is None or not self._hang.matches(hang):
            self._on_hang(hang, idle_s)
            self._hang = hang
        elif not self._hang.calls:
            self._hang = replace(self._hang, calls=hang.calls)
        self._seen_at = timestamp

    def _report_end(self, timestamp: float) -> None:
        """Reports that the job has gone on at that time."""
        self._hang, self._by_lines = None, False
        self._on_hang(None, timestamp - self._hang_started_at)

    async def _has_resumed(self, hang: Hang, *, must_inspect: bool = False) -> bool:
        """Returns whether the job goes on again, even if another hang has begun since."""
        active = self._was_active(self._ignored_until_s)
        if self.heartbeats.is_calibrated or not hang.calls or not (active or must_inspect):
            return active
        # An unrelated thread may have used a CPU, and point-to-point messages are no collectives.
        snapshots = await self._take_snapshots(closely=True)
        if snapshots is not None:
            self._record_calls(latest_calls(snapshots))
            # Ranks on a busy host may not answer in time, which is no sign of progress.
            if has_progressed(hang.calls, latest_calls(snapshots)) or not persists(hang, snapshots):
                return True
        self._ignored_until_s = time.monotonic()
        return False

    def _apply_limit(self) -> None:
        if self._hang is None or self._limit_s == 0:
            return
        limit_s = self.heartbeats.limit_s if self._limit_s is None else self._limit_s
        if self._limit_s is None and self._hang.kind in ("busy", "last"):
            return  # its work, or an upload after it, may take any time
        if limit_s is not None and time.monotonic() - self._hang_started_at > limit_s:
            if self._end_hang(self._hang, limit_s):
                self._hang, self._by_lines = None, False
            else:
                self._limit_s = 0.0

    def _active_at(self) -> float | None:
        """Returns when a rank last made a step or, if steps are not reported, used a CPU."""
        if self.heartbeats.is_calibrated:
            return self.heartbeats.received_at
        used_at = self._used_at()
        return None if used_at is None else max(used_at, self._calls_at)

    def _used_at(self) -> float | None:
        """Returns when a rank last used a CPU; ``None`` if unknown."""
        times = [node.active_at for node in self._fleet.nodes if node.active_at is not None]
        return max(times, default=None)

    async def _request_calls(self) -> None:
        """Reads the collectives of ranks that report no steps and use next to no CPU."""
        used_at, timestamp = self._used_at(), time.monotonic()
        if self.heartbeats.is_calibrated or used_at is None or timestamp - used_at < CALLS_S:
            return
        if used_at > self._calls_requested_at:
            self._calls_requested_at = timestamp
            snapshots = await _inspect_nodes(self._fleet, closely=True, stacks=False)
            self._record_calls(latest_calls([snap for snaps in snapshots for snap in snaps or ()]))

    def _record_calls(self, calls: Sequence[tuple[int, str]]) -> None:
        """Records the latest collectives, and when one was new."""
        if calls and has_progressed(tuple(self._calls.items()), calls) is not False:
            self._calls_at = time.monotonic()
        self._calls.update(calls)

    def _was_active(self, timestamp: float) -> bool:
        active_at = self._active_at()
        return active_at is not None and active_at > timestamp + CLOCK_TOLERANCE_S

    def idle_s(self) -> float:
        """Returns the seconds without a step or, if steps are not reported, without CPU time."""
        active_at = self._active_at()
        return 0.0 if active_at is None else max(time.monotonic() - active_at, 0.0)

    @property
    def _max_timeout_s(self) -> float:
        """Half of the limit: a hang must be known before it is ended."""
        return self._limit_s / 2 if self._limit_s else math.inf

    def _should_inspect(self, idle_s: float) -> bool:
        timeout_s = self.heartbeats.timeout_s if self.heartbeats.is_calibrated else MIN_IDLE_S
        if idle_s <= min(timeout_s, self._max_timeout_s) or time.monotonic() < self._inspect_at:
            return False
        pause_s = POLL_S if self._hang is None else REINSPECT_S  # an inspection disturbs them
        self._inspect_at = time.monotonic() + max(pause_s, min(idle_s / 4, MAX_PAUSE_S))
        return True

    def _frozen_hang(self, event: Event, frozen_at: float) -> Hang:
        assert event.rank is not None
        text = describe_frozen(event.host, event.rank, event["how"], time.monotonic() - frozen_at,
                           event["on"] or "", event["pid"])  # fmt: skip
        return Hang(event.host, event.rank, text, "frozen")

    async def _inspect(self, idle_s: float) -> Hang | None:
        """Takes two snapshots of all ranks, and a detailed third one if they hang."""
        active_at = time.monotonic() - idle_s
        first = await self._take_snapshots()
        taken_at = time.monotonic()
        await asyncio.sleep(SNAPSHOT_GAP_S)
        second = await self._take_snapshots(closely=self._has_gpus())
        if first is None or second is None:
            return None
        between_s = time.monotonic() - taken_at
        hang = diagnose(first, second, between_s, idle_s, self._ended)
        if hang is None or not (
            hang.is_certain or idle_s > min(UNREPORTED_IDLE_S, self._max_timeout_s)
        ):
            return None
        detailed = await self._take_snapshots(closely=True)
        if detailed is None:
            return None
        self._record_calls(latest_calls(detailed))
        if self._was_active(active_at):
            return None
        return diagnose(first, second, between_s, idle_s, self._ended, detailed)

    def _has_gpus(self) -> bool:
        """Returns whether collectives may be unfinished while the script is anywhere."""
        return any((node.facts.get("devices") or {}).get("gpus") for node in self._fleet.nodes)

    async def diagnose_stop(self) -> Hang | None:
        """Returns what holds the job up at the moment when the user stops it."""
        if self._frozen:
            return self._frozen_hang(*next(iter(self._frozen.values())))
        if self._hang is not None and await self._has_resumed(self._hang, must_inspect=True):
            return None
        if self._hang is not None and self._hang.kind not in ("frozen", "children"):
            return self._hang
        idle_s = self.idle_s()
        expected_s = self.heartbeats.expected_gap_s if self.heartbeats.is_calibrated else 0.0
        if idle_s < max(MIN_STOP_IDLE_S, expected_s):
            return None
        return self._repeated(await self._inspect(idle_s))

    async def _take_snapshots(self, closely: bool = False) -> list[RankSnapshot] | None:
        """Takes snapshots of all ranks; ``None`` if a node with ranks does not answer."""
        snapshots = await _inspect_nodes(self._fleet, closely)
        if None in snapshots:
            return None
        ungrouped = self._ungrouped()
        return [snap for snaps in snapshots for snap in snaps or ()
                if snap.stack.rank not in ungrouped]  # fmt: skip


async def inspect_ranks(fleet: Fleet) -> list[RankSnapshot]:
    """Takes snapshots of all ranks on the nodes that answer."""
    return [snap for snaps in await _inspect_nodes(fleet, False) for snap in snaps or ()]


async def inspect_host(fleet: Fleet, host: str, closely: bool = False) -> list[RankSnapshot] | None:
    """Takes snapshots of the ranks of one host; ``None`` if it does not answer or is lost."""
    node = next((node for node in fleet.nodes if node.name == host and not node.lost), None)
    if node is None:
        return None
    if await try_request(node, "dump_stacks", TIMEOUT_S, closely=closely, stacks=True) is None:
        return None
    return await _inspect_node(node, closely)


async def _inspect_nodes(
    fleet: Fleet, closely: bool, stacks: bool = True
) -> list[list[RankSnapshot] | None]:
    """Takes snapshots by node; ``None`` for a node with ranks that does not answer."""
    await fleet.tell("dump_stacks", wait_s=TIMEOUT_S, closely=closely, stacks=stacks)
    nodes = [node for node in fleet.nodes if not node.lost]
    return await asyncio.gather(*(_inspect_node(node, closely and stacks) for node in nodes))


async def _inspect_node(node: Node, closely: bool) -> list[RankSnapshot] | None:
    answer = await try_request(node, "seen", TIMEOUT_S, closely=closely)
    if answer is None:
        return None if node.running else []
    return [RankSnapshot.from_report(node.name, report) for report in answer["ranks"]]
