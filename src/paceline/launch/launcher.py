"""From a job to its end: prepared, executed, brought home, in the body of :meth:`Launcher._run`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.launch import decide, prepare, restart
from paceline.launch.attempt import Attempt
from paceline.launch.collect import Results
from paceline.launch.decide import Supplies
from paceline.launch.fleet import Fleet, Node, together
from paceline.launch.interrupts import Interrupts
from paceline.launch.prepare import Inspect, Package, Request, make_plan
from paceline.launch.recorder import Recorder
from paceline.launch.screen import Screen
from paceline.launch.summary import RunOutcome
from paceline.launch.supply import fork_servers_up, send_copies, warm_up
from paceline.remote.transport import Transport
from paceline.rundir.directory import RunDirectory, fresh_path, short
from paceline.spec import rundir as names
from paceline.spec.errors import NodeError, PacelineError
from paceline.spec.events import Event, Home, at_home
from paceline.spec.failure import HERE, Failure, Result
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Job, secrets_among
from paceline.spec.plan import Plan


class Launcher:
    """One run.

    Args:
        request: What to run, and where.
        screen: What the user sees.
        directory: The run directory.
    """

    def __init__(self, request: Request, screen: Screen, directory: RunDirectory) -> None:
        self.plan: Plan | None = None  # the one that is executed, once there is one
        self.recorder = Recorder(directory, screen, request.job.debug.value)
        self._request = request
        self._screen = screen
        self._directory = directory
        self._results = Results(directory, screen.note)
        self._token = os.urandom(16).hex()
        self._nodes: Sequence[Node] = ()
        self._attempt: Attempt | None = None
        self._failure: Failure | None = None  # the last attempt's
        self._closing = False

    async def run(self) -> Result:
        """Everything, in order. PacelineError when the job could not be started."""
        task = asyncio.current_task()
        assert task is not None
        with Interrupts(lambda: self._interrupted(task)) as interrupts:
            status = 1
            try:
                result = await self._run(interrupts)
                status = result.exit_code
                return result
            except asyncio.CancelledError:
                if not interrupts.received:
                    raise
                signum = interrupts.received[0]
                return Result(128 + signum, self._failure, interrupted=signum)
            finally:
                await self._request.transport.close(status)

    async def _run(self, interrupts: Interrupts) -> Result:
        fleet = await self._connect()
        try:
            with prepare.lost_nodes_named(fleet):
                plan, supplies = await self._prepare(fleet)
                result = await self.execute(plan, fleet, supplies, interrupts)
                await self._results.clear(fleet.first)
                return result
        finally:
            self._closing = True
            await fleet.close(hurry=bool(interrupts.received))
            for node in fleet.nodes:
                self.recorder.agent_log(node)

    def _interrupted(self, task: asyncio.Task[Any]) -> None:
        """Before ranks run, a signal just ends everything; later the attempt deals with it."""
        watched = self._attempt is not None and self._attempt.watching
        if not watched and not self._closing:
            self._closing = True  # a second signal shall not reach into the closing
            task.cancel()

    # --- prepare -----------------------------------------------------------------------------

    async def _connect(self) -> Fleet:
        count = len(self._request.hosts)
        self._screen.starting("connecting", 0, count)
        fleet = await prepare.connect(
            self._request, self._on_event, self._on_lost,
            lambda reached: self._screen.starting("connecting", reached, count),
        )  # fmt: skip
        self._screen.starting("connecting", count, count)
        for node in fleet.nodes:
            if node.channel.fingerprint:
                self._screen.note(f"paceline: pinned {node.name}: {node.channel.fingerprint}")
        self._nodes = fleet.nodes
        self.recorder.event("connected", hosts=[node.name for node in fleet.nodes])
        return fleet

    async def _prepare(self, fleet: Fleet, attempt: int = 0) -> tuple[Plan, Supplies]:
        """The plan; new nodes begin to import meanwhile, for that takes longest."""
        request = self._request
        notes = prepare.approve(request, fleet, self._inspect if attempt == 0 else None)
        supplies = asyncio.ensure_future(asyncio.to_thread(prepare.read_supplies, request))
        planning = prepare.prepare(request, fleet, supplies, notes, attempt)
        warming = warm_up(fleet, request, supplies, self._directory, self._token)
        self._importing(fleet.nodes)
        plan, _ = await together([planning, warming])
        return plan, supplies.result()

    def _inspect(self, hosts: Sequence[Host], facts: Mapping[str, Any],
                 noise: Mapping[str, str]) -> list[str]:  # fmt: skip
        self._directory.write_json(names.HOSTS, dict(facts))
        inspect = self._request.inspect
        return inspect(hosts, facts, noise) if inspect is not None else []

    def _importing(self, nodes: Sequence[Node]) -> None:
        """How far the imports are, for who waits for them."""
        if preload := self._request.job.preload:
            done = sum(1 for node in nodes if node.loaded)
            module = preload[0].split(".")[0].rstrip("?")
            self._screen.starting(f"importing {module}", done, len(nodes))

    # --- execute -----------------------------------------------------------------------------

    async def execute(self, plan: Plan, fleet: Fleet, supplies: Supplies,
                      interrupts: Interrupts) -> Result:  # fmt: skip
        """Does what the plan says; after a failure again, all in step, as often as was allowed.

        Args:
            plan: What runs where.
            fleet: The nodes, in the plan's order.
            supplies: What the plan sends to them.
            interrupts: The user's signals.
        """
        allowed = self._request.job.max_restarts.value
        await self._supply(plan, fleet, supplies)
        for number in range(allowed + 1):
            try:
                if plan.attempt < number:
                    plan = await self._once_more(plan, fleet, number)
                result = await self._start(plan, fleet, interrupts)
            except (ConnectionError, NodeError):
                if number == 0 or fleet.whole:
                    raise
                result = Result(1, lost_between(fleet))
            self._failure = failure = result.failure
            await self._results.bring_home(fleet)
            if failure is None or interrupts.received or number == allowed:
                break
            if why := await restart.full_disk(fleet, failure):
                self._screen.note(f"paceline: {why}: the job is not started again")
                break
            what = failure.describe()
            if not fleet.whole:
                self._screen.note(f"paceline: {what}")
                if (joined := await self._whole_again(plan, fleet, number + 1)) is None:
                    break
                plan, back = joined
                what = f"{', '.join(back)} {'is' if len(back) == 1 else 'are'} back"
            self._screen.note(
                f"paceline: {what}; starting all nodes again, {number + 1} of {allowed}"
            )
        if interrupts.received and failure is not None:
            signum = interrupts.received[0]
            return replace(result, exit_code=128 + signum, interrupted=signum)
        return result

    async def _supply(self, plan: Plan, fleet: Fleet, supplies: Supplies) -> None:
        """Sends what the plan says is sent; tells of which folders here those are copies."""
        self._plan_is(plan)
        self._results.expect_from(fleet.first)
        await send_copies(plan, fleet, supplies, self._screen.sending)
        trees = {"code": supplies.code, "paceline": supplies.package}
        for node in fleet.nodes:
            for name, tree in trees.items():
                if tree is None or name not in node.copies:
                    continue
                place = (node.name, node.copies[name][0], str(tree.root))
                if place not in self._screen.homes:
                    self._screen.homes.append(place)
                    self.recorder.event("copied", node.name, copy=place[1], home=place[2])

    def _plan_is(self, plan: Plan) -> None:
        self.plan = plan
        self._directory.write_json(names.PLAN, plan.to_json())

    async def _start(self, plan: Plan, fleet: Fleet, interrupts: Interrupts) -> Result:
        """One attempt, from warm fork servers to the end of the last rank."""
        job = self._request.job
        await fork_servers_up(fleet, job)
        if plan.attempt == 0:
            self._screen.started()
            self._announce(plan)
        attempt = self._attempt = Attempt(plan, job, fleet, interrupts, self._screen, self.recorder)
        try:
            result = await attempt.run()
        finally:
            self._attempt = None
        if result.failure is not None and result.failure.kind == "lost":
            await self._tell_why(result.failure.host, fleet)
        if result.exit_code == 0 and plan.world_size > 1 and not attempt.joined:
            self._warn_never_joined(plan)
        return result

    async def _once_more(self, plan: Plan, fleet: Fleet, number: int) -> Plan:
        """The plan of a further attempt on the same nodes."""
        asked = self._request.job.master_port
        port = await prepare.hold_port(fleet.first, plan.master_addr, asked)
        plan = decide.next_attempt(plan, number, port)
        self._plan_is(plan)
        return plan

    async def _whole_again(self, plan: Plan, fleet: Fleet,
                           number: int) -> tuple[Plan, list[str]] | None:  # fmt: skip
        """Has lost hosts join once more; the plan of the next attempt and their names."""
        request = self._request
        try:
            back = await restart.dial_lost(fleet, request.job, request.transport, self._screen.note)
            if not back:
                return None
            self.recorder.event("connected", hosts=back)
            prepared, supplies = await self._prepare(fleet, number)
            plan = replace(prepared, notes=plan.notes)
            await self._supply(plan, fleet, supplies)
        except (PacelineError, ConnectionError) as error:
            self._screen.note(f"paceline: not started again: {error}")
            return None
        return plan, back

    async def _tell_why(self, name: str, fleet: Fleet) -> None:
        """What the scheduler knows of a lost node, in its own words."""
        for host in fleet.hosts:
            if host.name == name and (words := await self._request.transport.why(host)):
                self._screen.note(f"paceline: {words}")
                self.recorder.event("scheduler", name, words=words)

    def _announce(self, plan: Plan) -> None:
        ranks, hosts = plan.world_size, len(plan.nodes)
        where = plan.nodes[0].host if hosts == 1 else f"{hosts} hosts"
        self._screen.note(
            f"paceline: {ranks} rank{'s' * (ranks > 1)} on {where}, "
            f"run directory {short(self._directory.path)}"
        )
        for text in plan.notes:
            self._screen.note(f"paceline: note: {text}")

    def _warn_never_joined(self, plan: Plan) -> None:
        job = self._request.job
        spawns = job.own_store  # processes of the script's own, which nobody counts
        if job.entry.kind != "binary" and job.needs_torch and not spawns:
            self._screen.note(
                f"paceline: warning: {plan.world_size} ranks ran, but none called "
                "init_process_group: they may have trained separate models"
            )

    # --- what agents say ---------------------------------------------------------------------

    def _on_event(self, node: Node, event: Event) -> None:
        if event.kind in ("imported", "import failed", "fork server died"):
            node.take_fork_server(event)
            self._importing(self._nodes)
        if self._attempt is not None:
            self._attempt.take(node, event)
        self._results.heard(node, event)
        try:
            self.recorder.take(event)
        except NodeError as error:  # a run that leaves no trace is not worth its time
            if self._attempt is not None:
                headline = str(error)
                failure = Failure("record", HERE, None, time.monotonic(), headline=headline)
                self._attempt.fail(failure)

    def _on_lost(self, node: Node, why: str) -> None:
        if self._attempt is not None:
            self._attempt.node_lost(node, why)
        self.recorder.event("lost", node.name, why=why)


def lost_between(fleet: Fleet) -> Failure:
    """The loss of a node before the ranks of a further attempt ran."""
    node = next(node for node in fleet.nodes if node.lost)
    return Failure("lost", node.name, None, time.monotonic(), headline=node.why)


# --- the whole as a function ------------------------------------------------------------------


def secrets_of(job: Job, cluster: Cluster) -> tuple[str, ...]:
    """Values that no file of the run may show."""
    on_hosts = [value for host in cluster.hosts for value in secrets_among(host.env)]
    return (*job.environment.secrets(), *on_hosts)


def request_of(job: Job, cluster: Cluster, transport: Transport, package: Package = False,
               inspect: Inspect | None = None, plan: Plan | None = None) -> Request:  # fmt: skip
    """A job on the hosts of a cluster that it asks for. SettingError when there are too few."""
    hosts = decide.choose_hosts(job, cluster)
    request = Request(job, hosts, transport, package, tuple(cluster.notes), inspect, plan)
    return replace(request, run_id=plan.run_id) if plan else request


def plan_job(job: Job, cluster: Cluster, transport: Transport, package: Package = False,
             inspect: Inspect | None = None) -> Plan:  # fmt: skip
    """The plan that :func:`run_job` would execute."""
    return asyncio.run(make_plan(request_of(job, cluster, transport, package, inspect)))


def run_job(job: Job, cluster: Cluster, transport: Transport, screen: Screen, *,
            run_dir: Path | None, parent: Path, package: Package = False,
            inspect: Inspect | None = None, plan: Plan | None = None) -> RunOutcome:  # fmt: skip
    """Runs a job to its end.

    Args:
        job: What to run.
        cluster: Where.
        transport: How the agents are started and spoken to.
        screen: What the user sees.
        run_dir: The run directory; ``None`` makes a fresh one below ``parent``.
        parent: Folder of run directories.
        package: Ship this installation's ``paceline`` to the nodes, or parts of it.
        inspect: Looks at the nodes' facts before anything is started.
        plan: Made by :func:`plan_job` of the same values: it is executed, or the job not started.

    Raises:
        PacelineError: The job could not be started.
    """
    began = time.monotonic()
    request = request_of(job, cluster, transport, package, inspect, plan)
    path = run_dir or fresh_path(parent, job.name)
    directory = RunDirectory(path, secrets_of(job, cluster))
    run_id = request.run_id
    try:
        launcher = Launcher(request, screen, directory)
        try:
            result = asyncio.run(launcher.run())
        except PacelineError as error:
            result = Result(error.exit_code, error=error.render())
            _write_result(directory, run_id, result, began, {})
            raise
        result = _for_reader(result, screen.homes, directory)
        _write_result(directory, run_id, result, began, launcher.recorder.metrics)
    finally:
        screen.close()
        directory.close()
    recorder = launcher.recorder
    seconds = time.monotonic() - began
    failure = result.failure
    told = failure is not None and failure.rank is not None and screen.before_eyes(
        failure.host, failure.rank)  # fmt: skip
    return RunOutcome(
        directory.path, result, recorder.events, recorder.metrics, seconds,
        directory.begins, recorder.resumable,
        launcher.plan.world_size if launcher.plan else 0, tuple(screen.homes), told,
    )  # fmt: skip


def _for_reader(result: Result, homes: Sequence[Home], directory: RunDirectory) -> Result:
    """The failure with the user's own paths, and without secrets."""
    failure = result.failure
    if failure is None:
        return result
    headline, traceback = (
        directory.redacted(at_home(homes, failure.host, text))
        for text in (failure.headline, failure.traceback)
    )
    return replace(result, failure=replace(failure, headline=headline, traceback=traceback))


def _write_result(directory: RunDirectory, run_id: str, result: Result, began: float,
                  metrics: dict[str, Any]) -> None:  # fmt: skip
    about = {
        "run_id": run_id,
        "exit_code": result.exit_code,
        "seconds": round(time.monotonic() - began, 3),
        "metrics": metrics,
    }
    directory.write_json(names.RESULT, {**about, **result.to_json()})
