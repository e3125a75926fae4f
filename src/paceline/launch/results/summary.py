"""What a run left, and the last that the user reads of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.launch.failure_analysis import describe_end
from paceline.rundir.directory import short
from paceline.rundir.records import open_regular
from paceline.spec import rundir as names
from paceline.spec.events import Event, ShippedCopy, restore_local_paths
from paceline.spec.failure import Result, format_location, signal_name
from paceline.spec.formatting import format_duration, shell_text

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
        resumable: The training was asked to stop, and there is a checkpoint of it.
        ranks: How many were planned.
        homes: Where shipped copies of folders of this machine were.
        told: The last lines of the rank that failed first stand on the screen already.
        command: The words that were typed for it, the program first; empty: those of this process.
    """

    path: Path
    result: Result
    events: tuple[Event, ...]
    metrics: dict[str, Any]
    seconds: float
    begins: Mapping[str, int] = field(default_factory=dict)
    resumable: bool = False
    ranks: int = 0
    homes: Sequence[ShippedCopy] = ()
    told: bool = False
    command: tuple[str, ...] = ()

    @property
    def shown(self) -> Path:
        """The run directory as people type it from here."""
        return Path(short(self.path))


def report_success(outcome: RunOutcome) -> str:
    """One line at the end of a run that went well."""
    finished, missing = _at_the_end(outcome)
    ranks = f"{finished} rank{'s' * (finished != 1)}"
    if missing:
        few = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if missing[3:] else "")
        ranks += f" ({few} missing at the end)"
    took = format_duration(outcome.seconds)
    recovered = ""
    if recoveries := outcome.result.recoveries:
        noun = "recovery" if len(recoveries) == 1 else "recoveries"
        seconds = sum(recovery.seconds for recovery in recoveries)
        recovered = f", {len(recoveries)} {noun} ({format_duration(seconds)})"
    logs = short(outcome.path / names.LOGS)
    return f"paceline: finished: {ranks}, {took}{recovered}, logs {logs}"


def _at_the_end(outcome: RunOutcome) -> tuple[int, list[str]]:
    """How many ranks have ended with status 0, and which others had a part in the last attempt."""
    ended: dict[int, bool] = {}
    hosts: dict[int, str] = {}
    over = False
    for event in outcome.events:
        if event.kind == "ended":
            over = True
        elif event.rank is not None and event.kind in ("rank started", "rank ended"):
            if over:  # of the next attempt
                over, ended, hosts = False, {}, {}
            hosts[event.rank] = event.host
            ended[event.rank] = event.kind == "rank ended" and event["code"] == 0
    if not hosts:
        return outcome.ranks, []
    missing = [format_location(hosts[rank], rank) for rank in sorted(hosts) if not ended[rank]]
    return len(hosts) - len(missing), missing


def report_failure(outcome: RunOutcome) -> str:
    """The last thing the user reads: who failed first, its traceback, where the rest is."""
    result = outcome.result
    if result.failure is None:
        if result.interrupted is not None:
            text = f"paceline: stopped by {signal_name(result.interrupted)}: {short(outcome.path)}"
            return "\n".join([text, *_last_checkpoint(outcome), *_to_resume(outcome)])
        return ""
    failure = result.failure
    lines = [f"paceline: failed first: {failure.describe()}"]
    if failure.kind == "exception":
        lines[0] += f" ({describe_end(failure.code, failure.signal)})" if failure.code else ""
        lines.append(_indent(failure.traceback))
    elif failure.rank is not None and not outcome.told:
        name = names.log_file(failure.host, failure.rank)
        if last := last_lines(outcome.path / name, outcome.begins.get(name, 0)):
            last = restore_local_paths(outcome.homes, failure.host, last)
            lines += ["  its last lines:", _indent(last)]
    if result.num_other_failures:
        noun = "rank" if result.num_other_failures == 1 else "ranks"
        lines.append(f"  {result.num_other_failures} other {noun} failed after it")
    lines.append(f"  logs: {short(outcome.path / names.LOGS)}")
    return "\n".join([*lines, *_to_resume(outcome)])


def _last_checkpoint(outcome: RunOutcome) -> list[str]:
    """Says where an interrupted training can be resumed that had no time to save."""
    if not outcome.resumable or any(event.resumable for event in outcome.events):
        return []
    step = _saved_steps(outcome.events)[-1]
    return [f"  it had no time to save: the last checkpoint is of step {step:,}"]


def is_resumable(result: Result, events: Iterable[Event]) -> bool:
    """Whether a training was asked to stop, and there is a checkpoint of it."""
    events = [*events]
    interrupted = result.interrupted is not None
    return any(event.resumable for event in events) or (interrupted and bool(_saved_steps(events)))


def _saved_steps(events: Iterable[Event]) -> list[int]:
    return [event["step"] for event in events if event.kind in ("checkpoint", "resumed")]


def _to_resume(outcome: RunOutcome) -> list[str]:
    """The command that was typed, as it goes on in the same run directory."""
    if not outcome.resumable:
        return []
    argv = [*outcome.command] or ["paceline", *sys.argv[1:]]
    return [f"to resume: {shell_text(to_resume(argv, short(outcome.path)))}"]


def to_resume(argv: Sequence[str], path: str) -> list[str]:
    """The words of a command as it goes on in the run directory ``path``."""
    if any(word.split("=")[0] == "--run-dir" for word in argv):
        return [*argv]
    return [*argv[:2], "--run-dir", path, *argv[2:]]


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
