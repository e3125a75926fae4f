"""Runs or plans a job: the entry points of :mod:`paceline.launch` for commands."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.launch import notify
from paceline.launch.interrupts import run
from paceline.launch.launcher import Launcher
from paceline.launch.nodes import survey
from paceline.launch.nodes.connect import connect
from paceline.launch.planning import planner
from paceline.launch.planning.planner import Supplies
from paceline.launch.planning.request import Package, Request
from paceline.launch.results.summary import RunOutcome, is_resumable
from paceline.launch.terminal.screen import Screen
from paceline.remote.transport import Transport
from paceline.rundir import records, signatures
from paceline.rundir.directory import RunDirectory, fresh_path
from paceline.spec import rundir as names
from paceline.spec.errors import PacelineError
from paceline.spec.events import Event, ShippedCopy, restore_local_paths
from paceline.spec.failure import LAUNCHER_HOST, Failure, Result
from paceline.spec.hosts import Cluster, Inspect
from paceline.spec.job import Job, secret_values
from paceline.spec.plan import Plan


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
        signatures.forget_removed(path)
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
        directory.start_offsets, is_resumable(result, events),
        executed.world_size if executed else 0, tuple(screen.shipped_copies), is_displayed,
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
