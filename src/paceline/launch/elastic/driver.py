"""Membership of a job, from its plan to the end of its last attempt.

Only :class:`ElasticDriver` hears which hosts are lost or can start ranks. It starts attempts, gives
ranks to hosts that come, and starts again on the hosts that are left.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.launch.control import RunActions
from paceline.launch.elastic.retry_policy import (
    MAX_HOST_LOSSES,
    Diagnosis,
    RetryPolicy,
    StartupTracker,
    is_by_chance,
)
from paceline.launch.failure_analysis import ASKED_TO_END, is_full_disk
from paceline.launch.interrupts import Interrupts
from paceline.launch.nodes import survey
from paceline.launch.nodes.connect import HostDialer, Reconnector
from paceline.launch.nodes.fleet import Fleet, Node, first_of, try_request
from paceline.launch.nodes.provisioner import Provisioner, fork_servers_up
from paceline.launch.planning import planner
from paceline.launch.planning.request import Request
from paceline.launch.recorder import Recorder
from paceline.launch.results.collector import ResultCollector
from paceline.launch.results.outputs import OutputSync
from paceline.launch.terminal.run_state import NodeWait
from paceline.launch.terminal.screen import Screen
from paceline.remote.channel import ANSWER_TIMEOUT_S, SLOW_OPS
from paceline.spec.errors import NodeError, PacelineError
from paceline.spec.events import Event
from paceline.spec.failure import LAUNCHER_HOST, Failure, Recovery, Result
from paceline.spec.formatting import format_size, pluralize, span
from paceline.spec.plan import Plan
from paceline.transfer.output_folders import await_checkpoint

if TYPE_CHECKING:
    from paceline.launch.elastic.attempt import Attempt

HOST_READY_TIMEOUT_S = 30.0  # for connected hosts to be able to start ranks
REJOIN_POLL_S = 2.0  # between two looks for a checkpoint that a returning node waits for
REJOIN_PAUSE_S = 5.0  # after an error, until rank 0's files are looked at again
MIN_DISK_BYTES = 16 << 20  # free space that checkpoints and logs need


@dataclass(slots=True)
class _NextStart:
    """The next start of all ranks.

    Attributes:
        reason: Why the ranks start again, as text.
        count: Which of how many restarts this is, as text; may be empty.
        min_hosts: How many hosts it needs.
        timeout_s: Seconds to wait for them.
    """

    reason: str
    count: str
    min_hosts: int
    timeout_s: float


class ElasticDriver:
    """Runs the attempts of a job on the hosts that are available.

    Args:
        listener: Called with each event of an agent.
        announce: Shows the plan to the user, once, before its ranks start.

    Attributes:
        fleet: The nodes, from :meth:`take_over` on.
        missing: Hosts that were missing at the start, with their errors.
        dialling: Their dialers, until the reconnector follows them.
        plan: The current plan, once there is one.
        attempt: The running attempt; ``None`` while no ranks run.
        failure: The failure of the last attempt.
    """

    def __init__(self, request: Request, provisioner: Provisioner, results: ResultCollector,
                 outputs: OutputSync, actions: RunActions, screen: Screen, recorder: Recorder,
                 listener: Callable[[Event], None], announce: Callable[[Plan], None],
                 ) -> None:  # fmt: skip
        job = request.job
        self.fleet: Fleet | None = None
        self.missing: dict[str, str] = {}
        self.dialling: list[HostDialer] = []
        self.policy = RetryPolicy(job.max_restarts.value, job.restart_window_s.value,
                                  request.retries_start)  # fmt: skip
        self.plan: Plan | None = None
        self.attempt: Attempt | None = None
        self.failure: Failure | None = None
        self._request, self._provisioner, self._results = request, provisioner, results
        self._outputs = outputs
        self._actions, self._screen, self._recorder = actions, screen, recorder
        self._listener, self._announce = listener, announce
        self._recoveries: list[Recovery] = []  # in all attempts that have ended
        self._reconnector: Reconnector | None = None
        self._next = _NextStart("", "", request.min_hosts, job.wait_for_nodes_s.value)
        self._had_ranks: set[str] = set()
        self._late_answers: set[tuple[str, str]] = set()  # by host and request
        self._announced = False
        self._rejoining: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # questions to schedulers about lost nodes
        recorder.get_node_wait = lambda: (
            None if self.attempt is None else self.attempt.recovery.waiting
        )

    def take_over(self, fleet: Fleet, missing: dict[str, str]) -> None:
        """Sets the nodes, and follows their events and losses."""
        self.fleet, self.missing = fleet, missing
        fleet.on_event, fleet.on_lost = self.on_event, self.on_lost
        fleet.on_late = self._on_late

    def _on_late(self, node: Node, op: str) -> None:
        """Notes once which host is waited for."""
        if (node.name, op) not in self._late_answers:
            self._late_answers.add((node.name, op))
            limit = "" if op in SLOW_OPS else f"for at most {ANSWER_TIMEOUT_S / 60:.0f} min; "
            self._screen.note(
                f"paceline: waiting for {node.name}, which has not answered the request {op} yet"
                f" ({limit}Ctrl-C ends the run)"
            )

    # --- attempts ----------------------------------------------------------------------------

    async def run(self, plan: Plan, interrupts: Interrupts) -> Result:
        """Runs the plan and fetches its results.

        After a failure starts all ranks again as often as the policy allows.
        """
        fleet = self._nodes
        hosts = Reconnector(self._request, fleet, self._provisioner, self.on_node_ready,
                            self._screen.note)  # fmt: skip
        self._reconnector = hosts
        self._recorder.get_reconnects = hosts.progress
        while self.dialling:
            hosts.follow(self.dialling.pop())
        number = 0
        try:
            plan = await self._add_ready_hosts(plan)
            while True:
                number, started_at = number + 1, time.monotonic()
                attempt: Attempt | None = None
                startup: StartupTracker | None = StartupTracker(self._request.job)
                failed_start: Exception | None = None
                try:
                    if number > 1:
                        plan = await self._plan_next_attempt(plan)
                    result, attempt = await self._run_attempt(plan, interrupts)
                    startup = None if attempt.recovery.report.completed else attempt.startup
                except (ConnectionError, NodeError) as error:
                    if (lost := loss_during_start(fleet)) is None:
                        raise
                    result, failed_start = Result(1, lost), error if number == 1 else None

                failure, is_collected = result.failure, False
                if attempt is not None and self._can_be_repeated(attempt, result, interrupts):
                    await self._results.fetch_unless_hurried(fleet, interrupts)
                    failure, is_collected = self._results.missing_results(fleet), True
                    startup = None
                self.failure, ran_s = failure, time.monotonic() - started_at

                if await self._prepare_restart(failure, is_collected, attempt, startup, ran_s,
                                               interrupts):  # fmt: skip
                    continue
                raises = not self._request.elastic and not interrupts.received
                if failed_start is not None and raises:
                    raise failed_start
                break
        finally:
            await hosts.close()
            self._screen.stop_live()
        result = replace(result, recoveries=tuple(self._recoveries))
        return await self._conclude(result, failure, is_collected, interrupts)

    async def _conclude(self, result: Result, failure: Failure | None, is_collected: bool,
                        interrupts: Interrupts) -> Result:  # fmt: skip
        """Fetches the results unless that was done; without all of them, success is a failure."""
        if not is_collected:
            await self._results.fetch_unless_hurried(self._nodes, interrupts)
        if interrupts.received and failure is not None:
            signum = interrupts.received[0]
            return replace(result, exit_code=128 + signum, interrupted=signum)
        lacking = failure if is_collected else self._results.missing_results(self._nodes)
        if result.exit_code == 0 and lacking is not None:
            self.failure = lacking
            return replace(result, exit_code=1, failure=lacking)
        return result

    @property
    def _nodes(self) -> Fleet:
        assert self.fleet is not None
        return self.fleet

    def _can_be_repeated(self, attempt: Attempt, result: Result, interrupts: Interrupts) -> bool:
        """Whether other hosts could produce the results again if rank 0's host is lost."""
        is_success = not (attempt.is_expanding or interrupts.received) and result.exit_code == 0
        return is_success and self._request.elastic and attempt.startup.is_session

    async def _run_attempt(self, plan: Plan, interrupts: Interrupts) -> tuple[Result, Attempt]:
        """Runs one attempt, from warm fork servers to the end of the last rank."""
        from paceline.launch.elastic.attempt import Attempt  # imported while hosts are connected

        assert self._reconnector is not None
        fleet, job = self._nodes, self._request.job
        await fork_servers_up(fleet, fleet.nodes, job)
        if not self._announced:  # the first start may have come to nothing
            self._announced = True
            self._announce(plan)
        attempt = self.attempt = Attempt(plan, job, fleet, interrupts, self._screen, self._recorder,
                                         self.policy, self._reconnector)  # fmt: skip
        self._actions.set_attempt(attempt)
        watching = asyncio.ensure_future(self._outputs.watch(lambda: self._results.first))
        try:
            result = await attempt.run()
        finally:
            tasks = [task for task in (watching, self._rejoining) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._rejoining = None
            self.attempt = None
            self._actions.set_attempt(None)
            self._recoveries += attempt.recovery.report.completed
        self._results.has_succeeded = result.exit_code == 0 and not attempt.is_expanding
        await first_of(asyncio.gather(*self._tasks), interrupts.wait(2))
        if result.exit_code == 0:
            notes = attempt.describe_independence(), attempt.describe_method()
            for text in (*filter(None, notes), *attempt.describe_timings()):
                self._screen.note(f"paceline: {text}")
        return result, attempt

    async def _add_ready_hosts(self, plan: Plan) -> Plan:
        """Adds hosts to the plan that connected while the others imported.

        Waits for connected hosts to get ready, because joining later costs the others more.
        """
        request, fleet, hosts = self._request, self._nodes, self._reconnector
        assert hosts is not None
        if not hosts.dialled:
            return plan
        with contextlib.suppress(ConnectionError, NodeError):  # the start reports it
            await fork_servers_up(fleet, fleet.nodes, request.job)

        def ready() -> list[Node]:
            return [
                node for node in fleet.spares if node.name in self.missing and node.can_start_ranks
            ]

        num_free = request.max_hosts - len(fleet.nodes)
        await hosts.wait_for(
            lambda: len(ready()) >= num_free or not hosts.is_provisioning, HOST_READY_TIMEOUT_S
        )
        added = ready()[:num_free]
        first = fleet.first.survey
        if not added or first is None:
            return plan
        fleet.seat([*fleet.nodes, *added])
        port = plan.settings["master_port"]
        if first.network.address != plan.master_addr:
            port_setting = request.job.master_port
            port = await survey.hold_port(fleet.first, first.network.address, port_setting)
        updated = survey.plan_of(request, fleet, self._provisioner.supplies, port, ())
        plan = self.set_plan(replace(updated, notes=plan.notes))
        names = ", ".join(node.name for node in added)
        self._screen.note(f"paceline: {names} connected in time: starting with {len(fleet.nodes)}"
                          " hosts")  # fmt: skip
        return plan

    async def _plan_next_attempt(self, plan: Plan) -> Plan:
        """Makes the plan of the next attempt on the current nodes of the fleet."""
        fleet, first, port_setting = self._nodes, self._nodes.first, self._request.job.master_port
        for node in [*fleet.everyone, *fleet.former]:
            self._recorder.agent_log(node.name, node.channel.take_stderr(), is_attempt_over=True)
        assert first.survey is not None
        port = await survey.hold_port(first, first.survey.network.address, port_setting)
        hosts = [part.host for part in plan.nodes]
        if hosts != [node.name for node in fleet.nodes]:
            updated = survey.plan_of(self._request, fleet, self._provisioner.supplies, port, ())
            plan = replace(updated, notes=plan.notes, attempt=plan.attempt)
        if self._results.first is not first:
            await self._provisioner.send_checkpoints(first)
            self._results.set_first_node(first)
        await self._outputs.align(fleet, plan.world_size)
        number = plan.attempt + 1
        return self.set_plan(planner.next_attempt(plan, number, port, self.policy.num_restarts))

    def set_plan(self, plan: Plan) -> Plan:
        """Sets the plan that is executed."""
        self.plan = plan
        self._recorder.write_plan(plan)
        return plan

    # --- what follows an attempt -------------------------------------------------------------

    async def _prepare_restart(self, failure: Failure | None, is_collected: bool,
                               attempt: Attempt | None, startup: StartupTracker | None,
                               ran_s: float, interrupts: Interrupts) -> bool:  # fmt: skip
        """Decides whether another attempt follows, and if so selects its nodes."""
        if interrupts.received:
            return False
        if is_collected and failure is not None and failure.kind != "lost":
            return False  # no other host could change that: the disk here is full
        if failure is None and (attempt is None or not attempt.is_expanding):
            return False
        if attempt is not None and (reason := attempt.recovery.no_restart_reason):
            self._screen.note(f"paceline: not started again: {reason}")
            return False
        departing = attempt.recovery.departing_nodes if attempt is not None else []
        if departing and self._request.elastic:
            await self._results.fetch(self._nodes)
        if failure is not None and not await self.may_restart(failure, departing, ran_s, startup):
            return False
        return await self.select_nodes()

    async def may_restart(self, failure: Failure, departing: Sequence[Node], ran_s: float,
                          startup: StartupTracker | None = None) -> bool:  # fmt: skip
        """Decides whether all ranks start again after a failure, and prepares that start.

        Args:
            departing: Nodes that were asked to end; they are dismissed.
            startup: What they did before their first step; ``None`` if they have recovered before.
        """
        request = self._request
        start = self._next = _NextStart(failure.describe(), "", request.min_hosts,
                                        request.job.wait_for_nodes_s.value)  # fmt: skip
        diagnosis = await self._diagnose(failure, departing, startup)
        verdict = self.policy.judge_attempt(failure, diagnosis, startup, time.monotonic(), ran_s)
        for note in verdict.notes:
            self._screen.note(f"paceline: {note}")
        number = f"{verdict.number} of {verdict.limit}"
        if startup is not None and verdict.is_start:
            start.count = f", before the first step ({number})"
            start.min_hosts = request.min_restart_hosts(startup.is_session)
            if not startup.is_session:
                start.timeout_s = request.timeout_s
        elif not diagnosis.lost_hosts:
            start.count = f", {number}"
        return verdict.retries

    async def _diagnose(self, failure: Failure, departing: Sequence[Node],
                        startup: StartupTracker | None) -> Diagnosis:  # fmt: skip
        """Collects what the hosts show about a failure."""
        if failure.kind in ("stranger", "replicas"):
            return Diagnosis()
        if self._request.elastic and await self._lost_hosts(failure, departing):
            return Diagnosis(lost_hosts=True)
        if reason := await full_disk(self._nodes, failure):
            return Diagnosis(full_disk=reason)
        at_start = startup is not None and not startup.has_work_to_lose
        if not (at_start and self.policy.retries_start):
            return Diagnosis()
        if not failure.is_secondary:
            return Diagnosis(by_chance=is_by_chance(failure))
        await self._nodes.silences_resolved()
        return Diagnosis(by_chance=not self._nodes.is_complete)

    async def _lost_hosts(self, failure: Failure, departing: Sequence[Node]) -> bool:
        """Whether the attempt failed because nodes were lost or asked to leave."""
        fleet = self._nodes
        if departing and len(departing) < len(fleet.nodes):
            await asyncio.gather(*(fleet.dismiss(node, ASKED_TO_END) for node in departing))
            return not self._is_program_failure(failure)
        may_follow_loss = failure.is_secondary or failure.was_terminated
        if fleet.is_complete and may_follow_loss:  # the loss may not be known yet
            deadline = time.monotonic() + fleet.lease_s / 2 + 1
            while fleet.is_complete and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
        return not fleet.is_complete and not self._is_program_failure(failure)

    def _is_program_failure(self, failure: Failure) -> bool:
        """Whether a rank failed by itself: no host was lost at about the same time.

        Earlier losses that the ranks have recovered from do not count.
        """
        if failure.rank is None or failure.is_secondary or failure.was_terminated:
            return False
        fleet = self._nodes
        lost = [node for node in fleet.nodes if node.lost and not node.is_loss_recovered]
        return all(abs(failure.time - node.lost_at) > fleet.lease_s for node in lost)

    def _available(self) -> list[Node]:
        """Returns the nodes that can have ranks, those that had some first."""
        fleet, order = self._nodes, [host.name for host in self._request.hosts]
        ready = [node for node in fleet.spares if node.can_start_ranks and node.survey is not None]
        ready.sort(key=lambda node: order.index(node.name))
        return [*(node for node in fleet.nodes if not node.lost), *ready]

    async def select_nodes(self) -> bool:
        """Selects the nodes of the next start, once there are enough; returns whether there are."""
        fleet, hosts, start = self._nodes, self._reconnector, self._next
        assert hosts is not None
        self._had_ranks.update(node.name for node in fleet.nodes)
        lost = [node for node in fleet.nodes if node.lost]
        for node in lost:
            if self.policy.redials(node.name, time.monotonic()):
                hosts.redial(node)
            else:
                text = f"{node.name} was lost {MAX_HOST_LOSSES} times: it is left out"
                self._screen.note(f"paceline: {text}")
        must_wait = len(self._available()) < start.min_hosts
        if must_wait and not await self._wait_for_hosts(lost, hosts):
            return False
        selected = self._available()[: self._request.max_hosts]
        stayed = [node.name for node in fleet.nodes if not node.lost]
        fleet.seat(selected)
        arrived = [node.name for node in selected if node.name not in stayed]
        reason = start.reason
        if lost and not must_wait:
            reason += f"; going on with {', '.join(node.name for node in selected)}"
        elif arrived:
            place = "back" if self._had_ranks.issuperset(arrived) else "here"
            reason = f"{', '.join(arrived)} {'is' if len(arrived) == 1 else 'are'} {place}"
        self._screen.note(f"paceline: {reason}; starting all nodes again{start.count}")
        start.reason, start.count = reason, ""
        return True

    async def _wait_for_hosts(self, lost: Sequence[Node], hosts: Reconnector) -> bool:
        """Waits until there are enough nodes; returns whether they came in time."""
        note, start = self._screen.note, self._next
        note(f"paceline: {start.reason}")
        if not hosts.redials:
            names = ", ".join(node.name for node in lost)
            note(f"paceline: {names} cannot be joined again in this way of starting nodes:"
                 " run again")  # fmt: skip
            return False

        def availability() -> str:
            return f"{pluralize(len(self._available()), 'node')} of at least {start.min_hosts}"

        limit = span(start.timeout_s)
        if names := ", ".join(hosts.dialled):
            dialling = f"dialling {names} again, for up to {limit}"
            note(f"paceline: {dialling}")
            wait = NodeWait.start(f"{availability()}: {dialling}", start.timeout_s)
            self._recorder.set_waiting(wait)
            try:
                if await hosts.wait_for(
                    lambda: len(self._available()) >= start.min_hosts, start.timeout_s
                ):
                    return True
            finally:
                self._recorder.set_waiting(None)
        if hosts.dialled:
            names = ", ".join(hosts.describe_missing())
            note(f"paceline: {availability()} after {limit}: {names} did not come back")
        else:
            note(f"paceline: {availability()}, and no other is waited for: not started again")
        return False

    # --- what happens ------------------------------------------------------------------------

    def on_node_ready(self, node: Node) -> None:
        """Gives ranks to a node that is ready if possible; else keeps it as a spare."""
        attempt, max_hosts = self.attempt, self._request.max_hosts
        if attempt is None:
            return
        recovery = attempt.recovery
        if recovery.accepts_newcomers and recovery.num_hosts < max_hosts:
            recovery.add_ranks(node)
        elif recovery.use_spare():
            return
        elif not recovery.can_recover and len(attempt.plan.nodes) < max_hosts:
            self._expand_for(node, attempt)
        else:
            self._screen.note(f"paceline: {node.name} is here, as a spare")

    def _expand_for(self, node: Node, attempt: Attempt) -> None:
        """Starts all ranks again with a new node, now or when ``--rejoin`` says so."""
        rejoin = self._request.job.rejoin.value
        if rejoin == "now" or attempt.startup.is_session:  # a session saves before it ends
            attempt.request_expansion()
        elif rejoin == "never":
            self._screen.note(f"paceline: {node.name} is here, as a spare (--rejoin never)")
        elif self._rejoining is None or self._rejoining.done():
            self._screen.note(
                f"paceline: {node.name} is here; it gets ranks after the next checkpoint of rank 0"
                " (--rejoin now does not wait)"
            )
            self._rejoining = asyncio.ensure_future(self._expand_after_save(attempt))

    async def _expand_after_save(self, attempt: Attempt) -> None:
        """Starts all ranks again once rank 0 has completed a checkpoint."""
        first = self._nodes.first
        folders = {attempt.plan.nodes[0].workdir, first.run_folder}
        while self.attempt is attempt and not first.lost:
            with contextlib.suppress(PacelineError, ConnectionError):
                await await_checkpoint(first.channel, sorted(folders), REJOIN_POLL_S)
                if self.attempt is attempt:
                    attempt.request_expansion()
                return
            await asyncio.sleep(REJOIN_PAUSE_S)

    def on_event(self, node: Node, event: Event) -> None:
        """Handles an event of an agent, unless that is of a rank of another node."""
        attempt = self.attempt
        if attempt is not None and not attempt.recovery.has_rank(node.name, event.rank):
            return
        if event.kind in ("imported", "import failed", "fork server died"):
            node.on_fork_server_event(event)
            self.show_imports()
            if event.kind == "import failed" and self._is_spare(node):
                self._screen.note(f"paceline: {node.name} cannot be a spare: its imports failed")
        elif event.kind == "connection altered" and event["to_launcher"]:
            node.is_altered = True
        elif event.kind == "connection restored":
            text = f"the connection to {node.name} was lost"
            if node.is_altered:
                text += f": bytes were changed on the way between this machine and {node.name}"
            node.is_altered = False
            self._screen.note(f"paceline: {text}; dialled again after {event['seconds']:.1f} s")
        if attempt is not None:
            attempt.on_event(node, event)
            if event.kind == "regrouped":
                with contextlib.suppress(ConnectionError):  # a spare has just taken its place
                    self._results.set_first_node(self._nodes.get(attempt.recovery.first_host))
        self._results.on_event(node, event)
        self._actions.on_event(event)
        self._listener(event)
        try:
            self._recorder.record(event)
        except NodeError as error:  # a run that leaves no trace is not worth its time
            if attempt is not None:
                now = time.monotonic()
                attempt.fail(Failure("record", LAUNCHER_HOST, None, now, headline=str(error)))

    def on_lost(self, node: Node, reason: str) -> None:
        """Handles the loss of a node and its ranks."""
        if self.attempt is not None:
            self.attempt.node_lost(node, reason)
            self._tasks.add(asyncio.ensure_future(self._query_scheduler(node.name)))
        if self._reconnector is not None and self._is_spare(node):
            self._reconnector.redial(node)
        self._recorder.event("lost", node.name, why=reason)

    async def _query_scheduler(self, name: str) -> None:
        """Shows the scheduler's message about a lost node."""
        for host in self._request.hosts:
            if host.name == name and (text := await self._request.transport.loss_reason(host)):
                self._screen.note(f"paceline: {text}")
                self._recorder.event("scheduler", name, words=text)

    def show_imports(self) -> None:
        """Shows how many nodes have finished their imports."""
        if (preload := self._request.job.preload) and self.fleet is not None:
            num_imported = sum(1 for node in self.fleet.nodes if node.loaded)
            module = preload[0].split(".")[0].rstrip("?")
            self._screen.starting(f"importing {module}", num_imported, len(self.fleet.nodes))

    def _is_spare(self, node: Node) -> bool:
        return self.fleet is not None and node in self.fleet.spares


def loss_during_start(fleet: Fleet) -> Failure | None:
    """Returns the loss of a node or fork server that kept ranks from starting, if there is one."""
    timestamp = time.monotonic()
    for node in fleet.nodes:
        if node.lost and (cause := fleet.launcher_fault(node)):
            return Failure("launcher", LAUNCHER_HOST, None, timestamp, headline=cause)
        if node.lost:
            return Failure("lost", node.name, None, timestamp, headline=node.loss_reason)
    for node in fleet.nodes:
        if node.fork_server_error is not None and node.fork_server_died:
            text = node.fork_server_error.text
            return Failure("forkserver", node.name, None, timestamp, headline=text)
    return None


async def full_disk(fleet: Fleet, failure: Failure) -> str:
    """Returns why a restart is useless if a disk is still full; else an empty string."""
    node = next((node for node in fleet.nodes if node.name == failure.host), None)
    if node is None or node.lost or not is_full_disk(failure):
        return ""
    answer = await try_request(node, "disk", 30.0, paths=[node.run_folder])
    if answer is None:
        return ""
    (disk,) = answer["disks"]
    free = disk.get("free")
    if not isinstance(free, int) or free >= MIN_DISK_BYTES:
        return ""
    return f"the disk of {disk['path']} on {node.name} is still full ({format_size(free)} free)"
