"""Shows and writes the end of a run: result, explanation, page, comparison with the forecast."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.verb import say
from paceline.spec.errors import PacelineError
from paceline.spec.events import Event, replica_difference
from paceline.spec.failure import Result
from paceline.spec.job import Job
from paceline.spec.rundir import DEBUG, REPORT
from paceline.spec.terminal import format_for

if TYPE_CHECKING:
    from paceline.launch.results.summary import RunOutcome


REPORT_S = 3.0  # for the page; usually it takes a tenth
EXPLAIN_S = 4.0  # for the explanation after a failure; `paceline explain` takes its time
# rules whose cause is in the last lines of a failed run, which are shown anyway
SHOWN_IN_LOG_TAIL = ("exception", "reported-by-program")


def report_end(job: Job, outcome: RunOutcome, on_success: Callable[[Path], None] | None) -> None:
    from paceline.launch.results.summary import report_failure, report_success

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
    if not text:
        from paceline.cli.measure.forecasts import compare_at_end, find_forecasts

        if find_forecasts(outcome.path)[1] and (comparison := compare_at_end(outcome.path)):
            say(comparison, err=True)
    report_run(job, outcome.path)


def explain_difference(run_dir: Path, result: Result, events: tuple[Event, ...]) -> None:
    """Explains a run that ended with status 0 although its ranks trained different models."""
    if result.exit_code == 0 and replica_difference(events):
        explain_run(run_dir, result, events, is_shown=True)


def explain_run(run_dir: Path, result: Result, events: tuple[Event, ...],
                is_shown: bool) -> None:  # fmt: skip
    """Explains a run that went wrong: writes findings.json and shows the conclusion.

    A problem in here must not hide how the run ended, nor keep the user waiting for it.
    """
    from paceline.rundir.directory import short

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
    from paceline.rundir.directory import write_explanation

    conclusion = conclude(from_result(run, result, events), load_all())
    write_explanation(run, to_findings(conclusion))
    if not conclusion.matches or conclusion.matches[0][0].code in SHOWN_IN_LOG_TAIL:
        return ""
    first, *others = summary_lines(conclusion)
    return "\n".join([f"paceline: {first}", *(f"  {line}" for line in others)])


def report_run(job: Job, run_dir: Path) -> None:
    """Writes the page of a run that is over; a problem in here costs a warning."""
    from paceline.rundir.directory import short
    from paceline.rundir.ownership import read_owner

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
    from paceline.rundir.directory import short

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
