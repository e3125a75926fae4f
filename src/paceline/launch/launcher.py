"""Runs or plans a job: connects the hosts, plans, runs the ranks, collects the results.

Commands call :func:`run_job` or :func:`plan_job`; a :class:`Launcher` performs the steps of a run.
"""

from __future__ import annotations

import asyncio
import importlib
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.launch import notify
from paceline.launch.control import ControlServer, RunActions
from paceline.launch.elastic.driver import ElasticDriver
from paceline.launch.elastic.retry_policy import MAX_STARTS
from paceline.launch.interrupts import Interrupts, run
from paceline.launch.nodes import survey
from paceline.launch.nodes.connect import connect
from paceline.launch.nodes.fleet import Fleet
from paceline.launch.nodes.provisioner import Provisioner
from paceline.launch.planning import planner
from paceline.launch.planning.placement import Supplies
from paceline.launch.planning.request import Package, Request
from paceline.launch.recorder import Recorder
from paceline.launch.results.collector import ResultCollector
from paceline.launch.results.outputs import OutputSync
from paceline.launch.results.run_outcome import RunOutcome, is_resumable
from paceline.launch.terminal.screen import Screen
from paceline.remote.fanout import gather_all
from paceline.remote.transport import Transport
from paceline.rundir import records, signatures, signed_model
from paceline.rundir.directory import RunDirectory, fresh_path, short
from paceline.spec import rundir as names
from paceline.spec.errors import NodeError, PacelineError
from paceline.spec.events import Event, ShippedCopy, restore_local_paths
from paceline.spec.failure import LAUNCHER_HOST, Failure, Result
from paceline.spec.formatting import pluralize
from paceline.spec.hosts import Cluster, Host, Inspect
from paceline.spec.job import Job, secret_values
from paceline.spec.plan import Plan

READ_DELAY_S = 0.02  # by then the logins are under way and leave time for other work
ATTEMPT_MODULE = "paceline.launch.elastic.attempt"  # imported while hosts connect


@dataclass(frozen=True, slots=True)
class Takeover:
    """Decisions of the launching machine for a run that a supervisor takes over.

    Attributes:
        supplies: Files for the nodes, as they were on the launching machine; ``None`` if that is
            this machine.
        on_event: Called with every event of an agent.
    """

    run_id: str
    supplies: Supplies | None
    on_event: Callable[[Event], None]


def secrets_of(job: Job, cluster: Cluster) -> tuple[str, ...]:
    """Returns the values that must not appear in any file of the run."""
    on_hosts = [value for host in cluster.hosts for value in secret_values(host.env)]
    return (*job.environment.secrets(), *on_hosts, *notify.secret_addresses(job.notify))


def request_of(job: Job, cluster: Cluster, transport: Transport, package: Package = False,
               inspect: Inspect | None = None, plan: Plan | None = None,
               keep_warm_s: float = 0.0, takeover: Takeover | None = None) -> Request:  # fmt: skip
    """Makes a request from a job and the hosts it selects; SettingError if there are too few."""
    hosts = planner.choose_hosts(job, cluster)
    request = Request(job, hosts, transport, package, tuple(cluster.notes), inspect, plan,
                      keep_warm_s, among=cluster.among)  # fmt: skip
    if takeover is not None:
        return replace(request, run_id=takeover.run_id, supplies=takeover.supplies)
    return replace(request, run_id=plan.run_id) if plan else request


def plan_job(job: Job, cluster: Cluster, transport: Transport, package: Package = False,
             inspect: Inspect | None = None) -> Plan:  # fmt: skip
    """Returns the plan that :func:`run_job` would execute."""
    return run(_make_plan(request_of(job, cluster, transport, package, inspect)))


async def _make_plan(request: Request) -> Plan:
    """Connects the hosts, makes the plan that a run would execute, and lets the hosts go."""
    fleet, missing = await connect(request)
    try:
        with survey.naming_lost_nodes(fleet):
            notes = survey.approve(request, fleet, request.inspect)
            notes += [f"{host} is missing: {why or 'no answer'}" for host, why in missing.items()]
            supplies = asyncio.to_thread(survey.read_supplies, request)
            return await survey.prepare(request, fleet, supplies, notes)
    finally:
        await fleet.close()
        await request.transport.close(0)


