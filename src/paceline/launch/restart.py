"""After a failure: whether the job starts again, and on which nodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from paceline.launch.allowance import LOSSES, STARTS, Allowance, span
from paceline.launch.board import Waiting
from paceline.launch.fleet import Fleet, Node
from paceline.launch.muster import Muster, Waits, unseen
from paceline.launch.outcome import about_full_disk, size_words
from paceline.launch.outset import Outset, by_chance
from paceline.launch.prepare import Request
from paceline.spec.errors import PacelineError
from paceline.spec.failure import Failure
from paceline.spec.helptext import counted

ROOM = 16 << 20  # bytes without which no checkpoint and no log can be written


class Restarts:
    """Decides what follows an attempt that has failed, or that more nodes can join.

    Args:
        request: What is to run, and where.
        fleet: The nodes.
        note: Tells the user.
        waits: Told that too few nodes are there and others are waited for, and ``None`` when that
            is over.
    """

    def __init__(self, request: Request, fleet: Fleet, note: Callable[[str], None],
                 waits: Waits = unseen) -> None:  # fmt: skip
        job, self._waits = request.job, waits
        self._request, self._fleet, self._note = request, fleet, note
        self.allowance = Allowance(job.max_restarts.value, job.restart_window_s.value)
        self._order = [host.name for host in request.hosts]
        self._had_ranks: set[str] = set()
        self._why, self._count = "", ""  # of the next start
        self._least, self._patience_s = request.least, job.wait_for_nodes_s.value

    @property
    def counted(self) -> int:
        """How many restarts followed a failure that counts."""
        return self.allowance.counted

    async def allowed(self, failure: Failure, leaving: Sequence[Node], ran_s: float,
                      outset: Outset | None = None) -> bool:  # fmt: skip
        """Whether the job goes on after a failure, as far as that is its own.

        That a node was lost, or is about to go, is no failure of a job that can do with fewer. What
        is lost by chance before the first step is none either, a few times.

        Args:
            failure: The first of the attempt.
            leaving: Nodes that were asked to end: they are sent home.
            ran_s: How long the ranks had run.
            outset: Whether they had come to a step; ``None``: they have gone on after a loss.
        """
        job = self._request.job
        self._why, self._count = failure.describe(), ""
        self._least, self._patience_s = self._request.least, job.wait_for_nodes_s.value
        if outset is None or outset.over:
            self.allowance.began()
        if failure.kind == "stranger":
            self._note("paceline: the job is not started again while somebody interferes with it")
            return False
        if self._request.elastic and await self._lost_some(failure, leaving):
            return True
        if why := await full_disk(self._fleet, failure):
            self._note(f"paceline: {why}: the job is not started again")
            return False
        if outset is not None and not outset.over and await self._by_chance(failure):
            verdict = self.allowance.begins_again()
            if verdict.again:
                self._begin_again(outset, verdict.number)
                return True
            self._note(f"paceline: not begun again: {verdict.why}")
        told = "" if outset is None else outset.last_told
        verdict = self.allowance.after(failure, time.monotonic(), ran_s=ran_s, told=told)
        self._count = f", {verdict.number} of {self._request.job.max_restarts.value}"
        if verdict.why:
            self._note(f"paceline: not started again: {verdict.why}")
        return verdict.again

    async def _lost_some(self, failure: Failure, leaving: Sequence[Node]) -> bool:
        """Whether nodes were lost, or asked to end, and that is why the attempt failed."""
        fleet = self._fleet
        if leaving and len(leaving) < len(fleet.nodes):
            await asyncio.gather(*(fleet.dismiss(node) for node in leaving))
            return not self._own(failure)
        if fleet.whole and (failure.echo or failure.wished):  # of what is not known yet?
            deadline = time.monotonic() + fleet.lease_s / 2 + 1
            while fleet.whole and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
        return not fleet.whole and not self._own(failure)

    async def _by_chance(self, failure: Failure) -> bool:
        """Whether an attempt that had not come to its first step failed by nobody's fault.

        Not where no start but the first is wanted.
        """
        if not self._request.begins_again:
            return False
        if failure.echo:
            await self._fleet.doubts_settled()
            return not self._fleet.whole
        return by_chance(failure)

    def _begin_again(self, outset: Outset, number: int) -> None:
        """A session goes on with fewer nodes, as it does later; a script needs all it was given."""
        self._count = f", before the first step ({number} of {STARTS - 1})"
        self._least = self._request.least_again(outset.session)
        if not outset.session:
            self._patience_s = self._request.patience_s

    def _own(self, failure: Failure) -> bool:
        """Whether a rank failed by itself, with no loss at about that time that could be why.

        What was lost before, and recovered from, is still missing then.
        """
        if failure.rank is None or failure.echo or failure.wished:
            return False
        lost = [node for node in self._fleet.nodes if node.lost and not node.outlived]
        return all(abs(failure.time - node.lost_at) > self._fleet.lease_s for node in lost)

    def _there(self) -> list[Node]:
        """The nodes that can have ranks: those that had some first, as they were."""
        fleet = self._fleet
        ready = [node for node in fleet.spares if node.could_start and node.found is not None]
        ready.sort(key=lambda node: self._order.index(node.name))
        return [*(node for node in fleet.nodes if not node.lost), *ready]

    async def line_up(self, muster: Muster) -> bool:
        """Chooses the nodes of the next start; lost ones are called, and waited for if need be.

        False, when there are too few and nobody came in time.
        """
        fleet, least, most = self._fleet, self._least, self._request.most
        self._had_ranks.update(node.name for node in fleet.nodes)
        lost = [node for node in fleet.nodes if node.lost]
        for node in lost:
            if self.allowance.lost(node.name, time.monotonic()):
                muster.call_again(node)
            else:
                self._note(f"paceline: {node.name} was lost {LOSSES} times: it is left out")
        waits = len(self._there()) < least
        if waits and not await self._wait(lost, muster, least):
            return False
        chosen = self._there()[:most]
        stayed = [node.name for node in fleet.nodes if not node.lost]
        fleet.seat(chosen)
        came = [node.name for node in chosen if node.name not in stayed]
        if lost and not waits:
            names = ", ".join(node.name for node in chosen)
            self._why += f"; going on with {names}"
        elif came:
            where = "back" if self._had_ranks.issuperset(came) else "here"
            self._why = f"{', '.join(came)} {'is' if len(came) == 1 else 'are'} {where}"
        self._note(f"paceline: {self._why}; starting all nodes again{self._count}")
        self._count = ""
        return True

    async def _wait(self, lost: Sequence[Node], muster: Muster, least: int) -> bool:
        """Until there are enough nodes; whether they came in time."""
        self._note(f"paceline: {self._why}")
        if not self._request.transport.redials:
            names = ", ".join(node.name for node in lost)
            self._note(f"paceline: {names} cannot be joined again in this way of starting nodes:"
                       " run again")  # fmt: skip
            return False
        patience = span(self._patience_s)
        if names := ", ".join(muster.called):
            dialling = f"dialling {names} again, for up to {patience}"
            self._note(f"paceline: {dialling}")
            here = f"{counted(len(self._there()), 'node')} of at least {least}"
            self._waits(Waiting.now(f"{here}: {dialling}", self._patience_s))
            try:
                if await muster.until(lambda: len(self._there()) >= least, self._patience_s):
                    return True
            finally:
                self._waits(None)
        here = f"{counted(len(self._there()), 'node')} of at least {least}"
        if muster.called:
            names = ", ".join(muster.missing)
            self._note(f"paceline: {here} after {patience}: {names} did not come back")
        else:
            self._note(f"paceline: {here}, and no other is waited for: not started again")
        return False


async def full_disk(fleet: Fleet, failure: Failure) -> str:
    """Why it is no use to start again on a disk that was full and still is; else empty."""
    node = next((node for node in fleet.nodes if node.name == failure.host), None)
    if node is None or node.lost or not about_full_disk(failure):
        return ""
    try:
        answer = await node.channel.request("disk", paths=[node.run_folder])
    except (PacelineError, ConnectionError):
        return ""
    (disk,) = answer["disks"]
    free = disk.get("free")
    if not isinstance(free, int) or free >= ROOM:
        return ""
    return f"the disk of {disk['path']} on {node.name} is still full ({size_words(free)} free)"
