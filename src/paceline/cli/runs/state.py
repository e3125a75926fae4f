"""The state of a run, as its folder, its scheduler and its launcher tell it."""

from __future__ import annotations

import contextlib
import math
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.agent import control
from paceline.cli.runs.lost import LostRun, read_lost_run
from paceline.launch.terminal import run_state
from paceline.remote import this_machine
from paceline.rundir import records
from paceline.rundir.ownership import (
    detached_of,
    is_launcher,
    lost,
    owner_alive,
    owner_here,
    read_of_last_start,
    read_owner,
    start_id,
)
from paceline.schedulers.submission import SubmittedJob, read_submission, require_own_submission
from paceline.spec import rundir as names
from paceline.spec.detached import SupervisorLocation
from paceline.spec.errors import NodeError
from paceline.spec.events import events_of_start, read_events, replica_difference
from paceline.spec.failure import UNKNOWN, Result
from paceline.spec.schema import matches

TAIL_BYTES = 64 << 10  # of metrics.jsonl, to find the last record
END_STATES = ("finished", "stopped", "failed", "ended")
NOT_STARTED, NO_LAUNCHER = "not started", "no launcher"
MAX_AGE_S = 10.0  # of a batch, which may wait in its queue once more: it is written each second


@dataclass(frozen=True, slots=True)
class RunState:
    """What is known of a run.

    Attributes:
        word: ``running``, ``lost`` (its launcher died without a word), a word of
            :func:`end_state`, the scheduler's own word for a batch, ``not started``, or ``no
            launcher`` (Python itself started the script: whether it still runs is unknown).
        owner: Launcher's host, pid and start, while it runs.
        supervisor: Where it goes on without the command that started it; ``None`` when all is here.
        job: For a batch: what its scheduler knows it by.
        failure, straggler, hang: The first failure, and the rank that holds the others up or keeps
            them waiting, while it does; one line each.
        hang_time: When the hang was reported, in seconds since 1970; 0: not known.
        ranks: Where each rank is: rank, host, step, phase and seconds of silence.
        hosts: How busy each host is, as far as it is known: see ``launch/terminal/run_state.py``.
        replica_difference: Which ranks train different models, if :func:`read_state_and_replicas`
            has found any.
        waiting: Too few nodes are there, and it waits for others.
        progress: Of a job array: how many tasks have finished, and which failed.
        tasks: Of a job array: the runs of its tasks that have begun; failed ones first, then
            running ones.
    """

    path: Path
    word: str
    exit_code: int | None = None
    owner: dict[str, Any] | None = None
    job: SubmittedJob | None = None
    failure: str = ""
    last_metrics: dict[str, Any] | None = None
    straggler: str = ""
    ranks: Sequence[Mapping[str, Any]] = ()
    hang: str = ""
    hang_time: float = 0.0
    hosts: Sequence[Mapping[str, Any]] = ()
    supervisor: SupervisorLocation | None = None
    waiting: run_state.NodeWait | None = None
    lost: LostRun | None = None
    replica_difference: str = ""
    progress: str = ""
    tasks: tuple[RunState, ...] = ()

    @property
    def is_over(self) -> bool:
        return self.exit_code is not None or self.word in ("lost", *END_STATES)

    @property
    def has_launcher(self) -> bool:
        """Whether a launcher or a scheduler has started it."""
        return self.word not in (NOT_STARTED, NO_LAUNCHER)

    def to_json(self) -> dict[str, Any]:
        return {
            "run_dir": str(self.path),
            "state": self.word,
            "exit_code": self.exit_code,
            "owner": self.owner,
            "supervisor": self.supervisor.host if self.supervisor else None,
            "scheduler": self.job.scheduler.name if self.job else None,
            "job": self.job.job if self.job else None,
            **({f"{self.job.scheduler.name}_job": self.job.job} if self.job else {}),
            "first_failure": self.failure or None,
            "last_metrics": self.last_metrics,
            "straggler": self.straggler or None,
            "ranks": list(self.ranks),
            "hosts": list(self.hosts),
            "hang": self.hang or None,
            "waits": asdict(self.waiting) if self.waiting else None,
            "lost": asdict(self.lost) if self.lost else None,
            "replicas_differ": self.replica_difference or None,
            "tasks": [
                {"run_dir": str(task.path), "state": task.word, "exit_code": task.exit_code}
                for task in self.tasks
            ],
        }


def read_state_and_replicas(path: Path) -> RunState:
    """Reads the state of a run and, from its events, whether its replicas differ."""
    events = read_events(records.read_records(path / names.EVENTS))
    difference = replica_difference(events_of_start(events, start_id(path)))
    return replace(read_state(path), replica_difference=difference)


def read_state(path: Path) -> RunState:
    owner = read_owner(path)
    record = read_of_last_start(path, names.RESULT)
    result = Result.from_json(record or {})
    text = (records.recorded_cause(path) or result.failure.describe()) if result.failure else ""
    file = path / names.METRICS
    last_record = records.last_record(file, TAIL_BYTES, lambda line: line.get("split") != "pace")
    job = read_submission(path)
    tasks = _read_tasks(job) if job is not None else ()
    if job is not None and (state := job.state()) is not None:
        code = state.exit_code if state.is_over else None
        batch = RunState(path, state.describe(), code, owner, job, "", last_record,
                         progress=job.describe_tasks(state), tasks=tasks)  # fmt: skip
        return replace(batch, failure=text) if state.is_over else _with_ranks(batch, MAX_AGE_S)
    if owner is not None and owner_alive(owner):
        return _with_ranks(RunState(path, "running", None, owner, job, "", last_record))
    supervisor = detached_of(path)
    if supervisor is not None and record is None:
        return _with_ranks(
            RunState(path, "running", None, None, job, "", last_record, supervisor=supervisor)
        )
    if record is not None:
        code = result.exit_code if result.exit_code != UNKNOWN else None
        return RunState(path, end_state(result, code), code, None, job, text, last_record)
    if owner or lost(path):
        return RunState(path, "lost", None, None, job, "", last_record, lost=read_lost_run(path))
    if tasks:  # their scheduler does not know them any more
        first = next((task for task in tasks if not task.is_over), tasks[0])
        return RunState(path, first.word, first.exit_code, None, job, tasks=tasks)
    has_records = last_record is not None or records.is_regular(path / names.EVENTS)
    label = NO_LAUNCHER if has_records else NOT_STARTED
    return RunState(path, label, None, None, job, "", last_record)


