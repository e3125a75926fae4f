"""One start of all nodes, watched to the end of its last rank."""

from __future__ import annotations

import asyncio
import signal
import time

from paceline.launch import outcome
from paceline.launch.fleet import Fleet, Node, first_of, together, within
from paceline.launch.hangs import Hang, HangWatch
from paceline.launch.interrupts import Interrupts
from paceline.launch.recorder import Recorder
from paceline.launch.screen import Screen
from paceline.spec import jobenv
from paceline.spec.events import Event
from paceline.spec.failure import Failure, Result, signal_name
from paceline.spec.job import Job
from paceline.spec.plan import NodePlan, Plan, entry_json

FAILURE_GRACE_S = 3.0  # for the others, once one rank has failed
END_PATIENCE_S = 3.0  # after SIGKILL, until a node that does not answer is given up
AT_ONCE_S = 0.8  # the same when the user has asked twice


class Attempt:
    """Starts the ranks of a plan and sees them to their end.

    Args:
        plan: What runs where.
        job: For the values that the plan does not record.
        fleet: The nodes, in the plan's order.
        interrupts: The user's signals.
        screen, recorder: Where things are shown and written down.
    """

    def __init__(self, plan: Plan, job: Job, fleet: Fleet, interrupts: Interrupts,
                 screen: Screen, recorder: Recorder) -> None:  # fmt: skip
        self.plan = plan
        self.joined = 0
        self.watching = False
        self._job = job
        self._fleet = fleet
        self._interrupts = interrupts
        self._screen = screen
        self._recorder = recorder
        self._failures: list[Failure] = []
        self._early: list[Failure] = []  # not failures unless others still needed them
        self._failed = asyncio.Event()
        self._ended = asyncio.Event()
        self._hangs = HangWatch(fleet, self._hang_told, self._hang_over, job.hang_timeout_s.value)

    async def run(self) -> Result:
        """From the start of the ranks to the end of the last."""
        parts = list(zip(self._fleet.nodes, self.plan.nodes, strict=True))
        for node, _ in parts:
            node.running, node.quiet_s, node.frozen = True, None, {}
        begun = time.monotonic()
        await together([self._start(node, part) for node, part in parts])
        self.watching = True
        self._recorder.next_attempt()
        self._recorder.event("started", attempt=self.plan.attempt, world_size=self.plan.world_size)
        watching = asyncio.ensure_future(self._hangs.run())
        try:
            result = await self._watch()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        self._screen.flush()
        seconds = round(time.monotonic() - begun, 3)
        self._recorder.event(
            "ended", attempt=self.plan.attempt, exit_code=result.exit_code, seconds=seconds
        )
        return result

    async def _start(self, node: Node, part: NodePlan) -> None:
        env = {name: setting.value for name, setting in part.env.items()}
        env[jobenv.RUN_DIR] = node.run_folder
        env[jobenv.HOME_DIR] = self._recorder.shown_path
        store = {"address": self.plan.master_addr, "port": self.plan.master_port}
        await node.channel.request(
            "start",
            entry=entry_json(part.entry),
            workdir=part.workdir,
            env={**self._job.environment.all(), **env},  # the plan leaves out what goes before it
            any_world=self._job.any_world,
            store=store if self.plan.agent_store and part.node_rank == 0 else None,
            ranks=self.plan.ranks_json(part),
        )

    # --- the end -----------------------------------------------------------------------------

    async def _watch(self) -> Result:
        """Until all ranks are over: by themselves, after a failure, or by the user's signal."""
        await first_of(self._ended.wait(), self._failed.wait(), self._interrupts.wait())
        if self._interrupts.received:
            return await self._stop_for_user()
        if self._failures:
            return await self._stop_after_failure()
        return Result(0)

    async def _stop_after_failure(self) -> Result:
        """Waits for an earlier failure that is still on its way, then ends the others."""
        if all(failure.echo for failure in self._failures):
            await self._fleet.tell("dump_stacks")  # whoever waits in vain: what do the others do?
        patience = asyncio.sleep(outcome.settle_time(self._failures))
        await first_of(self._ended.wait(), self._interrupts.wait(), patience)
        away = self._fleet.absence
        known = outcome.own_absence(
            outcome.early_end(self._failures, self._early),
            away.seconds if away else 0.0,
            self._fleet.lease_s,
        )
        wished = all(failure.wished for failure in known)
        if wished and self._interrupts.received:
            return await self._stop_for_user()
        grace_s = self._job.grace_s.value if wished else FAILURE_GRACE_S
        await first_of(self._stop_all(grace_s), self._interrupts.wait())
        if self._interrupts.received:
            await self._fleet.tell("kill", patience_s=AT_ONCE_S)
            await within(self._ended.wait(), AT_ONCE_S)
        # what came after the stop may complete what was known, but is no failure of its own
        complete = {(f.host, f.rank): f for f in outcome.merge(self._failures)}
        first = outcome.first(known)
        if first.kind != "launcher":
            first = complete.get((first.host, first.rank), first)
        return Result(first.status, first, others=len(outcome.merge(known)) - 1)

    async def _stop_for_user(self) -> Result:
        """Once: TERM, and KILL after the grace. Twice: KILL at once."""
        signum = self._interrupts.received[0]
        name = signal_name(signum)
        self._screen.note(f"paceline: {name}: stopping (once more to stop at once)")
        if hang := await self._hangs.at_the_end():
            self._recorder.event("hang", hang.host or None, hang.rank, text=hang.text)
        stopping = asyncio.ensure_future(self._stop_all(self._job.grace_s.value))
        await first_of(asyncio.shield(stopping), self._interrupts.wait(2))
        if not stopping.done():
            self._screen.note("paceline: stopping at once")
            await self._fleet.tell("kill", patience_s=AT_ONCE_S)
            await within(self._ended.wait(), AT_ONCE_S)
            stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
        return Result(128 + signum, interrupted=signum)

    async def _stop_all(self, grace_s: float) -> None:
        """Returns when all nodes said that nothing is left, or none can be asked any more."""
        await self._fleet.tell("stop", signal=int(signal.SIGTERM), grace_s=grace_s)
        if not await within(self._ended.wait(), grace_s + END_PATIENCE_S):
            await self._fleet.tell("kill")
            await within(self._ended.wait(), END_PATIENCE_S)

    # --- what happens ------------------------------------------------------------------------

    def take(self, node: Node, event: Event) -> None:
        """Hears an agent; only what bears on the attempt's end is of interest here."""
        rank = -1 if event.rank is None else event.rank
        if event.kind == "world joined":
            self.joined += 1
        elif event.kind == "rank started":
            self._hangs.started(rank, event["pid"])
        elif event.kind == "heartbeat":
            self._hangs.heartbeat(rank, str(event["phase"]))
        elif event.kind == "exception" and not event["hooked"]:
            self._screen.mute(node.name, rank)
        elif event.kind == "node ended":
            node.running = False
            self._check_ended()
        failure = outcome.failure_of(event, self._fleet.lease_s)
        if failure is None or (failure.rank is None and not node.running):
            return
        if failure.kind == "early":
            self._early.append(failure)
            self._hangs.ended(node.name, rank)
        else:
            self.fail(failure)

    def fail(self, failure: Failure) -> None:
        self._failures.append(failure)
        self._failed.set()

    def node_lost(self, node: Node, why: str) -> None:
        """A node went away while its ranks were running."""
        if node.running:
            self.fail(Failure("lost", node.name, None, time.monotonic(), headline=why))
            node.running = False
            self._check_ended()

    def _check_ended(self) -> None:
        if not self._fleet.running:
            self._ended.set()

    def _hang_told(self, hang: Hang | None, seconds: float) -> None:
        """A hang is only told: who wants it ended says after how long."""
        if hang is None:
            self._screen.note(f"paceline: the job continues, after {seconds:.0f} s")
            self._recorder.event("hang over", seconds=round(seconds, 1))
            return
        since = f"no step for {seconds:.0f} s: " if seconds >= 1 else ""
        self._screen.note(f"paceline: {since}{hang.text}")
        self._recorder.event("hang", hang.host or None, hang.rank, text=hang.text)

    def _hang_over(self, hang: Hang) -> None:
        limit = f"--hang-timeout {self._job.hang_timeout_s.value:g}"
        host = hang.host or "the job"
        text = hang.text.removeprefix(f"rank {hang.rank} on {hang.host} ")
        headline = f"hung for longer than {limit}: {text}"
        self.fail(Failure("hang", host, hang.rank, time.monotonic(), headline=headline))
