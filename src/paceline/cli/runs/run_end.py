"""Runs a job to its end, and shows, records and reports how it ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.verb import say
from paceline.launch.results.run_outcome import RunOutcome, saved_steps
from paceline.rundir.directory import Redactor, short, write_explanation
from paceline.rundir.output_rules import series_of
from paceline.rundir.outputs import script_checkpoint
from paceline.rundir.ownership import read_owner
from paceline.spec.errors import ConnectError, PacelineError
from paceline.spec.events import Event, replica_difference, restore_local_paths
from paceline.spec.failure import (
    LAUNCHER_HOST,
    Failure,
    Result,
    describe_end,
    format_location,
    signal_name,
)
from paceline.spec.formatting import format_duration, pluralize, shell_text
from paceline.spec.hosts import Cluster
from paceline.spec.job import Job, NodeRange
from paceline.spec.rundir import DEBUG, LOGS, PLAN, REPORT, checkpoints
from paceline.spec.terminal import format_for

if TYPE_CHECKING:
    from paceline.launch.launcher import Takeover
    from paceline.launch.planning.request import Package
    from paceline.launch.terminal.screen import Screen
    from paceline.remote.transport import Transport
    from paceline.spec.hosts import Inspect

REPORT_S = 3.0  # for the page; usually it takes a tenth
EXPLAIN_S = 4.0  # for the explanation after a failure; `paceline explain` takes its time
# rules whose cause is in the last lines of a failed run, which are shown anyway
SHOWN_IN_LOG_TAIL = ("exception", "reported-by-program")

_NEWEST = "paceline: newest checkpoint of the script: "


def run_to_end(
    job: Job,
    cluster: Cluster,
    transport: Transport,
    screen: Screen,
    *,
    run_dir: Path,
    parent: Path,
    package: Package,
    inspect: Inspect | None,
    on_success: Callable[[Path], None] | None = None,
    keep_warm_s: float = 0.0,
    detached: Takeover | None = None,
    is_generated: bool = False,
) -> int:
    """Runs a job and says how it ended; returns its exit status.

    Args:
        on_success: Called with the run directory once the job has ended well.
        is_generated: The run directory has a generated name; it is removed when the job is refused
            before there is a plan.
    """
    from paceline.launch.launcher import run_job, secrets_of
    from paceline.schedulers.submission import submitting_arguments

    secrets = secrets_of(job, cluster)
    with notify_on_end(job, run_dir.absolute(), secrets, screen) as end:
        with (
            record_refusal(job, run_dir, secrets, is_generated=is_generated),
            suggest_node_range(job, cluster),
        ):
            outcome = run_job(job, cluster, transport, screen, run_dir=run_dir, parent=parent,
                              package=package, inspect=inspect, keep_warm_s=keep_warm_s,
                              takeover=detached)  # fmt: skip
        outcome = replace(outcome, command=submitting_arguments(outcome.path, os.environ))
        end.append(outcome)
        report_end(job, outcome, on_success)
    return outcome.result.exit_code


@contextlib.contextmanager
def notify_on_end(job: Job, run_dir: Path, secrets: Sequence[str],
         screen: Screen) -> Iterator[list[RunOutcome]]:  # fmt: skip
    """Notifies those that ``--notify`` names of how a job ended, when all of its files are there.

    The caller puts the outcome into the list; without one the job was not started.
    """
    from paceline.launch import notify
    from paceline.rundir.records import recorded_cause

    start = time.monotonic()
    outcomes: list[RunOutcome] = []
    for warning in notify.missing_programs(job.notify):
        screen.note(warning)
    ended: notify.RunEnd | None = None
    try:
        yield outcomes
    except Exception as error:
        headline = f"internal error: {error!r}"
        result = Result(1, Failure("launcher", LAUNCHER_HOST, None, headline=headline))
        if isinstance(error, PacelineError):
            result = Result(error.exit_code, error=error.render())
        ended = notify.RunEnd(run_dir, job.name, result, time.monotonic() - start, secrets=secrets)
        raise
    finally:
        for outcome in outcomes:
            ended = notify.RunEnd(run_dir, job.name, outcome.result, outcome.seconds,
                                 outcome.metrics, outcome.resumable, secrets,
                                 recorded_cause(outcome.path))  # fmt: skip
        if ended is not None:
            notify.notify_all(job.notify, ended, screen.note)
            screen.close()


@contextlib.contextmanager
def suggest_node_range(job: Job, cluster: Cluster) -> Iterator[None]:
    """Adds to the remedy of a failed login how to start with the hosts that answered."""
    try:
        yield
    except ConnectError as error:
        nodes = job.nnodes.value
        if error.num_refusals and not isinstance(nodes, NodeRange):
            num_hosts = nodes or len(cluster.hosts)
            if (num_answers := num_hosts - error.num_refusals) > 0:
                error.remedy += (
                    f"\nOr start with the hosts that answer: --nnodes {num_answers}:{num_hosts}"
                )
        raise


@contextlib.contextmanager
def record_refusal(job: Job, run_dir: Path, secrets: Sequence[str], *,
                      is_generated: bool) -> Iterator[None]:  # fmt: skip
    """Records why a job could not be started, with a page; the caller shows the error."""
    from paceline.launch.launcher import finished_result

    try:
        yield
    except PacelineError as error:
        if read_owner(run_dir) is not None or finished_result(run_dir):  # of another run
            raise
        if is_generated and not (run_dir / PLAN).exists():
            shutil.rmtree(run_dir, ignore_errors=True)
            with contextlib.suppress(OSError):  # other runs are in it
                run_dir.parent.rmdir()
        else:
            text = Redactor(secrets).text(error.render())
            explain_run(run_dir, Result(error.exit_code, error=text), (), is_shown=False)
            report_run(job, run_dir)
        raise


def report_end(job: Job, outcome: RunOutcome, on_success: Callable[[Path], None] | None) -> None:
    """Shows how a run ended, why if it failed, and its page."""
    if job.debug.value:
        print_library_logs(outcome.path)
    explain_difference(outcome.path, outcome.result, outcome.events)
    if text := report_failure(outcome):
        say(text, err=True)
        if outcome.is_refused:  # findings and page are those of the earlier run
            return
        has_failure = outcome.result.failure is not None
        explain_run(outcome.path, outcome.result, outcome.events, has_failure)
    elif on_success is not None:
        on_success(outcome.display_path)
    else:
        say(report_success(outcome), err=True)
    if outcome.result.exit_code == 0:
        from paceline.bench.saved_forecasts import compare_at_end

        if comparison := compare_at_end(outcome.path):
            say(comparison, err=True)
    report_run(job, outcome.path)


def report_success(outcome: RunOutcome) -> str:
    """Returns a line for a run that went well, and one for a checkpoint of its script."""
    finished, missing = _count_finished(outcome)
    ranks = pluralize(finished, "rank")
    if missing:
        listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if missing[3:] else "")
        ranks += f" ({listed} missing at the end)"
    duration = format_duration(outcome.seconds)
    recovered = ""
    if recoveries := outcome.result.recoveries:
        noun = "recovery" if len(recoveries) == 1 else "recoveries"
        seconds = sum(recovery.seconds for recovery in recoveries)
        recovered = f", {len(recoveries)} {noun} ({format_duration(seconds)})"
    logs = short(outcome.path / LOGS)
    text = f"paceline: finished: {ranks}, {duration}{recovered}, logs {logs}"
    checkpoint = script_checkpoint(outcome.path)
    return f"{text}\n{_NEWEST}{checkpoint}" if checkpoint else text


def _count_finished(outcome: RunOutcome) -> tuple[int, list[str]]:
    """Counts the ranks of the last attempt that ended with status 0, and names the others."""
    ended: dict[int, bool] = {}
    hosts: dict[int, str] = {}
    is_over = False
    for event in outcome.events:
        if event.kind == "ended":
            is_over = True
        elif event.rank is not None and event.kind in ("rank started", "rank ended"):
            if is_over:  # the next attempt begins
                is_over, ended, hosts = False, {}, {}
            hosts[event.rank] = event.host
            ended[event.rank] = event.kind == "rank ended" and event["code"] == 0
    if not hosts:
        return outcome.ranks, []
    missing = [format_location(hosts[rank], rank) for rank in sorted(hosts) if not ended[rank]]
    return len(hosts) - len(missing), missing


def report_failure(outcome: RunOutcome) -> str:
    """Returns the report of a failed run: the first failure, its traceback, the logs."""
    result = outcome.result
    if result.failure is None:
        if result.interrupted is not None:
            text = f"paceline: stopped by {signal_name(result.interrupted)}: {short(outcome.path)}"
            return "\n".join([text, *_unsaved_note(outcome), *_script_hint(outcome),
                              *_resume_hint(outcome)])  # fmt: skip
        return ""
    failure = result.failure
    lines = [f"paceline: failed first: {failure.describe()}"]
    if failure.kind == "exception":
        lines[0] += f" ({describe_end(failure.code, failure.signal)})" if failure.code else ""
        lines += [_indent(failure.traceback)] if failure.traceback else []
    elif failure.rank is not None and not outcome.is_log_displayed:
        tail = outcome.log_tail(failure.host, failure.rank)
        tail = restore_local_paths(outcome.shipped_copies, failure.host, tail)
        lines += ["  its last lines:", _indent(tail)] if tail else []
    if result.num_other_failures:
        lines.append(f"  {pluralize(result.num_other_failures, 'other rank')} failed after it")
    lines.append(f"  logs: {short(outcome.path / LOGS)}")
    if failure.is_refusal:
        return "\n".join(lines)
    return "\n".join([*lines, *_script_hint(outcome), *_resume_hint(outcome)])


def _unsaved_note(outcome: RunOutcome) -> list[str]:
    """Returns a line on the last checkpoint if an interrupted training did not save."""
    if any(event.resumable for event in outcome.events):
        return []
    if not outcome.resumable:
        return _nothing_saved_note(outcome.events)
    step = saved_steps(outcome.events)[-1]
    return [f"  it had no time to save: the last checkpoint is of step {step:,}"]


def _nothing_saved_note(events: Sequence[Event]) -> list[str]:
    """Returns a line if an interrupted training that makes checkpoints has none."""
    kinds = {event.kind: event for event in events}
    if failed := kinds.get("checkpoint failed"):
        return [f"  nothing is saved: {failed['problem'] or failed['warning']}"]
    if "keeps checkpoints" not in kinds or "stopped" in kinds:  # before its first step
        return []
    return ["  it had no time to save: there is no checkpoint yet"]


def _resume_hint(outcome: RunOutcome) -> list[str]:
    """Returns a line with the command that resumes the run in its run directory."""
    if not outcome.resumable and not saved_steps(outcome.events):
        return []
    argv = [*outcome.command] or ["paceline", *sys.argv[1:]]
    return [f"to resume: {shell_text(resume_command(argv, short(outcome.path)))}"]


def _script_hint(outcome: RunOutcome) -> list[str]:
    """Returns lines on the script's newest checkpoint and the command that resumes from it."""
    if _resume_hint(outcome) or not (checkpoint := script_checkpoint(outcome.path)):
        return []
    if replica_difference(outcome.events):  # rank 0 saved the state of no training
        return [f"{_NEWEST}{checkpoint}"]
    argv = [*outcome.command] or ["paceline", *sys.argv[1:]]
    command = shell_text(resume_command(argv, short(outcome.path)))
    return [f"{_NEWEST}{checkpoint}",
            f"to resume, if the script loads its newest checkpoint: {command}",
            *older_checkpoint_note(argv, checkpoint)]  # fmt: skip