def _read_tasks(job: SubmittedJob) -> tuple[RunState, ...]:
    def order(task: RunState) -> int:
        return 2 if task.exit_code == 0 else 0 if task.is_over else 1

    return tuple(sorted(map(read_state, job.task_folders().values()), key=order))


def last_started_at(path: Path) -> float:
    """Returns when a run was started last, in seconds since 1970; 0 if no host was reached."""
    first = next(iter(records.read_records(path / names.EVENTS, 1 << 12)), {})
    connected = records.last_record(
        path / names.EVENTS, records.RECORDS_BYTES,
        lambda event: event.get("event") == "connected" and not event.get("late"),
        b'"connected"',
    )  # fmt: skip
    return records.as_float((connected or first).get("time"))


def end_state(result: Result, exit_code: int | None) -> str:
    """Returns how a run ended, one of :data:`END_STATES`; ``ended`` if that is unknown."""
    if result.interrupted is not None:
        return "stopped"
    if exit_code or result.failure is not None or result.error:
        return "failed"
    return "ended" if exit_code is None else "finished"


def _with_ranks(state: RunState, max_age_s: float = math.inf) -> RunState:
    ranks = _read_ranks(state.path, max_age_s)
    if not ranks:
        return state
    return replace(state, straggler=_straggler(state.path), ranks=ranks["ranks"],
                   hang=ranks["hang"], hang_time=ranks.get("hang_time", 0.0),
                   hosts=ranks.get("hosts", ()), waiting=ranks["waits"])  # fmt: skip


def _read_ranks(path: Path, max_age_s: float = math.inf) -> dict[str, Any]:
    """Reads the ranks' positions that the launcher has written last; empty if unknown."""
    record = read_of_last_start(path, names.RANKS)
    if record is None or not matches(run_state.RANKS_SCHEMA, record):
        return {}
    ago = max(0.0, time.time() - record["time"])
    if ago > max_age_s:
        return {}
    waiting = record.get("waits")
    for rank in record["ranks"]:
        if rank.get("silent_s") is not None:
            rank["silent_s"] = round(rank["silent_s"] + ago, 1)
    return {**record, "waits": None if waiting is None else run_state.parse_waiting(waiting)}


def _straggler(path: Path) -> str:
    """Returns the last report of a rank that slows the others down; empty if it keeps up again."""
    events = read_events(records.read_records(path / names.EVENTS, TAIL_BYTES))
    relevant = [
        event for event in events if event.kind in ("straggler", "straggler over", "started")
    ]
    return str(relevant[-1]["text"] or "") if relevant and relevant[-1].kind == "straggler" else ""


def end_run(state: RunState, immediately: bool) -> None:
    """Tells the scheduler, or the launcher, to end a run.

    The folder only says whom to ask: it may have come from anybody.
    """
    if state.job is not None:
        require_own_submission(state.path, state.job)
        state.job.cancel(kill=immediately)
        return
    owner = state.owner or {}
    require_owner_here(state.path, owner)
    with contextlib.suppress(OSError, ValueError):
        answer = request_launcher(state.path, owner, {"do": "stop", "now": immediately})
        if answer is not None and "error" not in answer:
            return
    if not is_launcher(state.path, owner):
        raise NodeError(
            f"process {owner['pid']} is not the launcher of {state.path}: it is left alone",
            found=f"{state.path / names.OWNER} names it; no launcher answers for this folder",
            remedy=f"If no run is active there: rm {shlex.quote(str(state.path / names.OWNER))}",
        )
    for _ in range(2 if immediately else 1):
        this_machine.signal_process(int(owner["pid"]), owner["start"], signal.SIGTERM)


def require_owner_here(path: Path, owner: dict[str, Any]) -> None:
    """Raises NodeError if the launcher of a run is on another machine."""
    if not owner_here(owner):
        host, place = owner.get("host"), shlex.quote(str(path.absolute()))
        raise NodeError(
            f"the launcher of {path} runs on {host}",
            remedy=f"Type on {host}: paceline stop {place}, or paceline save {place}",
        )


def request_launcher(
    path: Path, owner: Mapping[str, Any], message: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Returns the answer of this folder's launcher; ``None`` if none listens.

    Its socket is found by the run's id, and a folder may hold the id of another run.

    Raises:
        TimeoutError, ValueError: It listens, and gives no answer.
    """
    run_id = str(owner.get("run_id", ""))
    if not control.RUN_ID.fullmatch(run_id):
        return None
    answer = control.request(run_id, {"do": "state"}) or {}
    state = answer.get("state")
    with contextlib.suppress(OSError, ValueError):
        if isinstance(state, dict) and path.samefile(str(state.get("run_dir", ""))):
            return control.request(run_id, dict(message))
    return None
