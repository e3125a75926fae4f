"""One start of all nodes, watched to the end of its last rank."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from paceline.launch import failure_analysis
from paceline.launch.elastic.members import Members
from paceline.launch.elastic.recovery import RankCommands, RecoveryController
from paceline.launch.elastic.retry_policy import RetryPolicy, StartupTracker
from paceline.launch.health import independence, inputs, links, replicas, script_timings
from paceline.launch.health.hang_verdict import Hang, RankSnapshot
from paceline.launch.health.hangs import HangWatch, inspect_ranks
from paceline.launch.health.heartbeats import describe_phases
from paceline.launch.health.links import HostPair, LinkWatch
from paceline.launch.health.newcomers import NewcomerWatch
from paceline.launch.interrupts import Interrupts
from paceline.launch.nodes.connect import Reconnector
from paceline.launch.nodes.fleet import Fleet, Node, finishes_in, first_of
from paceline.launch.planning import planner
from paceline.launch.recorder import Recorder
from paceline.launch.results.observer import Observer
from paceline.launch.terminal.screen import Screen
from paceline.remote.fanout import gather_all
from paceline.spec import jobenv
from paceline.spec.errors import PacelineError
from paceline.spec.events import Event
from paceline.spec.failure import Failure, Result, signal_name
from paceline.spec.job import Job
from paceline.spec.plan import Plan
from paceline.spec.training import communication

FAILURE_GRACE_S = 3.0  # for the others, once one rank has failed
END_TIMEOUT_S = 3.0  # after SIGKILL, until a node that does not answer is given up
HURRIED_TIMEOUT_S = 0.8  # the same when the user has asked twice
MAX_REPORTS, MAX_STRANGERS = 10_000, 100  # kept of an attempt
_STRANGERS = ("stranger refused", "stranger at the store", "stranger at the tunnels")


class Attempt:
    """Starts the ranks of a plan and watches them until the last has ended.

    The nodes of the fleet are in the plan's order.

    Attributes:
        is_watching: Whether the ranks run, and signals are passed to them.
        startup: What the ranks did before their first step.
    """

    def __init__(self, plan: Plan, job: Job, fleet: Fleet, interrupts: Interrupts,
                 screen: Screen, recorder: Recorder, policy: RetryPolicy,
                 reconnector: Reconnector) -> None:  # fmt: skip
        self.plan = plan
        self.is_watching = False
        self._job, self._fleet, self._interrupts = job, fleet, interrupts
        self._screen, self._recorder = screen, recorder
        self._reports: list[Event] = []
        self._replicas, self._inputs = replicas.ReplicaComparison(), inputs.InputComparison()
        self._timings = script_timings.ScriptTimings()
        self._method, self._is_compressed = job.communication.value, False
        self._failures: list[Failure] = []
        self._early: list[Failure] = []  # not failures unless others still needed them
        self._error: Exception | None = None  # of the recovery
        self._failed = asyncio.Event()
        self._ended = asyncio.Event()
        self._expansion_requested = asyncio.Event()
        self._is_stopping = False  # the user has asked for it, and the ranks are told
        self._strangers: set[str] = set()
        self._commands = RankCommands(plan, job, fleet, recorder.display_path)
        self.startup = StartupTracker(job)
        policy.reset_crashes()
        members = self._members = Members(self._commands.hosts_of, planner.min_nodes(job),
                          job.wait_for_nodes_s.value, policy)  # fmt: skip
        self.recovery = RecoveryController(self._commands, members, fleet, reconnector, self.fail,
                                           screen, recorder)  # fmt: skip
        limit = job.hang_timeout_s.value
        limit_s = None if isinstance(limit, str) else limit
        self._observer = Observer(fleet, recorder, self._interface)
        self._hangs = HangWatch(fleet, self._on_hang, self._end_hang, self._show_state, limit_s,
                                lambda: members.ungrouped)  # fmt: skip
        self._newcomers = NewcomerWatch(
            fleet, self._members.starting_newcomers, self.recovery.report.note_stalled_newcomer,
            self.recovery.end_stalled_newcomer, limit_s,
        )  # fmt: skip
        self._links = LinkWatch(fleet, lambda: self._commands.addresses, self._commands.host_at,
                                self._hangs.idle_s, self._on_blocked_links)  # fmt: skip

    async def run(self) -> Result:
        """Starts the ranks and returns when the last has ended."""
        parts = list(zip(self._fleet.nodes, self.plan.nodes, strict=True))
        for node, _ in parts:
            node.running, node.active_at = True, None
        started_at = time.monotonic()
        try:
            await self._commands.prepare()
            await gather_all([self._commands.start(node, part) for node, part in parts])
        except (ConnectionError, PacelineError):
            await self._stop_ranks(0.0)  # started ranks must not run beside the next attempt
            raise
        self.is_watching = True
        self._recorder.next_attempt()
        self._recorder.event("started", attempt=self.plan.attempt, world_size=self.plan.world_size)
        watches = [asyncio.ensure_future(work) for work in (
            self._watch_safely(self._hangs.run, "hangs are not noticed any more"),
            self._watch_safely(self._links.run, "links between hosts are not watched any more"),
            self._watch_safely(self._newcomers.run, "late newcomers are not noticed any more"),
            self._recover(), self._observer.run(),
        )]  # fmt: skip
        try:
            result = await self._watch()
            await self._end_pending_starts()
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
            self._recorder.write_state()
        self._screen.end_attempt()
        self._recorder.event("ended", attempt=self.plan.attempt, exit_code=result.exit_code,
                             seconds=round(time.monotonic() - started_at, 3))  # fmt: skip
        return result

    async def _watch_safely(self, run: Callable[[], Awaitable[None]], consequence: str) -> None:
        """Runs a watch; an error in it does not end the job."""
        try:
            await run()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self._screen.note(f"paceline: warning: {consequence}: {reason}")

    async def _recover(self) -> None:
        try:
            await self.recovery.run()
        except Exception as error:  # later losses would go unnoticed
            self._error = error
            self._failed.set()

    # --- the end -----------------------------------------------------------------------------

    async def _watch(self) -> Result:
        """Returns once all ranks have ended: by themselves, by failure, by signal or to expand."""
        await first_of(self._ended.wait(), self._failed.wait(), self._interrupts.wait(),
                       self._expansion_requested.wait())  # fmt: skip
        if self._error is not None:
            raise self._error
        if self._interrupts.received:
            return await self._stop_for_user()
        if self._failures:
            return await self._stop_on_failure()
        if self.is_expanding:
            await first_of(self._stop_ranks(self._job.grace_s.value), self._interrupts.wait())
            return await self._stop_for_user() if self._interrupts.received else Result(0)
        return Result(0)

    async def _stop_on_failure(self) -> Result:
        """Waits for earlier failures that are reported late, then ends the other ranks."""
        first = failure_analysis.first_failure(self._failures)
        if first.kind == "replicas":  # with time to end, a script could replace its checkpoint
            await self._kill_ranks(END_TIMEOUT_S)
            return Result(first.status, first)
        if failure_analysis.are_secondary(self._failures):
            await self._fleet.tell("dump_stacks", closely=True)
        await first_of(self._ended.wait(), self._interrupts.wait(), self._settle())
        absence_s, lease_s = self._fleet.absence_s, self._fleet.lease_s
        failures = failure_analysis.attribute_early_end(self._failures, self._early)
        failures = failure_analysis.attribute_launcher_pause(failures, absence_s, lease_s)
        failures = failure_analysis.attribute_network_loss(
            failures, self._fleet.common_silences, lease_s
        )
        all_terminated = all(failure.was_terminated for failure in failures)
        if all_terminated and self._interrupts.received:
            return await self._stop_for_user()
        to_save = all_terminated or self.recovery.abandon_reason is not None
        grace_s = self._job.grace_s.value if to_save else FAILURE_GRACE_S
        await first_of(self._stop_ranks(grace_s), self._interrupts.wait())
        if self._interrupts.received:
            await self._kill_ranks()
        # Later reports may complete known failures, but are no failures of their own.
        complete = {(f.host, f.rank): f for f in failure_analysis.merge(self._failures)}
        first = failure_analysis.first_failure(failures)
        if first.kind != "launcher":
            first = complete.get((first.host, first.rank), first)
        num_others = len(failure_analysis.merge(failures)) - 1
        return Result(first.status, first, num_other_failures=num_others)

    async def _settle(self) -> None:
        """Waits for failures that are reported late: of ranks, then of hosts that are silent."""
        await asyncio.sleep(failure_analysis.settling_delay_s(self._failures))
        if failure_analysis.are_secondary(self._failures):
            await self._fleet.silences_resolved()

    async def _stop_for_user(self) -> Result:
        """Lets the ranks save; kills them after the grace period or after a second signal."""
        signum = self._interrupts.received[0]
        name = signal_name(signum)
        self._screen.note(f"paceline: {name}: stopping (once more to stop at once)")
        hang = None
        if not self._members.is_regrouping:
            inspection = asyncio.ensure_future(self._hangs.diagnose_stop())
            await first_of(inspection, self._interrupts.wait(2))
            hang = None if inspection.cancelled() else inspection.result()
        if hang is not None:
            self._screen.note(f"paceline: it hung: {hang.text}")
            self._recorder.event("hang", hang.host or None, hang.rank, text=hang.text)
        self.recovery.stop()
        self._is_stopping = True
        self._screen.hide_interrupts()
        # ranks that wait for each other in C code would let the grace period pass
        is_deadlock = hang is not None and hang.rank is None
        request = signal.SIGTERM if is_deadlock else signal.SIGINT
        stopping = asyncio.ensure_future(self._stop_ranks(self._job.grace_s.value, request))
        await first_of(asyncio.shield(stopping), self._interrupts.wait(2))
        if not stopping.done():
            self._screen.note("paceline: stopping at once")
            await self._kill_ranks()
            stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
        return Result(128 + signum, interrupted=signum)

    async def _stop_ranks(self, grace_s: float, signum: int = signal.SIGTERM) -> None:
        """Ends all ranks; returns when all nodes have reported it or do not answer."""
        await self._fleet.tell("stop", signal=int(signum), grace_s=grace_s)
        if not await finishes_in(self._ended.wait(), grace_s + END_TIMEOUT_S):
            await self._fleet.tell("kill")
            await finishes_in(self._ended.wait(), END_TIMEOUT_S)

    async def _kill_ranks(self, timeout_s: float = HURRIED_TIMEOUT_S) -> None:
        """Kills all ranks; waits no longer for nodes that do not answer."""
        killing = self._fleet.tell("kill", wait_s=timeout_s)
        await asyncio.gather(killing, finishes_in(self._ended.wait(), timeout_s))

    async def _end_pending_starts(self) -> None:
        """Ends newcomers whose start was ordered just before the last of the others ended.

        Otherwise they would count as ranks of the next attempt, which have the same numbers.
        """
        is_hurried = len(self._interrupts.received) > 1
        await self.recovery.close(HURRIED_TIMEOUT_S if is_hurried else END_TIMEOUT_S)
        if self._ended.is_set() and self._fleet.running:
            self._ended.clear()
            await self._stop_ranks(0.0)

    # --- requests of the user ----------------------------------------------------------------

    async def broadcast(self, message: Mapping[str, Any]) -> None:
        """Sends a control message to every rank."""
        await self._fleet.tell("tell_ranks", line=message)

    async def snapshots(self) -> list[RankSnapshot]:
        """Takes a snapshot of every rank."""
        return await inspect_ranks(self._fleet)

    # --- what happens ------------------------------------------------------------------------

    def on_event(self, node: Node, event: Event) -> None:
        """Handles an event of an agent."""
        if node not in self._fleet.nodes:
            return  # another node has taken its place
        rank = -1 if event.rank is None else event.rank
        self.startup.on_event(event)
        self._newcomers.durations.on_event(event, time.monotonic())
        if event.kind == independence.REPORT:
            if len(self._reports) < MAX_REPORTS:
                self._reports.append(event)
        elif event.kind == script_timings.REPORT:
            self._timings.add(event)
        elif event.kind == replicas.REPORT:
            if difference := self._replicas.add(event):
                self._on_difference(difference)
        elif event.kind in inputs.REPORTS:
            if text := self._inputs.add(event):
                self._recorder.event("measured", text=text)
                self._screen.note(f"paceline: warning: {text}")
        elif event.kind == "communication" and not self._is_compressed:
            self._is_compressed = True
            if self.plan.attempt and (text := communication.lost_errors(self._method)):
                self._screen.note(f"paceline: {text}")
        elif event.kind in ("rank frozen", "rank thawed"):
            self._hangs.on_freeze_event(event)
        elif event.kind == "heartbeat":
            self._hangs.heartbeat(node.name, rank, event["step"] or 0, event["phase"] or "")
        elif event.kind == "rank ended":
            self._hangs.forget_rank(node.name, rank)
        elif event.kind == "exception" and not event["hooked"]:
            self._screen.mute(node.name, rank)
            if self._is_stopping and failure_analysis.is_failed_save(event):
                headline = f"{event['type']}: {event['message']}".splitlines()[0]
                self._screen.note(f"paceline: rank {rank} on {node.name}, as it was stopped:"
                                  f" {headline:.300} (see its log)")  # fmt: skip
        elif event.kind in _STRANGERS:
            self._note_stranger(node.name, event["address"])
        elif event.kind == "connection altered":
            self._note_alteration(node.name, event["address"])
        elif event.kind == "node ended":
            node.running = False
            self._check_ended()
        self.recovery.on_event(event)
        failure = failure_analysis.failure_of(event, self._fleet.lease_s)
        if failure is not None:
            self._on_failure(node, event, failure)

    def _on_failure(self, node: Node, event: Event, failure: Failure) -> None:
        """Recovers from a failure if possible; otherwise it ends the attempt."""
        if failure.kind == "stranger":  # no recovery with a stranger among the ranks
            self.fail(failure)
            return
        if event.kind == "asked to end" and self.recovery.release(node, failure):
            return
        if self.recovery.can_recover and failure.kind in ("agent", "lease"):
            node.running = False
            self.recovery.recover_from(failure)
            self._fleet.lose(node, failure.headline)
            return
        if failure.kind != "early" and self.recovery.recover_from(failure):
            return
        if failure.rank is None and not node.running:
            return
        if failure.kind == "early":
            if any((end.host, end.rank) == (failure.host, failure.rank) for end in self._early):
                return
            self._early.append(failure)
            self._hangs.rank_ended(node.name, -1 if event.rank is None else event.rank)
        else:
            self.fail(failure)

    def _on_difference(self, difference: replicas.Difference) -> None:
        """Ends the attempt if ranks begin with different models; later, it may be on purpose."""
        self._recorder.event("replicas differ", text=difference.text)
        if difference.step:
            self._screen.note(f"paceline: warning: {difference.text}")
        else:
            headline = (
                f"began with a different model from the other ranks: {difference.parameter} differs"
            )
            where = difference.host, difference.rank
            self.fail(Failure("replicas", *where, time.monotonic(), headline=headline))

    def describe_independence(self) -> str:
        """Returns a sentence if the ranks did not work together; else empty."""
        text = independence.describe_independence(self.plan.world_size, self._reports)
        # ranks of a script without torch are meant to work independently
        return text if self._job.needs_torch or text != independence.NOTHING_EXCHANGED else ""

    def describe_timings(self) -> list[str]:
        """Returns sentences on what takes much of a script's steps, and records them."""
        texts = [*self._timings.describe(self.plan.world_size, self._method)]
        for text in texts:
            self._recorder.event("measured", text=text)
        return texts

    def describe_method(self) -> str:
        """Returns a sentence if ``--communication`` did nothing; else empty."""
        if self._is_compressed or self._method == "exact" or self.plan.world_size < 2:
            return ""
        if independence.exchanged_in_children(self._reports):
            return ""
        return f"note: {communication.unused(self._method)}"

    @property
    def is_expanding(self) -> bool:
        """Whether the ranks were asked to end because they are to start again with more nodes."""
        return self._expansion_requested.is_set()

    def request_expansion(self) -> None:
        """Asks the ranks to save and end, to start again on more nodes, unless one has finished."""
        if not self._ended.is_set() and not self._early:
            self._expansion_requested.set()

    def _note_stranger(self, host: str, address: str) -> None:
        """Reports an address from which connections are refused, once."""
        if address not in self._strangers and len(self._strangers) < MAX_STRANGERS:
            self._strangers.add(address)
            self._screen.note(
                f"paceline: warning: {host} refused a connection from {address}, which is not one"
                f" of this job's hosts (if it is one: --env {jobenv.ADDRESSES}={address})"
            )

    def _note_alteration(self, host: str, address: str) -> None:
        """Reports an address from or to which bytes were changed, once."""
        if address not in self._strangers and len(self._strangers) < MAX_STRANGERS:
            self._strangers.add(address)
            sender = self._commands.host_at(address) or address
            self._screen.note(
                f"paceline: warning: an encrypted connection between {host} and {sender} was ended:"
                " bytes were changed on the way, or another machine answered"
            )

    def fail(self, failure: Failure) -> None:
        """Ends the attempt after a failure."""
        key = (failure.host, failure.rank, failure.kind)
        if key not in ((other.host, other.rank, other.kind) for other in self._failures):
            self._failures.append(failure)
        self._failed.set()

    def node_lost(self, node: Node, reason: str) -> None:
        """Handles the loss of a node while its ranks were running."""
        if node not in self._fleet.nodes:
            return
        received_at = node.channel.received_at or time.monotonic()
        running, node.running = node.running, False
        self._hangs.forget_host(node.name)
        loss = Failure("lost", node.name, None, received_at, headline=reason)
        if not self.recovery.recover_from(loss) and running:
            self.fail(replace(loss, time=time.monotonic()))
        self._check_ended()

    def _check_ended(self) -> None:
        if not self._fleet.running and not self._members.is_pending:
            self._ended.set()

    def _show_state(self, ranks: list[dict[str, Any]], hang: str) -> None:
        # Ranks without a group or with too few nodes do not wait for a particular rank.
        self._recorder.run_state.hang = "" if self._members.is_regrouping else hang
        self._screen.aside(describe_phases(ranks))

    def _interface(self, host: str) -> str:
        """Returns the interface for the job's traffic on a host; empty if it is not in the plan."""
        return next((part.interface for part in self.plan.nodes if part.host == host), "")

    def _on_hang(self, hang: Hang | None, seconds: float) -> None:
        """Reports a hang, or its end; ranks that save after a stop have not ended it."""
        if self._members.is_regrouping or self._is_stopping:
            return
        if hang is None:
            self._screen.note(f"paceline: the job continues, after {seconds:.0f} s")
            self._recorder.event("hang over", seconds=round(seconds, 1))
            return
        prefix = f"no step for {seconds:.0f} s: " if seconds >= 1 else ""
        self._screen.note(f"paceline: {prefix}{hang.text}")
        self._recorder.event("hang", hang.host or None, hang.rank, text=hang.text)

    def _on_blocked_links(self, pairs: list[HostPair], idle_s: float) -> None:
        """Excludes one host of each pair, or reports a hang if that is impossible."""
        separated = self.recovery.separate(pairs, time.monotonic() - idle_s)
        if not separated and not self._members.is_regrouping:
            self._hangs.report_blocked_links(links.describe_pairs(pairs))

    def _end_hang(self, hang: Hang, limit_s: float) -> bool:
        """Ends a hang by replacing its rank, or ends the attempt; returns whether ranks go on."""
        if self._members.is_forming(limit_s):  # it has time-outs of its own
            return True
        measured = isinstance(self._job.hang_timeout_s.value, str)
        limit = f"{limit_s:.0f} s" if measured else f"--hang-timeout {limit_s:g}"
        host = hang.host or "the job"
        text = hang.text.removeprefix(f"rank {hang.rank} on {hang.host} ")
        headline = f"hung for longer than {limit}: {text}"
        rank = hang.rank if hang.is_replaceable else None
        if rank is not None and self.recovery.end_hung_rank(rank, headline):
            return True
        if hang.kind == "apart" and self.recovery.end_strays(hang.sides, headline):
            return True
        if hang.kind == "deaf" and self.recovery.retry_group():
            text = f"{headline}: they try again in a new group"
            self._screen.note(f"paceline: {text}")
            self._recorder.event("recovery", text=text)
            return True
        self.fail(Failure("hang", host, hang.rank, time.monotonic(), headline=headline))
        return False