def older_checkpoint_note(argv: Sequence[str], newest: str) -> list[str]:
    """Returns a line if the command names another checkpoint of the script than its newest."""
    values = (argument.partition("=")[2] or argument for argument in argv)
    series = series_of(newest)
    older = next((value for value in values if value not in (series, newest)
                  and series_of(os.path.normpath(value)) == series), "")  # fmt: skip
    is_named = older and any(map(str.isalpha, series))  # not any number, if it is named "30"
    return [f"  it names {older}; the newest checkpoint is {newest}"] if is_named else []


def resume_command(argv: Sequence[str], path: str) -> list[str]:
    """Returns the command that resumes the run in the run directory ``path``."""
    if argv[1:2] == ["train"]:
        argv = _drop_resume_option(argv, Path(path))
    if any(argument.split("=")[0] == "--run-dir" for argument in argv):
        return [*argv]
    return [*argv[:2], "--run-dir", path, *argv[2:]]


def _drop_resume_option(argv: Sequence[str], run: Path) -> list[str]:
    """Returns the command of a recipe without a ``--resume`` that would discard newer steps."""
    arguments, remaining = list[str](), iter(argv)
    for argument in remaining:
        option, equals, value = argument.partition("=")
        if option != "--resume":
            arguments.append(argument)
            continue
        value = value if equals else next(remaining, "")
        is_start = value.isdecimal() or value in ("never", "best", "latest", "auto")
        if not is_start and not any(checkpoints(run)):  # the folder of another run
            arguments += [option, value]
    return arguments


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines())


