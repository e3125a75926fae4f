"""Which run is meant from any terminal; ``paceline status`` and ``paceline stop``."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from paceline.agent import control
from paceline.cli.flags import of_a_left_run
from paceline.cli.lost import Lost, lost_run
from paceline.cli.lost import lines as lost_lines
from paceline.cli.sources import setting
from paceline.cli.verb import Verb, say
from paceline.launch import board
from paceline.remote import this_machine
from paceline.rundir import records
from paceline.rundir.directory import short
from paceline.rundir.ownership import (
    detached_of,
    ended_since,
    is_launcher,
    lost,
    owner_alive,
    owner_here,
    read_owner,
)
from paceline.schedulers.submission import (
    BATCH_FILE,
    SubmittedJob,
    read_submission,
    require_own_submission,
)
from paceline.spec import rundir as names
from paceline.spec.detached import DETACHED, Detached
from paceline.spec.errors import NodeError, PacelineError, SettingError
from paceline.spec.events import read_events
from paceline.spec.failure import UNKNOWN, Result, place
from paceline.spec.figures import bit_rate, lasting, which_epoch
from paceline.spec.settings import Source
from paceline.spec.shapes import fits
from paceline.spec.terminal import clean, for_reader

LAST_BYTES = 64 << 10  # of metrics.jsonl, to find the last record
LOOK_EVERY_S = 0.2  # while a run is being stopped
PATIENCE_S = 30.0
END_WORDS = ("finished", "stopped", "failed", "ended")
FRESH_S = 10.0  # of a batch, which may wait in its queue once more: it is written each second
SILENT_S = 5.0  # of a rank that is told of: others say where they are each second
_NAMED = 4  # ranks in a line
_SIGNS = (names.PLAN, names.EVENTS, names.OWNER, BATCH_FILE, DETACHED)


@dataclass(frozen=True, slots=True)
class RunState:
    """What is known of a run.

    Attributes:
        path: Its directory.
        word: ``running``, ``lost`` (its launcher died without a word), a word of
            :func:`end_word`, or the scheduler's own word for a batch.
        exit_code: Once it has ended.
        owner: Launcher's host, pid and start, while it runs.
        away: Where it goes on without the command that started it; ``None`` when all is here.
        job: For a batch: what its scheduler knows it by.
        failure: The first failure, one line.
        last: The last recorded metrics.
        slow: The rank that holds the others up, one line, while it does.
        ranks: Where each rank is: rank, host, step, phase and seconds of silence.
        hang: Who keeps the others waiting, one line, while it does.
        hosts: How busy each host is, as far as it is known: see ``launch/board.py``.
        waits: Too few nodes are there, and it waits for others.
        lost: Of one that was lost: what is known of its end.
    """

    path: Path
    word: str
    exit_code: int | None = None
    owner: dict[str, Any] | None = None
    job: SubmittedJob | None = None
    failure: str = ""
    last: dict[str, Any] | None = None
    slow: str = ""
    ranks: Sequence[Mapping[str, Any]] = ()
    hang: str = ""
    hosts: Sequence[Mapping[str, Any]] = ()
    away: Detached | None = None
    waits: board.Waiting | None = None
    lost: Lost | None = None

    @property
    def over(self) -> bool:
        return self.exit_code is not None or self.word in ("lost", *END_WORDS)

    def to_json(self) -> dict[str, Any]:
        return {
            "run_dir": str(self.path),
            "state": self.word,
            "exit_code": self.exit_code,
            "owner": self.owner,
            "supervisor": self.away.host if self.away else None,
            "scheduler": self.job.scheduler.name if self.job else None,
            "job": self.job.job if self.job else None,
            **({f"{self.job.scheduler.name}_job": self.job.job} if self.job else {}),
            "first_failure": self.failure or None,
            "last_metrics": self.last,
            "straggler": self.slow or None,
            "ranks": list(self.ranks),
            "hosts": list(self.hosts),
            "hang": self.hang or None,
            "waits": asdict(self.waits) if self.waits else None,
            "lost": self.lost.to_json() if self.lost else None,
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


def called(path: Path) -> str:
    """A run as people name it to our verbs here: its name below runs/, else its path."""
    away = Path(short(path.absolute()))
    return away.name if away.parent == Path(names.DEFAULT_PARENT) else str(away)


def current_run(ctx: click.Context) -> Path:
    """The run that a verb is about: as named, else the one that is running, else the newest.

    SettingError where several are running: which one is meant is for the user to say.
    """
    named = named_run(ctx)
    if named is not None:
        return find_run(named)
    found = still_running()
    if len(found) > 1:
        found = [path for path in found if detached_of(path) is None or _goes_on(path)]
    if len(found) > 1:
        raise several(found)
    return found[0] if found else find_run(None)


def _goes_on(path: Path) -> bool:
    """Whether a run goes on on another host, which is asked; one that cannot be asked may."""
    from paceline.cli.elsewhere import up_to_date

    with contextlib.suppress(PacelineError, ConnectionError):
        up_to_date(path)
    return not look_at(path).over


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
    if detached_of(path) is not None:
        return not look_at(path).over
    if read_submission(path) is None or records.is_regular(path / names.RESULT):
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
    metrics = path / names.METRICS
    last = records.last_record(metrics, LAST_BYTES, lambda one: one.get("split") != "pace")
    job = read_submission(path)
    if job is not None and (state := job.state()) is not None:
        code = state.exit_code if state.is_over else None
        batch = RunState(path, state.describe(), code, owner, job, text, last)
        return batch if state.is_over else _going_on(batch, FRESH_S)
    if owner is not None and owner_alive(owner):
        return _going_on(RunState(path, "running", None, owner, job, "", last))
    away = detached_of(path)
    if away is not None and not ended_since(path, away):
        return _going_on(RunState(path, "running", None, None, job, "", last, away=away))
    if said is not None:
        code = result.exit_code if result.exit_code != UNKNOWN else None
        return RunState(path, end_word(result, code), code, None, job, text, last)
    if owner or lost(path):
        return RunState(path, "lost", None, None, job, "", last, lost=lost_run(path))
    return RunState(path, "not started", None, None, job, "", last)


def end_word(result: Result, exit_code: int | None) -> str:
    """How a run ended, in one of :data:`END_WORDS`; ``ended`` if nothing says how."""
    if result.interrupted is not None:
        return "stopped"
    if exit_code or result.failure is not None or result.error:
        return "failed"
    return "ended" if exit_code is None else "finished"


def _going_on(state: RunState, fresh_s: float = math.inf) -> RunState:
    """The same with where everybody is, if that was written within so many seconds."""
    where = _where(state.path, fresh_s)
    if not where and fresh_s < math.inf:
        return state
    return replace(state, slow=_straggler(state.path), ranks=where.get("ranks", ()),
                   hang=where.get("hang", ""), hosts=where.get("hosts", ()),
                   waits=where.get("waits"))  # fmt: skip


def _where(path: Path, fresh_s: float = math.inf) -> dict[str, Any]:
    """Where everybody is, as the launcher has written it last; empty where that is not known."""
    said = records.read_object(path / names.RANKS)
    if said is None or not fits(board.SHAPE, said):
        return {}
    ago = max(0.0, time.time() - said["time"])
    if ago > fresh_s:
        return {}
    waits = said.get("waits")
    return {**said, "ranks": [_since(one, ago) for one in said["ranks"]],
            "waits": None if waits is None else board.waiting_of(waits)}  # fmt: skip


def _since(rank: dict[str, Any], ago: float) -> dict[str, Any]:
    silent_s = rank.get("silent_s")
    return rank if silent_s is None else {**rank, "silent_s": round(silent_s + ago, 1)}


def _straggler(path: Path) -> str:
    """What was said last of a rank that holds the others up; nothing when it keeps up again."""
    told = read_events(records.read_records(path / names.EVENTS, LAST_BYTES))
    found = [event for event in told if event.kind in ("straggler", "straggler over", "started")]
    return str(found[-1]["text"] or "") if found and found[-1].kind == "straggler" else ""


@click.command("status", cls=Verb)
@of_a_left_run
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@click.pass_context
def status(ctx: click.Context, /, as_json: bool, **_: object) -> None:
    """Say whether RUN is running, and how it ended.

    Without RUN: the one below runs/ that is running, else the newest there.

    With -H also a run that was started from another machine.

    A batch is described in its scheduler's own words.
    """
    from paceline.cli.elsewhere import meant, up_to_date

    path, problem = meant(ctx, ended=True), None
    try:
        up_to_date(path)
    except PacelineError as error:  # what came before is shown first
        problem = error
    state = look_at(path)
    if as_json:
        click.echo(json.dumps(state.to_json(), indent=2))
    else:
        say(for_reader(describe(state), sys.stdout))
    if problem is not None:
        raise problem


def describe(state: RunState) -> str:
    """A few lines for people."""
    ended = f", exit status {state.exit_code}" if state.exit_code is not None else ""
    waits = ", waits for nodes" if state.waits else ""
    lines = [f"{state.path}: {state.word}{ended}{waits}"]
    if state.waits:
        lines.append(f"  {state.waits.words}")
    if state.job:
        lines.append(f"  {state.job.title}")
    if state.owner and state.word == "running":
        owner = state.owner
        lines.append(
            f"  launcher: process {owner['pid']} on {owner['host']} since {owner['since']}"
        )
    if state.away:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.away.since))
        lines.append(f"  supervisor: on {state.away.host} since {since}")
    if state.lost:
        lines += [f"  {line}" for line in lost_lines(state.lost, time.time())]
    if state.last:
        lines.append(f"  last record{_written(state.last)}: {_figures(state.last)}")
    # while nodes are waited for, what has become of the ranks of the last start is no news
    ranks = [one for one in state.ranks if not (state.waits and one.get("trouble"))]
    lines += [f"  {line}" for line in [*whereabouts(ranks), *loads(state.hosts)]]
    if state.hang:
        lines.append(f"  hangs: {state.hang}")
    if state.slow:
        lines.append(f"  slow: {state.slow}")
    if state.failure:
        lines.append(f"  failed first: {state.failure}")
    return "\n".join(lines)


def _written(record: Mapping[str, Any]) -> str:
    """`` (12:03:44)``: when a record was written, by this machine's clock."""
    at = records.as_float(record.get("time"))
    return f" ({time.strftime('%H:%M:%S', time.localtime(at))})" if 0 < at < 1e11 else ""


