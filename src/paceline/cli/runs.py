"""Which run is meant from any terminal; ``paceline status`` and ``paceline stop``."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from paceline.cli.flags import of_a_run
from paceline.cli.sources import setting
from paceline.cli.verb import Verb, say
from paceline.remote import this_machine
from paceline.rundir import records
from paceline.rundir.ownership import owner_alive, owner_here, read_owner
from paceline.schedulers.submission import BATCH_FILE, Submitted, found_in
from paceline.spec import rundir as names
from paceline.spec.errors import NodeError, SettingError
from paceline.spec.events import read_events
from paceline.spec.failure import UNKNOWN, Result
from paceline.spec.settings import Source
from paceline.spec.terminal import clean, for_reader

LAST_BYTES = 64 << 10  # of metrics.jsonl, to find the last record
LOOK_EVERY_S = 0.2  # while a run is being stopped
PATIENCE_S = 30.0
_SIGNS = (names.PLAN, names.EVENTS, names.OWNER, BATCH_FILE)


@dataclass(frozen=True, slots=True)
class RunState:
    """What is known of a run.

    Attributes:
        path: Its directory.
        word: ``running``, ``ended``, ``lost`` (its launcher died without a word), or the
            scheduler's own word for a batch.
        exit_code: Once it has ended.
        owner: Launcher's host, pid and start, while it runs.
        job: For a batch: what its scheduler knows it by.
        failure: The first failure, one line.
        last: The last recorded metrics.
        slow: The rank that holds the others up, one line, while it does.
    """

    path: Path
    word: str
    exit_code: int | None = None
    owner: dict[str, Any] | None = None
    job: Submitted | None = None
    failure: str = ""
    last: dict[str, Any] | None = None
    slow: str = ""

    @property
    def over(self) -> bool:
        return self.exit_code is not None or self.word in ("lost", "ended")

    def to_json(self) -> dict[str, Any]:
        return {
            "run_dir": str(self.path),
            "state": self.word,
            "exit_code": self.exit_code,
            "owner": self.owner,
            "scheduler": self.job.scheduler.name if self.job else None,
            "job": self.job.job if self.job else None,
            **({f"{self.job.scheduler.name}_job": self.job.job} if self.job else {}),
            "first_failure": self.failure or None,
            "last_metrics": self.last,
            "straggler": self.slow or None,
        }


def find_run(given: str | None) -> Path:
    """The run directory that is meant: as named, below runs/, or the newest there."""
    parent = Path(names.DEFAULT_PARENT)
    if given is not None:
        for path in (Path(given), parent / given):
            if is_run(path):
                return path
        raise SettingError(
            f"{given} is no run directory", found="; ".join(newest(parent)) or f"none in {parent}/",
            remedy="Name one of these" if newest(parent) else "Type this where you started the run",
        )  # fmt: skip
    found = newest(parent)
    if not found:
        raise SettingError(
            f"there is no run in {parent.absolute()}",
            remedy="Name a run directory, or type this where you started the run",
        )
    return parent / found[0]


def current_run(ctx: click.Context) -> Path:
    """The run that a verb is about: as named, else the one that is running, else the newest.

    SettingError where several are running: which one is meant is for the user to say.
    """
    named = named_run(ctx)
    if named is not None:
        return find_run(named)
    found = still_running()
    if len(found) > 1:
        raise several(found)
    return found[0] if found else find_run(None)


def named_run(ctx: click.Context) -> str | None:
    """The run that is named as RUN, or by the setting ``run-dir``."""
    run, run_dir = ctx.params["run"], ctx.params["run_dir"]
    if run is not None and setting(ctx, "run_dir").source is Source.COMMAND_LINE:
        raise SettingError("RUN and --run-dir exclude each other")
    return str(run or run_dir) if run or run_dir else None


def several(found: Sequence[Path]) -> SettingError:
    """The error where the user has to choose."""
    listed = "\n".join(str(path) for path in found)
    return SettingError(f"{len(found)} runs are running", found=listed,
                        remedy=f"Name one of them: {found[0]}")  # fmt: skip


def still_running() -> list[Path]:
    """The runs below runs/ that have not ended, the newest first; those of a measurement, too."""
    top = [*records.folders_in(Path(names.DEFAULT_PARENT))]
    inner = [path for folder in top if not is_run(folder) for path in records.folders_in(folder)]
    found = [path for path in (*top, *inner) if is_run(path) and _is_running(path)]
    return sorted(found, key=lambda path: path.lstat().st_mtime, reverse=True)


def _is_running(path: Path) -> bool:
    owner = read_owner(path)
    if owner is not None and owner_alive(owner):
        return True
    if found_in(path) is None or records.is_regular(path / names.RESULT):
        return False
    state = look_at(path)  # asks the scheduler
    return not state.over and state.word != "not started"


def is_run(path: Path) -> bool:
    return any(records.is_regular(path / sign) for sign in _SIGNS)


def newest(parent: Path, count: int = 5) -> list[str]:
    """Names of the runs below a folder, the newest first."""
    found = [path for path in records.folders_in(parent) if is_run(path)]
    return [p.name for p in sorted(found, key=lambda p: p.lstat().st_mtime, reverse=True)][:count]


def look_at(path: Path) -> RunState:
    """The present state of a run."""
    owner = read_owner(path)
    said = records.read_object(path / names.RESULT)
    result = Result.from_json(said or {})
    text = result.failure.describe() if result.failure else ""
    recorded = records.read_records(path / names.METRICS, LAST_BYTES)
    last = next((one for one in reversed(recorded) if one.get("split") != "pace"), None)
    job = found_in(path)
    if job is not None and (state := job.state()) is not None:
        code = state.exit_code if state.over else None
        return RunState(path, state.describe(), code, owner, job, text, last)
    if owner is not None and owner_alive(owner):
        return RunState(path, "running", None, owner, job, "", last, _straggler(path))
    if said is not None:
        code = result.exit_code if result.exit_code != UNKNOWN else None
        return RunState(path, "ended", code, None, job, text, last)
    return RunState(path, "lost" if owner else "not started", None, None, job, "", last)


def _straggler(path: Path) -> str:
    """What was said last of a rank that holds the others up; nothing when it keeps up again."""
    told = read_events(records.read_records(path / names.EVENTS, LAST_BYTES))
    found = [event for event in told if event.kind in ("straggler", "straggler over", "started")]
    return str(found[-1]["text"] or "") if found and found[-1].kind == "straggler" else ""


@click.command("status", cls=Verb)
@of_a_run
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@click.pass_context
def status(ctx: click.Context, /, as_json: bool, **_: object) -> None:
    """Say whether RUN is running, and how it ended.

    Without RUN: the one below runs/ that is running, else the newest there.

    A batch is described in its scheduler's own words.
    """
    state = look_at(current_run(ctx))
    if as_json:
        click.echo(json.dumps(state.to_json(), indent=2))
    else:
        say(for_reader(describe(state), sys.stdout))


def describe(state: RunState) -> str:
    """A few lines for people."""
    ended = f", exit status {state.exit_code}" if state.exit_code is not None else ""
    lines = [f"{state.path}: {state.word}{ended}"]
    if state.job:
        lines.append(f"  {state.job.title}")
    if state.owner and state.word == "running":
        owner = state.owner
        lines.append(
            f"  launcher: process {owner['pid']} on {owner['host']} since {owner['since']}"
        )
    if state.last:
        shown = ", ".join(
            f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in list(state.last.items())[:6]
        )
        lines.append(f"  last record: {shown}")
    if state.slow:
        lines.append(f"  slow: {state.slow}")
    if state.failure:
        lines.append(f"  failed first: {state.failure}")
    return "\n".join(lines)


@click.command("stop", cls=Verb)
@of_a_run
@click.option("--now", is_flag=True, help="Do not give the ranks time to save anything.")
@click.pass_context
def stop(ctx: click.Context, /, now: bool, **_: object) -> None:
    """End RUN on all its nodes; return when it is over.

    Without RUN: the one below runs/ that is running.
    """
    if named_run(ctx) is None and not still_running():
        say("paceline: no run below runs/ is running", err=True)
        return
    path = current_run(ctx)
    state = look_at(path)
    if state.over or state.word == "not started":
        say(clean(f"{path}: {state.word} already"), err=True)
        return
    end(state, now)
    deadline = time.monotonic() + PATIENCE_S
    while not look_at(path).over:
        if time.monotonic() > deadline:
            raise NodeError(f"{path} has not ended within {PATIENCE_S:.0f} s", remedy="--now")
        time.sleep(LOOK_EVERY_S)
    say(clean(f"{path}: stopped"), err=True)


def end(state: RunState, now: bool) -> None:
    """Tells the scheduler, or the launcher by its recorded identity."""
    if state.job is not None:
        state.job.cancel(kill=now)
        return
    owner = state.owner or {}
    if not owner_here(owner):
        raise NodeError(
            f"the launcher of {state.path} runs on {owner.get('host')}",
            remedy=f"Type this there: ssh {owner.get('host')}",
        )
    for _ in range(2 if now else 1):
        this_machine.send(int(owner["pid"]), owner.get("start", 0), signal.SIGTERM)