def explain_difference(run_dir: Path, result: Result, events: tuple[Event, ...]) -> None:
    """Explains a run that ended with status 0 although its ranks trained different models."""
    if result.exit_code == 0 and replica_difference(events):
        explain_run(run_dir, result, events, is_shown=True)


def explain_run(run_dir: Path, result: Result, events: tuple[Event, ...],
                is_shown: bool) -> None:  # fmt: skip
    """Explains a run that went wrong: writes findings.json and shows the conclusion.

    A problem in here must not hide how the run ended, nor keep the user waiting for it.
    """
    with contextlib.suppress(PacelineError, OSError, ValueError):
        try:
            with time_limit(EXPLAIN_S):
                text = explain_failure(run_dir, result, events)
        except TimeoutError:
            text = f"paceline: to find the cause: paceline explain {short(run_dir)}"
        if is_shown and text:
            say(format_for(text, sys.stderr), err=True)


def explain_failure(run: Path, result: Result, events: tuple[Event, ...]) -> str:
    """Explains a run that went wrong: writes the conclusion beside it and returns it as text.

    The text is empty if it would only repeat the traceback that is shown anyway.
    """
    from paceline.explain.conclusion import conclude, to_findings
    from paceline.explain.evidence_reader import from_result
    from paceline.explain.rules import load_all
    from paceline.report.explanation import summary_lines

    conclusion = conclude(from_result(run, result, events), load_all())
    write_explanation(run, to_findings(conclusion))
    if not conclusion.matches or conclusion.matches[0][0].code in SHOWN_IN_LOG_TAIL:
        return ""
    first, *others = summary_lines(conclusion)
    return "\n".join([f"paceline: {first}", *(f"  {line}" for line in others)])