def run_job(job: Job, cluster: Cluster, transport: Transport, screen: Screen, *,
            run_dir: Path | None, parent: Path, package: Package = False,
            inspect: Inspect | None = None, plan: Plan | None = None,
            keep_warm_s: float = 0.0, takeover: Takeover | None = None) -> RunOutcome:  # fmt: skip
    """Runs a job to its end.

    Args:
        job, cluster, transport, screen: What to run, on which hosts, started and shown how.
        run_dir: The run directory; ``None`` makes a fresh one below ``parent``.
        parent: Folder of run directories.
        package: Whether to ship this installation's ``paceline``, or parts of it, to the nodes.
        inspect: Checks the nodes' facts before anything starts.
        plan: Made by :func:`plan_job` from the same values: it is executed, or nothing starts.
        keep_warm_s: How long the hosts stay ready for the next command of this user, in seconds.

    Raises:
        PacelineError: The job could not be started.
    """
    started_at = time.monotonic()
    path = (run_dir or fresh_path(parent, job.name)).absolute()
    request = request_of(job, cluster, transport, package, inspect, plan, keep_warm_s,
                         takeover)  # fmt: skip
    run_id = request.run_id
    directory = RunDirectory(path, secrets_of(job, cluster), run_id)
    on_event = takeover.on_event if takeover else lambda event: None
    try:
        signatures.require_unchanged(path)
        for note in [*signatures.forget_removed(path), *signed_model.forget_removed(path)]:
            screen.note(f"paceline: {note}")
        # a supervisor's result.json is what the launching machine waits for
        earlier = trained_records(path) if takeover is None else {}
        launcher = Launcher(request, screen, directory, on_event)
        try:
            result = run(launcher.run())
        except PacelineError as error:
            result = Result(error.exit_code, error=error.render())
            if launcher.driver.plan is not None or finished_result(path) is None:
                write_result(directory, run_id, result, started_at, {})
            raise
        result = _localize(result, screen.shipped_copies, directory)
        if result.failure is None and not directory.is_owned:
            headline = f"the run directory {directory.path} was removed while the run went on"
            removed = Failure("record", LAUNCHER_HOST, None, time.monotonic(), headline=headline)
            result = replace(result, exit_code=result.exit_code or 1, failure=removed)
        refuses = result.failure is not None and result.failure.is_refusal
        is_refused = refuses and bool(earlier) and not launcher.recorder.has_begun
        if is_refused:
            directory.free_reserve()
            for name, record in earlier.items():
                directory.write_json(name, record)
        else:
            write_result(directory, run_id, result, started_at, launcher.recorder.metrics)
    finally:
        screen.close()
        directory.close()
    recorder, executed, failure = launcher.recorder, launcher.driver.plan, result.failure
    events = recorder.events
    is_displayed = failure is not None and failure.rank is not None and screen.is_visible(
        failure.host, failure.rank)  # fmt: skip
    return RunOutcome(
        directory.path, result, events, recorder.metrics, time.monotonic() - started_at,
        is_resumable(result, events),
        executed.world_size if executed else 0, tuple(screen.shipped_copies), is_displayed,
        is_refused=is_refused,
    )  # fmt: skip


def _localize(result: Result, homes: Sequence[ShippedCopy], directory: RunDirectory) -> Result:
    """Returns the result with local paths and without secrets in its failure."""
    failure = result.failure
    if failure is None:
        return result
    headline, traceback = (
        directory.redacted(restore_local_paths(homes, failure.host, text))
        for text in (failure.headline, failure.traceback)
    )
    return replace(result, failure=replace(failure, headline=headline, traceback=traceback))


def finished_result(folder: Path) -> dict[str, Any] | None:
    """Returns the result of a run that ended well; a refused start leaves it as it is."""
    result = records.read_object(folder / names.RESULT)
    return result if result is not None and result.get("exit_code") == 0 else None


