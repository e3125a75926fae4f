"""Finding a run from any terminal, and what has become of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from paceline.cli.sources import setting
from paceline.rundir import records
from paceline.rundir.ownership import owner_alive, read_owner
from paceline.schedulers.submission import BATCH_FILE, Submitted, found_in
from paceline.spec import rundir as names
from paceline.spec.errors import SettingError
from paceline.spec.failure import UNKNOWN, Result
from paceline.spec.settings import Source

LAST_BYTES = 64 << 10  # of metrics.jsonl, to find the last record
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
    """

    path: Path
    word: str
    exit_code: int | None = None
    owner: dict[str, Any] | None = None
    job: Submitted | None = None
    failure: str = ""
    last: dict[str, Any] | None = None

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
    last = next(reversed(records.read_records(path / names.METRICS, LAST_BYTES)), None)
    job = found_in(path)
    if job is not None and (state := job.state()) is not None:
        code = state.exit_code if state.over else None
        return RunState(path, state.describe(), code, owner, job, text, last)
    if owner is not None and owner_alive(owner):
        return RunState(path, "running", None, owner, job, "", last)
    if said is not None:
        code = result.exit_code if result.exit_code != UNKNOWN else None
        return RunState(path, "ended", code, None, job, text, last)
    return RunState(path, "lost" if owner else "not started", None, None, job, "", last)