def report_run(job: Job, run_dir: Path) -> None:
    """Writes the page of a run that is over; a problem in here costs a warning."""
    if not job.report or not run_dir.is_dir() or read_owner(run_dir) is not None:
        return
    try:
        with time_limit(REPORT_S):
            from paceline.report.writer import write_at_end

            warning = write_at_end(run_dir)
    except TimeoutError as error:
        warning = f"the report was given up: {error}"
    text = f"warning: {warning}" if warning else f"report {short(run_dir / REPORT)}"
    say(format_for(f"paceline: {text}", sys.stderr), err=True)


def print_library_logs(run_dir: Path) -> None:
    """Shows what the libraries' debugging says that matters, and where all of it is."""
    from paceline.explain.evidence_reader import debug_logs
    from paceline.explain.libraries import summarize

    with contextlib.suppress(PacelineError, OSError, ValueError):
        lines = summarize(debug_logs(run_dir, ())) or ["nothing"]
        folder = short(run_dir / DEBUG)
        text = "\n".join([f"paceline: the libraries said ({folder}/HOST/RANK.log):",
                          *(f"  {line}" for line in lines)])  # fmt: skip
        say(format_for(text, sys.stderr), err=True)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, as a class of its own.

    Once a plain KeyboardInterrupt has passed through ``exec`` or ``eval``, as it can in anything
    that makes a data class, Python dies of SIGINT at the end, whatever status it is given.
    """


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in what takes longer, and Interrupted at Ctrl-C.

    By a signal, which reaches into regular expressions, too: a thread would go on beside us and,
    inside such an expression, keep the interpreter to itself.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_alarm(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    def on_interrupt(*_: object) -> None:
        raise Interrupted

    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, on_interrupt)
    previous = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)
