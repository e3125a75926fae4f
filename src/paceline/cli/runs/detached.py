"""Detached runs on hosts: finds them, and makes their folders here."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.agent.files import safe_paths
from paceline.cli.runs.state import end_state
from paceline.remote import this_machine
from paceline.remote.channel import LoginError
from paceline.remote.fanout import try_connect_hosts
from paceline.remote.openssh import SshOptions
from paceline.rundir import detached_file, records
from paceline.rundir.ownership import detached_of
from paceline.spec.detached import DETACHED, DetachedRecord, SupervisorLocation
from paceline.spec.errors import NodeError, SettingError
from paceline.spec.failure import Result
from paceline.spec.hosts import Host

GOODBYE_S = 0.5


@dataclass(frozen=True, slots=True)
class DetachedRun:
    """A run in its supervisor's folder on a host.

    Attributes:
        alive: Whether its supervisor lives; ``None``: on another host, which shares the folder.
        result, ranks, metrics: Its files of these names, the end of the last; may be empty.
    """

    host: Host
    info: DetachedRecord
    alive: bool | None
    result: str
    ranks: str
    metrics: str

    @property
    def state(self) -> str:
        """``running``, ``lost``, or how it ended (:func:`end_state`)."""
        if self.info.ended is not None or (self.alive is False and self.result):
            record = records.parse_json(self.result)
            result = Result.from_json(record if isinstance(record, dict) else {})
            return end_state(result, None if self.info.ended is None else self.info.exit_code)
        return "lost" if self.alive is False else "running"

    @property
    def name(self) -> str:
        """What its folder was called where it was started."""
        return Path(self.info.launched_in).name or self.info.name or self.info.run_id


@dataclass(frozen=True, slots=True)
class DetachedRuns:
    """Detached runs that hosts report, and hosts that could not be asked, each with the reason."""

    runs: tuple[DetachedRun, ...] = ()
    unreachable: tuple[tuple[str, str], ...] = ()


async def find_detached(
    hosts: Sequence[Host], ssh: SshOptions, discard: Sequence[str] = ()
) -> DetachedRuns:
    """Asks hosts for the runs that were left there; removes those of ``discard`` that are over."""
    pythons = [host.python or this_machine.default_python() for host in hosts]
    outcomes = await try_connect_hosts(hosts, pythons, ssh)
    unreachable = [(answered.host.name, f"{answered.refusal.cause}: {answered.refusal.details}")
               for answered in outcomes if isinstance(answered, LoginError)]  # fmt: skip
    runs: list[DetachedRun] = []
    seen: set[str] = set()
    for channel in outcomes:
        if isinstance(channel, LoginError):
            continue
        try:
            for run_id in discard:
                await channel.request("discard_run", run_id=run_id, fetched=True)
            answer = await channel.request("detached_runs")
        except (NodeError, ConnectionError) as problem:
            unreachable.append((channel.host.name, str(problem).partition("\n")[0]))
            continue
        finally:
            await channel.close(GOODBYE_S)
        for answered in answer["runs"]:
            record = records.parse_json(answered["about"])
            run = DetachedRecord.read(record) if isinstance(record, dict) else None
            if run is not None and run.run_id == answered["run_id"] not in seen:
                seen.add(run.run_id)
                files = (answered[name] for name in ("result", "where", "metrics"))
                runs.append(DetachedRun(channel.host, run, answered["alive"], *files))
    return DetachedRuns(tuple(runs), tuple(unreachable))


def choose_run(
    detached_runs: DetachedRuns, name: str | None, *, ended: bool = False
) -> DetachedRun:
    """Chooses the run that is meant, ``ended``: also the newest; SettingError unless it is one."""
    runs = detached_runs.runs
    if name is None:
        candidates = [run for run in runs if run.state == "running"]
        if not candidates and ended:
            candidates = sorted(runs, key=lambda run: run.info.started)[-1:]
        problem = "no run is running on these hosts"
    else:
        folder_name = Path(name).name
        candidates = [run for run in runs if folder_name in (run.name, run.info.run_id)]
        problem = f"there is no run {name} on these hosts"
    if len(candidates) == 1:
        return candidates[0]
    listed = [f"{run.name} on {run.host.name}: {run.state}" for run in runs]
    unreachable = [
        f"{host} could not be asked: {reason}" for host, reason in detached_runs.unreachable
    ]
    remedy = "Name one of these behind the hosts" if listed else "paceline runs -H …"
    if candidates:
        problem = f"{len(candidates)} runs match"
        listed = [f"{run.name} on {run.host.name} ({run.info.run_id})" for run in candidates]
        remedy = f"Name one of them: {candidates[0].info.run_id}"
    raise SettingError(problem, found="\n".join([*listed, *unreachable]), remedy=remedy)


def detached_record(run: DetachedRun, ssh: SshOptions) -> SupervisorLocation:
    """Returns the record that leads to a run from a machine that did not start it."""
    host, config = run.host, str(ssh.config.absolute()) if ssh.config else None
    return SupervisorLocation(
        run.info.run_id, host.name, host.address, str(Path(run.info.run).parent),
        run.info.started, host.user, host.port, host.identity_file,
        host.python or this_machine.default_python(), config,
    )  # fmt: skip


def local_folder(run: DetachedRecord, detached: SupervisorLocation, parent: Path) -> Path:
    """Returns the folder of a run below ``parent``; makes it if necessary, or raises NodeError."""
    try:
        with _lock_folder(parent):
            return _find_or_make_folder(run, detached, parent)
    except OSError as error:
        raise NodeError(f"no folder can be made in {parent}", found=str(error)) from None


@contextlib.contextmanager
def _lock_folder(parent: Path) -> Iterator[None]:
    """Lets only one of several commands make a folder for the same run."""
    safe_paths.make_folder(str(parent))
    fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a disk without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _find_or_make_folder(run: DetachedRecord, detached: SupervisorLocation, parent: Path) -> Path:
    from paceline.rundir.directory import fresh_path

    for path in records.folders_in(parent):
        record = SupervisorLocation.read(records.read_object(path / DETACHED) or {})
        if record is not None and record.run_id == run.run_id:
            if detached_of(path) is not None and not detached_file.is_authentic(path):
                detached_file.write(path, detached)
            return path
    name = Path(run.launched_in).name
    path = parent / name
    if not name or name.startswith(".") or path.exists():
        path = fresh_path(parent, run.name or "run")
    path.mkdir(mode=0o700)
    detached_file.write(path, detached)
    return path