def _figures(record: Mapping[str, Any]) -> str:
    shown = [(name, value) for name, value in record.items() if name != "time"]
    return ", ".join(_figure(name, value) for name, value in shown[:6])


def _figure(name: str, value: Any) -> str:
    """One of a record's, for people."""
    if name == "epoch" and (epoch := records.as_int(value)) is not None:
        return which_epoch(epoch)
    return f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"


def whereabouts(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines that say who is where; ranks that are at the same place share one."""
    groups: dict[tuple[int, str, bool], list[Mapping[str, Any]]] = {}
    for one in ranks:
        step = -1 if one.get("step") is None else one["step"]
        ended = "ended" if one.get("state") == "ended" else one.get("trouble")
        key = (step, ended or one["phase"], not ended and silence(one) >= SILENT_S)
        groups.setdefault(key, []).append(one)
    lines = []
    for (step, phase, silent), group in sorted(groups.items()):
        who = [place(one["host"], one["rank"]) for one in group[:_NAMED]]
        more = f" and {len(group) - len(who)} more" if len(group) > len(who) else ""
        if len(group) == len(ranks) > 1:
            who, more = [f"all {len(ranks)} ranks"], ""
        since = f", no word for {lasting(min(map(silence, group)))}" if silent else ""
        at = "" if step < 0 else f"step {step}, "
        lines.append(f"{', '.join(who)}{more}: {at}{phase}{since}")
    return lines


def silence(rank: Mapping[str, Any]) -> float:
    """Seconds since a rank's last word; 0 of one that tells nothing."""
    return float(rank.get("silent_s") or 0.0)


def loads(hosts: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each of some hosts that says how busy it is."""
    lines = []
    for one in hosts[:_NAMED]:
        used = [("CPU", one.get("cpu")), ("memory", one.get("memory"))]
        used += [(f"GPU {at}", load) for at, load in enumerate(one.get("gpus") or ())]
        moved = [("receives", one.get("in_bps")), ("sends", one.get("out_bps"))]
        parts = [f"{name} {part:.0%}" for name, part in used if part is not None]
        parts += [f"{way} {bit_rate(rate)}" for way, rate in moved if rate is not None]
        said = ", ".join(parts)
        if one.get("state") == "lost":
            said = str(one.get("trouble") or "lost")
        if said:
            lines.append(f"{one['name']}: {said}")
    if lines and len(hosts) > _NAMED:
        lines.append(f"and {len(hosts) - _NAMED} more hosts: --json")
    return lines


@click.command("stop", cls=Verb)
@of_a_left_run
@click.option("--now", is_flag=True, help="Do not give the ranks time to save anything.")
@click.pass_context
def stop(ctx: click.Context, /, now: bool, **_: object) -> None:
    """End RUN on all its nodes; return when it is over.

    Without RUN: the one below runs/ that is running.

    With -H also a run that was started from another machine.
    """
    from paceline.cli.elsewhere import meant, stop_there

    asked = setting(ctx, "hosts").source is Source.COMMAND_LINE
    if named_run(ctx) is None and not asked and not still_running():
        say("paceline: no run below runs/ is running", err=True)
        return
    path = meant(ctx)
    state = look_at(path)
    if state.over or state.word == "not started":
        say(clean(f"{path}: {state.word} already"), err=True)
        return
    if state.away is not None:
        ran = stop_there(path, now, PATIENCE_S)
        say(clean(f"{path}: {'stopped' if ran else f'{look_at(path).word} already'}"), err=True)
        return
    end(state, now)
    deadline = time.monotonic() + PATIENCE_S
    while not look_at(path).over:
        if time.monotonic() > deadline:
            raise NodeError(f"{path} has not ended within {PATIENCE_S:.0f} s", remedy="--now")
        time.sleep(LOOK_EVERY_S)
    over = look_at(path)  # it may have finished by itself just before
    say(clean(f"{path}: {'stopped' if over.job is not None else over.word}"), err=True)


def end(state: RunState, now: bool) -> None:
    """Tells the scheduler, or the launcher.

    What stands in the folder only says whom to ask: it may have come from anybody.
    """
    if state.job is not None:
        require_own_submission(state.path, state.job)
        state.job.cancel(kill=now)
        return
    owner = state.owner or {}
    if not owner_here(owner):
        raise NodeError(
            f"the launcher of {state.path} runs on {owner.get('host')}",
            remedy=f"Type this there: ssh {owner.get('host')}",
        )
    with contextlib.suppress(OSError, ValueError):
        answer = asked(state.path, owner, {"do": "stop", "now": now})
        if answer is not None and "error" not in answer:
            return
    if not is_launcher(state.path, owner):
        raise NodeError(
            f"process {owner['pid']} is not the launcher of {state.path}: it is left alone",
            found=f"{state.path / names.OWNER} names it; no launcher answers for this folder",
            remedy=f"If no run goes on there: rm {shlex.quote(str(state.path / names.OWNER))}",
        )
    for _ in range(2 if now else 1):
        this_machine.send(int(owner["pid"]), owner["start"], signal.SIGTERM)


def asked(path: Path, owner: Mapping[str, Any], wish: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the launcher of this very folder answers; ``None``: none listens.

    Its socket is found by the run's id, and a folder may hold the id of another run.

    Raises:
        TimeoutError, ValueError: It listens, and gives no answer.
    """
    run_id = str(owner.get("run_id", ""))
    if not control.RUN_ID.fullmatch(run_id):
        return None
    answer = control.ask(run_id, {"do": "state"}) or {}
    state = answer.get("state")
    with contextlib.suppress(OSError, ValueError):
        if isinstance(state, dict) and path.samefile(str(state.get("run_dir", ""))):
            return control.ask(run_id, dict(wish))
    return None
