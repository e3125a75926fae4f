"""Runs a job, or only plans it: the functions of :mod:`paceline.launch` that commands call."""

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
from paceline.rundir.directory import RunDirectory, fresh_path
from paceline.spec import rundir as names
from paceline.spec.errors import PacelineError
from paceline.spec.events import Event, ShippedCopy, restore_local_paths
from paceline.spec.failure import LAUNCHER_HOST, Failure, Result
from paceline.spec.hosts import Cluster, Inspect
from paceline.spec.job import Job, secret_values
from paceline.spec.plan import Plan


@dataclass(frozen=True, slots=True)
class Left:
    """What the launching machine has decided for a run that a supervisor takes over.

    Attributes:
        run_id: Names the run.
        supplies: What the nodes may have to be sent, as it was on the launching machine; ``None``
            where that is this machine.
        heard: Told what agents say.
    """

    run_id: str
    supplies: Supplies | None
    heard: Callable[[Event], None]


def secrets_of(job: Job, cluster: Cluster) -> tuple[str, ...]:
    """Returns the values that must not appear in any file of the run."""
    on_hosts = [value for host in cluster.hosts for value in secret_values(host.env)]
    return (*job.environment.secrets(), *on_hosts, *notify.secrets_among(job.notify))


def request_of(job: Job, cluster: Cluster, transport: Transport, package: Package = False,
               inspect: Inspect | None = None, plan: Plan | None = None,
               keep_warm_s: float = 0.0, left: Left | None = None) -> Request:  # fmt: skip
    """Makes a request from a job and the hosts it selects; SettingError if there are too few."""
    hosts = planner.choose_hosts(job, cluster)
    request = Request(job, hosts, transport, package, tuple(cluster.notes), inspect, plan,
                      keep_warm_s, among=cluster.among)  # fmt: skip
    if left is not None:
        return replace(request, run_id=left.run_id, supplies=left.supplies)
    return replace(request, run_id=plan.run_id) if plan else request


def plan_job(job: Job, cluster: Cluster, transport: Transport, package: Package = False,
             inspect: Inspect | None = None) -> Plan:  # fmt: skip
    """Returns the plan that :func:`run_job` would execute."""
    return run(_make_plan(request_of(job, cluster, transport, package, inspect)))


async def _make_plan(request: Request) -> Plan:
    """Connects the hosts, makes the plan that a run would execute, and lets the hosts go."""
    fleet, missing = await connect(request, lambda node, event: None, lambda node, why: None)
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
            keep_warm_s: float = 0.0, left: Left | None = None) -> RunOutcome:  # fmt: skip
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
        keep_warm_s: How long the hosts stay ready for the next command of this user, in seconds.
        left: What a launching machine that is another one has settled.

    Raises:
        PacelineError: The job could not be started.
    """
    began = time.monotonic()
    path = (run_dir or fresh_path(parent, job.name)).absolute()
    request = request_of(job, cluster, transport, package, inspect, plan, keep_warm_s,
                         left)  # fmt: skip
    directory = RunDirectory(path, secrets_of(job, cluster), request.run_id)
    return _run(request, screen, directory, began, left)


def _run(request: Request, screen: Screen, directory: RunDirectory,
         began: float, left: Left | None) -> RunOutcome:  # fmt: skip
    """Runs the job and collects its results; PacelineError, also recorded, if it never began."""
    run_id = request.run_id
    try:
        launcher = Launcher(request, screen, directory, left.heard if left else lambda event: None)
        try:
            result = run(launcher.run())
        except PacelineError as error:
            result = Result(error.exit_code, error=error.render())
            write_result(directory, run_id, result, began, {})
            raise
        result = _for_reader(result, screen.homes, directory)
        if result.failure is None and not directory.is_owned:
            headline = f"the run directory {directory.path} was removed while the run went on"
            removed = Failure("record", LAUNCHER_HOST, None, time.monotonic(), headline=headline)
            result = replace(result, exit_code=result.exit_code or 1, failure=removed)
        write_result(directory, run_id, result, began, launcher.recorder.metrics)
    finally:
        screen.close()
        directory.close()
    recorder, plan = launcher.recorder, launcher.driver.plan
    seconds = time.monotonic() - began
    failure = result.failure
    was_shown = failure is not None and failure.rank is not None and screen.before_eyes(
        failure.host, failure.rank)  # fmt: skip
    return RunOutcome(
        directory.path, result, recorder.events, recorder.metrics, seconds,
        directory.begins, is_resumable(result, recorder.events),
        plan.world_size if plan else 0, tuple(screen.homes), was_shown,
    )  # fmt: skip


def _for_reader(result: Result, homes: Sequence[ShippedCopy], directory: RunDirectory) -> Result:
    """Returns the failure with local paths and without secrets."""
    failure = result.failure
    if failure is None:
        return result
    headline, traceback = (
        directory.redacted(restore_local_paths(homes, failure.host, text))
        for text in (failure.headline, failure.traceback)
    )
    return replace(result, failure=replace(failure, headline=headline, traceback=traceback))


def write_result(directory: RunDirectory, run_id: str, result: Result, began: float,
                 metrics: dict[str, Any]) -> None:  # fmt: skip
    """How the run ended, for ``result.json``; ``began`` by the monotonic clock."""
    summary = {
        "run_id": run_id,
        "exit_code": result.exit_code,
        "seconds": round(time.monotonic() - began, 3),
        "metrics": metrics,
    }
    directory.free_reserve()
    directory.write_json(names.RESULT, {**summary, **result.to_json()})