def trained_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns plan and result of a run that has trained, by file; empty if there is none.

    A start that the ranks refuse leaves them as they are.
    """
    files = {name: records.read_object(folder / name) for name in (names.PLAN, names.RESULT)}
    present = {name: record for name, record in files.items() if record is not None}
    return present if present.get(names.RESULT, {}).get("metrics") else {}


def write_result(directory: RunDirectory, run_id: str, result: Result, started_at: float,
                 metrics: dict[str, Any]) -> None:  # fmt: skip
    """Writes ``result.json``; ``started_at`` is of the monotonic clock."""
    summary = {
        "run_id": run_id,
        "exit_code": result.exit_code,
        "seconds": round(time.monotonic() - started_at, 3),
        "metrics": metrics,
    }
    directory.free_reserve()
    directory.write_json(names.RESULT, {**summary, **result.to_json()})


class Launcher:
    """One run. Calls ``on_event`` with every event of an agent."""

    def __init__(self, request: Request, screen: Screen, directory: RunDirectory,
                 on_event: Callable[[Event], None]) -> None:  # fmt: skip
        self.recorder = Recorder(directory, screen, request.job.debug.value)
        self._actions = RunActions(request.run_id, self.recorder, screen.note)
        self._request, self._screen, self._directory = request, screen, directory
        entry = request.job.entry
        self._outputs = OutputSync(directory.path, screen.note, entry.args,
                                   Path(request.job.workdir),
                                   is_measured=request.job.is_measured)  # fmt: skip
        self._results = ResultCollector(directory, screen.note, self._outputs,
                                        is_call=entry.kind == "function",
                                        is_measured=request.job.is_measured)  # fmt: skip
        self._provisioner = Provisioner(request, directory, screen, self.recorder, self._outputs)
        self.driver = ElasticDriver(request, self._provisioner, self._results, self._outputs,
                                    self._actions, screen, self.recorder, on_event,
                                    self._announce)  # fmt: skip
        self._started_at = time.monotonic()
        self._is_closing = False
        self._save_tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> Result:
        """Runs the job to its end. Raises PacelineError when it could not be started."""
        task = asyncio.current_task()
        assert task is not None
        with Interrupts(lambda: self._interrupted(task)) as interrupts:
            status, self._actions.interrupts = 1, interrupts
            if threading.current_thread() is threading.main_thread():
                asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, self._save)
            try:
                async with ControlServer(self._actions):
                    result = await self._run(interrupts)
                status = result.exit_code
                return result
            except asyncio.CancelledError:
                if not interrupts.received:
                    raise
                signum = interrupts.received[0]
                return Result(128 + signum, self.driver.failure, interrupted=signum)
            finally:
                await self._request.transport.close(status)

    def _save(self) -> None:
        """Handles SIGUSR2 as ranks do: saves a checkpoint and goes on."""

        async def save() -> None:
            try:
                await self._actions.save()  # prints a note
            except PacelineError as error:
                self._screen.note(f"paceline: SIGUSR2: {error}")

        self._save_tasks.add(asyncio.ensure_future(save()))

    async def _run(self, interrupts: Interrupts) -> Result:
        # while the launcher waits for hosts, the user may still edit the files
        reading = None if self._request.awaits_hosts else self._read_supplies(READ_DELAY_S)
        number, lost = 0, None
        while True:
            if interrupts.received:  # while the fleet was closed
                raise asyncio.CancelledError
            self._is_closing, number = False, number + 1
            fleet, missing = await self._connect(lost)
            try:
                self._record_connected(fleet, missing)
                reading = reading or self._read_supplies()
                with survey.naming_lost_nodes(fleet):
                    try:
                        plan = await self._get_ready(fleet, reading)
                    except (ConnectionError, NodeError) as error:
                        lost = await self._host_lost_before_plan(fleet, error, number)
                        if lost is None:
                            raise
                        continue
                    result = await self.driver.run(plan, interrupts)
                    await self._results.discard_run_folders(fleet)
                    return result
            finally:
                await self._close_fleet(fleet, interrupts)

    async def _host_lost_before_plan(self, fleet: Fleet, error: Exception,
                                number: int) -> NodeError | None:  # fmt: skip
        """Returns the loss of a host before the plan if the hosts are to be connected again.

        ``None`` if ``error`` is final. The lost host takes part if it is back by then.
        """
        request, policy = self._request, self.driver.policy
        redials = request.transport.redials and request.planned is None
        if not redials or not policy.reconnects(number):
            return None
        await fleet.silences_resolved()  # other hosts may explain the loss
        node = next((node for node in fleet.everyone if node.lost), None)
        if node is None:
            return None
        lost = survey.startup_loss(fleet, node, node.loss_reason or str(error))
        self._screen.note(f"paceline: {lost.message} ({lost.brief}); starting again, before the"
                          f" first step ({number} of {MAX_STARTS - 1})")  # fmt: skip
        return lost

    async def _close_fleet(self, fleet: Fleet, interrupts: Interrupts) -> None:
        self._is_closing = True
        for channel in await asyncio.gather(*(call.stop() for call in self.driver.dialling)):
            if channel is not None:
                await channel.close()
        self.driver.dialling.clear()
        at_once = len(interrupts.received) > 1
        keep_warm_s = None if at_once else self._request.keep_warm_s
        await fleet.close(hurry=bool(interrupts.received), keep_warm_s=keep_warm_s)
        for node in [*fleet.everyone, *fleet.former]:
            self.recorder.agent_log(node.name, node.channel.take_stderr())

    def _interrupted(self, task: asyncio.Task[Any]) -> None:
        """Cancels the run on a signal before ranks run; later the attempt handles signals."""
        attempt = self.driver.attempt
        if not (attempt is not None and attempt.is_watching) and not self._is_closing:
            self._is_closing = True  # a second signal must not interrupt the closing
            task.cancel()

    # --- connect and plan --------------------------------------------------------------------

    async def _connect(self, lost: NodeError | None) -> tuple[Fleet, dict[str, str]]:
        """Connects the hosts, as :func:`connect`; raises ``lost`` if a reconnection fails."""
        request, driver, note = self._request, self.driver, self._screen.note
        count = len(request.hosts)
        self._screen.starting("connecting", 0, count)
        try:
            fleet, missing = await connect(
                request, lambda reached: self._screen.starting("connecting", reached, count), note,
                lost is not None,
                driver.dialling if request.transport.redials else None, self.recorder.set_waiting,
            )  # fmt: skip
        except PacelineError:
            if lost is None:
                raise
            raise lost from None
        finally:
            self.recorder.set_waiting(None)
        driver.take_over(fleet, missing)
        return fleet, missing

    def _record_connected(self, fleet: Fleet, missing: Mapping[str, str]) -> None:
        """Records and shows which hosts are connected. NodeError if it cannot be recorded."""
        count, num_connected = len(self._request.hosts), len(fleet.everyone)
        self._screen.starting("connecting", num_connected, num_connected)
        for node in fleet.everyone:
            if node.channel.fingerprint:
                self._screen.note(f"paceline: pinned {node.name}: {node.channel.fingerprint}")
        self.recorder.event("connected", run_id=self._request.run_id,
                            hosts=[node.name for node in fleet.everyone])  # fmt: skip
        if missing:
            hosts = ", ".join(f"{host} ({why or 'no answer'})" for host, why in missing.items())
            self._screen.note(
                f"paceline: starting with {num_connected} of {count} hosts, without {hosts}"
            )

    def _read_supplies(self, delay_s: float = 0.0) -> asyncio.Future[Supplies]:
        """Reads the files that the nodes may need, in a thread."""

        async def read() -> Supplies:
            await asyncio.sleep(delay_s)
            supplies = await asyncio.to_thread(
                survey.read_and_cache_supplies,
                self._request,
                frozenset(self._outputs.store.paths()),
            )
            loop = asyncio.get_running_loop()
            loop.run_in_executor(None, importlib.import_module, ATTEMPT_MODULE)
            return supplies

        reading = asyncio.ensure_future(read())
        # retrieve the error here: if nobody needs the supplies, asyncio must not report it
        reading.add_done_callback(lambda read: read.cancelled() or read.exception())
        return reading

    async def _get_ready(self, fleet: Fleet, reading: asyncio.Future[Supplies]) -> Plan:
        """Makes the plan and sends the nodes their files.

        Meanwhile the nodes' fork servers begin to import, which takes longest.
        """
        notes = survey.approve(self._request, fleet, self._inspect)
        planning = survey.prepare(self._request, fleet, reading, notes)
        warming = self._provisioner.start_fork_servers(fleet)
        self.driver.show_imports()
        plan: Plan
        plan, _ = await gather_all([planning, warming])
        project = survey.scripts_project(self._request)
        set_code = asyncio.to_thread(self._outputs.set_code, reading.result(), project)
        self._provisioner.supplies = await set_code
        self.driver.set_plan(plan)
        self._results.set_first_node(fleet.first)
        await self._provisioner.send(plan, fleet)
        await self._outputs.start(fleet, plan.world_size)
        return plan

    def _inspect(self, hosts: Sequence[Host], facts: Mapping[str, Any],
                 noise: Mapping[str, str]) -> list[str]:  # fmt: skip
        self._directory.write_json(names.HOSTS, dict(facts))
        inspect = self._request.inspect
        return inspect(hosts, facts, noise) if inspect is not None else []

    def _announce(self, plan: Plan) -> None:
        """Announces the run once all nodes can start ranks."""
        path, hosts = self._directory.path, len(plan.nodes)
        ranks = pluralize(plan.world_size, "rank")
        location = plan.nodes[0].host if hosts == 1 else f"{hosts} hosts"
        self._screen.started()
        self._screen.note(f"paceline: {ranks} on {location}, run directory {short(path)}")
        for text in plan.notes:
            self._screen.note(f"paceline: note: {text}")
        self._screen.start_live(
            self.recorder.run_state, title=short(path), logs=short(path / names.LOGS),
            seconds=time.monotonic() - self._started_at, actions=self._actions,
        )  # fmt: skip
