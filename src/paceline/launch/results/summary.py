"""The outcome of a run, and the report that the user reads at its end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.launch.terminal.screen import NOISE
from paceline.rundir.directory import short
from paceline.rundir.outputs import script_checkpoint
from paceline.rundir.records import open_regular
from paceline.spec import rundir as names
from paceline.spec.events import (
    Event,
    ShippedCopy,
    log_offsets,
    replica_difference,
    restore_local_paths,
)
from paceline.spec.failure import Result, describe_end, format_location, signal_name
from paceline.spec.formatting import format_duration, pluralize, shell_text

LOG_TAIL_LINES = 20
LOG_TAIL_BYTES = 16384


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """Outcome of a finished run.

    Attributes:
        events: The events of events.jsonl.
        metrics: The last reported value of every metric.
        seconds: From the call to the end.
        resumable: Whether the training was asked to stop and has a checkpoint.
        ranks: The number of planned ranks.
        shipped_copies: Copies of this machine's folders on the hosts.
        is_log_displayed: Whether the screen already shows the last lines of the first failure.
        command: The typed command, the program first; empty for that of this process.
        is_refused: Nothing was trained, and the records are those of the earlier run.
    """

    path: Path
    result: Result
    events: tuple[Event, ...]
    metrics: dict[str, Any]
    seconds: float
    resumable: bool = False
    ranks: int = 0
    shipped_copies: Sequence[ShippedCopy] = ()
    is_log_displayed: bool = False
    command: tuple[str, ...] = ()
    is_refused: bool = False

    @property
    def display_path(self) -> Path:
        """The run directory as the user types it."""
        return Path(short(self.path))

    def log_tail(self, host: str, rank: int) -> str:
        """The last lines that a rank wrote since it started last; empty if it wrote none."""
        log = self.path / names.log_file(host, rank)
        return log_tail(log, log_offsets(self.events).get((host, rank), 0))


def report_success(outcome: RunOutcome) -> str:
    """Returns one line for a run that went well."""
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
    logs = short(outcome.path / names.LOGS)
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
    lines.append(f"  logs: {short(outcome.path / names.LOGS)}")
    if failure.is_refusal:
        return "\n".join(lines)
    return "\n".join([*lines, *_script_hint(outcome), *_resume_hint(outcome)])


def _unsaved_note(outcome: RunOutcome) -> list[str]:
    """Returns a line on the last checkpoint if an interrupted training had no time to save."""
    if not outcome.resumable or any(event.resumable for event in outcome.events):
        return []
    step = _saved_steps(outcome.events)[-1]
    return [f"  it had no time to save: the last checkpoint is of step {step:,}"]


def is_resumable(result: Result, events: Iterable[Event]) -> bool:
    """Whether a training was asked to stop and has a checkpoint."""
    events = [*events]
    was_recorded = result.failure is None or result.failure.kind != "record"
    was_stopped = result.interrupted is not None or not was_recorded
    return any(event.resumable for event in events) or (was_stopped and bool(_saved_steps(events)))


def _saved_steps(events: Iterable[Event]) -> list[int]:
    return [event["step"] for event in events if event.kind in ("checkpoint", "resumed")]


def _resume_hint(outcome: RunOutcome) -> list[str]:
    """Returns a line with the command that resumes the run in its run directory."""
    if not outcome.resumable and not _saved_steps(outcome.events):
        return []
    argv = [*outcome.command] or ["paceline", *sys.argv[1:]]
    return [f"to resume: {shell_text(resume_command(argv, short(outcome.path)))}"]


_NEWEST = "paceline: newest checkpoint of the script: "


def _script_hint(outcome: RunOutcome) -> list[str]:
    """Returns lines on the script's newest checkpoint and the command that resumes from it."""
    if _resume_hint(outcome) or not (checkpoint := script_checkpoint(outcome.path)):
        return []
    if replica_difference(outcome.events):  # rank 0 saved the state of no training
        return [f"{_NEWEST}{checkpoint}"]
    argv = [*outcome.command] or ["paceline", *sys.argv[1:]]
    command = shell_text(resume_command(argv, short(outcome.path)))
    return [f"{_NEWEST}{checkpoint}",
            f"to resume, if the script loads its newest checkpoint: {command}"]  # fmt: skip


def resume_command(argv: Sequence[str], path: str) -> list[str]:
    """Returns the command that resumes the run in the run directory ``path``."""
    if any(argument.split("=")[0] == "--run-dir" for argument in argv):
        return [*argv]
    return [*argv[:2], "--run-dir", path, *argv[2:]]


def log_tail(log: Path, begins: int) -> str:
    """Returns the last lines of a log after its first ``begins`` bytes; empty if it has none."""
    try:
        with open_regular(log) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(begins, size - LOG_TAIL_BYTES))
            data = file.read(LOG_TAIL_BYTES)
    except OSError:
        return ""
    lines = [line for line in data.decode(errors="replace").splitlines() if not NOISE.search(line)]
    return "\n".join(lines[-LOG_TAIL_LINES:])


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines())
