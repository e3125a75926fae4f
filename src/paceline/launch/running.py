"""The launcher as a function: run a job to its end and leave a result behind."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.launch import decide
from paceline.launch.launcher import Launcher
from paceline.launch.outcome import describe_end
from paceline.launch.prepare import Inspect, Package, Request, make_plan
from paceline.launch.screen import Screen
from paceline.remote.transport import Transport
from paceline.rundir.directory import RunDirectory, fresh_path, short
from paceline.rundir.records import open_regular
from paceline.spec import rundir as names
from paceline.spec.command import shell_text
from paceline.spec.errors import PacelineError
from paceline.spec.events import Event, Home, at_home
from paceline.spec.failure import Result, signal_name
from paceline.spec.hosts import Cluster
from paceline.spec.job import Job
from paceline.spec.plan import Plan

LAST_LINES = 20
LAST_BYTES = 16384  # read of a log for them


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What a finished run left.

    Attributes:
        path: The run directory.
        result: How it ended.
        events: What happened, as events.jsonl holds it.
        metrics: The last value of every metric that was reported.
        seconds: From the call to the end.
        begins: Bytes that earlier runs had left in the logs, by name.
        resumable: The training was asked to stop and saved its state.
        ranks: How many were planned.
        homes: Where shipped copies of folders of this machine were.
        told: The last lines of the rank that failed first stand on the screen already.
    """

    path: Path
    result: Result
    events: tuple[Event, ...]
    metrics: dict[str, Any]
    seconds: float
    begins: Mapping[str, int] = field(default_factory=dict)
    resumable: bool = False
    ranks: int = 0
    homes: Sequence[Home] = ()
    told: bool = False

    @property
    def shown(self) -> Path:
        """The run directory as people type it from here."""
        return Path(short(self.path))


def request_of(job: Job, cluster: Cluster, transport: Transport, package: Package = False,
               inspect: Inspect | None = None) -> Request:  # fmt: skip
    """A job on the hosts of a cluster that it asks for. SettingError when there are too few."""
    hosts = decide.choose_hosts(job, cluster)
    return Request(job, hosts, transport, package, tuple(cluster.notes), inspect)


def plan_job(job: Job, cluster: Cluster, transport: Transport, package: Package = False,
             inspect: Inspect | None = None) -> Plan:  # fmt: skip
    """The plan that :func:`run_job` would execute."""
    return asyncio.run(make_plan(request_of(job, cluster, transport, package, inspect)))


def run_job(job: Job, cluster: Cluster, transport: Transport, screen: Screen, *,
            run_dir: Path | None, parent: Path, package: Package = False,
            inspect: Inspect | None = None) -> RunOutcome:  # fmt: skip
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

    Raises:
        PacelineError: The job could not be started.
    """
    began = time.monotonic()
    request = request_of(job, cluster, transport, package, inspect)
    path = run_dir or fresh_path(parent, job.name)
    directory = RunDirectory(path, job.environment.secrets())
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
    blamed = result.failure
    told = blamed is not None and blamed.rank is not None and screen.before_eyes(
        blamed.host, blamed.rank)  # fmt: skip
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


def report_success(outcome: RunOutcome) -> str:
    """One line at the end of a run that went well."""
    ranks = f"{outcome.ranks} rank{'s' * (outcome.ranks != 1)}"
    took = f"{outcome.seconds:.{0 if outcome.seconds >= 2 else 1}f} s"
    return f"paceline: finished: {ranks}, {took}, logs {short(outcome.path / names.LOGS)}"


def report_failure(outcome: RunOutcome) -> str:
    """The last thing the user reads: who failed first, its traceback, where the rest is."""
    result = outcome.result
    if result.failure is None:
        if result.interrupted is not None:
            text = f"paceline: stopped by {signal_name(result.interrupted)}: {short(outcome.path)}"
            return "\n".join([text, *_to_resume(outcome)])
        return ""
    failure = result.failure
    lines = [f"paceline: failed first: {failure.describe()}"]
    if failure.kind == "exception":
        lines[0] += f" ({describe_end(failure.code, failure.signal)})" if failure.code else ""
        lines.append(_indent(failure.traceback))
    elif failure.rank is not None and not outcome.told:
        name = names.log_file(failure.host, failure.rank)
        if last := last_lines(outcome.path / name, outcome.begins.get(name, 0)):
            last = at_home(outcome.homes, failure.host, last)
            lines += ["  its last lines:", _indent(last)]
    if result.others:
        noun = "rank" if result.others == 1 else "ranks"
        lines.append(f"  {result.others} other {noun} failed after it")
    lines.append(f"  logs: {short(outcome.path / names.LOGS)}")
    return "\n".join([*lines, *_to_resume(outcome)])


def _to_resume(outcome: RunOutcome) -> list[str]:
    """The command that was typed, as it goes on in the same run directory."""
    if not outcome.resumable:
        return []
    argv = ["paceline", *sys.argv[1:]]
    if not any(word.split("=")[0] == "--run-dir" for word in argv):
        argv[2:2] = ["--run-dir", short(outcome.path)]
    return [f"to resume: {shell_text(argv)}"]


def last_lines(log: Path, begins: int = 0, count: int = LAST_LINES) -> str:
    """The end of what a log has beyond its first bytes; empty when there is none."""
    try:
        with open_regular(log) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(begins, size - LAST_BYTES))
            data = file.read(LAST_BYTES)
    except OSError:
        return ""
    return "\n".join(data.decode(errors="replace").splitlines()[-count:])


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines())


__all__: Sequence[str] = [
    "RunOutcome",
    "last_lines",
    "report_failure",
    "report_success",
    "run_job",
]
