"""Finds the run that a verb is about: the named one, the running one, or the newest."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from paceline.cli.cluster import read_chosen_cluster
from paceline.cli.dispatch import ssh_options
from paceline.cli.runs.describe import describe_tasks
from paceline.cli.runs.state import last_started_at, read_state
from paceline.cli.settings import setting
from paceline.rundir import records
from paceline.rundir.directory import short
from paceline.rundir.ownership import detached_of, owner_alive, read_of_last_start, read_owner
from paceline.schedulers.submission import read_submission
from paceline.spec import rundir as names
from paceline.spec.detached import DETACHED
from paceline.spec.errors import PacelineError, SettingError
from paceline.spec.formatting import shell_text
from paceline.spec.rundir import DEFAULT_PARENT
from paceline.spec.settings import Source

_MARKER_FILES = (names.PLAN, names.EVENTS, names.OWNER, names.BATCH, DETACHED)


def is_run(path: Path) -> bool:
    return any(records.is_regular(path / sign) for sign in _MARKER_FILES)


def newest_runs(parent: Path) -> list[str]:
    """Returns the names of the five runs below a folder that were started last, newest first."""
    runs = [path for path in records.folders_in(parent) if is_run(path)]
    return [path.name for path in sorted(runs, key=_last_started_at, reverse=True)[:5]]


def _last_started_at(path: Path) -> float:
    """Returns when a run was started last, or submitted; explaining it does not make it newer."""
    return last_started_at(path) or path.lstat().st_mtime


def find_run_folder(name: str | None) -> Path:
    """Returns the run directory: as named, below runs/, or the newest there."""
    parent = Path(names.DEFAULT_PARENT)
    if name is not None:
        for path in (Path(name), parent / name):
            if is_run(path):
                return path
    recent = newest_runs(parent)
    if name is not None:
        raise SettingError(
            f"{name} is not a run directory",
            found="; ".join(recent) or f"none in {parent}/",
            remedy="Name one of these" if recent else "Type this where you started the run",
        )
    if not recent:
        raise SettingError(
            f"there is no run in {parent.absolute()}",
            remedy="Name a run directory, or type this where you started the run",
        )
    return parent / recent[0]


def short_name(path: Path) -> str:
    """Returns the name by which users refer to a run: its name below runs/, else its path."""
    relative = Path(short(path.absolute()))
    return relative.name if relative.parent == Path(names.DEFAULT_PARENT) else str(relative)


def running_runs() -> list[Path]:
    """Returns the unfinished runs below runs/, newest first, including those of measurements."""
    top = [*records.folders_in(Path(names.DEFAULT_PARENT))]
    inner = [path for folder in top if not is_run(folder) for path in records.folders_in(folder)]
    running = [path for path in (*top, *inner) if is_run(path) and _is_running(path)]
    return sorted(running, key=lambda path: path.lstat().st_mtime, reverse=True)


def _is_running(path: Path) -> bool:
    owner = read_owner(path)
    if owner is not None and owner_alive(owner):
        return True
    if detached_of(path) is not None:
        return not read_state(path).is_over
    if read_submission(path) is None or read_of_last_start(path, names.RESULT):
        return False
    state = read_state(path)  # asks the scheduler
    return not state.is_over and state.has_launcher


def specified_run(ctx: click.Context) -> str | None:
    """Returns the run that is named as RUN or by the setting ``run-dir``."""
    run, run_dir = ctx.params["run"], ctx.params["run_dir"]
    if run is not None and setting(ctx, "run_dir").source is Source.COMMAND_LINE:
        raise SettingError("RUN and --run-dir cannot be combined")
    return str(run or run_dir) if run or run_dir else None


def current_run(ctx: click.Context) -> Path:
    """Returns the named run, else the running one, else the newest; SettingError if several run."""
    name = specified_run(ctx)
    if name is not None:
        return find_run_folder(name)
    running = running_runs()
    if len(running) > 1:
        running = [
            path for path in running if detached_of(path) is None or _is_running_remotely(path)
        ]
    if len(running) > 1:
        raise SettingError(
            f"{len(running)} runs are running", found="\n".join(map(str, running)),
            remedy=f"Name one of them: {running[0]}",
        )  # fmt: skip
    return running[0] if running else find_run_folder(None)


def _is_running_remotely(path: Path) -> bool:
    """Returns whether a run may still be going on on another host; asks that host if possible."""
    from paceline.cli.runs.sync import sync_run

    with contextlib.suppress(PacelineError, ConnectionError):
        sync_run(path)
    return not read_state(path).is_over


def require_single_run(path: Path, verb: str) -> Path:
    """Returns a run's folder. Raises SettingError for a job array: each of its tasks is a run."""
    job = read_submission(path)
    if job is None or not job.array:
        return path
    state = read_state(path)
    example = [verb, short(state.tasks[0].path)] if state.tasks else ["status", short(path)]
    raise SettingError(
        f"{path} is a job array: name one of its tasks, which have run directories of their own",
        found="\n".join([*filter(None, [state.progress]), *describe_tasks(state.tasks)]),
        remedy=shell_text(["paceline", *example]),
    )


def resolve_run(ctx: click.Context, *, allow_ended: bool = False) -> Path:
    """Returns the local folder of a verb's run, also of a run on hosts of -H, which gets one.

    Args:
        allow_ended: If none is named and none is running, take the newest, as below runs/.

    Raises:
        SettingError: No run matches, or several do.
    """
    import asyncio

    from paceline.cli.runs import detached

    is_typed = setting(ctx, "hosts").source is Source.COMMAND_LINE
    if not is_typed:
        try:
            return current_run(ctx)
        except SettingError:
            if ctx.params["hosts"] is None or specified_run(ctx) is None:
                raise
    cluster, ssh = read_chosen_cluster(ctx), ssh_options(ctx.params)
    detached_runs = asyncio.run(detached.find_detached(cluster.hosts, ssh))
    run = detached.choose_run(detached_runs, specified_run(ctx), ended=allow_ended)
    folder = Path(run.info.run)
    if run.host.local and folder.is_dir():
        return folder
    location = detached.detached_record(run, ssh)
    return detached.local_folder(run.info, location, Path(DEFAULT_PARENT))
